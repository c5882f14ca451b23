"""What a run takes of a disk, beside what is published and what guides advise."""

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from qwen_l40s.planning.disk import GB, against_guides, disk
from qwen_l40s.planning.memory import GIB
from qwen_l40s.planning.setting import HELD_PRECISIONS, Setting
from qwen_l40s.planning.wish import Loras, Parts, Wish

# Comfy-Org's single files, and Qwen/Qwen-Image itself as a diffusers folder.
PUBLISHED = {
    "qwen_image_bf16.safetensors": 40.9 * GB,
    "qwen_2.5_vl_7b.safetensors": 16.6 * GB,
    "qwen_image_vae.safetensors": 0.254 * GB,
    "Qwen/Qwen-Image, a diffusers folder": 57.7 * GB,
}


def test_counted_files_are_the_published_ones():
    files = disk(Wish(), Setting()).files
    assert files["qwen-image transformer, bf16"] == pytest.approx(
        PUBLISHED["qwen_image_bf16.safetensors"], rel=0.002
    )
    assert files["text encoder"] == pytest.approx(
        PUBLISHED["qwen_2.5_vl_7b.safetensors"], rel=0.002
    )
    assert files["VAE"] == pytest.approx(PUBLISHED["qwen_image_vae.safetensors"], rel=0.002)
    assert sum(files.values()) == pytest.approx(
        PUBLISHED["Qwen/Qwen-Image, a diffusers folder"], rel=0.002
    )


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_a_quantized_file_takes_two_thirds_and_its_source_once(precision):
    on_load = disk(Wish(), Setting(precision))
    assert on_load.files == disk(Wish(), Setting()).files and not on_load.once
    written = disk(Wish(), Setting(precision), quantized_file=True)
    name = f"qwen-image transformer, {precision}, written once"
    assert written.files[name] == pytest.approx(27.3 * GB, rel=0.002)
    assert sum(written.once.values()) == pytest.approx(40.9 * GB, rel=0.002)
    assert written.most_bytes == written.total_bytes + sum(written.once.values())


@hypothesis_settings(max_examples=50, deadline=None)
@given(
    precision=st.sampled_from(HELD_PRECISIONS),
    quantized_file=st.booleans(),
    count=st.integers(0, 4),
    rank=st.integers(1, 128),
    controlnet=st.integers(0, 4 * GB),
)
def test_parts_add_up(precision, quantized_file, count, rank, controlnet):
    wish = Wish(loras=Loras(count, rank), controlnet_bytes=controlnet)
    found = disk(wish, Setting(precision), quantized_file=quantized_file)
    parts = [*found.files.values(), *found.container.values()]
    assert min(parts) > 0
    assert found.total_bytes == sum(parts) == found.files_bytes + found.container_bytes
    assert ("LoRAs" in found.files) == (count > 0)
    assert found.files.get("ControlNet", 0) == controlnet
    more = Wish(loras=Loras(count + 1, rank), controlnet_bytes=controlnet)
    again = disk(more, Setting(precision), quantized_file=quantized_file)
    assert again.total_bytes > found.total_bytes


def test_true_sizes_stand_above_published_ones():
    parts = Parts(transformer_bytes=20 * GB, text_encoder_bytes=9 * GB, vae_bytes=GB)
    files = disk(Wish(parts=parts), Setting("fp8")).files
    assert files == {"qwen-image transformer": 20 * GB, "text encoder": 9 * GB, "VAE": GB}


def test_guides_advise_more_than_is_needed():
    peak = 42 * GIB
    for setting in (Setting("bf16"), Setting("int8")):
        for row in against_guides(disk(Wish(), setting), setting, peak):
            assert row.needed_bytes < row.advised_bytes + 2 * GB, row.what
            assert row.why
    volume = {row.what: row for row in against_guides(disk(Wish(), Setting()), Setting(), peak)}
    assert volume["volume"].needed_bytes == pytest.approx(57.7 * GB, rel=0.01)
