"""Shows on a node what it made and, when a run is over, what it did in that run."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Sequence

from .record import harmless

logger = logging.getLogger(__name__)

SUMMARY_LINES = 6
# Wires that bring no MODEL to a sampler.
NO_MODEL = {"CLIP", "CONDITIONING", "IMAGE", "LATENT", "MASK", "NOISE", "SAMPLER", "SIGMAS", "VAE"}


def shown(report: str, summary: str | None = None) -> dict[str, list[str]]:
    """Makes a node's output for the page: the report for the history, and the first `SUMMARY_LINES`
    of the summary, or else of the report, for web/qwen_l40s.js.
    """
    lines = (report if summary is None else summary).splitlines()[:SUMMARY_LINES]
    return {"text": [report], "qwen_l40s": ["\n".join(lines)]}


def show_run(node_class: str, report: Sequence[str], summary: str) -> None:
    """Logs what a node did in the run that is over, and shows the summary on the node.

    ComfyUI takes a node's result from another workflow where the inputs are the same. So the node
    is looked for in the prompt that runs: the nearest before the sampler, along wires of a MODEL.
    """
    logger.info("Qwen-Image Accelerator\n%s", "\n".join(report))
    with harmless():
        prompt, node = _before_sampler(node_class)
        if node is None or "server" not in sys.modules:
            return
        from server import PromptServer

        server = PromptServer.instance
        if server.client_id is None:
            return
        output = {**shown("\n".join(report), summary), "qwen_l40s_did": [True]}
        found = {"node": node, "display_node": node, "output": output, "prompt_id": prompt}
        server.send_sync("executed", found, server.client_id)


def _before_sampler(node_class: str) -> tuple[str, str | None]:
    from comfy_execution.progress import get_progress_state
    from comfy_execution.utils import get_executing_context

    from nodes import NODE_CLASS_MAPPINGS

    context, state = get_executing_context(), get_progress_state()
    if context is None or state.prompt_id != context.prompt_id:
        return "", None
    prompt = state.dynprompt
    waiting, seen = deque([context.node_id]), {context.node_id}
    while waiting:
        node_id = waiting.popleft()
        node = prompt.get_node(node_id)
        if node["class_type"] == node_class:
            return context.prompt_id, prompt.get_display_node_id(node_id)
        links = (it for it in node["inputs"].values() if isinstance(it, list) and len(it) == 2)
        for origin, slot in links:
            kind = NODE_CLASS_MAPPINGS[prompt.get_node(origin)["class_type"]].RETURN_TYPES[slot]
            if kind not in NO_MODEL and origin not in seen:
                seen.add(origin)
                waiting.append(origin)
    return context.prompt_id, None
