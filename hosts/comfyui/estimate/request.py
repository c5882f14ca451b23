"""Makes a request, and its estimate, from a node's settings and its wires, which win."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ....errors import SettingError
from ....families.protocol import Member
from ....families.registry import (
    find_member,
    known_latents,
    likely_member,
    pixels_of,
    vae_shapes,
)
from ....machine.store import load_calibration
from ....planning.cards import Card
from ....planning.estimate import Estimate, estimate
from ....planning.options import LABELS, label_of
from ....planning.request import AUTO, EXACT, Parts, RunRequest
from ....planning.step_cache import OFF, CacheSettings, computed_with
from ....spec.transformer import whole_pixels
from ....spec.vae import VaeShape

if TYPE_CHECKING:
    from .sizes import TrueClip, TrueModel

# What a LATENT decides, as no rule refuses it before the LATENT is there.
NO_LATENT = {"width": 16, "height": 16, "batch": 1, "layers": 0}


@dataclass(frozen=True)
class WiredRequest:
    """Holds a request, sentences on what was read where, and how many cards the MODEL is on."""

    request: RunRequest
    notes: tuple[str, ...] = ()
    cards: int = 1


def request_from(
    settings: Mapping[str, Any],
    *,
    model: Any = None,
    clip: Any = None,
    vae: Any = None,
    latent: Mapping[str, Any] | None = None,
) -> WiredRequest:
    """Joins settings with the true sizes of what is wired in.

    Args:
        settings: arguments of `RunRequest`, with "auto" as one more family.
        model, clip, vae, latent: what is wired in; None for what is not. Nothing of it is moved.

    Raises:
        SettingError: a part is not Qwen-Image's, or contradicts a setting that was not left on
            "auto"; or the request breaks a rule of its own.
    """
    chosen, sizes, notes = dict(settings), dict[str, Any](), list[str]()
    found = encoder = None
    if any(it is not None for it in (model, clip, vae)):  # reading them needs more of ComfyUI
        from .sizes import clip_sizes, model_sizes, vae_sizes

        found = None if model is None else model_sizes(model)
        encoder = None if clip is None else clip_sizes(clip)
    if found is not None:
        sizes |= _take_model(chosen, found, notes)
    if encoder is not None:
        sizes |= _take_clip(chosen, encoder)
    if vae is not None:
        sizes["vae"], sizes["vae_bytes"] = vae_sizes(vae)
    if latent is not None:
        chosen |= latent_sizes(latent)
    wired = {"MODEL": model, "CLIP": clip, "VAE": vae, "LATENT": latent}
    if named := [name for name, part in wired.items() if part is not None]:
        notes.insert(0, f"Sizes are read from the connected inputs: {', '.join(named)}.")
    chosen["family"] = _family(chosen, found, notes)
    _check_parts(find_member(chosen["family"]), encoder, sizes.get("vae"))
    request = RunRequest(**chosen, parts=Parts(**sizes))
    if found is not None and found.cache is not None:
        request = _with_cache(request, found.cache)
    return WiredRequest(request, tuple(notes), 1 if found is None else found.cards)


def latent_sizes(latent: Mapping[str, Any]) -> dict[str, int]:
    """Reads a LATENT's width, height, batch and layers, with sides rounded up to whole tokens, as
    the model pads them. An empty one of another model counts as what ComfyUI's samplers make of it.
    """
    samples = latent["samples"]
    image = not samples.is_nested and samples.ndim in (4, 5)
    empty = image and not samples.count_nonzero()
    if not image or not (empty or samples.shape[1] in vae_shapes()):
        what = "of several tensors" if samples.is_nested else f"{tuple(samples.shape)}"
        raise SettingError(
            f"the LATENT is {what}, but {known_latents()}: connect a latent of Qwen-Image, or none."
        )
    ratio = latent.get("downscale_ratio_spacial") if empty else None
    ratio = ratio or pixels_of(samples.shape[1])
    height, width = (whole_pixels(round(side * ratio)) for side in samples.shape[-2:])
    frames = samples.shape[2] if samples.ndim == 5 else 1
    return {"width": width, "height": height, "batch": len(samples), "layers": frames - 1}


def estimate_on(
    card: Card,
    wired: WiredRequest,
    usd_per_hour: float | None,
    ram_bytes: int | None = None,
) -> Estimate:
    """Estimates a request on a card, with what was measured on one of its name."""
    calibration = load_calibration(card)
    how: dict[str, Any] = {"usd_per_hour": usd_per_hour, "ram_bytes": ram_bytes}
    found = estimate(wired.request, card, calibration=calibration, **how)
    return replace(found, notes=(*found.notes, *wired.notes))


def _check_parts(member: Member, clip: TrueClip | None, vae: VaeShape | None) -> None:
    wanted = member.text_encoder.name
    if clip is not None and clip.name != wanted:
        raise SettingError(
            f"the CLIP is {clip.name}, but {member.name} needs {wanted}: connect that, or none."
        )
    if vae is not None and not member.family.vae.fits(vae):
        raise SettingError(
            f"the VAE has {vae.latent_channels} latent channels, but {member.name} uses "
            f"{member.vae.latent_channels}: connect the VAE of {member.name}, or none."
        )


def _take_model(chosen: dict[str, Any], found: TrueModel, notes: list[str]) -> dict[str, Any]:
    chosen["precision"] = _agreed("precision", chosen["precision"], found.precision, "MODEL")
    place = _agreed("modulation", chosen["modulation"], found.modulation, "MODEL")
    chosen["modulation"] = place
    asked = chosen.get("attention", EXACT)
    chosen["attention"] = _agreed("attention", asked, found.attention, "MODEL", EXACT)
    if note := _form_note(found):
        notes.append(note)
    asked, tokens = chosen.get("nag_tokens", 0), found.nag_tokens or None
    chosen["nag_tokens"] = _agreed("nag_tokens", asked, tokens, "MODEL", 0)
    if found.loras.count:
        if chosen["loras"].count:
            raise SettingError(
                f"{chosen['loras'].count} LoRAs are set, but the connected MODEL already has "
                "LoRAs: set 0, or disconnect the MODEL."
            )
        chosen["loras"] = found.loras
    return {
        "transformer": found.shape,
        "transformer_bytes": found.bytes,
        "modulation_bytes": found.modulation_bytes,
    }


def _with_cache(request: RunRequest, found: CacheSettings) -> RunRequest:
    cache = _agreed("cache", request.cache, found.name, "MODEL", OFF)
    computed = request.computed or computed_with(request.steps, found)
    return replace(request, cache=cache, computed=computed)


def _form_note(found: TrueModel) -> str:
    wide = found.computed == "fp32"
    if not (found.stored or wide):
        return ""
    stored = found.stored or found.precision
    note = f"The MODEL's weights are stored in {stored} and computed in {found.computed}"
    if wide:
        note += "; activations and times assume bf16, so expect more"
    return f"{note}."


def _take_clip(chosen: dict[str, Any], found: TrueClip) -> dict[str, Any]:
    name = "text_encoder_precision"
    chosen["text_encoder"] = _agreed(name, chosen["text_encoder"], found.precision, "CLIP")
    place = _agreed("text_encoder_placement", chosen["text_encoder_place"], found.place, "CLIP")
    chosen["text_encoder_place"] = place
    return {"text_encoder_bytes": found.bytes}


def _agreed(name: str, asked: Any, found: Any, part: str, left: Any = AUTO) -> Any:
    """Takes what a part tells, else what was asked for; `left` leaves it to the part."""
    if found is None or asked == found:
        return asked
    if asked == left:
        return found
    raise SettingError(
        f"{LABELS.get(name, name)} is {label_of(name, asked)!r}, but the connected {part} has "
        f"{label_of(name, found)!r}: choose {left}, or disconnect the {part}."
    )


def _family(chosen: Mapping[str, Any], found: TrueModel | None, notes: list[str]) -> str:
    asked = chosen["family"]
    if asked == AUTO:
        return _likely_family(chosen, found, notes)
    if found is not None:
        member, family = find_member(asked), found.shape.family
        if other := family.contradiction(member, found.shape, found.timestep_zero):
            raise SettingError(
                f"base_model {asked!r} contradicts the connected MODEL, which is {other!r}: choose "
                "auto, or disconnect the MODEL."
            )
    return asked


def _likely_family(chosen: Mapping[str, Any], found: TrueModel | None, notes: list[str]) -> str:
    references = chosen["references"]
    if found is None:
        return likely_member(references, chosen["layers"]).name
    family = found.shape.family
    member, note = family.member_of(found.shape, found.timestep_zero, references)
    notes += filter(None, [note])
    return member.name
