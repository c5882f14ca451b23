"""The room that a VAE's activations have, and plans that keep to it.

ComfyUI's own `VAE.decode` books 3.5 times what decoding takes, for which the transformer leaves the
card. A plan for what is free leaves it there.
"""

from __future__ import annotations

import comfy.model_management
import comfy.sd

from ....errors import UnavailableError
from ....machine.memory import available_memory
from ....spec import format_gib

# ComfyUI books a tenth more than the weights that it loads.
BOOKED = 1.1


def on_processor(vae: comfy.sd.VAE) -> bool:
    """Whether the VAE computes in host memory."""
    return comfy.model_management.is_device_cpu(vae.device)


def free_bytes(vae: comfy.sd.VAE) -> int:
    """What activations can take while everything else stays where it is.

    On the processor this is host memory. The patcher's own `get_free_memory` would count the
    weights of other models that dynamic VRAM could evict.
    """
    if on_processor(vae):
        return available_memory()
    free = comfy.model_management.get_free_memory(vae.device)
    reserved = comfy.model_management.extra_reserved_memory()
    return max(0, int(free - reserved - BOOKED * waiting_bytes(vae)))


def waiting_bytes(vae: comfy.sd.VAE) -> int:
    """Bytes of the VAE's own weights that are not on its device yet."""
    patcher = vae.patcher
    if patcher.current_loaded_device() != vae.device:
        return patcher.model_size()
    return max(0, patcher.model_size() - patcher.loaded_size())


def others_bytes(vae: comfy.sd.VAE) -> int:
    """Bytes of other models' weights on the VAE's card, which ComfyUI can move off it."""
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
            f"to {what} takes {format_gib(needed)} of host memory and {format_gib(available)} is "
            "available: choose a smaller size or batch, or close other programs."
        )
