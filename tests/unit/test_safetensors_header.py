"""The header reader against its format: hypothesis, the safetensors library, and one failure test
for every bad input.
"""

import io
import json
import math
import os
import pickle
import re
import zipfile
from pathlib import Path

import pytest
from gguf_files import blocks_of, write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from qwen_l40s.cli import main
from qwen_l40s.errors import CheckpointError
from qwen_l40s.loaders.checkpoint import inspect_checkpoint
from qwen_l40s.loaders.gguf import read_gguf
from qwen_l40s.loaders.header import DTYPE_BITS, MAX_HEADER_BYTES, UNFINISHED, read_header
from qwen_l40s.loaders.quantized_file import plan_quantized
from qwen_l40s.loaders.sizes import read_sizes

QUIET = settings(
    deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def framed(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def layout(specs, metadata=None) -> tuple[dict, int]:
    header = {} if metadata is None else {"__metadata__": metadata}
    position = 0
    for name, (dtype, shape) in specs.items():
        end = position + math.prod(shape) * DTYPE_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    return header, position


def good_file(path: Path) -> Path:
    header, size = layout({"a": ("F32", (2, 3)), "b": ("BF16", (5,))}, {"format": "pt"})
    path.write_bytes(framed(json.dumps(header).encode(), bytes(size)))
    return path


names = st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__")
tensors = st.tuples(
    st.sampled_from(sorted(DTYPE_BITS)), st.lists(st.integers(0, 5), max_size=4).map(tuple)
).filter(lambda spec: math.prod(spec[1]) * DTYPE_BITS[spec[0]] % 8 == 0)


@QUIET
@given(
    specs=st.dictionaries(names, tensors, max_size=6),
    metadata=st.none() | st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3),
    padding=st.integers(0, 7),
    ascii_only=st.booleans(),
)
def test_any_valid_header_comes_back_as_it_was_written(
    tmp_path, specs, metadata, padding, ascii_only
):
    header, size = layout(specs, metadata)
    text = json.dumps(header, ensure_ascii=ascii_only).encode() + b" " * padding
    path = tmp_path / "any.safetensors"
    path.write_bytes(framed(text, bytes(size)))

    read = read_header(path)

    assert {name: (info.dtype, info.shape) for name, info in read.tensors.items()} == specs
    assert read.metadata == (metadata or {})
    assert sum(info.nbytes for info in read.tensors.values()) == size
    assert (read.header_bytes, read.file_bytes) == (len(text), 8 + len(text) + size)
    theirs = {name: (e["dtype"], tuple(e["shape"])) for name, e in deserialize(path.read_bytes())}
    assert theirs.keys() == specs.keys()
    assert all(theirs[name][1] == shape for name, (_, shape) in specs.items())


def check_parses_or_refuses(path: Path) -> bool:
    """Returns whether the file was accepted; whatever is accepted must be consistent."""
    try:
        header = read_header(path)
    except CheckpointError as error:
        assert str(path) in str(error) or repr(str(path)) in str(error)
        return False
    ends = sorted((info.start, info.end) for info in header.tensors.values())
    assert [start for start, _ in ends] == [0, *(end for _, end in ends)][: len(ends)]
    assert (ends[-1][1] if ends else 0) == header.file_bytes - header.data_start
    assert all(i.nbytes * 8 == i.elements * DTYPE_BITS[i.dtype] for i in header.tensors.values())
    return True


@QUIET
@given(data=st.data())
def test_a_mutated_file_parses_consistently_or_is_refused(tmp_path, data):
    content = bytearray(good_file(tmp_path / "good.safetensors").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "mutated.safetensors"
    path.write_bytes(content)
    accepted = check_parses_or_refuses(path)
    try:
        deserialize(bytes(content))
        theirs = True
    except SafetensorError:
        theirs = False
    assert accepted == theirs


@QUIET
@given(cut=st.integers(0, 10_000))
def test_every_truncation_is_refused(tmp_path, cut):
    content = good_file(tmp_path / "good.safetensors").read_bytes()
    path = tmp_path / "cut.safetensors"
    path.write_bytes(content[: cut % len(content)])
    assert not check_parses_or_refuses(path)


def test_a_file_of_40_gb_costs_its_header(tmp_path):
    size = 40_000_000_000
    header = {"w": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}}
    text = json.dumps(header).encode()
    path = tmp_path / "large.safetensors"
    path.write_bytes(framed(text))
    try:
        os.truncate(path, 8 + len(text) + size)
    except OSError as error:
        pytest.skip(f"this file system has no sparse files: {error}")

    read = read_header(path)

    assert read.tensors["w"].elements == 20_000_000_000
    assert read.file_bytes == 8 + len(text) + size


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def as_file(header, data=4):
    return framed(json.dumps(header).encode(), bytes(data))


def zip_bytes():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 100)
    return buffer.getvalue()


GAP = {"a": entry(), "b": entry(offsets=(8, 12))}
OVERLAP = {"a": entry(shape=(2,), offsets=(0, 8)), "b": entry(offsets=(4, 8))}
LOAD, SAVE, GET = "download it again", "save it again", "get the model as .safetensors"
SHAPE, SIZE, FIELDS = "shape of tensor 'a'", "does not have the size", "needs the fields"
SAME = "get the same weights as .safetensors"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
# {case, or the suffix of the file: (content, words of the rule, words of the remedy)}
BAD = {
    "empty": (b"", "is empty", LOAD),
    "shorter than its length field": (b"\x07\0\0", "not a safetensors file", GET),
    "header cut": (as_file({"a": entry()})[:30], "is truncated", LOAD),
    "weights cut": (as_file({"a": entry()}, 3), "is truncated", LOAD),
    "oversized header": (
        (MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{" * 100,
        "header of 100,000,001 bytes",
        SAVE,
    ),
    "overlap": (as_file(OVERLAP, 8), "'b' overlaps", SAVE),
    "hole": (as_file(GAP, 12), "'b' leaves a gap", SAVE),
    "bytes after the end": (as_file({"a": entry()}, 9), "5 bytes follow", SAVE),
    "size": (as_file({"a": entry(shape=(2,))}), SIZE, SAVE),
    "end before start": (as_file({"a": entry(offsets=(4, 0))}), SIZE, SAVE),
    "half a byte": (as_file({"a": entry("F4", (3,), (0, 1))}, 1), SIZE, SAVE),
    "unknown dtype": (as_file({"a": entry("F3")}), "dtype 'F3'", "save the checkpoint"),
    "dtype list": (as_file({"a": entry([])}), "dtype []", "save the checkpoint"),
    "negative": (as_file({"a": entry(shape=(-1,))}), SHAPE, SAVE),
    "fraction": (as_file({"a": entry(shape=(1.0,))}), SHAPE, SAVE),
    "true": (as_file({"a": entry(shape=(True,))}), SHAPE, SAVE),
    "too large": (as_file({"a": entry(shape=(0, 2**64))}), SHAPE, SAVE),
    "offsets": (as_file({"a": entry(offsets=(0, 4, 8))}), "data_offsets", SAVE),
    "fields": (as_file({"a": {"dtype": "F32"}}), FIELDS, SAVE),
    "entry": (as_file({"a": 3}), FIELDS, SAVE),
    "metadata": (as_file({"__metadata__": {"a": 1}}, 0), "__metadata__", SAVE),
    "duplicate": (framed(b'{"a": 1, "a": 2}'), "the key 'a' occurs twice", SAVE),
    "nan": (framed(b'{"a": NaN}'), "NaN is not JSON", SAVE),
    "nesting": (framed(b'{"a":' + b"[" * 200_000), "nested too deeply", SAVE),
    "half surrogate": (framed(b'{"\\ud800": 1}'), "not valid UTF-8", SAVE),
    "utf-8": (framed(b'{"\xff": 1}'), "not valid UTF-8", SAVE),
    "no object": (framed(b"[1, 2, 3]"), "starts with 8 bytes of length and a JSON header", GET),
    "image": (b"\x89PNG\r\n\x1a\n" + bytes(50), "not a safetensors", GET),
    "zip by content": (zip_bytes(), "is a pickle (a zip archive", SAME),
    "pickle by content": (pickle.dumps([1] * 9), "is a pickle", SAME),
    ".pt": (zip_bytes(), "by its suffix .pt", SAME),
    ".CKPT": (b"", "by its suffix .CKPT", SAME),
    ".bin": (pickle.dumps([]), "by its suffix .bin", SAME),
    ".pth": (as_file({"a": entry()}), "by its suffix .pth", SAME),
    "gguf": (b"GGUF\3\0\0\0" + b"{" * 90, "is a GGUF file", "a name that ends in .gguf"),
    "web page": (b"\n<!DOCTYPE html><html></html>", "saved web page", "the file itself"),
    "lfs": (LFS, "git-LFS pointer", "git lfs pull"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_file(tmp_path, case):
    content, rule, remedy = BAD[case]
    path = tmp_path / f"x{case if case.startswith('.') else '.safetensors'}"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        read_header(path)
    message = str(error.value)
    assert message.endswith(f"({path}).")
    assert rule in message
    assert remedy in message
    assert message.endswith(".") and "\n" not in message


def test_paths_that_are_no_file(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path, rule in (
        (tmp_path / "none.safetensors", "no such file"),
        (tmp_path, "is a folder"),
        ("nul\0.safetensors", "cannot be opened"),
        (tmp_path / ("x" * 300), "cannot be opened"),
        (tmp_path / "loop", "cannot be opened"),
    ):
        with pytest.raises(CheckpointError, match=rule):
            read_header(path)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.safetensors")
        with pytest.raises(CheckpointError, match="is a pipe or a device"):
            read_header(tmp_path / "pipe.safetensors")


@pytest.mark.parametrize("end", UNFINISHED)
def test_every_reader_refuses_a_download_that_has_not_ended(tmp_path, end, capsys):
    """aria2 and its like give a file its name and its size before its content."""
    file = good_file(tmp_path / "model.safetensors")
    gguf = write_gguf(tmp_path / "model.gguf", {"x": blocks_of((4, 32), "F32")})
    for path, read in ((file, read_header), (gguf, read_gguf)):
        assert read(path).tensors
        path.with_name(path.name + end).touch()
        for run in (read, inspect_checkpoint, read_sizes, lambda it: plan_quantized(it, "int8")):
            with pytest.raises(CheckpointError, match=re.escape(path.name + end)):
                run(path)
        assert main(["inspect", str(path)]) == 2
        assert path.name + end in capsys.readouterr().err


def test_an_unreadable_file_is_named(tmp_path, monkeypatch):
    path = good_file(tmp_path / "secret.safetensors")

    def refuse(self, mode):
        raise PermissionError(13, "Permission denied")

    # Root, as in containers, is never refused by the real thing.
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError, match=r"no permission to read.*change.*secret\.safet"):
        read_header(path)


def test_a_header_whose_length_spells_a_pickle_mark_is_read(tmp_path):
    # 0x0280 = 640 bytes: the file begins like a protocol 2 pickle.
    path = tmp_path / "x.safetensors"
    path.write_bytes(framed(b"{}".ljust(0x280)))
    assert read_header(path).header_bytes == 0x280
