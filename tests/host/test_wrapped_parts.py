"""A MODEL whose parts another pack has wrapped, as PEFT does: they can be called, and no more."""

import narrow_transformer as narrow
import pytest
import torch
from comfyui_boot import folder
from safetensors.torch import save_file

import nodes
from qwen_l40s.errors import SettingError
from qwen_l40s.hosts.comfyui.estimate.sizes import model_sizes
from qwen_l40s.hosts.comfyui.load.transformer import load_model
from qwen_l40s.hosts.comfyui.load.vae import load_vae
from qwen_l40s.hosts.comfyui.lora.apply import apply_lora
from qwen_l40s.hosts.comfyui.sample.nag import NagSettings, guide_attention
from qwen_l40s.hosts.comfyui.sample.optimize import optimize
from qwen_l40s.hosts.comfyui.sample.step_cache import cache_steps
from qwen_l40s.hosts.comfyui.sigmas import sigmas_for
from qwen_l40s.loaders.source import bundled_micro_folder
from qwen_l40s.nodes.vae import QwenL40SVAEDecode
from qwen_l40s.planning.step_cache import cache_settings

pytestmark = pytest.mark.usefixtures("inference_mode")
FOLDER, WEIGHTS = folder("wrapped"), narrow.weights()
FILE, LORA = narrow.write(FOLDER / "model.safetensors", WEIGHTS), FOLDER / "lora.safetensors"
LAYERS = narrow.lora(WEIGHTS, [narrow.LAYER])
save_file({f"diffusion_model.{name}": it for name, it in LAYERS.items()}, LORA)
PROMPTS = [[[narrow.random(1, tokens, 64, seed=tokens), {}]] for tokens in (20, 7)]


class Wrap(torch.nn.Module):
    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer

    def forward(self, *args, **kwargs):
        return self.base_layer(*args, **kwargs)


def names():
    """The transformer's parts, a block, and what is read of one before a run."""
    transformer = load_model(FILE, "bf16")[0].model.diffusion_model
    blocks = "transformer_blocks"
    parts = [name for name, _ in transformer.named_children() if name != blocks]
    return [*parts, f"{blocks}.0", f"{blocks}.1", f"{blocks}.0.attn", f"{blocks}.0.attn.to_q"]


def wrapped(name):
    model = load_model(FILE, "bf16")[0]
    transformer = model.model.diffusion_model
    transformer.set_submodule(name, Wrap(transformer.get_submodule(name)))
    return model


NODES = {
    "none": lambda model: model,
    "Optimize": optimize,
    "Optimize, Step Cache": lambda it: cache_steps(optimize(it), cache_settings("fast")),
    "NAG": lambda model: guide_attention(model, PROMPTS[1], NagSettings())[0],
    "LoRA": lambda model: apply_lora(model, LORA, 1.0, how="auto")[0],
}


@pytest.mark.parametrize("node", NODES)
def test_the_picture_is_that_of_the_parts(node):
    known = narrow.sample(NODES[node](load_model(FILE, "bf16")[0]), *PROMPTS, steps=12)
    for name in names():
        if node == "LoRA" and name.startswith("transformer_blocks"):
            continue  # its keys are others then, for ComfyUI's own loader too
        found = narrow.sample(NODES[node](wrapped(name)), *PROMPTS, steps=12)
        assert narrow.difference(found, known) < 2e-6, name


def test_sizes_are_read_or_refused_in_a_sentence():
    for name in names():
        for read in (model_sizes, lambda model: sigmas_for(model, "official")):
            try:
                read(wrapped(name))
            except SettingError as error:
                assert str(error).endswith(".") and "\n" not in str(error)


def test_a_vae_of_wrapped_parts_goes_comfyuis_way():
    latents = {"samples": narrow.random(1, 16, 1, 4, 4)}
    vae = load_vae(bundled_micro_folder(), "fp32")[0]
    known = nodes.VAEDecode().decode(vae, latents)[0]
    model = vae.first_stage_model
    for name in ("decoder.head.2", "decoder.conv1", "decoder.middle.0", "decoder", "encoder.head"):
        part = model.get_submodule(name)
        model.set_submodule(name, Wrap(part))
        if name != "decoder.head.2":  # which ComfyUI looks into
            expected = nodes.VAEDecode().decode(vae, latents)[0]
            assert torch.equal(expected, known)
        found, report = QwenL40SVAEDecode.execute(latents, vae).args
        assert narrow.difference(found, known) < 1e-5, (name, report)
        model.set_submodule(name, part)
