"""What a plan is asked: the settings that a wish leaves open on a card, in the order of trying."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from .memory import QUANTIZED, CardFacts
from .placement import OFF_CARD, ON_CARD
from .plan_trial import Held, Trial, sized
from .plan_words import lacks
from .setting import DROPPED, TEXT_PLACES, Setting
from .wish import Wish, precision_of_text_encoder

# The most faithful first; int8 before fp8 as `plan_words.INT8_BEFORE_FP8` says.
FIDELITY = ("bf16", "int8", "fp8")
AUTO = "auto"


@dataclass(frozen=True)
class Question:
    """A card, a wish, and what is known of the transformer's file; as `planning.plan.plan` takes
    them.
    """

    card: CardFacts
    wish: Wish
    stored: str | None
    as_stored: bool
    held: Mapping[str, Held]

    def precisions(self) -> Sequence[str]:
        """The most faithful first."""
        if self.as_stored or (self.wish.precision == AUTO and self.stored in QUANTIZED):
            return (self.stored if self.stored in QUANTIZED else "bf16",)
        if self.wish.precision != AUTO:
            return (self.wish.precision,)
        # Where nothing multiplies it, fp8 saves as much memory as int8 and no time.
        return [name for name in FIDELITY if name != "fp8" or not lacks(name, self.card)]

    def trial(self, precision: str) -> Trial:
        """The first places of the parts with which a precision stays; else the last, moved.

        Raises:
            UnavailableError: the image does not decode on the card even alone.
        """
        wish = sized(self.wish, precision, self.stored, self.held)
        trials = (
            Trial(self.card, wish, self._setting(precision, modulation, text_place))
            for modulation, text_place in self._places()
        )
        for trial in trials:
            if trial.fits:
                return trial
        return self._moved(trial)

    def together(self, trial: Trial) -> Trial:
        """A trial's precision with everything on the card that the wish leaves open."""
        setting = replace(trial.setting, modulation=ON_CARD)
        if self.wish.text_encoder_place == AUTO:
            setting = replace(setting, text_encoder_place=ON_CARD)
        return replace(trial, setting=setting, moved=False)

    def _places(self) -> Iterator[tuple[str, str]]:
        wish = self.wish
        modulations = (ON_CARD, OFF_CARD) if wish.modulation == AUTO else (wish.modulation,)
        texts = TEXT_PLACES if wish.text_encoder_place == AUTO else (wish.text_encoder_place,)
        for text_place in texts:
            # Where the encoder has to leave, the modulation has left before.
            places = modulations if text_place == texts[0] else modulations[-1:]
            yield from ((modulation, text_place) for modulation in places)

    def _setting(self, precision: str, modulation: str, text_place: str) -> Setting:
        text = precision_of_text_encoder(self.wish)
        expanded = lacks(precision, self.card)
        return Setting(precision, modulation, text, text_place, weight_only=expanded)

    def _moved(self, trial: Trial) -> Trial:
        """The host moves weights: an encoder that fits the card alone takes its turn there."""
        if self.wish.text_encoder_place == AUTO:
            dropped = replace(trial, setting=replace(trial.setting, text_encoder_place=DROPPED))
            if dropped.need("text").spare(self.card) >= 0:
                trial = dropped
        return replace(trial, moved=True)
