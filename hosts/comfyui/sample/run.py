"""Runs an optimized MODEL's sampling runs and forward passes, on ComfyUI's hooks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, combinations
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import comfy.model_management
import comfy.utils
import torch
from comfy.quant_ops import QuantizedTensor
from comfy.samplers import CFGGuider

from ....caches import cached
from ....errors import SettingError, UnavailableError
from ....families.comfyui import kind_of
from ....families.registry import blocks_of
from ....loaders.quantize import is_finite, not_finite
from ....machine.links import link_between
from ....optimizations import patches
from ....optimizations.run import Later, NotFiniteError, Optimization, flags_for_a_run
from ....verdict import Verdict, first_line, read_or
from ..lora.bypass import bypassed, hook_merges, split_patches
from ..on_node import show_run
from .attention import SLOT, FileAttention, SlotAttention
from .forward import IDLE, is_compiled, is_skipped
from .held import HeldWeights, drop_row_scales
from .modulation import Call, ModelModulation, by_name
from .off_card import named_weights
from .prefix import KeptPrefixes
from .prompts import Prompts, alone

logger = logging.getLogger(__name__)

OPTIMIZATION_KEY = "qwen_l40s_optimize"
PARTS_KEY = "qwen_l40s_parts"
STEP_CACHE_KEY = "qwen_l40s_steps"
CARDS_KEY = "qwen_l40s_cards"
NAG_KEY = "qwen_l40s_nag"
VERIFIED = {"cuda"}  # kinds of cards whose links are
OTHER_NODES = "another node's, set after Qwen-Image Optimize"
UNREAD = Verdict("the run's prompts have an unknown form")
MASKED = (
    "attention: the text has a mask, which some nodes' attention ignores (Patch Sage Attention "
    "KJ): if the image misses the prompt, remove that node"
)


ROUNDED = (
    "LoRAs: {} quantized weights are rounded again with a merged patch that has no bypass: "
    "precision bf16 loses less"
)


class ComfyOptimization(Optimization):
    """The attachment that `optimize` puts on a patcher; clones of the patcher share it."""

    host = "ComfyUI's"

    def __init__(
        self,
        blocks: bool,
        attention: SlotAttention | None,
        tf32: bool = False,
        cudnn_benchmark: bool = False,
    ) -> None:
        super().__init__(attention, blocks)
        self._flags = tf32, cudnn_benchmark
        # what the model file says of attention; None where the slot wins over it
        self.file: FileAttention | None = None
        self._rounded = 0  # quantized weights into which ComfyUI merges a patch
        self._masked = False  # whether another node's attention met text rows with a mask
        self._other_attention = ""  # that ran in the last pass, unless it was ours
        self._brought: WeakSet[Any] = WeakSet()  # models on cards that share a pass, in this run
        self._held: WeakKeyDictionary[Any, HeldWeights] = WeakKeyDictionary()
        self._prompts: WeakKeyDictionary[Any, Prompts] = WeakKeyDictionary()  # of the run

    @property
    def lossy_attention(self) -> bool:
        return super().lossy_attention or (self.file is not None and self.file.lossy)

    def read_file(self, model: Any, options: dict[str, Any]) -> FileAttention | None:
        """Looks at what the file says, which a LoRA may change, where nothing in the slot wins."""
        filled = options.get(SLOT)
        free = filled is None or (filled is self.attention and filled.name == "auto")
        self.file = FileAttention(blocks_of(model.diffusion_model)) if free else None
        return self.file

    def attention_lines(self) -> list[str]:
        lines, ours = super().attention_lines(), self.attention
        if self._other_attention and ours is not None and not (ours.used or ours.fallback):
            lines = [f"attention: {self._other_attention}"]
        if self._masked:
            lines.append(MASKED)
        if self._rounded:
            lines.append(ROUNDED.format(self._rounded))
        return lines if self.file is None else self.file.lines(lines)

    def attention_names(self) -> set[str]:
        return set() if self.attention is None else self.attention.names()

    def outer_sample(self, executor: Any, noise: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Runs one sampling run (OUTER_SAMPLE)."""
        self.start_run()
        self._rounded = read_or(0, lambda: split_patches(executor.class_obj.model_patcher).rounded)
        outer = self.in_run, self._brought
        self.in_run, self._brought = True, WeakSet()
        for held in self._held.values():
            held.start_run()
        try:
            with flags_for_a_run(*self._flags):
                output = self._sample(executor, noise, args, kwargs)
        finally:
            self.in_run, self._brought = outer
            self._prompts.clear()
            if not self.in_run:
                self.end_run()
        show_run("QwenL40S_Optimize", self.report().splitlines(), self.outcome())
        return output

    def _sample(
        self, executor: Any, noise: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Samples once more from the first step where attention gave NaN, with ComfyUI's own."""
        guider = executor.class_obj
        prompts = {name: [dict(prompt) for prompt in it] for name, it in guider.conds.items()}
        while True:
            try:
                output = executor(noise, *args, **kwargs)
                self.confirm()
                return output
            except NotFiniteError:
                logger.warning("Qwen-Image Accelerator: the run starts again.")
                unsafe_copies(guider.model_patcher, again=True)  # lost ones may give NaN, too
            again = {name: [dict(prompt) for prompt in it] for name, it in prompts.items()}
            patches.put(guider, conds=again)

    def on_detach(self, patcher: Any, unpatch_all: bool) -> None:
        """Takes what is kept for a model off the card with the model (ON_DETACH)."""
        ModelModulation.on_detach(patcher, unpatch_all)
        if unpatch_all:
            drop_row_scales(blocks_of(patcher.model.diffusion_model))
            KeptPrefixes.of(patcher.model.diffusion_model).clear()
            self.release(patcher.model)
            self._held.pop(patcher.model, None)

    def apply_model(
        self, executor: Any, x: torch.Tensor, t: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        model, (given, options) = executor.class_obj, by_name(args, kwargs)
        file = self.read_file(model, options)
        others = not isinstance(options.get(SLOT), SlotAttention | None)
        self._other_attention = OTHER_NODES if others else "ComfyUI's code"
        taken_out = patches.ABSENT
        if file is not None and file.runs:  # with an empty slot `ComfyPass` attends as it says
            taken_out = patches.swap(options, SLOT, patches.ABSENT)
        held = self._held if self.in_run else None
        idle = options.get(IDLE, {}).get(model, ()) if self._blocks else ()
        control, prompts = given.get("control"), Prompts()
        if self.in_run and alone(options):
            prompts = self._prompts.setdefault(model, prompts)
            device = model.current_patcher.load_device
            args, kwargs = (), prompts.bring(given, device, model.get_dtype_inference())
        host = kind_of(model).passes(model, self.attention, x, options, control, held, idle)
        self._masked = others and host.masked
        try:
            with ExitStack() as stack:
                for each in (host, *host.peers) if host.peers else ():
                    self._bring(each)
                for peer in idle:
                    stack.enter_context(bypassed(peer))
                stack.enter_context(
                    ModelModulation.of(model).during(Call(t, options, given, host.blocks))
                )
                # Compiled, it would trace what stands there; 2.1's may be gone in a newer ComfyUI.
                if not is_compiled(options) and hasattr(model.diffusion_model, "_forward"):
                    run = functools.partial(self.run_pass, host)
                    inner = stack.enter_context(prompts.lookups(model.diffusion_model))
                    runs = stack.enter_context(_inside(model.diffusion_model, inner, run))
                    output = executor(x, t, *args, **kwargs)
                    if not (runs or is_skipped(options)):
                        self.pass_by(model)
                    return output
                return self.run_pass(host, lambda: executor(x, t, *args, **kwargs))
        finally:
            if taken_out is not patches.ABSENT:
                patches.swap(options, SLOT, taken_out)

    def _bring(self, host: Any) -> None:
        if not self.in_run or host.owner in self._brought:
            return
        self._brought.add(host.owner)
        # Without room for them they wait in system RAM, and the pass runs on one card.
        context = comfy.model_management.cuda_device_context(host.device)
        with context, suppress(torch.OutOfMemoryError):
            host.layers.bring(host.blocks, torch.empty(0, dtype=host.dtype, device=host.device))


@contextmanager
def _inside(
    transformer: torch.nn.Module,
    inner: Callable[..., Any],
    run: Callable[[Callable[[], Any]], Any],
) -> Iterator[list[bool]]:
    """Has `run` make the calls of the transformer's forward, inside of all wrappers: a pass that it
    makes twice is one step to other packs. Gives a list that has an item for each call.
    """
    going, runs = True, []

    def forward(*args: Any, **kwargs: Any) -> Any:
        call = functools.partial(inner, *args, **kwargs)
        if not going:
            return call()
        runs.append(True)
        return run(call)

    try:
        with patches.patched([(transformer.__dict__, "_forward", forward)]):
            yield runs
    finally:
        going = False  # for a pack that has wrapped it meanwhile


def check_parts(executor: Any, noise: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Checks what comes from a text encoder and a VAE, and the links between cards, before the
    transformer is loaded (OUTER_SAMPLE).

    With those of the other family ComfyUI fails inside a layer, or takes channels for frames; with
    what a hook merges into quantized weights, in the middle of the first step.
    """
    guider = executor.class_obj
    patcher = guider.model_patcher
    unsafe_copies(patcher, again=True)
    if kind_of(patcher.model):  # else another node's
        read_or(None, _check_parts, patcher.model, guider, noise)
        read_or(None, _check_hooks, patcher)
    return executor(noise, *args, **kwargs)


def _check_hooks(patcher: Any) -> None:
    for key in chain(*split_patches(patcher).hooks.values()):
        layer, _, name = key.rpartition(".")
        if not hook_merges(comfy.utils.get_attr(patcher.model, layer), name):
            raise SettingError(
                f"A LoRA hook changes {key!r} by more than products of small matrices, which "
                "cannot be merged into a quantized model during a run. Load the MODEL with "
                "precision bf16, or apply the LoRA to all prompts with Load Qwen-Image LoRA."
            )


def unsafe_copies(patcher: Any, again: bool = False) -> list[str]:
    """Returns a line for each pair of a MODEL's cards whose copies lose data, ComfyUI's own too."""
    clones = patcher.get_additional_models_with_key("multigpu")
    pairs = combinations([it.load_device for it in (patcher, *clones)], 2)
    warnings = [link_warning(*pair, again) for pair in pairs]
    return [f"GPUs: {warning}" for warning in warnings if warning]


def link_warning(first: torch.device, second: torch.device, again: bool = False) -> str:
    """Returns what to say of two cards whose copies lose data; empty where they arrive."""
    if not {first.type, second.type} <= VERIFIED:
        return ""
    try:
        warning = link_between(first, second, again).warning
    except RuntimeError as error:  # of a driver, which says nothing of the run
        warning = f"The link between {first} and {second} is not verified: {first_line(error)}"
    if warning:
        _log_once(warning)
    return warning


@cached
def _log_once(warning: str) -> None:
    logger.warning("Qwen-Image Accelerator: %s", warning)


def _check_parts(model: Any, guider: Any, noise: torch.Tensor) -> None:
    kind = kind_of(model)
    width, channels = kind.takes(model.diffusion_model)
    encoder = f"{kind.family.text_encoder.name} for {kind.family.title}"
    # Another guider's other prompts may be another model's.
    names = guider.conds if type(guider) is CFGGuider else ("positive",)
    prompts = [prompt for name in names for prompt in guider.conds.get(name, ())]
    for text in _tensors(prompt.get("cross_attn") for prompt in prompts):
        if text.shape[-1] != width:
            raise SettingError(
                f"The prompt is {text.shape[-1]} wide, but the MODEL takes text {width} wide: use "
                f"the model's text encoder, {encoder}."
            )
    references = (latent for it in prompts for latent in it.get("reference_latents") or ())
    for latent in _tensors((noise, *references)):
        if latent.ndim > 3 and latent.shape[1] != channels:
            raise SettingError(
                f"The latent has {latent.shape[1]} channels, but the MODEL takes {channels}: use "
                "the model's VAE."
            )


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    return (value for value in values if isinstance(value, torch.Tensor))


# Notices NaN and infinity in a model's first run, and names where they come from.
#
# Reading 40 GB only to look for them would cost a load's time again, and under dynamic VRAM weights
# are not read before they are used. A look in a step would keep the card waiting for the CPU:
# what each pass gives is looked at when the run is over.

FINITE_KEY = "qwen_l40s_finite"


@dataclass
class FirstRun:
    """Checks the first run of a freshly loaded model; its clones share it, so once a load."""

    path: Path
    checked: bool = False
    looks: list[Later] = field(default_factory=list)

    def apply_model(
        self, executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        output = executor(x, *args, **kwargs)
        if not self.checked:
            self.looks.append(Later(0, x.isfinite().all(), output.isfinite().all()))
        return output

    def outer_sample(self, executor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Runs one sampling run (OUTER_SAMPLE).

        Raises:
            CheckpointError: the weights hold NaN or infinity.
            UnavailableError: something else gave them.
        """
        self.looks.clear()
        output = executor(*args, **kwargs)
        passes = [look.read() for look in self.looks]
        # Of a run that was begun again the first passes do not count.
        if [1.0, 0.0] in passes and not is_finite(output):
            _refuse(executor.class_obj.model_patcher.model.diffusion_model, self.path)
        self.checked = self.checked or [1.0, 1.0] in passes
        return output


def _refuse(module: torch.nn.Module, path: Path) -> None:
    weight: Any
    for name, weight in named_weights(module):
        quantized = isinstance(weight, QuantizedTensor)
        stored = (weight._qdata, weight._params.scale) if quantized else (weight.detach(),)
        if not all(map(is_finite, stored)):
            raise not_finite(path, name)
    raise UnavailableError(
        "The model gave NaN or infinity in its first run, although its weights are finite. An "
        "attention kernel, a LoRA or another node's patch causes this: run once without them.",
        path,
    )
