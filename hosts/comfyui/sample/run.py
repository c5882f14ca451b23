"""torch's process-wide switches, set for the length of one run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ....loaders.convert import is_finite
from ....optimizations.block import is_changed, misfit, token_layers
from ....optimizations.fused import choose_ops
from ....optimizations.self_check import Check
from ....spec import QUANTIZED
from .attention import SLOT, SlotAttention
from .call import control_of, is_compiled, options_of
from .forward import ForwardPass
from .layers import ComfyLayers
from .modulation import Call, ModelModulation


@contextmanager
def flags_for_a_run(tf32: bool, cudnn_benchmark: bool) -> Iterator[None]:
    """Sets what is asked for and puts back what was there; False leaves a switch alone."""
    with ExitStack() as stack:
        if tf32:
            stack.enter_context(_tf32())
        if cudnn_benchmark:
            stack.enter_context(_set(torch.backends.cudnn, "benchmark", True))
        yield


@contextmanager
def _tf32() -> Iterator[None]:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    try:
        name, value, switches = "allow_tf32", True, (matmul, cudnn)
        for switch in switches:
            getattr(switch, name)
    except RuntimeError:  # somebody uses torch's newer switches, and torch takes one kind only
        name, value, switches = "fp32_precision", "tf32", (matmul, cudnn.conv)
    with ExitStack() as stack:
        for switch in switches:
            stack.enter_context(_set(switch, name, value))
        yield


@contextmanager
def _set(switch: object, name: str, value: object) -> Iterator[None]:
    before = getattr(switch, name)
    setattr(switch, name, value)
    try:
        yield
    finally:
        setattr(switch, name, before)


# What the optimization knows of one model with one set of patches on its weights.


class Prepared:
    """Kernels and check for one model in one run; between runs it holds no module of it.

    Args:
        model: ComfyUI's BaseModel.
        lossy_attention: Whether attention differs from exact attention by more than rounding.
    """

    def __init__(self, model: Any, lossy_attention: bool) -> None:
        blocks = blocks_of(model)
        layers = ComfyLayers()
        dtype, device = model.get_dtype_inference(), _device(model)
        ops, self._ops_reason = choose_ops(device)
        self.ops = ops
        faults = (misfit(block, dtype) for block in blocks)
        self.misfit = self._ops_reason if ops is None else next(filter(None, faults), "")
        read = [] if self.misfit else [layer for block in blocks for layer in token_layers(block)]
        kinds = list(map(layers.kind, read))
        formats = sorted(set(kinds) & set(QUANTIZED))
        self._gemms = [str(layers.gemm(format, device)) for format in formats]
        self._opaque, self._layers = kinds.count(None), len(kinds)
        self.check = Check(quantized=bool(formats) or lossy_attention)
        self.modulation = ModelModulation.of(model)
        self.passes = self._fused = self._blocks = 0

    def count(self, forward_pass: ForwardPass) -> None:
        """Notes what the executor did in a forward pass."""
        self._fused += forward_pass.fused
        self._blocks += forward_pass.blocks

    def lines(self) -> list[str]:
        """What ran, a line each."""
        lines = [
            f"blocks: fused, {self._fused} of {self._blocks} in {self.passes} forward passes "
            f"({self._ops_reason}); the check's largest difference was {self.check.worst:.2g}"
        ]
        lines += [f"layers: {gemm}" for gemm in self._gemms]
        if self._opaque:
            lines.append(f"layers: {self._opaque} of {self._layers} run ComfyUI's own way")
        return lines + self.modulation.lines()


def blocks_of(model: Any) -> Sequence[torch.nn.Module]:
    """The double-stream blocks of a BaseModel."""
    return tuple(model.diffusion_model.transformer_blocks)


def _device(model: Any) -> torch.device:
    patcher = model.current_patcher
    return next(model.parameters()).device if patcher is None else patcher.load_device


# The state of one optimized MODEL, and what it does in each run and in each forward pass.

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
        tf32: bool = False,
        cudnn_benchmark: bool = False,
    ) -> None:
        self.attention = attention
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
        with flags_for_a_run(*self._flags):
            output = executor(*args, **kwargs)
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
