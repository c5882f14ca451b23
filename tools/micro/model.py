"""The micro models with untrained weights, and their folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ModelMixin
from transformers import PreTrainedConfig, PreTrainedModel, Qwen2TokenizerFast

from .families import FAMILIES, QWEN_IMAGE, Family
from .tokenizer import save_tokenizer, train_tokenizer

# The real Qwen-Image scheduler. ComfyUI's shift of 2.1, 0.69, is what it gives at 1024x1024.
SCHEDULER = {
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 0.9,
    "base_image_seq_len": 256,
    "max_image_seq_len": 8192,
    "time_shift_type": "exponential",
}
_VOCABULARY_MULTIPLE = 32


INDEX = "model_index.json"
WEIGHTED = ("transformer", "vae", "text_encoder")
_WORDS = {"tokenizer": "Qwen2Tokenizer", "processor": "Qwen3VLProcessor"}
_PROCESSORS = {
    "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessorFast"},
    "video_preprocessor_config.json": {"video_processor_type": "Qwen3VLVideoProcessor"},
}
# The image side of a Qwen3-VL processor: pixels from -1 to 1, in merged patches of 2 x 2.
_IMAGES = {
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},  # pixels
}
_TEMPLATE = (
    "{% for turn in messages %}<|im_start|>{{ turn.role }}\n"
    "{% for part in turn.content %}{{ part.text }}{% endfor %}<|im_end|>\n{% endfor %}"
)


@dataclass
class MicroModel:
    """The components of the pipeline."""

    transformer: ModelMixin
    vae: ModelMixin
    text_encoder: PreTrainedModel
    tokenizer: Qwen2TokenizerFast
    scheduler: FlowMatchEulerDiscreteScheduler
    family: Family = QWEN_IMAGE

    def save(self, folder: Path) -> None:
        """Writes an ordinary diffusers folder with bf16 weights."""
        family = self.family
        for name in WEIGHTED:
            _half_copy(getattr(self, name)).save_pretrained(folder / name)
        self.scheduler.save_pretrained(folder / "scheduler")
        save_tokenizer(folder / family.words, family.templates)
        if family.words == "processor":
            (folder / "processor" / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
            for name, kind in _PROCESSORS.items():
                _write(folder / "processor" / name, _IMAGES | kind)
        _add_transformers_4_rope(folder / "text_encoder" / "config.json", family.text)
        index = {
            "_class_name": family.pipeline.__name__,
            "_diffusers_version": diffusers.__version__,
            "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
            "text_encoder": ["transformers", family.text_encoder.__name__],
            "transformer": ["diffusers", family.transformer.__name__],
            "vae": ["diffusers", family.vae.__name__],
            family.words: ["transformers", _WORDS[family.words]],
        }
        _write(folder / INDEX, index)


def _write(path: Path, settings: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _add_transformers_4_rope(path: Path, text: Mapping[str, Any]) -> None:
    """transformers 5 writes `rope_parameters` alone; 4 reads `rope_theta` and `rope_scaling`."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["text_config"] |= {name: text[name] for name in ("rope_theta", "rope_scaling")}
    _write(path, config)


def build(seed: int = 0, family: Family = QWEN_IMAGE) -> MicroModel:
    """Builds the untrained components in fp32 on the CPU, the same for the same seed."""
    torch.manual_seed(seed)
    tokenizer = train_tokenizer(templates=family.templates)
    return MicroModel(
        transformer=family.transformer(**family.transformer_dims),
        vae=family.vae(**family.vae_dims),
        text_encoder=family.text_encoder(_text_config(family, tokenizer)),
        tokenizer=tokenizer,
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        family=family,
    )


def _text_config(family: Family, tokenizer: Qwen2TokenizerFast) -> PreTrainedConfig:
    names = ("endoftext", "im_end", "vision_start", "vision_end", "image_pad", "video_pad")
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in names}
    return family.text_config(
        text_config=dict(
            family.text,
            vocab_size=-(-len(tokenizer) // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE,
            bos_token_id=None,
            eos_token_id=ids["im_end"],
            pad_token_id=ids["endoftext"],
            tie_word_embeddings=True,
        ),
        vision_config=dict(family.vision),
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
        tie_word_embeddings=True,
    )


def _half_copy(part: torch.nn.Module) -> torch.nn.Module:
    if isinstance(part, PreTrainedModel):
        copy = type(part)(part.config)
    else:  # without _name_or_path, the folder that the part came from
        copy = type(part)(**{k: v for k, v in part.config.items() if not k.startswith("_")})
    copy.load_state_dict(part.state_dict())
    return copy.to(torch.bfloat16).eval()


def load(folder: Path) -> MicroModel:
    """Reads a folder that `MicroModel.save` wrote, in fp32, to train on."""
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    [family] = (f for f in FAMILIES.values() if f.pipeline.__name__ == index["_class_name"])
    kinds = {name: getattr(family, name) for name in WEIGHTED}
    return MicroModel(
        **{
            name: kind.from_pretrained(folder / name, local_files_only=True).float()
            for name, kind in kinds.items()
        },
        tokenizer=Qwen2TokenizerFast.from_pretrained(folder / family.words, local_files_only=True),
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(
            folder / "scheduler", local_files_only=True
        ),
        family=family,
    )
