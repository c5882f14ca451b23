"""Runs in ComfyUI's own Python: what ComfyUI tells its page of every node.

    python comfyui_help.py COMFYUI

Prints one JSON object, {node id: its entry in GET /object_info}.
"""

import json

import comfyui_boot

comfyui_boot.start("--cpu")

from qwen_l40s.nodes import NODES

entries = [node.GET_NODE_INFO_V1() for node in NODES]
print(json.dumps({entry["name"]: entry for entry in entries}))
