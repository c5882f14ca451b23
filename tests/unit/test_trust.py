"""What runs code by its name, and what the page shows as text."""

import re
from pathlib import Path

from test_project_text import FILES, calls, tree_of
from test_registry import published

ROOT = Path(__file__).resolve().parents[2]
# What runs code by its name: of the package, and in a clone alone where the registry has it not.
RUNS = {
    "__main__.py: importlib": "the package from a folder of any name",
    "cli/__init__.py: importlib": "the command that is asked for, alone",
    "families/registry.py: importlib": "what a family does in the one host that runs",
    "fleet/server.py: subprocess": "starts ComfyUI, and `submit` for a warm-up",
    "fleet/supervisor.py: subprocess": "`nvidia-smi -L` counts the cards",
    "hosts/comfyui/contract.py: importlib": "modules of ComfyUI, whose signatures are compared",
    "hosts/comfyui/qwen_image.py: importlib": "ComfyUI's model code, which an older one has not",
    "machine/card.py: ctypes": "the driver's NVML, for cards and limits",
    "machine/links.py: ctypes": "the driver's CUDA library, for copies from card to card",
    "machine/memory.py: ctypes": "the system's madvise, for pages of a file that was read",
    "machine/packages.py: importlib": "an optional package, to say why its import fails",
    "optimizations/kernels/compiler.py: importlib": "a kernel of this package, in its process",
    "optimizations/kernels/compiler.py: subprocess": "compiles kernels beside ComfyUI",
    "optimizations/attention/backends.py: importlib": "FlashAttention, under one of two names",
}


def test_what_runs_code_by_name_is_listed_with_its_reason():
    kinds = {
        "importlib": r".*\b(import_module|spec_from_file_location|__import__)",
        "subprocess": r"subprocess\.\w+|os\.(system|popen|exec\w+|spawn\w+)|.*create_subprocess.*",
        "ctypes": r"ctypes\.\w*DLL",
        "eval": r"(torch|np|numpy)\.load|eval|exec|compile|pickle\.loads?|.*\.unsafe_load",
    }
    found = set()
    for file in FILES:
        name = file.relative_to(ROOT).as_posix()
        if name.split("/")[0] in ("bench", "tools"):
            continue
        for call, _ in calls(tree_of(file)):
            found |= {f"{name}: {it}" for it, rule in kinds.items() if re.fullmatch(rule, call)}
    assert found == set(RUNS)
    shipped = {it for it in RUNS if it.split(":")[0] in published()}
    assert not any("subprocess" in it or "eval" in it for it in shipped)


def test_the_page_gets_texts_and_no_html():
    for file in (ROOT / "web").rglob("*.js"):
        text = file.read_text(encoding="utf-8")
        html = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
        assert re.findall(html, text) == [], file
