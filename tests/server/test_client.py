"""What the client takes a ComfyUI server to say and do, held against a real one."""

import io
import re

import pytest
from server_nodes import limited, stored

from qwen_l40s.client.server import of_validation
from qwen_l40s.client.servers import Checker
from qwen_l40s.client.submit import IMAGE_FORMATS
from qwen_l40s.errors import SettingError


@pytest.fixture(scope="module")
def object_info(server):
    return server.client.get("/object_info").json()


def test_the_stored_nodes_are_still_what_a_server_says(object_info):
    """Inputs may have been added since, and choices; `server_nodes.py` says how to store anew."""
    now = limited(object_info)
    for name, then in stored().items():
        assert now[name]["output_node"] == then["output_node"]
        assert (
            now[name]["python_module"].partition(".")[0] == then["python_module"].partition(".")[0]
        )
        for group, inputs in then["input"].items():
            for key, entry in inputs.items():
                assert _shape(now[name]["input"][group][key]) == _shape(entry), f"{name}.{key}"


def _shape(entry):
    kind = "a list" if isinstance(entry[0], list) else entry[0]
    rules = dict(entry[1]) if len(entry) > 1 else {}
    rules.pop("options", None)
    return kind, rules


def graph(**changes):
    """A small image, resized and shown; `changes` are of the resizing, None takes one away."""
    inputs = {
        "input": ["image", 0],
        "resize_type": "scale dimensions",
        "resize_type.width": 16,
        "resize_type.height": 16,
        "resize_type.crop": "center",
        "scale_method": "area",
    } | {key.replace("__", "."): value for key, value in changes.items()}
    return {
        "image": {
            "class_type": "EmptyImage",
            "inputs": {"width": 8, "height": 8, "batch_size": 1, "color": 0},
        },
        "resize": {
            "class_type": "ResizeImageMaskNode",
            "inputs": {key: value for key, value in inputs.items() if value is not None},
        },
        "show": {"class_type": "PreviewImage", "inputs": {"images": ["resize", 0]}},
    }


def batched(**inputs):
    inputs = {key.replace("__", "."): value for key, value in inputs.items()}
    return graph() | {
        "batch": {"class_type": "BatchImagesNode", "inputs": inputs},
        "show": {"class_type": "PreviewImage", "inputs": {"images": ["batch", 0]}},
    }


def with_node(kind, **inputs):
    return graph() | {"other": {"class_type": kind, "inputs": inputs}}


def with_shown(kind, **inputs):
    return graph() | {
        "other": {"class_type": kind, "inputs": {"image": ["image", 0], **inputs}},
        "show": {"class_type": "PreviewImage", "inputs": {"images": ["other", 0]}},
    }


RIGHT = {
    "as it is": graph(),
    "a number as text": graph(resize_type__width="16"),
    "a wrapped value": graph(scale_method={"__value__": "area"}),
    "an unknown input": graph(newer=1),
    "a wrong node that leads to no output": with_node("KSampler", steps=0),
    "a growing input": batched(images__image0=["image", 0]),
    "a list that the node does not keep to": with_node("CustomCombo", choice="zebra"),
    "our node": with_node("QwenL40S_LoadVAE", vae="micro (bundled)", precision="auto"),
}
WRONG = {
    "a link to nowhere": graph(input=["nowhere", 0]),
    "a link by number": graph(input=[5, 0]),
    "a link of one": graph(input=["image"]),
    "a class that is not there": with_node("SomeoneElses"),
}
LEFT = {  # to the server, which says what is wrong
    "a number too large": (graph(resize_type__width=99999), "bigger than max of 16384", "width"),
    "a number too small": (graph(resize_type__width=-1), "smaller than min of 0", "width"),
    "a number that is none": (graph(resize_type__width="wide"), "convert", "wide"),
    "a number in an object": (graph(resize_type__width={"a": 1}), "convert", "width"),
    "a choice that is not there": (graph(scale_method="zebra"), "not in list", "zebra"),
    "an input that is missing": (graph(input=None), "is missing", "input"),
    "an input of the chosen option": (graph(resize_type__crop=None), "is missing", "crop"),
    "a growing input": (batched(), "is missing", "image0"),
    "no output": ({"image": graph()["image"]}, "no outputs", ""),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_the_client_passes_the_server_takes(server, object_info, name):
    Checker(object_info).check(RIGHT[name])
    answer = server.post(RIGHT[name])
    assert answer.status_code == 200, answer.text
    assert answer.json()["node_errors"] == {}


@pytest.mark.parametrize("name", WRONG)
def test_what_the_client_refuses_the_server_does_not_take(server, object_info, name):
    with pytest.raises(SettingError):
        Checker(object_info).check(WRONG[name])
    assert server.post(WRONG[name]).status_code == 400


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_the_server_it_refuses_by_node_and_input(server, object_info, name):
    wrong, *words = LEFT[name]
    Checker(object_info).check(wrong)
    answer = server.post(wrong)
    assert answer.status_code == 400
    message = of_validation(wrong, answer.json())["message"]
    assert all(word in message for word in words), message
    assert name == "no output" or re.match(r"(ResizeImageMask|BatchImages)Node \(id ", message)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (graph(resize_type="zebra"), "resize_type is 'zebra', which is not a choice: use"),
        (
            with_shown("ImageScaleBy", scale_by="nan", upscale_method="area"),
            "'scale_by' of ImageScaleBy",
        ),
    ],
)
def test_what_the_server_takes_although_no_node_can_run_it(server, object_info, wrong, says):
    """Why `Checker` refuses it: the node would fail, or make a black image."""
    assert server.post(wrong).status_code == 200
    with pytest.raises(SettingError, match=says):
        Checker(object_info).check(wrong)


def test_the_server_ignores_what_is_unknown_of_ours(server, object_info):
    """Why `Checker` refuses it: the picture would silently be made without it."""
    newer = with_node("QwenL40S_EstimateVRAM")
    spec = object_info["QwenL40S_EstimateVRAM"]["input"]["required"]
    newer["other"]["inputs"] = {key: entry[1]["default"] for key, entry in spec.items()}
    Checker(object_info).check(newer)
    newer["other"]["inputs"]["from_the_future"] = 1
    assert server.post(newer).json()["node_errors"] == {}
    with pytest.raises(SettingError, match="'from_the_future' that is unknown to the server"):
        Checker(object_info).check(newer)


@pytest.mark.parametrize("kind", IMAGE_FORMATS)
def test_the_formats_that_are_uploaded_can_be_loaded(server, kind):
    image = pytest.importorskip("PIL.Image")
    data = io.BytesIO()
    try:
        image.new("RGB", (16, 16), "green").save(data, format=kind)
    except KeyError:
        pytest.skip(f"this Pillow writes no {kind}")
    files = {"image": (f"cat.{kind.lower()}", data.getvalue())}
    given = server.client.post("/upload/image", files=files, data={"subfolder": "submit"}).json()
    name = f"{given['subfolder']}/{given['name']}"
    run = server.run(
        {
            "load": {"class_type": "LoadImage", "inputs": {"image": name}},
            "show": {"class_type": "PreviewImage", "inputs": {"images": ["load", 0]}},
        }
    )
    assert run.status == "success"
