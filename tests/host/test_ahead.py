"""What is compiled from the check of a prompt on is what its model launches when it is loaded."""

from dataclasses import replace

import narrow_transformer as narrow
import pytest
from comfyui_boot import BASE
from narrow_21 import weights_21
from safetensors.torch import save_file

from qwen_l40s.caches import forget
from qwen_l40s.hosts.comfyui.load import ahead
from qwen_l40s.hosts.comfyui.load import plan as load_plan
from qwen_l40s.hosts.comfyui.sample import layers
from qwen_l40s.loaders import rounding
from qwen_l40s.nodes.loaders import QwenL40SLoadModel
from qwen_l40s.optimizations import linear, warm_up
from qwen_l40s.optimizations.linear import Gemm
from qwen_l40s.spec.formats import CardFacts

pytestmark = pytest.mark.usefixtures("inference_mode")
NEW = pytest.param("2.1", marks=pytest.mark.host_has("comfy.model_base.QwenImage21"))
FOLDER = BASE / "models" / "diffusion_models"
H200 = CardFacts("NVIDIA H200", 141 * 10**9, (9, 0))
LEFT = "transformer_blocks.1.attn.to_q"


@pytest.fixture
def asked(monkeypatch):
    """What is rehearsed, in order, for a card that is not there."""
    found = []
    monkeypatch.setattr(load_plan, "card_facts", lambda device: H200)
    gemm = lambda form, device, **_: Gemm(form, "triton", "", "triton")  # noqa: E731
    monkeypatch.setattr(linear, "choose_gemm", gemm)
    monkeypatch.setattr(rounding, "warm_up", lambda *_: None)
    for module in (ahead, layers):
        at_once = lambda device, work, *model: work(*model)  # noqa: E731
        monkeypatch.setattr(module, "warm_up", at_once)
    for module in (ahead, warm_up):
        take = lambda forms, *rest: found.append((tuple(forms), *rest))  # noqa: E731
        monkeypatch.setattr(module, "rehearse_forms", take)
    forget()
    yield found
    forget()


def written(family, stored):
    FOLDER.mkdir(parents=True, exist_ok=True)
    name = f"ahead_{family}_{stored.replace(' ', '_')}.safetensors"
    if family == "2.1":
        tensors = {key: each.bfloat16() for key, each in weights_21().items()}
    else:
        tensors = narrow.weights()
    if stored != "bf16":
        # As the published files have it; one layer stays as it is.
        chosen = [layer for layer in narrow.layers(tensors) if layer != LEFT]
        for layer in chosen:
            entry = narrow.rounded(tensors.pop(f"{layer}.weight"), stored.split()[0])
            if "slow" in stored:
                entry = replace(entry, full_precision=True)
            tensors |= entry.tensors(layer)
    if family == "2.1":
        save_file(tensors, FOLDER / name)
    else:
        narrow.write(FOLDER / name, tensors)
    return name


@pytest.mark.parametrize("family", ["1.x", NEW])
@pytest.mark.parametrize(
    ("stored", "settings"),
    [
        ("bf16", ("auto", "")),
        ("bf16", ("bf16", "")),
        ("bf16", ("fp8", "")),
        ("bf16", ("int8", f"{LEFT}, *.to_out.0")),
        ("int8", ("auto", "")),
        ("int8", ("fp8", "")),
        ("fp8", ("auto", "")),
        ("int8", ("bf16", "")),
    ],
)
def test_the_check_of_a_prompt_begins_with_what_its_model_asks_for(asked, family, stored, settings):
    name = written(family, stored)
    assert QwenL40SLoadModel.validate_inputs(name, *settings) is True
    (early,) = asked
    assert QwenL40SLoadModel.validate_inputs(name, *settings) is True
    assert len(asked) == 1, "the next prompt's check asks again"
    QwenL40SLoadModel.validate_inputs(name, settings[0], settings[1] or None)  # left out
    assert len(asked) == 1
    QwenL40SLoadModel.execute(name, *settings)
    assert asked[1:] == [early]
    forms = {layer.kind for form in early[0] for layer in form.layers}
    assert ("dense" in forms) == (settings[0] == "bf16" or stored != "bf16" or bool(settings[1]))


def test_nothing_is_compiled_for_what_the_check_cannot_know(asked):
    QwenL40SLoadModel.validate_inputs(written("1.x", "bf16"), None, "")
    QwenL40SLoadModel.validate_inputs(written("1.x", "int8 slow"), "auto", "")
    assert asked == []
