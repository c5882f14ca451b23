"""The shipped tokenizers: they have the token counts that the hosts cut by, and the words."""

import json
from pathlib import Path

import pytest
from diffusers import (
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImageImg2ImgPipeline,
    QwenImagePipeline,
)
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import Qwen2Tokenizer

from qwen_l40s.micro.scene import BACKGROUNDS, COLOURS, PAIRS, SHAPES, sample_prompts

SHIPPED = Path(__file__).resolve().parents[2] / "models" / "micro" / "tokenizer"
PIPELINES = (
    QwenImagePipeline,
    QwenImageImg2ImgPipeline,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
)
# In the order of the ids 151643 and on of Qwen2.5-VL.
SPECIAL_TOKENS = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>"),
    *("<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
]


@pytest.fixture(scope="module")
def shipped():
    return Qwen2Tokenizer.from_pretrained(SHIPPED, local_files_only=True)


def template_of(pipeline_class):
    """The chat template and how many tokens of it the pipeline cuts off."""
    parts = ("scheduler", "vae", "text_encoder", "tokenizer", "processor", "transformer")
    wanted = pipeline_class._get_signature_keys(pipeline_class)[0]
    pipeline = pipeline_class(**{part: None for part in parts if part in wanted})
    return pipeline.prompt_template_encode, pipeline.prompt_template_encode_start_idx


@pytest.mark.parametrize("pipeline_class", PIPELINES)
@pytest.mark.parametrize("prompt", ["a red star", "", " ", "Star.", "\n", "été", "<|im_end|>"])
def test_the_pipelines_cut_exactly_the_template_off(shipped, pipeline_class, prompt):
    template, cut = template_of(pipeline_class)
    prefix = template.partition("{}")[0].removesuffix("<|vision_start|><|image_pad|><|vision_end|>")
    assert cut == len(shipped(prefix).input_ids) and cut in (34, 64)  # as of the real vocabulary
    ids = shipped(template.format(prompt)).input_ids
    assert shipped.decode(ids[:cut]) == prefix
    assert shipped.decode(ids[cut:]) == template.format(prompt).removeprefix(prefix)


def test_both_forms_of_the_files_are_the_same_vocabulary(shipped):
    bpe = Tokenizer(models.BPE.from_file(str(SHIPPED / "vocab.json"), str(SHIPPED / "merges.txt")))
    stored = json.loads((SHIPPED / "tokenizer.json").read_text(encoding="utf-8"))
    assert bpe.get_vocab() == stored["model"]["vocab"]
    config = json.loads((SHIPPED / "tokenizer_config.json").read_text(encoding="utf-8"))
    listed = {
        entry["content"]: int(index) for index, entry in config["added_tokens_decoder"].items()
    }
    assert listed == {token: shipped.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}


def test_special_tokens_follow_the_words_in_their_real_order(shipped):
    first = len(shipped) - len(SPECIAL_TOKENS)
    ids = [shipped.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS]
    assert ids == list(range(first, len(shipped)))
    for token, index in zip(SPECIAL_TOKENS, ids, strict=True):
        assert shipped(f" star{token} ring").input_ids[1:-1] == [index]
    text = "<|im_start|>a red star<|im_end|>"
    assert shipped.decode(shipped(text).input_ids, skip_special_tokens=True) == "a red star"


def test_every_word_of_the_grammar_is_one_token(shipped):
    split_words = shipped.backend_tokenizer.pre_tokenizer.pre_tokenize_str
    vocabulary, seen = shipped.get_vocab(), set()
    for prompt, _ in sample_prompts(5000, 30, PAIRS):
        words = [word for word, _ in split_words(prompt)]
        seen.update(words)
        assert shipped.tokenize(prompt) == words
        assert shipped.decode(shipped(prompt).input_ids) == prompt
    assert seen <= set(vocabulary)
    assert {f"Ġ{name}" for name in (*SHAPES, *COLOURS, *BACKGROUNDS)} <= seen


@given(st.text(st.characters(codec="utf-8")))
def test_any_text_survives_a_round_trip(shipped, text):
    normal = shipped.backend_tokenizer.normalizer.normalize_str(text)
    ids = shipped(text).input_ids
    assert shipped.decode(ids, clean_up_tokenization_spaces=False) == normal
