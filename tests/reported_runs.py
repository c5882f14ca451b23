"""Samples and reports inside a prompt that has a Report node, as ComfyUI executes one."""

import itertools
from contextlib import contextmanager

from comfy_execution.graph import DynamicPrompt
from comfy_execution.progress import get_progress_state, reset_progress_state
from comfy_execution.utils import CurrentNodeContext

from qwen_l40s.hosts.comfyui.report import report_run

NUMBERS = itertools.count()


@contextmanager
def running(prompt: str | None = None, report: bool = True):
    node = {"class_type": "QwenL40S_Report" if report else "KSampler", "inputs": {}}
    name = prompt or f"prompt {next(NUMBERS)}"
    reset_progress_state(name, DynamicPrompt({"node": node}))
    with CurrentNodeContext(name, "node"):
        yield


def reported(model, *parts):
    with CurrentNodeContext(get_progress_state().prompt_id, "node"):
        return report_run(model, *parts)
