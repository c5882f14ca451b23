"""Runs a batch through the VAE as planned, and once more in less room where the card ran out.

ComfyUI's own `VAE.decode` books 3.5 times what decoding takes, for which the transformer leaves the
card. A plan for what is free leaves it there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import comfy.model_management
import comfy.sd
import comfy.utils
import torch

from ....errors import UnavailableError
from ....machine.memory import available_memory
from ....optimizations.vae.tiles import Progress
from ....planning.vae import VaePlan, plan_in_room, plan_within
from ....spec.formats import format_gib
from ..record.phase import MeasuredPhase, phase

logger = logging.getLogger(__name__)

# ComfyUI books a tenth more than the weights that it loads.
BOOKED = 1.1
# The number of tiles that asks for none, whatever is free.
WHOLE = 1


@dataclass
class VaeBatch:
    """Runs items through the VAE.

    Args:
        what: such as "decode 2 images of 1328x1328".
        size: shape of the result, items first.
        tiles: as the user asks: 0 for the fewest that fit, or `WHOLE`, or at least so many.
        plan: makes a plan for a budget in bytes, or None for any.
        compute: runs some of the items as planned, into their part of the result.
        host_bytes: host memory that `compute` takes besides the result.
    """

    vae: comfy.sd.VAE
    what: str
    size: tuple[int, ...]
    tiles: int
    plan: Callable[[int | None], VaePlan]
    compute: Callable[[VaePlan, slice, torch.Tensor, Progress], None]
    host_bytes: int = 0
    _result: torch.Tensor | None = field(default=None, init=False)
    _done: int = field(default=0, init=False)
    _cleared: bool = field(default=False, init=False)

    def run(self) -> tuple[torch.Tensor, str]:
        """Computes all items.

        Returns:
            The result on ComfyUI's device and in its dtype for results; and the report: how, what
            was predicted and measured, and what had to make room.

        Raises:
            SettingError: a size or `tiles` is out of range.
            UnavailableError: it does not fit, or the card ran out of memory twice.
        """
        on_host = comfy.model_management.is_device_cpu(self.vae.output_device)
        check_host_memory(self.what, self.host_bytes + (self._result_bytes if on_host else 0))
        free = free_bytes(self.vae) - self._kept
        others = others_bytes(self.vae)
        plan = plan_in_room(self._planner, free, others)
        if on_processor(self.vae):
            check_host_memory(f"{self.what} {_form(plan)}", plan.peak_bytes + self._kept)
        lines = [f"{self.what}: {_how(plan, free, others)}"]
        name = self.what.partition(" ")[0]
        with phase(name, self.vae.patcher, self.vae.device) as run:
            with comfy.model_management.cuda_device_context(self.vae.device):
                if not self._attempt(plan, run):
                    # Only here, where the exception with all its tensors is gone.
                    plan = self._smaller(plan)
                    lines.append(
                        "the card ran out of memory; repeated in half of the free memory: "
                        f"{_form(plan)}"
                    )
                    logger.warning("%s: %s", self.what, lines[-1])
                    if not self._attempt(plan, run):
                        raise self._out_of_memory(plan)
            lines.append(f"working memory: {format_gib(plan.peak_bytes + self._kept)} predicted")
            run.stop()
            if run.working_bytes:
                lines[-1] += f", {format_gib(run.working_bytes)} measured"
            if (moved := others - others_bytes(self.vae)) > 0:
                lines.append(f"ComfyUI moved {format_gib(moved)} of other models off the card")
            if self._cleared:
                lines.append("torch's cache was cleared to free memory")
            run.path = tuple(lines)
            run.asked |= {
                "size": list(self.size),
                "tiles": plan.count,
                "plan_bytes": plan.peak_bytes,
            }
        return self._result, "\n".join(lines)

    @property
    def _result_bytes(self) -> int:
        return torch.Size(self.size).numel() * self.vae.vae_output_dtype().itemsize

    @property
    def _kept(self) -> int:
        """Counts the result where it stays on the VAE's device, which plans do not."""
        same = self.vae.output_device.type == self.vae.device.type
        return self._result_bytes if same else 0

    def _planner(self, budget: int) -> VaePlan:
        return self.plan(None if self.tiles == WHOLE else budget)

    def _attempt(self, plan: VaePlan, run: MeasuredPhase) -> bool:
        """Computes the items that are left; returns False where memory ran out."""
        left = -(-(self.size[0] - self._done) // plan.batch)
        bar = comfy.utils.ProgressBar(left * plan.count)

        def progress(done: int, total: int) -> None:
            bar.update(1)

        try:
            self._cleared |= make_room(self.vae, plan.peak_bytes + self._kept)
            run.begin()
            if self._result is None:
                self._result = torch.empty(
                    self.size, device=self.vae.output_device, dtype=self.vae.vae_output_dtype()
                )
            while self._done < self.size[0]:
                items = slice(self._done, self._done + plan.batch)
                self.compute(plan, items, self._result[items], progress)
                self._done += plan.batch
        except Exception as error:
            comfy.model_management.raise_non_oom(error)
            return False
        return True

    def _smaller(self, plan: VaePlan) -> VaePlan:
        """Plans for half of what is free, or of what could be, and for less than was too much."""
        comfy.model_management.soft_empty_cache()
        if self.tiles == WHOLE:
            raise self._out_of_memory(plan, "set tiles to 0")
        free = free_bytes(self.vae) - self._kept
        for room in (free, free + others_bytes(self.vae)):
            for less in (plan.peak_bytes // 2, plan.peak_bytes - 1):
                if found := plan_within(self._planner, min(room // 2, less)):
                    return found
        raise self._out_of_memory(plan)

    def _out_of_memory(
        self, plan: VaePlan, remedy: str = "choose a smaller size or batch"
    ) -> UnavailableError:
        comfy.model_management.soft_empty_cache()
        return UnavailableError(
            f"the card ran out of memory to {self.what} {_form(plan)}: "
            f"{format_gib(plan.peak_bytes)} of working memory was predicted and "
            f"{format_gib(free_bytes(self.vae))} is free now, so {remedy}, or free memory on the "
            "card."
        )


def _form(plan: VaePlan) -> str:
    if plan.whole:
        return "whole"
    return f"in {plan.count} exact tile{'s' * (plan.count > 1)}"


def _how(plan: VaePlan, free: int, others: int) -> str:
    if plan.peak_bytes <= free:
        return plan.reason
    text = f"{_form(plan)}, {format_gib(plan.peak_bytes)} where {format_gib(max(0, free))} is free"
    return f"{text}: ComfyUI moves other models off the card first" if others else text


def on_processor(vae: comfy.sd.VAE) -> bool:
    """Tells whether the VAE computes in host memory."""
    return comfy.model_management.is_device_cpu(vae.device)


def free_bytes(vae: comfy.sd.VAE) -> int:
    """Counts what activations can take while everything else stays where it is.

    On the processor this is host memory. The patcher's own `get_free_memory` would count the
    weights of other models that dynamic VRAM could evict.
    """
    if on_processor(vae):
        return available_memory()
    free = comfy.model_management.get_free_memory(vae.device)
    reserved = comfy.model_management.extra_reserved_memory()
    return max(0, int(free - reserved - BOOKED * waiting_bytes(vae)))


def waiting_bytes(vae: comfy.sd.VAE) -> int:
    """Counts the VAE's own weights that are not on its device yet."""
    patcher = vae.patcher
    if patcher.current_loaded_device() != vae.device:
        return patcher.model_size()
    return max(0, patcher.model_size() - patcher.loaded_size())


def others_bytes(vae: comfy.sd.VAE) -> int:
    """Counts other models' weights on the VAE's card, which ComfyUI can move off it."""
    if on_processor(vae):
        return 0
    return sum(
        model.loaded_size()
        for model in comfy.model_management.loaded_models()
        if model is not None and model.load_device == vae.device and not vae.patcher.is_clone(model)
    )


def make_room(vae: comfy.sd.VAE, needed: int) -> bool:
    """Has ComfyUI load the VAE with room for `needed` bytes of activations.

    Returns:
        Whether torch's cache had to be cleared for it.
    """
    comfy.model_management.load_models_gpu(
        [vae.patcher], memory_required=needed, force_full_load=vae.disable_offload
    )
    if vae.device.type != "cuda":
        return False
    # Cached blocks count as free, and may be of sizes that do not fit.
    free, cached = comfy.model_management.get_free_memory(vae.device, torch_free_too=True)
    if not cached or needed + waiting_bytes(vae) <= free - cached:
        return False
    comfy.model_management.soft_empty_cache()
    return True


def check_host_memory(what: str, needed: int) -> None:
    """Refuses what host memory cannot hold: the system would end the whole process.

    Raises:
        UnavailableError: too little is available.
    """
    available = available_memory()
    if needed > available:
        raise UnavailableError(
            f"too little memory to {what}: it takes {format_gib(needed)} of host memory and "
            f"{format_gib(available)} is available, so choose a smaller size or batch, or close "
            "other programs."
        )
