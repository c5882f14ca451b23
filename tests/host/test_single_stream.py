"""Qwen-Image-2.1 in ComfyUI: its blocks run fused beside ComfyUI's prefix cache, as they fill it,
and without it.
"""

from importlib import import_module

import comfy.ldm.modules.attention
import comfy.model_base
import comfy.sample
import comfy.sd
import published_attention
import pytest
import torch
from comfy.patcher_extension import WrappersMP
from narrow_21 import TEXT, random, weights_21
from narrow_21 import strong_21 as model_21

from qwen_l40s.caches import forget
from qwen_l40s.hosts.comfyui import qwen_image
from qwen_l40s.hosts.comfyui.sample import attention as attention_of_the_host
from qwen_l40s.hosts.comfyui.sample.attention import SLOT
from qwen_l40s.hosts.comfyui.sample.optimize import OptimizeSettings, optimize, report_of
from qwen_l40s.hosts.comfyui.sample.run import ComfyOptimization
from qwen_l40s.optimizations import inventory
from qwen_l40s.optimizations.attention.choice import TRIAL_TOKENS
from qwen_l40s.optimizations.attention.chosen import attend_causal
from qwen_l40s.optimizations.blocks.block import BlockExecutor
from qwen_l40s.optimizations.passes import ForwardPass

pytestmark = [
    pytest.mark.usefixtures("inference_mode"),
    pytest.mark.host_has("comfy.model_base.QwenImage21"),
]
EMPTY = torch.zeros(1, 64, 8, 8)
REFERENCE = {"references": [random(1, 64, 4, 6)], "image_slots": [3]}
TWO = {"references": [random(1, 64, 4, 6), random(1, 64, 2, 2)], "image_slots": [0, 3]}


def sample(model, steps=3, cfg=1.0, batch=1, references=(), **more):
    prompts = [
        [[random(1, 7 + more_text, TEXT), {"reference_latents": list(references)} | more]]
        for more_text in (0, 2)
    ]
    latent = EMPTY.expand(batch, -1, -1, -1).contiguous()
    settings = (random(*latent.shape), steps, cfg, "euler", "simple", *prompts, latent)
    return comfy.sample.sample(model, *settings, seed=0, disable_pbar=True)


def close(ours, theirs):
    return torch.linalg.vector_norm(ours - theirs) <= 1e-5 * torch.linalg.vector_norm(theirs)


def assert_all_fused(model, how, expected):
    """Every block runs fused, to the same latents, and leaves the MODEL as it was."""
    optimized = optimize(model)
    assert close(sample(optimized, **how), expected)
    passes = 6 if how.get("cfg") else 3
    report = report_of(optimized)
    assert f"blocks: fused, {2 * passes} of {2 * passes} in {passes} forward passes" in report
    assert torch.equal(sample(model, **how), expected)


def test_off_is_comfyuis_own():
    model = model_21()
    off = optimize(model, OptimizeSettings(blocks=False, attention="comfyui"))
    assert torch.equal(sample(off), sample(model))


def test_what_a_graph_would_read_is_what_the_blocks_are_given(monkeypatch):
    """ComfyUI's cache, from which graphs know all prefixes before the first block runs."""
    found, own = [], qwen_image.PrefixedComfyPass.inputs

    def inputs(self, block, positional, arguments):
        given = own(self, block, positional, arguments)
        index = self.blocks.index(block)
        found.append((index, self.prefixes, given.step.prefix, self.no_graphs()))
        return given

    monkeypatch.setattr(qwen_image.PrefixedComfyPass, "inputs", inputs)
    sample(optimize(model_21()), cfg=3.0)
    # The first step of each prompt fills the cache, block by block; the rest read it.
    assert [filling for *_, filling in found[:8]] == [qwen_image.FILLS] * 8
    assert [prefix is None for _, _, prefix, _ in found[:8]] == [True, False] * 4
    for index, prefixes, prefix, refusal in found[8:]:
        assert refusal is None
        assert prefixes[index].keys.data_ptr() == prefix.keys.data_ptr()
        assert prefixes[index].values.data_ptr() == prefix.values.data_ptr()
    sample(optimize(model_21()), cfg=1.0)
    options = {"qwen_image21_cache": {"device": "gpu", "dtype": "int8"}}
    del found[:]
    model = optimize(model_21())
    model.model_options["transformer_options"].update(options)
    sample(model)
    assert found[-1][3] == qwen_image.NOT_READ


def test_causal_segments_need_no_plan_where_comfyuis_attention_is_torchs(monkeypatch):
    """On a card; here ComfyUI's own for a processor adds a mask's ones to the scores."""
    attention, found = comfy.ldm.modules.attention, []
    for module, name in (
        (attention, "optimized_attention"),
        (attention_of_the_host, "optimized_attention_masked"),
        (import_module("comfy.ldm.qwen_image21.model"), "optimized_attention"),
    ):
        monkeypatch.setattr(module, name, attention.attention_pytorch)
    # As if it were there when ComfyUI started.
    monkeypatch.setattr(inventory, "called_by", inventory.called_by.__wrapped__)

    def attend(q, k, v):
        found.append((q.shape[1], k.shape[1]))
        return attend_causal(q, k, v)

    monkeypatch.setattr(qwen_image, "attend_causal", attend)
    model = model_21()
    expected = sample(model, **REFERENCE)
    assert_all_fused(model, REFERENCE, expected)
    assert set(found) == {(3, 3), (4, 31)}
    del found[:]
    comfyuis = optimize(model, OptimizeSettings(attention="comfyui"))
    assert close(sample(comfyuis, **REFERENCE), expected) and not found


def without_cache(model):
    model.model_options["transformer_options"]["qwen_image21_cache"] = {"device": "off"}
    return model


def no_memory(model, monkeypatch):
    kind = type(model.model.diffusion_model)
    monkeypatch.setattr(kind, "select_prefix_cache", lambda *given: (None, False))
    return model


@pytest.mark.parametrize("how", [REFERENCE, TWO])
def test_text_is_causal_where_comfyuis_attention_is(how):
    """Its own on a processor adds the mask of the text to the scores, which is in bool."""
    own = comfy.ldm.modules.attention.attention_pytorch
    model = model_21()
    plain = sample(model, **how)
    model.model_options["transformer_options"][SLOT] = lambda default, *given, **more: own(
        *given, **more
    )
    for made in (model, without_cache(model.clone())):
        expected, optimized = sample(made, **how), optimize(made)
        assert close(sample(optimized, **how), expected) and not close(expected, plain)
        assert "blocks: fused, 6 of 6 in 3 forward passes" in report_of(optimized)


@pytest.mark.parametrize("cached", [True, False])
def test_8_bits_are_for_the_images_tokens_alone(cached, monkeypatch):
    """Keys and values of text and references are kept for a whole run."""
    called = set()

    def attended(out, q, k):
        called.add((q.shape[1], k.shape[1]))
        return out

    published_attention.on_every_device(monkeypatch, attended)
    model = model_21() if cached else without_cache(model_21())
    sample(optimize(model, OptimizeSettings(attention="kitchen_int8")), steps=2, **TWO)
    assert called - {(TRIAL_TOKENS, TRIAL_TOKENS)} == {(64, 7 + 24 + 4 + 64)}


def test_a_block_that_is_given_other_rows_ends_the_graph(played_graphs, monkeypatch):
    """As by a pack that wraps what calls it."""
    model, late = without_cache(model_21()), []
    block, own = model.model.diffusion_model.transformer_blocks[1], ForwardPass.run

    def changed(x, *given, **more):
        return type(block).forward(block, 1.5 * x if late else x, *given, **more)

    def run(self, index, module, positional, arguments):
        if index == 1 and late:
            positional = 1.5 * positional[0], *positional[1:]
        return own(self, index, module, positional, arguments)

    monkeypatch.setattr(ForwardPass, "run", run)
    sample(optimized := optimize(model))
    late.append(True)
    found, before = sample(optimized), len(played_graphs)
    plain = model.clone()
    plain.add_object_patch("diffusion_model.transformer_blocks.1.forward", changed)
    assert before > 2 and close(found, sample(plain)) and not close(found, sample(model))


def test_whole_rows_that_a_block_of_comfyuis_has_written_over_are_read_anew(monkeypatch):
    """It returns the tensor that it was given."""
    options = {"model_options": {"dtype": torch.float32}}
    model = without_cache(comfy.sd.load_diffusion_model_state_dict(weights_21(3), **options))
    expected, own = sample(model), ForwardPass.run

    def run(self, index, module, positional, arguments):
        if index != 1:
            return own(self, index, module, positional, arguments)
        return type(module).forward(module, *positional, **arguments)

    monkeypatch.setattr(ForwardPass, "run", run)
    assert close(sample(optimize(model)), expected)


def test_memory_that_runs_out_as_the_cache_is_filled_leaves_nothing_to_put_away(monkeypatch):
    """Where the pass that is made again has no room for the cache."""
    model, own = model_21(), BlockExecutor.go_to_last
    expected = sample(model)

    def runs_out(*given):
        monkeypatch.setattr(BlockExecutor, "go_to_last", own)
        no_memory(model, monkeypatch)
        own(*given)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(BlockExecutor, "go_to_last", runs_out)
    monkeypatch.setattr(ComfyOptimization, "_drop_graphs", lambda *given: True)
    assert close(sample(optimized := optimize(model)), expected)
    assert "blocks: fused, 6 of 6 in 3 forward passes" in report_of(optimized)


def test_attention_that_a_wrapper_patches_after_the_check_runs_comfyuis_blocks():
    """Within a run whose first step was compared without the patch."""
    model, steps = without_cache(model_21()), []

    def late(executor, *given, **named):
        *given, options = given
        steps.append(options)
        if len(steps) % 3 != 1:
            halved = lambda q, k, v, **rest: {"q": q * 0.5}  # noqa: E731
            options = options | {"patches": {"attn1_patch": [halved]}}
        return executor(*given, options, **named)

    plain = sample(model)
    model.add_wrapper(WrappersMP.DIFFUSION_MODEL, late)
    expected = sample(model)
    assert close(sample(optimized := optimize(model)), expected) and not close(expected, plain)
    assert "blocks: fused, 2 of 6 in 3 forward passes" in report_of(optimized)


def test_a_comfyui_whose_model_has_no_inner_forward_runs_its_own_blocks(monkeypatch):
    model = model_21()
    kind = type(model.model.diffusion_model)
    monkeypatch.setattr(kind, "forward", kind._forward)
    monkeypatch.delattr(kind, "_forward")
    forget()
    try:
        optimized = optimize(model)
        assert torch.equal(sample(optimized), sample(model))
        assert qwen_image.OTHER_MODEL.fact in report_of(optimized)
    finally:
        forget()


def test_a_report_says_where_anothers_attention_meets_the_texts_mask():
    """As KJ's Patch Sage Attention, which drops the mask; before Optimize and after it."""
    masks = []

    def drops(attend, q, k, v, heads, mask=None, **options):
        masks.append(mask is not None)
        return attend(q, k, v, heads, mask=None, **options)

    model = model_21()
    for late in (False, True):
        masks.clear()
        patched = model.clone()
        if not late:
            patched.model_options["transformer_options"][SLOT] = drops
        optimized = optimize(patched)
        optimized.model_options["transformer_options"][SLOT] = drops
        sample(optimized)
        assert any(masks)
        assert "the text has a mask, which some nodes' attention ignores" in report_of(optimized)
    clean = optimize(model)
    sample(clean)
    assert "the text has a mask" not in report_of(clean)


def test_a_function_of_comfyuis_own_that_is_replaced_late_is_heeded(monkeypatch):
    import comfy.ldm.qwen_image21.model as qwen_image21  # of a newer ComfyUI

    model, steps = model_21(), []
    own = qwen_image21._gated_residual

    def wrap(executor, *given, **named):
        steps.append(1)
        if len(steps) > 1:
            halved = lambda x, y, *rest: own(x, y * 0.5, *rest)  # noqa: E731
            monkeypatch.setattr(qwen_image21, "_gated_residual", halved)
        return executor(*given, **named)

    def changed(model):
        clone = model.clone()
        clone.add_wrapper(WrappersMP.DIFFUSION_MODEL, wrap)
        steps.clear()
        found = sample(clone)
        monkeypatch.undo()
        return found, clone

    known, _ = changed(model)
    assert not close(known, sample(model))
    found, clone = changed(optimize(model))
    assert close(found, known)
    assert "has changed comfy.ldm.qwen_image21.model._gated_residual" in report_of(clone)
