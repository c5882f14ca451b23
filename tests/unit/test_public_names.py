"""What the package offers: names, and how little an import of it costs."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import qwen_l40s

ROOT = Path(__file__).resolve().parents[2]
NOT_PACKAGE = {"tests", "docs", "build", "dist", "out"}
HEAVY = (
    *("torch", "diffusers", "transformers", "numpy", "PIL", "scipy", "safetensors", "triton"),
    *("comfy", "comfy_api", "comfy_execution", "comfy_kitchen", "folder_paths"),  # ComfyUI's own
)


def module_names():
    """The import name of every module of the package."""
    for file in sorted(ROOT.rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        outside = parts[0] in NOT_PACKAGE or any(part.startswith(".") for part in parts)
        if not outside and parts[-1] != "__main__":
            inside = parts[:-1] if parts[-1] == "__init__" else parts
            yield ".".join(("qwen_l40s", *inside))


def test_all_is_what_is_public():
    public = [
        name
        for name, value in vars(qwen_l40s).items()
        if name == "__version__" or not (name.startswith("_") or isinstance(value, ModuleType))
    ]
    assert sorted(qwen_l40s.__all__) == sorted(public)


@pytest.mark.parametrize("module", qwen_l40s.PUBLIC)
def test_what_other_packages_may_import_is_there(module):
    found = importlib.import_module(f"qwen_l40s.{module}")
    for name in qwen_l40s.PUBLIC[module]:
        value = getattr(found, name)
        assert value.__doc__ and value.__module__.startswith(f"qwen_l40s.{module}")


def test_every_module_imports_and_offers_what_it_says():
    wrong = {}
    for name in module_names():
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] in HEAVY:
                continue
            raise
        missing = [entry for entry in getattr(module, "__all__", []) if not hasattr(module, entry)]
        if missing:
            wrong[name] = missing
    assert wrong == {}


def test_import_and_parser_load_nothing_heavy():
    code = (
        "import importlib.util as u, sys\n"
        "spec = u.spec_from_file_location('qwen_l40s', sys.argv[1])\n"
        "sys.modules['qwen_l40s'] = module = u.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "from qwen_l40s.cli import COMMANDS, build_parser\n"
        "build_parser(COMMANDS).format_help()\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    command = [sys.executable, "-c", code, str(ROOT / "__init__.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_an_estimate_loads_few_modules():
    code = (
        "import atexit, runpy, sys\n"
        "def show():\n"
        "    names = [name for name in sys.modules if name.partition('.')[0] == 'qwen_l40s']\n"
        "    print(len(names), sorted(names), file=sys.stderr)\n"
        "atexit.register(show)\n"
        "sys.argv = [sys.argv[1], 'estimate', '--card', 'L40S']\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    command = [sys.executable, "-c", code, str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0
    assert 10 < int(done.stderr.split()[0]) <= 45, done.stderr
