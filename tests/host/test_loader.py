"""Our MODEL loader against ComfyUI's own, on one block, in every stored form: once of the width
that ComfyUI takes for granted, and in all other tests of a third of it, which it is told.
"""

import functools
import json
from pathlib import Path
from unittest import mock

import comfy.model_detection
import comfy.model_management
import comfy.sample
import comfy.samplers
import comfy.sd
import folder_paths
import narrow_text_encoder
import narrow_transformer as narrow
import pytest
import torch
from comfy.quant_ops import QUANT_ALGOS
from comfy_extras import nodes_model_merging
from comfy_kitchen.backends.eager.w4a8_int8 import (
    _dequant_int4_grouped_to_int8,
    quantize_w4a8_int8_weight,
)
from comfyui_boot import ROOT, folder
from lora_forms import FAILING, FORMS
from narrow_transformer import difference
from safetensors.torch import load_file, save_file

from qwen_l40s.families.qwen_image import FULL_SIZE, QwenImageShape
from qwen_l40s.hosts.comfyui.load import plan as load_plan
from qwen_l40s.hosts.comfyui.load.text_encoder import load_text_encoder
from qwen_l40s.hosts.comfyui.load.transformer import load_model
from qwen_l40s.hosts.comfyui.load.vae import load_vae
from qwen_l40s.loaders.checkpoint import inspect_checkpoint
from qwen_l40s.loaders.quantize import comfy_quant_tensor, quantize_rows
from qwen_l40s.loaders.source import Source, open_source
from qwen_l40s.loaders.stored import rotate
from qwen_l40s.loaders.writer import SafetensorsLayout
from qwen_l40s.spec.formats import GIB, CardFacts

pytestmark = pytest.mark.usefixtures("inference_mode")
with_files = pytest.mark.usefixtures("files", "sizes")
FOLDER = folder("loader")
ONE_BLOCK = QwenImageShape(1, 1024, 8, 128, 512, 64, 64)
SIZES = {"num_attention_heads": 8, "attention_head_dim": 128, "joint_attention_dim": 512}
REAL_WIDTH = QwenImageShape(1, 3072, 24, 128, 3584, 64, 64)
FP8 = torch.float8_e4m3fn
Tensors = dict[str, torch.Tensor]


def by_row(precision: str):
    def change(weight: torch.Tensor) -> Tensors:
        entries = narrow.rounded(weight, precision).tensors("")
        return {name[1:]: tensor for name, tensor in entries.items()}

    return change


def by_tensor(scale_name: str, marker: bool):
    def change(weight: torch.Tensor) -> Tensors:
        scale = weight.abs().max().float() / 448
        entries = {"weight": (weight.float() / scale).to(FP8), scale_name: scale}
        if marker:
            text = json.dumps({"format": "float8_e4m3fn", "full_precision_matrix_mult": True})
            entries["comfy_quant"] = torch.tensor(list(text.encode()), dtype=torch.uint8)
        return entries

    return change


def rotated(weight: torch.Tensor) -> Tensors:
    values, scale = quantize_rows(rotate(weight.float(), 256), "int8")
    settings = {"convrot": True, "convrot_groupsize": 256}
    marker = comfy_quant_tensor("int8", settings)
    return {"weight": values, "weight_scale": scale, "comfy_quant": marker}


def in_four_bits(weight: torch.Tensor) -> Tensors:
    parts = quantize_w4a8_int8_weight(weight.float())
    entries = dict(zip(("weight", "weight_s_rel", "weight_s_channel"), parts[:3], strict=True))
    text = json.dumps({"format": "asym_w4a8_int8", "group_size": 16, "convrot_groupsize": 256})
    marker = torch.tensor(list(text.encode()), dtype=torch.uint8)
    return entries | {"weight_codebook": parts[4], "comfy_quant": marker}


def as_int8(weight: torch.Tensor) -> Tensors:
    """The int8 ConvRot layer that comfy-kitchen decodes from one in four bits."""
    entries = in_four_bits(weight)
    codes, groups, codebook = (entries[f"weight{end}"] for end in ("", "_s_rel", "_codebook"))
    values = _dequant_int4_grouped_to_int8(codes, groups, codebook, 16)
    marker = comfy_quant_tensor("int8", {"convrot": True, "convrot_groupsize": 256})
    scale = entries["weight_s_channel"].reshape(-1, 1)
    return {"weight": values, "weight_scale": scale, "comfy_quant": marker}


@pytest.fixture(scope="module")
def files() -> None:
    folder = FOLDER
    weights = narrow.weights(ONE_BLOCK)
    save_file(weights, folder / "bf16.safetensors")
    marker = {"__index_timestep_zero__": torch.zeros(0)}
    save_file(weights | marker, folder / "edit_2511.safetensors")
    condition = {"time_text_embed.addition_t_embedding.weight": weights["img_in.weight"][:, :2].t()}
    layered = {name: weight.contiguous() for name, weight in (weights | condition).items()}
    save_file(layered, folder / "layered.safetensors")
    prefixed = {f"model.diffusion_model.{name}": weight for name, weight in weights.items()}
    # What a file says of attention: 0.33 ignores it, and no processor can run it.
    text = torch.tensor(list(b'{"attention": "comfy_kitchen_int8"}'), dtype=torch.uint8)
    prefixed["model.diffusion_model.transformer_blocks.0.attn.comfy_attention.config"] = text
    save_file(prefixed, folder / "prefixed.safetensors")
    narrow.sharded(folder / "sharded", weights, config={"axes_dims_rope": [16, 56, 56]})
    for precision in ("int8", "fp8"):
        tensors = narrow.quantized(weights, by_row(precision))
        save_file(tensors, folder / f"{precision}.safetensors")
    scaled = narrow.quantized(weights, by_tensor("weight_scale", True))
    save_file(scaled, folder / "scaled_fp8.safetensors")
    old = narrow.quantized(weights, by_tensor("scale_weight", False))
    # Two values: the older files' way to ask for products in full precision.
    old["scaled_fp8"] = torch.zeros(2, dtype=FP8)
    save_file(old, folder / "fp8_marker.safetensors")
    save_file(narrow.quantized(weights, rotated), folder / "convrot.safetensors")
    modulations = [f"transformer_blocks.0.{stream}_mod.1" for stream in ("img", "txt")]
    layers = [*narrow.layers(weights), *modulations]
    for name, change in (("w4a8", in_four_bits), ("w4a8_in_int8", as_int8)):
        tensors = narrow.quantized(weights, change, only=layers)
        save_file(tensors, folder / f"{name}.safetensors")
    unscaled = {name: weight.to(FP8) for name, weight in weights.items()}
    save_file(unscaled, folder / "unscaled_fp8.safetensors")
    exact = {name: weight.bfloat16() for name, weight in unscaled.items()}
    save_file(exact, folder / "unscaled_in_bf16.safetensors")


@pytest.fixture
def sizes():
    """ComfyUI detects what a file is, and is told how wide."""
    detect = comfy.model_detection.detect_unet_config

    def told(*arguments, **options):
        return detect(*arguments, **options) | SIZES

    with mock.patch.object(comfy.model_detection, "detect_unet_config", told):
        yield


def sample(model, width: int = ONE_BLOCK.joint_dim) -> torch.Tensor:
    """Two Euler steps with guidance at 64 x 64, from fixed noise and text."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, 16, 1, 8, 8, generator=generator)
    positive, negative = torch.randn(2, 1, 6, width, generator=generator)
    return narrow.sample(model, [[positive, {}]], [[negative, {}]], cfg=2.5, noise=noise)


def loaded(name: str, precision: str = "auto", **settings) -> torch.Tensor:
    return sample(load_model(FOLDER / name, precision, **settings)[0])


def stock(name: str) -> torch.Tensor:
    return sample(comfy.sd.load_diffusion_model(str(FOLDER / name)))


def edited(model, **settings) -> torch.Tensor:
    """One forward with a reference image beside the noise, as Edit and Layered are run."""
    comfy.model_management.load_models_gpu([model])
    generator = torch.Generator().manual_seed(1)
    noise, reference = torch.randn(2, 1, 16, 1, 8, 8, generator=generator)
    text = torch.randn(1, 6, ONE_BLOCK.joint_dim, generator=generator)
    return model.model.diffusion_model(
        noise,
        torch.tensor([0.7]),
        text,
        ref_latents=[reference],
        transformer_options={},
        **settings,
    )


@functools.cache
def known() -> torch.Tensor:
    return stock("bf16.safetensors")


def test_the_real_width_is_bit_for_bit_what_comfyui_s_own_loader_gives():
    path = FOLDER / "real_width.safetensors"
    save_file(narrow.weights(REAL_WIDTH), path)
    theirs = comfy.sd.load_diffusion_model(str(path))
    known = sample(theirs, REAL_WIDTH.joint_dim)
    assert torch.equal(sample(load_model(path)[0], REAL_WIDTH.joint_dim), known)


@with_files
def test_bf16_is_bit_for_bit_what_comfyui_s_own_loader_gives():
    ours, _ = load_model(FOLDER / "bf16.safetensors")
    assert torch.equal(sample(ours), known())
    copy = ours.clone(force_deepcopy=True)  # through cached_patcher_init
    assert torch.equal(sample(copy), known())
    assert torch.equal(loaded("sharded"), known())
    prefixed, report = load_model(FOLDER / "prefixed.safetensors")
    assert torch.equal(sample(prefixed), known())
    words = "comfy_kitchen_int8 attention in 1 blocks, which ComfyUI before 0.40 ignores."
    assert any(note.endswith(words) for note in report.notes)
    assert torch.equal(loaded("bf16.safetensors", "int8", keep=["*"]), known())


@with_files
@pytest.mark.parametrize(
    ("name", "settings"), [("edit_2511", {}), ("layered", {"additional_t_cond": torch.tensor([0])})]
)
def test_the_other_families_are_bit_for_bit_the_same(name, settings):
    theirs = comfy.sd.load_diffusion_model(str(FOLDER / f"{name}.safetensors"))
    mine = load_model(FOLDER / f"{name}.safetensors")[0]
    assert torch.equal(edited(mine, **settings), edited(theirs, **settings))


@with_files
@pytest.mark.parametrize(("precision", "bound"), [("int8", 0.01), ("fp8", 0.04)])
def test_quantized_weights_stay_near_bf16(precision, bound):
    """One block and two steps on a CPU: the error is that of the weights alone."""
    on_load = loaded("prefixed.safetensors", precision)
    assert 0 < difference(on_load, known()) <= bound
    assert torch.equal(loaded(f"{precision}.safetensors"), on_load)
    assert difference(loaded(f"{precision}.safetensors", "bf16"), on_load) <= 5e-3


@with_files
@pytest.mark.parametrize(
    ("form", "bound"), [("scaled_fp8", 0.04), ("fp8_marker", 0.04), ("convrot", 0.015)]
)
def test_stored_forms_compute_what_comfyui_computes_from_them(form, bound):
    stored = loaded(f"{form}.safetensors")
    assert 0 < difference(stored, known()) <= bound
    assert difference(stored, stock(f"{form}.safetensors")) <= 5e-3


@with_files
def test_four_bits_are_the_int8_that_comfyui_decodes():
    model, report = load_model(FOLDER / "w4a8.safetensors")
    assert torch.equal(sample(model), loaded("w4a8_in_int8.safetensors"))
    assert report.load.precision == "int8" and "the file holds int8" in report.load.reason
    words = "stored in int4 asymmetric (w4a8) were decoded to int8 ConvRot without loss."
    assert any(note.endswith(words) for note in report.notes)
    # ComfyUI quantizes activations on a CPU too; the rest of the difference is of 4 bits.
    assert difference(sample(model), stock("w4a8.safetensors")) <= 0.015
    assert difference(sample(model), known()) <= 0.2


@with_files
def test_unscaled_fp8_loses_nothing_on_the_way():
    rounded = load_file(FOLDER / "unscaled_fp8.safetensors")
    assert {weight.dtype for weight in rounded.values()} == {torch.float8_e4m3fn}
    # The same values in bf16, which is exact.
    exact = loaded("unscaled_in_bf16.safetensors")
    assert difference(loaded("unscaled_fp8.safetensors"), exact) <= 1e-5


def prefixes_of_comfyui() -> list[str]:
    """What its loader takes off a transformer's names, of all texts in its code."""
    find = comfy.model_detection.unet_prefix_from_state_dict
    consts = find.__code__.co_consts
    texts = {text for it in consts for text in (it if isinstance(it, tuple) else (it,))}
    dotted = [it for it in texts if isinstance(it, str) and it.endswith(".")]
    return sorted(it for it in dotted if find(dict.fromkeys(f"{it}{n}" for n in range(9))) == it)


@with_files
@pytest.mark.parametrize("prefix", prefixes_of_comfyui())
def test_prefixes_that_comfyui_takes_off(prefix):
    weights = load_file(FOLDER / "bf16.safetensors")
    tensors = {f"{prefix}{name}": weight for name, weight in weights.items()}
    # As some trainers keep an average; ComfyUI leaves it out.
    tensors |= {f"average.{name}": torch.zeros_like(weight) for name, weight in weights.items()}
    save_file(tensors, FOLDER / "other_prefix.safetensors")
    assert torch.equal(stock("other_prefix.safetensors"), known())
    assert torch.equal(loaded("other_prefix.safetensors"), known())


@with_files
def test_a_model_with_what_loras_have_left_in_it():
    weights = load_file(FOLDER / "bf16.safetensors")
    layer = narrow.LAYER.replace(".1.", ".0.")
    shape = weights[f"{layer}.weight"].shape
    ends = {end: it for form in {**FORMS, **FAILING}.values() for end, it in form(*shape).items()}
    left = {f"{layer}{end}": tensor.contiguous() for end, tensor in ends.items()}
    save_file(weights | left, FOLDER / "left.safetensors")
    [part] = inspect_checkpoint(FOLDER / "left.safetensors").parts
    assert part.role == "transformer"
    assert torch.equal(stock("left.safetensors"), known())
    assert torch.equal(loaded("left.safetensors"), known())
    assert torch.equal(loaded("left.safetensors", "int8"), loaded("bf16.safetensors", "int8"))


@with_files
def test_what_comfyui_s_own_nodes_save_is_read_again():
    text = narrow_text_encoder.write(FOLDER / "text.safetensors", narrow_text_encoder.weights())
    model, clip = load_model(FOLDER / "bf16.safetensors")[0], load_text_encoder(text)[0]
    vae = load_vae(ROOT / "models" / "micro")[0]
    nodes_model_merging.CheckpointSave().save(model, clip, vae, "saved/all")
    nodes_model_merging.ModelSave().save(model, "saved/model")
    nodes_model_merging.CLIPSave().save(clip, "saved/clip")
    nodes_model_merging.VAESave().save(vae, "saved/vae")
    found = Path(folder_paths.get_output_directory(), "saved")
    checkpoint, alone = found / "all_00001_.safetensors", "{}_00001_.safetensors".format
    assert {it.role for it in inspect_checkpoint(checkpoint).parts} == {
        *("transformer", "text_encoder", "vae")
    }
    latents = torch.randn(1, 16, 1, 8, 8)
    known_text = clip.encode_from_tokens(clip.tokenize("a star"))
    for model_file, text_file, vae_file in (
        (checkpoint,) * 3,
        [found / alone(it) for it in ("model", "clip", "vae")],
    ):
        assert torch.equal(sample(load_model(model_file)[0]), known())
        again = load_text_encoder(text_file)[0]
        assert torch.equal(again.encode_from_tokens(again.tokenize("a star")), known_text)
        assert torch.equal(load_vae(vae_file)[0].decode(latents), vae.decode(latents))


# --- where 4 or 6 bits are decoded on load, and where they stay as small as they are

IN_BITS = {4: "asym_w4a8_int8", 6: "w6a8_int8"}


def published(bits: int) -> Source:
    """The header of a published transformer with all of its blocks' matrices in so many bits."""
    specs, texts = {}, {}
    for name, shape in FULL_SIZE.tensors().items():
        specs[name] = "BF16", shape
        if "transformer_blocks" not in name or len(shape) != 2:
            continue
        layer, (rows, columns) = name.removesuffix(".weight"), shape
        texts[f"{layer}.comfy_quant"] = json.dumps({"format": IN_BITS[bits]}).encode()
        specs[name] = "I8", (rows, columns * bits // 8)
        specs[f"{layer}.weight_s_rel"] = "F8_E4M3", (rows, columns // 16)
        specs[f"{layer}.weight_s_channel"] = "F32", (rows,)
        specs[f"{layer}.comfy_quant"] = "U8", (len(texts[f"{layer}.comfy_quant"]),)
    path = FOLDER / f"{bits}.safetensors"
    layout = SafetensorsLayout(specs, {})
    with path.open("wb") as file:
        file.write(layout.header)
        for name, text in texts.items():
            file.seek(len(layout.header) + layout.tensors[name].start)
            file.write(text)
        file.truncate(layout.file_bytes)  # sparse
    return open_source(path, "transformer")


@pytest.mark.parametrize("bits", IN_BITS)
def test_few_bits_are_decoded_where_the_card_has_room(bits):
    """Blocks of 7.1 GiB in 4 bits, and 12.7 GiB in int8."""
    source, known = published(bits), IN_BITS[bits] in QUANT_ALGOS
    for gib, room, packed, off_card in (
        (10, 64, "in int8 they would not fit in VRAM", True),
        (12, 64, "in int8 they would not fit in VRAM", True),
        (16, 64, "", True),
        (48, 64, "", False),
        (48, 16, "system RAM has no room for them in int8", False),
    ):
        if not known and room == 16:
            continue
        card = CardFacts("card", gib * GIB, (8, 9))
        with (
            mock.patch.object(load_plan, "card_facts", return_value=card),
            mock.patch.object(load_plan, "available_memory", return_value=room * GIB),
        ):
            plan = load_plan.plan_load(source, "auto")
        assert (plan.packed, plan.precision) == (packed if known else "", "int8"), gib
        assert plan.off_card == off_card, gib
        bytes_of_modulation = 60 * 2 * 3072 * 6 * 3072
        share = bits / 8 + 1 / 16 if plan.packed else 1  # and a scale for each 16 columns
        assert plan.modulation_bytes == pytest.approx(share * bytes_of_modulation, rel=1e-2)
