"""Trains a micro model's tokenizer: a byte-level BPE of the Qwen2 kind.

Its corpus is the grammar and the chat templates. Both hosts cut 1.x's prefix off by counting
tokens: 34 for text-to-image, 64 for editing. The real vocabulary gives each word of those
templates one token, so this one must too; `train_tokenizer` checks it.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import Qwen2TokenizerFast

from ...loaders.source import TEMPLATE_PREFIX, TEMPLATE_PREFIX_TOKENS
from ...micro.scene import PAIRS, describe, random_scene

# The start of `QwenImageEditPipeline.prompt_template_encode`, and the end of both templates.
EDIT_PREFIX = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, "
    "texture, objects, background), then explain how the user's text instruction should alter or "
    "modify the image. Generate a new image that meets the user's requirements while maintaining "
    "consistency with the original input where appropriate.<|im_end|>\n"
    "<|im_start|>user\n"
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"
PREFIX_TOKENS = {TEMPLATE_PREFIX: TEMPLATE_PREFIX_TOKENS, EDIT_PREFIX: 64}

# The Qwen2.5-VL special tokens, in the order of their real ids.
SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"),
    *("<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)

# Qwen2's word pattern.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CORPUS_PROMPTS = 20_000
_MAX_VOCABULARY = 1024


def train_tokenizer(
    seed: int = 0, templates: Mapping[str, int | None] = PREFIX_TOKENS
) -> Qwen2TokenizerFast:
    """Trains the tokenizer; the same seed gives the same vocabulary.

    Args:
        templates: {what stands before a prompt: the tokens that it must have, or None}.

    Raises:
        RuntimeError: when a template's prefix does not encode to the number of tokens that the
            hosts cut off.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_MAX_VOCABULARY,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=20,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(seed, templates), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    fast = Qwen2TokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=None,
        bos_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=2048,
        padding_side="right",
    )
    for prefix, count in templates.items():
        found = len(fast(prefix).input_ids)
        if count not in (None, found):
            raise RuntimeError(f"a prefix has {found} tokens, must have {count}: {prefix!r}")
    return fast


def _corpus(seed: int, templates: Iterable[str]) -> list[str]:
    """Prompts of the grammar, and the templates' words often enough that each becomes one token."""
    rng = random.Random(seed)
    prompts = [describe(random_scene(rng, PAIRS), rng) for _ in range(_CORPUS_PROMPTS)]
    known = [re.sub(r"<\|\w+\|>", "", text) for text in (*templates, SUFFIX)]
    return prompts + known * 25


def save_tokenizer(folder: Path, templates: Mapping[str, int | None] = PREFIX_TOKENS) -> None:
    """Writes the tokenizer in today's form (tokenizer.json) and in the one of transformers 4."""
    tokenizer = train_tokenizer(templates=templates)
    tokenizer.save_pretrained(folder)
    tokenizer.backend_tokenizer.model.save(str(folder))
    config = folder / "tokenizer_config.json"
    settings = json.loads(config.read_text(encoding="utf-8"))
    # transformers 4 takes the special tokens of a Qwen2Tokenizer from here.
    settings["added_tokens_decoder"] = {
        str(tokenizer.convert_tokens_to_ids(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token in SPECIAL_TOKENS
    }
    config.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
