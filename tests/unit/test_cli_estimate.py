"""`qwen-l40s estimate` as a command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qwen_l40s.cli import build_parser, main
from qwen_l40s.cli.estimate import request_of
from qwen_l40s.errors import SettingError
from qwen_l40s.families.registry import find_member
from qwen_l40s.machine.card import InstalledCard, InstalledCards
from qwen_l40s.machine.store import known_cards
from qwen_l40s.planning.bytes import weight_bytes
from qwen_l40s.planning.options import OLDER, OPTIONS, Older
from qwen_l40s.planning.request import RunRequest
from qwen_l40s.spec.formats import GIB
from qwen_l40s.verdict import Verdict

ROOT = Path(__file__).resolve().parents[2]


def found(capsys, *argv, code=0):
    """The object that the command prints, which is all that it prints."""
    assert main(["estimate", *argv, "--json"]) == code
    (line,) = capsys.readouterr().out.splitlines()
    return json.loads(line)


def printed(capsys, *argv, code=0):
    assert main(["estimate", *argv]) == code
    return " ".join(capsys.readouterr().out.split())


def refused(capsys, *argv):
    """The one sentence of an error."""
    try:
        code = main(["estimate", *argv])
    except SystemExit as ended:  # of the parser
        code = ended.code
    assert code == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith("qwen-l40s: error: ")
    return line


def request(*argv):
    return request_of(build_parser(["estimate"]).parse_args(["estimate", *argv]))


# --- answers and exit codes


def test_the_command_of_the_issue(capsys):
    argv = "--card L40S --family qwen-image --precision bf16 --size 1328x1328 --modulation off-card"
    output = found(capsys, *argv.split(), "--batch", "1", "--references", "0", "--steps", "20")
    sampling = output["phases"]["sampling"]
    assert sampling["parts"]["weights"] == pytest.approx(25.4, abs=0.02)
    assert sampling["peak_gib"] < 27 and sampling["parts"]["resident"]["text encoder"] > 14
    assert (output["basis"], output["fits"], output["verdict"]) == ("predicted", True, "fits")


@pytest.mark.parametrize(
    ("argv", "code", "verdict", "says"),
    [
        ("--card L40S", 0, "fits", "Fits"),
        ("--card L40S --vram 43", 0, "fits", "Tight"),
        ("--card RTX-4060", 4, "runs slowly", "Fits with offloading"),
        ("--card L40S --size 3072x3072 --precision bf16 --tiles 1", 4, "runs slowly", "tiles 0"),
        ("--card RTX-4090 --precision int8 --ram 12", 1, "does not fit", "qwen-image-2.1"),
        ("--card RTX-4090 --ram 64", 0, "fits", "of 64.0 GiB of system RAM"),
        ("--card L40S --batch 64 --size 2048x2048", 1, "does not fit", "Does not fit"),
        ("--card L40S --vram 2", 1, "does not fit", "Does not fit"),
        ("--card L40S --size 12288x12288 --tiles 1", 1, "does not fit", "Does not fit"),
        ("--card H200", 0, "fits", "--price"),  # which has no price
        ("--card L40S --family qwen-image-2.1 --cards 2 --cfg off", 0, "fits", "One image on 2"),
    ],
)
def test_the_exit_code_is_the_verdict(capsys, tmp_path, argv, code, verdict, says):
    argv = [it.replace("RTX-", "RTX ") for it in argv.split()]
    if "tiles" in says:
        argv += ["--text-encoder-placement", "on card", "--text-encoder-precision", "bf16"]
    output = found(capsys, *argv, code=code)
    assert (output["verdict"], output["fits"]) == (verdict, code == 0)
    path = tmp_path / "no.png"
    assert says in printed(capsys, *argv, "--plot", str(path), code=code)
    image = pytest.importorskip("PIL.Image")
    with image.open(path) as picture:
        assert (picture.mode, picture.width) == ("RGB", 1280)


def test_models_that_stay_beside_it_take_their_memory(capsys):
    """A text encoder and a VAE that two families share are there once."""

    def taken(*others):
        argv = (word for other in others for word in ("--with", other))
        output = found(capsys, "--card", "H200", "--family", "qwen-image-2512", *argv)
        assert output["settings"]["with"] == list(others)
        return -output["headroom_gib"]

    alone = taken()
    edit, other = taken("qwen-image-edit-2511:int8"), taken("qwen-image-2.1:int8")
    family = find_member("qwen-image-2.1")
    transformer = weight_bytes(family.transformer, "int8").total
    encoder = 2 * (family.text_encoder.language + family.text_encoder.vision)
    shared = weight_bytes(find_member("qwen-image-edit-2511").transformer, "int8").total
    assert other - alone == pytest.approx((transformer + encoder + family.vae_bytes) / GIB, abs=0.1)
    assert edit - alone == pytest.approx(shared / GIB, abs=0.1)


# --- options

# What a choice needs to be allowed, and where the answer has it by another name.
BESIDE = {"lora_mode": ["--loras", "2"], "nag_tokens": ["--cfg", "off"]}
OTHER_NAMES = {
    "text_encoder_precision": "text_encoder",
    "text_encoder_placement": "text_encoder_place",
}


@pytest.mark.parametrize(
    "option", [it for it in OPTIONS if it.flag is not None], ids=lambda option: option.name
)
def test_every_choice_of_every_option_is_reached(capsys, option):
    flag = option.flag or f"--{option.name.replace('_', '-')}"
    values = option.choices or (option.least or 2, type(option.default)(3))
    for value in values:
        argv = [flag, str(value).replace(" ", "-"), *BESIDE.get(option.name, ())]
        if option.name in ("references", "layers"):
            model = {"references": "edit-2511", "layers": "layered"}[option.name]
            argv += ["--family", f"qwen-image-{model}"]
        assert main(["estimate", "--card", "H200", *argv, "--json"]) in (0, 4)
        output = json.loads(capsys.readouterr().out)
        chosen = {**output["settings"], "family": output["family"]}
        loras = chosen["loras"]
        chosen |= {f"lora_{name}": it for name, it in loras.items()} | {"loras": loras["count"]}
        got = chosen.get(OTHER_NAMES.get(option.name, option.name))
        if option.name == "schedule":
            assert value in ("official", "beta") or chosen["steps"] <= 8 or chosen["cfg"] == "off"
        elif value not in ("auto", "fast") or option.name == "cache":
            expected = type(got)(value)
            assert got >= expected if option.name == "tiles" else got == expected


def test_sizes_schedules_and_the_likely_model():
    assert request() == RunRequest(steps=50)
    assert request("--size", "1664x928") == RunRequest(steps=50, width=1664, height=928)
    assert request("--controlnet", "3.5").controlnet_bytes == 7 * GIB // 2
    assert request("--schedule", "official") == request()
    few = request("--schedule", "viggle-6", "--size", "1024x1024")
    assert (few.family, few.steps, few.cfg) == ("qwen-image-2.1", 6, "off")
    assert request("--schedule", "lightning 4") == request("--steps", "4", "--cfg", "1")
    edit = request("--schedule", "lightning 8", "--references", "1")
    assert (edit.family, edit.steps) == ("qwen-image-edit-2511", 8)
    assert request("--schedule", "turbo 8", "--cfg", "3").passes == 2
    assert request("--layers", "4").family == "qwen-image-layered"


def test_older_flags_mean_what_they_meant(monkeypatch, capsys):
    older = Older("tables", {"on": "off card", "off": "on card"}, flag="--tables")
    monkeypatch.setitem(OLDER, "modulation", older)
    monkeypatch.setitem(OLDER, "lora_mode", Older("how", {"beside": "bypass"}))
    asked = request("--tables", "on", "--loras", "2", "--lora-mode", "beside")
    assert (asked.modulation, asked.loras.mode) == ("off card", "bypass")
    assert request("--tables", "off", "--modulation", "on card").modulation == "on card"
    for argv in (["--tables", "maybe"], ["--tables", "on", "--modulation", "on-card"]):
        with pytest.raises(SettingError, match="modulation"):
            request(*argv)
    with pytest.raises(SystemExit):
        main(["estimate", "--help"])
    shown = capsys.readouterr().out
    assert "--modulation" in shown and "--tables" not in shown


def test_guidance_is_a_scale_or_a_mode():
    for text in ("4", "2.5", "0", "two passes"):
        assert request("--cfg", text).cfg == "two passes"
    for text in ("1.0", "off"):
        assert request("--cfg", text).cfg == "off"
    assert request("--cfg", "one-pass").cfg == "one pass"


BAD = """
L40SS: --card L40SS
--list-cards: --card toaster
qwen-image-layered: --family flux
int8: --precision fp4
fp8: --card RTX-3090 --precision fp8
992x992: --size 1000x1000
--size: --size big
width: --size 0x16
--size: --size 99999999x16
tokens: --size 99984x99984
qwen-image-edit-2511: --family qwen-image --references 1
modulation: --modulation on
text_encoder_placement: --text-encoder-placement moon
--ram: --ram 0
cache: --cache taylor
schedule: --schedule karras
steps: --schedule pruna-8 --steps 5
pai 4: --schedule pai-4 --family qwen-image-2512
--cfg: --cfg much
--cfg: --cfg nan
--cfg: --cfg -1
batch: --batch 0
controlnet_gib: --controlnet -2
controlnet_gib: --controlnet inf
usd_per_hour: --price -1
usd_per_hour: --price nan
usd_per_hour: --price inf
--vram: --vram 100
--vram: --vram 0
--vram: --vram nan
nowhere: --model nowhere
nowhere.json: --cards nowhere.json
.png: --plot x.jpg
no/such/folder: --plot no/such/folder/x.png
--with: --with qwen-image-2.1
qwen-image-3: --with qwen-image-3:int8
int4: --with qwen-image-2.1:int4
"""


@pytest.mark.parametrize("line", BAD.strip().splitlines())
def test_bad_input_is_one_sentence_that_names_it(capsys, line):
    named, _, argv = line.partition(": ")
    argv = [it.replace("RTX-", "RTX ") for it in argv.split()]
    argv = argv if argv[0] == "--card" else ["--card", "L40S", *argv]
    assert named in refused(capsys, *argv)


# --- cards


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


@pytest.fixture
def machine(monkeypatch):
    def has(*cards, no_int8=""):
        known = InstalledCards(cards, why=Verdict("no NVIDIA driver answers"))
        monkeypatch.setattr("qwen_l40s.machine.card.read_cards", lambda torch: known)
        monkeypatch.setattr("qwen_l40s.optimizations.linear.why_not_int8", lambda device: no_int8)

    return has


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
