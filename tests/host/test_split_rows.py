"""The rows of a forward pass on several cards, in ComfyUI's own sampling, against one card.

"cpu" and "cpu:1" stand for the cards: different devices whose tensors are the CPU's.
"""

import comfy.model_management
import comfy.sample
import narrow_transformer as narrow
import pytest
import torch
from comfyui_boot import folder
from faulty_copies import Vanishing, between_cards, split_always, stand_in_cards

from qwen_l40s.caches import forget
from qwen_l40s.hosts.comfyui.load.transformer import load_model
from qwen_l40s.hosts.comfyui.sample import run
from qwen_l40s.hosts.comfyui.sample.cards import split_cards
from qwen_l40s.hosts.comfyui.sample.measure import path_of
from qwen_l40s.hosts.comfyui.sample.optimize import OptimizeSettings, optimize
from qwen_l40s.machine import links
from qwen_l40s.optimizations.run import NotFiniteError, Optimization

pytestmark = pytest.mark.usefixtures("inference_mode")
FOLDER, WEIGHTS = folder("split"), narrow.weights()
PATH = narrow.write(FOLDER / "bf16.safetensors", WEIGHTS)
# The CPU casts bf16 weights on their way, which no card does.
PLAIN = narrow.write(FOLDER / "fp32.safetensors", {n: it.float() for n, it in WEIGHTS.items()})
CARDS = [torch.device("cpu"), torch.device("cpu", 1), torch.device("cpu", 2)]


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Three cards, where a split always pays; what is measured on them is not."""
    monkeypatch.setattr(
        comfy.model_management, "get_all_torch_devices", lambda exclude_current=False: CARDS
    )
    stand_in_cards(monkeypatch)
    split_always(monkeypatch)

    def set_gbps(gbps):
        monkeypatch.setattr(links.Link, "gbps", gbps)

    set_gbps(50.0)
    monkeypatch.setattr(run, "VERIFIED", {"cpu"})
    yield set_gbps
    comfy.model_management.unload_all_models()


def sample(model, cfg=1.0, references=0, batch=1, callback=None):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(batch, 16, 1, 24, 32, generator=generator)
    extra = {}
    if references:
        latents = [torch.randn(1, 16, 1, 16, 16, generator=generator) for _ in range(references)]
        extra = {"reference_latents": latents, "reference_latents_method": "index_timestep_zero"}
    prompts = [
        [[torch.randn(1, tokens, narrow.SHAPE.joint_dim, generator=generator), extra]]
        for tokens in (20, 7)
    ]
    steps = (3, cfg, "euler", "simple", *prompts, torch.zeros_like(noise))
    return comfy.sample.sample(
        model, noise, *steps, disable_pbar=True, seed=0, callback=callback
    ).float()


def report(model):
    return "\n".join(path_of(model))


@pytest.mark.parametrize("precision", ["auto", "int8", "fp8"])
def test_images_are_those_of_one_card(machine, precision):
    path = PLAIN if precision == "auto" else PATH
    loaded = load_model(path, precision)[0]
    for cards in (2, 3):
        for gbps, exchange in ((1e-3, "normalized rows"), (1e3, "keys and values")):
            machine(gbps)
            model = optimize(loaded)  # which keeps how it has split a shape
            split = split_cards(model, cards)[0]
            for how in ({}, {"references": 2}, {"batch": 2}):
                expected, found = sample(model, **how), sample(split, **how)
                error = (found - expected).norm() / expected.norm()
                assert error < 0.004, (cards, exchange, how, error)
                said = report(split)
                assert f"GPUs: {cards} share 3 forward passes" in said, said
                assert exchange in said, said


def test_a_card_for_each_prompt_shares_none(machine):
    model = optimize(load_model(PATH, "bf16")[0])
    split = split_cards(model, 2)[0]
    assert torch.equal(sample(split, 4.0), sample(model, 4.0))
    assert "share" not in report(split)
    three = split_cards(model, 3)[0]
    expected = sample(model, 4.0)
    assert (sample(three, 4.0) - expected).norm() / expected.norm() < 0.004


def test_what_does_not_share_says_why(machine):
    model = load_model(PATH, "bf16")[0]
    split = split_cards(optimize(model, OptimizeSettings(attention="comfyui")), 2)[0]
    sample(split)
    assert "GPUs: one in 3 forward passes: attention is not computed by this package" in report(
        split
    )
    split = split_cards(optimize(model), 2)[0]
    split.model_options["transformer_options"]["patches_replace"] = {
        "dit": {("double_block", 1): lambda args, extra: extra["original_block"](args)}
    }
    sample(split)
    assert "another node reads or changes the values between two blocks" in report(split)


@pytest.fixture
def operations(monkeypatch):
    """Those of the cards, whose copies are lost once they have `start`ed."""
    made = between_cards(Vanishing)(10**9)
    monkeypatch.setattr(links, "CardOperations", lambda: made)
    forget()
    yield made
    forget()


def test_a_link_that_loses_copies_is_found_at_the_start_of_a_run(machine, operations, caplog):
    model = optimize(load_model(PATH, "int8")[0])
    split = split_cards(model, 2)[0]
    expected = {cfg: sample(model, cfg) for cfg in (1.0, 4.0)}

    def same(cfg, passes):
        apart = (sample(split, cfg) - expected[cfg]).norm() / expected[cfg].norm()
        assert apart < 0.004, (cfg, apart)
        return f"GPUs: 2 share {passes} forward passes" in report(split)

    assert same(1.0, 3)
    assert not same(4.0, 6)  # a prompt each
    operations.start = operations.copies
    for _ in range(2):  # through host memory, where each prompt would be copied by ComfyUI
        assert same(1.0, 3) and same(4.0, 6)
    lost = "Copies between cpu and cpu:1 lose data on this machine (IOMMU or ACS)"
    assert caplog.text.count(lost) == 1
    assert f"GPUs: {lost}" in report(split)


def test_a_link_is_verified_at_the_start_of_each_run_and_after_an_error(
    machine, operations, monkeypatch, caplog
):
    verified, verify, confirm = [], links.Link.verify, Optimization.confirm
    monkeypatch.setattr(
        links.Link, "verify", lambda self: verified.append(self.cards) or verify(self)
    )
    split = split_cards(optimize(load_model(PATH, "int8")[0]), 3)[0]
    pairs = [(CARDS[0], CARDS[1]), (CARDS[0], CARDS[2]), (CARDS[1], CARDS[2])]
    for runs in (1, 2):
        sample(split)
        assert verified == runs * pairs
    verified.clear()
    steps = []

    def not_finite(self):
        confirm(self)
        if len(steps) == 3:  # at the end of the run
            operations.start = operations.copies
            raise NotFiniteError

    monkeypatch.setattr(Optimization, "confirm", not_finite)
    sample(split, callback=lambda index, *_: steps.append(index))
    assert steps == 2 * [0, 1, 2] and verified == 2 * pairs
    assert "lose data on this machine" in caplog.text


def test_an_interrupt_in_the_middle_leaves_nothing_behind(machine):
    model = optimize(load_model(PATH, "int8")[0])
    split = split_cards(model, 2)[0]

    def stop(step, *_):
        if step == 1:
            raise comfy.model_management.InterruptProcessingException

    with pytest.raises(comfy.model_management.InterruptProcessingException):
        sample(split, callback=stop)
    expected = sample(model)
    assert (sample(split) - expected).norm() / expected.norm() < 0.004
