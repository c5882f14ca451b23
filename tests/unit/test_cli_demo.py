"""`qwen-l40s demo`: plumbing with a toy folder, and the bundled model with its real bar."""

import json
import os
import re
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from qwen_l40s.cli import main

DEFAULT_PROMPT = "a small red star at the top left on a blue background"


@pytest.fixture
def in_tmp(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def toy_demo(in_tmp, tiny_folder, monkeypatch):
    return demo_of(monkeypatch, tiny_folder)


def demo_of(monkeypatch, folder):
    monkeypatch.setattr("qwen_l40s.cli.demo.bundled_micro_folder", lambda _: folder)

    def run(*arguments: str, plain: bool = False) -> int:
        fixed = ["--steps", "1", "--cfg", "1", "--device", "cpu", *([] if plain else ["--json"])]
        return main(["demo", *fixed, *arguments])

    return run


def report(capsys: pytest.CaptureFixture) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_bundled_model_paints_what_the_default_prompt_says(in_tmp, capsys):
    assert main(["demo", "--json", "--output", "demo.png", "--device", "cpu"]) == 0
    line = report(capsys)
    assert line["prompt"] == DEFAULT_PROMPT
    assert line["image"] == "demo.png"
    assert (line["steps"], line["device"], line["precision"]) == (20, "cpu", "fp32")
    assert line["adherence"]["score"] == 1.0
    assert os.listdir(in_tmp) == ["demo.png"]
    with Image.open("demo.png") as image:
        assert image.size == (256, 256)
        assert json.loads(image.text["qwen_l40s"])["prompt"] == DEFAULT_PROMPT


def test_it_ends_in_its_prompt_and_one_sentence(toy_demo, capsys):
    saved = r"prompt: {}\nsaved demo_0000{}\.png in \d+\.\d s{}\n"
    assert toy_demo(plain=True) == 0
    more = r"; \d+% of the prompt is in the image"
    assert re.fullmatch(saved.format(DEFAULT_PROMPT, 1, more), capsys.readouterr().out)
    outside = "a cat reading a newspaper"  # of the grammar
    assert toy_demo(outside, plain=True) == 0
    assert re.fullmatch(saved.format(outside, 2, ""), capsys.readouterr().out)


@pytest.mark.slow
def test_the_other_family_is_painted_by_its_own_pipeline(in_tmp, monkeypatch, capsys):
    """Untrained; pixel for pixel what diffusers' pipeline paints from the same noise."""
    from micro_models import build_21

    from qwen_l40s.hosts.diffusers.load import load_pipeline

    build_21().save(in_tmp / "model")
    demo = demo_of(monkeypatch, in_tmp / "model")
    assert demo("--family", "2.1", "--steps", "2", "--cfg", "3", "--output", "a.png") == 0
    line = report(capsys)
    assert line["ran"] == ["diffusers' code"] and line["adherence"]["score"] < 1
    pipeline = load_pipeline(in_tmp / "model", device="cpu", precision="fp32").to_diffusers()
    [image] = pipeline(
        DEFAULT_PROMPT,
        negative_prompt=" ",
        true_cfg_scale=3.0,
        num_inference_steps=2,
        height=256,
        width=256,
        generator=[torch.Generator().manual_seed(0)],
    ).images
    plain = np.asarray(image)
    assert np.array_equal(np.asarray(Image.open("a.png")), plain)

    fast = ("--optimize", "--family", "2.1", "--steps", "2", "--cfg", "3", "--output", "b.png")
    assert demo(*fast) == 0
    assert report(capsys)["optimized"]
    difference = np.asarray(Image.open("b.png")).astype(int) - plain
    assert abs(difference).max() <= 2 and plain.std() > 1

    generate = ["generate", "a star", "--model", "model", "--steps", "1", "--device", "cpu"]
    assert main([*generate, "--size", "256x272"]) == 2
    assert "must be divisible by 32 in QwenImage21Pipeline" in capsys.readouterr().err
    (in_tmp / "model" / "processor" / "preprocessor_config.json").unlink()
    assert main([*generate, "--size", "256x256"]) == 2
    assert "The processor cannot be read" in capsys.readouterr().err


def test_a_copy_without_the_other_family_says_so(in_tmp, monkeypatch, capsys):
    assert demo_of(monkeypatch, in_tmp / "models" / "micro_21")("--family", "2.1") == 2
    message = capsys.readouterr().err
    assert (
        "The micro model of 2.1 is missing in this copy of the package: choose another" in message
    )
    assert "micro_21" in message and message.count("\n") == 1
    assert os.listdir(in_tmp) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps", "0"), "steps must be"),
        (("--precision", "int8"), "precision 'int8' is unknown"),
        (("--output", "demo.gif"), "must end in .png"),
        (("--grid", "sheet.html"), "must end in .png"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(toy_demo, in_tmp, capsys, arguments, message):
    assert toy_demo(*arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert os.listdir(in_tmp) == []


def test_missing_package_says_what_to_install(toy_demo, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert toy_demo() == 2
    message = capsys.readouterr().err
    assert 'pip install ".[standalone]"' in message
    assert "make demo" in message
