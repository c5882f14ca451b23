"""What other packs change while an optimized MODEL samples: it is heeded, and said."""

import contextlib
import gc
import itertools
import weakref
from collections import Counter
from dataclasses import replace
from unittest import mock

import comfy.ldm.qwen_image.model as qwen_image
import comfy.model_management
import comfy.sample
import narrow_transformer as narrow
import pytest
import torch
from comfy.patcher_extension import WrappersMP
from comfyui_boot import MODE, folder
from narrow_transformer import difference

from qwen_l40s.errors import CheckpointError
from qwen_l40s.hosts.comfyui.load.transformer import load_model
from qwen_l40s.hosts.comfyui.sample import layers
from qwen_l40s.hosts.comfyui.sample.attention import SLOT
from qwen_l40s.hosts.comfyui.sample.optimize import OptimizeSettings, optimize, report_of
from qwen_l40s.hosts.comfyui.sample.run import OPTIMIZATION_KEY
from qwen_l40s.hosts.comfyui.sample.step_cache import cache_steps
from qwen_l40s.optimizations.attention import Attention as ChosenBackend
from qwen_l40s.optimizations.run import Later
from qwen_l40s.planning.step_cache import cache_settings

pytestmark = pytest.mark.each_device
FOLDER = folder("other_packs")
PATH = narrow.write(FOLDER / "bf16.safetensors", narrow.weights())
# ComfyUI computes this model in fp32 on a processor and in bf16 on a card.
SAME = 2e-6 if MODE == "cpu" else 1e-2
HOST_ATTENTION = OptimizeSettings(attention="comfyui")
STEPS = 3


def stock():
    gc.collect()  # ComfyUI fails where a model disappears while it makes room for another one
    return load_model(PATH, "bf16")[0]


def sample(model, steps=2, text=20):
    """Euler steps at 64 x 64 from fixed noise."""
    prompt = [[narrow.random(1, text, narrow.SHAPE.joint_dim, seed=1), {}]]
    return narrow.sample(model, prompt, steps=steps)


def assert_same(known, found):
    assert torch.isfinite(found).all()
    assert difference(found, known) <= SAME, difference(found, known)


def scaled(owner, name="forward"):
    """Halves what a module's forward or a class's function gives, for a time."""
    own = getattr(owner, name)

    def changed(*given, **named):
        found = own(*given, **named)
        return tuple(part * 0.5 for part in found) if isinstance(found, tuple) else found * 0.5

    return mock.patch.object(owner, name, changed)


@contextlib.contextmanager
def of_another_class(module):
    """A module whose class is one that halves what it gives, for a time."""
    own = type(module)

    def forward(self, *given, **named):
        return tuple(part * 0.5 for part in own.forward(self, *given, **named))

    module.__class__ = type("Halved", (own,), {"forward": forward})
    try:
        yield
    finally:
        module.__class__ = own


@contextlib.contextmanager
def exchanged(modules, index, other):
    own, modules[index] = modules[index], other
    try:
        yield
    finally:
        modules[index] = own


class Wrapped(torch.nn.Module):
    """A block in a block, of which only `forward` is known."""

    def __init__(self, block):
        super().__init__()
        self.inner = block

    def forward(self, *given, **named):
        return tuple(part * 0.5 for part in self.inner(*given, **named))


CHANGES = {
    "attn of block 1": lambda blocks: scaled(blocks[1].attn),
    "the class of block 0": lambda blocks: of_another_class(blocks[0]),
    "Attention.forward": lambda blocks: scaled(qwen_image.Attention),
    "QwenImageTransformerBlock.forward": lambda blocks: scaled(
        qwen_image.QwenImageTransformerBlock
    ),
    "QwenImageTransformerBlock._modulate": lambda blocks: mock.patch.object(
        qwen_image.QwenImageTransformerBlock,
        "_modulate",
        lambda self, x, params, index=None: (x * 0.5, params.chunk(3, -1)[2].unsqueeze(1)),
    ),
    "qwen_image.model.optimized_attention_masked": lambda blocks: scaled(
        qwen_image, "optimized_attention_masked"
    ),
}


class LateChange:
    """A pack that changes the model inside of its forward, from the second step on."""

    def __init__(self, model, change):
        self.stack, self.calls, self.change = contextlib.ExitStack(), 0, change
        self.blocks = model.model.diffusion_model.transformer_blocks

    def post_input(self, given):
        self.calls += 1
        if self.calls == 2:
            self.stack.enter_context(self.change(self.blocks))
        return given

    def sample(self, model):
        clone = model.clone()
        clone.set_model_post_input_patch(self.post_input)
        with self.stack:
            return sample(clone, steps=STEPS), clone


@pytest.mark.parametrize("name", CHANGES)
def test_a_late_change_of_a_block_is_heeded(name):
    model = stock()
    plain = sample(model, steps=STEPS)
    known, _ = LateChange(model, CHANGES[name]).sample(model)
    assert difference(known, plain) > 1e-4
    found, clone = LateChange(model, CHANGES[name]).sample(optimize(model, HOST_ATTENTION))
    assert_same(known, found)
    report = report_of(clone)
    assert f"another extension has changed {name}" in report.replace("comfy.ldm.", ""), report
    # Of 2 blocks and 3 steps.
    own = 2 if name.endswith("of block 1") else 4
    assert f"ComfyUI's code, {own} of 6" in report, report


def test_a_block_that_is_exchanged_late_is_heeded():
    def change(blocks):
        return exchanged(blocks, 0, Wrapped(blocks[0]))

    model = stock()
    known, _ = LateChange(model, change).sample(model)
    found, clone = LateChange(model, change).sample(optimize(model, HOST_ATTENTION))
    assert difference(known, sample(model, steps=STEPS)) > 1e-4
    assert_same(known, found)
    assert "has replaced one of the blocks" in report_of(clone)


def test_a_function_that_is_replaced_late_is_heeded_where_the_first_block_is_comfyuis():
    model = stock()
    blocks = model.model.diffusion_model.transformer_blocks
    change = CHANGES["Attention.forward"]
    with contextlib.closing(mock.Mock()) as closing:
        closing.close = blocks[0].img_norm1.register_forward_hook(lambda *given: given[-1]).remove
        known, _ = LateChange(model, change).sample(model)
        found, clone = LateChange(model, change).sample(optimize(model, HOST_ATTENTION))
    assert_same(known, found)
    assert "code, 4 of 6: another extension has changed Attention.forward" in report_of(clone)


def test_a_run_in_which_another_pack_runs_the_transformer_is_not_called_fused():
    model = stock()
    transformer = model.model.diffusion_model
    own = transformer._forward

    def theirs(executor, *given, **named):
        with mock.patch.object(transformer, "_forward", own):
            return executor(*given, **named)

    clone = optimize(model, HOST_ATTENTION)
    sample(clone)
    assert "blocks: fused, 4 of 4" in report_of(clone)
    clone.add_wrapper(WrappersMP.APPLY_MODEL, theirs)
    assert_same(sample(model), sample(clone))
    line = "blocks: ComfyUI's code: another extension runs the transformer with its own code"
    assert line in report_of(clone) and "fused" not in report_of(clone)


@pytest.mark.parametrize("kind", [WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_pass_that_is_made_twice_is_one_step_to_another_pack(kind, before):
    """A pack that counts steps, and changes what goes in; attention gives NaN in block 1."""
    steps, calls, own = [], [], ChosenBackend.__call__

    def count(executor, x, *given, **named):
        steps.append(len(steps))
        return executor(x * (1 + len(steps) / 10), *given, **named)

    def nan(self, *given):
        calls.append(1)
        return own(self, *given) * (torch.nan if len(calls) == 2 else 1)

    model = stock()
    stepped = model.clone()
    stepped.add_wrapper(kind, count)
    known = sample(stepped, steps=STEPS)
    assert len(steps) == STEPS and difference(known, sample(model, steps=STEPS)) > 1e-3
    clone = optimize(stepped if before else model)
    if not before:
        clone.add_wrapper(kind, count)
    steps.clear()
    # Seen before the pass ends: a card that is busy tells it later, and the run begins again.
    with (
        mock.patch.object(ChosenBackend, "__call__", nan),
        mock.patch.object(Later, "ready", True),
    ):
        found = sample(clone, steps=STEPS)
    assert " gave NaN" in report_of(clone)
    assert len(steps) == STEPS
    assert_same(known, found)


def test_a_loop_that_leaves_out_what_has_a_default_runs_fused():
    """As MagCache's copy of ComfyUI's `_forward`, which is older than `timestep_zero_index`."""

    def older(self, *given, **named):
        index = named.pop("timestep_zero_index", None)
        assert index is None
        return torch.nn.Module.__call__(self, *given, **named)

    model = stock()
    clone = optimize(model, HOST_ATTENTION)
    kind = qwen_image.QwenImageTransformerBlock
    with mock.patch.object(kind, "__call__", older, create=True):
        found = sample(clone)
    assert_same(sample(model), found)
    assert report_of(clone).startswith("blocks: fused, 4 of 4"), report_of(clone)


def test_a_forward_that_another_pack_leaves_on_the_transformer_stays():
    model = stock()
    transformer, clone = model.model.diffusion_model, optimize(model, HOST_ATTENTION)

    def wrap(executor, *given, **named):
        if "_forward" not in transformer.__dict__.get("theirs", ""):
            own = transformer._forward
            transformer.theirs = transformer._forward = lambda *a, **k: own(*a, **k) * 0.5
        return executor(*given, **named)

    plain = sample(model)
    known = difference(plain * 0.5, plain)
    clone.add_wrapper(WrappersMP.APPLY_MODEL, wrap)
    try:
        sample(clone, steps=1)
        assert transformer._forward is transformer.theirs
        assert difference(sample(model), plain) > known / 10
    finally:
        del transformer._forward
    assert_same(plain, sample(optimize(model, HOST_ATTENTION)))


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_two_runs_is_heeded(name):
    """What is known of a model is taken over from the run before, except where it has changed."""
    model = stock()
    clone = optimize(model, HOST_ATTENTION)
    plain = sample(clone)
    with CHANGES[name](model.model.diffusion_model.transformer_blocks):
        known = sample(model)
        assert_same(known, sample(clone))
        assert "ComfyUI's code" in report_of(clone)
    assert difference(known, plain) > 1e-4
    assert torch.equal(sample(clone), plain)
    assert "blocks: fused, 4 of 4" in report_of(clone)


def compares(patcher, text=20):
    sample(patcher, text=text)
    report = report_of(patcher)
    assert "blocks: fused, 4 of 4" in report
    assert ("largest difference" in report) != ("checked in an earlier run" in report)
    return "largest difference" in report


def test_a_block_is_compared_once_for_each_prompt_length_until_something_changes():
    model = stock()
    clone = optimize(model, HOST_ATTENTION)
    assert [compares(clone, text) for text in (20, 20, 21, 20, 21)] == [1, 0, 1, 0, 0]
    with scaled(model.model.diffusion_model.transformer_blocks[1].img_norm2):
        sample(clone)
    assert [compares(clone), compares(clone)] == [1, 0]
    patched = clone.clone()
    key = "diffusion_model.transformer_blocks.1.attn.to_k.bias"
    patched.add_patches({key: ("diff", (torch.ones(narrow.SHAPE.dim),))})
    assert [compares(patched), compares(patched)] == [1, 0]
    comfy.model_management.unload_all_models()
    assert [compares(patched), compares(patched)] == [1, 0]


def test_a_comparison_speaks_for_no_other_attention_or_gemm():
    def others(func, *given, **named):
        return func(*given, **named)

    clone = optimize(load_model(PATH, "int8")[0])
    comfy.model_management.load_models_gpu([clone])
    other = clone.clone()
    other.model_options["transformer_options"][SLOT] = others
    assert [compares(it) for it in (other, clone, clone, other, other)] == [1, 1, 0, 1, 0]
    full = replace(layers.known_gemm("int8", clone.load_device), reason="the card was full")
    with mock.patch.object(layers, "known_gemm", lambda *_: full):
        assert compares(other)
    assert [compares(other), compares(other)] == [1, 0]


def test_a_model_goes_although_its_report_stays():
    """An optimization outlives the models that it has run, as those that MultiGPU makes."""
    model = stock()
    clone = optimize(model, HOST_ATTENTION)
    for _ in range(2):
        sample(clone)
    optimization = clone.get_attachment(OPTIMIZATION_KEY)
    gone = weakref.ref(model.model.diffusion_model.transformer_blocks[1])
    comfy.model_management.current_loaded_models.clear()  # nobody takes it off the card
    del model, clone
    gc.collect()
    assert gone() is None
    assert "blocks: fused, 4 of 4" in optimization.report()


@contextlib.contextmanager
def told_late(after):
    """What the card tells is there after it was asked for so many times without a wait."""
    asked = Counter()

    def ready(self):
        asked[id(self)] += 1
        return asked[id(self)] > after

    with mock.patch.object(Later, "ready", property(ready)):
        yield


@contextlib.contextmanager
def nan(when):
    """From attention in the calls, from 1, of which `when` is true."""
    calls, own = itertools.count(1), ChosenBackend.__call__
    call = lambda self, *given: own(self, *given) * (torch.nan if when(next(calls)) else 1)  # noqa: E731
    with mock.patch.object(ChosenBackend, "__call__", call):
        yield


@pytest.mark.parametrize(("steps", "after", "passes"), [(1, 9, 2), (3, 9, 6), (3, 1, 5), (3, 2, 6)])
def test_nan_that_the_card_tells_late_begins_the_run_again(steps, after, passes):
    """Of the second block's attention: the first is compared with ComfyUI's before."""
    made = []

    def count(executor, *given, **named):
        made.append(1)
        return executor(*given, **named)

    model = stock()
    clone = optimize(model)
    clone.add_wrapper(WrappersMP.APPLY_MODEL, count)
    with told_late(after), nan(lambda call: call % 2 == 0):
        found = sample(clone, steps=steps)
        assert " gave NaN" in report_of(clone)
    assert len(made) == passes
    assert_same(sample(model, steps=steps), found)
    assert_same(found, sample(clone, steps=steps))
    assert "NaN" not in report_of(clone)


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("after", [1, 2, 99])
def test_a_step_cache_forecasts_nothing_from_a_run_that_begins_again(outside, after):
    model, steps = stock(), 14
    cached = lambda model: cache_steps(model, cache_settings("balanced"))  # noqa: E731
    clone = optimize(cached(model)) if outside else cached(optimize(model))
    with told_late(after), nan(lambda call: call == 2):
        found = sample(clone, steps=steps)
    assert " gave NaN" in report_of(clone)
    assert_same(sample(model if outside else cached(model), steps=steps), found)


@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize("after", [0, 9])
def test_a_weight_with_nan_is_named_at_the_end_of_the_first_run(optimized, after):
    weights = narrow.weights()
    name = "transformer_blocks.1.attn.to_k.weight"
    weights[name] = weights[name].clone()
    weights[name][1, 2] = torch.nan
    model = load_model(narrow.write(FOLDER / "nan.safetensors", weights), "bf16")[0]
    model = optimize(model) if optimized else model
    with told_late(after), pytest.raises(CheckpointError, match=name):
        sample(model)


def test_nan_that_only_the_sampler_gives_is_the_sampler_s():
    model = stock()
    clone = model.clone()
    wrapper = lambda executor, *given, **named: executor(*given, **named) * torch.nan  # noqa: E731
    clone.add_wrapper(WrappersMP.SAMPLER_SAMPLE, wrapper)
    assert sample(clone).isnan().all()
    assert torch.isfinite(sample(model)).all()
