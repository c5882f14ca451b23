"""What can be requested, and what is refused with the setting's name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_l40s.errors import SettingError
from qwen_l40s.families.qwen_image import QwenImageShape
from qwen_l40s.families.registry import find_member, members
from qwen_l40s.planning.request import (
    CFG_MODES,
    MOST_TOKENS,
    Loras,
    OtherModel,
    Parts,
    RunRequest,
    Setting,
    repaid_by,
)

LAYERED = "qwen-image-layered"


@pytest.mark.parametrize(
    ("named", "arguments"),
    [
        ("flux", {"family": "flux"}),
        ("precision", {"precision": "fp4"}),
        ("cfg", {"cfg": "twice"}),
        ("modulation", {"modulation": "disk"}),
        ("text_encoder_precision", {"text_encoder": "fp4"}),
        ("text_encoder_placement", {"text_encoder_place": "disk"}),
        ("lora_mode", {"loras": Loras(1, 8, "above")}),
        ("attention", {"attention": "int4"}),
        ("cache", {"cache": "taylor"}),
        ("cache", {"cache": "custom"}),  # needs `computed`
        ("LoRAs", {"loras": Loras(-1)}),
        ("LoRA rank", {"loras": Loras(1, 0)}),
        ("width", {"width": 0}),
        ("1328x992", {"height": 1000}),  # the nearest size
        ("batch", {"batch": 0}),
        ("steps", {"steps": 0}),
        ("steps", {"steps": 10**400}),
        ("text tokens", {"text_tokens": 0}),
        ("NAG tokens", {"nag_tokens": -1}),
        ("tiles", {"tiles": -1}),
        ("ControlNet bytes", {"controlnet_bytes": -1}),
        ("ControlNet bytes", {"controlnet_bytes": 2**41}),
        ("computed steps", {"steps": 20, "computed": 21}),
        ("qwen-image-edit-2511", {"references": 1}),
        ("references", {"family": "qwen-image-edit", "references": 2}),
        ("references", {"family": "qwen-image-edit-2511", "references": 4}),
        ("references", {"family": LAYERED, "references": 2, "layers": 2}),
        ("layers", {"family": LAYERED, "layers": 4096}),
        (LAYERED, {"layers": 3}),
        ("tokens", {"width": 32768, "height": 16384}),
        ("int4", {"others": (OtherModel("qwen-image", "int4"),)}),
    ],
)
def test_what_breaks_a_rule_is_refused_by_its_name(named, arguments):
    with pytest.raises(SettingError) as raised:
        RunRequest(**arguments)
    assert named in str(raised.value) and len(str(raised.value)) < 300


def test_the_largest_request_is_as_large_as_the_rule_says():
    side = 16 * int(MOST_TOKENS**0.5)
    assert RunRequest(width=side, height=side).width == side
    with pytest.raises(SettingError, match="batch"):
        RunRequest(width=side, height=side, batch=2)


@given(
    family=st.sampled_from(list(members())),
    batch=st.integers(1, 4),
    cfg=st.sampled_from(CFG_MODES),
    references=st.integers(0, 3),
    layers=st.integers(0, 5),
)
def test_passes_and_items_make_up_every_prompt(family, batch, cfg, references, layers):
    member = find_member(family)
    references = min(references, member.most_references)
    layers = layers if member.layers else 0
    request = RunRequest(
        family, width=None, height=None, batch=batch, cfg=cfg, references=references, layers=layers
    )
    assert request.width == request.height == member.default_side
    assert request.passes * request.items == batch * (1 if cfg == "off" else 2)
    assert request.prompts == (1 if cfg == "off" else 2)
    assert request.frames == request.layers + 1
    added = request.prompt_tokens - request.text_tokens
    assert (added > 0) == bool(references and member.vision_tokens) and added >= 0


def test_what_is_left_out_is_the_models_and_true_shapes_stand_above():
    for member in members().values():
        own = RunRequest(member.name, width=None, height=None, steps=None, cfg="auto")
        assert (own.steps, own.layers) == (member.steps, member.layers)
        assert own.passes == (1 if member.cfg == 1 else 2)
    shape = QwenImageShape(2, 128, 4, 32, 64, 64, 64)
    assert RunRequest(parts=Parts(transformer=shape)).transformer == shape
    layered = RunRequest(LAYERED)
    assert layered.transformer.addition_t_cond and layered.vae.image_channels == 4


def test_computed_steps_are_those_of_the_cache_or_those_that_somebody_knows():
    for cache, computed in (("off", 50), ("faithful", 34), ("balanced", 26), ("fast", 20)):
        assert RunRequest(steps=50, cache=cache).computed_steps == computed
        assert RunRequest(steps=8, cache=cache).computed_steps == 8
    assert RunRequest(steps=50, cache="custom", computed=31).computed_steps == 31
    assert RunRequest(steps=50, computed=31).computed_steps == 31


@pytest.mark.parametrize(
    ("asked", "setting", "steps"),
    [
        ({}, Setting("fp8"), 14),
        ({}, Setting(), 0),
        ({"steps": 14, "text_tokens": 800}, Setting("int8", "off card"), 14),
        ({"steps": 8, "width": 512, "height": 512}, Setting(), 8),
        ({"loras": Loras(3, 32, "merge")}, Setting("int8"), 14),
        ({"loras": Loras(1, 32, "bypass")}, Setting("int8"), 14),
        ({"controlnet_bytes": 1}, Setting("int8"), 0),
        ({"steps": 13}, Setting("int8"), 0),
        ({"steps": 7, "width": 512, "height": 512}, Setting(), 0),
        ({"batch": 2}, Setting("int8"), 0),
        ({"width": 1536}, Setting("int8"), 0),
        ({}, Setting("int8", resident=False), 0),
        ({"cache": "balanced"}, Setting("int8"), 14),
        ({"cache": "fast"}, Setting("int8"), 0),
        ({"nag_tokens": 60}, Setting("int8"), 14),
        ({"nag_tokens": 60, "family": "qwen-image-2.1"}, Setting("int8"), 0),
    ],
)
def test_small_passes_replay_a_graph_once_it_repays_its_capture(asked, setting, steps):
    """Where weights stay, and nobody else takes part."""
    assert repaid_by(RunRequest(**{"width": 1024, "height": 1024, **asked}), setting) == steps
