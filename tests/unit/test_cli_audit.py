"""`qwen-l40s audit`: what it measures and prints, and what it refuses."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from qwen_l40s.cli import main
from qwen_l40s.loaders.quantize import layers_to_quantize

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parents[2]
MICRO = ROOT / "models" / "micro"
WEIGHTS = MICRO / "transformer" / "diffusion_pytorch_model.safetensors"
QUICK = ("--steps", "2", "--size", "64x64", "--device", "cpu")
PROMPT = "a large green circle at the bottom right on a white background"


def audit(*arguments):
    return main(["audit", *map(str, arguments)])


def printed(capsys):
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def layers():
    names = [name.removesuffix(".weight") for name in load_file(WEIGHTS)]
    return layers_to_quantize(names)


# --- with images


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report of two prompts on the micro model in fp8, its table, and the folder of images."""
    folder = tmp_path_factory.mktemp("audit")
    prompts = folder / "prompts.txt"
    prompts.write_text("\na red star\n  " + PROMPT + "\n\n", encoding="utf-8")
    command = [sys.executable, ROOT, "audit", MICRO, "--prompts", prompts, *QUICK]
    done = subprocess.run(
        [*command, "--output", folder], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    *table, line = done.stdout.splitlines()
    return json.loads(line), "\n".join(table), folder


@pytest.mark.slow
def test_every_layer_is_reported_worst_first(report, layers):
    found, _, _ = report
    assert (found["precision"], found["device"]) == ("fp8", "cpu")
    assert {entry["layer"] for entry in found["layers"]} == layers
    errors = [entry["error"] for entry in found["layers"]]
    assert errors == sorted(errors, reverse=True)
    assert 0.015 < min(errors) <= max(errors) < 0.1
    assert all(entry["outlier"] > 1 for entry in found["layers"])
    assert found["bytes_of_all"] == sum(entry["bytes"] for entry in found["layers"])
    assert found["summed_error"] == pytest.approx(sum(e * e for e in errors) ** 0.5, rel=1e-3)


@pytest.mark.slow
def test_the_proposal_halves_the_error_and_its_patterns_say_so(report, layers):
    found, _, _ = report
    keep = found["keep"]
    assert 0.35 * found["summed_error"] < keep["error"] <= 0.5 * found["summed_error"] * 1.001
    assert layers_to_quantize(layers, keep["patterns"]) == layers - set(keep["layers"])
    sizes = {entry["layer"]: entry["bytes"] for entry in found["layers"]}
    assert keep["bytes"] == sum(sizes[layer] for layer in keep["layers"])
    # Of layers with equal errors it would take three quarters.
    assert keep["bytes"] < 0.6 * found["bytes_of_all"]


@pytest.mark.slow
def test_images_are_compared_and_written_side_by_side(report):
    found, _, folder = report
    assert [entry["prompt"] for entry in found["images"]] == ["a red star", PROMPT]
    for entry in found["images"]:
        assert 15 < entry["psnr"] < 70
        with Image.open(entry["image"]) as image:
            pixels = np.asarray(image)
        assert Path(entry["image"]).parent == folder
        left, right = pixels[12:76, 12:76], pixels[12:76, 88:152]
        difference = left.astype(float) - right
        assert 10 * np.log10(255**2 / np.mean(difference**2)) == pytest.approx(
            entry["psnr"], abs=0.01
        )
    assert found["settings"] == {
        "negative_prompt": " ",
        "width": 64,
        "height": 64,
        "steps": 2,
        "cfg": 4.0,
        "seed": 0,
        "batch": 1,
        "cache": "off",
        "schedule": None,
    }


@pytest.mark.slow
def test_lpips_is_measured_or_says_what_is_missing(report):
    found, table, _ = report
    measured = [entry["lpips"] for entry in found["images"]]
    assert measured == [None, None] or all(value > 0 for value in measured)
    if measured == [None, None]:
        assert found["lpips_by"].startswith("not measured: ")
        assert f"LPIPS was {found['lpips_by']}" in table


def test_what_is_kept_is_bf16_and_not_reported(capsys):
    keep = ["*.img_mlp.*", "*.txt_mlp.*", "*.attn.to_*", "*.attn.add_[qk]*"]
    assert audit("--keep", *keep, "--prompt", PROMPT, "--json", "--precision", "int8", *QUICK) == 0
    found = json.loads(printed(capsys))
    assert found["kept"] == keep
    assert len(found["layers"]) == 6
    assert all(entry["layer"].endswith("attn.add_v_proj") for entry in found["layers"])
    assert found["images"][0]["psnr"] is None or found["images"][0]["psnr"] > 30
    assert "image" not in found["images"][0]
    assert found["model"] == str(MICRO)


# --- what is refused


def refused(capsys, *arguments):
    assert audit(*arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert len(output.err.splitlines()) == 1
    return output.err


def test_models_that_cannot_be_audited(tmp_path, capsys):
    prompt = ("--prompt", PROMPT)
    refused(capsys, tmp_path / "no", *prompt)
    refused(capsys, WEIGHTS, *prompt)
    folder = shutil.copytree(MICRO, tmp_path / "folder")
    weights = folder / "transformer" / WEIGHTS.name
    assert (
        main(["quantize", str(MICRO), str(tmp_path / "int8.safetensors"), "--precision", "int8"])
        == 0
    )
    capsys.readouterr()
    shutil.copy(tmp_path / "int8.safetensors", weights)
    assert "use the unquantized folder" in refused(capsys, folder, *prompt)
    tensors = load_file(WEIGHTS)
    del tensors["proj_out.weight"]
    save_file(tensors, weights)
    assert "proj_out.weight" in refused(capsys, folder, *prompt)


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (("--precision", "bf16"), "precision 'bf16' is unknown: choose fp8 or int8"),
        (("--size", "100x64"), "divisible by 16, at least 16, got 100: use 96"),
        (("--steps", "0"), "steps must be a whole number of at least 1"),
        (("--seed", "-1"), "seed must be a whole number"),
        (("--device", "tpu"), "device 'tpu' is unknown"),
        (("--keep", "blocks.*", *QUICK), "'blocks.*' matches no"),
        (("--keep", "*", *QUICK), "leaves no layer to quantize"),
        ((MICRO,), "there is no prompt"),
    ],
)
def test_arguments(capsys, arguments, rule):
    assert rule in refused(capsys, *arguments)


def test_prompt_files_and_places_to_write(tmp_path, capsys):
    empty = tmp_path / "empty.txt"
    empty.write_text("\n \n")
    assert "without a prompt: write one on each line" in refused(capsys, "--prompts", empty)
    assert "cannot be read (No such file" in refused(capsys, "--prompts", tmp_path / "no.txt")
    empty.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read (not UTF-8)" in refused(capsys, "--prompts", empty)
    sentence = refused(capsys, "--output", tmp_path / "no")
    assert "cannot write" in sentence and "create the folder" in sentence
    assert "cannot write" in refused(capsys, "--output", empty)
