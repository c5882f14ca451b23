"""A CLIP that says where its text encoder stays, and that remembers what it has encoded.

ComfyUI moves the encoder to the card before each encoding, 15 GiB of the full-size one, also when
the prompt is one of the last; and it leaves it there until something else needs the room.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from uuid import UUID

import comfy.model_management
import comfy.sd
import torch
from comfy.model_patcher import ModelPatcher

from ...errors import SettingError
from ...optimizations.embedding_cache import EmbeddingCache, content_key
from .measuring import harmless
from .run_record import Recording, Records, note, running

CPU = "cpu"
DROP = "drop after encoding"
# {placement: what the report says of it}
PLACEMENTS = {
    "auto": "ComfyUI moves it to the card and leaves it there while there is room",
    CPU: "computes on the processor and takes no room on the card",
    DROP: "leaves the card after each encoding, so that the transformer need not share it",
}
# What CLIP itself replaces in the model.
OWN_OBJECTS = {"manual_cast_dtype"}

# One for all encoders: loading one again, as `--cache-none` does, finds its results.
RESULTS = EmbeddingCache()


def device_options(placement: str) -> dict[str, torch.device]:
    """What ComfyUI takes in `model_options` for a placement.

    Raises:
        SettingError: the placement is unknown.
    """
    if placement not in PLACEMENTS:
        raise SettingError(
            f"text encoder placement {placement!r} is unknown: choose {', '.join(PLACEMENTS)}."
        )
    cpu = torch.device("cpu")
    if placement == CPU:
        return {"load_device": cpu, "offload_device": cpu}
    # Without these ComfyUI may read the weights onto the card at once, and --gpu-only keeps them.
    return {"offload_device": cpu, "initial_device": cpu} if placement == DROP else {}


class PlacedClip(comfy.sd.CLIP):
    """ComfyUI's CLIP with a placement and remembered results.

    Results are remembered by the content of the tokens with their weights and pictures, the layer,
    what is to be returned, the weights with their patches and the device that computes.
    """

    placement: str
    _weights: tuple[Any, ...]
    _unpatched: UUID

    @classmethod
    def over(cls, clip: comfy.sd.CLIP, placement: str, weights: tuple[Any, ...]) -> PlacedClip:
        """Takes a CLIP over that was just loaded.

        Args:
            placement: A key of `PLACEMENTS`.
            weights: What the weights were made of and how, as `content_key` takes it.
        """
        placed = cls._around(clip)
        placed.placement = placement
        placed._weights = weights
        placed._unpatched = clip.patcher.patches_uuid
        return placed

    @classmethod
    def _around(cls, clip: comfy.sd.CLIP) -> PlacedClip:
        placed = cls(no_init=True)
        vars(placed).update(vars(clip))
        return placed

    def clone(self, disable_dynamic: bool = False) -> PlacedClip:
        placed = self._around(super().clone(disable_dynamic=disable_dynamic))
        placed.placement = self.placement
        placed._weights, placed._unpatched = self._weights, self._unpatched
        if placed.cond_stage_model is not self.cond_stage_model:
            with harmless():
                Records.share(placed.cond_stage_model, Records.of(self.cond_stage_model))
        return placed

    def encode_from_tokens(
        self, tokens: Any, return_pooled: bool | str = False, return_dict: bool = False
    ) -> Any:
        key = self._key(tokens, return_pooled, return_dict)
        known = RESULTS.recall(key)
        if known is not None:
            note(self.cond_stage_model, "text", "remembered: nothing ran")
            return known
        try:
            # Leaving the card is no part of it.
            with self._recording() as recording:
                result = super().encode_from_tokens(tokens, return_pooled, return_dict)
                with harmless():
                    cond = result["cond"] if return_dict else result[0] if return_pooled else result
                    recording.asked["tokens"] = cond.shape[1]
        finally:
            self._leave_card()
        RESULTS.keep(key, result)
        return result

    def encode_from_tokens_scheduled(self, *args: Any, **kwargs: Any) -> Any:
        # With scheduled hooks it encodes without `encode_from_tokens`.
        scheduled = self.patcher.forced_hooks is not None and self.use_clip_schedule
        try:
            with self._recording() if scheduled else nullcontext():
                return super().encode_from_tokens_scheduled(*args, **kwargs)
        finally:
            self._leave_card()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().generate(*args, **kwargs)
        finally:
            self._leave_card()

    def _key(self, tokens: Any, return_pooled: bool | str, return_dict: bool) -> bytes | None:
        """None where more than what is known here decides the result."""
        patcher = self.patcher
        # A clone on another card has a model of its own, while ComfyUI runs the first one.
        if self.apply_hooks_to_conds or self.cond_stage_model is not patcher.model:
            return None
        if _is_altered(patcher):
            return None
        changed = patcher.patches_uuid != self._unpatched
        return content_key(
            (
                tokens,
                self.layer_idx,
                return_pooled,
                return_dict,
                self._weights,
                str(patcher.patches_uuid) if changed else "",
                str(patcher.load_device),
            )
        )

    def load_model(self, *args: Any, **kwargs: Any) -> ModelPatcher:
        patcher = super().load_model(*args, **kwargs)
        running(self.cond_stage_model).begin()
        return patcher

    def _recording(self) -> Recording:
        device = self.patcher.load_device
        path = (f"on {device}, placement {self.placement}",)
        return Recording(self.cond_stage_model, "text", device, path)

    def _leave_card(self) -> None:
        if self.placement != DROP:
            return
        base = self.patcher.clone_base_uuid
        loaded = comfy.model_management.loaded_models()
        if any(model is not None and model.clone_base_uuid == base for model in loaded):
            comfy.model_management.unload_model_and_clones(self.patcher, all_devices=True)


def _is_altered(patcher: ModelPatcher) -> bool:
    """Whether hooks, injections, callbacks or replaced objects change what the model computes.

    They have no content to know them by, and not all of them change `patches_uuid`.
    """
    hooks = (patcher.forced_hooks, patcher.current_hooks, patcher.hook_patches or None)
    changes = (patcher.injections, patcher.callbacks, patcher.wrappers)
    return (
        any(hook is not None for hook in hooks)
        or any(changes)
        or bool(patcher.weight_wrapper_patches)
        or not OWN_OBJECTS.issuperset(patcher.object_patches)
    )
