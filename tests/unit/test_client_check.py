"""What is said of a graph before it is queued."""

import copy
import re
from pathlib import Path

import pytest
from server_nodes import stored

from qwen_l40s import __version__
from qwen_l40s.client.servers import Checker
from qwen_l40s.client.workflow import node_inputs, read_workflow
from qwen_l40s.errors import SettingError

TESTS = Path(__file__).resolve().parents[1]
GRAPH = read_workflow(TESTS.parent / "workflows" / "api" / "micro_text_to_image.json")
LOADER = {
    "class_type": "QwenL40S_LoadModel",
    "inputs": {"model": "qwen_image_bf16.safetensors", "precision": "auto"},
    "_meta": {
        "title": "Model",
        "models": [
            {
                "name": "qwen_image_bf16.safetensors",
                "url": "https://example.org/qwen_image_bf16.safetensors",
                "directory": "diffusion_models",
            }
        ],
    },
}


def changed(node, **inputs):
    """Changes inputs of a node; None takes one away."""
    graph = copy.deepcopy(GRAPH)
    for name, value in inputs.items():
        graph[node]["inputs"].pop(name, None)
        if value is not None:
            graph[node]["inputs"][name] = value
    return graph


def check(graph, info=None):
    Checker(info or stored()).check(graph)


def problems(graph, info=None):
    with pytest.raises(SettingError) as caught:
        check(graph, info)
    return str(caught.value).split("\n")


def resized(**inputs):
    image = {"class_type": "LoadImage", "inputs": {"image": "x.png"}}
    resize = {
        "class_type": "ResizeImageMaskNode",
        "inputs": {"input": ["image", 0], "scale_method": "area", **inputs},
    }
    return changed("save", images=["resize", 0]) | {"image": image, "resize": resize}


def image(kind="LoadImage"):
    return {"class_type": kind, "inputs": {"image": "sub/any.png"}}


def batched(**inputs):
    batch = {"class_type": "BatchImagesNode", "inputs": {"images.image0": ["image", 0], **inputs}}
    return changed("save", images=["batch", 0]) | {"image": image(), "batch": batch}


LOOSE = {"loose": {"class_type": "KSampler", "inputs": {"cfg": float("nan")}}}
SIZED = {"resize_type": "scale dimensions", "resize_type.width": 64}
RIGHT = {
    "as shipped": GRAPH,
    "a node that leads to no output": GRAPH | LOOSE,
    "an unknown input of a core node": changed("empty", control_after_generate="fixed"),
    # What the server refuses by name is left to it.
    "steps": changed("sample", steps=0),
    "a number": changed("sample", cfg="high"),
    "a sampler": changed("sample", sampler_name="dpm_2m"),
    "no input": changed("sample", positive=None),
    "no output": {"empty": GRAPH["empty"]},
    "a wrapped value": changed("sample", scheduler={"__value__": "simple"}),
    "a circle": changed("decode", samples=["decode", 0]),
    "an upload": changed("save", images=["image", 0]) | {"image": image()},
    "a remote list": changed("save", images=["image", 0]) | {"image": image("LoadImageOutput")},
    "inputs of the chosen option": resized(**SIZED),
    "inputs that grow": batched(),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_graph_that_runs_or_that_the_server_judges_passes(name):
    check(RIGHT[name])


LORA = {"model": ["load", 0], "lora": "x.safetensors", "strength": 1.0}
LATER = {"class_type": "QwenL40S_Later", "inputs": {}, "_meta": {"version": "9"}}
WRONG = {
    "NaN": (changed("sample", cfg=float("nan")), "'cfg' of KSampler (id sample)"),
    "the text nan": (changed("sample", cfg="nan"), "'cfg' of KSampler (id sample)"),
    "no such node": (changed("sample", latent_image=["nowhere", 0]), "(['nowhere', 0])"),
    "no name of a node": (changed("sample", latent_image=[5, 0]), "([5, 0])"),
    "an input of ours": (changed("save", sharper=True), f"'sharper' .* made with {__version__}"),
    "a pack": ({**GRAPH, "10": {"class_type": "Other", "inputs": {}}}, "Other (id 10)"),
    "a later node of ours": ({**GRAPH, "10": LATER}, "QwenL40S_Later (id 10) .* made with 9"),
    "a missing model": (
        {**GRAPH, "load": LOADER},
        "Model.model .* https://example.org/qwen_image_bf16.safetensors to models/diffusion_models",
    ),
    "a missing LoRA": (
        changed("sample", model=["lora", 0])
        | {"lora": {"class_type": "QwenL40S_LoadLora", "inputs": LORA}},
        "QwenL40S_LoadLora.lora is 'x.safetensors'",
    ),
    "an input of the chosen option": (
        resized(**SIZED | {"resize_type.width": ["nowhere", 0]}),
        "'resize_type.width' of ResizeImageMaskNode (id resize)",
    ),
    "no option": (resized(resize_type="scale"), "ResizeImageMaskNode.resize_type is 'scale'"),
    "an input that grew": (
        batched(**{"images.image1": ["nowhere", 0]}),
        "'images.image1' of BatchImagesNode (id batch)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_problem_is_one_sentence_that_names_it(name):
    graph, named = WRONG[name]
    first, *others = problems(graph)
    assert re.search(".*".join(map(re.escape, named.split(".* "))), first), first
    assert not others or name == "a missing model"


def test_a_model_that_the_server_is_too_old_for_is_not_to_be_downloaded():
    graph = read_workflow(TESTS.parent / "workflows" / "api" / "qwen_image_21.json")
    with pytest.raises(SettingError) as caught:
        Checker(stored(), "0.33.0").check(graph)
    assert str(caught.value) == (
        "Load Qwen-Image.model is 'qwen_image_2.1_int8_convrot.safetensors', which needs ComfyUI "
        "0.37 or newer. The server runs 0.33.0: update ComfyUI there."
    )
    for version in ("0.37.1", "0.40", "unknown"):
        with pytest.raises(SettingError, match=r"download it from|is missing on the server"):
            Checker(stored(), version).check(graph)


def test_all_problems_are_told_at_once():
    graph = changed("sample", cfg=float("nan"), positive=["nowhere", 0])
    graph["save"]["inputs"]["sharper"] = True
    assert len(problems(graph)) == 3


A, B = "faces/lora.safetensors", "style/lora.safetensors"


@pytest.mark.parametrize(
    ("value", "listed", "offered"),
    [
        ("style\\lora.safetensors", [A, B], B),
        ("style/lora.safetensors", [A.replace("/", "\\"), "style\\lora.safetensors"], "style\\l"),
        ("STYLE/lora.safetensors", [A, B], B),
        ("style\\lora.safetensors", ["Style/lora.safetensors", B], B),
        ("lora.safetensors", [B, "other.safetensors"], B),
        ("style\\lora.safetensors", [A], A),  # and says that the folder is another
        ("old\\lora.safetensors", [A, B], ""),
        ("lora.safetensors", [A, B], ""),
    ],
)
def test_a_model_is_found_by_its_whole_path_and_by_a_name_that_only_one_file_has(
    value, listed, offered
):
    info = stored()
    info["LoraLoaderModelOnly"]["input"]["required"]["lora_name"][0] = listed
    inputs = {"model": ["load", 0], "lora_name": value, "strength_model": 1.0}
    lora = {"class_type": "LoraLoaderModelOnly", "inputs": inputs}
    graph = changed("sample", model=["lora", 0]) | {"lora": lora}
    if not offered:  # the server refuses it, and lists what it has
        Checker(info).check(graph)
        return
    [found] = problems(graph, info)
    assert f"LoraLoaderModelOnly.lora_name={offered}" in found
    other = offered.replace("\\", "/").lower() not in value.replace("\\", "/").lower()
    assert ("another folder" in found) == other


def test_a_server_without_our_pack_is_told_apart_from_an_old_one():
    info = {name: each for name, each in stored().items() if not name.startswith("QwenL40S_")}
    assert problems(GRAPH, info)[0] == (
        "'Load Qwen-Image' (QwenL40S_Load, id load) needs Qwen-Image Accelerator, which is missing "
        "on the server: install it there."
    )


def test_values_of_other_packs_are_left_to_the_server():
    info = stored()
    info["KSampler"]["python_module"] = "custom_nodes.faster"
    check(changed("sample", cfg=float("nan"), sampler_name="new", more=1), info)
    assert len(problems(changed("sample", latent_image=["nowhere", 0]), info)) == 1


# Inputs that come with others


def test_a_checker_takes_each_job_for_itself():
    checker = Checker(stored())
    nowhere = {"resize_type.width": ["nowhere", 0]}
    checker.check(resized(resize_type="scale dimensions", **{"resize_type.width": 64}))
    checker.check(resized(resize_type="scale by multiplier", **nowhere))
    for _ in range(2):
        with pytest.raises(SettingError, match=r"'resize_type.width' of Resize"):
            checker.check(resized(resize_type="scale dimensions", **nowhere))
        checker.check(changed("sample", seed=7))
        with pytest.raises(SettingError, match="'cfg' of KSampler"):
            checker.check(changed("sample", cfg=float("nan")))


def test_inputs_that_grow_by_names_are_known():
    node = {"class_type": "StringFormat", "inputs": {"values.a": 1}}
    assert {"f_string", "values.a", "values.z"} <= set(node_inputs(stored(), node))


def test_a_class_that_the_server_lacks_has_no_known_inputs():
    assert node_inputs(stored(), {"class_type": "SomeoneElses", "inputs": {}}) is None
