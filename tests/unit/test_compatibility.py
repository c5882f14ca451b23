"""What is said of a ComfyUI that is not as the package knows it, and that everything is asked for.

That the real ComfyUI is as expected is checked in tests/host/test_nodes.py.
"""

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from qwen_l40s.hosts.comfyui.contract import CALLED, what_is_off

ROOT = Path(__file__).resolve().parents[2]
KINDS = inspect.Parameter


def function(*parameters: str, kind=KINDS.POSITIONAL_OR_KEYWORD):
    """Something callable with these parameters."""

    def called():
        raise AssertionError("it is only asked for its parameters")

    called.__signature__ = inspect.Signature([KINDS(name, kind) for name in parameters])
    return called


def put(module: ModuleType, name: str, value: object) -> None:
    *path, last = name.split(".")
    target = module
    for part in path:
        if not hasattr(target, part):
            setattr(target, part, SimpleNamespace())
        target = getattr(target, part)
    setattr(target, last, value)


@pytest.fixture
def host(monkeypatch):
    """{module: fake of ComfyUI's} that is all well, in sys.modules."""
    modules = {"comfyui_version": ModuleType("comfyui_version")}
    modules["comfyui_version"].__version__ = "0.33.0"
    for name, entries in CALLED.items():
        modules[name] = ModuleType(name)
        # Shorter names first: a class before its methods.
        for entry in sorted(entries):
            put(modules[name], entry, function(*entries[entry]))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    what_is_off.cache_clear()
    yield modules
    what_is_off.cache_clear()


def sentence():
    what_is_off.cache_clear()
    text = what_is_off()
    assert text.endswith(".") and "\n" not in text and ". " not in text, text
    return text


@pytest.mark.parametrize("version", ["0.33.0", "0.33.0rc1", "0.33.12", "0.34.0", "1.0.0"])
def test_nothing_is_off(host, version):
    host["comfyui_version"].__version__ = version
    assert what_is_off() is None


@pytest.mark.parametrize("version", ["0.32.9", "0.3.40", "nightly"])
def test_too_old(host, version):
    host["comfyui_version"].__version__ = version
    assert sentence() == (
        f"ComfyUI is {version} and Qwen-Image L40S needs 0.33.0 or newer: update ComfyUI."
    )


def test_no_version(host, monkeypatch):
    expected = "this ComfyUI does not tell its version: Qwen-Image L40S needs 0.33.0 or newer."
    del host["comfyui_version"].__version__
    assert sentence() == expected
    monkeypatch.setitem(sys.modules, "comfyui_version", None)
    assert sentence() == expected


EVERY_NAME = [(module, name) for module, names in CALLED.items() for name in names]


@pytest.mark.parametrize(("module", "name"), EVERY_NAME)
def test_a_name_that_is_gone(host, module, name):
    host["comfyui_version"].__version__ = "0.40.0"
    path, _, last = name.rpartition(".")
    target = getattr(host[module], path) if path else host[module]
    delattr(target, last)
    text = sentence()
    assert f"ComfyUI 0.40.0 has no {module}.{name}" in text
    assert "update Qwen-Image L40S, and until then use ComfyUI's own loaders" in text


def test_a_module_that_is_gone(host, monkeypatch):
    for module in CALLED:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            assert f"has no {module}.{next(iter(CALLED[module]))}," in sentence()


EVERY_PARAMETER = [
    (module, name, parameter)
    for module, names in CALLED.items()
    for name, parameters in names.items()
    for parameter in parameters
]


@pytest.mark.parametrize(("module", "name", "parameter"), EVERY_PARAMETER)
def test_a_parameter_that_is_gone(host, module, name, parameter):
    others = [other for other in CALLED[module][name] if other != parameter]
    put_only(host[module], name, function(*others, "new"))
    assert f"has no parameter {parameter!r} in {module}.{name}, which" in sentence()


def put_only(module: ModuleType, name: str, value: object) -> None:
    """Replaces an entry and keeps what hangs on it, such as a class's methods."""
    target = module
    for part in name.split("."):
        owner, target = target, getattr(target, part)
    for attribute, kept in vars(target).items():
        if attribute != "__signature__":
            setattr(value, attribute, kept)
    setattr(owner, name.rpartition(".")[2], value)


def test_a_function_that_takes_any_keyword_is_no_fault(host):
    put(host["comfy.lora"], "load_lora", function("options", kind=KINDS.VAR_KEYWORD))
    assert what_is_off() is None


def test_a_function_that_became_something_else(host):
    host["comfy.lora"].load_lora = 3
    assert "has comfy.lora.load_lora as a int" in sentence()


def test_it_is_looked_at_once(host):
    assert what_is_off() is None
    host["comfyui_version"].__version__ = "0.1.0"
    assert what_is_off() is None


def test_importing_it_imports_neither_comfyui_nor_torch():
    code = (
        "import importlib.util as u, sys\n"
        "spec = u.spec_from_file_location('qwen_l40s', sys.argv[1])\n"
        "sys.modules['qwen_l40s'] = module = u.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "import qwen_l40s.hosts.comfyui.contract\n"
        "heavy = {'torch', 'comfy', 'comfyui_version', 'comfy_kitchen', 'folder_paths'}\n"
        "print(sorted(heavy & {name.partition('.')[0] for name in sys.modules}))\n"
    )
    command = [sys.executable, "-c", code, str(ROOT / "__init__.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


# --- the list against the code


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return node.id if isinstance(node, ast.Name) else ""


def names_used(source: str) -> set[str]:
    """Every full name of ComfyUI's that a module imports or reaches by attributes."""
    tree = ast.parse(source)
    modules = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(dotted(node))
    # Parts of a longer name: the module itself, and what is reached through an entry.
    found = {name for name in found if name not in modules}
    return {
        name for name in found if name.startswith(("comfy.", "comfy_kitchen.", "folder_paths."))
    }


def test_everything_that_the_package_uses_is_on_the_list():
    known = {f"{module}.{name}" for module, names in CALLED.items() for name in names}
    missing = {}
    files = [*(ROOT / "hosts" / "comfyui").glob("*.py"), *(ROOT / "nodes").glob("*.py")]
    assert len(files) > 20
    for file in files:
        for name in names_used(file.read_text(encoding="utf-8")):
            module = any(entry.startswith(f"{name}.") for entry in known)
            if name not in known and not module:
                missing.setdefault(file.name, []).append(name)
    assert missing == {}
