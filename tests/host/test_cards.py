"""One MODEL on several cards: ComfyUI's copies of it, and which pass may use which idle card.

"cpu", "cpu:1" and so on stand for cards: they are different devices whose tensors are the CPU's.
"""

import contextlib
import gc
import weakref
from types import SimpleNamespace
from unittest import mock

import comfy.model_management
import comfy.model_patcher
import comfy.multigpu
import comfy.sample
import narrow_transformer as narrow
import pytest
import torch
from comfy.patcher_extension import WrappersMP
from comfy_extras.nodes_model_advanced import ModelSamplingAuraFlow
from comfyui_boot import MODE, folder
from faulty_copies import Vanishing, between_cards, split_always, stand_in_cards
from safetensors.torch import save_file

from qwen_l40s.caches import forget
from qwen_l40s.families.registry import blocks_of
from qwen_l40s.hosts.comfyui.load.transformer import load_model
from qwen_l40s.hosts.comfyui.lora.apply import apply_lora
from qwen_l40s.hosts.comfyui.sample import cards, layers, run
from qwen_l40s.hosts.comfyui.sample.cards import split_cards
from qwen_l40s.hosts.comfyui.sample.forward import IDLE
from qwen_l40s.hosts.comfyui.sample.layers import ComfyLayers
from qwen_l40s.hosts.comfyui.sample.measure import path_of
from qwen_l40s.hosts.comfyui.sample.optimize import OptimizeSettings, optimize
from qwen_l40s.hosts.comfyui.sample.run import ComfyOptimization
from qwen_l40s.hosts.comfyui.sample.step_cache import cache_steps
from qwen_l40s.machine import links
from qwen_l40s.nodes.optimize import QwenL40SSplitCards
from qwen_l40s.optimizations.blocks.block_form import token_layers
from qwen_l40s.optimizations.run import NotFiniteError, Optimization
from qwen_l40s.planning.step_cache import cache_settings

pytestmark = pytest.mark.usefixtures("inference_mode")
FOLDER = folder("cards")
WEIGHTS = narrow.weights()
PATH = narrow.write(FOLDER / "bf16.safetensors", WEIGHTS)
LAYER = narrow.LAYER
LORA = FOLDER / "lora.safetensors"
save_file(narrow.lora(WEIGHTS, [LAYER], scale=1.0), LORA)
Patcher = comfy.model_patcher.ModelPatcher


def card(index: int) -> torch.device:
    return torch.device("cpu", index) if index else torch.device("cpu")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch):
    """Sets how many cards ComfyUI sees: four, where nobody says otherwise."""

    def visible(count: int) -> None:
        devices = [card(index) for index in range(count)]
        find = lambda exclude_current=False: devices  # noqa: E731
        monkeypatch.setattr(comfy.model_management, "get_all_torch_devices", find)

    if MODE == "cpu":
        visible(4)
        stand_in_cards(monkeypatch)
    yield visible
    comfy.model_management.unload_all_models()


def prompt(tokens: int, **options: object) -> list:
    return [narrow.random(1, tokens, narrow.SHAPE.joint_dim, seed=tokens), options]


def sample(model: Patcher, cfg: float = 1.0, positive: list | None = None, **options: object):
    """Two Euler steps of 64 image tokens; prompts of different lengths never batch."""
    noise = narrow.random(1, 16, 1, 16, 16)
    positive = [prompt(20)] if positive is None else positive
    return narrow.sample(model, positive, [prompt(7)], cfg=cfg, noise=noise, **options)


@contextlib.contextmanager
def watched():
    """The passes of the runs inside: (card, cards of its peers), and the adapter of each."""
    run_pass = ComfyOptimization.run_pass
    passes, hosts = [], []

    def watch(self, host, call):
        assert all(peer.owner.current_patcher.load_device == peer.device for peer in host.peers)
        passes.append((host.device.index or 0, [peer.device.index for peer in host.peers]))
        hosts.append(host)
        return run_pass(self, host, call)

    with mock.patch.object(ComfyOptimization, "run_pass", watch):
        yield passes, hosts


def test_cards_without_a_prompt_are_shared_out():
    model = optimize(load_model(PATH, "bf16")[0])
    halves = [prompt(20, end_percent=0.2), prompt(20, start_percent=0.2)]
    expected = {cfg: sample(model, cfg) for cfg in (1.0, 4.0)}
    # {(cards, CFG): what the passes of one step get}
    pairs = {
        (2, 1.0): [(0, [1])],
        (2, 4.0): [(0, []), (1, [])],
        (3, 1.0): [(0, [1, 2])],
        (3, 4.0): [(0, [2]), (1, [])],
        (4, 4.0): [(0, [2]), (1, [3])],
    }
    for (count, cfg), step in pairs.items():
        split, report = split_cards(model, count)
        assert report.startswith("GPUs: cpu, cpu:1") and "\n" not in report, report
        with watched() as (passes, _):
            assert torch.equal(sample(split, cfg), expected[cfg]), (count, cfg)
        assert sorted(passes) == sorted(2 * step), (count, cfg)
        assert report in "\n".join(path_of(split))
    # Prompts that take turns count once; three prompts fill two of three cards.
    split = split_cards(model, 2)[0]
    with watched() as (passes, _):
        sample(split, positive=halves)
    assert passes == [(0, [1])] * 2
    with watched() as (passes, _):
        sample(split_cards(model, 3)[0], 4.0, positive=[prompt(20), prompt(9), prompt(11)])
    assert dict(passes) == {0: [2], 1: []}


@pytest.fixture
def pays(monkeypatch: pytest.MonkeyPatch):
    split_always(monkeypatch)
    if MODE == "cpu":
        monkeypatch.setattr(links.Link, "gbps", 50.0)


def report(model: Patcher) -> str:
    return "\n".join(path_of(model))


def controlled(model: Patcher) -> Patcher:
    """With what a ControlNet adds to the first rows after the second block."""

    def call(apply_model, given):
        rows = given["input"].new_full((1, 50, 128), 0.3)
        given["c"]["control"] = {"input": [None, rows]}
        return apply_model(given["input"], given["timestep"], **given["c"])

    clone = model.clone()
    clone.set_model_unet_function_wrapper(call)
    return clone


def fp32() -> Patcher:
    """Weights that nobody casts on a processor, so that its rows can be shared."""
    tensors = {name: tensor.float() for name, tensor in WEIGHTS.items()}
    path = narrow.write(FOLDER / "fp32.safetensors", tensors)
    return load_model(path, "as stored")[0]


def in_fp32() -> Patcher:
    return optimize(fp32())


def test_what_others_add_is_on_every_card_that_shares_rows(pays):
    model = in_fp32()
    plain = sample(model)
    changed = {
        "ControlNet": controlled(model),
        "LoRA": apply_lora(model, LORA, 1.0, how="merge")[0],
    }
    for name, patcher in changed.items():
        expected = sample(patcher)
        assert not torch.equal(expected, plain), name
        for count in (2, 3):
            split = split_cards(patcher, count)[0]
            found = sample(split)
            assert f"GPUs: {count} share 2 forward passes" in report(split), report(split)
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-5, msg=name)


def test_nodes_may_stand_in_any_order(pays):
    model = in_fp32()
    shifted = lambda it: ModelSamplingAuraFlow().patch_aura(it, 3.0)[0]  # noqa: E731
    cached = lambda it: cache_steps(it, cache_settings("fast"))  # noqa: E731
    expected = sample(cached(shifted(model)))
    for nodes in (
        (split_two, optimize, shifted, cached),
        (cached, split_two, shifted, optimize),
        (shifted, cached, optimize, split_two),
    ):
        made = model
        for node in nodes:
            made = node(made)
        found = sample(made)
        assert "GPUs: 2 share 2 forward passes" in report(made), report(made)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def split_two(model: Patcher) -> Patcher:
    return split_cards(model, 2)[0]


def compiled(model: Patcher) -> None:
    """As far as it is seen: dynamo knows no "cpu:1"."""
    call = lambda executor, *args, **kwargs: executor(*args, **kwargs)  # noqa: E731
    model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "torch.compile", call)


def test_what_others_change_on_one_card_is_not_shared(pays):
    model = in_fp32()
    split = split_cards(model, 2)[0]

    def patched(change) -> Patcher:
        clone = split.clone()
        change(clone)
        return clone

    # What another extension does to the layers of one model is not on the other cards.
    layer = model.model.diffusion_model.get_submodule(LAYER)
    layer.forward = lambda x: 2 * type(layer).forward(layer, x)
    expected, found = sample(model), sample(split)
    assert "forward passes: cpu:1: its layers differ from those of the first GPU" in report(split)
    assert torch.equal(found, expected)
    del layer.forward
    for change, reason in (
        (compiled, "torch.compile runs the model"),
        (lambda it: it.set_model_attn1_patch(lambda q, k, v, *_, **__: {"q": 2 * q}), "attn1"),
    ):
        found = sample(patched(change))
        assert reason in report(split) and "share" not in report(split).partition("modul")[0]
        one = model.clone()
        change(one)
        assert torch.equal(found, sample(one))


@pytest.mark.parametrize("mode", ["merge", "bypass"])
def test_a_lora_behind_the_node_is_on_every_card(mode):
    model = optimize(load_model(PATH, "bf16")[0])
    split = split_cards(model, 2)[0]
    plain = sample(split, 4.0)
    changed, split = (apply_lora(it, LORA, 1.0, how=mode)[0] for it in (model, split))
    for cfg in (4.0, 1.0):
        with watched() as (_, hosts):
            found = sample(split, cfg)
        assert not torch.equal(found, plain)
        # "cpu:1" is not where a tensor says that it is, so that a bypass goes ComfyUI's way there.
        tolerance = {"merge": 0, "bypass": 1e-5}[mode]
        torch.testing.assert_close(found, sample(changed, cfg), rtol=0, atol=tolerance)
    (peer,) = hosts[0].peers
    assert peer._options is hosts[0]._options and peer._options["block_index"] == 1
    layer = peer.owner.diffusion_model.get_submodule(LAYER)
    if mode == "bypass":
        assert peer.layers.beside.lows.keys() == {layer}
        return
    own = hosts[0].owner.diffusion_model.get_submodule(LAYER)
    assert layer is not own and torch.equal(layer.weight, own.weight)
    assert not torch.equal(layer.weight, WEIGHTS[f"{LAYER}.weight"])


def test_copies_come_and_go_with_the_host():
    """One is unloaded, all are unloaded, and a run is interrupted: the next one paints the same."""
    split = split_cards(optimize(load_model(PATH, "bf16")[0]), 2)[0]
    expected = sample(split, 4.0)
    (copy,) = split.get_additional_models_with_key("multigpu")
    loaded = comfy.model_management.loaded_models()
    assert {it.load_device for it in loaded} == {card(0), card(1)}
    comfy.model_management.unload_model_and_clones(copy)
    assert torch.equal(sample(split, 4.0), expected)
    comfy.model_management.unload_all_models()
    assert torch.equal(sample(split, 4.0), expected)

    def interrupt(*_):
        comfy.model_management.interrupt_current_processing()

    for cfg in (1.0, 4.0):
        with pytest.raises(comfy.model_management.InterruptProcessingException):
            sample(split, cfg, callback=interrupt)
        assert IDLE not in split.model_options["transformer_options"]
    assert torch.equal(sample(split, 4.0), expected)


def test_a_card_without_room_leaves_the_run_to_the_first(caplog):
    model = optimize(load_model(PATH, "bf16")[0])
    split = split_cards(model, 3)[0]
    expected, run_pass = sample(model, 4.0), ComfyOptimization.run_pass
    ran = []

    def fill(self, host, call):
        ran.append(host.device.index or 0)
        if host.device == card(1):
            raise torch.OutOfMemoryError("CUDA out of memory.\nmore")
        return run_pass(self, host, call)

    with mock.patch.object(ComfyOptimization, "run_pass", fill):
        assert torch.equal(sample(split, 4.0), expected)
    assert sorted(ran) == [0] * 5 + [1]
    assert "GPUs: CUDA out of memory. The run continues on one GPU: close" in caplog.text
    full = mock.patch.object(ComfyOptimization, "run_pass", side_effect=torch.OutOfMemoryError)
    with full, pytest.raises(torch.OutOfMemoryError):
        sample(split)
    with watched() as (passes, _):
        assert torch.equal(sample(split, 4.0), expected)
    assert {device for device, _ in passes} == {0, 1}


def test_a_copy_that_nobody_needs_is_freed(pays):
    model = in_fp32()
    split = split_cards(model, 2)[0]
    sample(split)
    copy = weakref.ref(split.get_additional_models_with_key("multigpu")[0].model)
    assert copy() is not None and "GPUs: 2 share" in report(split)
    again = split_cards(model, 2)[0]
    assert again.get_additional_models_with_key("multigpu")[0].model is copy()
    del split
    gc.collect()
    assert None in comfy.model_management.loaded_models()
    split = split_cards(model, 2)[0]
    del again
    gc.collect()
    assert copy() is None
    assert torch.equal(sample(split), sample(split))


def said(model: Patcher, count: int) -> str:
    """What the node says; the run that follows paints on one card."""
    split, report = QwenL40SSplitCards.execute(model, count).args
    with watched() as (passes, _):
        sample(split)
    assert passes in ([(0, [])] * 2, [])
    return report


def test_what_cannot_be_split_runs_on_one_card(machine, monkeypatch):
    model = optimize(load_model(PATH, "bf16")[0])
    assert said(model, 1) == "GPUs: one, as requested"
    kinds = {card(0): "NVIDIA L40S"}
    with mock.patch.object(cards, "_kind", lambda device: kinds.get(device, "Tesla T4")):
        assert "GPUs: one, because cpu:1 (Tesla T4) differs from cpu (NVIDIA" in said(model, 2)
    with mock.patch.dict("sys.modules", {"comfy.multigpu": None}):
        assert said(model, 2).endswith("because this ComfyUI has no comfy.multigpu: update ComfyUI")
    other = model.clone()
    other.cached_patcher_init = None
    assert "because the node that loaded the MODEL cannot load it again: use" in said(other, 2)
    other.cached_patcher_init = (mock.Mock(side_effect=RuntimeError("no room\nat all")), ())
    assert said(other, 2).endswith("because the MODEL could not be loaded again: no room")
    machine(1)
    assert said(model, 2) == "GPUs: one, which is all that ComfyUI sees"
    monkeypatch.setattr(cards, "ask_driver", lambda: ("590", ("a card",) * 4))
    assert "because ComfyUI sees one of 4: start it without CUDA_VISIBLE_DEVICES" in said(model, 2)


def test_what_is_split_with_a_note(machine):
    model = load_model(PATH, "bf16")[0]
    notes = split_cards(model, 2)[1].splitlines()
    assert "not shared without Qwen-Image Optimize" in notes[1] and len(notes) == 2
    model = optimize(model)
    kinds = {card(3): "Tesla T4"}
    with mock.patch.object(cards, "_kind", lambda device: kinds.get(device, "NVIDIA L40S")):
        split, report = split_cards(model, 4)
    assert len(split.get_additional_models_with_key("multigpu")) == 2
    assert "GPUs: 3 of 4, because cpu:3 (Tesla T4) differs from cpu" in report

    def free(device=None, torch_free_too=False):
        count = 1000 if device == card(1) else 10**9
        return (count, count) if torch_free_too else count

    machine(2)
    with mock.patch.object(comfy.model_management, "get_free_memory", free):
        notes = split_cards(model, 3)[1].splitlines()
    assert notes[1].startswith("GPUs: cpu:1 has ") and "this GPU" in notes[1]
    assert notes[2] == "GPUs: 3 were requested, and ComfyUI sees 2"


def test_cards_of_one_kind():
    found = {0: ("NVIDIA L40S", 8, 9, 47_000), 1: ("NVIDIA L40S", 8, 9, 44_000)}
    found |= {2: ("NVIDIA L40", 8, 9, 47_000), 3: ("NVIDIA L40S", 8, 9, 23_000)}
    names = ("name", "major", "minor", "total_memory")

    def properties(device):
        return SimpleNamespace(**dict(zip(names, found[device.index], strict=True)))

    own = torch.device("cuda", 0)
    with mock.patch.object(torch.cuda, "get_device_properties", properties):
        alike = [cards._are_alike(own, torch.device("cuda", index)) for index in range(4)]
    assert alike == [True, True, False, False]


def test_another_model_passes_through():
    other = SimpleNamespace(model=SimpleNamespace(diffusion_model=None))
    split, report = split_cards(other, 2)
    assert split is other and "not Qwen-Image (" in report


def test_weights_that_nobody_uses_are_brought_once_a_run():
    """Under dynamic VRAM a layer's weights come when it is first used; an idle card uses none."""
    split = split_cards(optimize(load_model(PATH, "bf16")[0]), 2)[0]
    (copy,) = split.get_additional_models_with_key("multigpu")
    brought = []
    tensors = ComfyLayers.tensors

    def watch(self, layer, like):
        brought.append((layer, like.device, like.dtype))
        return tensors(self, layer, like)

    def waits(blocks):
        return blocks[0] is copy.model.diffusion_model.transformer_blocks[0]

    with mock.patch.object(layers, "waits", waits):
        with mock.patch.object(ComfyLayers, "tensors", watch), watched() as (passes, _):
            sample(split)
        assert len(passes) == 2
        own = [it for block in blocks_of(copy.model.diffusion_model) for it in token_layers(block)]
        assert [it for it in brought if it[0] in set(own)] == [
            (layer, card(0), torch.float32) for layer in own
        ]
        with mock.patch.object(ComfyLayers, "bring", side_effect=torch.OutOfMemoryError):
            sample(split)


@pytest.mark.cuda
def test_two_real_cards(pays):
    if torch.cuda.device_count() < 2:
        pytest.skip("one card")
    for form in ("bf16", "int8"):
        model = optimize(load_model(PATH, form)[0])
        changed = apply_lora(model, LORA, 1.0, how="auto")[0]
        for patcher in (model, changed):
            expected = {cfg: sample(patcher, cfg) for cfg in (1.0, 4.0)}
            split, said = split_cards(patcher, 2)
            assert said.startswith("GPUs: cuda:0, cuda:1;")
            for cfg in (4.0, 1.0, 1.0):
                found = sample(split, cfg)
                apart = (found - expected[cfg]).norm() / expected[cfg].norm()
                assert apart <= 4e-3, (form, cfg, float(apart), report(split))
            assert "GPUs: 2 share 2 forward passes" in report(split), report(split)
        (copy,) = split.get_additional_models_with_key("multigpu")
        comfy.model_management.unload_model_and_clones(copy)
        assert torch.equal(sample(split, 1.0), found)
        assert "GPUs: 2 share 2 forward passes" in report(split), report(split)
        comfy.model_management.unload_all_models()


# --------------------------------------------------- the rows of a forward pass, against one card


@pytest.fixture
def rows(machine, pays, monkeypatch):
    """Three cards, where a split always pays; what is measured on them is not."""
    machine(3)
    monkeypatch.setattr(run, "VERIFIED", {"cpu"})
    return lambda gbps: monkeypatch.setattr(links.Link, "gbps", gbps)


def sample_rows(model, cfg=1.0, references=0, batch=1, callback=None):
    latents = [narrow.random(1, 16, 1, 16, 16, seed=seed) for seed in range(references)]
    values = {"reference_latents": latents, "reference_latents_method": "index_timestep_zero"}
    how = {"steps": 3, "cfg": cfg, "noise": narrow.random(batch, 16, 1, 24, 32)}
    values = values if references else {}
    return narrow.sample(model, 20, 7, values=values, callback=callback, **how)


@pytest.mark.parametrize("precision", ["auto", "int8", "fp8"])
def test_images_are_those_of_one_card(rows, precision):
    loaded = fp32() if precision == "auto" else load_model(PATH, precision)[0]
    for count in (2, 3):
        for gbps, exchange in ((1e-3, "normalized rows"), (1e3, "keys and values")):
            rows(gbps)
            model = optimize(loaded)  # which keeps how it has split a shape
            split = split_cards(model, count)[0]
            for how in ({}, {"references": 2}, {"batch": 2}):
                expected, found = sample_rows(model, **how), sample_rows(split, **how)
                error = (found - expected).norm() / expected.norm()
                assert error < 0.004, (count, exchange, how, error)
                said = report(split)
                assert f"GPUs: {count} share 3 forward passes" in said, said
                assert exchange in said, said


def test_a_card_for_each_prompt_shares_none(rows):
    model = optimize(load_model(PATH, "bf16")[0])
    split = split_cards(model, 2)[0]
    assert torch.equal(sample_rows(split, 4.0), sample_rows(model, 4.0))
    assert "share" not in report(split)
    three = split_cards(model, 3)[0]
    expected = sample_rows(model, 4.0)
    assert (sample_rows(three, 4.0) - expected).norm() / expected.norm() < 0.004


def test_what_does_not_share_says_why(rows):
    model = load_model(PATH, "bf16")[0]
    split = split_cards(optimize(model, OptimizeSettings(attention="comfyui")), 2)[0]
    sample_rows(split)
    assert "GPUs: one in 3 forward passes: attention is not computed by this package" in report(
        split
    )
    split = split_cards(optimize(model), 2)[0]
    split.model_options["transformer_options"]["patches_replace"] = {
        "dit": {("double_block", 1): lambda args, extra: extra["original_block"](args)}
    }
    sample_rows(split)
    assert "another node reads or changes the values between two blocks" in report(split)


@pytest.fixture
def operations(monkeypatch):
    """Those of the cards, whose copies are lost once they have `start`ed."""
    made = between_cards(Vanishing)(10**9)
    monkeypatch.setattr(links, "CardOperations", lambda: made)
    forget()
    yield made
    forget()


def test_a_link_that_loses_copies_is_found_at_the_start_of_a_run(rows, operations, caplog):
    model = optimize(load_model(PATH, "int8")[0])
    split = split_cards(model, 2)[0]
    expected = {cfg: sample_rows(model, cfg) for cfg in (1.0, 4.0)}

    def same(cfg, passes):
        apart = (sample_rows(split, cfg) - expected[cfg]).norm() / expected[cfg].norm()
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
    rows, operations, monkeypatch, caplog
):
    verified, verify, confirm = [], links.Link.verify, Optimization.confirm
    monkeypatch.setattr(
        links.Link, "verify", lambda self: verified.append(self.cards) or verify(self)
    )
    split = split_cards(optimize(load_model(PATH, "int8")[0]), 3)[0]
    pairs = [(card(0), card(1)), (card(0), card(2)), (card(1), card(2))]
    for runs in (1, 2):
        sample_rows(split)
        assert verified == runs * pairs
    verified.clear()
    steps = []

    def not_finite(self):
        confirm(self)
        if len(steps) == 3:  # at the end of the run
            operations.start = operations.copies
            raise NotFiniteError

    monkeypatch.setattr(Optimization, "confirm", not_finite)
    sample_rows(split, callback=lambda index, *_: steps.append(index))
    assert steps == 2 * [0, 1, 2] and verified == 2 * pairs
    assert "lose data on this machine" in caplog.text


def test_an_interrupt_in_the_middle_leaves_nothing_behind(rows):
    model = optimize(load_model(PATH, "int8")[0])
    split = split_cards(model, 2)[0]

    def stop(step, *_):
        if step == 1:
            raise comfy.model_management.InterruptProcessingException

    with pytest.raises(comfy.model_management.InterruptProcessingException):
        sample_rows(split, callback=stop)
    expected = sample_rows(model)
    assert (sample_rows(split) - expected).norm() / expected.norm() < 0.004
