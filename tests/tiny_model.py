"""Fixture plugin: writes Qwen-Image diffusers folders with random weights, toy or real width.

The classes, the chat template and the file layout are those of the real folder; only counts and
widths are smaller.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, "
    "quantity, text, spatial relationships of the objects and background:<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SCHEDULER = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "invert_sigmas": False,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "stochastic_sampling": False,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}


@dataclass(frozen=True)
class Dims:
    """What differs between the folders; the defaults are the toy."""

    blocks: int = 2
    heads: int = 4
    head_dim: int = 32
    rope_axes: tuple[int, int, int] = (8, 12, 12)
    text_hidden: int = 512
    text_heads: int = 4
    text_kv_heads: int = 4
    text_mlp: int = 256
    vae_base: int = 8
    dtype: str = "float32"
    shard_size: str = "10GB"


REAL_WIDTH_ONE_BLOCK = Dims(
    blocks=1,
    heads=24,
    head_dim=128,
    rope_axes=(16, 56, 56),
    text_hidden=3584,
    text_heads=28,
    text_kv_heads=4,
    text_mlp=18944,
    vae_base=96,
    dtype="bfloat16",
    shard_size="300MB",
)


def _write_tokenizer(folder: Path) -> int:
    """Writes vocab.json, merges.txt and tokenizer_config.json: no tokenizer.json, as the real one.

    A BPE trained on the template alone merges each of its words into one token, so that the prefix
    is 34 tokens.

    Returns:
        The size of the vocabulary with the special tokens.
    """
    from tokenizers import Tokenizer, models, trainers
    from transformers import Qwen2Tokenizer

    rules = Qwen2Tokenizer().backend_tokenizer
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = rules.pre_tokenizer
    alphabet = type(rules.pre_tokenizer[1]).alphabet()
    trainer = trainers.BpeTrainer(initial_alphabet=alphabet, vocab_size=1000, show_progress=False)
    bpe.train_from_iterator(
        [TEMPLATE.replace("<|im_start|>", "").replace("<|im_end|>", "")], trainer
    )
    folder.mkdir()
    bpe.model.save(str(folder))
    count = bpe.get_vocab_size()
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": {
            str(count + i): {"content": token, "special": True}
            for i, token in enumerate(SPECIAL_TOKENS)
        },
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "bos_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return count + len(SPECIAL_TOKENS)


def _text_encoder(dims: Dims, vocabulary: int):
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": vocabulary,
            "hidden_size": dims.text_hidden,
            "intermediate_size": dims.text_mlp,
            "num_hidden_layers": 1,
            "num_attention_heads": dims.text_heads,
            "num_key_value_heads": dims.text_kv_heads,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [16, 24, 24],
            },
            "bos_token_id": None,
            "eos_token_id": vocabulary - 1,
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": dims.text_hidden,
            "fullatt_block_indexes": [0],
        },
        image_token_id=vocabulary - 1,
        video_token_id=vocabulary - 1,
        vision_start_token_id=vocabulary - 1,
        vision_end_token_id=vocabulary - 1,
        tie_word_embeddings=True,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def write_folder(folder: Path, dims: Dims = Dims()) -> Path:
    import torch
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImageTransformer2DModel,
    )

    dtype = getattr(torch, dims.dtype)
    folder.mkdir(parents=True)
    vocabulary = _write_tokenizer(folder / "tokenizer")
    FlowMatchEulerDiscreteScheduler(**SCHEDULER).save_pretrained(folder / "scheduler")
    parts = {
        "transformer": lambda: QwenImageTransformer2DModel(
            num_layers=dims.blocks,
            attention_head_dim=dims.head_dim,
            num_attention_heads=dims.heads,
            joint_attention_dim=dims.text_hidden,
            axes_dims_rope=dims.rope_axes,
        ),
        "vae": lambda: AutoencoderKLQwenImage(base_dim=dims.vae_base),
        "text_encoder": lambda: _text_encoder(dims, vocabulary),
    }
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for name, build in parts.items():
                build().save_pretrained(folder / name, max_shard_size=dims.shard_size)
    finally:
        torch.set_default_dtype(previous)
    index = {
        "_class_name": "QwenImagePipeline",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
        "tokenizer": ["transformers", "Qwen2Tokenizer"],
        "transformer": ["diffusers", "QwenImageTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLQwenImage"],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2))
    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy Qwen-Image folder in fp32, shared and read only: copy it before changing it."""
    return write_folder(tmp_path_factory.mktemp("tiny") / "qwen-image")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy transformer in bf16 in one file, read only."""
    import torch
    from diffusers import QwenImageTransformer2DModel
    from safetensors.torch import save_file

    model = QwenImageTransformer2DModel(
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        axes_dims_rope=(4, 6, 6),
    )
    path = tmp_path_factory.mktemp("transformer") / "qwen_image_2512.safetensors"
    save_file({name: t.to(torch.bfloat16) for name, t in model.state_dict().items()}, path)
    return path


@pytest.fixture
def write_real_width_folder() -> Callable[[Path], Path]:
    """Writes a folder with one block of the real model's widths, bf16, sharded (about 1.6 GB)."""
    return lambda folder: write_folder(folder, REAL_WIDTH_ONE_BLOCK)
