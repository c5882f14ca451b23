"""Which parts of a pipeline stay on the card, and which wait in host memory for their turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import SettingError, UnavailableError
from ...loaders.precision import format_bytes
from ...planning.memory import GIB, TransformerShape, step_activation_bytes

NONE, TEXT_ENCODER, MODEL = "none", "text-encoder", "model"
OFFLOADS = ("auto", NONE, TEXT_ENCODER, MODEL)
# {way: the parts that stay on the card}; the others are there while they run.
RESIDENT = {
    NONE: ("text_encoder", "transformer", "vae"),
    TEXT_ENCODER: ("transformer", "vae"),
    MODEL: (),
}
# In bf16, derived for the longest prompt, 546 tokens with its template: their logits, which
# transformers computes too, in bf16 and fp32 (0.5 GB), all hidden states (0.1 GB), workspaces.
ENCODE_BYTES = GIB
# In bf16, measured on an H200 from 1024x1024 to 3072x3072 as allocated memory.
DECODE_BYTES_PER_PIXEL = 1259


@dataclass(frozen=True)
class OffloadChoice:
    """A way (a key of `RESIDENT`) and why it was chosen."""

    name: str
    reason: str


def transformer_shape(config: Mapping[str, Any]) -> TransformerShape:
    """The sizes in a transformer's config.json."""
    heads, head_dim = config["num_attention_heads"], config["attention_head_dim"]
    return TransformerShape(
        blocks=config["num_layers"],
        dim=heads * head_dim,
        heads=heads,
        head_dim=head_dim,
        joint_dim=config["joint_attention_dim"],
        in_channels=config["in_channels"],
        packed_out_channels=config["patch_size"] ** 2
        * (config["out_channels"] or config["in_channels"]),
    )


def part_activations(
    shape: TransformerShape, *, width: int, height: int, batch: int, itemsize: int
) -> dict[str, int]:
    """{part: bytes that it takes on the card beside its weights while it runs}.

    Args:
        width: pixels, as `height`.
        batch: images in one forward of the transformer; the VAE decodes them one by one.
        itemsize: bytes of a number that is computed with.
    """
    in_bf16 = {
        "text_encoder": ENCODE_BYTES,
        "transformer": step_activation_bytes(shape, width=width, height=height, batch=batch),
        "vae": DECODE_BYTES_PER_PIXEL * width * height,
    }
    return {part: count * itemsize // 2 for part, count in in_bf16.items()}


def choose_offload(
    requested: str,
    *,
    what: str,
    device: str,
    weights: Mapping[str, int],
    activations: Mapping[str, int],
    free: int,
    host_free: int,
) -> OffloadChoice:
    """Resolves `auto` to the first way whose weights and activations fit; refuses what cannot fit.

    A way that is asked for by name is refused for its weights alone: activations are upper bounds.

    Args:
        requested: one of `OFFLOADS`.
        what: the subject of a refusal, such as `models/Qwen-Image in bf16`.
        device: where the parts run, such as `cpu` or `cuda:0`.
        weights: {part: bytes}.
        activations: {part: bytes}, as `part_activations` counts them.
        free: bytes that can be had on `device` now.
        host_free: bytes of host memory that can be had now.

    Raises:
        SettingError: `requested` is no known name.
        UnavailableError: the card or host memory is too small.
    """
    if requested not in OFFLOADS:
        raise SettingError(f"offload {requested!r} is unknown: choose {', '.join(OFFLOADS)}.")
    if device == "cpu":
        total = sum(weights.values())
        _check_fit(what, "its weights alone", NONE, total, device, free)
        # The VAE decodes in tiles where it has to.
        _check_fit(
            what, "its weights and a step", NONE, total + activations["transformer"], device, free
        )
        asked = "" if requested in ("auto", NONE) else f"{requested} was asked for, and "
        return OffloadChoice(NONE, f"{asked}everything runs on the processor")
    if requested != "auto":
        nothing = dict.fromkeys(weights, 0)
        card, host = _needed(requested, weights, nothing)
        _check_fit(what, "its weights alone", requested, card, device, free)
        _check_fit(what, "the waiting parts", requested, host, "the host", host_free)
        return OffloadChoice(requested, "requested")
    failed = []
    for name in RESIDENT:
        card, host = _needed(name, weights, activations)
        facts = f"{format_bytes(card)} on {device}"
        facts += f" and {format_bytes(host)} of host memory" if host else ""
        if card <= free and host <= host_free:
            room = f"{format_bytes(free)} and {format_bytes(host_free)} are free"
            because = "".join(f"; {fault}" for fault in failed)
            return OffloadChoice(name, f"auto: takes {facts}, {room}{because}")
        failed.append(f"{name} would take {facts}")
    largest = max(weights, key=weights.get)
    raise UnavailableError(
        f"{what} does not fit: {', '.join(failed)}, where {format_bytes(free)} and "
        f"{format_bytes(host_free)} are free and the {largest} alone is "
        f"{format_bytes(weights[largest])}: free memory, or choose a smaller size or batch, "
        "another --device or --precision."
    )


def _needed(
    name: str, weights: Mapping[str, int], activations: Mapping[str, int]
) -> tuple[int, int]:
    """Bytes on the card at the worst moment, and in host memory."""
    if name == MODEL:
        # All wait in host memory between the turns of two of them.
        largest = max(weights[part] + activations[part] for part in weights)
        return largest, sum(weights.values())
    resident = RESIDENT[name]
    card = sum(weights[part] for part in resident) + max(activations[part] for part in resident)
    return card, sum(size for part, size in weights.items() if part not in resident)


def _check_fit(what: str, of: str, way: str, needed: int, place: str, free: int) -> None:
    if needed > free:
        others = "" if place == "cpu" else f", another --offload than {way}"
        raise UnavailableError(
            f"{what} needs {format_bytes(needed)} for {of} and {place} has "
            f"{format_bytes(free)} free: free memory, or choose another --device or "
            f"--precision{others}."
        )
