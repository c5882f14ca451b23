"""GGUF files: their headers beside gguf-py's reader, their blocks beside its values."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_files import Stored, gguf_of, header, random_blocks, text, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from qwen_l40s.cli import main
from qwen_l40s.errors import CheckpointError
from qwen_l40s.loaders.checkpoint import inspect_checkpoint
from qwen_l40s.loaders.gguf import BLOCK_TYPES, TYPES, read_gguf
from qwen_l40s.loaders.gguf_blocks import EXPANDED, BlockRows, map_gguf
from qwen_l40s.loaders.shards import read_shards
from qwen_l40s.loaders.sizes import read_sizes
from qwen_l40s.loaders.source import bundled_micro_folder
from qwen_l40s.planning.files import host_memory
from qwen_l40s.planning.phases import transformer_bytes
from qwen_l40s.planning.request import RunRequest, Setting

TRANSFORMER = bundled_micro_folder() / "transformer" / "diffusion_pytorch_model.safetensors"
TENSORS = {
    "a.weight": Stored("Q8_0", (4, 64), random_blocks("Q8_0", 8).tobytes()),
    "a.bias": Stored("F32", (5,), bytes(20)),
    "b.weight": Stored("Q4_K", (2, 256), random_blocks("Q4_K", 2).tobytes()),
}
WORDS = {"tokenizer.ggml.tokens": ["a", "", "word"], "general.file_type": 7}


@pytest.mark.parametrize("dtype", EXPANDED)
def test_blocks_have_the_values_of_gguf_py(dtype: str):
    blocks = random_blocks(dtype, 10_000)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType[dtype])
    rows = BlockRows(torch.from_numpy(blocks), dtype)
    found = rows.expand(rows.values).numpy()
    same = expected.view(np.uint32) == found.view(np.uint32)
    assert (same | (np.isnan(expected) & np.isnan(found))).all()


def test_types_are_those_of_gguf_py():
    named = {int(each): each.name for each in gguf.GGMLQuantizationType}
    assert TYPES.items() <= named.items()
    sizes = {each.name: size for each, size in gguf.GGML_QUANT_SIZES.items()}
    assert BLOCK_TYPES.items() <= sizes.items()


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [None, 8, 4096])
def test_a_header_is_read_as_gguf_py_reads_it(tmp_path: Path, version: int, alignment: int | None):
    more = {} if alignment is None else {"general.alignment": alignment}
    path = write_gguf(tmp_path / "a.gguf", TENSORS, WORDS | more, version)
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    assert ours.data_start == theirs.data_offset
    assert {
        name: (info.dtype, info.shape, ours.data_start + info.start, info.nbytes)
        for name, info in ours.tensors.items()
    } == {
        it.name: (it.tensor_type.name, tuple(it.shape.tolist()[::-1]), it.data_offset, it.n_bytes)
        for it in theirs.tensors
    }
    for name, entry in map_gguf(ours).items():
        raw = entry.values if isinstance(entry, BlockRows) else entry.view(torch.uint8)
        assert raw.numpy().tobytes() == TENSORS[name].data


COUNTS = struct.pack("<IQQ", 3, 1, 0)
INFO = text("a.weight") + struct.pack("<I", 2) + struct.pack("<QQ", 64, 4)
BROKEN = {
    "empty": (b"", "empty|truncated"),
    "cut in the header": (header(TENSORS, WORDS)[:-10], "truncated"),
    "no weights": (header(TENSORS, WORDS), "truncated \\(the tensor 'a.weight' ends at byte"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big endian"),
    "version 1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 of GGUF"),
    "2^60 tensors": (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "announces 1,152,921"),
    "2^20 texts and one": (
        b"GGUF" + struct.pack("<IQQQIIQ", 3, 0, 1, 0, 9, 8, 2**20 + 1) + bytes(2**23 + 8),
        "the lists have 1,048,577 texts",
    ),
    "2^60 entries": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "announces 1,152,921"),
    "2^60 words": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("w") + struct.pack("<IIQ", 9, 8, 2**60),
        "texts of w",
    ),
    "only words": (header({}, WORDS), "no tensors, only a vocabulary"),
    "an odd alignment": (
        header(TENSORS, {"general.alignment": 24}) + bytes(999),
        "not a power of two",
    ),
    "an entry twice": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + (text("a") + struct.pack("<II", 4, 1)) * 2,
        "holds 'a' twice",
    ),
    "a type that is not read": (
        b"GGUF" + COUNTS + INFO + struct.pack("<IQ", 20, 0) + bytes(999),
        "is of the GGUF type IQ4_NL, which cannot be read",
    ),
    "past the first byte": (
        b"GGUF" + COUNTS + INFO + struct.pack("<IQ", 8, 64) + bytes(999),
        "'a.weight' starts at byte 64 of the weights",
    ),
    "rows of no whole blocks": (
        b"GGUF" + COUNTS + INFO + struct.pack("<IQ", 12, 0) + bytes(999),
        "rows of 64, which is not a multiple of 256",
    ),
    "an LLM": (
        header(TENSORS, {"general.architecture": "llama"}) + bytes(9999),
        "a GGUF file of 'llama', not of a Qwen-Image transformer",
    ),
    "a text encoder": (
        header(TENSORS, {"general.architecture": "qwen2vl"}) + bytes(9999),
        "of 'qwen2vl'.*Use safetensors for a text encoder or vision tower",
    ),
    "a mmproj": (
        header(TENSORS, {"general.architecture": "clip"}) + bytes(9999),
        "a GGUF file of 'clip'",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_file_is_refused_in_one_sentence(tmp_path: Path, fault: str):
    data, sentence = BROKEN[fault]
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=sentence) as raised:
        read_gguf(path)
    assert raised.value.args and "\n" not in str(raised.value)


HEADER = header(TENSORS, {"general.architecture": "qwen_image"} | WORDS)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(4, len(HEADER) - 1),
            st.sampled_from([b"\0", b"\xff", b"\x01", b"\x80", b"\xff" * 8, b"\0" * 4]),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_a_damaged_header_is_refused_where_gguf_py_refuses_it(tmp_path_factory, changes):
    data = bytearray(HEADER + bytes(-len(HEADER) % 32 + 4096))
    for place, new in changes:
        data[place : place + len(new)] = new
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        read_gguf(path)
    except CheckpointError:
        return
    finally:
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
        tracemalloc.stop()
    gguf.GGUFReader(path)


def test_parts_of_a_split_file_are_one_model(tmp_path: Path):
    for number, name in enumerate(TENSORS):
        splits = {"split.no": number, "split.count": 3}
        file = tmp_path / f"model-{number + 1:05}-of-00003.gguf"
        write_gguf(file, {name: TENSORS[name]}, splits)
    shards = read_shards(tmp_path / "model-00002-of-00003.gguf")
    assert shards.tensors.keys() == TENSORS.keys()
    (tmp_path / "model-00003-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError, match="one of 3 parts"):
        read_shards(tmp_path / "model-00001-of-00003.gguf")
    alone = (tmp_path / "model-00001-of-00003.gguf").rename(tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match="one of 3 parts of a split GGUF file"):
        read_shards(alone)


@pytest.mark.parametrize("dtype", ["Q8_0", "Q5_1", "Q4_0"])
def test_a_file_is_recognized_and_quantized_as_its_own_values_are(
    tmp_path: Path, capsys, dtype: str
):
    source = gguf_of(TRANSFORMER, tmp_path / "model.gguf", dtype)
    (part,) = inspect_checkpoint(source).parts
    assert (part.role, part.family, part.cannot_run) == ("transformer", "Qwen-Image", ())
    assert part.quantization.formats.keys() == {f"GGUF {dtype}"}
    assert main(["inspect", str(source)]) == 0
    assert f"GGUF {dtype}" in capsys.readouterr().out
    plain = {
        name: it.expand(it.values) if isinstance(it, BlockRows) else it
        for name, it in map_gguf(read_gguf(source)).items()
    }
    save_file(plain, tmp_path / "plain.safetensors")
    for each in (source, tmp_path / "plain.safetensors"):
        target = tmp_path / f"{each.stem}-int8.safetensors"
        assert main(["quantize", str(each), str(target), "--precision", "int8"]) == 0
    ours, expected = (load_file(tmp_path / f"{it}-int8.safetensors") for it in ("model", "plain"))
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in ours)


def test_an_estimate_counts_every_weight_in_host_memory(tmp_path: Path):
    """No page of the file stands in for an expanded weight."""
    sizes = read_sizes(gguf_of(TRANSFORMER, tmp_path / "model.gguf", "Q8_0"))
    for precision, encoder, parts in (sizes.settled(it, "bf16") for it in ("auto", "bf16")):
        request = RunRequest(sizes.family_for(None), parts=parts)
        setting = Setting(precision, text_encoder=encoder)
        copies = {k: v for k, v in host_memory(request, setting).items() if "transformer" in k}
        assert sum(copies.values()) == transformer_bytes(request, setting).total


def test_an_estimate_counts_w4a8_in_host_memory_and_not_int8(tmp_path: Path, capsys):
    path = gguf_of(TRANSFORMER, tmp_path / "model.gguf", "Q4_0")
    sizes = read_sizes(path)
    precision, _, parts = sizes.settled("auto", "bf16")
    request = RunRequest(sizes.family_for(None), parts=parts)
    setting = Setting(precision, "off card", packed=True)
    copies = {k: v for k, v in host_memory(request, setting).items() if k.startswith("trans")}
    assert 0 < parts.packed[0] < parts.transformer_bytes
    assert copies == {"transformer, expanded from GGUF": parts.packed[0]}
    assert main(["estimate", "--model", str(path), "--card", "L40S"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "GGUF's blocks are expanded and rounded to int8" in out and "as requested" not in out
    assert "Each load quantizes the file to int8. `qwen-l40s quantize` writes that file once" in out


def test_a_file_larger_than_the_machines_memory_is_mapped(tmp_path: Path):
    path = write_gguf(tmp_path / "a.gguf", TENSORS)
    os.truncate(path, 2**42)
    found = map_gguf(read_gguf(path))
    found["a.bias"].add_(1)  # as ComfyUI puts LoRAs into weights in place
    assert found["a.bias"].tolist() == 5 * [1.0]
    assert map_gguf(read_gguf(path))["a.bias"].tolist() == 5 * [0.0]
