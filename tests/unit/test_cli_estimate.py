"""`qwen-l40s estimate` as a command."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qwen_l40s.cli import build_parser, main
from qwen_l40s.cli.estimate import request_of
from qwen_l40s.errors import SettingError
from qwen_l40s.families.registry import find_member, members
from qwen_l40s.machine.card import InstalledCard, InstalledCards
from qwen_l40s.machine.store import known_cards
from qwen_l40s.planning.bytes import weight_bytes
from qwen_l40s.planning.options import OLDER, Older
from qwen_l40s.planning.request import Loras, RunRequest
from qwen_l40s.spec.formats import GIB
from qwen_l40s.verdict import Verdict

ROOT = Path(__file__).resolve().parents[2]
ISSUE = shlex.split(
    "estimate --card L40S --family qwen-image --precision bf16 --size 1328x1328 --batch 1 "
    "--references 0 --modulation off-card --steps 20 --json"
)


def found(capsys, *argv, code=0):
    """The object that the command prints, which is all that it prints."""
    assert main(["estimate", *argv, "--json"]) == code
    (line,) = capsys.readouterr().out.splitlines()
    return json.loads(line)


def refused(capsys, *argv):
    """The one sentence of an error."""
    assert main(["estimate", *argv]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith("qwen-l40s: error: ")
    return line


def test_the_command_of_the_issue(capsys):
    assert main(ISSUE) == 0
    (line,) = capsys.readouterr().out.splitlines()
    output = json.loads(line)
    sampling = output["phases"]["sampling"]
    assert sampling["parts"]["weights"] == pytest.approx(25.4, abs=0.02)
    assert sampling["peak_gib"] < 27
    assert sampling["parts"]["resident"]["text encoder"] > 14
    assert output["basis"] == "predicted"
    low, high = output["ranges"]["step_ms"]
    assert low < output["step_ms"] < high
    assert (output["fits"], output["verdict"]) == (True, "fits")


def test_the_modulation_stays_where_it_is_asked_to(capsys):
    on, off = (
        found(capsys, "--card", "H100 SXM", "--precision", "bf16", "--modulation", place)
        for place in ("off card", "on card")
    )
    weights = [output["phases"]["sampling"]["parts"]["weights"] for output in (on, off)]
    assert weights[1] - weights[0] == pytest.approx(12.66, abs=0.01)


def test_what_does_not_stay_on_the_card_is_exit_code_4(capsys):
    argv = ("--precision", "bf16", "--modulation", "on card", "--text-encoder-placement", "on card")
    output = found(capsys, "--card", "L40S", *argv, code=4)
    assert output["fits"] is False
    assert output["headroom_gib"] < 0
    main(["estimate", "--card", "L40S", *argv])
    assert "Next: set precision int8, " in capsys.readouterr().out
    place = ["--text-encoder-placement", "on card"]
    whole = ["--size", "3072x3072", "--precision", "bf16", "--tiles", "1"]
    main(["estimate", "--card", "L40S", "--text-encoder-precision", "bf16", *place, *whole])
    assert "tiles 0, which fits with " in capsys.readouterr().out


@pytest.mark.parametrize("card", ["RTX 3060 12GB", "RTX 4070", "RTX 4060"])
def test_a_card_that_is_too_small_fits_with_offloading(capsys, card):
    """It is no refusal, and the figures of its headline are those of its phases."""
    output = found(capsys, "--card", card, code=4)
    assert output["verdict"] == "runs slowly" and output["fits"] is False
    streamed, most = (
        output["offloaded_gib_per_step"],
        max(phase["card_gib"] for phase in output["phases"].values()),
    )
    assert main(["estimate", "--card", card]) == 4
    text = capsys.readouterr().out
    first = text.partition("\n")[0]
    assert streamed == pytest.approx(2 * output["plan"][0]["moved_gib"], abs=0.002)
    assert first.startswith(f"Fits with offloading: {streamed:.1f} GiB stream from system RAM in ")
    assert f"; {most:.1f} of " in first
    assert "oes not fit:" not in text


def test_too_little_system_ram_is_exit_code_1(capsys):
    output = found(capsys, "--card", "RTX 4090", "--ram", "16", "--precision", "int8", code=1)
    assert output["verdict"] == "does not fit" and output["fits"] is False
    assert output["host_ram_gib"] > output["ram_gib"] == 16
    assert "qwen-image-2.1" in output["with_less_ram_gib"]
    assert found(capsys, "--card", "RTX 4090", "--ram", "64")["with_less_ram_gib"] == {}


@pytest.mark.parametrize(
    "argv",
    [
        ["--batch", "64", "--size", "2048x2048"],
        ["--vram", "2"],
        ["--size", "12288x12288", "--tiles", "1"],
        ["--vram", "8", "--size", "4096x4096", "--family", "qwen-image-2.1"],
    ],
    ids=lambda argv: " ".join(argv),
)
def test_what_stops_is_exit_code_1(capsys, argv, tmp_path):
    """No bad input: a step or the decoder takes more than the card even where weights move."""
    output = found(capsys, "--card", "L40S", *argv, code=1)
    assert (output["card"], output["verdict"], output["fits"]) == ("L40S", "does not fit", False)
    path = tmp_path / "no.png"
    assert main(["estimate", "--card", "L40S", *argv, "--plot", str(path)]) == 1
    printed = capsys.readouterr()
    text = " ".join(printed.out.split())
    assert text.startswith(f"Does not fit: {output['reason']} L40S: qwen-image")
    assert printed.err == "" and path.stat().st_size


def test_the_text_begins_with_the_answer(capsys):
    assert main(["estimate", "--card", "L40S", "--vram", "43"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Tight, not measured: ")
    assert lines[1].startswith("L40S: qwen-image, int8, 1328x1328")
    assert lines[4].startswith("Template: text_to_image, with qwen_image_2512_fp8_e4m3fn ")
    assert lines[5].startswith("Safer: modulation off card, ")
    assert lines[6] == ""
    assert main(["estimate", "--card", "H100 SXM"]) == 0
    assert capsys.readouterr().out.startswith("Fits: ")


def test_a_price_of_ones_own(capsys):
    cheap, dear = (
        found(capsys, "--card", "L40S", "--price", price)["usd_per_image"] for price in ("1", "3")
    )
    assert dear == pytest.approx(3 * cheap, rel=1e-3)
    assert found(capsys, "--card", "L40S", "--price", "0")["usd_per_image"] == 0


def test_a_card_without_a_price_says_how_to_give_one(capsys):
    output = found(capsys, "--card", "H200")
    assert output["usd_per_image"] is None and "usd_per_image" not in output["ranges"]
    main(["estimate", "--card", "H200"])
    text = capsys.readouterr().out
    assert "no price in the list" in text and "(--price" in text


def test_qwen_image_21_shares_no_rows_and_names_its_licence(capsys):
    argv = ["--family", "qwen-image-2.1", "--cards", "2", "--cfg", "off"]
    assert main(["estimate", "--card", "L40S", *argv]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "one GPU computes a forward pass, as the rows of qwen-image-2.1 are not shared" in words
    assert "Qwen Research License: research, not commercial use" in words


def test_models_that_stay_beside_it_take_their_memory(capsys):
    """A text encoder and a VAE that two families share are there once."""
    run = ["estimate", "--card", "H200", "--family", "qwen-image-2512", "--json"]

    def taken(*others):
        assert main([*run, *(word for other in others for word in ("--with", other))]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["settings"]["with"] == list(others)
        return -found["headroom_gib"]

    alone = taken()
    edit, other = taken("qwen-image-edit-2511:int8"), taken("qwen-image-2.1:int8")
    family = find_member("qwen-image-2.1")
    transformer = weight_bytes(family.transformer, "int8").total
    encoder = 2 * (family.text_encoder.language + family.text_encoder.vision)
    shared = weight_bytes(find_member("qwen-image-edit-2511").transformer, "int8").total
    assert other - alone == pytest.approx((transformer + encoder + family.vae_bytes) / GIB, abs=0.1)
    assert edit - alone == pytest.approx(shared / GIB, abs=0.1)
    assert main([*run[:-1], "--with", "qwen-image-2.1:int8"]) == 0
    assert "beside qwen-image-2.1 in int8" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("qwen-image-2.1", "--with qwen-image-2.1 must be FAMILY:PRECISION"),
        ("qwen-image-3:int8", "qwen-image-3"),
        ("qwen-image-2.1:int4", "'int4' is no precision of a model that stays in VRAM"),
    ],
)
def test_a_model_beside_it_that_is_unknown_is_refused(capsys, other, words):
    assert main(["estimate", "--card", "L40S", "--with", other]) == 2
    assert words in capsys.readouterr().err


def request(*argv):
    return request_of(build_parser(["estimate"]).parse_args(["estimate", *argv]))


def test_the_options_make_the_request():
    assert request() == RunRequest(steps=50)
    argv = shlex.split(
        "--family qwen-image-edit-2511 --precision int8 --size 1664x928 --batch 2 --steps 8 "
        "--cfg 1 --references 3 --text 99 --modulation on-card --text-encoder-precision fp8 "
        "--text-encoder-placement drop-after-encoding --loras 2 --lora-rank 16 --lora-mode bypass "
        "--controlnet-gib 3.5 --tiles 4 --cache fast"
    )
    assert request(*argv) == RunRequest(
        family="qwen-image-edit-2511",
        precision="int8",
        width=1664,
        height=928,
        batch=2,
        steps=8,
        cfg="off",
        references=3,
        text_tokens=99,
        modulation="on card",
        text_encoder="fp8",
        text_encoder_place="drop after encoding",
        loras=Loras(2, 16, "bypass"),
        controlnet_bytes=7 * GIB // 2,
        tiles=4,
        cache="fast",
    )
    assert request("--schedule", "official") == request()
    few = request("--schedule", "viggle-6", "--size", "1024x1024")
    assert (few.family, few.steps, few.cfg) == ("qwen-image-2.1", 6, "off")
    assert request("--schedule", "lightning 4") == request("--steps", "4", "--cfg", "1")
    edit = request("--schedule", "lightning 8", "--references", "1")
    assert (edit.family, edit.steps) == ("qwen-image-edit-2511", 8)
    assert request("--schedule", "turbo 8", "--cfg", "3").passes == 2
    assert request("--layers", "4").family == "qwen-image-layered"
    assert request("--references", "1").family == "qwen-image-edit-2511"


@pytest.mark.parametrize("family", members().values(), ids=members())
def test_what_is_left_out_is_the_familys_own(family):
    own = request("--family", family.name)
    assert own.width == own.height == family.default_side and own.steps == family.steps
    assert own.passes == (2 if family.cfg > 1 else 1)
    assert request("--family", family.name, "--steps", "7").steps == 7


def test_older_flags_mean_what_they_meant(monkeypatch, capsys):
    older = Older("tables", {"on": "off card", "off": "on card"}, flag="--tables")
    monkeypatch.setitem(OLDER, "modulation", older)
    monkeypatch.setitem(OLDER, "lora_mode", Older("how", {"beside": "bypass"}))
    found = request("--tables", "on", "--loras", "2", "--lora-mode", "beside")
    assert (found.modulation, found.loras.mode) == ("off card", "bypass")
    assert request("--tables", "off", "--modulation", "on card").modulation == "on card"
    for argv in (["--tables", "maybe"], ["--tables", "on", "--modulation", "on-card"]):
        with pytest.raises(SettingError, match="modulation"):
            request(*argv)
    with pytest.raises(SystemExit):
        main(["estimate", "--help"])
    shown = capsys.readouterr().out
    assert "--modulation" in shown and "--tables" not in shown


@pytest.mark.parametrize(
    "text, mode",
    [
        *(("4", "two passes"), ("2.5", "two passes"), ("0", "two passes"), ("1.0", "off")),
        *(("off", "off"), ("one-pass", "one pass"), ("two passes", "two passes")),
    ],
)
def test_guidance_is_a_scale_or_a_mode(text, mode):
    assert request("--cfg", text).cfg == mode


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--card", "L40SS"], ["'L40SS'", "L40S,"]),
        (["--card", "toaster"], ["toaster", "--list-cards"]),
        (["--card", "L40S", "--family", "flux"], ["flux", "qwen-image-layered"]),
        (["--card", "L40S", "--precision", "fp4"], ["fp4", "int8"]),
        (["--card", "RTX 3090", "--precision", "fp8"], ["fp8", "int8"]),
        (["--card", "L40S", "--size", "1000x1000"], ["divisible by 16", "992x992"]),
        (["--card", "L40S", "--size", "big"], ["big", "1328x1328"]),
        (["--card", "L40S", "--size", "0x16"], ["width", "at least 16"]),
        (["--card", "L40S", "--size", "99999999x16"], ["WIDTHxHEIGHT"]),
        (["--card", "L40S", "--size", "99984x99984"], ["tokens"]),
        (
            ["--card", "L40S", "--family", "qwen-image", "--references", "1"],
            ["1 references", "qwen-image-edit-2511"],
        ),
        (["--card", "L40S", "--modulation", "on"], ["modulation 'on'", "auto, on card, off card"]),
        (["--card", "L40S", "--text-encoder-placement", "moon"], ["moon", "cpu"]),
        (["--card", "L40S", "--ram", "0"], ["--ram", "above 0"]),
        (["--card", "L40S", "--cache", "taylor"], ["cache 'taylor'", "faithful, balanced, fast"]),
        (
            ["--card", "L40S", "--schedule", "karras"],
            ["schedule 'karras'", "official, lightning 4"],
        ),
        (["--card", "L40S", "--schedule", "pruna 8", "--steps", "5"], ["5", "has 8 steps"]),
        (
            ["--card", "L40S", "--schedule", "pai-4", "--family", "qwen-image-2512"],
            ["'pai 4' is of Qwen-Image-2.1", "choose official, lightning 4, lightning 8"],
        ),
        (["--card", "L40S", "--cfg", "much"], ["much", "one pass"]),
        (["--card", "L40S", "--cfg", "nan"], ["nan"]),
        (["--card", "L40S", "--cfg", "-1"], ["-1"]),
        (["--card", "L40S", "--batch", "0"], ["batch", "at least 1"]),
        (["--card", "L40S", "--controlnet", "-2"], ["controlnet_gib", "0 or more"]),
        (["--card", "L40S", "--controlnet", "inf"], ["controlnet_gib", "0 or more"]),
        (["--card", "L40S", "--price", "-1"], ["-1", "USD per hour"]),
        (["--card", "L40S", "--price", "nan"], ["nan"]),
        (["--card", "L40S", "--price", "inf"], ["inf"]),
        (["--card", "L40S", "--vram", "100"], ["--vram 100", "44.3"]),
        (["--card", "L40S", "--vram", "0"], ["--vram 0"]),
        (["--card", "L40S", "--vram", "nan"], ["--vram nan"]),
        (["--card", "L40S", "--model", "nowhere"], ["nowhere"]),
        (["--card", "L40S", "--cards", "nowhere.json"], ["nowhere.json"]),
        (["--card", "L40S", "--plot", "x.jpg"], [".png"]),
        (
            ["--card", "L40S", "--plot", "no/such/folder/x.png"],
            ["no/such/folder", "create the folder"],
        ),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else None,
)
def test_bad_input_is_one_sentence_with_the_remedy(capsys, argv, words):
    line = refused(capsys, *argv)
    assert all(word in line for word in words), line


@pytest.fixture
def own_cards(tmp_path):
    def write(entry, name="Mine"):
        path = tmp_path / "cards.json"
        path.write_text(json.dumps({"cards": {name: entry}}))
        return str(path)

    return write


OWN = {
    "also": [],
    "architecture": "Ada Lovelace",
    "capability": [8, 9],
    "memory_mib": 64 * 1024,
    "bandwidth_gb_per_second": 900,
    "l2_mib": 64,
    "dense_tflops": {"bf16": 300, "fp32": 80},
    "pcie_generation": 4,
    "pcie_lanes": 16,
    "tdp_watts": 300,
    "source": "its box",
    "prices": [],
}


def test_a_list_of_ones_own(capsys, own_cards):
    assert found(capsys, "--card", "mine", "--cards", own_cards(OWN))["card"] == "Mine"


def test_a_list_of_ones_own_in_the_cache_folder(capsys, own_cards, set_settings):
    path = Path(own_cards(OWN))
    set_settings(cache=str(path.parent))
    assert found(capsys, "--card", "mine")["card"] == "Mine"
    assert str(path) in refused(capsys, "--card", "yours")
    path.write_text("{")
    assert str(path) in refused(capsys, "--card", "L40S")


def test_names_that_the_terminal_cannot_show(own_cards):
    command = [sys.executable, str(ROOT), "estimate", "--cards", own_cards(OWN, "显卡")]
    result = subprocess.run(
        [*command, "--card", "显卡"],
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "1"},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert rb"\u663e\u5361: qwen-image" in result.stdout


def test_the_list_of_cards(capsys):
    assert main(["estimate", "--list-cards"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) == len(known_cards()) + 3
    for name in known_cards():
        assert name in text
    assert main(["estimate", "--list-cards", "--sources"]) == 0
    text = capsys.readouterr().out
    assert "dense" in text
    assert "sparsity" in text
    assert "$0.72/h, Spheron, a starting price, 2026" in text
    assert main(["estimate", "--list-cards", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["cards"]
    assert [card["name"] for card in listed] == list(known_cards())
    assert listed[0]["prices"][0]["source"]


def test_the_plot(tmp_path, capsys):
    image = pytest.importorskip("PIL.Image")
    path = tmp_path / "estimate.png"
    assert main(["estimate", "--card", "L40S", "--plot", str(path)]) == 0
    with image.open(path) as picture:
        assert (picture.mode, picture.width) == ("RGB", 1280)


@pytest.fixture
def machine(monkeypatch):
    def has(*cards, no_int8=""):
        known = InstalledCards(cards, why=Verdict("no NVIDIA driver answers"))
        monkeypatch.setattr("qwen_l40s.machine.card.read_cards", lambda torch: known)
        monkeypatch.setattr("qwen_l40s.optimizations.linear.why_not_int8", lambda device: no_int8)

    return has


def test_a_lower_power_limit_of_this_machines_card_is_said(machine, capsys):
    machine(InstalledCard("NVIDIA GeForce RTX 4090", (8, 9), 24 * GIB, limit_watts=300))
    assert main(["estimate", "--precision", "int8"]) in (0, 4)
    text = " ".join(capsys.readouterr().out.split())
    assert "its power limit is set to 300 of 450 W, counted as 67% to 87% of its clock" in text


def test_this_machines_card_is_the_default(capsys, machine):
    machine(InstalledCard("NVIDIA L40S", (8, 9), 40 * GIB))
    output = found(capsys)
    assert output["card"] == "L40S"
    assert found(capsys, "--card", "L40S", "--vram", "40")["phases"] == output["phases"]
    machine(InstalledCard("NVIDIA L40S", (8, 9), 40 * GIB), no_int8="no Triton")
    output = found(capsys)
    assert output["settings"]["precision"] == "bf16" and "no Triton" in output["plan"][0]["reason"]


def test_a_machine_with_a_card_that_is_not_listed(capsys, machine):
    machine(InstalledCard("NVIDIA H100 NVL", (9, 0), 93 * GIB))
    output = found(capsys, "--price", "2")
    assert output["card"] == "NVIDIA H100 NVL" and output["fits"] is True
    assert output["step_ms"] is output["image_seconds"] is output["usd_per_image"] is None
    assert "bench --calibrate" in output["notes"][0] and "H100 SXM" in output["notes"][0]
    assert main(["estimate", "--vram", "20"]) in (0, 4)


def test_without_a_card_it_is_about_an_l40s_and_says_so(capsys, machine):
    machine()
    main(["estimate", "--json"])
    output = capsys.readouterr()
    assert json.loads(output.out)["card"] == "L40S"
    assert "no NVIDIA driver answers" in output.err
    assert "L40S" in output.err


def test_the_true_sizes_of_a_file(capsys, checkpoint):
    how = ("--precision", "bf16", "--modulation", "on card")
    small = found(capsys, "--card", "L40S", "--model", str(checkpoint), *how)
    published = found(capsys, "--card", "H200", *how)
    weights = [output["phases"]["sampling"]["parts"]["weights"] for output in (small, published)]
    assert weights[0] == pytest.approx(checkpoint.stat().st_size / GIB, abs=0.001)
    assert weights[1] > 38
    assert small["notes"][-1] == f"Sizes are those of {checkpoint}."


def test_a_quantized_file_stays_as_it_is(checkpoint, tmp_path):
    path = tmp_path / "int8.safetensors"
    assert main(["quantize", str(checkpoint), str(path), "--precision", "int8"]) == 0
    settled = request("--model", str(path))
    assert settled.precision == "int8"
    assert settled.parts.transformer_bytes < path.stat().st_size
    assert 0 < settled.parts.modulation_bytes < settled.parts.transformer_bytes
    other = request("--model", str(path), "--precision", "bf16")
    assert other.precision == "bf16"
    assert other.parts.transformer_bytes is None


def test_a_diffusers_folder_gives_every_part():
    parts = request("--model", str(ROOT / "models" / "micro")).parts
    assert parts.transformer.dim == 128
    assert parts.vae.dim == 8
    assert parts.vae_bytes < 2e6
    assert parts.text_encoder_bytes < 7e6


def test_a_file_that_is_no_qwen_image(tmp_path, capsys):
    path = tmp_path / "wan.safetensors"
    names = ("head.modulation", "patch_embedding.weight")
    save_file({name: torch.zeros(1) for name in names}, path)
    line = refused(capsys, "--card", "L40S", "--model", str(path))
    assert "wan.safetensors" in line
    assert "Wan" in line


def test_a_file_of_another_family(checkpoint, capsys):
    line = refused(
        capsys, "--card", "L40S", "--model", str(checkpoint), "--family", "qwen-image-layered"
    )
    assert "qwen-image-layered" in line
    assert "--family" in line
    assert request("--model", str(checkpoint), "--family", "qwen-image-edit").family


def test_from_a_clone_without_torch_and_pil():
    """`python <folder> ...` while every heavy package fails to import."""
    code = (
        "import runpy, sys\n"
        "for name in ('torch', 'numpy', 'PIL', 'safetensors', 'diffusers', 'transformers'):\n"
        "    sys.modules[name] = None\n"
        "sys.argv = ['qwen-l40s', *sys.argv[1:]]\n"
        f"runpy.run_path({str(ROOT)!r}, run_name='__main__')\n"
    )
    micro = str(ROOT / "models" / "micro")
    for argv, start in (
        (["estimate", "--json"], '{"card": "L40S"'),
        (["estimate", "--json", "--model", micro, "--card", "L40S"], '{"card": "L40S"'),
        (["advise", "--images-per-hour", "60"], "Cheapest"),
    ):
        command = [sys.executable, "-c", code, *argv]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith(start)
