"""What a node shows in itself, on the page that started the run."""

from __future__ import annotations

from comfy_api.latest import io
from server import PromptServer


def show_text(node: type[io.ComfyNode], text: str) -> None:
    """Shows a few lines in the node while it runs, as ComfyUI's own nodes do.

    The page draws a node's `ui` text in Preview as Text only. Without a server, as in a script that
    calls the node, nothing is shown.

    Args:
        node: the class as `execute` gets it; its schema asks for `io.Hidden.unique_id`.
    """
    server = getattr(PromptServer, "instance", None)
    if server is not None:
        server.send_progress_text(text, node.hidden.unique_id)
