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


def test_the_api_form_is_read_as_it_is(tmp_path):
    assert read_workflow(written(tmp_path, GRAPH)) == GRAPH


ENTRY = {"prompt": [3, "id", GRAPH, {"extra_pnginfo": {}}, ["3"]], "outputs": {}, "status": {}}
PAGE_FORM = {"nodes": [{"id": 3, "type": "KSampler"}], "links": []}
BODIES = {
    "ComfyUI's": {"prompt": GRAPH, "client_id": "x", "extra_data": {"extra_pnginfo": {}}},
    "the page's": {"output": GRAPH, "workflow": PAGE_FORM},
    "worker-comfyui's": {"input": {"workflow": GRAPH, "images": [{"name": "a", "image": "b"}]}},
    "ComfyUI-Deploy's": {"workflow_api": GRAPH, "inputs": {"prompt": "a kettle"}},
    "Replicate's": {"input": {"workflow_json": json.dumps(GRAPH)}},
    "an entry of a history": {"id": ENTRY},
    "a history's inside": ENTRY,
    "a list": [GRAPH],
}


@pytest.mark.parametrize("body", BODIES)
def test_the_workflow_in_a_body_of_a_service_is_read(tmp_path, body):
    assert read_workflow(written(tmp_path, BODIES[body])) == GRAPH


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"one": ENTRY, "two": {**ENTRY, "prompt": [4, "id", {"6": GRAPH["6"]}]}}, "2 workflows"),
        ({"input": {"workflow": PAGE_FORM}}, "UI form"),
        ({"workflow_api": {"3": {"inputs": {}}}}, "node '3' has no class_type"),
        ({"input": {"prompt": "a kettle"}}, "has no nodes"),
    ],
)
def test_a_body_without_one_workflow_in_api_form_is_named(tmp_path, body, says):
    with pytest.raises(SettingError, match=says):
        read_workflow(written(tmp_path, body))


def test_a_node_may_have_the_id_prompt(tmp_path):
    graph = {"prompt": GRAPH["6"], "sample": GRAPH["3"]}
    assert read_workflow(written(tmp_path, graph)) == graph


def test_a_byte_order_mark_is_skipped(tmp_path):
    data = b"\xef\xbb\xbf" + json.dumps(GRAPH, ensure_ascii=False).encode()
    assert read_workflow(written(tmp_path, data)) == GRAPH


def test_a_saved_image_is_read(tmp_path):
    assert read_workflow(png(tmp_path, prompt=json.dumps(GRAPH), workflow="{}")) == GRAPH


def test_what_an_old_server_adds_to_a_node_is_left_out(tmp_path):
    text = json.dumps(GRAPH)[:-2] + ', "is_changed": [NaN]}}'
    assert read_workflow(png(tmp_path, prompt=text)) == GRAPH


def test_an_image_with_the_page_form_alone_says_so(tmp_path):
    with pytest.raises(SettingError, match=r"only the UI form.*Export \(API\)"):
        read_workflow(png(tmp_path, workflow="{}"))


def test_an_image_without_metadata_says_so(tmp_path):
    with pytest.raises(SettingError, match="no workflow"):
        read_workflow(png(tmp_path))


def test_a_cut_off_image_says_so(tmp_path):
    whole = png(tmp_path, prompt=json.dumps(GRAPH)).read_bytes()
    with pytest.raises(SettingError, match="this PNG is cut off"):
        read_workflow(written(tmp_path, whole[:60], "cut.png"))


def test_the_page_form_says_how_to_export(tmp_path):
    path = written(tmp_path, {"nodes": [], "links": [], "version": 0.4})
    with pytest.raises(SettingError, match=r"File > Export \(API\) \(.*workflow.json\)\.$"):
        read_workflow(path)


def test_the_page_form_names_the_api_form_that_lies_beside_it(tmp_path):
    path = written(tmp_path, {"nodes": [], "links": []})
    (tmp_path / "api").mkdir()
    sibling = written(tmp_path / "api", GRAPH)
    with pytest.raises(SettingError) as caught:
        read_workflow(path)
    assert str(sibling) in str(caught.value)


@pytest.mark.parametrize(
    ("data", "says"),
    [
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
    ],
    ids=str,
)
def test_what_is_no_workflow_is_refused(tmp_path, data, says):
    with pytest.raises(SettingError, match=says):
        read_workflow(written(tmp_path, data))


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for path in (tmp_path / "none.json", tmp_path, tmp_path / "zero\0byte"):
        with pytest.raises(SettingError, match="cannot read the workflow"):
            read_workflow(path)


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


def test_messages_name_title_class_and_id():
    assert called(GRAPH, "3") == "'Sample' (KSampler, id 3)"
    assert called(GRAPH, "6") == "CLIPTextEncode (id 6)"


def test_case_spaces_dashes_and_underscores_do_not_matter():
    assert {plain(name) for name in ("Negative prompt", "negative_prompt", "NEGATIVE-PROMPT")} == {
        "negativeprompt"
    }


def test_an_id_is_that_node_even_where_another_has_the_title():
    graph = {"a": {**GRAPH["3"], "_meta": {"title": "b"}}, "b": GRAPH["6"]}
    assert nodes_called(graph, "b") == ["b"]
    assert nodes_called(graph, "B") == ["a", "b"]
    assert nodes_called(graph, "-") == []


def test_an_input_is_called_by_its_id_where_two_nodes_have_the_title():
    assert input_called(GRAPH, "3", "seed") == "Sample.seed"
    two = {**GRAPH, "4": GRAPH["3"]}
    assert input_called(two, "3", "seed") == "3.seed"


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


def key_with(node, name, value):
    graph = copy.deepcopy(LOADS)
    graph[node]["inputs"][name] = value
    return loaders_key(graph)


@pytest.mark.parametrize(
    "change",
    [("4", "text", "水壶"), ("5", "width", 16), ("6", "seed", 2), ("7", "image", "dog.png")],
)
def test_prompt_size_seed_and_image_share_the_models(change):
    assert key_with(*change) == loaders_key(LOADS)


@pytest.mark.parametrize(
    "change",
    [
        ("1", "unet_name", "z"),
        ("1", "weight_dtype", "fp8_e4m3fn"),
        ("2", "clip_name", "z"),
        ("3", "lora_name", "z"),
        ("3", "strength_model", 0.5),
        ("8", "model", "z"),
        ("8", "precision", "int8"),
    ],
)
def test_another_model_lora_or_precision_does_not(change):
    assert key_with(*change) != loaders_key(LOADS)


def test_a_graph_without_the_lora_does_not():
    assert loaders_key({id: node for id, node in LOADS.items() if id != "3"}) != loaders_key(LOADS)


def test_ids_order_and_titles_do_not_matter():
    renamed = {f"n{id}": {**LOADS[id], "_meta": {"title": id}} for id in reversed(LOADS)}
    assert loaders_key(renamed) == loaders_key(LOADS)


@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        ("ImageOnlyCheckpointLoader", True),
        ("LatentUpscaleModelLoader", True),
        ("UnetLoaderGGUF", True),
        ("QwenL40S_LoadVAE", True),
        ("LoadImageMask", False),
        ("VHS_LoadVideo", False),
        ("Load3DAnimation", False),
        ("LoadLatent", False),
        ("ImageUpload", False),
    ],
)
def test_what_loads_a_model_is_known_by_its_class(kind, counts):
    graph = {**LOADS, "9": {"class_type": kind, "inputs": {"file": "x"}}}
    assert (loaders_key(graph) != loaders_key(LOADS)) == counts


def test_a_file_that_is_far_too_large_is_not_read(tmp_path):
    path = written(tmp_path, b"{}")
    os.truncate(path, 2**28 + 1)
    with pytest.raises(SettingError, match="larger than 256 MiB"):
        read_workflow(path)
