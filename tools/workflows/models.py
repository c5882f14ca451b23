"""The model files that the workflows name: where each is published and where it belongs."""

from __future__ import annotations

from dataclasses import dataclass

GB = 10**9
COMFY_QWEN = "https://huggingface.co/Comfy-Org/Qwen-Image_ComfyUI/resolve/main/split_files"
COMFY_EDIT = "https://huggingface.co/Comfy-Org/Qwen-Image-Edit_ComfyUI/resolve/main/split_files"
LIGHTNING = "https://huggingface.co/lightx2v/Qwen-Image-2512-Lightning/resolve/main"
PANORAMA = "https://huggingface.co/ProGamerGov/qwen-360-diffusion/resolve/main"


@dataclass(frozen=True)
class ModelFile:
    """One published file.

    Attributes:
        name: as loaders name it.
        folder: where it is published, without the name.
        directory: under ComfyUI's `models`.
        gb: its size in decimal gigabytes, rounded as published; None where it is not known.
    """

    name: str
    folder: str
    directory: str
    gb: float | None = None

    @property
    def url(self) -> str:
        return f"{self.folder}/{self.name}"

    def link(self) -> dict[str, str]:
        """What the page's dialog of missing models reads."""
        return {"name": self.name, "url": self.url, "directory": self.directory}


def _transformer(name: str, folder: str, gb: float) -> ModelFile:
    return ModelFile(name, f"{folder}/diffusion_models", "diffusion_models", gb)


def _text_encoder(name: str, gb: float) -> ModelFile:
    return ModelFile(name, f"{COMFY_QWEN}/text_encoders", "text_encoders", gb)


QWEN_2512 = _transformer("qwen_image_2512_bf16.safetensors", COMFY_QWEN, 40.9)
QWEN_2512_FP8 = _transformer("qwen_image_2512_fp8_e4m3fn.safetensors", COMFY_QWEN, 20.4)
EDIT_2511 = _transformer("qwen_image_edit_2511_bf16.safetensors", COMFY_EDIT, 40.9)
TEXT_ENCODER = _text_encoder("qwen_2.5_vl_7b.safetensors", 16.6)
TEXT_ENCODER_FP8 = _text_encoder("qwen_2.5_vl_7b_fp8_scaled.safetensors", 9.4)
VAE = ModelFile("qwen_image_vae.safetensors", f"{COMFY_QWEN}/vae", "vae", 0.25)
# In bf16, not the fp32 of ComfyUI's own template: half the bytes, and merged into bf16 weights.
LIGHTNING_4 = ModelFile(
    "Qwen-Image-2512-Lightning-4steps-V1.0-bf16.safetensors", LIGHTNING, "loras", 0.85
)
LIGHTNING_8 = ModelFile(
    "Qwen-Image-2512-Lightning-8steps-V1.0-bf16.safetensors", LIGHTNING, "loras", 0.85
)
PANORAMA_360 = ModelFile("qwen-360-diffusion-2512-int8-bf16-v2.safetensors", PANORAMA, "loras")
