"""Qwen-Image on an NVIDIA L40S: faster, in less memory, and with the cost told beforehand.

The repository root is this package, so that one folder serves as a ComfyUI custom node pack and as
an installed distribution. Importing it defines names only: it reads no file, touches no GPU and
imports neither torch nor a host.
"""

from .errors import CheckpointError, QwenL40SError, SettingError, UnavailableError

__version__ = "0.1.0"

__all__ = ["CheckpointError", "QwenL40SError", "SettingError", "UnavailableError", "__version__"]
