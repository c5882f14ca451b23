"""What can be requested, and what is refused with the remedy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_l40s.errors import SettingError
from qwen_l40s.families.qwen_image import QwenImageShape
from qwen_l40s.families.registry import find_member, members
from qwen_l40s.planning.request import (
    MOST_TOKENS,
    Loras,
    Parts,
    RunRequest,
    Setting,
    replays_graph,
)


@pytest.mark.parametrize(
    ("arguments", "rule", "remedy"),
    [
        ({"family": "flux"}, "'flux' is unknown", "choose qwen-image"),
        ({"precision": "fp4"}, "precision 'fp4'", "choose auto, bf16"),
        ({"cfg": "twice"}, "cfg 'twice'", "choose two passes"),
        ({"modulation": "disk"}, "modulation 'disk'", "choose auto"),
        ({"text_encoder": "fp4"}, "text_encoder_precision 'fp4'", "choose auto"),
        ({"text_encoder_place": "disk"}, "text_encoder_placement 'disk'", "choose auto"),
        ({"loras": Loras(1, 8, "above")}, "lora_mode 'above'", "choose auto, merge"),
        ({"loras": Loras(-1)}, "LoRAs must be at least 0", "got -1"),
        ({"loras": Loras(1, 0)}, "LoRA rank must be at least 1", "got 0"),
        ({"width": 0}, "width must be at least 16", "got 0"),
        ({"height": 1000}, "divisible by 16", "1328x992"),
        ({"batch": 0}, "batch must be at least 1", "got 0"),
        ({"steps": 0}, "steps must be at least 1", "got 0"),
        ({"text_tokens": 0}, "text tokens must be at least 1", "got 0"),
        ({"tiles": -1}, "tiles must be at least 0", "got -1"),
        ({"controlnet_bytes": -1}, "ControlNet bytes must be at least 0", "got -1"),
        ({"references": 1}, "takes no reference images", "choose qwen-image-edit-2511"),
        (
            {"family": "qwen-image-edit", "references": 2},
            "takes 1 reference image, got 2",
            "fewer references",
        ),
        (
            {"family": "qwen-image-edit-2511", "references": 4},
            "takes 3 reference images, got 4 references: choose fewer references.",
            "4 references",
        ),
        (
            {"family": "qwen-image-layered", "references": 2, "layers": 2},
            "takes 1 reference image, got 2 references: choose fewer references.",
            "2 references",
        ),
        (
            {"family": "qwen-image-layered", "layers": 4096},
            "1 of 1328x1328 with 4096 layers",
            "choose fewer layers, a smaller size or batch",
        ),
        ({"cache": "taylor"}, "cache 'taylor'", "choose off, faithful, balanced, fast."),
        ({"cache": "custom"}, "cache 'custom'", "choose off, faithful, balanced, fast."),
        ({"steps": 20, "computed": 21}, "computed steps must be at most 20", "got 21"),
        ({"layers": 3}, "generates no layers", "choose qwen-image-layered"),
        ({"width": 32768, "height": 16384}, "tokens", "smaller size or batch"),
        ({"steps": 10**400}, "steps must be at most 10000", "far more"),
        ({"controlnet_bytes": 2**41}, "ControlNet bytes must be at most", "got 2199023255552"),
    ],
)
def test_what_breaks_a_rule_is_refused_with_the_remedy(arguments, rule, remedy):
    with pytest.raises(SettingError) as raised:
        RunRequest(**arguments)
    assert rule in str(raised.value) and remedy in str(raised.value)


@given(
    family=st.sampled_from(sorted(members())),
    batch=st.integers(1, 4),
    cfg=st.sampled_from(["two passes", "one pass", "off"]),
    references=st.integers(0, 3),
    layers=st.integers(0, 5),
)
def test_passes_and_items_make_up_every_prompt(family, batch, cfg, references, layers):
    member = members()[family]
    request = RunRequest(
        family=family,
        width=member.side,
        height=member.side,
        batch=batch,
        cfg=cfg,
        references=min(references, member.most_references),
        layers=layers if member.layers else 0,
    )
    assert request.passes * request.items == batch * (1 if cfg == "off" else 2)
    assert request.frames == request.layers + 1
    assert request.prompt_tokens >= request.text_tokens
    assert (request.prompt_tokens > request.text_tokens) == bool(
        request.references and member.vision_tokens
    )
    assert request.member is find_member(family)


def test_the_largest_request_is_as_large_as_the_rule_says():
    side = 16 * int(MOST_TOKENS**0.5)
    assert RunRequest(width=side, height=side).width == side
    with pytest.raises(SettingError, match=r"smaller size or batch"):
        RunRequest(width=side, height=side, batch=2)


def test_true_shapes_stand_above_published_ones():
    shape = QwenImageShape(2, 128, 4, 32, 64, 64, 64)
    assert RunRequest(parts=Parts(transformer=shape)).transformer == shape
    layered = RunRequest(family="qwen-image-layered")
    assert layered.transformer.addition_t_cond and layered.vae.image_channels == 4


def test_computed_steps_are_those_of_the_cache_or_those_that_somebody_knows():
    for cache, computed in (("off", 50), ("faithful", 34), ("balanced", 26), ("fast", 20)):
        assert RunRequest(steps=50, cache=cache).computed_steps == computed
        assert RunRequest(steps=8, cache=cache).computed_steps == 8
    assert RunRequest(steps=50, cache="custom", computed=31).computed_steps == 31
    assert RunRequest(steps=50, computed=31).computed_steps == 31


@pytest.mark.parametrize(
    ("asked", "setting", "replays"),
    [
        ({}, Setting("fp8"), True),
        ({}, Setting(), False),
        ({"steps": 14, "text_tokens": 800}, Setting("int8", "off card"), True),
        ({"steps": 8, "width": 512, "height": 512}, Setting(), True),
        ({"loras": Loras(3, 32, "merge")}, Setting("int8"), True),
        ({"loras": Loras(0, 32, "bypass")}, Setting("int8"), True),
        ({"loras": Loras(1, 32, "bypass")}, Setting("int8"), True),
        ({"controlnet_bytes": 1}, Setting("int8"), False),
        ({"steps": 13}, Setting("int8"), False),
        ({"steps": 7, "width": 512, "height": 512}, Setting(), False),
        ({"batch": 2}, Setting("int8"), False),
        ({"width": 1536}, Setting("int8"), False),
        ({}, Setting("int8", resident=False), False),
        ({"cache": "balanced"}, Setting("int8"), True),
        ({"cache": "fast"}, Setting("int8"), False),
    ],
)
def test_small_passes_replay_a_graph_where_weights_stay_and_nobody_else_takes_part(
    asked, setting, replays
):
    assert replays_graph(RunRequest(**{"width": 1024, "height": 1024, **asked}), setting) is replays
