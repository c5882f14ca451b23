"""GET /object_info of ComfyUI 0.33 with this pack and without models, for some of its nodes.

To make `object_info.json` anew, from a server that has no models and no input images:

    curl -s http://127.0.0.1:8188/object_info > all.json
    python tests/server_nodes.py < all.json > tests/object_info.json
"""

import json
import sys
from pathlib import Path

FILE = Path(__file__).resolve().parent / "object_info.json"
CORE = (
    *("BatchImagesNode", "CLIPLoader", "CLIPTextEncode", "ConditioningZeroOut", "CustomCombo"),
    *("EmptySD3LatentImage", "InpaintModelConditioning", "KSampler", "LoadImage"),
    *("LoadImageOutput", "LoraLoaderModelOnly", "ModelSamplingAuraFlow", "Painter"),
    *("PrimitiveInt", "ResizeImageMaskNode", "SaveImage", "SetLatentNoiseMask", "StringFormat"),
    *("TextEncodeQwenImageEditPlus", "UNETLoader", "VAEDecode", "VAEEncode", "VAELoader"),
)
# What the page shows and the client does not read.
SHOWN = {"tooltip", "default", "advanced", "multiline", "dynamicPrompts", "display_name", "labels"}


def limited(object_info):
    """What the client reads of the nodes above and of ours."""
    groups = ("required", "optional")
    names = [name for name in object_info if name in CORE or name.startswith("QwenL40S_")]
    return {
        name: {
            "input": _without_shown(
                {group: object_info[name]["input"].get(group, {}) for group in groups}
            ),
            "output": object_info[name]["output"],
            "output_node": object_info[name]["output_node"],
            "python_module": object_info[name]["python_module"],
        }
        for name in sorted(names)
    }


def _without_shown(value):
    if isinstance(value, dict):
        return {key: _without_shown(each) for key, each in value.items() if key not in SHOWN}
    if isinstance(value, list):
        return [_without_shown(each) for each in value]
    return value


def stored():
    """The stored nodes, which a test may change."""
    return json.loads(FILE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    print(json.dumps(limited(json.load(sys.stdin)), separators=(",", ":")))
