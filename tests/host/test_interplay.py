"""A quantized MODEL under what ComfyUI does to models: LoRAs merged into quantized weights,
torch.compile, deep copies, partial loading, two cards.
"""

import functools

import comfy.model_management
import comfy.model_patcher
import comfy.sample
import comfy.sd
import narrow_transformer as narrow
import pytest
import torch
from comfy_api.torch_helpers import set_torch_compile_wrapper
from comfyui_boot import MODE, folder
from narrow_transformer import difference

from qwen_l40s.hosts.comfyui.load.transformer import load_model

pytestmark = [pytest.mark.each_device, pytest.mark.usefixtures("inference_mode")]
FOLDER = folder("interplay")
WEIGHTS = narrow.weights()
PATH = narrow.write(FOLDER / "bf16.safetensors", WEIGHTS)


def lora() -> dict[str, torch.Tensor]:
    """Rank 4 on every layer that is quantized."""
    generator = torch.Generator().manual_seed(1)
    found = {}
    for layer in narrow.layers(WEIGHTS):
        rows, columns = WEIGHTS[f"{layer}.weight"].shape
        found[f"{layer}.lora_down.weight"] = torch.randn(4, columns, generator=generator) / 10
        found[f"{layer}.lora_up.weight"] = torch.randn(rows, 4, generator=generator) / 10
    return found


def sample(model: comfy.model_patcher.ModelPatcher, cfg: float = 1.0) -> torch.Tensor:
    """Two Euler steps at 64 x 64 from fixed noise; prompts of different lengths never batch."""
    generator = torch.Generator().manual_seed(1)
    prompts = (torch.randn(1, n, narrow.SHAPE.joint_dim, generator=generator) for n in (20, 7))
    return narrow.sample(model, *([[prompt, {}]] for prompt in prompts), cfg=cfg)


def with_lora(model: comfy.model_patcher.ModelPatcher) -> comfy.model_patcher.ModelPatcher:
    return comfy.sd.load_lora_for_models(model, None, lora(), 1.0, 0)[0]


def compiled(model: comfy.model_patcher.ModelPatcher) -> comfy.model_patcher.ModelPatcher:
    """One block through torch.compile; on a processor the graph alone, without a C++ compiler."""
    clone = model.clone(disable_dynamic=True)
    key = "diffusion_model.transformer_blocks.1"
    backend = "eager" if MODE == "cpu" else "inductor"
    set_torch_compile_wrapper(clone, backend=backend, keys=[key])
    return clone


def partly_loaded(form: str) -> float:
    """One forward with most weights left in host memory, against all on the card."""
    device = comfy.model_management.get_torch_device()
    noise = torch.ones(1, 16, 1, 8, 8, device=device, dtype=torch.bfloat16)
    text = torch.ones(1, 7, narrow.SHAPE.joint_dim, device=device, dtype=torch.bfloat16)
    outputs = []
    for budget in (400_000, 10**9):
        comfy.model_management.unload_all_models()
        model = load_model(PATH, form)[0]
        model.load(device, lowvram_model_memory=budget)
        places = {str(weight.device) for weight in model.model.diffusion_model.parameters()}
        assert ("cpu" in places) == (budget == 400_000), places
        sigma = torch.full((1,), 0.7, device=device)
        outputs.append(model.model.apply_model(noise, sigma, c_crossattn=text))
        model.detach()
    return difference(*outputs)


def on_two_cards(model: comfy.model_patcher.ModelPatcher) -> float:
    from comfy_extras.nodes_multigpu import MultiGPUCFGSplitNode

    split = MultiGPUCFGSplitNode.execute(model, 2).result[0]
    return difference(sample(split, 2.5), sample(model, 2.5))


# Of the latent after two steps, mostly noise: the weights' errors on a CPU, which computes in fp32;
# on a card bf16 activations add theirs.
ERRORS = {"int8": 5e-4, "fp8": 2e-3} if MODE == "cpu" else {"int8": 4e-3, "fp8": 4e-3}
each_form = pytest.mark.parametrize("form", ERRORS)


@functools.cache
def in_bf16() -> tuple[torch.Tensor, torch.Tensor]:
    """Latents without the LoRA and with it."""
    sample(load_model(PATH, "bf16")[0])  # a card's first products may differ in the last bit
    bf16 = load_model(PATH, "bf16")[0]
    return sample(bf16), sample(with_lora(bf16))


@each_form
def test_a_lora_is_merged_into_quantized_weights(form):
    plain, patched = in_bf16()
    assert difference(patched, plain) > 2 * ERRORS[form]
    model = load_model(PATH, form)[0]
    own = sample(model)
    assert 0 < difference(own, plain) <= ERRORS[form]
    assert difference(sample(with_lora(model)), patched) <= ERRORS[form]
    assert difference(sample(model), own) == 0.0


@each_form
def test_compiled_and_copied_it_gives_the_same(form):
    model = load_model(PATH, form)[0]
    own = sample(model)
    # Inductor rounds between operations where eager code does not, and the reverse.
    assert difference(sample(compiled(model)), own) <= (0.0 if MODE == "cpu" else 0.02)
    assert difference(sample(model.clone(force_deepcopy=True)), own) == 0.0


@each_form
@pytest.mark.cuda
def test_partly_loaded_it_gives_the_same(form):
    if MODE == "dynamic":
        pytest.skip("dynamic VRAM loads what it needs")
    assert partly_loaded(form) <= 1e-6


@each_form
@pytest.mark.cuda
def test_on_two_cards_it_gives_the_same(form):
    if torch.cuda.device_count() < 2:
        pytest.skip("splitting needs two cards")
    assert on_two_cards(load_model(PATH, form)[0]) <= 1e-6
