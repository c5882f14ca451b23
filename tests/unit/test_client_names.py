"""The names of a job's files on a server: every node that saves gets them, and no two jobs share
one.
"""

import json
import re
import zlib
from pathlib import Path

import pytest
from PIL import Image

from qwen_l40s.client.results import owned
from qwen_l40s.client.workflow import (
    JOIN,
    always_names,
    job_id,
    key_of,
    read_workflow,
    with_job_id,
)

KEY = "0123456789abcdef"
ID = job_id(KEY)


def described(kind="STRING", *, saves="STRING", output=True, optional=False, **names):
    """What object_info says of a node that saves `saves` and has inputs of these names."""
    inputs = {"what": [saves, {}], **{name: [kind, {"default": of}] for name, of in names.items()}}
    needed = {"what": inputs.pop("what")} if optional else inputs
    return {"input": {"required": needed, "optional": inputs}, "output_node": output}


def named(info, value=None, *, kind="PackSaver", name="", **known):
    """Returns the graph with ids of a node whose input of that name is set."""
    inputs = {"what": ["text", 0]} | ({name: value} if name else {})
    text = {"class_type": "PrimitiveString", "inputs": {"value": "x"}}
    graph = {"text": text, "save": {"class_type": kind, "inputs": inputs}}
    return with_job_id(graph, {kind: info, **known}, KEY)


@pytest.mark.parametrize(
    ("name", "value", "becomes"),
    [
        ("filename_prefix", "a/b", f"a/b{ID}"),
        ("filename_prefix", "v1.5", f"v1.5{ID}"),
        ("filename_prefix", "a/", f"a/{ID}"),
        ("filename_prefix", "", ID),
        ("filename_prefix", "b_job-ba9876543210-2", f"b{ID}"),  # of the PNG that is the workflow
        ("prefix", "loras/mine", f"loras/mine{ID}"),
        ("file_prefix", "mine", f"mine{ID}"),
        ("save_file_prefix", "mine", f"mine{ID}"),
        ("file_name", "a/text.txt", f"a/text{ID}.txt"),
        ("filename", "text", f"text{ID}"),
        ("output_filename", "v1.5", f"v1.5{ID}"),
        ("File Name", "b_job-ba9876543210.json", f"b{ID}.json"),
    ],
)
def test_a_name_ends_with_the_job_whatever_its_input_is_called(name, value, becomes):
    graph = named(described(**{name: "x"}), value, name=name)
    assert graph["save"]["inputs"][name] == becomes
    assert named(described(optional=True, **{name: value}))["save"]["inputs"][name] == becomes


@pytest.mark.parametrize("saves", ["STRING", "LATENT", "IMAGE", "SVG", "MESH", "AUDIO", "MODEL"])
def test_a_prefix_is_the_jobs_whatever_the_node_saves(saves):
    for name in ("filename_prefix", "prefix"):
        graph = named(described(saves=saves, **{name: "x"}), "a", name=name)
        assert graph["save"]["inputs"][name] == f"a{ID}"


@pytest.mark.parametrize(
    ("info", "kind", "name"),
    [
        (described(output=False, filename="x"), "PackSaver", "filename"),  # it gives the name on
        (described(filename="x"), "PackLoadAndShow", "filename"),
        (described(output_path="x"), "PackSaver", "output_path"),  # a folder
        (described(prompt="x"), "PackSaver", "prompt"),
        (described(saves="MODEL", filename="x"), "PackSaver", "filename"),
        (described("COMBO", filename="x"), "PackSaver", "filename"),
    ],
)
def test_what_is_no_name_of_a_new_file_stays(info, kind, name):
    assert named(info, "a", kind=kind, name=name)["save"]["inputs"][name] == "a"


def test_a_wired_prefix_gets_the_job_by_a_node_of_comfyui():
    info = described(filename_prefix="x")
    for known in ({}, {JOIN: {}}):
        graph = named(info, ["text", 0], name="filename_prefix", **known)
        link = graph["save"]["inputs"]["filename_prefix"]
        if known:
            join = graph[link[0]]
            assert (join["class_type"], join["inputs"]["string_a"]) == (JOIN, ["text", 0])
            assert join["inputs"]["string_b"] == ID
        else:  # an older ComfyUI
            assert link == ["text", 0]


@pytest.mark.parametrize(
    "prefix",
    ["p" * 228, "p" * 244, "漢" * 81, "é" * 122, "a/" + "p" * 240, "👩‍👩‍👧" * 13, "\ud800" * 80],
)
@pytest.mark.parametrize("name", ["filename_prefix", "file_name"])
def test_a_long_name_leaves_255_bytes_room_for_number_and_suffix(prefix, name):
    graph = named(described(**{name: "x"}), prefix, name=name)
    folder, _, last = graph["save"]["inputs"][name].rpartition("/")
    assert last.endswith(ID) and folder == prefix.rpartition("/")[0]
    assert len(f"{last}_1000_steps_00001_.safetensors".encode()) <= 255
    assert prefix.rpartition("/")[2].startswith(last.removesuffix(ID))
    suffixed = named(described(file_name="x"), f"{prefix}.txt", name="file_name")
    assert suffixed["save"]["inputs"]["file_name"].endswith(f"{ID}.txt")


@pytest.mark.parametrize(
    ("saves", "name", "core", "names"),
    [
        ("IMAGE", "filename_prefix", True, True),
        ("LATENT", "filename_prefix", True, True),
        ("STRING", "filename_prefix", True, True),
        ("STRING", "filename_prefix", False, False),
        ("MODEL", "filename_prefix", True, False),
        ("LORA_MODEL", "prefix", True, False),
        ("IMAGE", "text", True, False),
    ],
)
def test_nodes_of_comfyui_that_save_no_model_have_to_name_a_file(saves, name, core, names):
    module = "nodes" if core else "custom_nodes.pack"
    info = {"Saver": described(saves=saves, **{name: "x"}) | {"python_module": module}}
    graph = {"1": {"class_type": "Saver", "inputs": {name: "x"}}}
    assert bool(always_names(graph, info)) == names


# What a PNG says of its job


GRAPH = {"1": {"class_type": "SaveImage", "inputs": {"filename_prefix": "a"}}}


def png(path: Path, *texts: tuple[bytes, bytes], end: int | None = None) -> Path:
    """Saves a picture with chunks behind its pixels, up to a byte."""
    Image.new("RGB", (8, 8)).save(path)
    chunks = [
        len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
        for kind, data in texts
    ]
    whole = path.read_bytes()
    path.write_bytes((whole[:-12] + b"".join(chunks) + whole[-12:])[:end])
    return path


TEXT = json.dumps(GRAPH).encode()
CHUNKS = {
    "tEXt": (b"tEXt", b"prompt\0" + TEXT),
    "zTXt": (b"zTXt", b"prompt\0\0" + zlib.compress(TEXT)),
    "iTXt": (b"iTXt", b"prompt\0\0\0en\0Prompt\0" + TEXT),
    "packed iTXt": (b"iTXt", b"prompt\0\1\0\0\0" + zlib.compress(TEXT)),
    "SaveAnimatedPNG": (b"comf", b"prompt\0" + TEXT),
}


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_text_behind_the_pixels_is_read_as_the_page_reads_it(tmp_path, chunk):
    path = png(tmp_path / "a.png", CHUNKS[chunk])
    assert read_workflow(path) == GRAPH
    assert owned(path, key_of(GRAPH), []) is True


@pytest.mark.parametrize(
    "texts",
    [
        [(b"zTXt", b"prompt\0\0" + zlib.compress(TEXT)[:-9])],
        [(b"zTXt", b"prompt\0\0" + zlib.compress(bytes(2**27)))],
        [(b"iTXt", b"prompt")],
        [(b"tEXt", b"")],
    ],
    ids=["cut", "bomb", "no text", "empty"],
)
def test_a_damaged_text_is_none(tmp_path, texts):
    path = png(tmp_path / "a.png", *texts)
    assert owned(path, key_of(GRAPH), []) is None
    with pytest.raises(ValueError, match=re.escape(str(path))):
        read_workflow(path)


@pytest.mark.parametrize(
    ("text", "own"),
    [
        ({"1": {"inputs": {"filename_prefix": f"a{ID}"}}}, True),
        ({"1": {"inputs": {"file_name": f"a{ID}-1.txt"}}}, True),
        ({"1": {"inputs": {"string_b": ID, "old": "_job-ba9876543210"}}}, True),
        ({"1": {"inputs": {"filename_prefix": "a_job-ba9876543210"}}}, False),
        ({"1": {"class_type": "X", "inputs": {}}}, None),
        (GRAPH, False),  # another job's
        ({"1": 5}, None),
    ],
)
def test_whose_a_picture_is(tmp_path, text, own):
    path = png(tmp_path / "a.png", (b"tEXt", b"prompt\0" + json.dumps(text).encode()))
    assert owned(path, KEY, [KEY, key_of(GRAPH)]) is own
