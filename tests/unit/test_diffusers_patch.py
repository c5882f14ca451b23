"""A diffusers transformer that `optimize` has made fast, against itself without it."""

import copy
import functools
import gc
import inspect
import io
import json
import logging
import pickle
import re
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import published_attention
import pytest
import torch
from host_snapshot import changed, instances, modules_and_classes
from PIL import Image

pytest.importorskip("diffusers")

import diffusers
from block_kernel_cases import with_kernels
from diffusers import QwenImageTransformer2DModel
from diffusers.models import attention_dispatch
from diffusers.models.transformers.transformer_qwenimage import (
    QwenDoubleStreamAttnProcessor2_0 as Double,
)

from qwen_l40s.caches import forget
from qwen_l40s.cli import main
from qwen_l40s.errors import UnavailableError
from qwen_l40s.hosts.diffusers import qwen_image
from qwen_l40s.hosts.diffusers.layers import DiffusersLayers
from qwen_l40s.hosts.diffusers.load import load_pipeline
from qwen_l40s.hosts.diffusers.patch import optimize
from qwen_l40s.hosts.diffusers.quantized import quantize_transformer
from qwen_l40s.hosts.diffusers.sample import sample
from qwen_l40s.hosts.diffusers.settings import GenerateSettings
from qwen_l40s.hosts.diffusers.step_cache import cache_steps
from qwen_l40s.optimizations import inventory
from qwen_l40s.optimizations import run as runs
from qwen_l40s.optimizations.attention import BACKENDS
from qwen_l40s.optimizations.attention import backends as sdpa
from qwen_l40s.optimizations.blocks import block_form
from qwen_l40s.optimizations.blocks import host as block_host
from qwen_l40s.optimizations.blocks.block import BlockExecutor
from qwen_l40s.optimizations.fused import TORCH
from qwen_l40s.optimizations.linear import choose_gemm
from qwen_l40s.verdict import Verdict

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCKS, HEADS, HEAD_DIM, TEXT_DIM, CHANNELS = 3, 2, 32, 24, 16
GRID = (1, 3, 4)
TOKENS = 12


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    """Counts the blocks that the executor runs, and whether they go on into the next."""
    calls = []
    run = BlockExecutor.run

    def counted(self, block, text, image, step, halves, following=None):
        calls.append(following is not None)
        return run(self, block, text, image, step, halves, following)

    monkeypatch.setattr(BlockExecutor, "run", counted)
    return calls


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def new_model(dtype=torch.float32, blocks=BLOCKS, head_dim=HEAD_DIM, **options):
    axes = (head_dim - 2 * (head_dim // 8 * 2 + 4), head_dim // 8 * 2 + 4, head_dim // 8 * 2 + 4)
    model = QwenImageTransformer2DModel(
        in_channels=CHANNELS,
        out_channels=CHANNELS // 4,
        num_layers=blocks,
        attention_head_dim=head_dim,
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT_DIM,
        axes_dims_rope=axes,
        **options,
    )
    with torch.no_grad():
        for i, weight in enumerate(model.parameters()):
            scale = weight.shape[1] ** -0.5 if weight.dim() == 2 else 0.2
            weight.copy_(random(*weight.shape, seed=i) * scale + (weight.dim() == 1) * 0.5)
    model = model.eval()
    for weight in model.parameters():  # `to` warns of a list that is empty here
        weight.data = weight.data.to(dtype)
    return model


def inputs(batch=1, text=5, time=0.7, dtype=torch.float32, seed=0, grid=None, **more):
    shapes = [[GRID] if grid is None else grid] * batch
    tokens = sum(frames * height * width for frames, height, width in shapes[0])
    return {
        "hidden_states": random(batch, tokens, CHANNELS, seed=seed, dtype=dtype),
        "encoder_hidden_states": random(batch, text, TEXT_DIM, seed=seed + 1, dtype=dtype),
        "timestep": torch.full((batch,), time, dtype=dtype),
        "img_shapes": shapes,
        "return_dict": False,
        **more,
    }


def text_mask(*lengths, text=5):
    return torch.arange(text)[None] < torch.tensor(lengths)[:, None]


def relative(ours, theirs):
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


def assert_fused(model, given, fused, most=1e-6, *, across=True, **options):
    """The optimized model ran all blocks by the executor and gives what the host gives."""
    expected = model(**given)[0]
    del fused[:]
    with optimize(model, **options) as optimized:
        ours = model(**given)[0]
    assert len(fused) == BLOCKS
    assert fused[:-1] == [across] * (BLOCKS - 1)
    assert f"blocks: fused, {BLOCKS} of {BLOCKS} in 1 forward passes" in optimized.report()
    assert relative(ours, expected) <= most
    assert torch.equal(model(**given)[0], expected)
    return optimized


def assert_host(model, given, fused, reason, blocks=BLOCKS, **options):
    """So many blocks ran diffusers' own way, for that reason; with all, bit for bit."""
    expected = model(**given)[0]
    del fused[:]
    optimized = optimize(model, **options)
    ours = model(**given)[0]
    assert f"blocks: diffusers' code, {blocks} of {BLOCKS}: " in optimized.report()
    assert reason in optimized.report()
    assert len(fused) == BLOCKS - blocks
    if blocks == BLOCKS:
        assert torch.equal(ours, expected)
    else:
        assert relative(ours, expected) <= 1e-6
    optimized.restore()
    return optimized


# --- the same picture ---


def wrap_lora(model, name, scale=1.0):
    """What PEFT makes of a layer: a module of its own with the layer inside."""

    class Lora(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.base_layer, self.scale = layer, scale
            self.in_features, self.out_features = layer.in_features, layer.out_features
            self.down = random(4, layer.in_features, seed=7) * 0.3
            self.up = random(layer.out_features, 4, seed=8) * 0.3

        @property
        def weight(self):
            return self.base_layer.weight

        @property
        def bias(self):
            return self.base_layer.bias

        def forward(self, x):
            return self.base_layer(x) + x @ self.down.T @ self.up.T * self.scale

    parent, _, leaf = name.rpartition(".")
    lora = Lora(model.get_submodule(name))
    model.get_submodule(parent)._modules[leaf] = lora
    return lora


def add_loras(model):
    for name in (
        *("attn.to_q", "attn.add_v_proj", "attn.to_out.0", "attn.to_add_out"),
        *("img_mlp.net.0.proj", "txt_mlp.net.2"),
    ):
        wrap_lora(model, f"transformer_blocks.1.{name}")


def give_another_class(model):
    """As torchao's and those of tensor parallelism."""

    class Packed(torch.nn.Parameter):
        pass

    layer = model.transformer_blocks[0].attn.to_q
    layer.weight = Packed(layer.weight.data)


def store_in_fewer_bits(model):
    model.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)


def hook_a_layer(model):
    layer = model.transformer_blocks[1].img_mlp.net[2]
    layer.register_forward_hook(lambda module, args, out: out + 0.1)


def mask_of(*lengths):
    return {"batch": len(lengths), "encoder_hidden_states_mask": text_mask(*lengths)}


def residuals(count):
    samples = [random(2, TOKENS, HEADS * HEAD_DIM, seed=40 + i) for i in range(count)]
    return {"batch": 2, "controlnet_block_samples": samples}


NOTHING = MappingProxyType({})


class Same(NamedTuple):
    """A case: options of the model, inputs, how the model is changed, options of `optimize`."""

    model: Mapping = NOTHING
    given: Mapping = NOTHING
    change: Callable = id
    options: Mapping = NOTHING
    said: str = ""
    across: bool = True


EDIT = {"zero_cond_t": True}
REFERENCES = {"grid": [GRID, (1, 2, 2), (1, 2, 3)]}
LAYERED = {"use_additional_t_cond": True, "use_layer3d_rope": True}
LAYERS = {"grid": [GRID] * 3}
HOLES = torch.tensor([[True, False, True, False, True]])
SAME = {
    "one item": Same(),
    "five items": Same(given={"batch": 5}),
    "one text token": Same(given={"text": 1}),
    "a mask": Same(given=mask_of(5, 3)),
    "a mask of numbers": Same(given={"encoder_hidden_states_mask": text_mask(3).long()}),
    "a mask with holes": Same(given={"encoder_hidden_states_mask": HOLES}),
    "a mask of nothing": Same(given=mask_of(5)),
    "an empty prompt": Same(given=mask_of(5, 0)),
    "a LoRA's scale alone": Same(given={"attention_kwargs": {"scale": 0.5}}),
    "no attention arguments": Same(given={"attention_kwargs": {}}),
    "an edit model without references": Same(EDIT, {"batch": 2}),
    "references at timestep zero": Same(EDIT, REFERENCES),
    "references of two items": Same(EDIT, REFERENCES | {"batch": 2}),
    "references beside a mask": Same(EDIT, REFERENCES | mask_of(4, 2)),
    "layers": Same(LAYERED, LAYERS | {"additional_t_cond": torch.tensor([0])}),
    "other layers": Same(LAYERED, LAYERS | {"additional_t_cond": torch.tensor([1])}),
    "a ControlNet of one block": Same(given=residuals(1), across=False),
    "a ControlNet of all blocks": Same(given=residuals(BLOCKS), across=False),
    "LoRAs": Same(given={"batch": 2}, change=add_loras, said="layers: 6 of 36 run diffusers' code"),
    "another class": Same(change=give_another_class, said="layers: 1 of 36 run diffusers' code"),
    "fewer bits": Same(change=store_in_fewer_bits, said="layers: 36 of 36 run diffusers' code"),
    "a hook on a layer": Same(change=hook_a_layer),
    "diffusers' attention": Same(
        options={"attention": "diffusers"}, said="attention: diffusers' code: native, as requested"
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_fp32_prediction_is_that_of_diffusers(name, fused):
    case = SAME[name]
    model, given = new_model(**case.model), inputs(**case.given)
    plain = model(**given)[0]
    case.change(model)
    if case.change in (add_loras, hook_a_layer):
        assert relative(model(**given)[0], plain) > 1e-3
    optimized = assert_fused(model, given, fused, across=case.across, **case.options)
    assert case.said in optimized.report()


def test_controlnet_residuals_that_are_given_by_place(fused):
    model, given = new_model(), inputs(**residuals(1))
    order = list(inspect.signature(model.forward).parameters)
    positional = [given.get(it) for it in order[: order.index("controlnet_block_samples") + 1]]
    expected = model(*positional, return_dict=False)[0]
    optimize(model)
    assert relative(model(*positional, return_dict=False)[0], expected) <= 1e-6
    assert fused == [False] * BLOCKS


def hook_a_block(model):
    model.transformer_blocks[2].register_forward_hook(lambda *call: None)


def offload(model):
    from accelerate import cpu_offload

    cpu_offload(model, execution_device=torch.device("cpu"))


def compile_blocks(model):
    model.compile_repeated_blocks(backend="eager")


HALF = Same({"dtype": torch.float16}, {"dtype": torch.float16})
HOSTS = {
    "fp16": HALF._replace(said="torch.float16"),
    "heads of 24": Same({"head_dim": 24}, said="heads of 24"),
    "training": Same(change=lambda model: model.train(), said="training mode"),
    "a hook on a block": Same(change=hook_a_block, said="another extension has changed the blocks"),
    "weights that accelerate moves": Same(change=offload, said="changed by another extension"),
    "blocks that torch compiles": Same(change=compile_blocks, said="torch.compile runs the blocks"),
}


@pytest.mark.parametrize("name", HOSTS)
def test_what_the_kernels_do_not_take_runs_diffusers_way(name, fused):
    case = HOSTS[name]
    model = new_model(**case.model)
    case.change(model)
    assert_host(model, inputs(**case.given), fused, case.said)


def test_calls_that_the_kernels_do_not_take(fused, monkeypatch, caplog):
    model, given = new_model(), inputs()
    optimized = optimize(model)
    with torch.enable_grad():
        model(**given)[0].sum().backward()
    assert model.transformer_blocks[0].attn.to_q.weight.grad.abs().sum() > 0
    assert "gradients are recorded" in optimized.report() and not fused
    with torch.inference_mode():
        model(**given)
    assert len(fused) == BLOCKS
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_host(new_model(), given, fused, "autocast is on")
    monkeypatch.setattr(block_host, "choose_ops", lambda device: Verdict("no Triton", final=True))
    caplog.clear()
    optimize(model := new_model())
    for _ in range(3):
        model(**given)
    [record] = caplog.records  # a reason is logged once
    assert "no Triton" in record.getMessage()


def test_mask_among_the_arguments_of_attention(fused):
    """As diffusers 0.37 and 0.38 pass it to the blocks."""
    if diffusers.__version__ < "0.39":
        pytest.skip(f"diffusers {diffusers.__version__} does so in every test of a mask")
    model, given = new_model(), inputs(2)
    mask = torch.cat([text_mask(5, 2), torch.ones(2, TOKENS, dtype=torch.bool)], dim=1)
    expected = model(**given, encoder_hidden_states_mask=text_mask(5, 2))[0]

    class Older(Double):
        def __call__(self, attn, hidden_states, attention_mask=None, **others):
            text = None if attention_mask is None else attention_mask[:, :5]
            others["encoder_hidden_states_mask"] = text
            return super().__call__(attn, hidden_states, **others)

    Older.__call__.__signature__ = inspect.signature(Double.__call__)
    for block in model.transformer_blocks:
        block.attn.processor = Older()
    given["attention_kwargs"] = {"attention_mask": mask}
    assert torch.equal(model(**given)[0], expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qwen_image.TransformerPass, "processors", (Older,))
        assert_fused(model, given, fused)


def test_whole_pipeline_of_every_kind_of_run(tiny_folder, fused):
    settings = {"prompt": "a red star", "width": 64, "height": 48, "steps": 4}
    host = load_pipeline(tiny_folder, precision="fp32", device="cpu")
    ours = load_pipeline(tiny_folder, precision="fp32", device="cpu", optimized=True)
    assert host.optimized is None
    for cfg, batch in ((1.0, 1), (4.0, 2)):
        run = GenerateSettings(**settings, cfg=cfg, batch=batch)
        expected = sample(host, run, progress=False)
        assert not fused
        assert relative(sample(ours, run, progress=False), expected) < 1e-5
        passes = run.steps * (2 if run.cfg > 1 else 1)
        assert len(fused) == 2 * passes
        report = ours.optimized.report()
        assert f"in {passes} forward passes" in report
        # A first pass fills in the table for the whole schedule.
        assert "modulation: 4 timesteps in a table" in report
        assert f"used {passes - 1} times, 4 computed in this run" in report
        del fused[:]


# --- off ---


def test_restored_transformer_is_as_it_was(fused):
    model, given = new_model(), inputs()
    expected, before = model(**given)[0], dict(model.__dict__)
    keys, signature = model.state_dict().keys(), inspect.signature(model.forward)
    optimized = optimize(model)
    assert "forward" in model.__dict__
    assert inspect.signature(model.forward) == signature
    model(**given)
    assert model.state_dict().keys() == keys
    report = optimized.report()
    optimized.restore()
    assert model.__dict__ == before
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert torch.equal(model(**given)[0], expected)
    assert len(fused) == BLOCKS
    assert optimized.report() == report
    optimized.restore()  # a second time does nothing


@pytest.mark.slow
def test_a_pipeline_is_as_before_but_for_what_is_listed(tiny_folder):
    pipe = load_pipeline(tiny_folder, precision="fp32", device="cpu").to_diffusers()
    settings = {"width": 64, "height": 48, "num_inference_steps": 12, "output_type": "latent"}
    pipe("a red star", **settings)
    before = modules_and_classes() | instances(pipe=pipe, **pipe.components)
    with optimize(pipe.transformer), cache_steps(pipe, "balanced"):
        pipe("a red star", **settings)
    after = modules_and_classes() | instances(pipe=pipe, **pipe.components)
    assert changed(before, after) == []


def test_optimizing_again_replaces_the_first_time(fused):
    model, given = new_model(), inputs()
    first = optimize(model)
    second = optimize(model, attention="math")
    model(**given)
    assert len(fused) == BLOCKS
    assert "attention: math: requested" in second.report()
    first.restore()
    model(**given)
    assert len(fused) == 2 * BLOCKS
    second.restore()
    assert "forward" not in model.__dict__


def test_deleted_transformer_frees_its_memory_at_once():
    model = new_model()
    optimized = optimize(model)
    with optimized.run():
        model(**inputs())
    alive = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert alive() is None
    finally:
        gc.enable()
    optimized.restore()


def stored_in_a_file(model):
    file = io.BytesIO()
    torch.save(model, file)
    assert b"qwen_l40s" not in file.getvalue()  # it is read where this package is not
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, stored_in_a_file, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["copy", "file", "pickle"],
)
@pytest.mark.parametrize("change", ["optimized", "wrapped before", "run"])
def test_copy_runs_diffusers_own_code(copied, change, fused):
    model, given = new_model(), inputs()
    expected = model(**given)[0]
    if change == "wrapped before":
        model.forward = functools.partial(model.forward)
    optimized = optimize(model)
    run = optimized.run() if change == "run" else nullcontext()
    with run:
        if change == "run":
            model(**given)
            fused.clear()
        copied = copied(model)
    for weight in copied.parameters():
        weight.mul_(2)
    model(**given)
    assert len(fused) == BLOCKS
    doubled = copied(**given)[0]
    assert len(fused) == BLOCKS
    assert relative(doubled, expected) > 0.1
    optimize(copied)
    assert relative(copied(**given)[0], doubled) <= 1e-6
    assert len(fused) == 2 * BLOCKS


def test_other_models_pass_through_with_a_sentence():
    for other in (torch.nn.Linear(2, 2), "a string"):
        optimized = optimize(other)
        assert f"The model is {type(other).__name__}, not a" in optimized.report()
        with optimized, optimized.run():
            pass


# --- what another extension has done ---


def test_error_in_a_block_leaves_the_model_as_it_was(fused, monkeypatch):
    model, given = new_model(), inputs()
    expected = model(**given)[0]
    optimize(model)

    def stop(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(qwen_image.TransformerPass, "entry", stop)
        with pytest.raises(KeyboardInterrupt):
            model(**given)
    assert not any("forward" in block.__dict__ for block in model.transformer_blocks)
    assert relative(model(**given)[0], expected) <= 1e-6
    assert len(fused) == BLOCKS


def test_arguments_that_diffusers_refuses_are_refused_by_diffusers():
    model = new_model()
    optimize(model)
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        model(**inputs(), colour="red")


def test_two_threads_run_one_after_the_other(fused):
    model = new_model()
    batches = [inputs(seed=seed, time=0.1 + 0.1 * seed) for seed in range(4)]
    expected = [model(**given)[0] for given in batches]
    optimize(model)
    results = [None] * len(batches)

    def work(index):
        with torch.no_grad():
            for _ in range(3):
                results[index] = model(**batches[index])[0]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ours, theirs in zip(results, expected, strict=True):
        assert relative(ours, theirs) <= 1e-6
    assert len(fused) == 12 * BLOCKS


class Scaled(Double):
    def __call__(self, *args, **kwargs):
        return tuple(2 * part for part in super().__call__(*args, **kwargs))


# diffusers drops the arguments that it does not find there.
Scaled.__call__.__signature__ = inspect.signature(Double.__call__)


def test_attention_processor_of_the_user_is_called(fused):
    model, given = new_model(), inputs()
    plain = model(**given)[0]
    model.transformer_blocks[1].attn.set_processor(Scaled())
    assert_host(model, given, fused, "its attention processor is Scaled", blocks=1)
    # The border into that block is not crossed, nor is the one out of it.
    assert fused == [False, False]
    for block in model.transformer_blocks:
        block.attn.set_processor(Scaled())
    assert relative(model(**given)[0], plain) > 1e-2
    assert_host(model, given, fused, "its attention processor is Scaled")


@pytest.fixture
def backends(monkeypatch):
    """Counts the calls of diffusers' attention backends, and puts back which one is chosen."""
    calls = []
    dispatch = attention_dispatch.dispatch_attention_fn
    registry = attention_dispatch._AttentionBackendRegistry
    monkeypatch.setattr(registry, "_active_backend", registry._active_backend)

    def counted(*args, backend=None, **kwargs):
        calls.append(getattr(backend, "value", backend))
        return dispatch(*args, backend=backend, **kwargs)

    monkeypatch.setattr(attention_dispatch, "dispatch_attention_fn", counted)
    return calls


def test_attention_backend_of_the_user_runs_in_the_fused_blocks(fused, backends):
    chosen = "attention: diffusers' code: _native_math, chosen in diffusers"
    with attention_dispatch.attention_backend("_native_math"):
        assert chosen in assert_fused(new_model(), inputs(), fused).report()
    # Twice the host's model, and once ours, which asks for it alike.
    assert backends == [None] * BLOCKS
    assert "sdpa_flash: no GPU" in assert_fused(new_model(), inputs(), fused).report()
    model = new_model()
    model.set_attention_backend("_native_math")
    for mask in ({}, {"encoder_hidden_states_mask": text_mask(3)}):
        del backends[:]
        assert chosen in assert_fused(model, inputs(**mask), fused).report()
        assert backends == ["_native_math"] * BLOCKS
    del backends[:]
    optimized = assert_fused(model, inputs(), fused, attention="math")  # a name comes first
    assert backends == []
    assert "attention: math: requested" in optimized.report()


def test_attention_in_8_bits_and_the_fastest(fused, monkeypatch):
    """By its older names too, which files of settings may have."""
    with pytest.raises(UnavailableError, match="kitchen_int8 cannot run on cpu"):
        optimize(new_model(), attention="int8")
    published_attention.on_every_device(monkeypatch)
    for name in ("kitchen_int8", "int8", "int8_fp8"):
        optimized = assert_fused(new_model(), inputs(), fused, 0.03, attention=name)
        assert "attention: kitchen_int8: requested" in optimized.report()
    masked = inputs(encoder_hidden_states_mask=text_mask(3))
    optimized = assert_fused(new_model(), masked, fused, attention="fast")
    assert "in the first forward pass, as the reference" in optimized.report()
    for given, found in ((inputs(), "kitchen_int8 error 0.0"), (masked, "not kitchen_int8: takes")):
        optimized = optimize(model := new_model(), attention="fast")
        with optimized.run():
            for _ in range(2):  # the second pass knows the errors
                model(**given)
        assert f"; 8 bits: {found}" in optimized.report(), optimized.report()
        assert "; at most 0.02 allowed" in optimized.report()


def test_named_attention_that_takes_no_mask_leaves_masked_passes_to_another(fused, monkeypatch):
    limits = sdpa.Limits(masks=False)
    without_masks = sdpa.Backend("maskless", sdpa.MATH.attend, cpu=limits)
    monkeypatch.setitem(BACKENDS, "maskless", without_masks)
    model = new_model()
    optimized = assert_fused(model, inputs(), fused, attention="maskless")
    assert "attention: maskless: requested" in optimized.report()
    given = inputs(encoder_hidden_states_mask=text_mask(3))
    optimized = assert_fused(model, given, fused, attention="maskless")
    assert "attention maskless cannot run on cpu: takes no mask" in optimized.report()


@pytest.mark.parametrize("lossy", [False, True])
def test_attention_that_gives_nan_is_given_up(lossy, fused, monkeypatch, caplog):
    def attend(q, k, v, mask=None):
        worn = q.shape[1] == TOKENS + 5  # in the trial of the backend there are others
        return sdpa.MATH.attend(q, k, v, mask) * (torch.nan if worn else 1)

    broken = sdpa.Backend("broken", attend, not lossy, cpu=sdpa.ANY)
    monkeypatch.setitem(BACKENDS, "broken", broken)
    model, given = new_model(), inputs()
    expected = model(**given)[0]
    optimized = optimize(model, attention="broken")
    with optimized.run():
        for _ in range(2):
            assert relative(model(**given)[0], expected) <= 1e-6
    assert optimized.report().splitlines()[-1] == (
        "attention: diffusers' code: broken gave NaN or infinity"
    )
    assert "blocks: fused, 6 of 6" in optimized.report()
    assert [record.getMessage() for record in caplog.records] == [
        "Qwen-Image Accelerator: broken gave NaN or infinity: diffusers' attention runs from here."
    ]


@pytest.mark.parametrize("name", ["attn.to_k", "img_mod.1", "txt_mod.1"])
def test_lora_that_comes_and_goes_between_runs(name, fused):
    model, given = new_model(), inputs()
    optimized = optimize(model)

    def same():
        expected = type(model).forward(model, **given)[0]
        with optimized.run():
            for _ in range(2):
                assert relative(model(**given)[0], expected) <= 1e-6
        return expected

    without = same()
    lora = wrap_lora(model, f"transformer_blocks.0.{name}")
    for scale in (1.0, 0.3):
        lora.scale = scale
        assert relative(same(), without) > 1e-3
    own = "in 2 forward passes, because its layers are not plain linear layers"
    assert (own in optimized.report()) == ("mod" in name)
    parent, _, leaf = name.rpartition(".")
    model.get_submodule(f"transformer_blocks.0.{parent}")._modules[leaf] = lora.base_layer
    assert torch.equal(same(), without)
    assert len(fused) == 8 * BLOCKS


def test_weights_of_the_modulation_that_change_between_runs(fused):
    """`Parameter.data` leaves no trace: neither the address nor the version counter changes."""
    model = new_model()
    optimized = optimize(model)
    weight = model.transformer_blocks[2].txt_mod[1].weight
    version, address = weight._version, weight.data_ptr()
    for marked in (True, True, False, False):
        expected = type(model).forward(model, **inputs())[0]
        with optimized.run() if marked else nullcontext():
            assert relative(model(**inputs())[0], expected) <= 1e-6
        table = "1 timesteps in a table" if marked else "outside `Optimized.run`"
        assert table in optimized.report()
        weight.data += 0.1
        assert (weight._version, weight.data_ptr()) == (version, address)


@pytest.mark.parametrize("zero_cond_t", [False, True])
def test_schedule_of_a_run_fills_the_table_at_once(zero_cond_t):
    model = new_model(torch.bfloat16, zero_cond_t=zero_cond_t)
    optimized = optimize(model)
    schedule = torch.tensor([900.0, 612.3, 250.0, 33.3])

    def step(time, batch=2):
        return inputs(batch, dtype=torch.bfloat16) | {
            "timestep": time.expand(batch).to(torch.bfloat16) / 1000
        }

    with optimized.run(lambda: schedule):
        for count, time in enumerate([*schedule, schedule[0]], start=1):
            model(**step(time))
            report = optimized.report()
            assert f"4 timesteps in a table of 0 MiB, used {count - 1} times, 4 co" in report
            assert f"{3 * count} of {3 * count} in {count} forward passes" in report
    with optimized.run():
        model(**step(schedule[0]))
    assert "1 timesteps in a table of 0 MiB, used 0 times, 1 computed" in optimized.report()
    assert "3 of 3 in 1 forward passes" in optimized.report()


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_quantized_layers(precision, fused):
    """On a processor fp8 layers run themselves; int8 has a GEMM there."""
    model = new_model()
    quantize_transformer(model, precision)
    optimized = assert_fused(model, inputs(2), fused, most=0.02)
    if precision == "fp8":
        assert "layers: 36 of 36 run diffusers' code" in optimized.report()
        return
    assert "layers: int8 through int_mm" in optimized.report()
    assert re.findall(r"layers: (.*) rotated, (.*) columns", optimized.report()) == [
        ("30 of 36", "64"),
        ("6 of 36", "256"),
    ]
    assert "run diffusers' code" not in optimized.report()
    layer = model.transformer_blocks[2].attn.to_q
    layer.product = choose_gemm("int8", torch.device("cpu"), backend="dequantize")
    optimized = assert_fused(model, inputs(), fused, most=0.02)  # two GEMMs of one format
    assert "layers: 1 of 36 run diffusers' code" in optimized.report()


def test_modules_and_blocks_that_are_exchanged_between_runs(fused):
    class Own(torch.nn.Module):
        def forward(self, hidden_states, encoder_hidden_states, **others):
            return hidden_states * 0.5, encoder_hidden_states * 0.25

    model, given = new_model(), inputs()
    optimized = optimize(model)
    blocks = model.transformer_blocks

    def same(executed):
        expected = type(model).forward(model, **given)[0]
        del fused[:]
        with optimized.run():
            assert relative(model(**given)[0], expected) <= 1e-6
        assert len(fused) == executed

    same(3)
    blocks[0].img_norm2 = torch.nn.LayerNorm(HEADS * HEAD_DIM, eps=1e-6)  # it has weights
    same(2)
    assert "diffusers' code, 1 of 3: its LayerNorms have weights" in optimized.report()
    blocks[0].attn = Own()
    same(2)
    assert "it has an unknown form" in optimized.report()
    other = new_model()
    for weight in other.parameters():
        weight.mul_(0.7)
    blocks[0] = other.transformer_blocks[1]
    same(3)
    del blocks[0]
    same(2)


def test_first_block_cache(fused):
    from diffusers import FirstBlockCacheConfig

    model = new_model()
    model.enable_cache(FirstBlockCacheConfig(threshold=0.0))
    optimized = optimize(model)
    with model.cache_context("a run"):
        first, second = (model(**inputs())[0] for _ in range(2))
    assert relative(second, first) <= 1e-6  # what was cached is added again
    assert "another extension has changed the blocks" in optimized.report()
    assert not fused
    model.disable_cache()
    assert relative(model(**inputs())[0], first) <= 1e-6
    assert len(fused) == BLOCKS


def test_whole_model_offload_keeps_the_fast_path(fused):
    """Which takes its hook off after every image, and with it what stands in its place."""
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    model, given = new_model(), inputs()
    expected = model(**given)[0]
    for first in (True, False):
        if first:
            add_hook_to_module(model, ModelHook())
        optimize(model)
        if not first:
            add_hook_to_module(model, ModelHook())
        for _ in range(2):
            assert relative(model(**given)[0], expected) <= 1e-6
            remove_hook_from_module(model, recurse=True)
            add_hook_to_module(model, ModelHook())
        assert len(fused) == 2 * BLOCKS
        assert optimize(model).report()  # finds the first one under the hook
        optimize(model).restore()
        assert torch.equal(model(**given)[0], expected)
        remove_hook_from_module(model)
        assert torch.equal(model(**given)[0], expected)
        assert len(fused) == 2 * BLOCKS
        del fused[:]


def test_hooks_of_diffusers_around_the_model_stay(fused):
    from diffusers.hooks import HookRegistry, ModelHook

    class Counting(ModelHook):
        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            self.calls += 1
            return args, kwargs

    model, given = new_model(), inputs()
    expected = model(**given)[0]
    optimized, hook = optimize(model), Counting()
    HookRegistry.check_if_exists_or_initialize(model).register_hook(hook, "counting")
    assert relative(model(**given)[0], expected) <= 1e-6
    optimized.restore()
    assert torch.equal(model(**given)[0], expected)
    assert (hook.calls, len(fused)) == (2, BLOCKS)
    again = optimize(model)
    assert relative(model(**given)[0], expected) <= 1e-6
    again.restore()
    assert (hook.calls, len(fused)) == (3, 2 * BLOCKS)


@pytest.mark.parametrize("in_place", [True, False])
def test_compiled_model_runs_diffusers_way_in_one_graph(in_place, fused):
    model, given = new_model(blocks=1), inputs()
    expected = model(**given)[0]
    optimized = optimize(model)
    model(**given)
    assert "fused, 1 of 1" in optimized.report()
    fused.clear()
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    compiled = model
    if in_place:
        model.compile(backend=backend, fullgraph=True)
    else:
        compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(2):
        assert relative(compiled(**given)[0], expected) <= 1e-6
    assert (len(graphs), len(fused)) == (1, 0)
    assert "fused" not in optimized.report()
    with optimized.run():
        compiled(**given)
    assert "fused" not in optimized.report()
    torch.compiler.reset()


# --- models that the kernels do not take ---


def test_model_that_is_cast_between_runs(fused):
    model = new_model()
    optimized = optimize(model)
    model(**inputs())
    for dtype in (torch.bfloat16, torch.float16):
        for weight in model.parameters():
            weight.data = weight.data.to(dtype)
        given = inputs(dtype=dtype)
        expected = type(model).forward(model, **given)[0]
        assert relative(model(**given)[0], expected) < 0.02
    assert torch.equal(model(**given)[0], expected)
    assert "fused kernels need bf16 or fp32" in optimized.report()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"joint_attention_kwargs": {"ip_adapter_masks": 1}},
            "attention has the unknown argument ip_adapter_masks",
        ),
        ({"temb": "one row"}, "1 timestep embeddings instead of 2"),
        ({"image_rotary_emb": "none"}, "its rotary embedding is not complex"),
        ({"image_rotary_emb": "real"}, "its rotary embedding is not complex"),
        ({"colour": 1}, "its argument colour is unknown"),
    ],
)
def test_block_arguments_that_are_not_known(change, reason, fused, monkeypatch, request):
    """A later diffusers, or another node's loop over the blocks."""
    model, given = new_model(), inputs(2)
    block_class = type(model.transformer_blocks[0])
    original = block_class.forward

    def tolerant(self, *args, colour=None, joint_attention_kwargs=None, **kwargs):
        if "image_rotary_emb" in change:
            kwargs["image_rotary_emb"] = None
        return original(self, *args, **kwargs)

    def change_arguments(module, args, kwargs):
        if "temb" in change:
            return args, kwargs | {"temb": kwargs["temb"][:1]}
        if change.get("image_rotary_emb") == "real":
            real = tuple(part.real for part in kwargs["image_rotary_emb"])
            return args, kwargs | {"image_rotary_emb": real}
        return args, kwargs | change

    tolerant.__code__ = tolerant.__code__.replace(co_filename=original.__code__.co_filename)
    monkeypatch.setattr(block_class, "forward", tolerant)
    forget()
    request.addfinalizer(forget)
    for block in model.transformer_blocks:
        block.register_forward_pre_hook(change_arguments, with_kwargs=True)
    for module in (runs, block_form, inventory):
        monkeypatch.setattr(module, "is_changed", lambda module, bound=(): False)
    assert_host(model, given, fused, reason)


# --- the first step's check ---


def sabotaged(monkeypatch, **changes):
    ops = with_kernels(TORCH, **changes)
    monkeypatch.setattr(block_host, "choose_ops", lambda device: ops)


def wrong_gate(*like):
    launch = TORCH.residual_norm(*like)
    return lambda x, gates, norms: launch(
        x, gates and gates._replace(image=gates.image * 1.5), norms
    )


def wrong_rotation(*like):
    launch = TORCH.qk_norm_rope(*like)
    return lambda norm, rotary: launch(norm, rotary._replace(sin=-rotary.sin))


def not_a_number(*like):
    launch = TORCH.residual_norm(*like)
    return lambda x, *given: launch(x.fill_(torch.nan), *given)


def raises(*args):
    raise RuntimeError("no kernel image is available\nfor execution")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrong_kernel_is_found_in_the_first_step(dtype, fused, monkeypatch, caplog):
    model, given = new_model(dtype), inputs(dtype=dtype)
    expected = model(**given)[0]
    for name, function, reason in (
        ("residual_norm", wrong_gate, "the fused block's image stream differs"),
        ("qk_norm_rope", wrong_rotation, "stream differs"),
        ("residual_norm", not_a_number, "by nan"),
        ("qk_norm_rope", raises, "the fused block raised no kernel image is available"),
    ):
        sabotaged(monkeypatch, **{name: function})
        del fused[:]
        caplog.clear()
        with optimize(model) as optimized, optimized.run(), caplog.at_level(logging.INFO):
            for _ in range(3):
                assert torch.equal(model(**given)[0], expected)
                assert reason in optimized.report()
                assert "blocks: fused" not in optimized.report()
        assert len(fused) <= 2  # with NaN, the other attention is tried
        [record] = [each for each in caplog.records if each.name.startswith("qwen_l40s")]
        assert reason in record.getMessage() and record.levelno == logging.WARNING


def test_out_of_memory_in_the_first_step_is_raised(monkeypatch):
    def run_out(*args):
        raise torch.cuda.OutOfMemoryError("tried to allocate")

    sabotaged(monkeypatch, qk_norm_rope=run_out)
    model = new_model()
    optimize(model)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        model(**inputs())
    assert not any("forward" in block.__dict__ for block in model.transformer_blocks)


# --- the command ---


@pytest.fixture
def generate(tiny_folder, tmp_path, monkeypatch, capsys):
    """Runs the command; returns the exit code, the report and what the image says of itself."""
    monkeypatch.chdir(tmp_path)
    fixed = ["--prompt", "a red star", "--size", "64x48", "--steps", "2", "--device", "cpu"]
    fixed += ["--precision", "fp32", "--output", "a.png", "--json", "--model", str(tiny_folder)]

    def run(*arguments):
        code = main(["generate", *fixed, *arguments])
        out, err = capsys.readouterr()
        if code:
            return code, err, None
        with Image.open("a.png") as image:
            return json.loads(out), json.loads(image.text["qwen_l40s"]), np.asarray(image)

    return run


def test_command_says_what_ran_and_paints_the_same(generate, fused):
    report, metadata, plain = generate()  # as on every processor
    for facts in (report, metadata):
        assert (facts["optimized"], facts["ran"]) == (False, ["diffusers' code"])
    assert not fused
    report, metadata, ours = generate("--optimize")
    for facts in (report, metadata):
        assert facts["optimized"] is True
        assert facts["ran"][0].startswith("blocks: fused, 8 of 8 in 4 forward passes")
        assert facts["ran"][-1].startswith("attention: sdpa_flash")
    assert len(fused) == 8
    assert np.abs(ours.astype(int) - plain).max() <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--no-optimize", "--attention", "math"], "'math' needs the optimized transformer"),
        (["--attention", "flashy"], "no attention 'flashy': use auto or"),
        (["--attention", "sdpa_cudnn"], "sdpa_cudnn cannot run on cpu: needs an NVIDIA GPU"),
    ],
)
def test_attention_that_cannot_be_had_is_told_before_weights_are_read(
    arguments, message, generate, monkeypatch
):
    monkeypatch.setattr("qwen_l40s.hosts.diffusers.load.load_text_encoder", None)
    code, error, _ = generate(*arguments)
    assert code == 2
    assert message in error and error.count("\n") == 1


# ------------------------------------------------------------------------------- held weights


def test_a_token_of_held_weights_tells_where_they_are():
    blocks = new_model().transformer_blocks
    layers = DiffusersLayers()

    def token(layers):
        with layers.hold(blocks) as found:
            assert (found is None) == (layers.moving is not None)
            return found

    known = token(layers)
    assert known is not None and token(layers) == known == token(DiffusersLayers())
    last = blocks[-1].img_mlp.net[2]
    last.bias.data = last.bias.data.clone()
    assert token(DiffusersLayers()) not in (known, None)
    blocks[1].attn.to_q.weight.data = blocks[1].attn.to_q.weight.data.clone()
    assert token(layers) not in (known, None), "one layer of each block is looked at in every pass"
    handle = last.register_forward_hook(lambda *_: None)
    layers = DiffusersLayers()
    assert token(layers) is token(layers) is None
    handle.remove()
    last.to("meta")
    assert token(DiffusersLayers()) is None
