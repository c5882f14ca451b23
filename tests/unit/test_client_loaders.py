"""Which jobs share the models that a ComfyUI keeps loaded."""

import copy

import pytest

from qwen_l40s.client.graph.workflow import loaders_key

GRAPH = {
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
    graph = copy.deepcopy(GRAPH)
    graph[node]["inputs"][name] = value
    return loaders_key(graph)


@pytest.mark.parametrize(
    "change",
    [("4", "text", "水壶"), ("5", "width", 16), ("6", "seed", 2), ("7", "image", "dog.png")],
)
def test_prompt_size_seed_and_image_share_the_models(change):
    assert key_with(*change) == loaders_key(GRAPH)


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
    assert key_with(*change) != loaders_key(GRAPH)


def test_a_graph_without_the_lora_does_not():
    assert loaders_key({id: node for id, node in GRAPH.items() if id != "3"}) != loaders_key(GRAPH)


def test_ids_order_and_titles_do_not_matter():
    renamed = {f"n{id}": {**GRAPH[id], "_meta": {"title": id}} for id in reversed(GRAPH)}
    assert loaders_key(renamed) == loaders_key(GRAPH)


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
    graph = {**GRAPH, "9": {"class_type": kind, "inputs": {"file": "x"}}}
    assert (loaders_key(graph) != loaders_key(GRAPH)) == counts
