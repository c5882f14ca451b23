"""Where the text encoder stays."""

import gc
from unittest import mock

import comfy.hooks
import comfy.model_management
import comfy.patcher_extension
import comfy.sd
import pytest
import torch
from comfyui_boot import MODE, ROOT, folder, refused

from qwen_l40s.errors import SettingError, UnavailableError
from qwen_l40s.hosts.comfyui.encode import EXACT, EncodeSettings
from qwen_l40s.hosts.comfyui.load import plan as load_plan
from qwen_l40s.hosts.comfyui.load import text_encoder
from qwen_l40s.hosts.comfyui.load.text_encoder import PLACEMENTS, load_text_encoder
from qwen_l40s.nodes.loaders import QwenL40SLoadTextEncoder
from qwen_l40s.planning.options import labelled
from qwen_l40s.planning.request import DROPPED, TEXT_ENCODER_PLACEMENTS

pytestmark = [pytest.mark.usefixtures("inference_mode"), pytest.mark.each_device]
FOLDER = folder("placed_clip")
MICRO = ROOT / "models" / "micro"
CPU = torch.device("cpu")
PROMPT = "a small red star at the top left"
WEIGHT = "qwen25_7b.transformer.model.layers.0.self_attn.o_proj.weight"


def load(placement="auto", precision="auto", path=MICRO):
    return load_text_encoder(path, precision, placement)[0]


def encode(clip, prompt=PROMPT, **options):
    [[conditioning, extra]] = clip.encode_from_tokens_scheduled(clip.tokenize(prompt, **options))
    assert extra["pooled_output"] is None
    return conditioning


def plain(clip):
    own = comfy.sd.CLIP(no_init=True)
    vars(own).update(vars(clip))
    return own


def is_loaded(clip):
    base = clip.patcher.clone_base_uuid
    return any(model.clone_base_uuid == base for model in comfy.model_management.loaded_models())


# --- what it gives


def test_every_form_of_the_result():
    clip, _ = text_encoder.encode_with(load(), EncodeSettings(arithmetic=EXACT))
    tokens = clip.tokenize(PROMPT)
    forms = [(False, False), (True, False), ("unprojected", False), (True, True)]
    expected = [plain(clip).encode_from_tokens(tokens, *form) for form in forms]
    for form, exact in zip(forms, expected, strict=True):
        found = clip.encode_from_tokens(tokens, *form)
        assert type(found) is type(exact), form
        if isinstance(found, dict):
            assert list(found) == list(exact)
            found, exact = list(found.values()), list(exact.values())
        pairs = zip(found, exact, strict=True) if isinstance(found, tuple | list) else ()
        for ours, theirs in pairs or [(found, exact)]:
            assert theirs is ours is None or torch.equal(ours, theirs), form
    assert torch.equal(clip.encode(PROMPT), expected[0])


# --- where it stays


def test_auto_leaves_it_to_comfyui():
    clip = load()
    encode(clip)
    assert is_loaded(clip)
    assert clip.patcher.load_device == comfy.model_management.text_encoder_device()


def test_dropped_after_each_encoding():
    other = load()
    encode(other)
    for precision in ("auto", "fp8"):
        clip = load(DROPPED, precision)
        assert clip.patcher.load_device == comfy.model_management.text_encoder_device()
        assert clip.patcher.offload_device == CPU
        exact = encode(load("auto", precision))
        for prompt in (PROMPT, PROMPT.replace("red", "blue"), PROMPT):
            encode(clip, prompt)
            assert not is_loaded(clip) and is_loaded(other)
        assert torch.equal(encode(clip), exact)
        # A clone with a LoRA leaves the card with it.
        clone = clip.clone()
        shape = clip.cond_stage_model.state_dict()[WEIGHT].shape
        clone.add_patches({WEIGHT: ("diff", (torch.ones(shape),))}, 0.1)
        assert not torch.equal(encode(clone), exact)
        assert not is_loaded(clip) and not is_loaded(clone)
        # Single numbers of modules that have children stay where dynamic VRAM has put them.
        parameters = clip.cond_stage_model.parameters()
        weights = {weight.device.type for weight in parameters if weight.numel() > 1}
        assert weights == {"cpu"}
        assert torch.equal(encode(clip), exact)


def test_dropped_after_failing_and_after_scheduled_hooks():
    clip = load(DROPPED)
    failing = mock.patch.object(comfy.sd.CLIP, "add_hooks_to_dict", side_effect=KeyError)
    with failing, pytest.raises(KeyError):
        clip.encode_from_tokens(clip.tokenize(PROMPT), return_dict=True)
    assert not is_loaded(clip)
    group = comfy.hooks.HookGroup()
    group.add(comfy.hooks.WeightHook())
    scheduled = clip.clone(disable_dynamic=True)
    scheduled.patcher.forced_hooks, scheduled.use_clip_schedule = group, True
    encode(scheduled)
    assert not is_loaded(scheduled)


def test_on_the_processor():
    exact = encode(load())
    clip = load("cpu")
    assert (clip.patcher.load_device, clip.patcher.offload_device) == (CPU, CPU)
    assert not clip.is_dynamic()
    found = encode(clip)
    if MODE == "cpu":
        assert torch.equal(found, exact)
    assert (found - exact).norm() / exact.norm() <= 1e-4
    assert {parameter.device.type for parameter in clip.cond_stage_model.parameters()} == {"cpu"}


def test_the_placement_goes_with_a_reload():
    for placement in PLACEMENTS:
        clip = load(placement)
        exact = encode(clip)
        function, arguments = clip.patcher.cached_patcher_init
        patcher = function(*arguments, disable_dynamic=True)
        assert patcher.cached_patcher_init == clip.patcher.cached_patcher_init
        assert arguments[2] == placement
        devices = [(p.load_device, p.offload_device) for p in (clip.patcher, patcher)]
        assert devices[0] == devices[1] and not patcher.is_dynamic()
        again = clip.clone()
        again.patcher, again.cond_stage_model = patcher, patcher.model
        assert torch.equal(encode(again), exact)
        gc.collect()  # ComfyUI fails where a model disappears while it makes room for another


def test_an_unknown_placement_is_refused():
    refused(SettingError, "'card'", *PLACEMENTS, run=lambda: load("card"))


def test_host_memory_counts_the_copy_of_the_processor():
    with (
        mock.patch.object(load_plan, "available_memory", return_value=1000),
        mock.patch.object(text_encoder.comfy.memory_management, "aimdo_enabled", True),
    ):
        words = ["text_encoder in auto", "of system RAM"]
        refused(UnavailableError, *words, run=lambda: load_text_encoder(MICRO, "auto", "cpu"))


def test_the_node():
    assert tuple(PLACEMENTS) == TEXT_ENCODER_PLACEMENTS
    ids = [entry.id for entry in QwenL40SLoadTextEncoder.define_schema().inputs]
    assert ids == ["text_encoder", "precision", "placement"]
    choice = {"text_encoder": "micro (bundled)", "precision": "auto"}
    clip, report = QwenL40SLoadTextEncoder.execute(**choice).args
    assert clip.placement == "auto" and f"text_encoder_device auto: {PLACEMENTS['auto']}" in report
    for placement, words in PLACEMENTS.items():
        clip, report = QwenL40SLoadTextEncoder.execute(**choice, placement=placement).args
        assert (
            clip.placement == placement and f"{labelled('placement', placement)}: {words}" in report
        )
        assert torch.isfinite(encode(clip)).all()
        assert is_loaded(clip) == (placement != DROPPED)
