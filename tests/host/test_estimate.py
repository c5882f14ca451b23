"""The estimator's nodes, executed as ComfyUI executes them."""

import json
from pathlib import Path
from unittest import mock

import comfy.model_management as management
import folder_paths
import numpy as np
import published_attention
import torch
from comfy_execution.graph_utils import ExecutionBlocker
from comfyui_boot import BASE, ROOT, refused
from PIL import Image

from qwen_l40s.charts.text import estimate_json
from qwen_l40s.errors import SettingError, UnavailableError
from qwen_l40s.families.comfyui import kind_of
from qwen_l40s.hosts.comfyui.contract import transformer_of
from qwen_l40s.hosts.comfyui.estimate import cards as this_card
from qwen_l40s.hosts.comfyui.load.text_encoder import load_text_encoder
from qwen_l40s.hosts.comfyui.load.transformer import load_model
from qwen_l40s.hosts.comfyui.load.vae import load_vae
from qwen_l40s.hosts.comfyui.sample.nag import NagSettings, guide_attention
from qwen_l40s.hosts.comfyui.sample.optimize import OptimizeSettings, optimize
from qwen_l40s.hosts.comfyui.sample.step_cache import cache_steps
from qwen_l40s.machine.store import CALIBRATION, known_cards
from qwen_l40s.nodes import estimate as nodes_estimate
from qwen_l40s.nodes.advise import QwenL40SAdviseGPU
from qwen_l40s.nodes.estimate import QwenL40SEstimateVRAM
from qwen_l40s.nodes.loaders import QwenL40SLoadModel, QwenL40SLoadTextEncoder
from qwen_l40s.planning.estimate import estimate
from qwen_l40s.planning.options import OLDER, Older
from qwen_l40s.planning.request import RunRequest
from qwen_l40s.planning.step_cache import CacheSettings
from qwen_l40s.spec.formats import GIB, CardFacts

MICRO = ROOT / "models" / "micro"
NODES = (QwenL40SEstimateVRAM, QwenL40SAdviseGPU)


def defaults(node):
    """What the page sends of a node that was just added."""
    return {
        value.id: value.default if value.default is not None else value.options[0]
        for value in node.GET_SCHEMA().inputs
        if hasattr(value, "default")
    }


def run(**changed):
    inputs = {**defaults(QwenL40SEstimateVRAM), **changed}
    image, report, fits, text, *_ = QwenL40SEstimateVRAM.execute(**inputs).args
    return image, report, fits, json.loads(text)


def advice(**changed):
    return QwenL40SAdviseGPU.execute(**{**defaults(QwenL40SAdviseGPU), **changed})


def shown(output):
    """The report and the picture that the page gets; the picture is what the node gives."""
    image, report = output.args[:2]
    assert output.ui["text"] == [report]
    (entry,) = output.ui["images"]
    assert entry["type"] == "temp"
    folder = Path(folder_paths.get_temp_directory()) / entry["subfolder"]
    written = np.asarray(Image.open(folder / entry["filename"]).convert("RGB"))
    assert image.dtype == torch.float32 and image.shape == (1, *written.shape)
    assert 0 <= image.min() < image.max() <= 1
    assert np.abs(image[0].numpy() * 255 - written).max() <= 1
    return report


# --- the nodes


def test_an_estimate_without_wires_is_the_planners_own():
    image, report, fits, found = run(card="L40S", width=1024, height=1024, steps=8)
    expected = estimate(
        RunRequest(width=1024, height=1024, steps=8), known_cards()["L40S"], calibration=None
    )
    assert found == json.loads(json.dumps(estimate_json(expected)))
    assert fits is expected.fits is True
    assert list(found["phases"]) == ["load", "text", "tables", "sampling", "decode"]
    assert shown(QwenL40SEstimateVRAM.execute(card="L40S", width=1024, height=1024, steps=8))
    assert "L40S" in report and image.shape[0] == 1


def test_the_price_is_the_users_own_or_the_lists():
    listed, dear = (run(card="L40S", price_per_hour=price)[3] for price in (0, 7200))
    assert dear["usd_per_image"] > 1000 * listed["usd_per_image"] > 0
    refused(SettingError, "-1", run=lambda: run(price_per_hour=-1.0))


def test_a_step_cache_is_counted_by_name_or_as_the_model_has_it():
    by_name = run(card="L40S", cache="balanced")
    assert by_name[3]["step_cache"]["computed_steps"] == 26
    assert run(card="L40S", cache="off")[3]["step_cache"] is None
    with torch.inference_mode():
        model = load_model(MICRO, "bf16")[0]
    wired = run(card="L40S", model=cache_steps(model, CacheSettings(budget=0.3)))[3]
    assert wired["step_cache"]["name"] == "custom" and wired["settings"]["cache"] == "custom"
    assert 26 < wired["step_cache"]["computed_steps"] < 50
    assert "Step cache: speed computes 20 of 50 steps, " in advice(cache="fast").args[1]


def test_nag_is_counted_by_its_tokens_or_as_the_model_has_it():
    assert "nag_tokens" not in run(card="L40S")[3]["settings"]
    by_number = run(card="L40S", cfg="off", nag_tokens=60)
    assert "NAG with 60 tokens" in by_number[1]
    with torch.inference_mode():
        model = load_model(MICRO, "bf16")[0]
        negative = [[torch.zeros(1, 12, kind_of(model.model).takes(transformer_of(model))[0]), {}]]
        guided = guide_attention(model, negative, NagSettings())[0]
        aside = guide_attention(model, 2 * negative, NagSettings())[0]
    wired = {"card": "L40S", "cfg": "off", "width": 256, "height": 256}
    found, plain = run(model=guided, **wired)[3], run(model=model, **wired)[3]
    assert found["settings"]["nag_tokens"] == 12
    assert found["step_ms"] >= plain["step_ms"]
    assert found["phases"]["sampling"]["peak_gib"] >= plain["phases"]["sampling"]["peak_gib"]
    assert run(model=aside, **wired)[3] == plain
    words = "nag_tokens is 60, but the connected MODEL has 12: choose 0"
    refused(SettingError, words, run=lambda: run(model=guided, nag_tokens=60, **wired))


def test_a_model_on_several_cards_is_answered_for_all_of_them():
    with torch.inference_mode():
        model = load_model(MICRO, "bf16")[0]
    alone = run(card="L40S", model=model, width=1024, height=1024)
    model.set_additional_models("multigpu", [model.clone()])
    together = run(card="L40S", model=model, width=1024, height=1024)
    assert "cards" not in alone[3] and together[3]["cards"]["count"] == 2
    assert "\nOne image on 2 GPUs: " in together[1] and "\nMany images: " in together[1]
    del together[3]["cards"]
    assert together[3] == alone[3]


def test_attention_in_8_bits_is_counted_as_the_model_has_it(set_settings, monkeypatch):
    published_attention.on_every_device(monkeypatch)
    with torch.inference_mode():
        model = load_model(MICRO, "bf16")[0]
    for asked, by_settings, counted in (
        ("auto", "", "exact"),
        ("math", "", "exact"),
        ("kitchen_int8", "", "kitchen_int8"),
        ("fast", "", "kitchen_int8"),
        ("auto", "fast", "kitchen_int8"),
    ):
        set_settings(attention=by_settings)
        wired = run(card="L40S", model=optimize(model, OptimizeSettings(attention=asked)))[3]
        assert wired["settings"]["attention"] == counted
        said = [note for note in wired["notes"] if note.startswith("Attention ")]
        assert len(said) == (counted != "exact")
    for name in ("kitchen_int8", "int8", "int8_fp8"):  # also as older workflows have it
        assert run(card="L40S", attention=name)[3]["settings"]["attention"] == "kitchen_int8"
    named = QwenL40SAdviseGPU.execute(**{**defaults(QwenL40SAdviseGPU), "attention": "int8"})
    assert "needs a GPU of sm_80 or newer" in named.args[1]


def test_a_plan_is_given_as_the_loaders_take_it():
    for node, settings, places in (
        (QwenL40SEstimateVRAM, {"card": "RTX 4090"}, slice(4, 7)),
        (QwenL40SAdviseGPU, {}, slice(2, None)),
    ):
        output = node.execute(**{**defaults(node), **settings})
        given = output.args[places]
        names = [each.display_name for each in node.GET_SCHEMA().outputs[places]]
        assert names == ["precision", "offload_modulation", "text_encoder_device"]
        model = {each.id: each for each in QwenL40SLoadModel.GET_SCHEMA().inputs}
        encoder = {each.id: each for each in QwenL40SLoadTextEncoder.GET_SCHEMA().inputs}
        taken = [model["precision"], model["modulation"], encoder["placement"]]
        assert all(value in each.options for value, each in zip(given, taken, strict=True))


def test_older_names_and_values_mean_what_they_meant(monkeypatch):
    """ComfyUI passes older values by position under the names of today, and older names beside."""
    older = Older("tables", {"on": "off card", "off": "on card"})
    monkeypatch.setitem(OLDER, "modulation", older)
    expected = run(card="L40S", modulation="off card")[3]
    assert run(card="L40S", modulation="on")[3] == expected
    assert run(card="L40S", tables="on", unknown=1)[3] == expected
    refused(SettingError, run=lambda: run(tables="on", modulation="on card"))
    schema = QwenL40SEstimateVRAM.define_schema()
    inputs = {each.id: each for each in schema.inputs}
    assert schema.accept_all_inputs and inputs["modulation"].as_dict()["older_name"] == "tables"
    assert "on" in inputs["modulation"].options and "maybe" not in inputs["modulation"].options


# --- this card


def test_without_a_card_it_is_about_an_l40s_and_says_so():
    _, report, _, found = run()
    assert found["card"] == "L40S"
    assert any("runs on the CPU" in note for note in found["notes"]), found["notes"]
    assert "for one L40S" in report


def test_this_card_has_the_memory_that_it_shows():
    for name, memory, listed in (
        ("NVIDIA GeForce RTX 4090", 23 * GIB, "RTX 4090"),
        ("NVIDIA H100 80GB HBM3", 79 * GIB, "H100 SXM"),
    ):
        facts = CardFacts(name, memory, (8, 9))
        with mock.patch.object(this_card, "card_facts", return_value=facts):
            card, note = this_card.card_of("this card")
            assert (card.name, card.memory_bytes, note) == (listed, memory, "")
            assert run()[3]["card"] == listed


def test_a_card_that_is_not_listed_is_answered_without_times():
    facts = CardFacts("NVIDIA L40S-48Q", 45 * GIB, (8, 9))
    with mock.patch.object(this_card, "card_facts", return_value=facts):
        assert QwenL40SEstimateVRAM.validate_inputs(card="this card") is True
        with mock.patch.object(nodes_estimate, "total_memory", return_value=16 * GIB):
            image, report, fits, found = run(precision="int8")
            assert not fits and found["ram_gib"] == 16 and "qwen-image-2.1" in report
        image, report, fits, found = run(price_per_hour=1.0)
    assert fits and found["card"] == facts.name and image.shape[0] == 1
    assert found["step_ms"] is found["image_seconds"] is found["usd_per_image"] is None
    (note,) = (note for note in found["notes"] if facts.name in note)
    assert " L40S " in note and "bench --calibrate" in note
    assert found["plan"][0]["precision"] == "int8" and "int8" in report


def test_a_list_of_ones_own_in_the_cache_folder_is_read():
    path = BASE / "cache" / "cards.json"
    path.parent.mkdir(exist_ok=True)
    fingerprint = QwenL40SEstimateVRAM.fingerprint_inputs
    before = fingerprint(card="L40S")
    path.write_text(json.dumps({"cards": {"L40S": {"prices": [{"usd_per_hour": 7200}]}}}))
    try:
        assert fingerprint(card="L40S") != before
        assert fingerprint() == QwenL40SAdviseGPU.fingerprint_inputs()
        found = run(card="L40S")[3]
        assert abs(found["usd_per_image"] - 2 * found["image_seconds"]) < 0.1
        path.write_text("{")
        for node, value in ((QwenL40SEstimateVRAM, {"card": "L40S"}), (QwenL40SAdviseGPU, {})):
            assert str(path) in node.validate_inputs(**value)
        (card,) = (part for part in QwenL40SEstimateVRAM.GET_SCHEMA().inputs if part.id == "card")
        assert "L40S" in card.options
    finally:
        path.unlink()
    assert fingerprint(card="L40S") == before
    assert str(path) in QwenL40SEstimateVRAM.validate_inputs(card="Mine")


def test_a_card_that_is_too_small_is_answered():
    """The verdict is the last output; where a run stops, so does what is wired to the settings."""
    assert QwenL40SEstimateVRAM.GET_SCHEMA().outputs[-1].display_name == "verdict"
    words = {"fits": "Fits: ", "runs slowly": "Fits with offloading: ", "does not fit": "Does not"}
    for gib, verdict in ((139, "fits"), (4, "runs slowly"), (2, "does not fit")):
        facts = CardFacts("NVIDIA L40S", gib * GIB, (8, 9))
        with mock.patch.object(this_card, "card_facts", return_value=facts):
            output = QwenL40SEstimateVRAM.execute(**defaults(QwenL40SEstimateVRAM))
        assert shown(output).startswith(words[verdict])
        _, _, fits, text, *settings, last = output.args
        assert last == json.loads(text)["verdict"] == verdict and fits is (verdict == "fits")
        blocked = [isinstance(each, ExecutionBlocker) for each in settings]
        assert blocked == [verdict == "does not fit"] * 3
    assert settings[0].message.startswith("L40S has 2.0 GiB and a step of one image of 1328x1328")
    assert output.ui["qwen_l40s"][0].startswith(f"Does not fit: {settings[0].message}\n")


# --- what is refused before anything is loaded


def test_an_unknown_card_is_refused_with_the_nearest():
    validate = QwenL40SEstimateVRAM.validate_inputs
    assert (
        validate(card="this card") is validate(card="L40S") is validate(card="nvidia l40s") is True
    )
    assert validate(card=None) is True  # a link is known when it runs
    lazy, inputs = QwenL40SEstimateVRAM.check_lazy_status, defaults(QwenL40SEstimateVRAM)
    for wrong in (5, True, {"a": 1}):
        assert f" is {wrong!r}" in validate(card=wrong)
    for wrong in (None, 5):
        for call in (lazy, QwenL40SEstimateVRAM.execute):
            words = (f" is {wrong!r}", "'this card'", "'L40S'")
            changed = {**inputs, "card": wrong}
            refused(SettingError, *words, run=lambda call=call, new=changed: call(**new))
    sentence = validate(card="L41S")
    assert "'L41S'" in sentence and "L40S," in sentence and sentence.endswith(".")


def test_contradictions_are_refused_before_wires_are_followed():
    lazy, wires = QwenL40SEstimateVRAM.check_lazy_status, ("model", "clip", "vae", "latent")
    inputs = defaults(QwenL40SEstimateVRAM)
    assert lazy(**inputs) == []
    assert lazy(**inputs, **dict.fromkeys(wires)) == list(wires)
    assert lazy(**inputs, model=object(), latent=None) == ["latent"]
    replaced = inputs | {"width": 1000, "height": 7, "batch": 10**6, "family": "qwen-image"}
    for latent in (None, {"samples": torch.zeros(1, 16, 8, 8)}):
        lazy(**(replaced | {"layers": 3}), latent=latent)
    refused(
        SettingError,
        "'nvfp4'",
        run=lambda: lazy(**(replaced | {"precision": "nvfp4"}), latent=None),
    )
    for changed, words in (
        ({"width": 1000}, ("1000x1328", "divisible by 16", "992x1328")),
        ({"references": 1, "family": "qwen-image"}, ("1 references", "'qwen-image'")),
        ({"layers": 2, "family": "qwen-image-2512"}, ("got 2", "qwen-image-layered")),
        ({"precision": "nvfp4"}, ("'nvfp4'", "int8")),
        ({"batch": 4096}, ("tokens", "smaller size or batch")),
    ):
        for call in (lazy, QwenL40SEstimateVRAM.execute):
            refused(
                SettingError, *words, run=lambda call=call, new=changed: call(**{**inputs, **new})
            )


# --- wires


def test_wires_replace_the_settings():
    with torch.inference_mode():  # as loader nodes run
        model = load_model(MICRO, "int8")[0]
    clip, vae = load_text_encoder(MICRO, placement="cpu")[0], load_vae(MICRO)[0]
    latent = {"samples": torch.zeros(2, 16, 1, 64, 96)}
    before = list(management.current_loaded_models)
    parts = {"model": model, "clip": clip, "vae": vae, "latent": latent}
    _, report, fits, found = run(card="L40S", **parts)
    assert fits and "768x512" in report and "batch 2" in report, report
    assert "Sizes are read from the connected inputs: MODEL, CLIP, VAE, LATENT." in found["notes"]
    plan = found["plan"][0]
    assert (plan["precision"], plan["text_encoder_place"]) == ("int8", "cpu")
    assert found["phases"]["sampling"]["parts"]["weights"] < 0.1
    assert found["phases"]["decode"]["parts"]["weights"] < 0.1
    assert management.current_loaded_models == before
    words = ("precision is 'bf16 (most accurate)'", "has 'int8'")
    refused(SettingError, *words, run=lambda: run(**parts, precision="bf16"))


def test_nothing_that_was_measured_since_is_cached():
    fingerprint = QwenL40SEstimateVRAM.fingerprint_inputs
    before = fingerprint(card="this card", model=None)
    assert before == fingerprint(card="L40S")
    path = BASE / "cache" / CALIBRATION
    path.parent.mkdir(exist_ok=True)
    path.write_text("{}", encoding="utf-8")
    assert fingerprint(card="this card") != before
    path.unlink()


# --- advice


def test_own_prices_stand_over_the_list():
    report = shown(advice(prices="H200 = 0.01\nL40S = 40", width=1024, height=1024))
    assert ": 1 H200 in int8, $" in report.splitlines()[0], report
    assert "\nH200: $0.010 an hour (your own);" in report and "A100 80GB SXM" in report
    validate = QwenL40SAdviseGPU.validate_inputs
    assert validate() is validate(prices="L40S = 0.79") is validate(prices=None) is True
    refused(SettingError, "prices are None", run=lambda: advice(prices=None))
    assert validate(prices="L40S = 0.79\nL40S = 1").startswith("prices, line 2: ")


def test_advice_refuses_what_has_no_answer():
    words = ("enter a price above 0",)
    refused(UnavailableError, *words, run=lambda: advice(width=16384, height=16384))
    for load in (0.0, -1.0, float("nan")):
        refused(SettingError, "above 0", run=lambda load=load: advice(images_per_hour=load))
    refused(SettingError, "prices, line 1", run=lambda: advice(prices="L40S"))
    refused(SettingError, "1000x1328", run=lambda: advice(width=1000))
