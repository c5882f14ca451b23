"""The workflows as a real server lists them, and what it knows of their nodes."""

from __future__ import annotations

import io
import json

import numpy as np
from comfyui_server import ROOT, Server
from PIL import Image

from qwen_l40s.tools.workflows import definitions, forms

FOLDER = ROOT / "workflows"


def test_the_nodes_are_those_of_the_real_host(server: Server):
    info = server.client.get("/object_info").json()
    kept = json.loads(definitions.FILE.read_text(encoding="utf-8"))
    assert {name for name in info if name.startswith(definitions.OURS)} <= kept.keys()
    if "TextEncodeQwenImage21" not in info:  # of a ComfyUI without Qwen-Image-2.1
        del kept["TextEncodeQwenImage21"]
    found = definitions.subset(info, kept)
    version = server.client.get("/system_stats").json()["system"]["comfyui_version"]
    if version != forms.COMFYUI:  # another one may call its own nodes otherwise
        for name in found.keys() - {name for name in info if name.startswith(definitions.OURS)}:
            found[name]["display_name"] = kept[name]["display_name"]
    assert kept == found, "tools/workflows/definitions.py says how"


def test_the_page_lists_them_as_templates(server: Server):
    (listed,) = server.client.get("/workflow_templates").json().values()
    assert sorted(listed) == sorted(file.stem for file in FOLDER.glob("*.json"))


def test_pixels_outside_the_mask_stay_in_inpaint(server: Server):
    """With a picture that is no square, and its negative in place of what a model would paint."""
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 50, 3), np.uint8))
    picture = picture.resize((1000, 600), Image.Resampling.BICUBIC)
    alpha = np.full((600, 1000), 255, np.uint8)
    alpha[200:400, 300:600] = 0
    picture.putalpha(Image.fromarray(alpha))
    held = io.BytesIO()
    picture.save(held, "PNG")
    upload = {"image": ("masked.png", held.getvalue(), "image/png")}
    assert server.client.post("/upload/image", files=upload).status_code == 200

    graph = json.loads((FOLDER / "api" / "inpaint.json").read_text(encoding="utf-8"))
    graph["image_1"]["inputs"]["image"] = "masked.png"
    graph["decode"] = {"class_type": "ImageInvert", "inputs": {"image": ["scale", 0]}}
    for name, shown in (("scaled", "scale"), ("shape", "mask_scale")):
        inputs = {"images": [shown, 0], "filename_prefix": name}
        graph[name] = {"class_type": "SaveImage", "inputs": inputs}
    run = server.run(graph)
    assert run.status == "success"
    result, scaled, mask = (
        np.asarray(Image.open(io.BytesIO(server.image(run, name))).convert("RGB")).astype(int)
        for name in ("save", "scaled", "shape")
    )
    assert result.shape == scaled.shape == mask.shape
    assert 0.09 < (mask == 255).mean() < 0.11
    assert np.array_equal(result[mask == 0], scaled[mask == 0])
    # SaveImage cuts to whole steps, so that a negative may be one of them off.
    assert np.abs(result + scaled - 255)[mask == 255].max() <= 1
