"""What a plan is asked: the settings that a request leaves open, in the order of trying."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..spec import OFF_CARD, ON_CARD, QUANTIZED, CardFacts
from .bytes import text_encoder_bytes
from .phases import KEPT_FREE_BYTES, Phase, least_weights, phases, transformer_bytes
from .reasons import Need, lacks
from .request import DROPPED, TEXT_PLACES, RunRequest, Setting, precision_of_text_encoder
from .vae import decode_plan

# The most faithful first; int8 before fp8 as `plan_words.INT8_BEFORE_FP8` says.
FIDELITY = ("bf16", "int8", "fp8")
AUTO = "auto"


@dataclass(frozen=True)
class Question:
    """A card, a request, and what is known of the transformer's file; as `planning.plan.plan` takes
    them.
    """

    card: CardFacts
    request: RunRequest
    stored: str | None
    as_stored: bool
    held: Mapping[str, Held]

    def precisions(self) -> Sequence[str]:
        """The most faithful first."""
        if self.as_stored or (self.request.precision == AUTO and self.stored in QUANTIZED):
            return (self.stored if self.stored in QUANTIZED else "bf16",)
        if self.request.precision != AUTO:
            return (self.request.precision,)
        # Where nothing multiplies it, fp8 saves as much memory as int8 and no time.
        return [name for name in FIDELITY if name != "fp8" or not lacks(name, self.card)]

    def trial(self, precision: str) -> Trial:
        """The first places of the parts with which a precision stays; else the last, moved.

        Raises:
            UnavailableError: the image does not decode on the card even alone.
        """
        request = sized(self.request, precision, self.stored, self.held)
        trials = (
            Trial(self.card, request, self._setting(precision, modulation, text_place))
            for modulation, text_place in self._places()
        )
        for trial in trials:
            if trial.fits:
                return trial
        return self._moved(trial)

    def together(self, trial: Trial) -> Trial:
        """A trial's precision with everything on the card that the request leaves open."""
        setting = replace(trial.setting, modulation=ON_CARD)
        if self.request.text_encoder_place == AUTO:
            setting = replace(setting, text_encoder_place=ON_CARD)
        return replace(trial, setting=setting, moved=False)

    def _places(self) -> Iterator[tuple[str, str]]:
        request = self.request
        modulations = (ON_CARD, OFF_CARD) if request.modulation == AUTO else (request.modulation,)
        texts = TEXT_PLACES if request.text_encoder_place == AUTO else (request.text_encoder_place,)
        for text_place in texts:
            # Where the encoder has to leave, the modulation has left before.
            places = modulations if text_place == texts[0] else modulations[-1:]
            yield from ((modulation, text_place) for modulation in places)

    def _setting(self, precision: str, modulation: str, text_place: str) -> Setting:
        text = precision_of_text_encoder(self.request)
        expanded = lacks(precision, self.card)
        return Setting(precision, modulation, text, text_place, weight_only=expanded)

    def _moved(self, trial: Trial) -> Trial:
        """The host moves weights: an encoder that fits the card alone takes its turn there."""
        if self.request.text_encoder_place == AUTO:
            dropped = replace(trial, setting=replace(trial.setting, text_encoder_place=DROPPED))
            if dropped.need("text").spare(self.card) >= 0:
                trial = dropped
        return replace(trial, moved=True)


# One setting tried on one card: what each phase needs there, and whether that stays.


@dataclass(frozen=True)
class Held:
    """A transformer's weights in one precision, where its shape alone does not tell them.

    Args:
        total: bytes of all.
        modulation: bytes of them in the modulation layers.
    """

    total: int
    modulation: int


@dataclass(frozen=True)
class Trial:
    """A setting on a card, counted as if everything stayed that is to.

    Attributes:
        request: With the sizes of the setting's precision.
        setting: One that is resident.
        moved: Whether the host has to move what does not stay.
    """

    card: CardFacts
    request: RunRequest
    setting: Setting
    moved: bool = False

    @property
    def settled(self) -> Setting:
        """The setting with what came of it."""
        return replace(self.setting, resident=not self.moved)

    @cached_property
    def phases(self) -> Mapping[str, Phase]:
        """What each phase would take.

        Raises:
            UnavailableError: the image does not decode on the card even alone.
        """
        return phases(self.request, self.setting, self.card.total_bytes)

    @cached_property
    def there(self) -> Mapping[str, Phase]:
        """What is really on the card in each phase, where weights are moved less than `phases`."""
        if not self.moved:
            return self.phases
        return phases(self.request, self.settled, self.card.total_bytes)

    @cached_property
    def before_decoding(self) -> Mapping[str, Phase]:
        """The same of every phase that does not depend on the card: no tiles are planned."""
        found = phases(self.request, self.setting)
        return {name: phase for name, phase in found.items() if name != "decode"}

    @property
    def sampling(self) -> Phase:
        return self.before_decoding["sampling"]

    def need(self, name: str) -> Need:
        """Of a phase; the decoder's holds what had to leave the card for it, too."""
        if name != "decode":
            return Need(name, self.before_decoding[name].card_bytes)
        decode, resident = self.phases["decode"], self.sampling.resident
        there = self.on_card + resident.get("text encoder", 0)
        left = sum(decode.resident.get(part, 0) for part in ("transformer", "text encoder"))
        return Need(name, decode.card_bytes + there - left)

    @property
    def needs(self) -> dict[str, Need]:
        """Of every phase by name."""
        return {name: self.need(name) for name in (*self.before_decoding, "decode")}

    @property
    def worst(self) -> Need:
        return max(self.needs.values(), key=lambda need: need.bytes)

    @property
    def fits(self) -> bool:
        # Planning the decoder's tiles takes the longest, so it comes last.
        names = (*self.before_decoding, "decode")
        return all(self.need(name).spare(self.card) >= 0 for name in names)

    @property
    def short(self) -> Need:
        """What does not fit: sampling, where it does not, because that counts in every step."""
        sampling = self.need("sampling")
        return sampling if sampling.spare(self.card) < 0 else self.worst

    @property
    def on_card(self) -> int:
        """Bytes of the transformer that steps read."""
        return self.sampling.weights

    @property
    def moved_bytes(self) -> int:
        """Of these, what does not stay, and has to be moved in each forward pass."""
        return self.on_card - self.there["sampling"].weights

    @property
    def least_bytes(self) -> int:
        """The smallest card on which a forward pass runs, with all weights moved that can be."""
        sampling = self.sampling
        some = least_weights(self.request, sampling.weights)
        text = sampling.resident.get("text encoder", 0)
        return sampling.card_bytes - sampling.weights - text + some + KEPT_FREE_BYTES

    @property
    def tiles(self) -> int:
        """Of each image that is decoded."""
        decode = self.there["decode"]
        free = self.card.total_bytes - KEPT_FREE_BYTES - decode.card_bytes + decode.activations
        return decode_plan(self.request, max(free, decode.activations)).count

    @property
    def transformer(self) -> Held:
        """Its weights as held, wherever they wait."""
        return Held(*transformer_bytes(self.request, self.setting))

    @property
    def text_encoder(self) -> int:
        """Its weights as held."""
        return text_encoder_bytes(self.request, self.setting.text_encoder)


def sized(
    request: RunRequest,
    precision: str,
    stored: str | None = None,
    held: Mapping[str, Held] | None = None,
) -> RunRequest:
    """A request whose parts have the transformer's sizes in a precision.

    Args:
        stored: the precision that the sizes in `request.parts` are of; None for the request's.
        held: {precision: sizes} that stand above these.
    """
    known = (held or {}).get(precision)
    if known is not None:
        sizes = {"transformer_bytes": known.total, "modulation_bytes": known.modulation}
    elif precision != (stored or request.precision):
        sizes = {"transformer_bytes": None, "modulation_bytes": None}
    else:
        return request
    return replace(request, parts=replace(request.parts, **sizes))
