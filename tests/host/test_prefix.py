"""What 2.1 keeps of a prompt's references on the card: it saves rows, and changes no bit."""

import copy
import gc
import itertools
import random as chance
import sys
import weakref
from functools import partial
from importlib import import_module
from typing import NamedTuple

import comfy.model_management as management
import comfy.sample
import pytest
import torch
from comfy.patcher_extension import WrappersMP
from narrow_21 import TEXT, strong_21

from qwen_l40s.hosts.comfyui import qwen_image
from qwen_l40s.hosts.comfyui.sample.attention import SLOT
from qwen_l40s.hosts.comfyui.sample.optimize import OptimizeSettings, optimize
from qwen_l40s.hosts.comfyui.sample.prefix import WRITTEN, KeptPrefixes, bytes_on
from qwen_l40s.optimizations.blocks.block import BlockExecutor
from qwen_l40s.optimizations.passes import ForwardPass

pytestmark = [
    pytest.mark.usefixtures("inference_mode"),
    pytest.mark.host_has("comfy.model_base.QwenImage21"),
]
CARD = management.get_torch_device()
BLOCKS, BEFORE, IMAGES = 2, 3, {1: (4, 6), 2: (2, 2), 3: (4, 6)}
ROWS = sum(IMAGES[it][0] * IMAGES[it][1] for it in (1, 2))


def random(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Prompt(NamedTuple):
    instruction: int = 1  # its seed, and how many rows it has beyond 2
    references: tuple[int, ...] = (1, 2)  # their seeds
    opening: int = 0  # the text before the references
    side: int = 8
    batch: int = 1
    cfg: float = 1.0
    seed: int = 0


def condition(prompt, instruction):
    parts = random(prompt.opening, 1, BEFORE, TEXT), random(instruction, 1, 2 + instruction, TEXT)
    references = [random(it, 1, 64, *IMAGES[it]) for it in prompt.references]
    slots = [BEFORE] * len(references)
    given = {"reference_latents": references, "image_slots": slots} if references else {}
    return [[torch.cat(parts, 1), given]]


def sample(model, prompt, steps=2):
    latent = torch.zeros(prompt.batch, 64, prompt.side, 8)
    prompts = condition(prompt, prompt.instruction), condition(prompt, 7)
    settings = steps, prompt.cfg, "euler", "simple", *prompts, latent
    noise = random(prompt.seed, *latent.shape)
    return comfy.sample.sample(model, noise, *settings, seed=0, disable_pbar=True)


@pytest.fixture
def kept():
    """Counts the rows of each block whose keys and values a run computes, to keep them."""
    with pytest.MonkeyPatch.context() as patch:
        found, own = [], BlockExecutor.go_to_last

        def go_to_last(self, program, here, x, step, halves):
            if step.keep is not None:
                found.append(len(x))
            own(self, program, here, x, step, halves)

        patch.setattr(BlockExecutor, "go_to_last", go_to_last)
        yield found


def computed(kept):
    rows = sum(kept) / BLOCKS
    kept.clear()
    return rows


def drop(model):
    KeptPrefixes.of(model.model.diffusion_model).clear()


def fresh(model, prompt):
    drop(model)
    found = sample(model, prompt)
    drop(model)
    return found


def close(ours, theirs):
    return torch.linalg.vector_norm(ours - theirs) <= 1e-5 * torch.linalg.vector_norm(theirs)


BASE = Prompt()
# {a change: how many rows are computed after `BASE`, besides those of the instruction}
CHANGES = {
    BASE: None,
    BASE._replace(seed=1): None,
    BASE._replace(instruction=2): 0,
    BASE._replace(instruction=300): 0,
    BASE._replace(references=(2, 1)): BEFORE + ROWS,
    BASE._replace(references=(3, 2)): BEFORE + ROWS,
    BASE._replace(opening=1): BEFORE + ROWS,
    BASE._replace(side=6): None,  # references are centred on it
    BASE._replace(side=7): BEFORE + ROWS,
    BASE._replace(batch=2): BEFORE + ROWS,
    BASE._replace(cfg=3.0): BEFORE + ROWS,
}


@pytest.mark.each_device
@pytest.mark.parametrize("changed", CHANGES)
def test_rows_that_are_the_same_are_not_computed_again(changed, kept):
    model = optimize(strong_21())
    expected, plain = fresh(model, changed), sample(strong_21(), changed)
    assert close(expected, plain)
    sample(model, BASE)
    computed(kept)
    assert torch.equal(sample(model, changed), expected)
    rows, behind = CHANGES[changed], 2 + changed.instruction
    if changed.cfg > 1:  # of the batch of two or of the negative prompt alone
        assert computed(kept) >= 9
    else:
        assert computed(kept) == (0 if rows is None else changed.batch * (rows + behind))


@pytest.mark.each_device
def test_no_bit_depends_on_the_prompts_before():
    model, choose = optimize(strong_21()), chance.Random(5)
    prompts = [
        Prompt(*it)
        for it in itertools.product((1, 2), ((), (1, 2), (3, 2)), (0, 1), (8,), (1,), (1.0, 3.0))
    ]
    expected = {it: fresh(model, it) for it in prompts}
    for prompt in choose.choices(prompts, k=60):
        assert torch.equal(sample(model, prompt), expected[prompt]), prompt


@pytest.mark.each_device
def test_weights_that_a_patch_changes_begin_anew(kept):
    model = optimize(strong_21())
    patched = model.clone()
    weight = "diffusion_model.transformer_blocks.0.attn.to_k.weight"
    patched.add_patches({weight: ("diff", (random(3, 256, 256),))})
    expected = fresh(patched, BASE)
    for each in (model, patched, model):
        computed(kept)
        found = sample(each, BASE)
        assert computed(kept) == BEFORE + ROWS + 3
        assert torch.equal(found, expected) == (each is patched)


def test_attention_of_others_computes_the_rows_of_each_prompt(kept):
    model = optimize(strong_21(), OptimizeSettings(attention="comfyui"))
    for _ in range(2):
        sample(model, BASE)
        assert computed(kept) == BEFORE + ROWS + 3
    assert not bytes_on(CARD)


def blocks_of(model):
    return model.model.diffusion_model.transformer_blocks


def larger_values(model):
    blocks_of(model)[1].attn.to_v.weight.mul_(1.5)


def another_layer(model):
    layer = copy.deepcopy(blocks_of(model)[0].attn.to_v)
    layer.weight.mul_(1.5)
    model.add_object_patch("diffusion_model.transformer_blocks.0.attn.to_v", layer)


def another_norm(model):
    for block in blocks_of(model):
        block.attn.norm_q.eps = block.attn.norm_k.eps = 0.5


def other_sums(model):
    torch.backends.cuda.matmul.allow_fp16_accumulation ^= True


@pytest.mark.parametrize("change", [larger_values, another_layer, another_norm, other_sums])
def test_what_a_pack_changes_without_a_patch_begins_anew(change, kept):
    flags = torch.backends.cuda.matmul
    model, before = optimize(strong_21()), flags.allow_fp16_accumulation
    sample(model, BASE)
    try:
        change(model)
        computed(kept)
        found = sample(model, BASE)
        assert computed(kept) == BEFORE + ROWS + 3
        assert torch.equal(found, fresh(model, BASE))
    finally:
        flags.allow_fp16_accumulation = before


class Mixing(torch.nn.Module):
    def __init__(self, own):
        super().__init__()
        self.own = own

    def forward(self, text):
        rows = self.own(text)
        return rows + rows.mean(1, keepdim=True)


def mixing(model):
    own = model.model.diffusion_model.txt_in
    model.add_object_patch("diffusion_model.txt_in", Mixing(own))


def weighted(model):
    own = model.model.diffusion_model.build_sequence

    def build(*given):
        rows, *rest = own(*given)
        weights = torch.ones(rows.shape[1], 1, device=rows.device)
        weights[1] = 1.1
        return rows * weights, *rest

    model.add_object_patch("diffusion_model.build_sequence", build)


@pytest.mark.parametrize("change", [mixing, weighted])
def test_what_a_pack_makes_of_the_text_is_kept_as_it_is(change):
    model = strong_21()
    change(model)
    assert close(sample(optimize(model), BASE), sample(model, BASE))


@pytest.mark.parametrize("slots", [[5, 3, 8], [8, 3, 8]])
def test_references_out_of_order(slots, monkeypatch):
    def disordered(prompt, instruction):
        return [[text, given | {"image_slots": slots}] for text, given in own(prompt, instruction)]

    model, own = strong_21(), condition
    monkeypatch.setitem(globals(), "condition", disordered)
    prompt = Prompt(instruction=5, references=(1, 2, 3))
    assert close(sample(optimize(model), prompt), sample(model, prompt))


def test_a_negative_prompt_is_kept_while_the_instruction_changes(kept):
    model = optimize(strong_21())
    sample(model, BASE._replace(cfg=3.0))
    for instruction in (2, 3, 4, 5):
        computed(kept)
        sample(model, BASE._replace(cfg=3.0, instruction=instruction))
        assert computed(kept) == 2 + instruction


@pytest.mark.parametrize("gone", ["slot", "slots", "dtype", "store_device", "_pending", *WRITTEN])
def test_a_cache_of_another_form_is_not_written(gone, monkeypatch):
    code = import_module(qwen_image.CODE)

    class Other(code.PoseBranchCache):
        def __getattribute__(self, name):
            found = super().__getattribute__(name)
            if sys._getframe(1).f_globals["__name__"].startswith("comfy."):
                return found
            if name == gone:
                raise AttributeError(name)
            if name == "slot" and found is not None:
                return {key: value for key, value in found.items() if key != gone}
            return found

    plain, model = strong_21(), optimize(strong_21())
    expected = sample(plain, BASE)
    monkeypatch.setattr(code, "PoseBranchCache", Other)
    for _ in range(2):
        assert close(sample(model, BASE), expected)
    assert not bytes_on(CARD)


def unload(model):
    management.unload_all_models()


def need_room(model):
    management.free_memory(1e30, CARD)


def detach(model):
    model.detach()


def little_is_free(model):
    KeptPrefixes.of(model.model.diffusion_model).clear_if_tight(4, 1)


@pytest.mark.each_device
@pytest.mark.parametrize("lose", [unload, need_room, detach, little_is_free])
def test_memory_is_given_back(lose, kept):
    model = optimize(strong_21())
    expected = sample(model, BASE)
    assert bytes_on(CARD) > BLOCKS * 2 * ROWS * 256 * 4
    computed(kept)
    lose(model)
    assert not bytes_on(CARD)
    assert torch.equal(sample(model, BASE), expected)
    assert computed(kept) == BEFORE + ROWS + 3


def test_nothing_is_dropped_where_room_is_free(kept):
    model = optimize(strong_21())
    sample(model, BASE)
    management.free_memory(0, CARD)
    assert bytes_on(CARD)


def test_a_model_that_is_gone_leaves_nothing():
    model = strong_21()

    def attend(default, *given, of=None, **named):
        return default(*given, **named)

    attend = partial(attend, of=model.clone())
    model.model_options["transformer_options"][SLOT] = attend
    model = optimize(model, OptimizeSettings(attention="sdpa_flash"))
    sample(model, BASE)
    assert bytes_on(CARD)
    management.current_loaded_models.clear()
    del model, attend
    gc.collect()
    assert not bytes_on(CARD)


def test_cards_begin_while_memory_is_counted():
    """As other threads, between any two lines of Python's."""
    owners, before = [], sys.gettrace()

    def begin(frame, *_):
        if frame.f_code.co_filename == weakref.__file__:
            owners.append(torch.nn.Module())
            KeptPrefixes.of(owners[-1])
        return begin

    model = optimize(strong_21())
    sample(model, BASE)
    sys.settrace(begin)
    try:
        assert bytes_on(CARD)
    finally:
        sys.settrace(before)
    assert owners


@pytest.mark.each_device
@pytest.mark.parametrize("options", [{"device": "off"}, {"dtype": "int8"}, {"device": "gpu"}])
def test_a_cache_of_another_kind_gives_the_same_bits_each_time(options):
    model = optimize(strong_21())
    model.model_options["transformer_options"]["qwen_image21_cache"] = options
    assert torch.equal(sample(model, BASE), sample(model, BASE))
    assert bool(bytes_on(CARD)) == (options == {"device": "gpu"})
    drop(model)


def run_larger(block, own, given):
    index, x, *rest = given
    return own(index, 1.5 * x if index == 1 else x, *rest)


def run_comfyuis(block, own, given):
    index, *given = given
    return type(block).forward(block, *given) if index == 1 else own(index, *given)


@pytest.mark.parametrize("intrudes", [run_larger, run_comfyuis])
def test_a_pack_between_two_blocks_gets_all_rows(intrudes, monkeypatch):
    """As one that wraps what calls a block, also where the rows are not computed."""
    model, plain = strong_21(), strong_21()
    optimized, own = optimize(model), ForwardPass.run

    def run(self, index, module, positional, arguments):
        def go(index, *given):
            return own(self, index, module, given, {})

        return intrudes(module, go, (index, *positional))

    expected = {}
    for prompt in (BASE, BASE._replace(instruction=2)):
        sampled = plain.clone()
        if intrudes is run_larger:
            block = sampled.model.diffusion_model.transformer_blocks[1]
            forward = type(block).forward

            def larger(x, *given, block=block, forward=forward):
                return forward(block, 1.5 * x, *given)

            sampled.add_object_patch("diffusion_model.transformer_blocks.1.forward", larger)
        expected[prompt] = sample(sampled, prompt)
    sample(optimized, BASE)
    monkeypatch.setattr(ForwardPass, "run", run)
    for prompt, found in expected.items():
        assert close(sample(optimized, prompt), found)


def test_a_prompt_that_is_stopped_leaves_nothing_half_filled(monkeypatch):
    model = optimize(strong_21())
    expected = [fresh(model, BASE), fresh(model, BASE._replace(instruction=2))]
    sample(model, BASE)
    own = qwen_image.PrefixedComfyPass._fill

    def stops(self, parts, block, given, call):
        if call.block_index == 1:
            raise management.InterruptProcessingException
        return own(self, parts, block, given, call)

    for _ in range(2):
        monkeypatch.setattr(qwen_image.PrefixedComfyPass, "_fill", stops)
        with pytest.raises(management.InterruptProcessingException):
            sample(model, BASE._replace(instruction=2))
        assert KeptPrefixes.of(model.model.diffusion_model).text is None
        monkeypatch.undo()
        assert torch.equal(sample(model, BASE._replace(instruction=2)), expected[1])
        assert torch.equal(sample(model, BASE), expected[0])


def test_a_block_that_fails_its_check_runs_comfyuis(monkeypatch):
    plain, optimized = strong_21(), optimize(strong_21())
    own = BlockExecutor.go_to_last

    def wrong(self, program, here, x, step, halves):
        own(self, program, here, x, step, halves)
        x.mul_(3.0)

    monkeypatch.setattr(BlockExecutor, "go_to_last", wrong)
    assert close(sample(optimized, BASE), sample(plain, BASE))


@pytest.mark.each_device
def test_a_wrapper_that_changes_the_text_is_seen():
    model = strong_21()
    scale = [1.0]

    def louder(executor, x, timestep, context, *given, **named):
        return executor(x, timestep, scale[0] * context, *given, **named)

    model.add_wrapper(WrappersMP.DIFFUSION_MODEL, louder)
    optimized = optimize(model)
    for scale[0] in (1.0, 2.0):
        assert close(sample(optimized, BASE), sample(model, BASE))
