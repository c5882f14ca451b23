"""Lists the ways to run a request on a card: the recommended one, and the alternatives."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..errors import CheckpointError, DoesNotFitError, UnavailableError
from ..spec.formats import (
    BYTES_PER_WEIGHT,
    FORMATS,
    GIB,
    KITCHEN_INT8,
    QUANTIZED,
    CardFacts,
    format_gib,
    sm,
)
from ..spec.transformer import OFF_CARD, ON_CARD
from .bytes import Sizes, TransformerBytes, weight_bytes
from .phases import KEPT_FREE_BYTES, Phase, decoding, least_weights, phases, steps, within
from .rates import CUDNN_GENERATIONS
from .request import (
    AS_STORED,
    AUTO,
    DROPPED,
    EXACT,
    FAST,
    ON_PROCESSOR,
    OWN,
    PRECISIONS,
    STREAMED,
    W4A8,
    RunRequest,
    Setting,
)
from .vae import decode_plan

# A run that fits with less than this to spare is tight where no peak was measured: a predicted peak
# may be off by as much, and a desktop or another program may hold some of the card.
TIGHT_BYTES = 3 * GIB // 2
# Of an image that is as small as anybody makes.
LEAST_SIDE = 256
WIDE = BYTES_PER_WEIGHT["bf16"]


def auto_precision(card: CardFacts | None) -> str:
    """Names what `auto` makes of weights in full precision: int8 with rotation where the NVIDIA
    card runs its products, else bf16. None is no such card.
    """
    return "int8" if card is not None and card.runs("int8") else "bf16"


def left_as_stored(requested: str, needed: int, room: int) -> bool:
    """Tells whether `auto` keeps a file as it is: system RAM has no room to round it."""
    return requested == AUTO and needed > room


@dataclass(frozen=True)
class PlanOption:
    card: CardFacts
    request: RunRequest  # what runs, with the transformer's sizes in the setting's precision
    setting: Setting  # not resident: the host moves what does not stay
    recommended: bool = False
    # What the plan is for, of which `request` and `setting` settle what is "auto".
    asked: Question = field(default=OWN, repr=False)

    @property
    def resident(self) -> bool:
        return self.setting.resident

    @property
    def loads_as(self) -> str:
        """Names the precision that a loader takes by name."""
        name = self.setting.precision
        return name if self.card.multiplies(name) else AS_STORED

    @property
    def usable_bytes(self) -> int:
        return self.card.total_bytes - KEPT_FREE_BYTES

    @cached_property
    def phases(self) -> Mapping[str, Phase]:
        """Counts the card in each phase; raises UnavailableError where the image never decodes."""
        return phases(self.request, self.setting, self.card.total_bytes)

    @cached_property
    def needs(self) -> Mapping[str, int]:
        """Counts {phase: bytes for all to stay that is to}; CUDA graphs are given up before."""
        stays = replace(self.setting, resident=True)
        sampling, total = self._steps["sampling"], self.card.total_bytes
        decode = decoding(self.request, stays, sampling, total)
        # The decoder also needs what had to leave the card for it.
        parts = ("transformer", "text encoder")
        left = sum(decode.resident.get(part, 0) for part in parts)
        there = self.weights_bytes + sampling.resident.get("text encoder", 0)
        needs = {name: phase.needed_bytes for name, phase in self._steps.items()}
        return {**needs, "decode": decode.needed_bytes + there - left}

    @cached_property
    def _steps(self) -> Mapping[str, Phase]:
        # If everything stayed.
        return steps(self.request, replace(self.setting, resident=True))

    @property
    def fits(self) -> bool:
        # Planning the decoder's tiles takes the longest, so it comes last.
        fit = all(phase.needed_bytes <= self.usable_bytes for phase in self._steps.values())
        return fit and self.needs["decode"] <= self.usable_bytes

    @property
    def peak_phase(self) -> str:
        return max(self.needs, key=self.needs.__getitem__)

    @property
    def peak_bytes(self) -> int:
        """Counts what this phase needs for everything to stay in VRAM."""
        return self.needs[self.peak_phase]

    @property
    def short_phase(self) -> str:
        """Names the phase that does not fit: sampling first, because it counts in every step."""
        return "sampling" if self.needs["sampling"] > self.usable_bytes else self.peak_phase

    @property
    def headroom_bytes(self) -> int:
        """Counts usable bytes beyond the peak; negative where not everything fits."""
        return self.usable_bytes - self.peak_bytes

    @property
    def weights_bytes(self) -> int:
        """Counts the transformer's bytes that steps read on the card."""
        return self._steps["sampling"].weights

    @property
    def moved_bytes(self) -> int:
        """Counts the transformer's bytes that the host brings to the card in each forward pass."""
        return 0 if self.resident else self.weights_bytes - self.phases["sampling"].weights

    @property
    def least_bytes(self) -> int:
        """Counts the smallest card for all phases but the decoder's, with weights that move."""
        least = {name: within(phase, 0).needed_bytes for name, phase in self._steps.items()}
        least["sampling"] += least_weights(self.request, self.weights_bytes)
        return max(least.values()) + KEPT_FREE_BYTES

    @property
    def tiles(self) -> int:
        """Counts the tiles of each image that the VAE decodes; 1 is whole."""
        decode = self.phases["decode"]
        free = self.usable_bytes - decode.card_bytes + decode.activations
        return decode_plan(self.request, max(free, decode.activations)).count


def plan(
    card: CardFacts,
    request: RunRequest,
    stored: str | None = None,
    *,
    as_stored: bool = False,
    known_sizes: Sizes | None = None,
    why: str = "",
) -> tuple[PlanOption, ...]:
    """Lists the ways to run a request on a card, what was asked for first.

    What the request names is kept. Else `auto_precision` comes first, whether it stays in VRAM or
    not. A quantized file stays as it is, because dequantizing brings nothing back. But fp8 that was
    cast without scales, or whose products do not run, becomes int8. One in 4 or 6 bits becomes int8
    where that stays. The text encoder's file and place are those of the shortest new prompt. Where
    a named setting does not stay, it comes first with that said, and then what would stay if
    nothing were named, of which the first is the recommended one.

    Args:
        stored: what the transformer's file holds, a key of `BYTES_PER_WEIGHT`; None for any.
        as_stored: whether the file's precision is to be kept, which no card refuses. fp16 and fp32
            are then settled as bf16, and `known_sizes` tells their size.
        known_sizes: {precision: sizes} that shape and precision do not give, such as those with
            layers that stay in bf16. Sizes in `request.parts` are of `stored`, or else of its
            precision.
        why: the reason of the precision, where another than the plan's decides.

    Returns:
        At least one.

    Raises:
        CheckpointError: `stored` is no precision that this package computes with.
        UnavailableError: the card does not multiply a precision that was asked for, or that its
            attention takes.
        DoesNotFitError: steps or decoder do not run on it, even with weights that are moved.
    """
    if stored is not None:
        check_stored(stored)
    if not as_stored and request.parts.transformer_bytes is None:
        check_tensor_cores(request.precision, card, PRECISIONS)
    check_attention(request.attention, card)
    case = Question(card, request, stored, as_stored, known_sizes or {}, why)
    found = [case.option(precision) for precision in case.precisions()]
    run = [option for option in found if option.least_bytes <= card.total_bytes]
    if not run:
        raise DoesNotFitError(_refusal(case, min(option.least_bytes for option in found)))
    stay = [] if run[0].resident else _what_would_stay(case)
    asked = [
        replace(it, recommended=not (index or stay), asked=case) for index, it in enumerate(run)
    ]
    others = [replace(option, recommended=not index) for index, option in enumerate(stay)]
    return (*asked, *others)


@dataclass(frozen=True)
class Question:
    """What a plan answers; the arguments of `plan`."""

    card: CardFacts
    request: RunRequest
    stored: str | None
    as_stored: bool
    known_sizes: Sizes
    why: str = ""

    @property
    def kept(self) -> str | None:
        """Names what the transformer's file holds, where no precision was asked for."""
        return self.stored if self.request.precision == AUTO else self.request.parts.kept

    def precisions(self) -> Sequence[str]:
        if self.as_stored:
            return (self.stored if self.stored in QUANTIZED else "bf16",)
        first, kept = auto_precision(self.card), self.kept
        if kept in QUANTIZED:
            # In int8 both errors add up to less than those of fp8 products.
            stays = kept != "fp8" or (self.card.runs(kept) and not self.request.parts.cast)
            return (kept if stays or first != "int8" else first,)
        if self.request.precision != AUTO:
            return (self.request.precision,)
        both = first, "bf16" if first == "int8" else "int8"
        return tuple(filter(self.card.multiplies, both))

    def option(self, precision: str, spare: int = 0) -> PlanOption:
        # The first places of the parts with which a precision stays and leaves so many bytes more
        # than the host keeps free; else one in which the host moves weights.
        request = sized(self.request, precision, self.stored, self.known_sizes)
        others: dict[str, Any] = {
            "weight_only": not self.card.runs(precision),
            # Beside a guided text all attention is exact.
            "attention": EXACT
            if request.nag_tokens
            else attention_form(request.attention, self.card),
        }
        packs = (False, True) if precision == "int8" and request.parts.packed else (False,)
        found = []
        for packed, way in itertools.product(packs, [*self._ways()]):
            setting = Setting(precision, *way, packed=packed, **others)
            found.append(option := PlanOption(self.card, request, setting))
            # In 8 bits the encoder comes back in a second: it stays where the card is not tight.
            stays = way[2] == ON_CARD != self.request.text_encoder_place
            stays = stays and way[1] != encoder_precisions(request)[0]
            room = max(spare, TIGHT_BYTES) if stays else spare
            if option.fits and option.headroom_bytes >= room and not self._better_off(option):
                return option
        # An encoder that fits the card alone takes its turn there.
        last = found[-1].setting
        turns = (
            option
            for option in found
            if (option.setting.packed, option.setting.modulation) == (last.packed, last.modulation)
            and option.setting.text_encoder_place != ON_CARD
            and option._steps["text"].card_bytes <= option.usable_bytes
        )
        option = next(turns, found[-1])
        return replace(option, setting=replace(option.setting, resident=False))

    def _better_off(self, option: PlanOption) -> bool:
        # Whether the modulation would leave the card for each prompt, and come back.
        if option.setting.modulation == self._modulations()[-1]:
            return False
        turns = option.setting.text_encoder_place == DROPPED
        return turns and option.needs["text"] + option.weights_bytes > option.usable_bytes

    def _modulations(self) -> Sequence[str]:
        if self.request.modulation != AUTO:
            return (self.request.modulation,)
        return (ON_CARD, OFF_CARD) if self.request.transformer.block.modulation else (ON_CARD,)

    def _ways(self) -> Iterator[tuple[str, str, str]]:
        # (modulation, text encoder, its place) by what a new prompt brings over the link: nothing,
        # an encoder in 8 bits, or in 4 where 8 do not fit the card alone. A link of 4 GB/s takes
        # less time than 16 cores compute. Of the same bytes the most accurate comes first.
        request = self.request
        modulations = self._modulations()
        files = encoder_precisions(request)
        stays = [name for name in files if name != W4A8] or files
        turns = [name for name in files if name != "bf16"] or files
        texts = {ON_CARD: stays, DROPPED: turns, STREAMED: turns[-1:], ON_PROCESSOR: files[:1]}
        places = [ON_CARD, DROPPED, STREAMED]
        if request.text_encoder_place != AUTO:
            places = [request.text_encoder_place]
        for place in places:
            # Where the encoder has to leave, the modulation has left before.
            modulated = modulations if place == places[0] else modulations[-1:]
            for text, modulation in itertools.product(texts[place], modulated):
                yield modulation, text, place


def plan_with_room(
    asked: Question, spare: int, runs: Callable[[PlanOption], bool]
) -> PlanOption | None:
    """Finds the first setting that stays in VRAM, leaves so many bytes free and runs, or None. What
    the question names is kept if it can be.
    """
    for case in (asked, replace(asked, request=_unnamed(asked.request, asked.stored))):
        with contextlib.suppress(UnavailableError):  # it does not decode
            for precision in case.precisions():
                if (option := case.option(precision, spare)).resident and runs(option):
                    return option
    return None


def sized(
    request: RunRequest,
    precision: str,
    stored: str | None = None,
    known_sizes: Sizes | None = None,
) -> RunRequest:
    """Returns a request with its sizes in a precision; the sizes that it has are of `stored`."""
    known = (known_sizes or {}).get(precision)
    if known is None and stored is None:
        known = published_bytes(request, precision)
    sizes: dict[str, Any] = {"transformer_bytes": None, "modulation_bytes": None}
    if known is not None:
        sizes = {"transformer_bytes": known.total, "modulation_bytes": known.modulation}
    elif precision == (stored or request.precision):
        return request
    return replace(request, parts=replace(request.parts, **sizes))


def encoder_precisions(request: RunRequest) -> tuple[str, ...]:
    """Lists the text encoder's files that a request leaves to choose, the most accurate first."""
    if request.text_encoder != AUTO:
        return (request.text_encoder,)
    files = request.member.text_encoder.files
    return tuple(files) if files and request.parts.text_encoder_bytes is None else ("bf16",)


def published_bytes(request: RunRequest, precision: str) -> TransformerBytes | None:
    """Counts the published file in a quantized precision, if any, unless the user has a file."""
    file = request.member.files.get(precision)
    if request.parts.at_hand or file is None or precision not in QUANTIZED:
        return None
    return TransformerBytes(
        file.bytes, weight_bytes(request.transformer, "bf16").modulation // WIDE
    )


def check_tensor_cores(name: str, card: CardFacts, choices: tuple[str, ...]) -> None:
    """Raises UnavailableError where the card does not multiply a precision that was named."""
    if card.multiplies(name):
        return
    others = [other for other in choices if other != name and card.multiplies(other)]
    raise _too_old(f"precision {name}", name, card, others)


def check_attention(name: str, card: CardFacts) -> None:
    """Raises UnavailableError for attention in 8 bits on a card that does not multiply int8."""
    if name == KITCHEN_INT8 and not card.multiplies("int8"):
        raise _too_old(f"attention {name}", "int8", card, [EXACT])


def _too_old(what: str, needs: str, card: CardFacts, choices: Sequence[str]) -> UnavailableError:
    return UnavailableError(
        f"{what} needs a GPU of {sm(FORMATS[needs].oldest)} or newer and {card.name} is "
        f"{sm(card.capability)}: choose {', '.join(choices)}."
    )


def attention_form(name: str, card: CardFacts) -> str:
    """Predicts the form in which an attention of `ATTENTIONS` runs."""
    if name != FAST:
        return name
    slower = card.capability[0] in CUDNN_GENERATIONS or not card.multiplies("int8")
    return EXACT if slower else KITCHEN_INT8


def check_stored(stored: str) -> None:
    """Raises CheckpointError for a precision that this package does not compute with."""
    if stored not in BYTES_PER_WEIGHT:
        raise CheckpointError(
            f"the file stores its weights as {stored!r}: this package computes with "
            f"{', '.join(BYTES_PER_WEIGHT)}, so get the model in one of these."
        )


def _what_would_stay(case: Question) -> list[PlanOption]:
    # Were nothing named that decides about room; empty where nothing was.
    free = _unnamed(case.request, case.stored)
    if free == case.request and not case.as_stored:
        return []
    options = plan(case.card, free, case.stored, known_sizes=case.known_sizes)
    return [option for option in options if option.resident]


def _unnamed(request: RunRequest, stored: str | None = None) -> RunRequest:
    return replace(
        sized(request, AUTO, stored) if stored not in QUANTIZED else request,
        precision=AUTO,
        modulation=AUTO,
        text_encoder_place=AUTO,
        tiles=0 if request.tiles == 1 else request.tiles,
    )


def _refusal(case: Question, least: int) -> str:
    request, loras = case.request, case.request.loras
    beside = loras.count and loras.mode != "merge"
    # {what a step has besides one plain image: (whether it has, what helps)}
    additions = {
        f"a ControlNet of {format_gib(request.controlnet_bytes)}": (
            request.controlnet_bytes,
            "run without the ControlNet",
        ),
        f"LoRAs ({loras.count} of rank {loras.rank}, as bypass)": (
            beside,
            "merge the LoRAs into the weights",
        ),
        f"references ({request.references})": (request.references, "give fewer references"),
        f"other models ({len(request.others)})": (
            request.others,
            "keep no other model in VRAM",
        ),
        f"layers ({request.layers})": (request.layers, "generate fewer layers"),
    }
    there = {words: remedy for words, (has, remedy) in additions.items() if has}
    batch = f"a batch of {request.batch}" if request.batch > 1 else "one image"
    what = f"a step of {batch} of {request.width}x{request.height}"
    if there:
        what += f" with {', '.join(there)}"
    remedies = ", ".join([*there.values(), "choose a smaller size or batch"])
    return (
        f"{case.card.name} has {format_gib(case.card.total_bytes)} and {what} takes "
        f"{format_gib(least)} even when weights stream to it block by block: {remedies}, or choose "
        "a GPU with more memory."
    )
