"""The state of one optimized diffusers transformer, and what it does in each forward pass."""

from __future__ import annotations

import inspect
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock

from ...loaders.convert import is_finite
from ...optimizations.block import is_changed
from ...optimizations.fused import Ops, choose_ops
from ...spec import format_gib
from .attention import TransformerAttention
from .forward import Call, ForwardPass, Prepared
from .layers import DiffusersLayers

logger = logging.getLogger(__name__)

Timesteps = Callable[[], Sequence[torch.Tensor]]


class Optimization:
    """What runs in place of a transformer's `forward`.

    It holds the transformer weakly: a pipeline that is deleted frees its memory at once.

    Args:
        transformer: diffusers'.
        attention: Computes the attention of the fused blocks.
    """

    def __init__(
        self, transformer: QwenImageTransformer2DModel, attention: TransformerAttention
    ) -> None:
        self._transformer = weakref.ref(transformer)
        self._attention = attention
        self._signature = inspect.signature(type(transformer).forward)
        self._ops: dict[torch.device, tuple[Ops | None, str]] = {}
        self._ops_reason = ""
        self._prepared: Prepared | None = None
        self._timesteps: Timesteps | None = None
        self._in_run = False  # inside `run`, which says where a run begins
        self._said: set[str] = set()
        self._closing_report = ""
        self._lock = threading.Lock()
        self._start_run()

    def _start_run(self) -> None:
        """Counts from zero."""
        self._passes = self._fused = 0
        self._others: Counter[str] = Counter()
        self._layers: DiffusersLayers | None = None  # of the last pass with the executor

    @contextmanager
    def run(self, timesteps: Timesteps | None) -> Iterator[None]:
        """One sampling run; see `patch.Optimized.run`."""
        self._start_run()
        self._attention.start_run()
        self._forget()
        self._timesteps, self._in_run = timesteps, True
        try:
            yield
        finally:
            self._timesteps, self._in_run = None, False
            self._forget()

    def _forget(self) -> None:
        if self._prepared is not None:
            self._prepared.forget()

    def forward(
        self, host: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """One call of the transformer; `host` is its own forward."""
        transformer = self._transformer()
        try:
            given = self._signature.bind(transformer, *args, **kwargs).arguments
        except TypeError:  # theirs to say
            return host(*args, **kwargs)
        # The blocks hold one pass: another thread waits.
        with self._lock:
            output = self._forward(transformer, host, given, args, kwargs)
            if not self._gave_nan(given, output):
                return output
            self._attention.give_up()
            return self._forward(transformer, host, given, args, kwargs)

    def _forward(
        self,
        transformer: QwenImageTransformer2DModel,
        host: Callable[..., Any],
        given: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        latents = given["hidden_states"]
        ops, self._ops_reason = self._ops_for(latents.device)
        blocks = tuple(transformer.transformer_blocks)
        reason = why_aside(transformer, blocks, latents) if ops else self._ops_reason
        if not reason:
            prepared = self._prepare(transformer, blocks)
            reason = prepared.check.failed
        if reason and self._layers is not None and not self._in_run:
            self._start_run()
        self._passes += 1
        if reason:
            self._note(Counter({reason: len(blocks)}))
            return host(*args, **kwargs)
        additional, guidance = given.get("additional_t_cond"), given.get("guidance")
        forward_pass = ForwardPass(
            prepared,
            ops,
            self._attention,
            Call(latents, given["timestep"], additional, guidance is None),
            self._begin,
            across_borders=given.get("controlnet_block_samples") is None,
        )
        with forward_pass.installed():
            output = host(*args, **kwargs)
        self._layers = forward_pass.layers
        self._fused += forward_pass.fused
        self._note(forward_pass.others)
        return output

    def _begin(self, call: Call, arguments: dict[str, Any]) -> None:
        """Before the modulation of a pass is read."""
        prepared = self._prepared
        if not prepared.begins_run(call):
            return
        if not self._in_run:
            self._start_run()
            self._attention.start_run()
            self._passes = 1
        prepared.start_run()
        if self._timesteps is not None:
            prepared.fill(self._timesteps(), call, arguments)

    def close(self) -> None:
        """Frees what it holds; only the report stays."""
        self._closing_report = self.report()
        self._prepared = self._layers = None

    def report(self) -> str:
        """Which path every part took in the last run, a line each."""
        if self._closing_report:
            return self._closing_report
        if not self._passes:
            lines = ["blocks: fused; the first step compares one with diffusers' own"]
            return "\n".join([*lines, *self._attention.lines()])
        total = self._fused + self._others.total()
        lines = []
        if self._fused:
            lines.append(
                f"blocks: fused, {self._fused} of {total} in {self._passes} forward passes "
                f"({self._ops_reason}); the check's largest difference was "
                f"{self._prepared.check.worst:.2g}"
            )
        for reason, count in self._others.most_common():
            lines.append(f"blocks: diffusers' own, {count} of {total}: {reason}")
        if not self._fused:
            return "\n".join([*lines, "attention: diffusers' own, with its blocks"])
        lines += [f"layers: {gemm}" for gemm in self._layers.gemms.values()]
        kinds = self._layers.kinds
        if kinds[None]:
            lines.append(f"layers: {kinds[None]} of {kinds.total()} run diffusers' own way")
        table = self._prepared.table
        if table is None:
            lines.append("modulation: computed in each forward pass: its layers are not plain ones")
        else:
            lines.append(
                f"modulation: {len(table)} timesteps in a table of {format_gib(table.bytes)}, "
                f"read {table.hits} times"
            )
        return "\n".join([*lines, *self._attention.lines()])

    def _prepare(
        self, transformer: QwenImageTransformer2DModel, blocks: tuple[torch.nn.Module, ...]
    ) -> Prepared:
        if self._prepared is None or self._prepared.blocks != blocks:
            embed, lossy = transformer.time_text_embed, self._attention.lossy
            self._prepared = Prepared(blocks, embed, lossy)
        return self._prepared

    def _ops_for(self, device: torch.device) -> tuple[Ops | None, str]:
        if device not in self._ops:
            self._ops[device] = choose_ops(device)
        return self._ops[device]

    def _gave_nan(self, given: dict[str, Any], output: Any) -> bool:
        """Whether attention spoilt a pass: a lossy one is watched in each, others in the first."""
        attention = self._attention
        if not self._fused or not attention.may_be_wrong:
            return False
        watched = attention.lossy or self._passes == 1
        return watched and not is_finite(output[0]) and is_finite(given["hidden_states"])

    def _note(self, others: Counter[str]) -> None:
        """Counts the blocks that diffusers ran itself, and says why once."""
        self._others.update(others)
        failed = self._prepared.check.failed if self._prepared is not None else ""
        for reason in others.keys() - self._said - {failed}:  # the check has said it already
            self._said.add(reason)
            logger.warning("Qwen-Image L40S: %s: diffusers' own blocks run.", reason)


def why_aside(
    transformer: QwenImageTransformer2DModel,
    blocks: Sequence[torch.nn.Module],
    latents: torch.Tensor,
) -> str:
    """Why the host's blocks run in a forward pass, in one clause; empty when the executor's do."""
    if torch.is_grad_enabled():
        return "gradients are recorded: call it under torch.no_grad()"
    if transformer.training:
        return "the transformer is in training mode: call eval()"
    if torch.jit.is_tracing():
        return "torch.jit traces the model"
    if torch.is_autocast_enabled(latents.device.type):
        return "autocast is on"
    if latents.is_cuda and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    classes = set(map(type, blocks))
    if classes != {QwenImageTransformerBlock}:
        return f"its blocks are {' and '.join(sorted(found.__name__ for found in classes))}"
    if any(block._compiled_call_impl is not None for block in blocks):
        return "torch.compile runs the blocks: without it the fused ones would"
    if any(map(is_changed, blocks)):
        return "another extension has changed the blocks, as offloading and caching do"
    return ""
