"""The state of one optimized diffusers transformer, and what it does in each forward pass."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from diffusers import QwenImageTransformer2DModel

from ...optimizations.run import Optimization
from .attention import TransformerAttention
from .forward import TransformerPass
from .layers import DiffusersLayers
from .modulation import Timesteps, TransformerModulation


class TransformerOptimization(Optimization):
    """Runs in place of a transformer's `forward`.

    It holds the transformer weakly: a pipeline that is deleted frees its memory at once. Nothing in
    diffusers says where a run begins or that modules have changed, so that a call outside of `run`
    is a run of its own.

    Args:
        transformer: diffusers'.
        attention: Computes the attention of the fused blocks.
    """

    host = "diffusers'"

    def __init__(
        self, transformer: QwenImageTransformer2DModel, attention: TransformerAttention
    ) -> None:
        super().__init__(attention)
        self._transformer = weakref.ref(transformer)
        self._signature = inspect.signature(type(transformer).forward)
        self._modulation = TransformerModulation()
        self._layers = DiffusersLayers()
        self._in_run = False
        self._closing_report = ""
        self._lock = threading.Lock()

    @contextmanager
    def run(self, timesteps: Timesteps | None) -> Iterator[None]:
        """One sampling run; see `patch.Optimized.run`."""
        self.start_run()
        self._modulation.open_run(timesteps)
        self._in_run = True
        try:
            yield
        finally:
            self._in_run = False
            self._modulation.close_run()
            self._leave()

    def start_run(self) -> None:
        """Forgets what was known in the last run."""
        super().start_run()
        self._layers = DiffusersLayers()

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
            if not self._in_run:
                self.start_run()
            adapter = TransformerPass(
                transformer, self.attention, self._layers, self._modulation, given
            )
            try:
                return self.run_pass(adapter, lambda: host(*args, **kwargs))
            finally:
                if not self._in_run:
                    self._leave()

    def close(self) -> None:
        """Frees what it holds; only the report stays."""
        self._closing_report = self.report()
        self._modulation.close_run()
        self._leave()
        super().start_run()

    def _leave(self) -> None:
        """Frees graphs and buffers: nothing says whether weights stay until the next run."""
        self.end_run()
        transformer = self._transformer()
        if transformer is not None:
            self.release(transformer)

    def report(self) -> str:
        """Which path every part took in the last run, a line each."""
        return self._closing_report or super().report()

    def attention_lines(self) -> list[str]:
        """Which attention ran: with blocks of diffusers' own, its own."""
        if self._last is not None and not self._last.fused:
            return ["attention: diffusers' own, with its blocks"]
        return super().attention_lines()
