"""What people call the families, and the licences of their weights."""

from __future__ import annotations

QWEN_IMAGE, QWEN_IMAGE_21 = "Qwen-Image", "Qwen-Image-2.1"
APACHE = "Apache-2.0"
LICENCE_21 = (
    "Qwen Research License: research, not commercial use (Qwen-Image-2512 and Edit-2511 are "
    f"{APACHE})"
)
