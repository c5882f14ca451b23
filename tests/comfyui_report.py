"""Runs in ComfyUI's own Python: what a run is recorded and reported as.

    python comfyui_report.py COMFYUI FOLDER cpu|card|dynamic

Every function named `check_...` is one check; prints {check: None or its traceback} as JSON.
"""

import gc
import json
import math
import threading
import weakref
from types import SimpleNamespace
from unittest import mock

import comfyui_boot

FOLDER, MODE = comfyui_boot.ARGUMENTS[0], str(comfyui_boot.ARGUMENTS[1])
comfyui_boot.start_on(MODE)

import comfy.model_management  # noqa: E402
import comfy.model_patcher  # noqa: E402
import comfy.sample  # noqa: E402
import comfy.sd  # noqa: E402
import narrow_transformer as narrow  # noqa: E402
import torch  # noqa: E402
from comfy.patcher_extension import WrappersMP  # noqa: E402
from comfy_execution.utils import CurrentNodeContext  # noqa: E402

from qwen_l40s.hosts.comfyui import run_wish, sampling_record, this_card  # noqa: E402
from qwen_l40s.hosts.comfyui.meter import Marks, Meter, typical  # noqa: E402
from qwen_l40s.hosts.comfyui.model import load_model, load_patcher  # noqa: E402
from qwen_l40s.hosts.comfyui.optimization import KEY as OPTIMIZATION  # noqa: E402
from qwen_l40s.hosts.comfyui.patch import Settings, optimize, report_of, restore  # noqa: E402
from qwen_l40s.hosts.comfyui.placed_clip import RESULTS  # noqa: E402
from qwen_l40s.hosts.comfyui.planned_vae import decode, encode  # noqa: E402
from qwen_l40s.hosts.comfyui.run_record import Record, Records, recording  # noqa: E402
from qwen_l40s.hosts.comfyui.run_report import EARLIER, NO_RUN, UNWATCHED, report_run  # noqa: E402
from qwen_l40s.hosts.comfyui.text_encoder import load_text_encoder  # noqa: E402
from qwen_l40s.hosts.comfyui.vae import load_vae  # noqa: E402
from qwen_l40s.nodes.report import QwenL40SReport  # noqa: E402
from qwen_l40s.planning.memory import GIB, CardFacts  # noqa: E402

torch.set_num_threads(1)
DEVICE = comfy.model_management.get_torch_device()
CARD = MODE != "cpu"
MICRO = comfyui_boot.ROOT / "models" / "micro"
PATH = narrow.write(FOLDER / "bf16.safetensors", narrow.weights())
HOST_ATTENTION = Settings(attention="comfyui")
L40S = CardFacts("NVIDIA L40S", 46068 * 2**20, (8, 9))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def load(off_card: bool = False) -> comfy.model_patcher.ModelPatcher:
    gc.collect()  # ComfyUI fails where a model disappears while it makes room for another one
    with torch.inference_mode():
        return load_patcher(PATH, "bf16", (), False, off_card)


def sample(model, cfg=1.0, steps=3, sampler="euler", batch=1, size=8, prompt="", **condition):
    """Steps from fixed noise; prompts of different lengths never batch."""
    noise = random(batch, 16, 1, size, size)
    texts = [random(1, length, narrow.SHAPE.joint_dim, seed=length) for length in (20, 7)]
    conds = [[[text, dict(condition)]] for text in texts]
    with torch.inference_mode(), running(prompt):
        return comfy.sample.sample(
            model,
            noise,
            steps,
            cfg,
            sampler,
            "simple",
            *conds,
            torch.zeros_like(noise),
            disable_pbar=True,
            seed=0,
        ).float()


def running(prompt: str):
    """As ComfyUI executes a node of a prompt."""
    return CurrentNodeContext(prompt, "node")


def records(holder) -> tuple[Record, ...]:
    return Records.of(getattr(holder, "model", holder)).last


def asked(model) -> dict:
    (record,) = (record for record in records(model) if record.phase == "sampling")
    return dict(record.asked)


def row(report, name: str) -> list[str]:
    """The cells of a line of the table."""
    line = next(line for line in report.text.splitlines() if line.startswith(name))
    return line.removeprefix(name).split("  ")


def as_on(facts: CardFacts | None):
    """Predicts as for a run on a card."""
    stack = mock.patch.multiple(run_wish, card_facts=lambda device: facts)
    other = mock.patch.multiple(this_card, card_facts=lambda device: facts)
    return stack, other


def predicted(model, facts=L40S, **parts):
    with as_on(facts)[0], as_on(facts)[1]:
        return report_run(model, **parts)


# --------------------------------------------------------------------------------- what is recorded


def check_what_was_asked_for():
    model = load()
    sample(model)
    found = asked(model)
    known = {
        "latent": [1, 16, 1, 8, 8],
        "cfg": 1.0,
        "steps": 3,
        "evaluations": 3,
        "passes": 3,
        "items": 1,
        "prompts": 1,
        "guided": False,
        "text_tokens": 20,
        "references": [],
        "controlnet": False,
    }
    assert {name: found[name] for name in known} == known, found
    sample(model, cfg=2.5, batch=2)
    found = asked(model)
    assert (found["passes"], found["evaluations"], found["guided"]) == (6, 3, True), found
    assert (found["items"], found["latent"][0]) == (2, 2)
    # A method of second order evaluates the model twice in all steps but the last.
    sample(model, sampler="heun")
    found = asked(model)
    assert (found["steps"], found["evaluations"], found["passes"]) == (3, 5, 5), found
    references = [random(1, 16, 1, 4, 6), random(1, 16, 1, 8, 8)]
    sample(model, reference_latents=references)
    assert asked(model)["references"] == [[4, 6], [8, 8]]
    sample(optimize(model, Settings(attention="comfyui", cfg_batching="on")), cfg=2.5)
    found = asked(model)
    assert (found["passes"], found["prompts"], found["items"]) == (3, 2, 2), found


def check_times_add_up():
    model = load()
    sample(model, steps=5)
    found = asked(model)
    (record,) = records(model)
    assert found["evaluations"] == 5
    assert 0 < found["step_seconds"] < record.measured.seconds
    assert found["waited_seconds"] > 0 and found["first_step_seconds"] > 0
    sample(model, steps=1)
    assert asked(model)["step_seconds"] is None


def check_the_picture_is_the_same_with_the_records_and_without():
    for model in (load(), optimize(load(), HOST_ATTENTION), load(off_card=True)):
        without = model.clone()
        for kind in (WrappersMP.OUTER_SAMPLE, WrappersMP.PREDICT_NOISE, WrappersMP.APPLY_MODEL):
            for key, wrappers in without.wrappers.get(kind, {}).items():
                without.wrappers[kind][key] = [
                    wrapper
                    for wrapper in wrappers
                    if type(getattr(wrapper, "__self__", None)) is not sampling_record.Recorder
                ]
        known = sample(without, cfg=2.5)
        assert not records(model)
        assert torch.equal(sample(model, cfg=2.5), known)
        assert records(model)


def check_clones_share_the_records():
    model = load()
    clone = optimize(model.clone(), HOST_ATTENTION)
    sample(clone, steps=2)
    assert asked(model)["evaluations"] == 2
    path = records(model)[0].path
    assert path == tuple(report_of(clone).splitlines()) and path[0].startswith("blocks: fused, ")
    sample(model, steps=4)
    assert asked(clone)["evaluations"] == 4
    assert records(clone)[0].path[0].startswith("blocks: ComfyUI's own")


def check_models_of_other_loaders_are_recorded_through_optimize():
    with mock.patch(
        "comfy.model_detection.detect_unet_config", lambda *_, **__: dict(narrow.CONFIG)
    ):
        model = comfy.sd.load_diffusion_model_state_dict(dict(narrow.weights()))
    sample(model)
    assert not records(model) and report_run(model).text == UNWATCHED
    clone = optimize(optimize(model, HOST_ATTENTION), HOST_ATTENTION)
    assert report_run(clone).text == NO_RUN
    sample(clone)
    assert (asked(model)["passes"], asked(model)["evaluations"]) == (3, 3)
    assert report_run(model).text.startswith("sampled: 64x64, ")
    plain = restore(clone)
    assert not any(plain.get_all_wrappers(kind) for kind in plain.wrappers)
    assert plain.get_attachment(OPTIMIZATION) is None


def check_a_run_that_fails_is_not_recorded():
    model = load()
    sample(model, steps=2)
    with mock.patch.object(type(model.model), "_apply_model", side_effect=RuntimeError("broken")):
        try:
            sample(model, steps=3)
        except RuntimeError as error:
            assert "broken" in str(error)
        else:
            raise AssertionError("it did not fail")
    assert asked(model)["steps"] == 2
    sample(model, steps=4)
    assert asked(model)["steps"] == 4


def check_forward_passes_of_several_threads_are_all_counted():
    run = sampling_record.Run(DEVICE)
    arguments = (None, random(1, 7, 4), None, {"cond_or_uncond": [0]})

    def passes():
        for _ in range(500):
            run.count_pass(random(1, 16, 1, 2, 2), arguments, {})

    threads = [threading.Thread(target=passes) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert run.asked()["passes"] == 2000


def check_tables_are_measured_apart():
    model = load(off_card=True)
    sample(model)
    if not CARD:
        assert [record.phase for record in records(model)] == ["tables", "sampling"]
    tables, sampling = (record.measured for record in records(model))
    assert tables.seconds > 0 and sampling.seconds > 0
    assert records(model)[0].asked == {"timesteps": 3}
    sample(model)
    # The table is there: nothing was computed, and outside of a queue the record before stays.
    assert len(records(model)) == 2
    sample(model, prompt="a")
    assert [record.phase for record in records(model)] == ["sampling"]
    assert row(report_run(model), "sampling")


def check_nothing_is_kept_alive():
    model = optimize(load(off_card=True), HOST_ATTENTION)
    sample(model, cfg=2.5)
    report_run(model)
    known = Records.of(model.model)
    inner = weakref.ref(model.model)
    weight = weakref.ref(next(model.model.parameters()))
    kept = known.last
    comfy.model_management.unload_all_models()
    del model
    gc.collect()
    comfy.model_management.cleanup_models_gc()
    gc.collect()
    assert inner() is None and weight() is None
    assert len(kept) == 2
    for record in kept:
        json.dumps(dict(record.asked))  # numbers and words


def check_records_of_earlier_prompts_are_forgotten():
    found = Records()
    for prompt in ("a", "a", "b"):
        with running(prompt):
            found.add(Record("decode", None))
    assert [record.prompt for record in found.last] == ["b"]
    for _ in range(1000):
        found.add(Record("decode", None, prompt="c"))
    assert len(found.last) == 256
    for phase in ("text", "text", "decode"):
        found.add(Record(phase, None))
    assert [record.phase for record in found.last] == ["text", "decode"]


def check_what_fails_inside_of_a_recording_is_not_recorded():
    holder = SimpleNamespace()
    try:
        with recording(holder, "decode", torch.device("cpu")):
            raise RuntimeError
    except RuntimeError:
        pass
    assert Records.of(holder).last == ()


# -------------------------------------------------------------------------------- what measures


def check_a_meter_leaves_out_what_is_apart():
    import time

    meter = Meter(torch.device("cpu"))
    with meter.apart() as inner:
        time.sleep(0.2)
        assert inner.finish().seconds >= 0.2
    measured = meter.finish()
    assert measured.seconds < 0.1 and not measured.counted
    assert (measured.card_bytes, measured.allocated_bytes, measured.beside_bytes) == (0, 0, 0)


def check_marks_and_the_typical_step():
    assert typical([]) is None and typical([3.0]) is None
    assert typical([100.0, 1.0, 2.0, 9.0]) == 2.0
    marks = Marks(torch.device("cpu"))
    assert marks.seconds() == []
    for _ in range(3):
        marks.mark()
    assert len(marks.seconds()) == 2 and min(marks.seconds()) >= 0


def check_what_is_read_of_a_card():
    """On a card of numbers, which holds what it is told."""
    card = SimpleNamespace(held=10, most=10, used=100, waits=0)

    def hold(held, used=100):
        card.held, card.most, card.used = held, max(card.most, held), used

    functions = {
        "memory_allocated": lambda device: card.held,
        "max_memory_allocated": lambda device: card.most,
        "reset_peak_memory_stats": lambda device: setattr(card, "most", card.held),
        "mem_get_info": lambda device: (1000 - card.used, 1000),
        "synchronize": lambda device: setattr(card, "waits", card.waits + 1),
    }
    hold(900), hold(10)
    with mock.patch.multiple(torch.cuda, **functions):
        meter = Meter(torch.device("cuda"))
        hold(70), hold(50)
        meter.begin()
        hold(60, used=400), hold(50)
        assert meter.beside_bytes == 10
        with meter.apart() as inner:
            hold(90), hold(55, used=700)
            apart = inner.finish()
        hold(62, used=300)
        meter.look()
        measured = meter.finish()
    # What was there before the phase, and what came while nobody read it, is not in its figures.
    assert (apart.allocated_bytes, apart.beside_bytes, apart.card_bytes) == (90, 40, 700), apart
    assert (measured.allocated_bytes, measured.beside_bytes) == (70, 12), measured
    assert (measured.card_bytes, measured.counted, card.waits) == (300, True, 2), measured


def check_what_a_card_counts():
    if not CARD:
        return
    meter = Meter(DEVICE)
    held = torch.zeros(64, 2**20, device=DEVICE)
    meter.begin()
    passing = torch.zeros(32, 2**20, device=DEVICE)
    del passing
    assert meter.beside_bytes == 128 * 2**20
    with meter.apart():
        torch.zeros(512, 2**20, device=DEVICE)
    measured = meter.finish()
    assert measured.counted and measured.beside_bytes == 128 * 2**20
    assert measured.allocated_bytes >= 384 * 2**20
    assert measured.card_bytes >= measured.allocated_bytes
    del held


def check_a_card_s_run_is_counted():
    if not CARD:
        return
    model = optimize(load(), HOST_ATTENTION)
    sample(model, cfg=2.5, steps=6, size=64)
    (record,) = records(model)
    measured = record.measured
    assert measured.counted and measured.card_bytes > measured.allocated_bytes > 0
    assert 0 < measured.beside_bytes < measured.allocated_bytes
    assert (measured.paged_bytes > 0) == (MODE == "dynamic")
    assert 0 < record.asked["step_seconds"] < 6
    report = report_run(model)
    assert report.data["phases"]["sampling"]["measured"]["card_gib"] > 0
    assert "memory is not counted" not in report.text


# --------------------------------------------------------------------------------------- the report


def check_all_phases_of_a_run():
    gc.collect()
    model, clip, vae = load_model(MICRO)[0], load_text_encoder(MICRO)[0], load_vae(MICRO)[0]
    RESULTS.clear()
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
        output = QwenL40SReport.execute(model, images, clip, vae)
    passed, text, data = output.args
    assert passed is images and output.ui.as_dict()["text"] == (text,)
    assert text.startswith("sampled: 64x64, batch 1, 3 steps, 6 forward passes, CFG 4, "), text
    phases = json.loads(data)["phases"]
    assert list(phases) == ["text", "encode", "sampling", "decode"]
    assert (phases["text"]["times"], phases["text"]["remembered"]) == (3, 1)
    assert "remembered: nothing ran" in phases["text"]["path"]
    assert phases["decode"]["path"][0].startswith("decode 1 image of 64x64: 2 exact tiles")
    assert all(phase["measured"]["seconds"] > 0 for phase in phases.values())
    assert json.loads(data)["this_run"] and json.loads(data)["step_ms"]["measured"] > 0
    for line in ("text encode: on ", "blocks: ", "decode 1 image", "encode 1 image"):
        assert f"\n{line}" in text, text
    if not CARD:
        assert "note: memory is not counted on the processor" in text
        assert "note: nothing is predicted of a run on cpu" in text


def check_a_run_that_comfyui_kept_says_so():
    model = load()
    sample(model, prompt="first")
    with running("first"):
        assert EARLIER not in report_run(model).text
    with running("second"):
        report = report_run(model)
    assert f"note: {EARLIER}" in report.text.splitlines() and not report.data["this_run"]


def check_what_nothing_was_recorded_of():
    model = load()
    report = report_run(model)
    assert report.text == NO_RUN and json.loads(report.json()) == {"note": NO_RUN}
    vae = load_vae(MICRO)[0]
    clip = load_text_encoder(MICRO)[0]
    sample(model, prompt="a")
    with running("a"):
        text = report_run(model, clip, vae).text
    assert "note: text encode: not in this run" in text, text
    assert "note: VAE decode: not in this run" in text, text


def check_another_model_is_named():
    other = SimpleNamespace(model=SimpleNamespace(diffusion_model=None))
    images, text, data = QwenL40SReport.execute(other, "images").args
    assert text.startswith("The model is SimpleNamespace, not Qwen-Image 1.x"), text
    assert text.endswith(": its runs are not reported."), text
    assert images == "images" and json.loads(data) == {"note": text}


def check_comfyui_makes_it_anew_where_images_do_not_tell():
    linked = QwenL40SReport.fingerprint_inputs(model=None, images=None)
    assert linked == QwenL40SReport.fingerprint_inputs(model=None, images=None, clip=None)
    assert math.isnan(QwenL40SReport.fingerprint_inputs(model=None))


def check_several_samplings_of_a_prompt():
    model = load()
    for steps in (2, 3):
        sample(model, steps=steps, prompt="a")
    report = report_run(model)
    assert "2 samplings ran" in report.text and "3 steps" in report.text.splitlines()[0]
    assert report.data["phases"]["sampling"]["times"] == 2


# ------------------------------------------------------------------------------------ what predicts


def check_predicted_beside_measured():
    model = optimize(load(), HOST_ATTENTION)
    clip, vae = load_text_encoder(MICRO)[0], load_vae(MICRO)[0]
    sample(model, cfg=2.5)
    report = predicted(model, clip=clip, vae=vae)
    phase = report.data["phases"]["sampling"]
    assert phase["predicted"]["card_gib"] > 0 and phase["predicted"]["seconds"][1] > 0, report
    assert report.data["step_ms"]["predicted"] and report.data["basis"], report.text
    low, high = report.data["step_ms"]["predicted"]
    assert 0 < low <= high
    assert "\ntimes: predicted: no L40S was measured" in report.text, report.text
    assert "USD" not in report.text
    sampling = row(report, "sampling")
    assert "-" not in [cell.strip() for cell in sampling if cell.strip()][:3], report.text


def check_the_wish_of_a_run():
    model = load(off_card=True)
    sample(model, cfg=2.5, batch=2, size=9)
    prediction = _prediction(model)
    wish = prediction.wish
    assert (wish.width, wish.height, wish.batch, wish.steps) == (80, 80, 2, 3), wish
    assert (wish.cfg, wish.text_tokens, wish.references) == ("two passes", 20, 0), wish
    assert (wish.precision, wish.modulation, wish.family) == ("bf16", "off card", "qwen-image")
    assert wish.parts.transformer == narrow.SHAPE
    assert any("fused blocks, which did not run" in note for note in prediction.notes)
    sample(model)
    assert _prediction(model).wish.cfg == "off"
    sample(optimize(model, Settings(attention="comfyui", cfg_batching="on")), cfg=2.5)
    prediction = _prediction(model)
    assert prediction.wish.cfg == "one pass" and prediction.wish.items == 2
    assert not any("fused" in note for note in prediction.notes)


def check_the_wish_of_an_edit():
    model = load()
    base = dict(_asked(model))
    for references, tokens, family, own in (
        ([[128, 128]], 1400, "qwen-image-edit", 31),
        ([[128, 128]], 220, "qwen-image-edit-2509", 24),
        ([[128, 128], [128, 128]], 400, "qwen-image-edit-2509", 8),
        ([[128, 128]], 100, "qwen-image-edit-2509", 1),
    ):
        wish = _prediction(model, base | {"references": references, "text_tokens": tokens}).wish
        assert (wish.family, wish.text_tokens) == (family, own), wish
        assert wish.references == len(references)
    small = _prediction(model, base | {"references": [[64, 64]]})
    assert "references had 0.25 megapixels and are predicted with one" in small.notes
    many = _prediction(model, base | {"references": [[128, 128]] * 5})
    assert many.wish is None and many.notes[0].startswith("nothing is predicted: 5 references")
    other = _prediction(model, base | {"controlnet": True, "passes": 9})
    assert sum("ControlNet" in note or "3 forward passes" in note for note in other.notes) == 2


def check_a_card_that_is_not_in_the_list_has_peaks_only():
    model = load()
    sample(model)
    report = predicted(model, CardFacts("NVIDIA Made Up 9000", 80 * GIB, (9, 0)))
    predicted_phase = report.data["phases"]["sampling"]["predicted"]
    assert predicted_phase["card_gib"] > 0 and predicted_phase["seconds"] is None
    assert report.data["step_ms"]["predicted"] is None
    assert "note: no times are predicted: " in report.text and "Made Up 9000" in report.text


def _asked(model) -> dict:
    sample(model)
    return asked(model)


def _prediction(model, found=None):
    record = next(record for record in records(model) if record.phase == "sampling")
    with as_on(L40S)[0], as_on(L40S)[1]:
        return run_wish.predict(found or record.asked, record.path, model, None, None, 0)


def main():
    comfyui_boot.run_checks(globals())


if __name__ == "__main__":
    main()
