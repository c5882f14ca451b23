"""Which of the recorded runs gave the images that a report is of.

ComfyUI keeps what earlier prompts gave, so that the images of a report can be older than the last
run of its MODEL, and a prompt can run its phases in part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...planning.vae_steps import PIXELS_PER_LATENT
from .run_record import Record

EARLIER = (
    "Nothing was sampled with this MODEL in this run, because ComfyUI kept what an earlier one "
    "gave: these are the figures of the last run of this MODEL, which need not be the one that "
    "gave these images"
)


@dataclass(frozen=True)
class Ran:
    """The records that a report is of.

    Attributes:
        last: The sampling that gave the images, as far as that can be told.
        records: Of its run up to it, and of the other parts.
        now: The prompt that ComfyUI executes.
        notes: What cannot be told.
    """

    last: Record
    records: tuple[Record, ...]
    now: str
    notes: tuple[str, ...] = ()

    @property
    def this_run(self) -> bool:
        """Whether this prompt sampled."""
        return self.last.prompt == self.now

    def of(self, phase: str) -> tuple[Record, ...]:
        """Of one phase, in order; all are of one prompt."""
        return tuple(record for record in self.records if record.phase == phase)


def choose(model: Sequence[Record], beside: Sequence[Record], images: Any, now: str) -> Ran | None:
    """Finds the records of the run that gave images; None where nothing was sampled.

    Args:
        model: the records of a MODEL.
        beside: the records of the CLIP and the VAE.
        images: (batch, height, width, channels); None where nobody knows.
        now: the prompt that ComfyUI executes.
    """
    shape = _shape(images)
    places = [place for place, record in enumerate(model) if record.phase == "sampling"]
    if not places:
        return None

    def rank(place: int) -> tuple[int, bool, int]:
        record = model[place]
        return _fit(record.asked["latent"], shape), record.prompt == now, place

    chosen = max(places, key=rank)
    last = model[chosen]
    ran = [record for record in model[: chosen + 1] if record.prompt == last.prompt]
    for phase in ("text", "encode", "decode"):
        ran += _of_phase(phase, beside, last.prompt, now, shape)
    return Ran(last, tuple(ran), now, tuple(_notes(last, shape, now)))


def _shape(images: Any) -> tuple[int, int, int] | None:
    shape = getattr(images, "shape", None)
    return tuple(shape[:3]) if shape is not None and len(shape) == 4 else None


def _fit(latent: Sequence[int], shape: tuple[int, int, int] | None) -> int:
    """2 where a latent is of such images, 1 where of their size alone, else 0."""
    if shape is None:
        return 2
    batch, _, *frames, height, width = latent
    if shape[1:] != (PIXELS_PER_LATENT * height, PIXELS_PER_LATENT * width):
        return 0
    # Frames and layers are images of their own, of which a graph may take some.
    return 2 if shape[0] == batch or (frames and frames[0] > 1) else 1


def _of_phase(
    phase: str,
    records: Sequence[Record],
    ran: str,
    now: str,
    shape: tuple[int, int, int] | None,
) -> list[Record]:
    """Of the run that sampled, or else of this one; it is this one that decodes."""
    own = [record for record in records if record.phase == phase]
    prompts = dict.fromkeys((now, ran) if phase == "decode" else (ran, now))
    found = [[record for record in own if record.prompt == prompt] for prompt in prompts]
    if phase == "decode":
        fitting = [[record for record in each if _decodes(record, shape)] for each in found]
        found = [*fitting, *found]
    return next(filter(None, found), [])


def _decodes(record: Record, shape: tuple[int, int, int] | None) -> bool:
    size = record.asked.get("size")
    return shape is None or (size is not None and tuple(size[-2:]) == shape[1:])


def _notes(last: Record, shape: tuple[int, int, int] | None, now: str) -> list[str]:
    notes, fit = [], _fit(last.asked["latent"], shape)
    if last.prompt != now:
        notes.append(EARLIER)
    if fit < 2:
        batch, height, width = shape
        notes.append(
            f"the images are {batch} of {width}x{height}, which no run of this MODEL gave that is "
            "known here: they were changed, or another model's"
        )
    return notes
