"""The shipped tokenizers: they have the token counts that the hosts cut by, and the words."""

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
from transformers import Qwen2Tokenizer

from qwen_l40s.micro.scene import BACKGROUNDS, COLOURS, PAIRS, SHAPES, sample_prompts

SHIPPED = Path(__file__).resolve().parents[2] / "models" / "micro" / "tokenizer"
PIPELINES = (
    QwenImagePipeline,
    QwenImageImg2ImgPipeline,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
)


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
