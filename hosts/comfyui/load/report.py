"""Writes what a loader reports of a part, and each sentence about a transformer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ....loaders.quantization import GGUF, PACKED
from ....loaders.source import MICRO_ADVICE, MICRO_TRANSFORMER, Source
from ....spec.formats import QUANTIZED, format_gib
from ...loading import LoadDecision
from .plan import LoadPlan

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

FLOAT_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# Of a layer, above which `auto` leaves it in bf16. Rows of normal numbers have 0.0095, a row whose
# largest value is 13 times its root mean square has 0.03.
MOST_ERROR = 0.03
NAMED = 3  # layers in a note


@dataclass(frozen=True)
class LoadReport:
    what: str  # the part in words, such as "text encoder"
    source: Source  # what it was loaded from
    load: LoadDecision  # with the precision that the weights are stored in now
    bytes: int  # of all weights as they are stored now, less those that wait off the card
    size: str = ""  # of a published text encoder
    where: str = ""  # in a few words what waits elsewhere; empty where nothing does
    notes: tuple[str, ...] = ()  # sentences about what was converted, refused or left out
    hint: str = ""  # the one of them that the node itself shows

    def text(self) -> str:
        family = ", ".join(filter(None, (self.source.part.family, self.size)))
        lines = [
            f"{self.what}: {family} from {self.source.path}",
            f"{self.load.precision}, {format_gib(self.bytes)} of weights ({self.load.reason})",
            *self.notes,
        ]
        return "\n".join(lines)

    def summary(self) -> str:
        """Returns what was chosen and why, in at most three lines for the node."""
        return "\n".join(filter(None, (self.chosen, self.load.why, self.hint)))

    @property
    def chosen(self) -> str:
        """`bf16, 25.4 GiB, modulation offloaded (12.7 GiB in system RAM)`."""
        return ", ".join(filter(None, (self.load.precision, format_gib(self.bytes), self.where)))


def transformer_report(plan: LoadPlan, patcher: ModelPatcher, notes: Sequence[str]) -> LoadReport:
    """Reports a transformer that was loaded by a plan; `notes` come before what the plan says."""
    place, licence = plan.place_reason, plan.source.part.licence or ""
    is_micro = (plan.shape.blocks, plan.shape.joint_dim) == MICRO_TRANSFORMER
    if plan.precision not in QUANTIZED:
        plan = replace(plan, precision=FLOAT_NAMES[patcher.model.get_dtype()])
    return LoadReport(
        what="transformer",
        source=plan.source,
        load=plan,
        bytes=patcher.model_size(),
        where=_where(plan, patcher.load_device),
        hint=MICRO_ADVICE if is_micro else licence,
        notes=(
            *notes,
            *(f"{it}." for it in (place[:1].upper() + place[1:], licence) if it),
        ),
    )


def _where(plan: LoadPlan, device: torch.device) -> str:
    if plan.off_card:
        return f"modulation offloaded ({format_gib(plan.modulation_bytes)} in system RAM)"
    return "modulation in VRAM" if plan.modulation_bytes and device.type != "cpu" else ""


def what_was_stored(source: Source, packed: str) -> list[str]:
    """Notes what each stored format became; `packed` says why 4 and 6 bits stay, if they do."""
    notes = []
    formats = Counter(source.part.quantization.layers.values())
    for name, count in formats.most_common():
        if name == "fp8 e4m3, unscaled":
            notes.append(
                f"{count} layers are stored in e4m3 without scales. Their activations are scaled "
                "for each token here, because a fixed scale would damage them."
            )
        elif name == "fp8 e4m3, scaled":
            notes.append(
                f"{count} layers are stored in e4m3 with one scale for each weight. Activations "
                "are scaled for each token, not by a stored scale."
            )
        elif name in PACKED:
            decoded = f"{count} layers stored in {name} were decoded to int8 ConvRot without loss."
            notes.append(what_stays(count, name, packed) if packed else decoded)
        elif name in GGUF:
            notes.append(f"{count} layers stored in {name} were expanded.")
        elif name.startswith("fp8 e5m2"):
            notes.append(f"{count} layers stored in {name} were converted to bf16.")
    for name, count in source.part.attention.items():
        notes.append(
            f"The file asks for {name} attention in {count} blocks, which ComfyUI before 0.40 "
            "ignores."
        )
    return notes


def what_stays(count: int, form: str, packed: str) -> str:
    """Notes layers that stay in 4 or 6 bits, and why."""
    return f"{count} layers stay in {form}, because {packed}."


def what_was_rounded(precision: str, layers: Sequence[str], left: Sequence[str]) -> list[str]:
    """Notes how many layers were rounded on load, and which of them `left` names were not."""
    form = "int8, rotated (ConvRot)" if precision == "int8" else precision
    count = len(layers) - len(left)
    notes = [f"{count} layers were quantized to {form}, with one scale for each row."]
    if left:
        more = f" and {len(left) - NAMED} more" if len(left) > NAMED else ""
        notes.append(
            f"{', '.join(left[:NAMED])}{more} stay in bf16, because int8 would change them by "
            f"more than {MOST_ERROR:.0%}."
        )
    return notes


def what_is_not_quantized(dtype: torch.dtype, kept: Sequence[torch.Tensor]) -> list[str]:
    """Notes the `kept` weights beside quantized ones, and a dtype that is not bf16: ComfyUI holds
    them in what the device computes in, on most CPUs fp32.
    """
    notes = []
    name = FLOAT_NAMES.get(dtype, str(dtype))
    if kept:
        more = sum(weight.numel() for weight in kept) * (dtype.itemsize - 1)
        notes.append(f"{len(kept)} layers kept in {name}, which takes {format_gib(more)} more.")
    if name != "bf16":
        notes.append(
            f"Weights that are not quantized are stored in {name}, the format that this device "
            "computes in."
        )
    return notes
