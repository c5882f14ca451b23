"""Workflow files: which forms are read, what is said of others, and which load the same models."""

import copy
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_l40s.client.workflow import (
    called,
    input_called,
    loaders_key,
    nodes_called,
    plain,
    read_workflow,
    title,
)
from qwen_l40s.errors import SettingError

GRAPH = {
    "3": {
        "class_type": "KSampler",
        "inputs": {"seed": 2**64 - 1, "positive": ["6", 0]},
        "_meta": {"title": "Sample"},
    },
    "6": {"class_type": "CLIPTextEncode", "inputs": {"text": "a kettle, ein Käfer, 水壶"}},
}


def written(tmp_path, data, name="workflow.json"):
    path = tmp_path / name
    path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
    return path


def png(tmp_path, **chunks):
    image = pytest.importorskip("PIL.Image")
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    for key, text in chunks.items():
        info.add_text(key, text)
    path = tmp_path / "saved.png"
    image.new("RGB", (8, 8)).save(path, pnginfo=info)
    return path


ENTRY = {"prompt": [3, "id", GRAPH, {"extra_pnginfo": {}}, ["3"]], "outputs": {}, "status": {}}
PAGE_FORM = {"nodes": [{"id": 3, "type": "KSampler"}], "links": []}
READ = {
    "the API form": GRAPH,
    "a byte order mark": b"\xef\xbb\xbf" + json.dumps(GRAPH, ensure_ascii=False).encode(),
    "ComfyUI's": {"prompt": GRAPH, "client_id": "x", "extra_data": {"extra_pnginfo": {}}},
    "the page's": {"output": GRAPH, "workflow": PAGE_FORM},
    "worker-comfyui's": {"input": {"workflow": GRAPH, "images": [{"name": "a", "image": "b"}]}},
    "ComfyUI-Deploy's": {"workflow_api": GRAPH, "inputs": {"prompt": "a kettle"}},
    "Replicate's": {"input": {"workflow_json": json.dumps(GRAPH)}},
    "an entry of a history": {"id": ENTRY},
    "a history's inside": ENTRY,
    "a list": [GRAPH],
}


@pytest.mark.parametrize("name", READ)
def test_a_file_of_each_form_is_read(tmp_path, name):
    assert read_workflow(written(tmp_path, READ[name])) == GRAPH


def test_a_node_may_have_the_id_prompt(tmp_path):
    graph = {"prompt": GRAPH["6"], "sample": GRAPH["3"]}
    assert read_workflow(written(tmp_path, graph)) == graph


def test_an_image_is_read_or_says_what_it_lacks(tmp_path):
    path = png(tmp_path, prompt=json.dumps(GRAPH), workflow="{}")
    assert read_workflow(path) == GRAPH
    with pytest.raises(SettingError, match="cut off"):
        read_workflow(written(tmp_path, path.read_bytes()[:60], "cut.png"))
    # An old server adds a value that JSON has not.
    text = json.dumps(GRAPH)[:-2] + ', "is_changed": [NaN]}}'
    assert read_workflow(png(tmp_path, prompt=text)) == GRAPH
    for chunks, named in (({"workflow": "{}"}, "UI form"), ({}, "no workflow")):
        with pytest.raises(SettingError, match=named):
            read_workflow(png(tmp_path, **chunks))


TWO = {"one": ENTRY, "two": {**ENTRY, "prompt": [4, "id", {"6": GRAPH["6"]}]}}
REFUSED = [
    (TWO, "2 workflows"),
    ({"input": {"workflow": PAGE_FORM}}, "UI form"),
    ({"workflow_api": {"3": {"inputs": {}}}}, "node '3' has no class_type"),
    ({"input": {"prompt": "a kettle"}}, "has no nodes"),
    (PAGE_FORM, r"Export \(API\) \(.*workflow.json\)\.$"),
    (b"", "is empty"),
    (b" \n", "is empty"),
    (b"\xef\xbb\xbf", "is empty"),
    (b"{", "is not JSON"),
    (b"[" * 200_000, "is not JSON"),
    (b"9" * 5000, "is not JSON"),
    (json.dumps(GRAPH).encode("utf-16"), "neither UTF-8"),
    (b"\xff\xd8\xff\xe0 a photograph", "neither UTF-8"),
    (b"[]", "has no nodes"),
    (b"{}", "has no nodes"),
    (b"null", "has no nodes"),
    (b'{"prompt": {}}', "has no nodes"),
    (b'{"a": 1}', "has no nodes"),
    (b'{"a": {"inputs": {}}}', "node 'a' has no class_type"),
    (b'{"a": {"class_type": "X"}}', r"node 'a' \(X\) has no inputs"),
    (b'{"a": {"class_type": "X", "inputs": []}}', "no inputs"),
]


@pytest.mark.parametrize(("data", "named"), REFUSED, ids=lambda it: str(it)[:40])
def test_what_is_no_workflow_is_refused(tmp_path, data, named):
    with pytest.raises(SettingError, match=named):
        read_workflow(written(tmp_path, data))


def test_a_path_that_cannot_be_read_is_refused(tmp_path):
    large = written(tmp_path, b"{}", "large.json")
    os.truncate(large, 2**28 + 1)
    for path, named in (
        *(
            (it, "cannot read")
            for it in (tmp_path / "none.json", tmp_path, tmp_path / "zero\0byte")
        ),
        (large, "larger than 256 MiB"),
    ):
        with pytest.raises(SettingError, match=named):
            read_workflow(path)


def test_the_page_form_names_the_api_form_that_lies_beside_it(tmp_path):
    path = written(tmp_path, {"nodes": [], "links": []})
    (tmp_path / "api").mkdir()
    sibling = written(tmp_path / "api", GRAPH)
    with pytest.raises(SettingError) as caught:
        read_workflow(path)
    assert str(sibling) in str(caught.value)


@given(data=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_file_is_read_or_refused(tmp_path_factory, data):
    path = written(tmp_path_factory.mktemp("any"), data)
    try:
        read_workflow(path)
    except SettingError as error:
        assert str(path) in str(error)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
NODE = st.fixed_dictionaries(
    {
        "class_type": st.text(min_size=1, max_size=8),
        "inputs": st.dictionaries(st.text(max_size=8), JSON, max_size=3),
    },
    optional={"_meta": JSON},
)


@given(graph=st.dictionaries(st.text(max_size=8), NODE, min_size=1, max_size=4))
def test_any_graph_comes_back_and_can_be_talked_of(tmp_path_factory, graph):
    if "prompt" in graph or "nodes" in graph:
        return
    read = read_workflow(written(tmp_path_factory.mktemp("any"), graph))
    assert read == graph
    for node in read:
        assert title(read, node)
        assert node in called(read, node)
        assert input_called(read, node, "seed").endswith(".seed")


@pytest.mark.parametrize(
    ("meta", "expected"),
    [
        ({}, "KSampler"),
        ({"_meta": None}, "KSampler"),
        ({"_meta": {"title": 7}}, "KSampler"),
        ({"_meta": {"title": " "}}, "KSampler"),
        ({"_meta": {"title": " Sample "}}, "Sample"),
    ],
)
def test_a_node_without_a_title_is_called_by_its_class(meta, expected):
    assert title({"3": {"class_type": "KSampler", "inputs": {}, **meta}}, "3") == expected


def test_names_of_nodes_and_inputs():
    assert called(GRAPH, "3") == "'Sample' (KSampler, id 3)"
    assert called(GRAPH, "6") == "CLIPTextEncode (id 6)"
    names = "Negative prompt", "negative_prompt", "NEGATIVE-PROMPT"
    assert {plain(name) for name in names} == {"negativeprompt"}
    # An id is that node, even where another has the title.
    graph = {"a": {**GRAPH["3"], "_meta": {"title": "b"}}, "b": GRAPH["6"]}
    found = [nodes_called(graph, name) for name in ("b", "B", "-")]
    assert found == [["b"], ["a", "b"], []]
    # An input is called by its id where two nodes have the title.
    assert input_called(GRAPH, "3", "seed") == "Sample.seed"
    assert input_called({**GRAPH, "4": GRAPH["3"]}, "3", "seed") == "3.seed"


# Which models a graph loads


LOADS = {
    "1": {"class_type": "UNETLoader", "inputs": {"unet_name": "a", "weight_dtype": "default"}},
    "2": {"class_type": "CLIPLoader", "inputs": {"clip_name": "b", "type": "qwen_image"}},
    "3": {
        "class_type": "LoraLoaderModelOnly",
        "inputs": {"model": ["1", 0], "lora_name": "c", "strength_model": 1.0},
    },
    "4": {"class_type": "CLIPTextEncode", "inputs": {"text": "a kettle", "clip": ["2", 0]}},
    "5": {"class_type": "EmptySD3LatentImage", "inputs": {"width": 8, "height": 8}},
    "6": {"class_type": "KSampler", "inputs": {"model": ["3", 0], "seed": 1, "cfg": 4.0}},
    "7": {"class_type": "LoadImage", "inputs": {"image": "cat.png"}},
    "8": {"class_type": "QwenL40S_Load", "inputs": {"model": "d", "precision": "auto"}},
}


def loads(kind):
    return lambda graph: graph.update({"9": {"class_type": kind, "inputs": {"file": "x"}}})


def sets(node, name, value):
    return lambda graph: graph[node]["inputs"].update({name: value})


def renames(graph):
    renamed = {f"n{id}": {**graph[id], "_meta": {"title": id}} for id in reversed(graph)}
    graph.clear(), graph.update(renamed)


SAME = {
    "ids, order and titles": renames,
    "a prompt": sets("4", "text", "水壶"),
    "a size": sets("5", "width", 16),
    "a seed": sets("6", "seed", 2),
    "an image": sets("7", "image", "dog.png"),
    **{
        kind: loads(kind)
        for kind in (
            "LoadImageMask",
            "VHS_LoadVideo",
            "Load3DAnimation",
            "LoadLatent",
            "ImageUpload",
        )
    },
}
OTHER = {
    "a model": sets("1", "unet_name", "z"),
    "its dtype": sets("1", "weight_dtype", "fp8_e4m3fn"),
    "a text encoder": sets("2", "clip_name", "z"),
    "a LoRA": sets("3", "lora_name", "z"),
    "its strength": sets("3", "strength_model", 0.5),
    "a model of ours": sets("8", "model", "z"),
    "its precision": sets("8", "precision", "int8"),
    "no LoRA": lambda graph: graph.pop("3"),
    **{
        kind: loads(kind)
        for kind in (
            *("ImageOnlyCheckpointLoader", "LatentUpscaleModelLoader", "UnetLoaderGGUF"),
            "QwenL40S_LoadVAE",
        )
    },
}


@pytest.mark.parametrize("name", [*SAME, *OTHER])
def test_graphs_that_load_the_same_models_have_one_key(name):
    graph = copy.deepcopy(LOADS)
    (SAME | OTHER)[name](graph)
    assert (loaders_key(graph) == loaders_key(LOADS)) == (name in SAME)
