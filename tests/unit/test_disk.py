"""What a run takes of a disk, beside what is published."""

import json
import math
import struct

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from qwen_l40s.families.qwen_image import QwenImageShape
from qwen_l40s.loaders.sizes import read_sizes
from qwen_l40s.planning.bytes import weight_bytes
from qwen_l40s.planning.files import model_files
from qwen_l40s.planning.phases import transformer_bytes
from qwen_l40s.planning.request import Loras, Parts, RunRequest, Setting
from qwen_l40s.spec.formats import GB, MULTIPLIED

SMALL = QwenImageShape(
    blocks=2, dim=256, heads=2, head_dim=128, joint_dim=64, in_channels=64, packed_out_channels=64
)
# Comfy-Org's single files, and Qwen/Qwen-Image itself as a diffusers folder.
PUBLISHED = {
    "qwen_image_bf16.safetensors": 40.9 * GB,
    "qwen_2.5_vl_7b.safetensors": 16.6 * GB,
    "qwen_image_vae.safetensors": 0.254 * GB,
    "Qwen/Qwen-Image, a diffusers folder": 57.7 * GB,
}


def test_counted_files_are_the_published_ones():
    files = model_files(RunRequest(), Setting())
    assert files["qwen-image transformer"] == pytest.approx(
        PUBLISHED["qwen_image_bf16.safetensors"], rel=0.002
    )
    assert files["text encoder"] == pytest.approx(
        PUBLISHED["qwen_2.5_vl_7b.safetensors"], rel=0.002
    )
    assert files["VAE"] == pytest.approx(PUBLISHED["qwen_image_vae.safetensors"], rel=0.002)
    assert sum(files.values()) == pytest.approx(
        PUBLISHED["Qwen/Qwen-Image, a diffusers folder"], rel=0.002
    )


@hypothesis_settings(max_examples=50, deadline=None)
@given(
    precision=st.sampled_from(MULTIPLIED),
    count=st.integers(0, 4),
    rank=st.integers(1, 128),
    controlnet=st.integers(0, 4 * GB),
)
def test_parts_add_up(precision, count, rank, controlnet):
    request = RunRequest(loras=Loras(count, rank), controlnet_bytes=controlnet)
    found = model_files(request, Setting(precision))
    assert min(found.values()) > 0
    assert ("LoRAs" in found) == (count > 0)
    assert found.get("ControlNet", 0) == controlnet
    more = RunRequest(loras=Loras(count + 1, rank), controlnet_bytes=controlnet)
    again = model_files(more, Setting(precision))
    assert sum(again.values()) > sum(found.values())


def test_true_sizes_stand_above_published_ones():
    parts = Parts(transformer_bytes=20 * GB, text_encoder_bytes=9 * GB, vae_bytes=GB)
    files = model_files(RunRequest(parts=parts), Setting("fp8"))
    assert files == {"qwen-image transformer": 20 * GB, "text encoder": 9 * GB, "VAE": GB}


def test_files_are_as_stored_whatever_is_held():
    stored = (("transformer", 82 * GB), ("text encoder", 33 * GB), ("VAE", GB // 2))
    parts = Parts(text_encoder_bytes=16 * GB, vae_bytes=GB // 4, file_bytes=stored)
    expected = {"qwen-image transformer": 82 * GB, "text encoder": 33 * GB, "VAE": GB // 2}
    for setting in (Setting(), Setting("int8")):
        assert model_files(RunRequest(parts=parts), setting) == expected


@pytest.mark.parametrize(("dtype", "width"), [("F32", 4), ("F16", 2), ("BF16", 2)])
def test_a_file_takes_what_its_header_says(tmp_path, dtype, width):
    header, end = {}, 0
    for name, shape in SMALL.tensors().items():
        count = width * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + count]}
        end += count
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    for requested in ("auto", "int8"):
        precision, _, parts = read_sizes(path).settled(requested, "auto")
        setting = Setting("bf16" if precision == "auto" else precision)
        request = RunRequest(parts=parts)
        assert model_files(request, setting)["qwen-image transformer"] == end
        # And what is held is as the loaders round it.
        held = transformer_bytes(request, setting).total
        assert held == weight_bytes(SMALL, setting.precision).total
