"""Our MODEL loader against ComfyUI's own, on one block of the real width, in every stored form.

Needs a ComfyUI that COMFYUI_PATH names, or one in ~/ComfyUI; without one these tests say so.
"""

import json
from pathlib import Path

import pytest
import torch
from comfyui_host import comfyui_folder, run_in_comfyui
from safetensors.torch import save_file

from qwen_l40s.loaders.convert import expected_tensors
from qwen_l40s.loaders.quantize import comfy_quant_tensor, layers_to_quantize, quantize_rows
from qwen_l40s.loaders.stored import rotate
from qwen_l40s.spec import TransformerShape

ROOT = Path(__file__).resolve().parent.parent
ONE_BLOCK = TransformerShape(1, 3072, 24, 128, 3584, 64, 64)
FP8 = torch.float8_e4m3fn
pytestmark = pytest.mark.timeout(300)

Tensors = dict[str, torch.Tensor]


def random_weights() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    weights: Tensors = {}
    for name, shape in expected_tensors(ONE_BLOCK).items():
        weight = torch.randn(shape, generator=generator)
        weight *= 0.5 / shape[1] ** 0.5 if len(shape) == 2 else 0.02
        weights[name] = (weight + (len(shape) == 1 and "norm" in name)).bfloat16()
    return weights


def quantized(weights: Tensors, layers: frozenset[str], change) -> Tensors:
    """The tensors with every layer's weight replaced by what `change(layer, weight)` returns."""
    rest = {name: w for name, w in weights.items() if name.removesuffix(".weight") not in layers}
    for layer in layers:
        entries = change(layer, weights[f"{layer}.weight"])
        rest |= {f"{layer}.{end}": tensor for end, tensor in entries.items()}
    return rest


def by_row(precision: str):
    def change(_layer: str, weight: torch.Tensor) -> Tensors:
        values, scale = quantize_rows(weight, precision)
        marker = comfy_quant_tensor(precision)
        return {"weight": values, "weight_scale": scale, "comfy_quant": marker}

    return change


def by_tensor(scale_name: str, marker: bool):
    def change(_layer: str, weight: torch.Tensor) -> Tensors:
        scale = weight.abs().max().float() / 448
        entries = {"weight": (weight.float() / scale).to(FP8), scale_name: scale}
        if marker:
            text = json.dumps({"format": "float8_e4m3fn", "full_precision_matrix_mult": True})
            entries["comfy_quant"] = torch.tensor(list(text.encode()), dtype=torch.uint8)
        return entries

    return change


def rotated(_layer: str, weight: torch.Tensor) -> Tensors:
    values, scale = quantize_rows(rotate(weight.float(), 256), "int8")
    settings = {"convrot": True, "convrot_groupsize": 256}
    marker = comfy_quant_tensor("int8", settings)
    return {"weight": values, "weight_scale": scale, "comfy_quant": marker}


def write_files(folder: Path) -> None:
    weights = random_weights()
    layers = layers_to_quantize(name.removesuffix(".weight") for name in weights)
    save_file(weights, folder / "bf16.safetensors")
    marker = {"__index_timestep_zero__": torch.zeros(0)}
    save_file(weights | marker, folder / "edit_2511.safetensors")
    condition = {"time_text_embed.addition_t_embedding.weight": weights["img_in.weight"][:, :2].t()}
    layered = {name: weight.contiguous() for name, weight in (weights | condition).items()}
    save_file(layered, folder / "layered.safetensors")
    prefixed = {f"model.diffusion_model.{name}": weight for name, weight in weights.items()}
    save_file(prefixed, folder / "prefixed.safetensors")
    sharded = folder / "sharded"
    sharded.mkdir()
    names = sorted(weights)
    files = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: weights[n] for n in names if files[n] == file}, sharded / file)
    index = sharded / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    for precision in ("int8", "fp8"):
        tensors = quantized(weights, layers, by_row(precision))
        save_file(tensors, folder / f"{precision}.safetensors")
    scaled = quantized(weights, layers, by_tensor("weight_scale", True))
    save_file(scaled, folder / "scaled_fp8.safetensors")
    old = quantized(weights, layers, by_tensor("scale_weight", False))
    # Two values: the older files' way to ask for products in full precision.
    old["scaled_fp8"] = torch.zeros(2, dtype=FP8)
    save_file(old, folder / "fp8_marker.safetensors")
    save_file(quantized(weights, layers, rotated), folder / "convrot.safetensors")
    unscaled = {name: weight.to(FP8) for name, weight in weights.items()}
    save_file(unscaled, folder / "unscaled_fp8.safetensors")
    exact = {name: weight.bfloat16() for name, weight in unscaled.items()}
    save_file(exact, folder / "unscaled_in_bf16.safetensors")


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> dict[str, float]:
    comfyui_folder()
    folder = tmp_path_factory.mktemp("one-block")
    write_files(folder)
    return json.loads(run_in_comfyui("comfyui_loader.py", folder).splitlines()[-1])


def test_bf16_is_bit_for_bit_what_comfyui_s_own_loader_gives(figures):
    same = {name: value for name, value in figures.items() if name.startswith("identical")}
    assert len(same) == 7
    assert {name for name, value in same.items() if value != 1.0} == set()


@pytest.mark.parametrize(("precision", "bound"), [("int8", 0.01), ("fp8", 0.04)])
def test_quantized_weights_stay_near_bf16(figures, precision, bound):
    """One block and two steps on a CPU: the error is that of the weights alone."""
    assert 0 < figures[f"{precision} against bf16"] <= bound
    assert figures[f"{precision} file is as {precision} on load"] == 1.0
    assert figures[f"{precision} dequantized against itself"] <= 5e-3


def test_comfyui_s_own_loader_reads_our_int8_file(figures):
    """It quantizes activations on a CPU too, and ours does not there."""
    assert figures["int8 file in ComfyUI's own loader against ours"] <= 0.015


@pytest.mark.parametrize(
    ("form", "bound"), [("scaled_fp8", 0.04), ("fp8_marker", 0.04), ("convrot", 0.015)]
)
def test_stored_forms_compute_what_comfyui_computes_from_them(figures, form, bound):
    assert 0 < figures[f"{form} against bf16"] <= bound
    assert figures[f"{form} against ComfyUI's own loader"] <= 5e-3


def test_unscaled_fp8_loses_nothing_on_the_way(figures):
    assert figures["unscaled fp8 holds fp8 values"] == 1.0
    assert figures["unscaled fp8 against its values in bf16"] <= 1e-5
