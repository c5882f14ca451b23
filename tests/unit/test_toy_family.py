"""A third family without a changed line of the package: what of it needs no ComfyUI."""

import json
from dataclasses import replace

import pytest
from toy_family import weights as toy
from toy_family.family import MEMBER, PUBLISHED, TITLE, TOY

from qwen_l40s.cli import main
from qwen_l40s.errors import SettingError
from qwen_l40s.families import registry
from qwen_l40s.loaders.checkpoint import inspect_checkpoint
from qwen_l40s.loaders.quantize import layers_to_quantize
from qwen_l40s.loaders.sizes import read_sizes
from qwen_l40s.loaders.source import check_complete, open_source
from qwen_l40s.planning.request import RunRequest


@pytest.fixture(autouse=True)
def registered():
    registry.FAMILIES.append(TOY)
    yield
    registry.FAMILIES.remove(TOY)


@pytest.fixture
def file(tmp_path):
    return toy.write(tmp_path / "toy_image.safetensors")


def test_it_is_recognized_by_its_header(file, tmp_path):
    (part,) = inspect_checkpoint(file).parts
    assert (part.family, part.role, part.blocks) == (TITLE, "transformer", 2)
    assert check_complete(open_source(file, "transformer")) == toy.SHAPE
    (lora,) = inspect_checkpoint(toy.write_lora(tmp_path / "lora.safetensors")).parts
    assert (lora.family, lora.dims["rank"], lora.blocks) == (f"LoRA for {TITLE}", 4, 2)


def test_q_k_and_v_of_one_layer_are_its_thirds_in_each_stream():
    whole = toy.SHAPE.block
    assert whole.thirds == (0, 1, 2) * 2 + (None,) * 6
    image_alone = replace(whole, places=(*whole.places[:3], "q", "k", "v", *whole.places[6:]))
    assert image_alone.thirds == (0, 1, 2) + (None,) * 9


def test_its_layers_are_quantized_and_written(file, tmp_path, capsys):
    layers = toy.SHAPE.quantizable_layers()
    assert layers_to_quantize([*layers, "modulation", "patch"]) == layers.keys()
    for precision in ("int8", "fp8"):
        written = tmp_path / f"{precision}.safetensors"
        asked = ["quantize", str(file), str(written), "--precision", precision]
        assert main([*asked, "--device", "cpu"]) == 0, capsys.readouterr().err
        capsys.readouterr()
        (part,) = inspect_checkpoint(written).parts
        assert part.family == TITLE and len(part.quantization.layers) == len(layers)
        assert check_complete(open_source(written, "transformer")) == toy.SHAPE


def test_it_is_estimated(file, capsys):
    asked = ["estimate", "--card", "L40S", "--json", "--steps", "8"]
    assert main([*asked, "--model", str(file)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["family"] == MEMBER.name
    assert read_sizes(file).family == MEMBER.name
    request = RunRequest(family=MEMBER.name, steps=None)
    assert request.transformer == PUBLISHED and request.steps == 8
    # Its text is among the rows that a step computes.
    assert request.step_tokens.image == request.text_tokens + request.painted_tokens
    with pytest.raises(SettingError, match="'toy-image' takes no reference image"):
        RunRequest(family=MEMBER.name, references=1)
