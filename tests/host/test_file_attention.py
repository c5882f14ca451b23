"""What a model file says of attention, which newer ComfyUIs read: against their own blocks."""

import functools
import json

import comfy.ldm.modules.attention as attention
import comfy_kitchen
import narrow_transformer as narrow
import pytest
import torch
from comfyui_boot import BASE, folder
from narrow_transformer import difference
from safetensors.torch import load_file, save_file

from qwen_l40s.hosts.comfyui.load.transformer import load_model
from qwen_l40s.hosts.comfyui.lora.apply import apply_lora
from qwen_l40s.hosts.comfyui.sample.attention import SLOT
from qwen_l40s.hosts.comfyui.sample.optimize import OptimizeSettings, optimize, report_of, restore
from qwen_l40s.hosts.comfyui.sample.run import OPTIMIZATION_KEY
from qwen_l40s.nodes.save import QwenL40SSaveQuantized

__test__ = hasattr(attention, "ComfyAttention")  # 0.33 does not read it
pytestmark = pytest.mark.usefixtures("inference_mode")
FOLDER = folder("file_attention")
WEIGHTS = narrow.weights()
INT8, SOL = ({"attention": f"comfy_kitchen_{name}"} for name in ("int8", "sol"))
SAVED = BASE / "models" / "diffusion_models" / "said.safetensors"
COMFYUI = OptimizeSettings(attention="comfyui")


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """The calls of a comfy-kitchen attention that rounds, on the processor: its block's number."""
    found = []

    def attention_comfy_kitchen_int8(q, k, v, heads, mask=None, **others):
        found.append(others["transformer_options"]["block_index"])
        q, k = ((part * 8).round() / 8 for part in (q, k))
        return attention.attention_pytorch(q, k, v, heads, mask, **others)

    rounding = attention.wrap_attn(attention_comfy_kitchen_int8)
    monkeypatch.setattr(attention, "attention_comfy_kitchen_int8", rounding)
    monkeypatch.setattr(attention, "COMFY_KITCHEN_INT8_ATTENTION_IS_AVAILABLE", True)
    monkeypatch.setattr(comfy_kitchen, "int8_attention_is_available", lambda device=None: True)
    return found


def configs(*blocks) -> dict[str, torch.Tensor]:
    return {
        f"transformer_blocks.{index}.attn.comfy_attention.config": torch.tensor(
            list(json.dumps(said).encode()), dtype=torch.uint8
        )
        for index, said in enumerate(blocks)
        if said is not None
    }


def lora(*blocks):
    """The path of one that changes a layer, and says this of the blocks."""
    tensors = narrow.lora(WEIGHTS, [narrow.LAYER]) | configs(*blocks)
    path = FOLDER / "lora.safetensors"
    save_file({f"diffusion_model.{name}": tensor for name, tensor in tensors.items()}, path)
    return path


def model(*blocks, precision="bf16"):
    path = FOLDER / f"{len(list(FOLDER.iterdir()))}.safetensors"
    return load_model(narrow.write(path, WEIGHTS | configs(*blocks)), precision)[0]


def forward(patcher, calls, masked=False):
    """Two steps, and the blocks whose attention rounded behind the step that is checked."""
    mask = {"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0]])} if masked else {}
    calls.clear()
    first = lambda step, *_: step == 0 and calls.clear()  # noqa: E731
    return narrow.sample(patcher, 7, values=mask, callback=first), list(calls)


def said_in_saved(patcher):
    QwenL40SSaveQuantized.execute(patcher, "int8", "said", True, "")
    entries = {name: t for name, t in load_file(SAVED).items() if "comfy_attention" in name}
    return {name: json.loads(bytes(t.tolist())) for name, t in entries.items()}


EXACT = functools.cache(lambda: forward(model(), []))


@pytest.mark.parametrize("settings", [COMFYUI, OptimizeSettings(), OptimizeSettings(blocks=False)])
@pytest.mark.parametrize("masked", [False, True])
def test_a_file_chooses_as_in_comfyuis_own_blocks(calls, settings, masked):
    stock = model(INT8, INT8)
    known = forward(stock, calls, masked)
    assert known[1] == [0, 1]
    clone = optimize(stock, settings)
    assert (
        "comfy_kitchen_int8, lossy: chosen for 2 of 2 blocks by the model's or a LoRA's file"
        in report_of(clone)
    )
    found = forward(clone, calls, masked)
    assert found[1] == [0, 1]
    assert difference(found[0], known[0]) < 2e-6
    assert clone.get_attachment(OPTIMIZATION_KEY).lossy_attention
    if not masked:
        assert difference(known[0], EXACT()[0]) > 1e-4
    assert report_of(clone).startswith("blocks: fused, " if settings.blocks else "blocks: Comfy")
    assert "comfy_kitchen_int8, lossy" in report_of(clone)


def test_one_block_alone(calls):
    stock = model(None, INT8)
    clone = optimize(stock)
    found, called = forward(clone, calls)
    assert called == [1]
    assert difference(found, forward(stock, calls)[0]) < 2e-6
    report = report_of(clone)
    assert "for 1 of 2 blocks by the model's or a LoRA's file\nattention: Comfy" in report
    assert report.endswith("ComfyUI's in the other 1")


def test_a_named_attention_and_another_node_win_over_the_file(calls):
    stock = model(INT8, INT8)
    for blocks in (True, False):
        named = optimize(stock, OptimizeSettings(blocks, "math"))
        found, called = forward(named, calls)
        assert not called
        assert difference(found, EXACT()[0]) < 2e-6
        assert "attention: math: requested" in report_of(named)
        assert "file" not in report_of(named)

    # One that gave NaN leaves its place to exact attention, not to the file's.
    failed = optimize(stock, OptimizeSettings(attention="math"))
    failed.model_options["transformer_options"][SLOT].give_up()
    found, called = forward(failed, calls)
    assert not called and difference(found, EXACT()[0]) < 2e-6

    def other(func, *arguments, **options):
        return func(*arguments, **options) * 0.5

    stock.model_options["transformer_options"][SLOT] = other
    known = forward(stock, calls)
    clone = optimize(stock)
    assert difference(forward(clone, calls)[0], known[0]) < 2e-6
    assert not calls
    assert "or another node's" in report_of(clone)


@pytest.mark.parametrize("first", [True, False])
def test_a_lora_chooses_too(calls, first):
    path = lora(None, INT8)
    stock = model(INT8, None)
    if first:
        changed, report = apply_lora(stock, path, 1.0, how="merge")
        clone = optimize(changed)
    else:
        clone, report = apply_lora(optimize(stock), path, 1.0, how="merge")
    assert (report.applied, report.not_applied) == (1, ())
    found, called = forward(clone, calls)
    assert called == [0, 1]
    assert difference(found, forward(restore(clone), calls)[0]) < 2e-6
    assert "chosen for 2 of 2" in report_of(clone)
    assert said_in_saved(clone).keys() == configs(INT8, INT8).keys()
    plain = optimize(stock)
    assert forward(plain, calls)[1] == [0]
    assert said_in_saved(stock).keys() == configs(INT8).keys()


def test_each_run_reads_the_file_anew(calls):
    prompt = [[torch.ones(1, 7, narrow.SHAPE.joint_dim), {}]]

    def run(patcher):
        calls.clear()
        narrow.sample(patcher, prompt)
        return set(calls), report_of(patcher)

    path = lora(INT8, None)
    clone = optimize(model(None, INT8))
    behind, _ = apply_lora(clone, path, 1.0, how="merge")
    for patcher, blocks in ((clone, {1}), (behind, {0, 1}), (clone, {1})):
        called, report = run(patcher)
        assert called == blocks
        assert f"for {len(blocks)} of 2 blocks by the model's or a LoRA's file" in report


def test_what_cannot_run_here_is_said(calls):
    stock = model([SOL, INT8], [SOL, {"attention": "sage9"}])
    clone = optimize(stock)
    assert forward(clone, calls)[1] == [0]
    report = report_of(clone)
    assert "attention: not comfy_kitchen_sol, which a file requests for 2 of 2" in report
    assert "blocks: the installed comfy-kitchen cannot run it on this device" in report
    assert "not sage9" in report
    assert "this ComfyUI does not let a file choose this attention" in report
    nothing = optimize(model(SOL, {}))
    assert difference(forward(nothing, calls)[0], EXACT()[0]) < 2e-6
    assert "no GPU to measure on" in report_of(nothing)
    assert "not comfy_kitchen_sol" in report_of(nothing)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_saved_file_says_the_same(calls, precision):
    said = [SOL | {"tau": 0.8}, INT8]
    stock = model(said, None, precision=precision)
    assert forward(stock, calls)[1] == [0]
    assert said_in_saved(stock) == {"transformer_blocks.0.attn.comfy_attention.config": said}
    assert forward(load_model(SAVED)[0], calls)[1] == [0]
