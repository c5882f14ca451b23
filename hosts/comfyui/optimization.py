"""The state of one optimized MODEL, and what it does in each run and in each forward pass."""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ...loaders.tensor_checks import is_finite
from ...optimizations.block_form import is_changed
from .attention import SLOT, SlotAttention
from .cfg_batching import CfgBatching
from .flags import flags_for_a_run
from .forward import ForwardPass
from .modulation import Call, ModelModulation
from .prepared import Prepared, blocks_of
from .wrapped_call import control_of, is_compiled, options_of

logger = logging.getLogger(__name__)

KEY = "qwen_l40s_optimize"


class Optimization:
    """What `optimize` hangs on a patcher; clones of the patcher share it.

    What is known of a model is found out anew in each run, whose patches are in place by its first
    forward pass, and kept for each model and each set of patches: clones can carry other LoRAs, and
    with several cards each has a model of its own.

    Args:
        blocks: Whether the executor runs the blocks.
        attention: The attention that fills ComfyUI's slot, or None for the host's.
        tf32, cudnn_benchmark: Switches during a run.
    """

    def __init__(
        self,
        blocks: bool,
        attention: SlotAttention | None,
        batching: CfgBatching,
        tf32: bool = False,
        cudnn_benchmark: bool = False,
    ) -> None:
        self.attention = attention
        self._batching = batching
        self._blocks = blocks
        self._flags = tf32, cudnn_benchmark
        self._known: WeakKeyDictionary[Any, dict[Any, Prepared]] = WeakKeyDictionary()
        self._last: Prepared | None = None
        self._aside = ""

    def outer_sample(self, executor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """OUTER_SAMPLE wrapper: one run."""
        if self.attention is not None:
            self.attention.start_run()
        self._known = WeakKeyDictionary()
        self._batching.start_run()
        with flags_for_a_run(*self._flags):
            output = executor(*args, **kwargs)
        self._batching.finish_run()
        logger.info("Qwen-Image L40S\n%s", self.report())
        return output

    def apply_model(
        self, executor: Any, x: torch.Tensor, t: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """APPLY_MODEL wrapper: one forward pass."""
        prepared = self._prepare(executor.class_obj)
        prepared.passes += 1
        output = self._forward(prepared, executor, x, t, args, kwargs)
        attention = self._attention_in(options_of(args, kwargs))
        if attention is None or attention.broken or not (prepared.passes <= 1 or attention.lossy):
            return output
        if is_finite(output) or not is_finite(x):
            return output
        attention.give_up()
        return self._forward(prepared, executor, x, t, args, kwargs)

    def report(self) -> str:
        """Which path every part took, a line each."""
        last = self._last
        if not self._blocks:
            lines = ["blocks: ComfyUI's own, as asked for"]
        elif last is None:
            lines = ["blocks: fused; the first step compares one with ComfyUI's own"]
        elif self._aside or last.check.failed:
            lines = [f"blocks: ComfyUI's own: {self._aside or last.check.failed}"]
        else:
            lines = last.lines()
        if self.attention is None:
            lines.append("attention: ComfyUI's own, or what another node has set")
        else:
            lines += self.attention.lines()
        lines += self._batching.lines()
        return "\n".join(lines)

    def _forward(
        self,
        prepared: Prepared,
        executor: Any,
        x: torch.Tensor,
        t: torch.Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        model, options = executor.class_obj, options_of(args, kwargs)
        # Local as well: with several cards another thread writes it.
        self._aside = aside = self._why_aside(prepared, model, options)
        if aside:
            return executor(x, t, *args, **kwargs)
        modulation = prepared.modulation
        forward_pass = ForwardPass(
            blocks_of(model),
            prepared.ops,
            self.attention,
            modulation.entry,
            prepared.check,
            across_borders=control_of(args, kwargs) is None,
        )
        with modulation.during(Call(t, options, kwargs)), forward_pass.installed():
            output = executor(x, t, *args, **kwargs)
        prepared.count(forward_pass)
        return output

    def _why_aside(self, prepared: Prepared, model: Any, options: dict[str, Any]) -> str:
        if not self._blocks:
            return "as asked for"
        if prepared.misfit:
            return prepared.misfit
        if is_compiled(options):
            return "torch.compile runs the model; without it the fused blocks would"
        if options.get("patches", {}).get("attn1_patch"):
            return "another node changes what attention reads (attn1_patch)"
        if any(map(is_changed, blocks_of(model))):
            return "another extension has changed the blocks"
        if torch.is_grad_enabled():
            return "gradients are recorded, which the kernels do not"
        return ""

    def _attention_in(self, options: dict[str, Any]) -> SlotAttention | None:
        """This optimization's attention where the slot still holds it."""
        held = options.get(SLOT)
        return held if held is not None and held is self.attention else None

    def _prepare(self, model: Any) -> Prepared:
        patches = getattr(model.current_patcher, "patches_uuid", None)
        if model not in self._known:
            ModelModulation.of(model).start_run()
        known = self._known.setdefault(model, {})
        if patches not in known:
            known[patches] = Prepared(model, self.attention is not None and self.attention.lossy)
        self._last = known[patches]
        return known[patches]
