"""`qwen-l40s generate` from arguments to files, with a toy folder and a real-width one."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file
from waiting import SECONDS

from qwen_l40s.cli import main
from qwen_l40s.cli.generate import side_of
from qwen_l40s.cli.output import ImageTarget
from qwen_l40s.files import write_whole

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def generate(tiny_folder, tmp_path, monkeypatch):
    """Runs the command in an empty folder with the toy model; returns the exit code."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, model: Path = tiny_folder, plain: bool = False) -> int:
        fixed = ["--prompt", "a red star", "--size", "64x48", "--steps", "2", "--device", "cpu"]
        fixed += [] if plain else ["--json"]
        return main(["generate", "--model", str(model), *fixed, *arguments])

    return run


def last_line(capsys: pytest.CaptureFixture) -> dict:
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


def test_the_side_is_the_one_that_the_model_is_trained_at(tmp_path):
    for pipeline, side in (("QwenImagePipeline", 1328), ("QwenImage21Pipeline", 2048)):
        text = json.dumps({"_class_name": pipeline})
        (tmp_path / "model_index.json").write_text(text, encoding="utf-8")
        assert side_of(tmp_path) == side
    assert side_of(tmp_path / "missing") == 1328  # an error of the loader's
    for name in ("micro", "micro_21"):
        copied = shutil.copytree(ROOT / "models" / name, tmp_path / name)
        assert side_of(ROOT / "models" / name) == side_of(copied) == 256


# --- what it writes ---


def test_image_and_report(generate, tmp_path, capsys, tiny_folder):
    assert generate("--seed", "5", "--precision", "fp32", "--output", "star.png") == 0
    report = last_line(capsys)
    assert report["prompt"] == "a red star"
    assert report["image"] == "star.png"
    assert report["images"] == ["star.png"]
    assert (report["width"], report["height"], report["steps"], report["seed"]) == (64, 48, 2, 5)
    assert (report["device"], report["precision"], report["precision_reason"]) == (
        "cpu",
        "fp32",
        "requested",
    )
    assert report["offload"] == "none"
    assert report["offload_reason"] == "everything runs on the CPU"
    assert report["seconds"] > 0 and report["load_seconds"] > 0
    assert os.listdir(tmp_path) == ["star.png"]
    with Image.open("star.png") as image:
        assert (image.format, image.mode, image.size) == ("PNG", "RGB", (64, 48))
        metadata = json.loads(image.text["qwen_l40s"])
    assert metadata["model"] == tiny_folder.name
    assert metadata["versions"].keys() == {"qwen_l40s", "torch", "diffusers", "transformers"}


def test_it_ends_in_one_sentence(generate, capsys):
    assert generate("--batch", "2", "--grid", "sheet.png", plain=True) == 0
    sentence = r"saved image_00001.png, image_00002.png, sheet.png in \d+\.\d s\n"
    assert re.fullmatch(sentence, capsys.readouterr().out)


def test_settings_in_the_image_make_it_again(generate, capsys):
    prompt = 'красная звезда "★"'
    assert generate("--batch", "2", "--output", "a.png", "--prompt", prompt) == 0
    with Image.open("a_00002.png") as image:
        first = np.asarray(image).astype(int)
        metadata = json.loads(image.text["qwen_l40s"])
    assert metadata["prompt"] == prompt
    assert (metadata["seed"], metadata["batch"]) == (1, 1)
    arguments = ["--seed", str(metadata["seed"]), "--prompt", metadata["prompt"]]
    assert generate(*arguments, "--output", "b.png") == 0
    with Image.open("b.png") as image:
        assert np.abs(np.asarray(image) - first).max() <= 1


def test_step_cache_is_told_in_the_report_and_in_the_image(generate, capsys, caplog):
    assert generate("--steps", "20", "--cache", "fast", "--output", "a.png") == 0
    report = last_line(capsys)
    told = report["step_cache"]
    assert told.keys() == {"computed", "skipped", "missed", "distance", "seconds_saved"}
    assert told["skipped"] and told["computed"] + len(told["skipped"]) == 20
    assert min(told["missed"]) > 0 and told["distance"] > 0 and told["seconds_saved"] > 0
    assert report["ran"][0] == "diffusers' code"
    assert f"step cache: fast computes {told['computed']} of 20 steps" in report["ran"][1]
    with Image.open("a.png") as image:
        metadata = json.loads(image.text["qwen_l40s"])
    for name in ("cache", "step_cache", "ran"):
        assert metadata[name] == report[name]
    assert not caplog.records
    assert generate("--cache", "fast") == 0
    report = last_line(capsys)
    [line] = caplog.messages
    assert line.startswith("step cache: fast has no effect: runs of 10 steps or fewer")
    assert report["ran"][1:] == [line]
    assert report["step_cache"]["computed"] == 2 and report["step_cache"]["distance"] is None
    assert generate() == 0
    report = last_line(capsys)
    assert (report["cache"], report["ran"]) == ("off", ["diffusers' code"])
    assert "step_cache" not in report


def test_width_and_height_replace_those_of_size(generate):
    assert generate("--width", "32", "--height", "80", "--output", "a.png") == 0
    with Image.open("a.png") as image:
        assert image.size == (32, 80)


def test_without_output_nothing_is_overwritten(generate, tmp_path, capsys):
    (tmp_path / "image_00002.png").write_bytes(b"mine")
    assert generate("--batch", "2") == 0
    assert last_line(capsys)["images"] == ["image_00001.png", "image_00003.png"]
    assert (tmp_path / "image_00002.png").read_bytes() == b"mine"


def test_file_that_was_named_is_replaced(tmp_path):
    (tmp_path / "a.png").write_bytes(b"old")
    assert ImageTarget(str(tmp_path / "a.png")).paths(1) == [tmp_path / "a.png"]
    assert ImageTarget(str(tmp_path / "B.PNG")).paths(1) == [tmp_path / "B.PNG"]
    write_whole(tmp_path / "a.png", b"new")
    assert (tmp_path / "a.png").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a.png"]


def test_grid_holds_every_image_of_the_batch(generate, capsys):
    assert generate("--batch", "3", "--grid", "sheet.png", "--output", "a.png") == 0
    assert last_line(capsys)["grid"] == "sheet.png"
    with Image.open("sheet.png") as sheet:
        pixels = np.asarray(sheet)
    for i in range(3):
        with Image.open(f"a_0000{i + 1}.png") as image:
            windows = np.lib.stride_tricks.sliding_window_view(pixels[..., 0], (48, 64))
            assert (windows == np.asarray(image)[..., 0]).all(axis=(2, 3)).any()


# --- bad input ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--size", "65x48"), "width must be"),
        (("--steps", "0"), "steps must be"),
        (("--batch", "0"), "batch must be"),
        (("--seed", "-1"), "seed must be"),
        (("--cfg", "nan"), "cfg must be"),
        (("--precision", "fp9"), "precision 'fp9' is unknown"),
        (("--precision", "fp8"), "precision 'fp8'"),
        (("--device", "tpu"), "device 'tpu' is unknown"),
        (("--cache", "tea"), "no step cache 'tea': choose off, faithful, balanced, fast"),
        (("--schedule", "karras"), "schedule 'karras' is unknown: choose official, lightning 4"),
        (("--schedule", "viggle-6"), "'viggle 6' is of Qwen-Image-2.1"),
        (("--schedule", "lightning-4", "--steps", "3"), "steps is 3, but the schedule 'lightning"),
        (("--offload", "disk"), "offload 'disk' is unknown: choose auto, none, model"),
        (("--model", "nowhere"), "not a diffusers folder"),
        (("--output", "a.jpg"), "must end in .png"),
        (("--grid", "a.pdf"), "must end in .png"),
        (("--output", "nowhere/a.png"), "(nowhere)"),
        (("--grid", "nowhere/a.png"), "(nowhere)"),
        (("--output", f"{'猫' * 100}.png"), "File name too long"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    generate, tmp_path, capsys, arguments, message
):
    assert generate(*arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("qwen-l40s: error: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert os.listdir(tmp_path) == []


def test_incomplete_text_encoder_is_one_sentence_too(
    generate, tiny_folder, tmp_path, capsys, caplog
):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    path = folder / "text_encoder" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    assert generate(model=folder) == 2
    assert "text encoder lacks the tensor" in capsys.readouterr().err.splitlines()[-1]
    assert not caplog.records


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *((("--size", size), "must be WIDTHxHEIGHT") for size in ("64", "64x", "64x-48", "axb")),
        (("--steps", "many"), "--steps: invalid int value: 'many'"),
        (("--stepz",), "unrecognized arguments: --stepz"),
        (("a second prompt",), "not allowed with argument --prompt"),
    ],
)
def test_wrong_argument_is_one_sentence_that_names_the_help(generate, capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_info:
        generate(*arguments)
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("qwen-l40s: error: ") and error.count("\n") == 1
    assert message in error
    assert error.endswith("see `qwen-l40s generate --help`.\n")


@pytest.mark.parametrize(
    ("size", "expected"), [((), (32, 32)), (("--width", "64"), (64, 32))], ids=["none", "width"]
)
def test_micro_has_its_own_size(tiny_folder, tmp_path, monkeypatch, capsys, size, expected):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("qwen_l40s.cli.generate.bundled_micro_folder", lambda _: tiny_folder)
    monkeypatch.setattr("qwen_l40s.cli.generate.MICRO_SIDE", 32)
    fixed = ["a star", "--json", "--model", str(tiny_folder), "--steps", "1", "--device", "cpu"]
    assert main(["generate", *fixed, *size]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert (report["prompt"], report["width"], report["height"]) == ("a star", *expected)
    assert ("micro is trained at 256x256" in captured.err) is (expected != (32, 32))


def test_place_to_write_is_checked_before_the_model_is_read(generate, tmp_path, capsys):
    assert generate("--output", "nowhere/a.png", model=tmp_path) == 2
    assert "(nowhere)" in capsys.readouterr().err


def test_missing_package_says_what_to_install(generate, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    assert generate() == 2
    message = capsys.readouterr().err
    assert "needs diffusers" in message
    assert 'pip install ".[standalone]"' in message


@pytest.mark.parametrize(("name", "word"), [("generate", "--negative-prompt"), ("demo", "256x256")])
def test_help_needs_no_package_at_all(name, word):
    command = [sys.executable, "-S", str(ROOT), name, "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert result.returncode == 0, result.stderr
    assert word in result.stdout


# --- a disk that fills up, a run that is stopped ---


@pytest.mark.slow
def test_failed_write_keeps_the_old_file_and_leaves_no_part(tiny_folder, tmp_path):
    (tmp_path / "a.png").write_bytes(b"old")
    command = [sys.executable, "-B", str(ROOT), "generate", "--model", str(tiny_folder)]
    options = [
        "--prompt",
        "x",
        "--size",
        "128x128",
        "--steps",
        "1",
        "--cfg",
        "1",
        "--device",
        "cpu",
        "--output",
    ]

    def small_files():
        """No file of the command may grow beyond 4 kB: its write fails half way, as on a full disk.
        Not in this process, whose own output may be a file."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    done = subprocess.run(
        [*command, *options, str(tmp_path / "a.png")],
        capture_output=True,
        text=True,
        preexec_fn=small_files,
    )
    assert done.returncode == 2
    assert re.search(r"cannot write .*a\.png", done.stderr)
    assert (tmp_path / "a.png").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.png"]


@pytest.fixture
def full_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    command = [mount, "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(disk)]
    if not mount or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_disk_that_fills_while_the_image_is_written(generate, full_disk, capsys):
    assert generate("--size", "128x128", "--output", str(full_disk / "a.png")) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert os.listdir(full_disk) == []


@pytest.mark.slow
def test_ctrl_c_while_sampling(tiny_folder, tmp_path):
    arguments = [
        "--model",
        str(tiny_folder),
        *["--prompt", "x", "--size", "64x64", "--steps", "100000"],
    ]
    with subprocess.Popen(
        [sys.executable, str(ROOT), "generate", *arguments],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell that runs the tests in the background has them ignore Ctrl-C.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler),
    ) as process:
        seen = b""
        while b"/100000" not in seen:  # the sampler's progress bar
            chunk = process.stderr.read1()
            assert chunk, seen.decode()
            seen += chunk
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert err.endswith(b"qwen-l40s: stopped\n")
    assert out == b""
    assert os.listdir(tmp_path) == []


# --- the real widths ---


@pytest.mark.slow
def test_folder_of_the_real_widths_goes_through_the_same_command(
    write_real_width_folder, generate, tmp_path, capsys
):
    folder = write_real_width_folder(tmp_path / "qwen-image")
    try:
        assert len(list(folder.glob("transformer/*-of-00003.safetensors"))) == 3
        arguments = ["--size", "64x64", "--precision", "bf16", "--output", "a.png"]
        assert generate(*arguments, model=folder) == 0
    finally:
        shutil.rmtree(folder)
    assert last_line(capsys)["precision"] == "bf16"
    with Image.open("a.png") as image:
        assert np.asarray(image).std() > 5
