"""Makes Qwen-Image faster in less memory, and predicts time and cost before a run.

The repository root is this package, so that one folder serves as a ComfyUI custom node pack and as
an installed distribution. Importing it defines names only: it reads no file, touches no GPU and
imports neither torch nor a host. Inside ComfyUI, which has imported `folder_paths` by then, the
nodes are defined too, and its page finds what belongs to it in `WEB_DIRECTORY`.
"""

import sys

from .errors import CheckpointError, QwenL40SError, SettingError, UnavailableError
from .version import __version__

__all__ = [
    "PUBLIC",
    "WEB_DIRECTORY",
    "CheckpointError",
    "QwenL40SError",
    "SettingError",
    "UnavailableError",
    "__version__",
]

# {module: names} that other packages may import, besides `__all__` here: they keep their meaning.
PUBLIC = {
    "client": ("Fleet", "JobError", "Result"),
    "hosts.diffusers.load": ("LoadedPipeline", "load_pipeline"),
    "hosts.diffusers.patch": ("optimize",),
    "hosts.diffusers.step_cache": ("cache_steps",),
}

# What ComfyUI serves to its page: web/docs/<node id>.md is a node's help, and it runs qwen_l40s.js.
WEB_DIRECTORY = "./web"

if "folder_paths" in sys.modules:
    from .nodes import comfy_entrypoint  # noqa: F401
