"""What is said of a ComfyUI that is not as the package knows it.

That the real ComfyUI is as expected is checked in tests/host/test_nodes.py.
"""

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from qwen_l40s.caches import forget
from qwen_l40s.hosts.comfyui.contract import (
    HOOKS,
    KNOWN,
    is_known,
    news_of_host,
    unsupported_host,
)

ROOT = Path(__file__).resolve().parents[2]
KINDS = inspect.Parameter


def function(*parameters: str, kind=KINDS.POSITIONAL_OR_KEYWORD):
    """Something callable with these parameters; called with none, it gives its namespace `made`."""

    def called():
        return called.made

    called.made = SimpleNamespace()
    called.__signature__ = inspect.Signature([KINDS(name, kind) for name in parameters])
    return called


def owner_of(module: ModuleType, name: str):
    """What the last part of the name is an attribute of, and that part."""
    *path, last = name.split(".")
    target = module
    for part in path:
        attribute = part.removesuffix("()")
        if not hasattr(target, attribute):
            setattr(target, attribute, SimpleNamespace())
        target = getattr(target, attribute)
        target = target() if part.endswith("()") else target
    return target, last


def put(module: ModuleType, name: str, value: object) -> None:
    owner, last = owner_of(module, name)
    setattr(owner, last, value)


@pytest.fixture
def host(monkeypatch):
    """{module: fake of ComfyUI's} that is all well, in sys.modules."""
    modules = {"comfyui_version": ModuleType("comfyui_version")}
    modules["comfyui_version"].__version__ = "0.33.0"
    for name, entries in HOOKS.items():
        modules[name] = ModuleType(name)
        # Shorter names first: a class before its methods.
        for entry in sorted(entries):
            put(modules[name], entry, function(*entries[entry]))
    for name, entries in KNOWN.items():
        for entry in entries:
            put(modules[name], entry, function("self", *entries[entry]))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    forget()
    yield modules
    forget()


def sentence():
    forget()
    text = str(unsupported_host())
    assert text.endswith(".") and "\n" not in text and ". " not in text, text
    return text


def calls_of_comfyui():
    """(file, dotted name, arguments) of every call of a function of `comfy` in hosts/comfyui."""
    for file in sorted((ROOT / "hosts" / "comfyui").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "comfy"
            for alias in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                first, *rest = ast.unparse(node.func).split(".")
                name = ".".join([names.get(first, first), *rest])
                if name.startswith("comfy."):
                    yield file.name, name, [keyword.arg for keyword in node.keywords], node.args


def test_every_call_with_more_than_one_argument_is_listed():
    listed = {
        f"{module}.{name}": known
        for module, names in HOOKS.items()
        for name, known in names.items()
    }
    # What takes any arguments; and what is looked for before it is called.
    free = {"comfy.ops.CastBiasWeightContext"}
    optional = {
        "comfy.multigpu.create_multigpu_deepclones",
        "comfy.ops._eager_input_act",
        "comfy.ops._linear_residual",
        # Of Qwen-Image-2.1 alone, from ComfyUI 0.37 on.
        "comfy.ldm.wan.vae2_2.WanVAE",
        "comfy.sd1_clip.SDClipModel.__init__",
    }
    missing = []
    for file, name, keywords, positional in calls_of_comfyui():
        if len(keywords) + len(positional) < 2 or name in free | optional:
            continue
        known = listed.get(name, ())
        new = {"transformer_options", "preferred_attention", None}  # through its **kwargs
        if len(positional) > len(known) or not set(keywords) - new <= set(known):
            missing.append((file, name, len(positional), keywords))
    assert missing == []


@pytest.mark.parametrize("version", ["0.33.0", "0.33.0rc1", "0.33.12", "0.34.0", "1.0.0"])
def test_nothing_is_off(host, version):
    host["comfyui_version"].__version__ = version
    assert unsupported_host() is None


@pytest.mark.parametrize("version", ["0.32.9", "0.3.40", "nightly"])
def test_too_old(host, version):
    host["comfyui_version"].__version__ = version
    assert version in sentence() and "0.33.0" in sentence()


def test_no_version(host, monkeypatch):
    del host["comfyui_version"].__version__
    assert "0.33.0" in (expected := sentence())
    monkeypatch.setitem(sys.modules, "comfyui_version", None)
    assert sentence() == expected


def test_a_name_that_is_gone(host, monkeypatch):
    host["comfyui_version"].__version__ = "0.40.0"
    for module, names in HOOKS.items():
        for name in names:
            with monkeypatch.context() as patch:
                patch.delattr(*owner_of(host[module], name))
                text = sentence()
            assert f"0.40.0 has no {module}.{name}" in text
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            assert f"has no {module}.{next(iter(names))}," in sentence()


def test_a_parameter_that_is_gone(host, monkeypatch):
    for module, names in HOOKS.items():
        for name, parameters in names.items():
            owner, last = owner_of(host[module], name)
            for parameter in parameters:
                others = [other for other in parameters if other != parameter]
                with monkeypatch.context() as patch:
                    patch.setattr(owner, last, function(*others, "new"))
                    assert f"{parameter!r} in {module}.{name}" in sentence()


def test_a_function_that_takes_any_keyword_is_no_fault(host):
    put(host["comfy.lora"], "load_lora", function("options", kind=KINDS.VAR_KEYWORD))
    assert unsupported_host() is None


def test_a_function_that_became_something_else(host):
    host["comfy.lora"].load_lora = 3
    assert "comfy.lora.load_lora" in sentence()


def test_a_model_and_its_block_are_called_as_is_known(monkeypatch):
    module, arguments = ModuleType("comfy.ldm.of_a_family.model"), ("x", "mod", "pe")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    asked = (module.__name__, "Model._forward"), (module.__name__, "Block.forward"), arguments
    put(module, "Model._forward", function())
    put(module, "Block.forward", function("self", *arguments))
    assert is_known(*asked)
    with monkeypatch.context() as patch:
        patch.delattr(*owner_of(module, "Model._forward"))
        assert not is_known(*asked)
    put(module, "Block.forward", function("self", "x", "gate"))
    assert not is_known(*asked)


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


def test_a_host_that_is_known_is_no_news(host):
    for version in ("0.33.0", "0.40.9"):
        host["comfyui_version"].__version__ = version
        assert news_of_host() == []


def test_a_newer_host_is_told_of_with_what_was_tested(host):
    for version in ("0.41.0", "0.46.0", "1.0.0"):
        host["comfyui_version"].__version__ = version
        (sentence,) = news_of_host()
        assert sentence.startswith(f"ComfyUI {version} is newer than ")
        assert "0.33.0" in sentence and "0.40" in sentence


def test_a_new_parameter_of_what_the_host_calls_is_named(host, monkeypatch):
    for module, names in KNOWN.items():
        for name, known in names.items():
            owner, last = owner_of(host[module], name)
            with monkeypatch.context() as patch:
                patch.setattr(owner, last, function("self", *known, "gate", "up"))
                (news,) = news_of_host()
                assert f"gate, up in {module}.{name}" in news
                assert unsupported_host() is None


class Attention:
    """As ComfyUI's, of which only the source is read."""

    def forward(self, q, k, v, transformer_options):
        known = {"transformer_options": transformer_options, "skip_reshape": True}
        return optimized_attention_masked(q, k, v, 4, window=3, skip_reshape=known)  # noqa: F821


def test_a_new_argument_of_the_call_of_attention_is_named(host):
    host["comfy.ldm.qwen_image.model"].Attention = Attention
    (news,) = news_of_host()
    assert "window" in news and "transformer_options" not in news
