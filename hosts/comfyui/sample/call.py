"""What an APPLY_MODEL wrapper finds in the call that it wraps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
    """Whether ComfyUI's EasyCache has answered a call in the transformer's place.

    Args:
        options: transformer_options, when the call is over.
    """
    # LazyCache, which keeps the same mark, has no wrapper there and skips the whole evaluation.
    wrapped = "easycache" in options.get("wrappers", {}).get("diffusion_model", {})
    return wrapped and bool(getattr(options.get("easycache"), "skip_current_step", False))


def _argument(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    place = CALL_ARGUMENTS.index(name)
    return args[place] if place < len(args) else kwargs.get(name)


def is_compiled(options: dict[str, Any]) -> bool:
    """Whether TorchCompileModel puts a compiled model in the place of the one that is called.

    Args:
        options: transformer_options.
    """
    return bool(options.get("wrappers", {}).get("apply_model", {}).get(COMPILED))
