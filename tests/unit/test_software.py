"""What is said of packages that are missing, old, broken or of no use here."""

import sys
from types import SimpleNamespace

import pytest

from qwen_l40s.machine import packages as software
from qwen_l40s.machine.card import InstalledCard, InstalledCards, State
from qwen_l40s.verdict import first_line


@pytest.mark.parametrize(
    ("version", "cudnn", "state"),
    [
        ("2.9.1+cu128", 91002, State.LIMITED),
        ("2.9.1+cu128", 91500, State.USABLE),
        ("2.8.0+cu128", 91002, State.USABLE),
        ("2.10.0+cu128", 91002, State.USABLE),
    ],
)
def test_torch_2_9_with_an_old_cudnn_is_limited(version, cudnn, state):
    torch = SimpleNamespace(
        __version__=version,
        version=SimpleNamespace(cuda="12.8"),
        backends=SimpleNamespace(cudnn=SimpleNamespace(version=lambda: cudnn)),
    )
    check = software.torch_capability(torch)
    assert check.state is state
    assert ("nvidia-cudnn-cu12" in check.why.remedy) is (state is State.LIMITED)


def test_a_foreign_cudnn_limits_torch_and_does_not_stop_the_check():
    def version():
        raise RuntimeError("cuDNN version incompatibility\nmore")

    torch = SimpleNamespace(
        __version__="2.11.0+cu130",
        version=SimpleNamespace(cuda="13.0"),
        backends=SimpleNamespace(cudnn=SimpleNamespace(version=version)),
    )
    check = software.torch_capability(torch)
    assert check.state is State.LIMITED
    assert check.why.fact.endswith("; cuDNN version incompatibility")


@pytest.fixture
def package_folder(tmp_path, monkeypatch):
    """A folder on sys.path; gives the function that puts a package into it."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, source: str, version: str | None = None) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(source)
        if version:
            info = tmp_path / f"{name}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")

    yield write
    for name in [name for name in sys.modules if name.startswith("qwen_probe_")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("source", "version", "floor", "needs", "reason"),
    [
        (
            "raise OSError('undefined: x\\nmore')",
            "1.0",
            "",
            "",
            "1.0, but its import fails: undefined: x",
        ),
        (
            "def __getattr__(name):\n    raise RuntimeError('no ' + name)\n",
            "1.0",
            "",
            "Pipeline",
            "1.0, but its import fails: no Pipeline",
        ),
        ("raise AssertionError('imported')", "0.9.12", "0.10", "", "0.9.12, needs 0.10 or newer"),
        (None, None, "1.2", "", "not installed"),
    ],
    ids=["broken", "lazy and broken", "old and not imported", "missing"],
)
def test_a_package_that_is_of_no_use_says_why(
    package_folder, source, version, floor, needs, reason
):
    if source:
        package_folder("qwen_probe_x", source, version)
    package = software.Package("qwen_probe_x", "qwen_probe_x", floor, needs)
    check, module = software.check_package(package)
    assert (module, check.state, check.why.fact) == (None, State.NOT_USABLE, reason)
    assert check.why.remedy.startswith("pip install ") and package.requirement in check.why.remedy


def test_a_package_of_unknown_version_is_not_called_old(package_folder):
    package_folder("qwen_probe_bare", "")
    check, _ = software.check_package(software.Package("qwen_probe_bare", "qwen_probe_bare", "1.0"))
    assert check.state is State.USABLE


def test_an_error_of_tritons_compiler_is_told_by_its_last_line():
    class CompilationError(Exception):
        pass

    text = "at 23:13:\n    x = tl.load(x_ptr)\n        ^\nAttributeError('no type')"
    assert first_line(CompilationError(text)) == "AttributeError('no type')"
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(ValueError()) == "ValueError"


def test_triton_is_not_imported_without_a_card(package_folder):
    package_folder("triton", "raise AssertionError('imported')", "1.0")
    check = software.check_triton(InstalledCards())
    assert not check.usable
    assert "there is no usable GPU" in check.why.fact


@pytest.mark.parametrize(
    ("python", "pip", "line"),
    [
        ("python_embeded/python.exe", True, r"python_embeded\python.exe -m pip install"),
        ("ComfyUI/.venv/Scripts/python.exe", False, '.venv/Scripts/python.exe" -m uv pip install'),
        ("my venv/Scripts/python.exe", True, 'my venv/Scripts/python.exe" -m pip install'),
    ],
    ids=["portable", "desktop", "venv"],
)
def test_on_windows_the_line_that_installs_triton_is_of_this_python(monkeypatch, python, pip, line):
    def found(name):
        return (pip and name == "pip") or None

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(sys, "executable", f"/C/{python}")
    monkeypatch.setattr(software, "find_spec", found)
    check = software.check_triton(InstalledCards(usable=(InstalledCard("card", (8, 9), 1),)))
    assert not check.usable and check.name == "triton-windows"
    assert f"{line} -U triton-windows, then restart ComfyUI" in check.why.remedy
