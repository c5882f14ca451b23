"""Normalized attention guidance: a negative prompt at CFG 1, against a plain implementation in
ComfyUI's own blocks.
"""

import re
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import comfy.hooks
import comfy.sample
import comfy.samplers
import narrow_transformer as narrow
import published_attention
import pytest
import torch
import torch.nn.functional as F
from comfy.ldm.flux.math import apply_rope1
from comfy.ldm.qwen_image.model import QwenImageTransformerBlock
from comfy_extras.nodes_custom_sampler import Guider_DualCFG
from comfyui_boot import refused
from narrow_21 import TEXT as TEXT_21
from narrow_21 import fun_control, strong_21, weights_21
from reported_runs import reported, running
from safetensors.torch import save_file

from qwen_l40s.errors import SettingError
from qwen_l40s.hosts.comfyui.lora.apply import apply_lora
from qwen_l40s.hosts.comfyui.sample.attention import SLOT
from qwen_l40s.hosts.comfyui.sample.nag import NagSettings, guide_attention
from qwen_l40s.hosts.comfyui.sample.optimize import OptimizeSettings, optimize, report_of
from qwen_l40s.hosts.comfyui.sample.run import NAG_KEY
from qwen_l40s.hosts.comfyui.sample.step_cache import cache_steps
from qwen_l40s.nodes.nag import QwenL40SNAG
from qwen_l40s.optimizations.attention import BACKENDS
from qwen_l40s.optimizations.attention.choice import TRIAL_TOKENS
from qwen_l40s.optimizations.blocks.block import BlockExecutor
from qwen_l40s.optimizations.nag import PrefixGuidance
from qwen_l40s.planning.step_cache import CacheSettings

pytestmark = pytest.mark.usefixtures("inference_mode")
newer = pytest.mark.host_has("comfy.model_base.QwenImage21")
STRONG = NagSettings(scale=4.0, tau=1.2, alpha=0.5)
PUBLISHED = NagSettings()


def random(*shape, seed=0):
    return narrow.random(*shape, seed=seed)


def model_1():
    weights = {name: weight.float() for name, weight in narrow.weights().items()}
    return narrow.stock(weights, torch.float32, torch.float32)


class One:
    """A small Qwen-Image 1.x."""

    make, width = staticmethod(model_1), narrow.SHAPE.joint_dim
    empty = torch.zeros(1, 16, 1, 8, 8)
    reference = random(1, 16, 1, 8, 4, seed=8)


class Two:
    """A small Qwen-Image-2.1."""

    make, width = staticmethod(strong_21), TEXT_21
    empty = torch.zeros(1, 64, 8, 8)
    reference = random(1, 64, 4, 6, seed=8)


FAMILIES = [One, pytest.param(Two, marks=newer)]


def prompt(family, tokens=7, seed=1, **more):
    return [[random(1, tokens, family.width, seed=seed), more]]


def sample(family, model, positive=None, steps=2, cfg=1.0, batch=1, sampler="euler"):
    latent = family.empty.expand(batch, *family.empty.shape[1:]).contiguous()
    positive = positive or prompt(family)
    how = steps, cfg, sampler, "simple", positive, prompt(family, 7, seed=3), latent
    noise = random(*latent.shape, seed=2)
    return comfy.sample.sample(model, noise, *how, seed=0, disable_pbar=True).float()


def guided(model, negative, settings=STRONG):
    return guide_attention(model, negative, settings)[0]


def close(found, expected, most=1e-5):
    return (found - expected).norm() <= most * expected.norm()


# --- the plain implementation


def guide(positive, negative, settings):
    """As diffusers#13089."""
    found = positive * settings.scale - negative * (settings.scale - 1)
    was, grown = (it.abs().sum(-1, keepdim=True) for it in (positive, found))
    found = torch.where(grown / was > settings.tau, found * was * settings.tau / grown, found)
    return found * settings.alpha + positive * (1 - settings.alpha)


class PlainJoint:
    """In each block the negative prompt's rows are a third stream; the image's rows go on once."""

    def __init__(self, negative, settings):
        self.negative, self.settings = negative, settings
        self.text = None

    def attend(self, attn, text, image, pe):
        parts = []
        for stream, names in ((text, "add_{}_proj norm_added_{}"), (image, "to_{} norm_{}")):
            layer, norm = names.split()
            found = []
            for name in "qkv":
                part = getattr(attn, layer.format(name))(stream).unflatten(2, (attn.heads, -1))
                part = part.transpose(1, 2)
                found.append(part if name == "v" else getattr(attn, norm.format(name))(part))
            parts.append(found)
        q, k, v = (torch.cat(pair, 2) for pair in zip(*parts, strict=True))
        out = F.scaled_dot_product_attention(apply_rope1(q, pe), apply_rope1(k, pe), v)
        out = out.transpose(1, 2).flatten(2)
        return out[:, : text.shape[1]], out[:, text.shape[1] :]

    def block(self, block, image, texts, temb, pes, zero):
        both, first = block.img_mod(temb), temb if zero is None else temb.chunk(2)[0]
        image_mods, text_mods = both.chunk(2, -1), block.txt_mod(first).chunk(2, -1)
        normed, gate = block._modulate(block.img_norm1(image), image_mods[0], zero)
        found = []
        for text, pe in zip(texts, pes, strict=True):
            rows, text_gate = block._modulate(block.txt_norm1(text), text_mods[0])
            of_text, of_image = self.attend(block.attn, rows, normed, pe)
            text = text + text_gate * block.attn.to_add_out(of_text)
            rows, text_gate = block._modulate(block.txt_norm2(text), text_mods[1])
            found.append((text + text_gate * block.txt_mlp(rows), of_image))
        (positive, read), (negative, other) = found
        read = block.attn.to_out[0](guide(read, other, self.settings))
        image = block._apply_gate(read, image, gate, zero)
        rows, gate = block._modulate(block.img_norm2(image), image_mods[1], zero)
        return positive, negative, block._apply_gate(block.img_mlp(rows), image, gate, zero)

    @contextmanager
    def during(self, model, monkeypatch):
        transformer = model.model.diffusion_model
        negative = self.negative

        def forward(block, hidden_states, encoder_hidden_states, temb, image_rotary_emb, **more):
            options = more["transformer_options"]
            image, text, pe = hidden_states, encoder_hidden_states, image_rotary_emb
            count = negative.shape[1]
            if options["block_index"] == 0:
                rows = negative.expand(len(text), -1, -1)
                self.text = transformer.txt_in(transformer.txt_norm(rows))
                # At the places of the prompt, and as many more as it is longer.
                start = 2  # of 4 x 4 tokens
                ids = torch.arange(start, start + count).reshape(1, -1, 1).repeat(1, 1, 3)
                own = transformer.pe_embedder(ids.float()).to(pe)
                self.pe = torch.cat(
                    [own.expand(len(pe), *own.shape[1:]), pe[:, :, text.shape[1] :]], 2
                )
            zero = more.get("timestep_zero_index")
            text, self.text, image = self.block(
                block, image, (text, self.text), temb, (pe, self.pe), zero
            )
            return text, image

        with monkeypatch.context() as patched:
            patched.setattr(QwenImageTransformerBlock, "forward", forward)
            yield


class PlainPrefix:
    """ComfyUI's own attention of 2.1, with the keys and values that the negative prompt has in a
    pass of its own.
    """

    def __init__(self, model, negative, settings, family=Two):
        self.settings, self.kept = settings, {}
        self.model = model
        recording = with_slot(model, self.record)
        recording.model_options["transformer_options"]["qwen_image21_cache"] = {"device": "off"}
        sample(family, recording, negative, steps=1)

    @staticmethod
    def own(default, q, k, v, heads, **more):
        return default(q, k, v, heads, **more)

    def record(self, default, q, k, v, heads, **more):
        if q.shape[1] == 64 and more.get("mask") is None:
            cut = k.shape[1] - 64
            block = more["transformer_options"]["block_index"]
            self.kept[block] = k[:1, :cut].clone(), v[:1, :cut].clone()
        return self.own(default, q, k, v, heads, **more)

    def attend(self, default, q, k, v, heads, **more):
        out = self.own(default, q, k, v, heads, **more)
        if q.shape[1] != 64 or more.get("mask") is not None:
            return out
        keys, values = self.kept[more["transformer_options"]["block_index"]]
        parts = (
            torch.cat([kept.expand(len(q), -1, -1), it[:, -64:]], 1)
            for kept, it in ((keys, k), (values, v))
        )
        return guide(out, self.own(default, q, *parts, heads, **more), self.settings)

    def patched(self):
        return with_slot(self.model, self.attend)


def with_slot(model, attend):
    clone = model.clone()
    clone.model_options["transformer_options"][SLOT] = attend
    return clone


def plain(family, model, negative, settings, monkeypatch, **how):
    if family is Two:
        return sample(family, PlainPrefix(model, negative, settings).patched(), **how)
    with PlainJoint(negative[0][0], settings).during(model, monkeypatch):
        return sample(family, model, **how)


@pytest.mark.parametrize("settings", [STRONG, PUBLISHED])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_plain_implementation(family, batch, settings, monkeypatch):
    model = family.make()
    unguided = sample(family, model, batch=batch)
    for tokens in (4, 7, 1007):
        negative = prompt(family, tokens, seed=5)
        expected = plain(family, model, negative, settings, monkeypatch, batch=batch)
        assert not close(expected, unguided, 1e-4)
        assert close(sample(family, guided(model, negative, settings), batch=batch), expected)
        for optimized in (
            optimize(guided(model, negative, settings)),
            guided(optimize(model), negative, settings),
        ):
            assert close(sample(family, optimized, batch=batch), expected)
            assert "blocks: fused, 4 of 4 in 2 forward passes" in report_of(optimized)
        assert torch.equal(sample(family, model, batch=batch), unguided)


@pytest.mark.parametrize(
    ("family", "masked"), [(One, False), (One, True), pytest.param(Two, False, marks=newer)]
)
def test_attention_to_the_image_is_computed_once_where_parts_merge(family, masked, monkeypatch):
    """By sdpa_flash, which gives log-sum-exps, and whole by math, which does not."""
    mask = {"attention_mask": torch.tensor([[1] * 6 + [0]])} if masked else {}
    model, negative = family.make(), prompt(family, 9, seed=5)
    positive, found, keys = prompt(family, **mask), {}, {}
    for name in ("sdpa_flash", "math"):
        calls = keys[name] = []
        backend = BACKENDS[name]
        attend = lambda q, k, *more, backend=backend, calls=calls, **how: (  # noqa: E731
            calls.append(k.shape[1]) or backend.attend(q, k, *more, **how)
        )
        monkeypatch.setitem(BACKENDS, name, replace(backend, attend=attend))
        optimized = optimize(guided(model, negative), OptimizeSettings(attention=name))
        found[name] = sample(family, optimized, positive=positive)
        assert "blocks: fused, 4 of 4" in report_of(optimized)
    image = 16 if family is One else 64
    assert {7, 9, image} <= set(keys["sdpa_flash"]) and not {7, 9, image} & set(keys["math"])
    assert close(found["math"], found["sdpa_flash"])
    assert close(found["math"], sample(family, guided(model, negative), positive=positive))


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_exact_where_8_bits_are_asked_for(family, monkeypatch):
    called = set()
    change = lambda out, q, k: called.add(q.shape[1]) or out  # noqa: E731
    published_attention.on_every_device(monkeypatch, change)
    model = guided(family.make(), prompt(family, 9, seed=5))
    optimized = optimize(model, OptimizeSettings(attention="kitchen_int8"))
    assert close(sample(family, optimized), sample(family, model))
    assert "blocks: fused, 4 of 4" in report_of(optimized)
    assert called <= {TRIAL_TOKENS}


def both_ways(family, model, negative, settings=STRONG, **how):
    """What ComfyUI's own blocks paint, guided, after the fused ones have painted the same."""
    patched = guided(model, negative, settings)
    expected, optimized = sample(family, patched, **how), optimize(patched)
    assert close(sample(family, optimized, **how), expected)
    assert "blocks: fused" in report_of(optimized)
    return expected


def lines(model):
    return " ".join(model.get_attachment(NAG_KEY).lines())


@pytest.mark.parametrize("family", FAMILIES)
def test_off_is_no_node(family):
    model, negative = family.make(), prompt(family, seed=5)
    for settings in (NagSettings(scale=1.0), NagSettings(alpha=0.0)):
        off, report = guide_attention(model, negative, settings)
        assert "off" in report
        assert torch.equal(sample(family, off), sample(family, model))
        assert close(sample(family, optimize(off)), sample(family, model))
    # A second node replaces the first.
    twice = guided(guided(model, negative), negative, NagSettings(scale=1.0))
    assert torch.equal(sample(family, twice), sample(family, model))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_that_is_its_own_negative_changes_nothing(family):
    model = family.make()
    assert close(both_ways(family, model, prompt(family)), sample(family, model), 2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_begin_and_end(family):
    model, negative = family.make(), prompt(family, seed=5)
    how = {"steps": 4}
    whole, none = both_ways(family, model, negative, **how), sample(family, model, **how)
    found = [whole, none]
    for start, end, count in ((0, 2, 2), (1, 10_000, 3), (3, 4, 1)):
        settings = NagSettings(4.0, 1.2, 0.5, start, end)
        found.append(both_ways(family, model, negative, settings, **how))
        patched = guided(model, negative, settings)
        sample(family, patched, **how)
        assert f"guides {count} of 4 forward passes" in lines(patched)
    for i, one in enumerate(found):
        assert not any(close(one, other, 3e-5) for other in found[:i])
    # A sampler that calls the model twice in a step.
    patched = guided(model, negative, NagSettings(4.0, 1.2, 0.5, 1, 2))
    sample(family, patched, steps=4, sampler="heun")
    assert "guides 2 of 7 forward passes" in lines(patched)


@pytest.mark.parametrize("family", FAMILIES)
def test_with_cfg_the_positive_prompt_alone_is_guided(family):
    """Both prompts in one batch, as of one length, and one after the other."""
    model, negative = family.make(), prompt(family, seed=5)
    found = []
    for tokens in (7, 9):
        how = {"cfg": 3.0, "positive": prompt(family, tokens)}
        found.append(both_ways(family, model, negative, **how))
        assert not close(found[-1], sample(family, model, **how), 1e-4)
        patched = guided(model, negative)
        sample(family, patched, **how)
        assert "CFG is 3, so each step also computes" in lines(patched)
    # By hand: the guided prediction and the unguided one of one step.
    how = {"steps": 1, "positive": prompt(family)}
    own = sample(family, model, **how | {"positive": prompt(family, 7, seed=3)})
    away = sample(family, guided(model, negative), **how)
    both = sample(family, guided(model, negative), cfg=3.0, **how)
    assert close(both, own + 3 * (away - own), 2e-5)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_of_three_prompts_the_positive_one_is_guided(family, nested):
    """Dual CFG Guider has them in the order negative, middle, positive."""
    model = family.make()
    patched = guided(model, prompt(family, seed=5))
    sigmas = comfy.samplers.KSampler(model, 1, "cpu", "euler", "simple").sigmas
    found = []
    for made in (model, patched, optimize(patched)):
        guider = Guider_DualCFG(made)
        guider.set_conds(prompt(family), prompt(family, 7, seed=6), prompt(family, 9, seed=3))
        guider.set_cfg(2.0, 3.0, nested=nested)
        noise = random(*family.empty.shape, seed=2)
        how = comfy.samplers.sampler_object("euler"), sigmas
        found.append(guider.sample(noise, family.empty, *how, seed=0, disable_pbar=True).float())
    own, away = (sample(family, it, steps=1) for it in (model, patched))
    expected = found[0] + (6 if nested else 2) * (away - own)
    assert all(close(it, expected, 5e-5) for it in found[1:])


@pytest.mark.parametrize("family", FAMILIES)
def test_edits_keep_their_references(family):
    model = family.make()
    given = {"reference_latents": [family.reference]}
    positive = prompt(family, **given)
    plain_text, edit = prompt(family, 5, seed=5), prompt(family, 5, seed=5, **given)
    found = [both_ways(family, model, it, positive=positive) for it in (plain_text, edit)]
    assert not close(found[1], sample(family, model, positive=positive), 1e-4)
    # References of the negative prompt: 1.x has those of the prompt, whose rows it shares.
    assert torch.equal(*found) == (family is One)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_negative_prompt_for_each_item(family):
    """Of which the first serves one item alone."""
    model, given = family.make(), {"reference_latents": [family.reference]}
    parts = [prompt(family, 5, seed=seed, **given) for seed in (5, 6)]
    both = [[torch.cat([it[0][0] for it in parts]), given]]
    found = both_ways(family, model, both, batch=2)
    assert close(both_ways(family, model, both), both_ways(family, model, parts[0]))
    for item, negative in enumerate(parts):
        assert close(found[item], sample(family, guided(model, negative), batch=2)[item])


@newer
@pytest.mark.parametrize("off", [True, False])
def test_an_edit_of_21_is_the_plain_implementation(off, monkeypatch):
    model = strong_21()
    if off:
        model.model_options["transformer_options"]["qwen_image21_cache"] = {"device": "off"}
    more = {"reference_latents": [Two.reference], "image_slots": [3]}
    positive, negative = prompt(Two, **more), prompt(Two, 5, seed=5, **more)
    expected = plain(Two, model, negative, STRONG, monkeypatch, positive=positive)
    assert close(both_ways(Two, model, negative, positive=positive), expected)


@newer
def test_a_hook_that_changes_weights_between_steps(monkeypatch):
    """The negative prompt's keys are of each step's weights, as ComfyUI's keys of the prompt."""
    seen, own = [], PrefixGuidance.attend

    def attend(self, *given, **how):
        seen.append(self.keys)
        return own(self, *given, **how)

    monkeypatch.setattr(PrefixGuidance, "attend", attend)
    lora = narrow.lora(weights_21(), [f"transformer_blocks.{i}.attn.to_k" for i in range(2)])
    for changed in (lambda model: model, optimize):
        found = []
        for strengths in ((1.0, 0.0), (1.0,), (0.0,)):
            hooks, frames = comfy.hooks.create_hook_lora(lora, 1.0, 0.0), [0.0, 0.5]
            keyframes = comfy.hooks.HookKeyframeGroup()
            for strength, start in zip(strengths, frames, strict=False):
                keyframes.add(comfy.hooks.HookKeyframe(strength, start_percent=start))
            hooks.set_keyframes_on_hooks(keyframes)
            positive = comfy.hooks.set_hooks_for_conditioning(prompt(Two), hooks)
            del seen[:]
            model = changed(guided(strong_21(), prompt(Two, seed=5)))
            sample(Two, model, positive, steps=4)
            found.append((seen[0], seen[-1]))
        changes, always, never = found
        assert not any(close(*pair, 1e-3) for pair in zip(always, never, strict=True))
        assert close(changes[0], always[0]) and close(changes[1], never[1])


@pytest.mark.each_device
def test_a_mask_of_the_text():
    model, mask = model_1(), torch.ones(1, 9, dtype=torch.int64)
    mask[:, 6:] = 0
    padded = [[random(1, 9, One.width, seed=5), {"attention_mask": mask}]]
    short = [[padded[0][0][:, :6], {}]]
    expected = both_ways(One, model, short)
    assert close(both_ways(One, model, padded), expected)
    positive = [[torch.cat([prompt(One)[0][0], random(1, 2, One.width)], 1), {}]]
    positive[0][1]["attention_mask"] = torch.tensor([[1] * 7 + [0] * 2])
    assert close(both_ways(One, model, short, positive=positive), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_beside_another_nodes_attention(family):
    """Before and after the node; what is in the slot computes each part."""
    calls = []

    def halves(attend, q, k, v, *args, **more):
        calls.append(q.shape)
        return attend(q * 0.5, k, v, *args, **more)

    model, negative = family.make(), prompt(family, seed=5)
    expected = sample(family, guided(with_slot(model, halves), negative))
    assert calls and not close(expected, sample(family, guided(model, negative)), 1e-4)
    late = guided(model, negative)
    late.model_options["transformer_options"][SLOT] = halves
    assert torch.equal(sample(family, late), expected)
    assert close(both_ways(family, with_slot(model, halves), negative), expected)


@newer
def test_with_a_fun_controlnet_of_21():
    """Whose own blocks are not guided, in ComfyUI's blocks and in the fused ones."""
    model, negative = strong_21(), prompt(Two, seed=5)
    patched = fun_control(guided(model, negative))
    expected = sample(Two, patched)
    assert not close(expected, sample(Two, fun_control(model)), 1e-4)
    optimized = optimize(fun_control(guided(model, negative)))
    assert close(sample(Two, optimized), expected)
    assert "blocks: fused, 4 of 4" in report_of(optimized)


def test_with_loras_and_the_step_cache(tmp_path):
    model, negative = model_1(), prompt(One, seed=5)
    path = tmp_path / "lora.safetensors"
    save_file(narrow.lora(narrow.weights(), ["transformer_blocks.0.attn.add_k_proj"]), path)
    for how in ("merge", "bypass"):
        patched = apply_lora(model, path, 1.0, how=how)[0]
        found = both_ways(One, patched, negative)
        assert not close(found, both_ways(One, model, negative), 1e-4)
    cached = cache_steps(guided(model, negative), CacheSettings(budget=1, head=0, tail=0))
    found = sample(One, cached, steps=20)
    every = sample(One, guided(model, negative), steps=20)
    assert not torch.equal(found, every) and close(found, every, 0.2)
    passes = int(re.search(r"guides (\d+) of \1 forward passes", lines(cached))[1])
    assert passes < 20


ASIDE = {
    "empty": ([], "the negative prompt is empty"),
    "without tokens": ([[torch.zeros(1, 0, One.width), {}]], "the negative prompt is empty"),
    "combined": (2 * prompt(One, seed=5), "prompts are combined, in regions or scheduled"),
    "in a region": (prompt(One, seed=5, area=(4, 4, 0, 0)), "prompts are combined, in regions"),
    "for a part": (prompt(One, seed=5, start_percent=0.5), "prompts are combined, in regions"),
}


@pytest.mark.parametrize("name", ASIDE)
def test_it_steps_aside(name):
    negative, words = ASIDE[name]
    model = model_1()
    patched, report = guide_attention(model, negative, STRONG)
    assert words in report
    assert torch.equal(sample(One, patched), sample(One, model))
    assert f"NAG: has no effect: {words}" in lines(patched)


def test_it_steps_aside_for_combined_positive_prompts_and_several_cards(monkeypatch):
    model, negative = model_1(), prompt(One, seed=5)
    patched, both = guided(model, negative), prompt(One) + prompt(One, seed=6)
    assert torch.equal(sample(One, patched, both), sample(One, model, both))
    assert "prompts are combined" in lines(patched)
    monkeypatch.setattr(
        type(patched),
        "get_additional_models_with_key",
        lambda self, key: [None] if key == "multigpu" else [],
    )
    run = SimpleNamespace(model_patcher=patched, conds={"positive": [{}]}, cfg=1.0)
    attachment = patched.get_attachment(NAG_KEY)
    attachment.outer_sample(Executor(run))
    assert "several GPUs share the run" in lines(patched)


class Executor:
    def __init__(self, guider):
        self.class_obj = guider

    def __call__(self, *args, **kwargs):
        return None


def test_another_models_text_and_settings_are_refused():
    model = model_1()
    wide = [[random(1, 5, One.width + 8), {}]]
    words = "NAG's negative prompt is 72 wide, but the MODEL takes text 64 wide"
    refused(SettingError, words, run=lambda: sample(One, guided(model, wide)))
    words = "end_at_step is 3"
    refused(SettingError, words, run=lambda: NagSettings(start=3, end=3))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_node_and_the_report(family):
    model, negative = family.make(), prompt(family, seed=5)
    found, report = QwenL40SNAG.execute(optimize(model), negative, 4.0, 1.2, 0.5).result
    assert report == "NAG: guides the run; the Report shows how much."
    with running():
        assert close(sample(family, found), both_ways(family, model, negative))
    text = reported(found, None, None).text
    words = "the negative prompt, of 7 tokens, guides 2 of 2 forward passes: scale 4, tau 1.2"
    assert words in text


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_that_is_made_again_is_guided_from_its_first_block(family, monkeypatch):
    """By ComfyUI's blocks, where a kernel raises in a block that is not compared."""
    model, blocks = guided(family.make(), prompt(family, seed=5)), []
    expected, own = sample(family, model), BlockExecutor.go_to_last

    def raises(self, *given):
        blocks.append(own(self, *given))
        if len(blocks) == (3 if family is One else 5):
            raise ValueError("a kernel")

    monkeypatch.setattr(BlockExecutor, "go_to_last", raises)
    assert close(sample(family, optimized := optimize(model)), expected)
    assert "blocks: fused, 2 of" in report_of(optimized)
