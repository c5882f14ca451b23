"""What ComfyUI has around a forward pass: the arguments of its call, and its compiler."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import comfy.model_prefetch
import torch

from ....optimizations.verdict import Verdict
from ....patches import call

# Of BaseModel.apply_model, behind x and t. ComfyUI passes them by place; a wrapper of another
# extension may pass them on by name.
CALL_ARGUMENTS = ("c_concat", "c_crossattn", "control", "transformer_options")
COMPILED = "torch.compile"  # the key of comfy_api.torch_helpers
# Of transformer_options: how many steps of a run call the model, where a step cache skips others.
COMPUTED_STEPS = "qwen_l40s_computed_steps"
# {BaseModel that works: the BaseModels of cards that have nothing to do meanwhile}.
IDLE = "qwen_l40s_idle"


def context_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The text's tokens, (batch, tokens, features); None for none."""
    return _argument("c_crossattn", args, kwargs)


def control_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The output of ControlNets; None without one."""
    return _argument("control", args, kwargs)


def options_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The call's transformer_options."""
    return _argument("transformer_options", args, kwargs) or {}


def idle_models(options: Mapping[str, Any], model: Any) -> Sequence[Any]:
    """The BaseModels of the idle cards that may help a pass of `model`; empty without any."""
    return options.get(IDLE, {}).get(model, ())


def several_work(options: Mapping[str, Any]) -> bool:
    """Whether prompts of the step may be on several cards, each launched by a thread of its own."""
    return "multigpu_thread_device" in options and len(options.get(IDLE, ())) != 1


def is_skipped(options: Mapping[str, Any]) -> bool:
    """Whether ComfyUI's EasyCache has answered a call in the transformer's place."""
    # LazyCache, which keeps the same mark, has no wrapper there and skips the whole evaluation.
    wrapped = "easycache" in options.get("wrappers", {}).get("diffusion_model", {})
    return wrapped and bool(getattr(options.get("easycache"), "skip_current_step", False))


def _argument(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    place = CALL_ARGUMENTS.index(name)
    return args[place] if place < len(args) else kwargs.get(name)


def is_compiled(options: dict[str, Any]) -> bool:
    """Whether TorchCompileModel puts a compiled model in the place of the one that is called."""
    return bool(options.get("wrappers", {}).get("apply_model", {}).get(COMPILED))


# The Comfy Compiler, which a ComfyUI since 0.34 has: it records what a loop over blocks allocates
# from CUDA's asynchronous allocator in one block, and gives the same addresses to the next.
#
# What outlives a block has to come from elsewhere: a tensor that is recorded and still there when
# the block ends is a rogue, and a block that allocates something else than the one before is a
# break.

COMPILER_FAILED = Verdict(
    "ComfyUI's compiler stopped with an aimdo memory compile error: --disable-comfy-compiler "
    "starts ComfyUI without it",
    final=True,
)

_pauses = threading.local()


@contextmanager
def unrecorded(capturing: bool = False) -> Iterator[None]:
    """Keeps the compiler, where there is one, from recording what is allocated meanwhile."""
    pause = getattr(comfy.model_prefetch, "pause_malloc_graph", None)
    if pause is None:
        yield
        return
    outer = getattr(_pauses, "depth", 0)
    _pauses.depth = outer + 1
    try:
        with pause(sync=capturing):
            yield
    finally:
        _pauses.depth = outer
        if outer:  # ComfyUI's pauses do not count: the inner one has ended both
            pause().__enter__()


def clean_up(blocks: Collection[torch.nn.Module]) -> None:
    """Ends what a loop over these blocks that raised has left open: what the compiler records in
    this thread, and the pages of weights that ComfyUI has pinned for a block.
    """
    prefetch = comfy.model_prefetch
    if hasattr(prefetch, "cleanup_malloc_graph"):
        prefetch.cleanup_malloc_graph()
    # Not cleanup_prefetch_queues, which takes the queues of cards at work in other threads too.
    for queue in prefetch.PREFETCH_QUEUES:
        states = [entry[1] for entry in queue if isinstance(entry, tuple)]
        if any(module in blocks for module, _ in states):
            for module, layers in states:
                prefetch.cleanup_prefetched_modules(module, layers or ())
            call("queues", queue.clear)


def compiler_failed(error: RuntimeError) -> Verdict | None:
    """Why ComfyUI's blocks run after this error; None of one that is not the compiler's."""
    return COMPILER_FAILED if "aimdo memory compile error" in str(error) else None
