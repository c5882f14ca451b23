"""Makes a diffusers transformer of Qwen-Image fast: fused blocks, modulation tables, attention.

What hangs on the transformer is one `forward` of its own, as accelerate and diffusers' own hooks
put theirs. Without it diffusers' code runs, bit for bit.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel

from ...families.registry import blocks_of, pass_of
from ...optimizations.attention import is_lossy
from ...optimizations.patches import ABSENT, swap
from ...optimizations.run import Optimization
from ...planning.options import todays
from ...verdict import Verdict
from .layers import DiffusersLayers, Timesteps, TransformerModulation
from .qwen_image import HOST_ATTENTION, TransformerAttention

# Where a module's `forward` is found: accelerate keeps the one that it wraps, and puts it back
# after every image.
SLOTS = ("_old_forward", "forward")
Instead = Any  # called with (host, args, kwargs)


def optimize(transformer: QwenImageTransformer2DModel, *, attention: str = "auto") -> Optimized:
    """Makes a transformer run fast; a model that is not Qwen-Image stays as it is.

    Optimizing a second time replaces what the first time did.

    Args:
        transformer: Such as `pipeline.transformer`; of any pipeline for Qwen-Image.
        attention: "auto" for the fastest exact backend, "fast" for the fastest with an error of at
            most `MOST_ERROR`, the name of one, or "diffusers".

    Raises:
        SettingError: There is no attention backend of that name.
        UnavailableError: The attention that was asked for by name cannot run here.

    Example:
        optimized = optimize(pipeline.transformer)
        with optimized.run(lambda: pipeline.scheduler.timesteps):
            image = pipeline("a red star").images[0]
        print(optimized.report())
    """
    if fallback := unsupported_model(transformer):
        return Optimized(None, fallback)
    parameter = next(transformer.parameters())
    device = parameter.device
    if device.type == "cpu" and torch.cuda.is_available():
        device = torch.device("cuda")  # where it will run: not moved yet, or offloaded between runs
    attention = todays({"attention": attention})["attention"]
    lossy = is_lossy_attention(transformer, attention, device, parameter.dtype)
    before = _installed(transformer)
    if before is not None:
        before.instead.close()
        before.remove()
    optimization = TransformerOptimization(transformer, TransformerAttention(attention, lossy))
    forward = Forward(transformer, optimization)
    forward.install()
    return Optimized(forward)


def is_lossy_attention(
    transformer: QwenImageTransformer2DModel, name: str, device: torch.device, dtype: torch.dtype
) -> bool:
    """Tells whether the attention asked for differs from exact attention by more than rounding."""
    if name == HOST_ATTENTION:
        return False
    config, name = transformer.config, todays({"attention": name})["attention"]
    return is_lossy(name, device, dtype, config.num_attention_heads, config.attention_head_dim)


def unsupported_model(transformer: object) -> Verdict | None:
    """Says why a model is not optimized, in one sentence; None when it is Qwen-Image."""
    if pass_of(transformer) and len(blocks_of(transformer)):
        return None
    return Verdict(
        f"The model is {type(transformer).__name__}, not a transformer of Qwen-Image "
        "(QwenImageTransformer2DModel, QwenImage21Transformer2DModel): it is left unchanged.",
        final=True,
    )


class Optimized(AbstractContextManager):
    """Holds what `optimize` has done to a transformer; as a context manager, until its end."""

    def __init__(self, forward: Forward | None, fallback: Verdict | None = None) -> None:
        self._forward = forward
        self._optimization = None if forward is None else forward.instead
        self._fallback = fallback

    def report(self) -> str:
        """Says which path every part took in the last run, a line each."""
        return self._optimization.report() if self._optimization else str(self._fallback)

    def run(self, timesteps: Timesteps | None = None) -> AbstractContextManager[None]:
        """Marks one sampling run, in which nobody changes weights: the modulation comes from a
        table, and the first step alone is checked. A call outside is a run of its own.

        Args:
            timesteps: Gives the scheduler's timesteps, from 1000 to 0, when the first step asks for
                them: the modulation of all steps is then computed at once.
        """
        return self._optimization.run(timesteps) if self._optimization else nullcontext()

    def restore(self) -> None:
        """Takes everything off again; frees the table. A second time does nothing."""
        if self._forward is not None and self._forward.instead is not None:
            self._forward.remove()
            self._optimization.close()

    def __exit__(self, *error: object) -> None:
        self.restore()


class TransformerOptimization(Optimization):
    """Runs in place of a transformer's `forward`.

    It holds the transformer weakly: a pipeline that is deleted frees its memory at once. Nothing in
    diffusers says where a run begins or that modules have changed, so that a call outside of `run`
    is a run of its own.
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
        self.start_run()
        self._modulation.open_run(timesteps)
        self._in_run = True
        try:
            yield
            if (transformer := self._transformer()) is not None:
                self.pass_by(transformer)
        finally:
            self._in_run = False
            self._modulation.close_run()
            self._leave()

    def start_run(self) -> None:
        super().start_run()
        self._layers = DiffusersLayers()

    def __call__(
        self, host: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Makes one call of the transformer; `host` is its own forward."""
        transformer = self._transformer()
        try:
            given = self._signature.bind(transformer, *args, **kwargs).arguments
        except TypeError:  # theirs to say
            return host(*args, **kwargs)
        # The blocks hold one pass: another thread waits.
        with self._lock:
            if not self._in_run:
                self.start_run()
            adapter = pass_of(transformer)(
                transformer, self.attention, self._layers, self._modulation, given
            )
            try:
                return self.run_pass(adapter, lambda: host(*args, **kwargs))
            finally:
                if not self._in_run:
                    self._leave()

    def close(self) -> None:
        self._closing_report = self.report()
        self._modulation.close_run()
        self._leave()
        super().start_run()

    def be_traced(self) -> None:
        """Says that torch.compile traces the host's code, which runs from then on."""
        self._passed_by = True

    def _leave(self) -> None:
        """Frees graphs and buffers: nothing says whether weights stay until the next run."""
        self.end_run()
        transformer = self._transformer()
        if transformer is not None:
            self.release(transformer)

    def report(self) -> str:
        if self._last is None and not (self._passed_by or self._closing_report):
            return (
                "blocks: nothing was computed yet; the first forward pass compares fused blocks "
                "with diffusers' code"
            )
        return self._closing_report or super().report()

    def attention_lines(self) -> list[str]:
        if self._passed_by or (self._last is not None and not self._last.fused):
            return ["attention: diffusers' code, as in its blocks"]
        return super().attention_lines()


class Forward:
    """Stands for a transformer's `forward`.

    Without a `__dict__`: accelerate and diffusers copy that of what they wrap.

    Args:
        instead: Runs for each call, (host, args, kwargs), where `host` is what the call would have
            run; None for that alone.
    """

    __slots__ = ("__signature__", "_transformer", "before", "instead")

    def __init__(self, transformer: QwenImageTransformer2DModel, instead: Instead | None) -> None:
        self.instead = instead
        # what was in its place, of another extension; ABSENT for the class's own
        self.before: Any = ABSENT
        self._transformer = weakref.ref(transformer)
        self.__signature__ = inspect.signature(type(transformer).forward.__get__(transformer))

    def install(self) -> None:
        """Takes the innermost place there is."""
        own = self._transformer().__dict__
        slot = next((slot for slot in SLOTS if slot in own), "forward")
        self.before = swap(own, slot, self)

    def remove(self) -> None:
        """Puts back what was there; somebody who has wrapped this one since calls through it."""
        self.instead = None
        transformer = self._transformer()
        own = {} if transformer is None else transformer.__dict__
        for slot in SLOTS:
            if own.get(slot) is not self:
                continue
            before = self.before
            if before is ABSENT and slot != "forward":
                before = type(transformer).forward.__get__(transformer)
            swap(own, slot, before)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Neither the choices nor the launches can be traced.
        if self.instead is None or torch.compiler.is_compiling():
            if isinstance(self.instead, TransformerOptimization):
                self.instead.be_traced()
            return self._own(*args, **kwargs)
        return self.instead(self._own, args, kwargs)

    def _own(self, *args: Any, **kwargs: Any) -> Any:
        if self.before is not ABSENT:
            return self.before(*args, **kwargs)
        transformer = self._transformer()
        return type(transformer).forward(transformer, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and saves what was in its place: a copy, and a file, are not optimized."""
        if self.before is ABSENT:
            return getattr, (self._transformer(), "forward")
        return partial, (self.before,)


def _installed(transformer: QwenImageTransformer2DModel) -> Forward | None:
    for slot in SLOTS:
        forward = transformer.__dict__.get(slot, ABSENT)
        while forward is not ABSENT:
            ours = isinstance(forward, Forward)
            if ours and isinstance(forward.instead, TransformerOptimization):
                return forward
            forward = forward.before if ours else getattr(forward, "__wrapped__", ABSENT)
    return None
