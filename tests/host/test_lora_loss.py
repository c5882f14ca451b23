"""What a merge rounds away, what `auto` makes of it, and scales that stand in the metadata.

On a small Qwen-Image in bf16, against plain arithmetic on whole matrices.
"""

import json
import math
from pathlib import Path
from unittest import mock

import comfy.sd
import comfyui_boot
import narrow_transformer as narrow
import pytest
import torch
from comfy.weight_adapter import LoKrAdapter, LoRAAdapter
from comfyui_boot import folder
from safetensors.torch import save_file

from qwen_l40s.errors import CheckpointError
from qwen_l40s.hosts.comfyui.lora import loss as lora_loss
from qwen_l40s.hosts.comfyui.lora.apply import apply_lora
from qwen_l40s.hosts.comfyui.lora.bypass import bypass_models, sampling_patcher
from qwen_l40s.hosts.comfyui.lora.loss import merge_loss

pytestmark = pytest.mark.usefixtures("inference_mode")
FOLDER = folder("lora_loss")
RANK = 4
WEIGHTS = narrow.weights()
LAYERS = [
    name.removesuffix(".weight")
    for name, weight in WEIGHTS.items()
    if name.startswith("transformer_blocks.") and weight.ndim == 2
]
Tensors = dict[str, torch.Tensor]


def model(dtype: torch.dtype = torch.bfloat16):
    tensors = {name: weight.to(dtype) for name, weight in WEIGHTS.items()}
    return narrow.stock(tensors, dtype, None)


def sample(patcher) -> torch.Tensor:
    return narrow.sample(patcher, [[narrow.random(1, 5, narrow.SHAPE.joint_dim), {}]])


def of_norm(share: float) -> Tensors:
    """A LoRA whose change has this part of the norm of each weight."""
    tensors = narrow.lora(WEIGHTS, LAYERS, RANK)
    for layer in LAYERS:
        up, down = (f"{layer}.lora_{end}.weight" for end in ("up", "down"))
        norm = (tensors[up] @ tensors[down]).norm() / WEIGHTS[f"{layer}.weight"].float().norm()
        tensors[up] = tensors[up] * (share / norm)
    return tensors


def change(tensors: Tensors, layer: str) -> torch.Tensor:
    up, down = (tensors[f"{layer}.lora_{end}.weight"].double() for end in ("up", "down"))
    return up @ down


def rounded(weight: torch.Tensor) -> torch.Tensor:
    return weight.to(torch.bfloat16).double()


def lost(tensors: Tensors, strength: float = 1.0) -> float:
    """The formula, over every element of every layer in float64."""
    above = below = 0.0
    for layer in LAYERS:
        weight, added = WEIGHTS[f"{layer}.weight"].double(), strength * change(tensors, layer)
        above += (rounded(weight + added) - weight - added).square().sum().item()
        below += added.square().sum().item()
    return math.sqrt(above / below)


def saved(tensors: Tensors, metadata: object = None) -> Path:
    path = FOLDER / "lora.safetensors"
    if metadata is not None and not isinstance(metadata, str):
        metadata = json.dumps(metadata, indent=2, sort_keys=True)
    stored = None if metadata is None else {"format": "pt", "lora_adapter_metadata": metadata}
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path, stored)
    return path


def test_auto_takes_bypass_where_a_merge_loses_more_than_a_fifth() -> None:
    base = model()
    for share, strength in ((0.001, 1.0), (0.005, 1.0), (0.005, -4.0), (0.02, 1.0), (0.02, 0.1)):
        tensors = of_norm(share)
        known, path = lost(tensors, strength), saved(tensors)
        found, report = apply_lora(base, path, strength, how="auto")
        assert report.loss == pytest.approx(known, rel=0.05), (share, strength)
        with mock.patch.object(lora_loss, "ELEMENTS", 2**24):
            _, whole = apply_lora(base, path, strength, how="auto")
        assert whole.loss == pytest.approx(known, rel=1e-5), (share, strength)
        how = "bypass" if known > 0.2 else "merge"
        assert report.how == how, (share, strength, known)
        text = whole.text()
        told = f"{known:.0%}" if known >= 0.1 else f"{known:.1%}"
        assert f"rounds away {told}" in text or f"round away {told}" in text, text
        assert "% longer (predicted for an L40S)" in text and "lora_mode" in text, text
        assert ("So auto chose bypass" in text) == (how == "bypass"), text
        same, by_name = apply_lora(base, path, strength, how=how)
        assert torch.equal(sample(found), sample(same))
        # Asked for, a merge tells what it loses too, and a bypass computes no share.
        assert by_name.loss == (report.loss if how == "merge" else None)
        assert "auto" not in by_name.text(), by_name.text()


def test_what_merge_and_bypass_keep_of_a_small_change() -> None:
    tensors = of_norm(0.003)
    base, path = model(), saved(tensors)
    merged, report = apply_lora(base, path, 1.0, how="merge")
    sample(merged)
    above = below = 0.0
    for layer in LAYERS:
        before, added = WEIGHTS[f"{layer}.weight"].double(), change(tensors, layer)
        after = merged.model.diffusion_model.get_submodule(layer).weight.double()
        above += (after - before - added).square().sum().item()
        below += added.square().sum().item()
    assert math.sqrt(above / below) == pytest.approx(report.loss, rel=0.01)
    assert 0.3 < report.loss < 0.7

    beside, _ = apply_lora(base, path, 1.0, how="bypass")
    (layers,) = bypass_models(sampling_patcher(beside))
    for name, pair in zip(layers.names, layers.changes, strict=True):
        known, up = change(tensors, name.removeprefix("diffusion_model.")), pair.up.weight.double()
        down = pair.down.weight[pair.start : pair.start + up.shape[1]].double()
        assert narrow.difference(up @ down, known) < 0.004, name


def test_the_share_is_of_the_weights_in_the_file() -> None:
    """Also while the same LoRA is merged into the model that is loaded."""
    base, path = model(), saved(of_norm(0.003))
    merged, first = apply_lora(base, path, 1.0, how="merge")
    sample(merged)
    loaded = merged.model.diffusion_model.get_submodule(narrow.LAYER).weight
    assert not torch.equal(loaded, WEIGHTS[f"{narrow.LAYER}.weight"])
    assert apply_lora(base, path, 1.0, how="merge")[1].loss == first.loss


def test_weights_in_fp32_keep_all() -> None:
    _, report = apply_lora(model(torch.float32), saved(of_norm(0.001)), 1.0, how="auto")
    assert (report.how, report.loss) == ("merge", 0.0)
    zeros = {name: tensor * ("up" not in name) for name, tensor in of_norm(0.001).items()}
    _, report = apply_lora(model(), saved(zeros), 1.0, how="auto")
    assert (report.how, report.loss) == ("merge", 0.0)


def test_weights_that_become_bf16_as_they_are_merged() -> None:
    """As those of a mapped fp32 file do under dynamic VRAM."""
    mapped = model(torch.float32)
    for layer in mapped.model.diffusion_model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight_comfy_model_dtype = torch.bfloat16
    _, report = apply_lora(mapped, saved(of_norm(0.001)), 1.0, how="auto")
    assert report.how == "bypass" and report.loss > 0.2


def test_a_loss_that_cannot_be_told() -> None:
    dora = of_norm(0.001) | {f"{narrow.LAYER}.dora_scale": torch.ones(128, 1)}
    base = model()
    found, report = apply_lora(base, saved(dora), 1.0, how="auto")
    assert (report.how, report.loss) == ("merge", None)
    core = comfy.sd.load_lora_for_models(base, None, dict(dora), 1.0, 0)[0]
    assert torch.equal(sample(found), sample(core))


def test_a_sample_stands_for_all() -> None:
    """24 layers, whose rows and columns differ in size, of which a hundredth is read."""
    noise = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=noise)

    patches, weights, above, below = {}, {}, 0.0, 0.0
    for layer in range(24):
        rows, columns = ((512, 768), (768, 512), (1024, 512))[layer % 3]
        weight = (normal(rows, columns) * 0.02 * (0.3 * normal(rows, 1)).exp()).bfloat16()
        up = normal(rows, 8) * (0.5 * normal(rows, 1)).exp() * 3e-5 * (1 + layer % 2)
        down = normal(8, columns) * (0.5 * normal(1, columns)).exp()
        patches[layer] = LoRAAdapter(set(), (up, down, 4.0, None, None, None))
        weights[layer] = weight
        added = 0.5 * (up.double() @ down.double())
        above += (rounded(weight.double() + added) - weight.double() - added).square().sum().item()
        below += added.square().sum().item()
    with mock.patch.object(lora_loss, "ELEMENTS", 2**17):
        found = merge_loss(patches, weights.__getitem__, 1.0)
        assert found == merge_loss(patches, weights.__getitem__, 1.0), "the seed is fixed"
    assert found == pytest.approx(math.sqrt(above / below), rel=0.05)


def test_the_loss_of_a_lokr() -> None:
    noise = torch.Generator().manual_seed(6)
    outer, left, right = (torch.randn(it, generator=noise) for it in ((8, 8), (32, 4), (4, 16)))
    outer = outer * 1e-3
    weight = (torch.randn(256, 128, generator=noise) * 0.02).bfloat16()
    adapter = LoKrAdapter(set(), (outer, None, 2.0, None, None, left, right, None, None))
    added = 0.7 * 0.5 * torch.kron(outer.double(), left.double() @ right.double())
    error = rounded(weight.double() + added) - weight.double() - added
    known = (error.norm() / added.norm()).item()
    assert merge_loss({"it": adapter}, {"it": weight}.get, 0.7) == pytest.approx(known, rel=1e-3)


def test_a_scale_that_stands_only_in_the_metadata() -> None:
    """As diffusers' save_lora_weights writes it, and save_lora_adapter without a prefix."""
    base, tensors = model(torch.float32), narrow.lora(WEIGHTS, LAYERS, RANK)
    patterns = {
        "alpha_pattern": {"attn.to_q": 1},
        "rank_pattern": {r"transformer_blocks.\d.*": RANK},
    }
    for config, scale, of_q in (
        ({"r": RANK, "lora_alpha": 2}, 0.5, 0.5),
        ({"r": RANK, "lora_alpha": 2, "use_rslora": True}, 1.0, 1.0),
        ({"r": 8, "lora_alpha": 2}, 0.25, 0.25),
        ({"r": 8, "lora_alpha": 2, **patterns}, 0.5, 0.25),
        ({"r": RANK, "target_modules": ["to_q"]}, 1.0, 1.0),
    ):
        with_alpha = dict(tensors)
        for layer in LAYERS:
            factor = of_q if layer.endswith("attn.to_q") else scale
            with_alpha[f"{layer}.alpha"] = torch.tensor(factor * RANK)
        core = comfy.sd.load_lora_for_models(base, None, with_alpha, 1.0, 0)[0]
        expected = sample(core)
        for prefix in ("transformer.", ""):
            path = saved(
                {f"{prefix}{name}": tensor for name, tensor in tensors.items()},
                {f"{prefix}{name}": value for name, value in config.items()},
            )
            for how in ("merge", "bypass"):
                found = sample(apply_lora(base, path, 1.0, how=how)[0])
                assert narrow.difference(found, expected) < 1e-6, (config, prefix, how)
    # What the tensors say comes first.
    path = saved(with_alpha, {"transformer.r": RANK, "transformer.lora_alpha": 400})
    found = sample(apply_lora(base, path, 1.0, how="merge")[0])
    assert torch.equal(found, expected)


def test_metadata_that_tell_no_scale() -> None:
    tensors = narrow.lora(WEIGHTS, LAYERS, RANK)
    base = model()
    for metadata in (
        "not JSON",
        "[1]",
        {"transformer.lora_alpha": "two", "transformer.r": 4},
        {"transformer.lora_alpha": 2, "transformer.r": 0},
        {"transformer.lora_alpha": 2, "transformer.r": -4},
        {"transformer.lora_alpha": 2, "transformer.r": 4, "transformer.alpha_pattern": {"(": 1}},
        {"transformer.lora_alpha": 2, "transformer.r": 4, "transformer.rank_pattern": 3},
        # Python's `re` would take longer than anybody waits.
        {"lora_alpha": 2, "r": 4, "alpha_pattern": {r"(\w+)+!": 1}},
        {"lora_alpha": 2, "r": 4, "rank_pattern": {".*.*.*.*.*.*.*.*.*!": 1}},
    ):
        path = saved(tensors, metadata)
        comfyui_boot.refused(
            CheckpointError,
            "'lora_adapter_metadata'",
            "cannot be used",
            "download the file again",
            path.name,
            run=lambda path=path: apply_lora(base, path, 1.0, how="merge"),
        )


def test_a_down_matrix_that_is_a_number_is_refused() -> None:
    tensors = narrow.lora(WEIGHTS, LAYERS, RANK)
    name = next(name for name in tensors if "lora_down" in name)
    path = saved(tensors | {name: torch.tensor(1.0)})
    with pytest.raises(CheckpointError, match="must be a matrix"):
        apply_lora(model(), path, 1.0, how="merge")
