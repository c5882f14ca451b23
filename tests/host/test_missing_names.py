"""Every name that is taken from ComfyUI, gone from it: who needs it refuses by its name, and all
other nodes work.
"""

import ast
import contextlib
import importlib
import inspect
import os
import sys
import traceback
from types import ModuleType, SimpleNamespace

import narrow_transformer as narrow
import pytest
import torch
from comfyui_boot import BASE
from comfyui_names import FILES, taken
from safetensors.torch import save_file

import nodes as core
from qwen_l40s.errors import UnavailableError
from qwen_l40s.hosts.comfyui import contract
from qwen_l40s.hosts.comfyui.load.text_encoder import load_text_encoder
from qwen_l40s.hosts.comfyui.load.vae import load_vae
from qwen_l40s.hosts.comfyui.sample.optimize import OptimizeSettings, optimize, report_of
from qwen_l40s.loaders.source import bundled_micro_folder
from qwen_l40s.nodes import NODES

IMPORTED = core  # before a test takes away what it imports
pytestmark = pytest.mark.usefixtures("inference_mode")
# What is looked for before it is used, or passed over where it is gone.
OPTIONAL = {
    "comfy.ldm.qwen_image21.model",
    "comfy.ldm.wan.vae2_2.WanVAE",
    "comfy.multigpu.create_multigpu_deepclones",
    "comfy.ops._eager_input_act",
    "comfy.ops._linear_residual",
    "comfy.supported_models.QwenImage21",
    "comfy.text_encoders.qwen3vl",
    "comfy.text_encoders.qwen_image21",
    "comfy_aimdo.control",
    "comfy_aimdo.model_vbar",
    "comfy_aimdo.torch.aimdo_to_tensor",
    "comfy_execution.progress.get_progress_state",
    "comfy_execution.utils.get_executing_context",
}
# With the classes that names are of.
HOOKS = {
    f"{module}.{part}"
    for module, names in contract.HOOKS.items()
    for name in names
    if "()" not in name  # of a class that each call makes anew
    for part in (name, name.partition(".")[0])
}


def test_every_name_that_is_taken_is_listed():
    listed = [f"{name}." for name in HOOKS | OPTIONAL]
    names = {f"{it.module}.{it.name}." for it in taken()}
    missing = {it for it in names if not any(it.startswith(n) or n.startswith(it) for n in listed)}
    assert missing == set()
    assert all(any(it.startswith(name) for it in names) for name in OPTIONAL), "no more optional"


# --- each name alone


def tried(node):
    """What comes of a node without inputs: nothing of ComfyUI runs."""
    try:
        node.execute(**dict.fromkeys(inspect.signature(node.execute).parameters))
    except Exception as error:
        return error


def owner_of(dotted):
    """What the last part of a name is an attribute of, and that part."""
    module = max((it for it in contract.HOOKS if dotted.startswith(f"{it}.")), key=len)
    *path, last = dotted.removeprefix(f"{module}.").split(".")
    owner = importlib.import_module(module)
    for part in path:
        owner = getattr(owner, part.removesuffix("()"))
        owner = owner() if part.endswith("()") else owner
    return owner, last


@pytest.fixture(scope="module")
def refusals():
    """{node: names without which it refuses to run}, each name taken away alone."""
    found = {node: set() for node in NODES}
    for name in HOOKS:
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(*owner_of(name))
            contract.unsupported_host.cache_clear()
            for node in NODES:
                error = tried(node)
                if isinstance(error, UnavailableError):
                    assert f" {name}" in str(error), (node, name, error)
                    found[node].add(name)
    contract.unsupported_host.cache_clear()
    return found


# What little of ComfyUI some nodes need.
KINDS = {
    "comfy.ldm.qwen_image.model.QwenImageTransformer2DModel",
    "comfy.model_base.QwenImage",
    "comfy.supported_models.QwenImage",
}
FEW = {
    "QwenL40S_AdviseGPU": set(),
    "QwenL40S_CFGNorm": KINDS,
    "QwenL40S_EstimateVRAM": {
        "comfy.model_management.get_torch_device",
        "comfy_execution.graph_utils.ExecutionBlocker",
    },
    "QwenL40S_SaveImage": {
        "comfy.cli_args.args",
        "comfy.model_management.throw_exception_if_processing_interrupted",
    },
    "QwenL40S_Sigmas": KINDS,
}


def test_a_node_refuses_what_it_needs_and_names_it(refusals):
    found = {node.GET_SCHEMA().node_id: names for node, names in refusals.items()}
    assert {node: found[node] for node in FEW} == FEW
    others = {node: names for node, names in found.items() if node not in FEW}
    assert all(8 <= len(names) < len(HOOKS) * 0.7 for names in others.values())
    assert not {"comfy.lora.load_lora", "comfy.sd.VAE"} & found["QwenL40S_LoadModel"]
    assert {"comfy.samplers.get_area_and_mult"} == {
        name for name in found["QwenL40S_SplitCards"] if name.startswith("comfy.samplers.get")
    }


# --- all that a node does not need, gone at once for this package


class Without(ModuleType):
    """A module of ComfyUI as this package sees it, without some names."""

    def __init__(self, module, gone):
        super().__init__(module.__name__)
        self.__dict__.update(_module=module, _gone=gone)

    def __getattr__(self, name):
        dotted = f"{self._module.__name__}.{name}"
        if dotted in self._gone:
            raise AttributeError(
                f"module {self.__name__!r} has no attribute {name!r}", name=name, obj=self
            )
        found = getattr(self._module, name)
        own = isinstance(found, ModuleType) and found.__name__.startswith("comfy")
        return Without(found, self._gone) if own else found


@contextlib.contextmanager
def without(gone):
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("qwen_l40s."):
                for key, value in list(vars(module).items()):
                    if isinstance(value, ModuleType) and value.__name__.startswith("comfy"):
                        patch.setitem(vars(module), key, Without(value, gone))
        look = SimpleNamespace(
            import_module=lambda name: (
                Without(importlib.import_module(name), gone)
                if name.startswith("comfy.")
                else importlib.import_module(name)
            )
        )
        patch.setattr(contract, "importlib", look)
        contract.unsupported_host.cache_clear()
        yield
    contract.unsupported_host.cache_clear()


WEIGHTS, MICRO = narrow.weights(), "micro (bundled)"
LORA = BASE / "models" / "loras" / "narrow.safetensors"
REQUEST = {"family": "auto", "precision": "auto", "width": 1024, "height": 1024, "batch": 1}
REQUEST |= {"steps": 20, "cfg": "two passes", "references": 0}
SETTINGS = {"precision": "auto", "text_encoder": MICRO, "vae": MICRO}
LATENT, IMAGE = {"samples": narrow.random(1, 16, 1, 4, 4)}, torch.rand(1, 32, 32, 3)
PROMPT = [[narrow.random(1, 20, 64), {}]]


def sampled(output, width=64):
    prompts = [[[narrow.random(1, tokens, width), {}]] for tokens in (20, 7)]
    return narrow.sample(output.args[0], *prompts, cfg=3.0)


def encoded(output):
    clip = output.args[0]
    return clip.encode_from_tokens(clip.tokenize("a star"))


def given(place):
    return lambda output: output.args[place]


# {node: its inputs, what is made of its outputs}
RUNS = {
    "Load": ({"model": MICRO, **SETTINGS}, lambda output: sampled(output, 512)),
    "LoadModel": ({"model": MICRO, "precision": "int8"}, lambda output: sampled(output, 512)),
    "LoadTextEncoder": ({"text_encoder": MICRO, "precision": "auto"}, encoded),
    "LoadVAE": (
        {"vae": MICRO, "precision": "auto"},
        lambda output: output.args[0].decode(LATENT["samples"]),
    ),
    "LoadLora": ({"lora": LORA.name, "strength": 1.0, "lora_mode": "bypass"}, sampled),
    "EncoderCache": ({"reuse": True, "memory": 1.0, "arithmetic": "exact"}, encoded),
    "Optimize": ({"attention": "auto", "fused_blocks": True}, sampled),
    "SplitCards": ({"cards": 1}, sampled),
    "CFGNorm": ({}, sampled),
    "StepCache": ({"cache": {"cache": "fast"}}, sampled),
    "NAG": ({"negative": PROMPT, "scale": 5.0, "tau": 2.5, "alpha": 0.25}, sampled),
    "Sigmas": (
        {"preset": "official", "steps": 0, **dict.fromkeys(("width", "height"), 0)},
        given(0),
    ),
    "VAEDecode": ({"samples": LATENT}, given(0)),
    "VAEEncode": ({"pixels": IMAGE}, lambda output: output.args[0]["samples"]),
    "SaveImage": ({"images": IMAGE, "filename_prefix": "gone"}, given(0)),
    "SaveQuantized": ({"precision": "int8", "filename": "gone", "overwrite": True}, given(0)),
    "EstimateVRAM": ({"card": "L40S", **REQUEST}, given(1)),
    "AdviseGPU": ({"images_per_hour": 100.0, **REQUEST}, given(1)),
    "Report": ({"images": IMAGE}, given(1)),
}


@pytest.mark.parametrize("node", NODES, ids=lambda it: it.__name__)
def test_a_node_works_without_what_only_others_need(node, refusals):
    settings, made = RUNS[node.GET_SCHEMA().node_id.removeprefix("QwenL40S_")]
    LORA.parent.mkdir(parents=True, exist_ok=True)
    layers = narrow.lora(WEIGHTS, [narrow.LAYER])
    save_file({f"diffusion_model.{name}": it for name, it in layers.items()}, LORA)
    node = node.PREPARE_CLASS_CLONE({"hidden_inputs": {}})

    def run():
        inputs = {it.id: it.io_type for it in node.GET_SCHEMA().inputs if not it.optional}
        parts = {
            "MODEL": lambda: narrow.stock(WEIGHTS),
            "CLIP": lambda: load_text_encoder(micro)[0],
            "VAE": lambda: load_vae(micro, "fp32")[0],
        }
        found = {name: parts[kind]() for name, kind in inputs.items() if kind in parts}
        return lambda: made(node.execute(**found, **settings))

    micro = bundled_micro_folder()
    known, again = run()(), run()
    with without(HOOKS - refusals[node.__bases__[0]]):
        found = again()
    if isinstance(known, str):
        assert found == known
    else:
        assert narrow.difference(found, known) < 2e-2  # bf16, in ComfyUI's own layers


def test_fused_blocks_that_miss_a_name_leave_the_run_to_comfyui():
    model = narrow.stock(WEIGHTS)
    known = narrow.sample(model, PROMPT)
    for name in contract.CAPABILITIES["blocks"]["comfy.ops"]:
        if "." in name:  # of a class
            continue
        optimized = optimize(model, OptimizeSettings(attention="comfyui"))
        with without({f"comfy.ops.{name}"}):
            assert torch.equal(narrow.sample(optimized, PROMPT), known)
        report = report_of(optimized)
        assert f"has no comfy.ops.{name}, which" in report and "blocks: ComfyUI's" in report


# --- this package imported by a ComfyUI without a name


def test_the_pack_is_imported_without_a_name(refusals):
    needed = {node.GET_SCHEMA().node_id: names for node, names in refusals.items()}
    names = sorted({f"{it.module}.{it.name}" for it in taken() if it.at_import})
    for name in names:
        child = os.fork()
        if not child:
            os._exit(not imported_without(name, needed))
        assert not os.waitpid(child, 0)[1], name


def imported_without(name, needed):
    """In a process of its own: whether all nodes are there, and those that need the name say so."""
    try:
        delattr(*owner_of(name))
        for module in [it for it in sys.modules if it.startswith("qwen_l40s.")]:
            del sys.modules[module]
        pack = importlib.import_module("qwen_l40s.nodes")
        assert len(pack.NODES) == len(NODES)
        for node in pack.NODES:
            error, refuses = tried(node), name in needed[node.GET_SCHEMA().node_id]
            assert (type(error).__name__ == "UnavailableError") == refuses, (node, error)
            assert not isinstance(error, ImportError), (node, error)
            assert refuses == (f" {name}" in str(error)), (node, error)
        return True
    except BaseException:
        traceback.print_exc()
        return False


# --- files of this package that are others than those that ComfyUI has imported


def imported_when_run():
    """(module, name) of what the nodes of this package import when they run."""
    for file in (it for it in FILES if it.parent.name == "nodes"):
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for node in ast.walk(function) if getattr(function, "name", "") == "execute" else ():
                if isinstance(node, ast.ImportFrom) and node.level:
                    yield from ((f"qwen_l40s.{node.module}", it.name) for it in node.names)


@pytest.mark.parametrize(("module", "name"), sorted({*imported_when_run()}))
def test_a_pack_that_was_updated_meanwhile_asks_for_a_restart(monkeypatch, module, name):
    monkeypatch.delattr(importlib.import_module(module), name)
    errors = [it for it in map(tried, NODES) if isinstance(it, UnavailableError)]
    assert errors and all("restart ComfyUI" in str(error) for error in errors)


@pytest.mark.parametrize(
    "name", ["Load", "LoadModel", "LoadTextEncoder", "Optimize", "StepCache", "NAG"]
)
def test_an_updated_pack_asks_for_a_restart_inside_of_comfyuis_nodes_too(name):
    def imports(*_):
        raise ImportError("cannot import name", name="qwen_l40s.optimizations.kernels.rows")

    settings, made = RUNS[name]
    (node,) = (it for it in NODES if it.GET_SCHEMA().node_id == f"QwenL40S_{name}")
    needs_model = any(it.io_type == "MODEL" for it in node.GET_SCHEMA().inputs)
    output = node.execute(**{"model": narrow.stock(WEIGHTS)} if needs_model else {}, **settings)
    hook = torch.nn.modules.module.register_module_forward_pre_hook(imports)
    try:
        with pytest.raises(UnavailableError, match="restart ComfyUI"):
            made(output)
    finally:
        hook.remove()
