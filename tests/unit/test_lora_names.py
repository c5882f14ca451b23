"""The names of a LoRA's tensors, whatever wrote the file."""

from hypothesis import given
from hypothesis import strategies as st

from qwen_l40s.families.identify import PREFIXES, SUFFIX, normalize_name
from qwen_l40s.families.qwen_image import QWEN_IMAGE

PREFIX = st.sampled_from(["", *PREFIXES])
TARGETS = st.sampled_from(QWEN_IMAGE.lora_targets)
MODULE = st.builds("transformer_blocks.{}.{}".format, st.integers(0, 59), TARGETS)
PAIRS = ["lora_A.weight", "lora_B.default.weight", "lora_down.weight", "lora_up.weight", "alpha"]


@given(st.one_of(st.text(), st.lists(st.one_of(PREFIX, MODULE, st.text("._AB"))).map("".join)))
def test_a_normalized_name_stays_as_it_is(name):
    once = normalize_name(name)
    assert normalize_name(once) == once


@given(st.lists(st.sampled_from(["base_model.model.", "transformer.", "pipe.dit."])), MODULE)
def test_the_module_is_what_remains(prefixes, module):
    assert normalize_name(f"{''.join(prefixes)}{module}.lora_A.my-style.weight") == (
        f"{module}.lora_A.weight"
    )
    flat = module.replace(".", "_")
    for prefix in ("lycoris_", "lora_transformer_", "lora_unet_"):
        name = f"{''.join(prefixes)}{prefix}{flat}.lokr_w1"
        assert normalize_name(name) == f"lora_unet_{flat}.lokr_w1"


@given(PREFIX, MODULE, st.sampled_from(PAIRS))
def test_the_kind_of_tensor_stays(prefix, module, pair):
    name = f"{prefix}{module}.{pair}"
    kinds = [SUFFIX.search(text)["kind"] for text in (name, normalize_name(name))]
    assert kinds[0] == kinds[1]


def test_names_of_other_models_stay():
    for name in (
        "text_encoder.layers.0.self_attn.q_proj.lora_A.weight",
        "lora_te1_layers_0_q.lora_down.weight",
        "single_blocks.0.linear1.lora_up.weight",
    ):
        assert normalize_name(name) == name


def test_a_name_of_many_prefixes_is_normalized():
    """Any file may hold it; no recursion ends in Python's error."""
    assert normalize_name("dit.transformer." * 3_000 + "x.lora_A.weight") == "x.lora_A.weight"
