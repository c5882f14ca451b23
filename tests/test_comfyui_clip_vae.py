"""Text encoders and VAEs in the real ComfyUI: what tests/comfyui_clip_vae.py checks there, one test
for each check, against what transformers and diffusers compute here.

Needs a ComfyUI: the one that `qwen-l40s doctor` finds, through COMFYUI_PATH or in ~/ComfyUI.
"""

import json
from pathlib import Path

import pytest
import torch
from comfyui_host import TESTS, checks_in, comfyui_folder, run_in_comfyui
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline
from published_text_encoder import published_shapes
from safetensors.torch import save_file

from qwen_l40s.loaders.convert import vae_name_to_native

SCRIPT = "comfyui_clip_vae.py"
CHECKS = checks_in(SCRIPT)
MICRO = TESTS.parent / "models" / "micro"
PROMPTS = [
    "a small red star at the top left",
    "",
    "a large blue circle, " * 60 + "on a white background",
    "(a red:1.3) [square] with (brackets) and no weights",
    "ein grüner Kreis — 绿色的圆 🟢",
]


@torch.inference_mode()
def write_reference(folder: Path) -> None:
    """What transformers makes of the prompts and diffusers of latents and pixels, in fp32."""
    pipeline = QwenImagePipeline.from_pretrained(MICRO, local_files_only=True).to(torch.float32)
    known = {
        f"prompt.{index}": pipeline.encode_prompt(prompt)[0] for index, prompt in enumerate(PROMPTS)
    }
    generator = torch.Generator().manual_seed(0)
    known["latents"] = torch.randn(1, 16, 1, 8, 8, generator=generator)
    torch.manual_seed(0)
    layered = AutoencoderKLQwenImage(base_dim=8, input_channels=4).eval()
    layered.save_pretrained(folder / "layered" / "vae")
    for prefix, vae, channels in (("", pipeline.vae, 3), ("layered_", layered, 4)):
        pixels = torch.rand(1, 64, 64, channels, generator=generator)
        decoded = vae.decode(known["latents"]).sample.movedim(1, -1)
        scaled = pixels.movedim(-1, 1).unsqueeze(2) * 2 - 1
        known[f"{prefix}decoded"] = ((decoded + 1) / 2).clamp(0, 1)
        known[f"{prefix}pixels"] = pixels
        known[f"{prefix}encoded"] = vae.encode(scaled).latent_dist.mode()
        assert known[f"{prefix}decoded"].std() > 0.01
    save_file(
        {name: tensor.contiguous() for name, tensor in known.items()},
        folder / "reference.safetensors",
    )
    native = {vae_name_to_native(name): w for name, w in pipeline.vae.state_dict().items()}
    save_file(native, folder / "native_vae.safetensors")
    (folder / "prompts.json").write_text(json.dumps(PROMPTS), encoding="utf-8")


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, str | None]:
    """{check: None or its traceback}; skips where there is no ComfyUI that can run."""
    comfyui_folder()
    folder = tmp_path_factory.mktemp("clip_vae")
    write_reference(folder)
    (folder / "published.json").write_text(json.dumps(published_shapes()), encoding="utf-8")
    return json.loads(run_in_comfyui(SCRIPT, folder).splitlines()[-1])


@pytest.mark.parametrize("check", CHECKS)
def test_in_comfyui(results, check):
    assert results[check] is None, results[check]


def test_every_check_ran(results):
    assert list(results) == CHECKS
