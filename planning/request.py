"""Defines a run request: the settings that memory, time and cost follow from."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ..errors import SettingError
from ..families.protocol import Member, StepTokens
from ..families.qwen_image import EDIT_2511 as NEWEST_EDIT
from ..families.registry import find_member
from ..spec.formats import KITCHEN_INT8, MULTIPLIED, QUANTIZED
from ..spec.sizes import MOST_GRAPH_ROWS, REPAID_BY
from ..spec.transformer import (
    OFF_CARD,
    ON_CARD,
    PIXELS_PER_TOKEN_SIDE,
    PLACES,
    REFERENCE_TOKENS,
    TransformerShape,
)
from ..spec.vae import VaeShape
from .step_cache import CHOICES, CUSTOM, OFF, computed_steps

AUTO, AS_STORED = "auto", "as stored"
# As a default: the class puts a value in its place before anybody reads it.
OWN: Any = None
PRECISIONS = (AUTO, *MULTIPLIED)
# Of a text encoder's file in 4 bits, which ComfyUI's Load CLIP keeps so.
W4A8 = "w4a8"
TEXT_ENCODER_PRECISIONS = (*PRECISIONS, W4A8)
DROPPED, ON_PROCESSOR = "drop after encoding", "cpu"
# What ComfyUI does with an encoder that is larger than the card; nobody has to ask for it.
STREAMED = "stream"
TEXT_ENCODER_PLACEMENTS = (AUTO, ON_CARD, ON_PROCESSOR, DROPPED)
# "off" is CFG 1: one forward pass a step. Prompts of different lengths take two passes in ComfyUI;
# "one pass" computes both at once, as ComfyUI does for prompts of one length.
CFG_MODES = ("two passes", "one pass", "off")
LORA_MODES = ("auto", "merge", "bypass")
EXACT, FAST = "exact", "fast"
ATTENTIONS = (EXACT, KITCHEN_INT8, FAST)
# Parts of a model, as `Parts.file_bytes` names them.
TRANSFORMER, TEXT_ENCODER, VAE = "transformer", "text encoder", "VAE"
MOST_TOKENS = 2**20
MOST_PIXELS = 2**20


@dataclass(frozen=True)
class Loras:
    count: int = 0
    rank: int = 32
    # "merge" into the weights, "bypass": computed beside them in each step, or "auto": bypass
    # beside quantized weights, which a merge would round once more.
    mode: str = "auto"

    def beside(self, precision: str) -> int:
        """Counts those in bypass mode beside weights that are loaded in a precision."""
        auto = "bypass" if precision in QUANTIZED else "merge"
        mode = auto if self.mode == "auto" else self.mode
        return self.count if mode == "bypass" else 0


@dataclass(frozen=True)
class Parts:
    """The true sizes of parts that the user has; None is what the published model has."""

    transformer: TransformerShape | None = None
    transformer_bytes: int | None = None  # of all its weights as loaded, modulation among them
    modulation_bytes: int | None = None
    text_encoder_bytes: int | None = None
    vae: VaeShape | None = None
    vae_bytes: int | None = None
    # (transformer_bytes, modulation_bytes) of a file in 4 or 6 bits whose weights stay so where
    # int8 does not fit in VRAM.
    packed: tuple[int, int] | None = None
    # What their files take, as stored: pairs of `TRANSFORMER`, `TEXT_ENCODER` or `VAE` and bytes;
    # what is not named takes its size as loaded.
    file_bytes: tuple[tuple[str, int], ...] = ()
    gguf: bool = False  # of the transformer, whose weights a load expands
    converted: int = 0  # of another file, what a load decodes, converts or joins in system RAM
    kept: str = ""  # the precision of a quantized transformer that was left as it is; "" of others
    cast: bool = False  # whether fp8 was cast without scales, as for storing alone

    @property
    def at_hand(self) -> bool:
        """Tells whether a transformer is, so that none is downloaded."""
        return bool(self.transformer or self.file_bytes or self.transformer_bytes is not None)


class OtherModel(NamedTuple):
    """A model that stays in VRAM beside the one that runs, with its text encoder and VAE."""

    family: str
    precision: str


@dataclass(frozen=True)
class RunRequest:
    """A run to plan; "auto" and 0 tiles leave a choice to the plan. Raises SettingError."""

    family: str = "qwen-image"  # a name in `families.registry.members`
    precision: str = "auto"
    # width, height: pixels, divisible by 16; None is the family's side.
    width: int = 1328
    height: int = 1328
    batch: int = 1
    steps: int = 20  # of the sampler, of one or two forward passes each; None: the family's
    cfg: str = "two passes"
    references: int = 0  # reference images, of one megapixel each
    layers: int = OWN  # besides the whole image, of Layered; None is the family's
    text_tokens: int = 200  # of the longest prompt, without what references add
    nag_tokens: int = 0  # of the negative prompt of NAG, likewise; 0 without NAG
    modulation: str = "auto"  # where its weights wait, one of `PLACES`
    text_encoder: str = "auto"  # of its file, one of `TEXT_ENCODER_PRECISIONS`
    text_encoder_place: str = "auto"  # one of `TEXT_ENCODER_PLACEMENTS`
    loras: Loras = Loras()
    controlnet_bytes: int = 0  # of the weights of a ControlNet that runs in each step; 0 for none
    others: tuple[OtherModel, ...] = ()
    tiles: int = 0  # of the VAE: 0 leaves it to the plan, 1 is whole, more are at least so many
    cache: str = OFF  # the step cache, one of `step_cache.CHOICES`; "custom" needs `computed`
    computed: int = 0  # of the steps, those that call the transformer; 0 counts them from `cache`
    attention: str = EXACT  # one of `ATTENTIONS`; "fast" allows "kitchen_int8"
    parts: Parts = field(default_factory=Parts)

    def __post_init__(self) -> None:
        family = find_member(self.family)
        cfg = "off" if family.cfg == 1 else "two passes"
        own: dict[str, Any] = dict.fromkeys(("width", "height"), family.default_side)
        own |= {"steps": family.steps, "cfg": cfg, "layers": family.layers}
        for name, value in own.items():
            if getattr(self, name) in (None, AUTO):
                object.__setattr__(self, name, value)
        self._check_choices()
        self._check_numbers()
        self._check_family(family)
        for other in self.others:
            find_member(other.family)
            if other.precision not in MULTIPLIED:
                raise SettingError(
                    f"{other.precision!r} is no precision of a model that stays in VRAM: "
                    f"choose {', '.join(MULTIPLIED)}."
                )

    @cached_property
    def member(self) -> Member:
        return find_member(self.family)

    @cached_property
    def transformer(self) -> TransformerShape:
        return self.parts.transformer or self.member.transformer

    @cached_property
    def vae(self) -> VaeShape:
        return self.parts.vae or self.member.vae

    @property
    def frames(self) -> int:
        """Counts the latent frames that are denoised together."""
        return self.layers + 1

    @property
    def prompt_tokens(self) -> int:
        """Counts text tokens with those that reference images add to the prompt."""
        return self.text_tokens + self.references * self.member.vision_tokens

    @property
    def painted_tokens(self) -> int:
        """Counts the image tokens of one item that are denoised, in all of its frames."""
        side = PIXELS_PER_TOKEN_SIDE
        return self.frames * (self.width // side) * (self.height // side)

    @cached_property
    def step_tokens(self) -> StepTokens:
        """Counts the tokens of a forward pass, with what the image reads of NAG's prompt."""
        added = self.references * self.member.reference_words
        references, count = self.references * REFERENCE_TOKENS, self.member.family.step_tokens
        tokens = count(self.text_tokens + added, self.painted_tokens, references)
        if self.nag_tokens:
            more = count(self.nag_tokens + added, self.painted_tokens, references)
            both = tokens.text + more.text, tokens.prefix + more.prefix
            tokens = tokens._replace(text=both[0], prefix=both[1])
        return tokens._replace(items=self.items)

    @property
    def passes(self) -> int:
        return 2 if self.cfg == "two passes" else 1

    @property
    def prompts(self) -> int:
        """Counts the prompts that are encoded, a negative one among them."""
        return 1 if self.cfg == "off" else 2

    @cached_property
    def computed_steps(self) -> int:
        """Counts the steps that call the transformer; a step cache skips the others."""
        if self.computed or self.cache == OFF:
            return self.computed or self.steps
        return computed_steps(self.steps, self.cache)

    @property
    def items(self) -> int:
        return 2 * self.batch if self.cfg == "one pass" else self.batch

    def _check_choices(self) -> None:
        for name, value, allowed in (
            ("precision", self.precision, PRECISIONS),
            ("cfg", self.cfg, CFG_MODES),
            ("modulation", self.modulation, PLACES),
            ("text_encoder_precision", self.text_encoder, TEXT_ENCODER_PRECISIONS),
            ("text_encoder_placement", self.text_encoder_place, TEXT_ENCODER_PLACEMENTS),
            ("lora_mode", self.loras.mode, LORA_MODES),
            ("attention", self.attention, ATTENTIONS),
            ("cache", self.cache, (*CHOICES, CUSTOM) if self.computed else CHOICES),
        ):
            if value not in allowed:
                raise SettingError(f"{name} {value!r} is unknown: choose {', '.join(allowed)}.")

    def _check_numbers(self) -> None:
        for name, value, least, most in (
            ("width", self.width, PIXELS_PER_TOKEN_SIDE, MOST_PIXELS),
            ("height", self.height, PIXELS_PER_TOKEN_SIDE, MOST_PIXELS),
            ("batch", self.batch, 1, 4096),
            ("steps", self.steps, 1, 10_000),
            ("references", self.references, 0, 4096),
            ("layers", self.layers, 0, 4096),
            ("text tokens", self.text_tokens, 1, MOST_TOKENS),
            ("NAG tokens", self.nag_tokens, 0, MOST_TOKENS),
            ("tiles", self.tiles, 0, MOST_TOKENS),
            ("LoRAs", self.loras.count, 0, 1000),
            ("LoRA rank", self.loras.rank, 1, 4096),
            ("ControlNet bytes", self.controlnet_bytes, 0, 2**40),
            ("computed steps", self.computed, 0, self.steps),
        ):
            if value < least:
                raise SettingError(f"{name} must be at least {least}, got {value}.")
            if value > most:
                got = value if value < 10 * most else "far more"
                raise SettingError(f"{name} must be at most {most}, got {got}.")
        side = self.member.size_step
        if self.width % side or self.height % side:
            nearest = (max(side, side * round(edge / side)) for edge in (self.width, self.height))
            raise SettingError(
                f"{self.width}x{self.height}: both sides must be divisible by {side}: use "
                f"{'x'.join(map(str, nearest))}."
            )
        tokens = self.painted_tokens * self.batch
        if tokens > MOST_TOKENS:
            layers = f" with {self.layers} layers" if self.layers else ""
            fewer = "fewer layers, " if self.layers else ""
            raise SettingError(
                f"{self.batch} of {self.width}x{self.height}{layers} are {tokens:,} tokens, and an "
                f"estimate takes at most {MOST_TOKENS:,}: choose {fewer}a smaller size or batch."
            )

    def _check_family(self, family: Member) -> None:
        if self.references > family.most_references:
            takes = f"{family.most_references or 'no'} reference image"
            takes += "s" * (family.most_references != 1)
            most = NEWEST_EDIT.most_references
            helps = self.references <= most and not self.layers
            other = f"{NEWEST_EDIT.name} for up to {most}, or " if helps else ""
            raise SettingError(
                f"base_model (family) {family.name!r} takes {takes}, got {self.references} "
                f"references: choose {other}fewer references."
            )
        if self.layers and not family.layers:
            raise SettingError(
                f"base_model (family) {family.name!r} generates no layers, got {self.layers}: "
                "choose qwen-image-layered, or 0 layers."
            )


# What a plan has settled: the precisions, and where each part waits.

TEXT_PLACES = (ON_CARD, DROPPED, STREAMED, ON_PROCESSOR)


@dataclass(frozen=True)
class Setting:
    """How a request is run; nothing in it is left to choose."""

    precision: str = "bf16"
    modulation: str = ON_CARD  # "on card", or "off card", where a table stands in for its weights
    text_encoder: str = "bf16"
    text_encoder_place: str = ON_CARD
    resident: bool = True  # False where the host moves weights to the card and off it
    weight_only: bool = False  # whether weights are expanded to bf16 one by one
    packed: bool = False  # as `Parts.packed`: decoded one by one
    attention: str = EXACT

    @property
    def placement(self) -> str:
        """Names the placement of a loader: ComfyUI streams a large encoder by itself."""
        return AUTO if self.text_encoder_place == STREAMED else self.text_encoder_place

    @property
    def off_card(self) -> bool:
        return self.modulation == OFF_CARD


def repaid_by(request: RunRequest, setting: Setting) -> int:
    """Counts the steps after which a CUDA graph of the blocks has repaid its capture; 0 where none
    is predicted. The run itself goes by what it sees.
    """
    tokens = request.step_tokens
    rows = request.items * (tokens.text + tokens.image)
    few = rows <= MOST_GRAPH_ROWS[False]
    fitting = few or rows <= MOST_GRAPH_ROWS[setting.precision in QUANTIZED]
    fitting = fitting and not (request.nag_tokens and tokens.prefix)
    fitting = fitting and setting.resident and not request.controlnet_bytes
    # Two passes launch kernel by kernel. The CPU bounds those of few rows.
    steps = 2 + REPAID_BY[few]
    return steps if fitting and request.computed_steps >= steps else 0
