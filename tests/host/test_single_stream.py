"""Qwen-Image-2.1 in ComfyUI: its blocks run fused beside ComfyUI's prefix cache."""

import comfy.model_base
import comfy.sample
import comfy.sd
import pytest
import torch
from comfy.patcher_extension import WrappersMP
from narrow_21 import TEXT, model_21, random
from reported_runs import reported, running

from qwen_l40s.caches import forget
from qwen_l40s.hosts.comfyui import qwen_image
from qwen_l40s.hosts.comfyui.sample.attention import SLOT
from qwen_l40s.hosts.comfyui.sample.optimize import OptimizeSettings, optimize, report_of

pytestmark = [
    pytest.mark.usefixtures("inference_mode"),
    pytest.mark.host_has("comfy.model_base.QwenImage21"),
]
EMPTY = torch.zeros(1, 64, 8, 8)


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


@pytest.mark.parametrize("fused_mlp", [True, False])
def test_the_blocks_run_fused_with_comfyuis_prefix_cache_on(fused_mlp):
    model = model_21(fused_mlp)
    for how in (
        {},
        {"cfg": 3.0},
        {"batch": 2},
        {"references": [random(1, 64, 4, 6)], "image_slots": [3]},
    ):
        expected = sample(model, **how)
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
        if given is not None:
            index = self.blocks.index(block)
            found.append((index, self.prefixes, given.step.prefix, self.no_graphs()))
        return given

    monkeypatch.setattr(qwen_image.PrefixedComfyPass, "inputs", inputs)
    sample(optimize(model_21()), cfg=3.0)
    assert [filling for *_, filling in found[:2]] == [qwen_image.FILLS] * 2
    # The first step of each prompt fills the cache; the rest read it.
    for index, prefixes, prefix, refusal in found[4:]:
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


def test_without_the_cache_comfyuis_blocks_run():
    model = model_21()
    model.model_options["transformer_options"]["qwen_image21_cache"] = {"device": "off"}
    optimized = optimize(model)
    assert torch.equal(sample(optimized), sample(model))
    assert "ComfyUI's prefix cache is off" in report_of(optimized)


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


def test_a_report_says_what_ran():
    model = optimize(model_21())
    with running():
        sample(model, references=[random(1, 64, 4, 6)], image_slots=[3])
    text = reported(model, None, None).text
    assert "Sampled: 128x128, batch 1, 3 steps" in text
    assert "blocks: fused, 6 of 6 in 3 forward passes" in text


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
        assert "the text's rows have a mask, which some nodes' attention drops" in report_of(
            optimized
        )
    clean = optimize(model)
    sample(clean)
    assert "the text's rows have a mask" not in report_of(clean)


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
