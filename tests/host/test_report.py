"""What a run is measured and reported as."""

import copy
import gc
import json
import math
import threading
import weakref
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import comfy.model_management
import comfy.model_patcher
import comfy.sample
import comfy.samplers
import comfy.sd
import narrow_transformer as narrow
import published_attention
import pytest
import torch
from comfy.patcher_extension import WrappersMP
from comfy_extras.nodes_easycache import EasyCacheNode, LazyCacheNode
from comfyui_boot import MODE, ROOT, folder
from narrow_transformer import random
from reported_runs import reported, running

from qwen_l40s.hosts.comfyui import record as measuring
from qwen_l40s.hosts.comfyui import report as reporting
from qwen_l40s.hosts.comfyui.decode.decode import decode, encode
from qwen_l40s.hosts.comfyui.estimate import cards as this_card
from qwen_l40s.hosts.comfyui.load.text_encoder import PlacedClip, load_text_encoder
from qwen_l40s.hosts.comfyui.load.transformer import load_model
from qwen_l40s.hosts.comfyui.load.vae import load_vae
from qwen_l40s.hosts.comfyui.record import MeasuredPhase, inner_phase, measured, phase
from qwen_l40s.hosts.comfyui.report import (
    EARLIER,
    FAILED,
    NO_RUN,
    NOT_MEASURED,
    UNWATCHED,
    Row,
    RunFacts,
    report_run,
)
from qwen_l40s.hosts.comfyui.sample import measure as sampling_record
from qwen_l40s.hosts.comfyui.sample.forward import ComfyPass
from qwen_l40s.hosts.comfyui.sample.optimize import OptimizeSettings, optimize, report_of, restore
from qwen_l40s.hosts.comfyui.sample.run import OPTIMIZATION_KEY as OPTIMIZATION
from qwen_l40s.hosts.comfyui.sample.run import STEP_CACHE_KEY as STEP_CACHE
from qwen_l40s.hosts.comfyui.sample.step_cache import cache_steps
from qwen_l40s.loaders.source import MICRO_ADVICE
from qwen_l40s.nodes.estimate import QwenL40SReport
from qwen_l40s.planning.phases import Range
from qwen_l40s.planning.request import DROPPED
from qwen_l40s.planning.step_cache import CacheSettings, computed_with
from qwen_l40s.spec.formats import GIB, CardFacts

pytestmark = pytest.mark.each_device
FOLDER = folder("report")
DEVICE = comfy.model_management.get_torch_device()
CARD = MODE != "cpu"
Interrupted = comfy.model_management.InterruptProcessingException
MICRO = ROOT / "models" / "micro"
PATH = narrow.write(FOLDER / "bf16.safetensors", narrow.weights())
HOST_ATTENTION = OptimizeSettings(attention="comfyui")
L40S = CardFacts("NVIDIA L40S", 46068 * 2**20, (8, 9))


def load(off_card: bool = False) -> comfy.model_patcher.ModelPatcher:
    gc.collect()  # ComfyUI fails where a model disappears while it makes room for another one
    with torch.inference_mode():
        return narrow.load_patcher(PATH, off_card=off_card)


def sample(model, cfg=1.0, steps=3, prompt=None, texts=(20, 7), report=True, size=8, **how):
    """ComfyUI batches prompts of one length alone."""
    with running(prompt, report):
        return narrow.sample(model, *texts, steps=steps, cfg=cfg, side=size, **how)


def phases(part) -> tuple[MeasuredPhase, ...]:
    return measured(getattr(part, "patcher", part)) or ()


def asked(model) -> dict:
    (run,) = (run for run in phases(model) if run.name == "sampling")
    return dict(run.asked)


def row(report, name: str) -> str:
    return next(line for line in report.text.splitlines() if line.startswith(name))


def guided(kind=comfy.samplers.CFGGuider, cfg=None, model=None, steps=3, conds=None, **extra):
    model = load() if model is None else model
    guider = kind(model, **extra)
    if cfg is not None:
        guider.set_cfg(*cfg) if isinstance(cfg, tuple) else guider.set_cfg(cfg)
    prompt = [[random(1, 20, narrow.SHAPE.joint_dim), {}]]
    guider.set_conds(*[prompt] * (conds or 2))
    noise = random(1, 16, 1, 8, 8)
    sampler = comfy.samplers.sampler_object("euler")
    sigmas = torch.linspace(1, 0, steps + 1)
    with torch.inference_mode(), running():
        guider.sample(noise, noise * 0, sampler, sigmas, disable_pbar=True, seed=0)
    return model


def breaking(target, name: str):
    return mock.patch.object(target, name, side_effect=RuntimeError("measuring broke"))


def as_on(facts: CardFacts | None):
    stack = ExitStack()
    for module in (reporting, this_card):
        stack.enter_context(mock.patch.object(module, "card_facts", lambda device: facts))
    return stack


def predicted(model, facts=L40S, **parts):
    with as_on(facts):
        return reported(model, parts.get("clip"), parts.get("vae"))


# --------------------------------------------------------------------------------- what is recorded


def test_what_was_asked_for():
    model = load()
    sample(model)
    found, (run,) = asked(model), phases(model)
    known = {"latent": [1, 16, 1, 8, 8], "cfg": 1.0, "text_tokens": 20, "references": []}
    known |= dict.fromkeys(("steps", "evaluations", "passes", "computed"), 3)
    assert {name: found[name] for name in known} == known and not found["controlnet"], found
    assert 0 < found["step_seconds"] < run.seconds
    assert run.waited_seconds > 0 and found["first_step_seconds"] > 0
    sample(model, steps=1, prompt="another")
    assert asked(model)["step_seconds"] is None
    references = [random(1, 16, 1, 4, 6), random(1, 16, 1, 8, 8)]
    for patcher, how, known in (
        (model, {"cfg": 2.5, "batch": 2}, {"passes": 6, "evaluations": 3, "computed": 12}),
        # A method of second order evaluates the model twice in all steps but the last.
        (model, {"sampler": "heun"}, {"steps": 3, "evaluations": 5, "passes": 5}),
        (model, {"values": {"reference_latents": references}}, {"references": [[4, 6], [8, 8]]}),
        (
            optimize(model, HOST_ATTENTION),
            {"cfg": 2.5, "texts": (20, 20)},
            {"passes": 3, "computed": 6},
        ),
    ):
        sample(patcher, **how)
        found = asked(model)
        assert {name: found[name] for name in known} == known, found
        assert found["latent"][0] == how.get("batch", 1)


def test_without_a_report_node_there_is_one_wrapper_and_nothing_is_measured(monkeypatch):
    for model in (load(), optimize(load(), HOST_ATTENTION), load(off_card=True)):
        kinds = (WrappersMP.OUTER_SAMPLE, WrappersMP.PREDICT_NOISE, WrappersMP.APPLY_MODEL)
        wrappers = [it for kind in kinds for it in model.get_all_wrappers(kind)]
        ours = [it for it in wrappers if it.__module__ == sampling_record.__name__]
        assert ours == [sampling_record.measure_sampling]
        known = sample(model, cfg=2.5)
        assert phases(model)
        with monkeypatch.context() as patch:
            for name in ("synchronize", "reset_peak_memory_stats"):
                if name == "reset_peak_memory_stats" or not CARD:
                    patch.setattr(torch.cuda, name, mock.Mock(side_effect=AssertionError))
            patch.setattr(sampling_record, "_Counts", mock.Mock(side_effect=AssertionError))
            assert torch.equal(sample(model, cfg=2.5, prompt="b", report=False), known)
        # The figures of an earlier run are not taken for this one's.
        assert not phases(model)
        assert reported(model).text == NOT_MEASURED
        sample(model, cfg=2.5, prompt="c")
        assert "\nSampled: 64x64, " in reported(model).text
        assert [it for kind in kinds for it in model.get_all_wrappers(kind)] == wrappers


def test_clones_share_the_records():
    model = load()
    clone = optimize(model.clone(), HOST_ATTENTION)
    sample(clone, steps=2)
    assert asked(model)["evaluations"] == 2
    path = phases(model)[0].path
    assert path == tuple(report_of(clone).splitlines()) and path[0].startswith("blocks: fused, ")
    sample(model, steps=4)
    assert asked(clone)["evaluations"] == 4
    assert phases(clone)[0].path[0].startswith("blocks: ComfyUI's code")


def of_another_loader() -> comfy.model_patcher.ModelPatcher:
    with mock.patch(
        "comfy.model_detection.detect_unet_config", lambda *_, **__: dict(narrow.CONFIG)
    ):
        return comfy.sd.load_diffusion_model_state_dict(dict(narrow.weights()))


def test_models_of_other_loaders_are_recorded_through_optimize():
    model = of_another_loader()
    sample(model)
    assert not phases(model) and reported(model).text == UNWATCHED
    clone = optimize(optimize(model, HOST_ATTENTION), HOST_ATTENTION)
    assert reported(clone).text == NO_RUN
    sample(clone)
    assert (asked(model)["passes"], asked(model)["evaluations"]) == (3, 3)
    assert "\nSampled: 64x64, " in reported(model).text
    plain = restore(clone)
    assert not any(plain.get_all_wrappers(kind) for kind in plain.wrappers)
    assert plain.get_attachment(OPTIMIZATION) is None


CACHE = CacheSettings(budget=0.6, longest=1)


def cached(model):
    return cache_steps(model, CACHE)


def optimized(model):
    return optimize(model, HOST_ATTENTION)


def test_steps_that_were_skipped_count_nowhere_whoever_wraps_the_others():
    for made, *nodes in (
        (load, cached),
        (load, optimized, cached),
        (load, cached, optimized),
        (of_another_loader, cached),
        (of_another_loader, cached, optimized, cached),
        (of_another_loader, optimized, cached),
        (of_another_loader, cached, optimized),
    ):
        model = made()
        for node in nodes:
            model = node(model)
        sample(model, cfg=2.5, steps=20)
        found, figures = asked(model), model.get_attachment(STEP_CACHE).figures()
        assert figures.computed == computed_with(20, CACHE) < 20
        assert (found["steps"], found["evaluations"]) == (20, figures.computed), nodes
        assert found["passes"] == 2 * figures.computed and found["step_seconds"] > 0
        lines = [line for line in phases(model)[-1].path if line.startswith("step cache: ")]
        assert lines == figures.lines() and "of 20 steps" in lines[0], lines
        assert f"20 steps, {figures.computed} evaluations, " in reported(model).text


def test_a_pass_knows_how_many_steps_call_the_model():
    """By them it captures a CUDA graph, as the estimate predicts."""
    found = []

    def look(executor, x, t, *args, **kwargs):
        found.append(ComfyPass(executor.class_obj, None, x, args[3]).steps)
        return executor(x, t, *args, **kwargs)

    model = optimized(load())
    for changed, steps in ((model, 20), (cached(model), computed_with(20, CACHE))):
        found.clear()
        changed.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "look", look)
        sample(changed, steps=20)
        assert found == [steps] * steps
        changed.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, "look")


def test_steps_that_comfyui_skipped_count_nowhere():
    for node in (EasyCacheNode, LazyCacheNode):
        model = node.execute(load(), 50.0, 0.15, 0.95, False).args[0]
        inner = model.model.diffusion_model
        with mock.patch.object(inner, "_forward", wraps=inner._forward) as forward:
            sample(model, cfg=2.5, steps=20)
        found = asked(model)
        assert 6 < forward.call_count == found["passes"] == 2 * found["evaluations"] < 30, node


@pytest.mark.parametrize("error", [RuntimeError, Interrupted])
def test_a_run_that_fails_is_not_recorded(error):
    model = load(off_card=True)
    sample(model, steps=2)
    kept, own = phases(model), type(model.model)._apply_model

    def fail(*args, **options):
        own(*args, **options)  # which makes the tables, a phase inside
        raise error("broken")

    broken = mock.patch.object(type(model.model), "_apply_model", fail)
    with broken, pytest.raises(error):
        sample(model, steps=3)
    assert phases(model) == kept and not measuring._open
    assert "\nSampled: 64x64, batch 1, 2 steps" in reported(model).text
    sample(model, steps=4)
    assert [run.asked["steps"] for run in phases(model) if run.name == "sampling"] == [4]


def test_tables_are_a_phase_of_their_own():
    model = load(off_card=True)
    sample(model)
    tables, sampling = phases(model)
    assert (tables.name, sampling.name) == ("tables", "sampling")
    assert tables.seconds > 0 and sampling.seconds > 0
    assert tables.asked == {"timesteps": 3}
    sample(model)  # the table is there
    assert [run.name for run in phases(model)] == ["sampling"]
    assert row(reported(model), "sampling")


def test_nothing_is_kept_alive():
    model = optimize(load(off_card=True), HOST_ATTENTION)
    sample(model, cfg=2.5)
    reported(model)
    kept, owner = phases(model), model.clone_base_uuid
    inner = weakref.ref(model.model)
    weight = weakref.ref(next(model.model.parameters()))
    comfy.model_management.unload_all_models()
    del model
    gc.collect()
    comfy.model_management.cleanup_models_gc()
    gc.collect()
    assert inner() is None and weight() is None
    assert measured(SimpleNamespace(clone_base_uuid=owner)) == kept and len(kept) == 2
    for run in kept:
        json.dumps(run.asked)  # numbers and words


def test_only_the_last_prompt_s_phases_and_the_last_models_are_kept():
    cpu, part = torch.device("cpu"), SimpleNamespace(clone_base_uuid="part")
    for number in range(3):
        with running(f"p{number}"):
            for name in ("text", "decode"):
                with phase(name, part, cpu):
                    pass
    assert [run.prompt for run in measured(part)] == ["p2", "p2"]
    with running():
        for _ in range(300):
            with phase("decode", part, cpu):
                pass
        assert len(measured(part)) == 256
        for number in range(100):
            with phase("decode", SimpleNamespace(clone_base_uuid=number), cpu):
                pass
    assert measured(part) is None and measured(SimpleNamespace(clone_base_uuid=99))


def test_copies_of_a_vae_and_clones_of_a_clip_share_the_phases():
    vae, clip = load_vae(MICRO)[0], load_text_encoder(MICRO)[0]
    with running(), torch.inference_mode():
        decode(copy.copy(vae), random(1, 16, 1, 8, 8))
        clip.clone().encode_from_tokens_scheduled(clip.tokenize("a star"))
    assert [run.name for run in phases(vae)] == ["decode"]
    assert [run.name for run in phases(clip)] == ["text"]
    # What is of another kind has none.
    assert measured(None) is measured(SimpleNamespace()) is None


# --------------------------------------------------------------------- what measures breaks nothing


def test_arguments_that_are_passed_on_by_name():
    """Another pack's wrapper runs before the patcher's."""

    def all_of_them(executor, x, t, c_concat, c_crossattn, control, options, **rest):
        named = {"c_concat": c_concat, "c_crossattn": c_crossattn, "control": control}
        return executor(x, t, **named, transformer_options=options, **rest)

    def some(executor, x, t, c_concat, c_crossattn, control, options, **rest):
        return executor(x, t, c_concat, c_crossattn, transformer_options=options, **rest)

    for wrapper in (all_of_them, some):
        for model in (load(), load(off_card=True), optimize(load(), HOST_ATTENTION)):
            known = sample(model, cfg=2.5)
            clone = model.clone()
            options = clone.model_options["transformer_options"]
            kind = options.setdefault("wrappers", {}).setdefault("apply_model", {})
            kind["another"] = [wrapper]
            assert torch.equal(sample(clone, cfg=2.5), known)
            assert asked(model)["text_tokens"] == 20 and not asked(model)["controlnet"]


def test_measuring_that_fails_changes_no_run():
    plain = sample(load(off_card=True), cfg=2.5)
    for target, name in (
        (sampling_record, "is_skipped"),
        (sampling_record, "path_of"),
        (sampling_record, "cfg_of"),
        (sampling_record, "add_wrapper_with_key"),
        (sampling_record._Counts, "asked"),
        (MeasuredPhase, "_fold"),
        (measuring, "_wait"),
        (measuring, "_keep"),
        (measuring, "reported_prompt"),
    ):
        model = load(off_card=True)
        measuring._logged.clear()
        with breaking(target, name), mock.patch.object(measuring.logger, "warning") as told:
            known = sample(model, cfg=2.5)
        assert torch.equal(known, plain), name
        assert not phases(model) and told.call_count == 1, (name, told.mock_calls)
        assert not measuring._open
        assert reported(model).text in (NO_RUN, NOT_MEASURED)
        sample(model, cfg=2.5)
        assert asked(model)["passes"] == 6, name


def test_measuring_that_fails_changes_no_encoding_and_no_decoding():
    clip, vae, latents = load_text_encoder(MICRO)[0], load_vae(MICRO)[0], random(1, 16, 1, 8, 8)
    images = decode(vae, latents)[0]
    for target, name in ((MeasuredPhase, "_fold"), (measuring, "_wait"), (measuring, "_keep")):
        with breaking(target, name), torch.inference_mode(), running():
            assert torch.equal(decode(vae, latents)[0], images)
            assert clip.encode_from_tokens_scheduled(clip.tokenize("a star"))
        assert not phases(vae) and not phases(clip), name


def test_a_report_that_fails_says_so():
    model = load()
    sample(model)
    with mock.patch("qwen_l40s.hosts.comfyui.report.last_run", side_effect=RuntimeError("no")):
        images, text, data, chart = QwenL40SReport.execute("images", model).args
    assert chart.shape[2] == 1280
    assert (images, text, json.loads(data)) == ("images", FAILED, {"note": FAILED})


def test_the_cfg_of_a_guider():
    class Scheduled(comfy.samplers.CFGGuider):
        def predict_noise(self, x, timestep, model_options=None, seed=None):
            with mock.patch.object(self, "cfg", 4.0):
                return super().predict_noise(x, timestep, model_options or {}, seed)

    for cfg in ([4.0, 3.0], torch.tensor([4.0, 3.0]), "auto", 4.0):
        report = reported(guided(Scheduled, cfg))
        assert "CFG" not in row(report, "Sampled") and json.dumps(report.data), cfg
    for cfg in (math.nan, math.inf, True):
        guider = SimpleNamespace(cfg=cfg)
        kind = type("Guider_PerpNeg", (), {"cfg": cfg})
        assert sampling_record.cfg_of(guider) is sampling_record.cfg_of(kind()) is None
    from comfy_extras.nodes_custom_sampler import Guider_Basic, Guider_DualCFG
    from comfy_extras.nodes_perpneg import Guider_PerpNeg

    for kind, cfg, conds, words in (
        (comfy.samplers.CFGGuider, 2.5, 2, ", CFG 2.5, "),
        (comfy.samplers.CFGGuider, 2, 2, ", CFG 2, "),
        (Guider_PerpNeg, (3.0, 1.0), 3, ", CFG 3, "),
        (Guider_Basic, None, 1, ", CFG 1, "),
    ):
        assert words in reported(guided(kind, cfg, conds=conds)).text
    assert ", CFG" not in reported(guided(Guider_DualCFG, (4.0, 3.0), conds=3)).text


# -------------------------------------------------------------------------------- what measures


def test_an_inner_phase_and_the_wait_for_weights_are_left_out():
    clock, cpu = SimpleNamespace(now=100.0), torch.device("cpu")
    part = SimpleNamespace(clone_base_uuid="clock", load_device=cpu)
    told = SimpleNamespace(perf_counter=lambda: clock.now)
    with mock.patch.object(measuring, "time", told), running():
        with phase("sampling", part, cpu) as outer:
            clock.now += 5
            outer.begin()
            clock.now += 1
            with inner_phase("tables", part, timesteps=3) as inner:
                clock.now += 20
            outer.begin()  # once more in less room: its work has long begun
            clock.now += 2
        clock.now += 100
    assert measured(part) == (inner, outer) and inner.asked == {"timesteps": 3}
    assert (inner.seconds, outer.seconds, outer.waited_seconds) == (20, 3, 5)
    assert (outer.counted, outer.card_bytes, outer.allocated_bytes) == (False, 0, 0)


def test_phases_of_two_threads_are_no_parts_of_each_other():
    clock, cpu = SimpleNamespace(now=0.0), torch.device("cpu")
    parts = [SimpleNamespace(clone_base_uuid=it, load_device=cpu) for it in ("one", "two")]
    told, done = SimpleNamespace(perf_counter=lambda: clock.now), []

    def other(part):
        with MeasuredPhase("decode", part.clone_base_uuid, cpu, prompt="p") as run:
            clock.now += 3
            with inner_phase("tables", part) as inner:
                clock.now += 5
        done.append((run, inner))

    with mock.patch.object(measuring, "time", told):
        for part in parts:  # another model's, and the same at once
            with MeasuredPhase("sampling", "one", cpu, prompt="p") as run:
                clock.now += 1
                thread = threading.Thread(target=other, args=(part,))
                thread.start()
                thread.join()
                with inner_phase("tables", parts[0]) as inner:
                    clock.now += 2
            found, (decode, tables) = measured(parts[0]), done.pop()
            assert (run.seconds, inner.seconds) == (9, 2)
            assert (decode.seconds, tables.seconds) == (3, 5)
            assert found[-2:] == (inner, run) and {decode, tables} <= {*measured(part)}


def test_a_device_that_torch_cannot_wait_for_is_not_measured():
    """As DirectML: times would be those of the processor."""
    part = SimpleNamespace(clone_base_uuid="mps")
    with running(), phase("sampling", part, torch.device("mps")):
        pass
    assert not measured(part)
    device, waits = torch.device("mps"), mock.Mock()
    patched = mock.patch.object(torch.accelerator, "synchronize", waits)
    with patched, running(), phase("sampling", part, device):
        pass
    waits.assert_called_once_with(device)
    assert measured(part)[0].seconds > 0


class Card:
    """A card of numbers, which holds what it is told, in bytes."""

    def __init__(self, held=10, used=100):
        self.held = self.most = held
        self.used, self.waits = used, 0

    def hold(self, held, used=100):
        self.held, self.most, self.used = held, max(self.most, held), used

    def installed(self, **others):
        functions = {
            "memory_allocated": lambda device: self.held,
            "max_memory_allocated": lambda device: self.most,
            "reset_peak_memory_stats": lambda device: setattr(self, "most", self.held),
            "mem_get_info": lambda device: (10000 - self.used, 10000),
            "synchronize": lambda device=None: setattr(self, "waits", self.waits + 1),
            "empty_cache": lambda: setattr(self, "used", 100),
        }
        return mock.patch.multiple(torch.cuda, **(functions | others))


def test_what_is_read_of_a_card():
    card, cuda = Card(), torch.device("cuda")
    part = SimpleNamespace(clone_base_uuid="card", load_device=cuda)
    card.hold(900), card.hold(10)
    with card.installed(), running(), phase("sampling", part, cuda) as outer:
        card.hold(70), card.hold(50, used=200)
        outer.begin()
        card.hold(60, used=400), card.hold(50)
        with inner_phase("tables", part) as inner:
            card.hold(90), card.hold(55, used=700)
        card.hold(62, used=300)
        outer.look()
    # What was there before the phase, and what came while nobody read it, is not in its figures.
    found = inner.allocated_bytes, inner.working_bytes, inner.card_bytes
    assert found == (90, 40, 700), found
    assert (outer.allocated_bytes, outer.working_bytes) == (70, 12)
    assert (outer.card_bytes, outer.counted, card.waits) == (300, True, 2)
    assert outer.loaded_bytes == 200


def test_the_card_is_read_before_the_text_encoder_leaves_it():
    card, clip = Card(), load_text_encoder(MICRO)[0].clone()
    clip.placement = DROPPED
    own, left = comfy.sd.CLIP.load_model, []

    def load_model(self, *args, **kwargs):
        patcher = own(self, *args, **kwargs)
        card.hold(5000, used=5200)  # behind ComfyUI's own, which empties a real card's cache
        return patcher

    def leave(self):
        left.append(phases(self))
        card.hold(10)

    with (
        card.installed(),
        mock.patch.object(comfy.sd.CLIP, "load_model", load_model),
        mock.patch.object(PlacedClip, "_leave_card", leave),
        mock.patch.object(
            MeasuredPhase, "counted", property(lambda _: True, mock.Mock()), create=True
        ),
        torch.inference_mode(),
        running(),
    ):
        clip.encode_from_tokens_scheduled(clip.tokenize("a star"))
    (run,) = phases(clip)
    assert left[0] == (run,)  # leaving is not timed either
    assert (run.card_bytes, run.loaded_bytes) == (5200, 5200)
    assert run.allocated_bytes == 5000 and run.waited_seconds > 0


@pytest.mark.cuda
def test_what_a_card_counts():
    part = SimpleNamespace(clone_base_uuid="part", load_device=DEVICE)
    with running(), phase("sampling", part, DEVICE) as run:
        held = torch.zeros(64, 2**20, device=DEVICE)
        run.begin()
        passing = torch.zeros(32, 2**20, device=DEVICE)
        del passing
        with inner_phase("tables", part):
            torch.zeros(512, 2**20, device=DEVICE)
    assert run.counted and run.working_bytes == 128 * 2**20
    assert run.allocated_bytes >= 384 * 2**20
    assert run.card_bytes >= run.allocated_bytes
    del held


@pytest.mark.cuda
def test_a_card_s_run_is_counted():
    model = optimize(load(), HOST_ATTENTION)
    sample(model, cfg=2.5, steps=6, size=64)
    (run,) = phases(model)
    assert run.counted and run.card_bytes > run.allocated_bytes > 0
    assert 0 < run.working_bytes < run.allocated_bytes
    assert (run.paged_bytes > 0) == (MODE == "dynamic")
    assert 0 < run.asked["step_seconds"] < 6
    report = reported(model)
    assert report.data["phases"]["sampling"]["measured"]["card_gib"] > 0
    assert "VRAM is not measured" not in report.text


# --------------------------------------------------------------------------------------- the report


def test_all_phases_of_a_run():
    gc.collect()
    model, clip, vae = load_model(MICRO)[0], load_text_encoder(MICRO)[0], load_vae(MICRO)[0]
    words = ("a small red star", "a small red star of another kind")
    with torch.inference_mode(), running("run"):
        conds = [clip.encode_from_tokens_scheduled(clip.tokenize(word)) for word in words]
        clip.encode_from_tokens_scheduled(clip.tokenize(words[0]))
        noise = random(1, 16, 1, 8, 8)
        latents = comfy.sample.sample(
            model, noise, 3, 4.0, "euler", "simple", *conds, noise * 0, disable_pbar=True, seed=0
        )
        images = decode(vae, latents, tiles=2)[0]
        encode(vae, images)
        output = QwenL40SReport.execute(images, model, clip, vae)
    passed, text, data, chart = output.args
    assert passed is images and output.ui["text"] == [text]
    assert chart.shape[2] == 1280 and output.ui["images"] and output.ui["qwen_l40s"]
    assert "\nSampled: 64x64, batch 1, 3 steps, 6 forward passes, CFG 4, " in text, text
    assert MICRO_ADVICE in text
    found = json.loads(data)["phases"]
    assert list(found) == ["load", "text", "encode", "sampling", "decode"]
    waits = [run.waited_seconds for part in (model, clip, vae) for run in phases(part)]
    assert len(waits) == 6 and all(waited > 0 for waited in waits)
    assert math.isclose(found["load"]["measured"]["seconds"], sum(waits), rel_tol=0.01)
    assert found["text"]["times"] == 3
    assert found["decode"]["path"][0].startswith("decode 1 image of 64x64: 2 exact tiles")
    assert all(phase["measured"]["seconds"] > 0 for phase in found.values())
    assert json.loads(data)["this_run"] and json.loads(data)["step_ms"]["measured"] > 0
    for line in ("text encode: on ", "blocks: ", "decode 1 image", "encode 1 image", "  a step "):
        assert f"\n{line}" in text, text
    assert CARD or len(json.loads(data)["notes"]) >= 2, "nothing is said of a run on a CPU"


def test_what_nothing_was_recorded_of():
    model = load()
    report = reported(model)
    assert report.text == NO_RUN and report.data == {"note": NO_RUN}
    vae = load_vae(MICRO)[0]
    clip = load_text_encoder(MICRO)[0]
    sample(model, prompt="a")
    with running("a"):
        text = report_run(model, clip, vae).text
    assert "Note: No text encoding was measured" in text, text
    assert "Note: No VAE decode was measured" in text, text


def test_another_model_is_named():
    other = SimpleNamespace(model=SimpleNamespace(diffusion_model=None))
    images, text, data, _ = QwenL40SReport.execute("images", other).args
    assert text.startswith("The model is SimpleNamespace, not Qwen-Image ("), text
    assert text.endswith(": its runs are not reported."), text
    assert images == "images" and json.loads(data) == {"note": text}


def test_a_run_that_only_decodes_again():
    model, clip, vae = load(), load_text_encoder(MICRO)[0], load_vae(MICRO)[0]
    latents = random(1, 16, 1, 8, 8)
    with torch.inference_mode(), running("a"):
        clip.encode_from_tokens_scheduled(clip.tokenize("a star"))
        sample(model, prompt="a")
        decode(vae, latents)
    with running("b"):
        decode(vae, latents, tiles=2)
        report = report_run(model, clip, vae)
    found = report.data["phases"]
    assert not report.data["this_run"] and EARLIER in report.data["notes"]
    assert "Note: ComfyUI reused an earlier result" in report.text
    runs = {name: phase["run"] for name, phase in found.items()}
    earlier = dict.fromkeys(("load", "text", "sampling"), "an earlier run")
    assert runs == {**earlier, "decode": "this run"}, runs
    assert found["decode"]["path"][0].startswith("decode 1 image of 64x64: 2 exact tiles")
    assert found["decode"]["times"] == 1
    assert row(report, "VAE decode").startswith("VAE decode (this run) "), report.text
    assert row(report, "sampling").startswith("sampling (an earlier run) ")
    assert "No VAE decode" not in report.text and "No text encoding" not in report.text
    with running("a"):
        assert all(phase["run"] is None for phase in report_run(model).data["phases"].values())


def test_several_samplings_of_a_prompt():
    model = load()
    for steps in (2, 3):
        sample(model, steps=steps, prompt="a")
    with running("b"):
        report = report_run(model)
    assert "2 samplings ran" in report.text and "3 steps" in row(report, "Sampled")
    assert row(report, "sampling").startswith("sampling (2 times, an earlier run) ")
    assert report.data["phases"]["sampling"]["times"] == 2


# ------------------------------------------------------------------------------------ what predicts


def test_predicted_beside_measured():
    model = optimize(load(), HOST_ATTENTION)
    clip, vae = load_text_encoder(MICRO)[0], load_vae(MICRO)[0]
    sample(model, cfg=2.5)
    report = predicted(model, clip=clip, vae=vae)
    data = report.data
    assert data["predicted_card_gib"] > 0 and data["basis"], report.text
    low, high = data["step_ms"]["predicted"]
    assert 0 < low <= high and data["predicted_seconds"][0] > low / 1000
    lines = report.text.splitlines()
    assert " predicted (" in lines[0] and lines[4].startswith("Cost: $"), lines
    line = row(report, "Predicted: ")
    assert " in total, " in line and " a step, " in line and "peak VRAM " in line
    model.set_additional_models("multigpu", [model.clone()])
    text = predicted(model, clip=clip, vae=vae).text
    assert "The MODEL ran on 2 GPUs; the prediction is for one GPU." in text, text


@pytest.mark.parametrize(
    ("seconds", "word"), [(2.0, "as predicted"), (4.0, "slower"), (1.0, "faster")]
)
def test_a_report_says_first_how_a_run_compares(seconds, word):
    asked = {"latent": [1, 16, 1, 8, 8], "step_seconds": 0.5, "steps": 4, "evaluations": 4}
    asked |= {"passes": 4, "cfg": None, "text_tokens": 9, "references": []}
    last = MeasuredPhase("sampling", None, torch.device("cuda:0"), **asked)
    last.seconds = seconds
    ran = SimpleNamespace(last=last, this_run=True, of=lambda name: (last,))
    rows = (Row("sampling", (last,)),)
    run = RunFacts(ran, rows, reporting.Prediction(), Range(1.5, 2.5))
    assert word in run.summary()[0]


def test_as_many_are_predicted_as_ran():
    model, clip, vae = load(off_card=True), load_text_encoder(MICRO)[0], load_vae(MICRO)[0]
    model = optimize(model, HOST_ATTENTION)

    def middle(prompt, steps=(3,), decodes=1):
        for count in steps:
            sample(model, steps=count, prompt=prompt)
        with running(prompt):
            for _ in range(decodes):
                decode(vae, random(1, 16, 1, 8, 8))
            return sum(predicted(model, clip=clip, vae=vae).data["predicted_seconds"])

    # Each makes its table, as its timesteps are others; the last one's is there already.
    once, twice = middle("one", (4,)), middle("two", (5, 4), 2)
    assert 1.5 * once < twice < 3 * once
    assert middle("three", (4,), 6) > middle("four", (4,))


def test_without_clip_and_vae_the_card_is_not_predicted():
    model = optimize(load(), HOST_ATTENTION)
    clip, vae = load_text_encoder(MICRO)[0], load_vae(MICRO)[0]
    sample(model)
    for parts in ({}, {"clip": clip}, {"vae": vae}):
        report = predicted(model, **parts)
        assert report.data["predicted_card_gib"] is report.data["predicted_seconds"] is None
        assert report.data["step_ms"]["predicted"]
        assert "Connect clip and vae" in report.text
    report = predicted(model, clip=clip, vae=vae)
    assert report.data["predicted_card_gib"] and report.data["predicted_seconds"]


def test_a_guider_that_asks_for_the_negative_prompt_on_its_own():
    from comfy_extras.nodes_custom_sampler import Guider_DualModel

    model = optimize(load(), HOST_ATTENTION)
    extra = {"uncond_model_patcher": model.clone()}
    guided(Guider_DualModel, 4.0, model, **extra)
    found = asked(model)
    assert (found["passes"], found["evaluations"]) == (6, 3), found
    prediction = _prediction(model)
    assert prediction.estimate.request.cfg == "two passes"
    assert not any("forward passes" in note for note in prediction.notes)
    assert ", CFG 4, " in reported(model).text


def test_the_card_of_a_run_is_the_one_that_sampled():
    model = optimize(load(), HOST_ATTENTION)
    sample(model)
    cards = {"cuda:0": L40S, "cuda:1": CardFacts("NVIDIA A100-SXM4-80GB", 80 * GIB, (8, 0))}
    facts = mock.Mock(side_effect=lambda device: cards[str(device)])
    with (
        mock.patch.object(model, "load_device", torch.device("cuda:1")),
        mock.patch.object(reporting, "card_facts", facts),
        mock.patch.object(this_card, "card_facts", facts),
    ):
        run = phases(model)[0]
        prediction = reporting.predict(run, model, None, None)
    basis = prediction.estimate.basis.text
    assert "A100" in basis and "L40S" not in basis, basis


def test_the_request_of_a_run():
    model = load(off_card=True)
    sample(model, cfg=2.5, batch=2, size=9)
    prediction = _prediction(model)
    request = prediction.estimate.request
    assert (request.width, request.height, request.batch, request.steps) == (80, 80, 2, 3), request
    assert (request.cfg, request.text_tokens, request.references) == ("two passes", 20, 0), request
    assert (request.precision, request.modulation, request.family) == (
        "bf16",
        "off card",
        "qwen-image",
    )
    assert request.parts.transformer == narrow.SHAPE
    assert any("fused kernels, which did not run" in note for note in prediction.notes)
    sample(model)
    assert _prediction(model).estimate.request.cfg == "off"
    sample(optimize(model, HOST_ATTENTION), cfg=2.5, texts=(20, 20))
    prediction = _prediction(model)
    request = prediction.estimate.request
    assert request.cfg == "one pass" and request.items == 2
    assert not any("fused" in note for note in prediction.notes)


def test_attention_is_predicted_as_it_ran(monkeypatch):
    published_attention.on_every_device(monkeypatch)
    base = load()
    for name, counted in (
        ("comfyui", "exact"),
        ("math", "exact"),
        ("kitchen_int8", "kitchen_int8"),
    ):
        prediction = _run_attention(base, name)
        assert prediction.estimate.request.attention == counted, (name, phases(base)[0].path)
    # On the CPU errors are measured too, and exact attention then stays.
    prediction = _run_attention(base, "fast")
    assert prediction.estimate.request.attention == "exact", phases(base)[0].path
    assert reporting._attention({"sdpa_flash", "kitchen_int8", "fast"}, L40S) == "fast"
    hopper = replace(L40S, capability=(9, 0))
    assert reporting._attention({"kitchen_int8", "fast"}, hopper) == "kitchen_int8"


def _run_attention(model, name):
    sample(optimize(model, OptimizeSettings(attention=name)))
    return _prediction(model)


def test_a_run_with_skipped_steps_is_predicted_by_those_that_were_computed():
    model = cached(load(off_card=True))
    sample(model, cfg=2.5, steps=20)
    computed = computed_with(20, CACHE)
    prediction = _prediction(model)
    request = prediction.estimate.request
    assert (request.steps, request.computed_steps, request.cache) == (20, computed, "custom")
    assert not any("forward passes" in note for note in prediction.notes), prediction.notes
    sampling, step = prediction.estimate.phases["sampling"].seconds, prediction.step
    assert sampling == pytest.approx(step.times(computed))


def test_the_request_of_an_edit():
    model = load()
    base = dict(_asked(model))
    for references, tokens, family, own in (
        ([[128, 128]], 1400, "qwen-image-edit", 31),
        ([[128, 128]], 220, "qwen-image-edit-2509", 24),
        ([[128, 128], [128, 128]], 400, "qwen-image-edit-2509", 8),
        ([[128, 128]], 100, "qwen-image-edit-2509", 1),
    ):
        found = base | {"references": references, "text_tokens": tokens}
        request = _prediction(model, found).estimate.request
        assert (request.family, request.text_tokens) == (family, own), request
        assert request.references == len(references)
    many = _prediction(model, base | {"references": [[128, 128]] * 5})
    assert many.estimate is None and "takes 3 reference images, got 5" in many.notes[0]
    other = _prediction(model, base | {"controlnet": True, "passes": 9, "computed": 9})
    assert sum("ControlNet" in note or "3 forward passes" in note for note in other.notes) == 2
    # Memory that is short splits a batch: more forward passes of no more prompts.
    split = base | {"latent": [2, 16, 1, 8, 8], "passes": 6, "computed": 6}
    assert _prediction(model, split).estimate.request.cfg == "off"


def _asked(model) -> dict:
    sample(model)
    return asked(model)


def _prediction(model, found=None):
    run = next(run for run in phases(model) if run.name == "sampling")
    with as_on(L40S):
        ran = copy.copy(run)
        ran.asked = found or run.asked
        return reporting.predict(ran, model, None, None)
