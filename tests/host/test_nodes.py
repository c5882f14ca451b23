"""The loader nodes, executed as ComfyUI executes them."""

import asyncio
import contextlib
import functools
import gc
import inspect
import os
import sys
import threading
from types import SimpleNamespace
from unittest import mock

import comfy.model_management
import comfy.supported_models
import comfy.utils
import execution
import narrow_transformer as narrow
import pytest
import torch
from comfy.quant_ops import QuantizedTensor
from comfy_api.latest import io
from comfyui_boot import BASE, refused
from safetensors.torch import save_file

import nodes as comfy_nodes
import qwen_l40s
from qwen_l40s import nodes
from qwen_l40s.caches import forget
from qwen_l40s.errors import CheckpointError, SettingError, UnavailableError
from qwen_l40s.families.registry import find_member
from qwen_l40s.hosts.comfyui import contract as compatibility
from qwen_l40s.hosts.comfyui.load import plan as load_plan
from qwen_l40s.hosts.comfyui.load import text_encoder, vae, weights
from qwen_l40s.hosts.comfyui.load.report import FLOAT_NAMES
from qwen_l40s.hosts.comfyui.load.transformer import load_model
from qwen_l40s.loaders import shards
from qwen_l40s.loaders.quantize import rotate
from qwen_l40s.loaders.source import bundled_micro_folder, open_source
from qwen_l40s.nodes.loaders import (
    QwenL40SLoad,
    QwenL40SLoadModel,
    QwenL40SLoadTextEncoder,
    QwenL40SLoadVAE,
)
from qwen_l40s.nodes.step_cache import QwenL40SStepCache
from qwen_l40s.spec.formats import CardFacts

pytestmark = pytest.mark.usefixtures("inference_mode")
IMPORTED = text_encoder, vae  # before a test replaces what they import
MICRO = "micro (bundled)"
WEIGHTS = narrow.weights()
MODELS = BASE / "models" / "diffusion_models"


def written(name, tensors):
    narrow.write(MODELS / f"{name}.safetensors", tensors)
    return f"{name}.safetensors"


def load(name, setting="auto", keep=""):
    output = QwenL40SLoadModel.execute(model=name, precision=setting, keep_in_bf16=keep)
    loaded, report = output.args
    assert output.ui["text"] == [report]
    return loaded, report


def weight(loaded, name):
    return loaded.model.diffusion_model.get_parameter(name)


@contextlib.contextmanager
def nothing_mapped():
    with mock.patch.object(weights, "map_tensors") as mapping:
        yield
        mapping.assert_not_called()


# --- a folder with many files


@contextlib.contextmanager
def looks_counted(folder):
    """Gives the looks at a folder and its files, and the headers that are read."""
    looked = SimpleNamespace(count=0, read=[])
    look, scan, read = os.stat, os.scandir, shards.read_header

    def counted(function, path, *more, **options):
        looked.count += str(path).startswith(str(folder))
        return function(path, *more, **options)

    with (
        mock.patch.object(os, "stat", functools.partial(counted, look)),
        mock.patch.object(os, "scandir", functools.partial(counted, scan)),
        mock.patch.object(
            shards, "read_header", lambda path: looked.read.append(path) or read(path)
        ),
    ):
        yield looked


def test_a_prompt_looks_once_at_each_of_many_files_and_reads_each_header_once():
    micro, names = bundled_micro_folder(), [f"{number:03}.safetensors" for number in range(200)]
    models = MODELS.parent
    encoders, vae = models / "text_encoders", models / "vae" / "many.safetensors"
    for folder in (MODELS, encoders, vae.parent):
        folder.mkdir(parents=True, exist_ok=True)
    links = {MODELS / "many": "transformer", models / "tokenizer": "tokenizer"}
    links |= {vae: "vae/diffusion_pytorch_model.safetensors"}
    links |= {encoders / name: "text_encoder/model.safetensors" for name in names}
    for link, target in links.items():
        link.symlink_to(micro / target)
    model = MODELS / "many" / "diffusion_pytorch_model.safetensors"
    chosen = {"model": f"many/{model.name}", "text_encoder": "automatic", "vae": "automatic"}
    QwenL40SLoad.GET_SCHEMA()  # ComfyUI lists the folders, and of few files reads the headers
    better = encoders / "qwen.safetensors"
    try:
        # Looks at each file: reading a header takes eight.
        for most, read in ((10, names), (2, [])):
            with looks_counted(encoders) as looked:
                assert QwenL40SLoad.validate_inputs(**chosen) is True
                first = QwenL40SLoad.fingerprint_inputs(**chosen)
                report = QwenL40SLoad.execute(**chosen, precision="auto").args[-1]
            assert str(encoders / names[0]) in report
            assert looked.count <= most * len(names) + 40
            assert sorted(looked.read) == [encoders / name for name in read]
        assert QwenL40SLoad.fingerprint_inputs(**chosen) == first
        (encoders / names[-1]).rename(better)
        assert QwenL40SLoad.fingerprint_inputs(**chosen)[1][0][0] == str(better)
    finally:
        for link in (*links, better):
            link.unlink(missing_ok=True)


# --- what is refused before it runs


def test_choices_are_validated_from_headers():
    name = written("plain", WEIGHTS)
    wrong = written("vae", {"decoder.middle.0.residual.0.gamma": torch.ones(8, 1, 1, 1)})
    with nothing_mapped():
        assert QwenL40SLoadModel.validate_inputs(model=name) is True
        for node, slot in (
            (QwenL40SLoad, "model"),
            (QwenL40SLoadModel, "model"),
            (QwenL40SLoadTextEncoder, "text_encoder"),
            (QwenL40SLoadVAE, "vae"),
        ):
            assert node.validate_inputs(**{slot: None}) is True  # a link is known when it runs
            assert node.validate_inputs(**{slot: MICRO}) is True
            run = functools.partial(node.validate_inputs, **{slot: "nothing.safetensors"})
            words = f"{slot}: 'nothing.safetensors' is not in", MICRO
            refused(SettingError, *words, run=run)
        for node in (QwenL40SLoad, QwenL40SLoadModel):
            words = (
                "model: a Qwen-Image VAE, not the Qwen-Image transformer",
                "move it to models/",
            )
            run = functools.partial(node.validate_inputs, model=wrong)
            refused(CheckpointError, *words, "vae.safetensors).", run=run)


def test_all_files_that_are_missing_are_named_at_once():
    names = {"model": "one.gguf", "text_encoder": "two.safetensors", "vae": "three.safetensors"}
    with pytest.raises(SettingError) as caught:
        QwenL40SLoad.validate_inputs(**names)
    lines = str(caught.value).splitlines()
    for line, (widget, name) in zip(lines, names.items(), strict=True):
        assert line.startswith(f"{widget}: ") and name in line


def test_a_missing_model_that_this_comfyui_is_too_old_for_is_not_to_be_downloaded():
    family = find_member("qwen-image-2.1").family
    old = not hasattr(comfy.supported_models, family.comfyui_class)
    for node in (QwenL40SLoad, QwenL40SLoadModel):
        run = functools.partial(node.validate_inputs, model="qwen_image_2.1_bf16.safetensors")
        words = f"needs ComfyUI {family.needs}" if old else "is not in"
        refused(UnavailableError if old else SettingError, words, run=run)


def test_fp8_on_a_card_without_it_is_refused_before_anything_is_mapped():
    name = written("plain", WEIGHTS)
    old = CardFacts("NVIDIA A100", 40 * 2**30, (8, 0))
    with mock.patch.object(load_plan, "card_facts", return_value=old), nothing_mapped():
        words = ("precision fp8 needs a GPU of sm_89", "NVIDIA A100 is sm_80", "int8")
        refused(UnavailableError, *words, run=lambda: load(name, "fp8"))
        run = functools.partial(QwenL40SLoadModel.validate_inputs, name, "fp8")
        refused(UnavailableError, *words, run=run)
        assert QwenL40SLoadModel.validate_inputs(name, None, None) is True


AMPERE, ADA, TURING = (CardFacts("card", 24 * 2**30, sm) for sm in ((8, 6), (8, 9), (7, 5)))
NO_KERNELS = CardFacts("card", 24 * 2**30, (8, 9), no_int8="kitchen: none; triton: none")


@pytest.mark.parametrize(
    ("card", "dtype", "free", "precision", "words"),
    [
        *((card, torch.bfloat16, 64, "int8", "int8 products run") for card in (AMPERE, ADA)),
        (AMPERE, torch.float32, 64, "int8", "fp32 is quantized"),
        (TURING, torch.bfloat16, 64, "bf16", "sm_75"),
        (NO_KERNELS, torch.bfloat16, 64, "bf16", "triton: none"),
        (None, torch.bfloat16, 64, "bf16", "no NVIDIA GPU"),
        (ADA, torch.bfloat16, 0, "bf16", "system RAM"),
        # A cast without scales runs as int8, whatever the card multiplies; else as it is.
        *((card, torch.float8_e4m3fn, 64, "int8", "fp8 is quantized") for card in (AMPERE, ADA)),
        (TURING, torch.float8_e4m3fn, 64, "fp8", "holds fp8"),
        (NO_KERNELS, torch.float8_e4m3fn, 64, "fp8", "holds fp8"),
        (None, torch.float8_e4m3fn, 64, "fp8", "holds fp8"),
        (ADA, torch.float8_e4m3fn, 0, "fp8", "system RAM"),
    ],
)
def test_auto_runs_on_every_card_and_says_why(card, dtype, free, precision, words):
    tensors = {name: it.to(dtype) if it.ndim == 2 else it for name, it in WEIGHTS.items()}
    file = open_source(MODELS / written(f"auto-{dtype}", tensors), "transformer")
    with (
        mock.patch.object(load_plan, "card_facts", return_value=card),
        mock.patch.object(load_plan, "available_memory", return_value=free * 2**30),
        mock.patch.object(load_plan.comfy.memory_management, "aimdo_enabled", True),
    ):
        plan = load_plan.plan_load(file, "auto")
        assert not (free and load_plan.plan_load(file, "bf16").automatic)
    assert (plan.precision, plan.automatic) == (precision, True)
    assert words in plan.reason and "requested" not in plan.reason + plan.why
    quantized = dtype == torch.float8_e4m3fn
    assert plan.named == (quantized and precision == "int8")


def test_auto_leaves_a_layer_that_int8_would_change_much_in_bf16():
    layer = "transformer_blocks.0.img_mlp.net.2"
    weight = WEIGHTS[f"{layer}.weight"].float()
    weight = torch.where(torch.arange(weight.shape[1]) % 256 == 3, 50 * weight, weight)
    changed = {**WEIGHTS, f"{layer}.weight": rotate(weight, 256).to(torch.bfloat16)}
    file = str(MODELS / written("spiked", changed))
    with mock.patch.object(load_plan, "card_facts", return_value=ADA):
        for precision, left in (("auto", True), ("int8", False)):
            model, report = load_model(file, precision)
            parts = dict(model.model.diffusion_model.named_modules())
            assert isinstance(parts[layer].weight, QuantizedTensor) != left
            assert isinstance(parts["transformer_blocks.0.attn.to_q"].weight, QuantizedTensor)
            assert (f"{layer} stay in bf16" in report.text()) == left
            if left:
                assert torch.equal(parts[layer].weight.bfloat16(), changed[f"{layer}.weight"])


def test_too_little_host_memory_is_refused_before_anything_is_mapped():
    plain = written("plain", WEIGHTS)
    # e5m2 becomes bf16; e4m3 stays as it is mapped.
    e5m2 = {name: tensor.to(torch.float8_e5m2) for name, tensor in WEIGHTS.items()}
    e5m2 = written("e5m2", e5m2)
    with mock.patch.object(load_plan, "available_memory", return_value=1000), nothing_mapped():
        for name, setting in ((plain, "auto"), (plain, "int8"), (e5m2, "auto")):
            words = (f"{name} in", "of system RAM", "is available", "close other")
            run = functools.partial(load, name, setting)
            refused(UnavailableError, *words, run=run)


def test_a_plain_file_takes_host_memory_for_no_more_than_its_copy():
    """ComfyUI converts each weight as it copies it, under dynamic VRAM on the card."""
    card = CardFacts("NVIDIA H100", 80 * 2**30, (9, 0))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        file = written(f"{dtype}", {name: it.to(dtype) for name, it in WEIGHTS.items()})
        for dynamic, needed in ((True, 0), (False, sum(it.numel() for it in WEIGHTS.values()) * 2)):
            with (
                mock.patch.object(load_plan, "card_facts", return_value=card),
                mock.patch.object(load_plan.comfy.memory_management, "aimdo_enabled", dynamic),
                mock.patch.object(load_plan, "check_host_memory") as check,
            ):
                plan = load_plan.plan_load(open_source(MODELS / file, "transformer"), "bf16")
            assert plan.precision == "bf16"
            assert check.call_args.args[0] == needed, (dtype, dynamic)


def test_a_text_encoder_of_another_width_is_refused_from_its_header():
    folder = MODELS.parent / "text_encoders"
    folder.mkdir(exist_ok=True)
    prefix = "model.layers.0.self_attn.k_proj"
    tensors = {f"{prefix}.bias": torch.zeros(512), "model.norm.weight": torch.zeros(64)}
    save_file(tensors, folder / "narrow.safetensors")
    choice = {"precision": "auto", "text_encoder": "narrow.safetensors", "vae": MICRO}
    with nothing_mapped():
        words = ("text_encoder: the model takes text 512 wide", "gives 64")
        for run in (QwenL40SLoad.execute, QwenL40SLoad.validate_inputs):
            refused(CheckpointError, *words, run=functools.partial(run, model=MICRO, **choice))


def test_settings_that_mean_nothing_are_refused_before_anything_is_mapped():
    name = written("plain", WEIGHTS)
    with nothing_mapped():
        for keep in ("blocks.0.*", "*.to_q, nothing", "img_in", "transformer_blocks.7.*"):
            last = keep.rpartition(", ")[2]
            words = (f"bf16_layers (keep_in_bf16, --keep) {last!r}", "start it with *")
            refused(SettingError, *words, run=lambda keep=keep: load(name, "int8", keep))
            run = functools.partial(QwenL40SLoadModel.validate_inputs, name, "auto", keep)
            refused(SettingError, *words, run=run)
        words = ("precision 'nvfp4' is unknown", "bf16", "as stored")
        refused(SettingError, *words, run=lambda: load(name, "nvfp4"))


@pytest.mark.parametrize("node", nodes.NODES, ids=lambda it: it.__name__)
def test_a_missing_input_is_named_as_comfyui_names_it(node, monkeypatch):
    schema = node.GET_SCHEMA()
    monkeypatch.setitem(comfy_nodes.NODE_CLASS_MAPPINGS, schema.node_id, node)
    required = [it for it in schema.inputs if not it.optional]
    values = {it.id: it.default for it in required if getattr(it, "default", None) is not None}
    values |= {it.id: MICRO for it in required if MICRO in (getattr(it, "options", None) or ())}
    for missing in (it.id for it in required if not isinstance(it, io.DynamicCombo.Input)):
        inputs = {name: value for name, value in values.items() if name != missing}
        graph = {"1": {"class_type": schema.node_id, "inputs": inputs}}
        found = asyncio.run(execution.validate_inputs("prompt", graph, "1", {}))[1]
        assert {error["type"] for error in found} == {"required_input_missing"}
        assert missing in {error["details"] for error in found}


def test_a_choice_that_comfyui_drops_is_refused_by_name():
    words = ("cache is missing", "off, faithful, balanced, fast, custom")
    refused(SettingError, *words, run=lambda: QwenL40SStepCache.execute(None))


def test_nodes_of_a_host_that_is_off_are_there_and_say_why():
    name = written("plain", WEIGHTS)
    off = SimpleNamespace(__version__="0.32.1")
    forget()
    try:
        with mock.patch.dict(sys.modules, {"comfyui_version": off}), nothing_mapped():
            extension = asyncio.run(qwen_l40s.comfy_entrypoint())
            with mock.patch.object(nodes.logger, "warning") as warning:
                asyncio.run(extension.on_load())
            words = ("ComfyUI is 0.32.1", "needs 0.33.0 or newer", "update ComfyUI")
            assert all(word in warning.call_args.args[0] for word in words)
            registered = asyncio.run(extension.get_node_list())
            assert registered == nodes.NODES
            for node in registered:
                node.GET_SCHEMA()
            for node in registered:
                given = dict.fromkeys(inspect.signature(node.execute).parameters)
                refused(UnavailableError, *words, run=functools.partial(node.execute, **given))
    finally:
        forget()
    assert load(name)[0] is not None


def test_this_comfyui_is_what_the_package_knows():
    forget()
    assert compatibility.unsupported_host() is None
    news = [line for line in compatibility.news_of_host() if "newer than" not in line]
    assert news == []


# --- what is stopped while it runs


def quantized_tensors():
    gc.collect()
    tensors = (thing for thing in gc.get_objects() if type(thing) is torch.Tensor)
    return sum(tensor.dtype is torch.int8 for tensor in tensors)


def test_a_cancelled_load_leaves_nothing_behind():
    name = written("plain", WEIGHTS)
    expected = weight(load(name, "int8")[0], f"{narrow.LAYER}.weight")._qdata.clone()
    layers, before = [], quantized_tensors()

    def cancel(value, total, *_arguments, **_settings):
        layers.append((value, total))
        raise comfy.model_management.InterruptProcessingException

    comfy.utils.set_progress_bar_global_hook(cancel)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        load(name, "int8")
    comfy.utils.set_progress_bar_global_hook(None)
    assert layers == [(1, len(narrow.layers(WEIGHTS)))], layers
    assert quantized_tensors() == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("quantize")]
    assert not comfy.model_management.loaded_models()
    again = weight(load(name, "int8")[0], f"{narrow.LAYER}.weight")._qdata
    assert torch.equal(again, expected)


def test_a_file_that_changes_while_it_is_quantized():
    name = written("changing", WEIGHTS)
    path = MODELS / name

    def change(value, total, *_arguments, **_settings):
        os.utime(path, ns=(0, value))  # as who writes it does, and no more: its pages are mapped

    comfy.utils.set_progress_bar_global_hook(change)
    try:
        words = (str(path), "changed while it was read", "load it again")
        refused(CheckpointError, *words, run=lambda: load(name, "int8"))
    finally:
        comfy.utils.set_progress_bar_global_hook(None)
    load(name, "int8")


def test_nan_is_refused_and_the_next_load_works():
    broken = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    broken[f"{narrow.LAYER}.weight"][3, 5] = torch.nan
    name = written("nan", broken)
    words = (str(MODELS / name), "has NaN or infinity", f"{narrow.LAYER}.weight", "download")
    refused(CheckpointError, *words, run=lambda: load(name, "int8"))
    load(written("plain", WEIGHTS), "int8")


# --- what other dtypes become


def test_a_file_in_e5m2_becomes_bf16():
    rounded = {
        name: tensor.to(torch.float8_e5m2) if tensor.dim() == 2 else tensor
        for name, tensor in WEIGHTS.items()
    }
    name = written("e5m2", rounded)
    for setting in ("auto", "bf16", "as stored"):
        loaded, report = load(name, setting)
        assert "fp8 e5m2, unscaled were converted to bf16" in report, report
        for layer in (narrow.LAYER, narrow.MODULATION, "img_in"):
            held = weight(loaded, f"{layer}.weight")
            assert held.dtype == torch.bfloat16
            assert torch.equal(held, rounded[f"{layer}.weight"].bfloat16()), layer
    held = weight(load(name, "int8")[0], f"{narrow.LAYER}.weight")
    stored = narrow.rounded(rounded[f"{narrow.LAYER}.weight"].bfloat16(), "int8")
    assert torch.equal(held._qdata, stored.weight)
    assert torch.equal(held._params.scale, stored.scale)


def test_kept_layers_are_what_the_file_holds():
    loaded, report = load(written("plain", WEIGHTS), "fp8", "transformer_blocks.1.*,\n*.to_add_out")
    kept = [
        layer
        for layer in narrow.layers(WEIGHTS)
        if layer.startswith("transformer_blocks.1.") or layer.endswith(".to_add_out")
    ]
    assert len(kept) == 13
    dtype = FLOAT_NAMES[loaded.model.get_dtype()]
    assert f"13 layers kept in {dtype}" in report and "11 layers were quantized to fp8" in report, (
        report
    )
    assert (f"Weights that are not quantized are stored in {dtype}" in report) == (dtype != "bf16")
    for layer in narrow.layers(WEIGHTS):
        held = weight(loaded, f"{layer}.weight")
        assert (type(held.data) is torch.Tensor) == (layer in kept), layer
        if layer in kept:
            assert torch.equal(held, WEIGHTS[f"{layer}.weight"])
