"""What Qwen-Image puts before every prompt, and cuts off again after encoding."""

from __future__ import annotations

from pathlib import Path

from ..errors import CheckpointError

# The start of `QwenImagePipeline.prompt_template_encode` and its
# `prompt_template_encode_start_idx`; a test compares them.
TEMPLATE_PREFIX = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, "
    "quantity, text, spatial relationships of the objects and background:<|im_end|>\n"
    "<|im_start|>user\n"
)
TEMPLATE_PREFIX_TOKENS = 34
# Files that hold a whole tokenizer of the Qwen2 kind.
TOKENIZER_LAYOUTS = (("tokenizer.json",), ("vocab.json", "merges.txt"))


def holds_tokenizer(folder: Path) -> bool:
    """Whether the folder has the files of a tokenizer; without them an empty one would load."""
    return any(all((folder / name).is_file() for name in names) for names in TOKENIZER_LAYOUTS)


def check_prefix(folder: Path, tokens: int) -> None:
    """Raises CheckpointError when a tokenizer makes another number of tokens of the prefix than
    the 34 that are cut off.
    """
    if tokens != TEMPLATE_PREFIX_TOKENS:
        raise CheckpointError(
            f"{folder} encodes Qwen-Image's chat template in {tokens} tokens and it must be "
            f"{TEMPLATE_PREFIX_TOKENS}: use the tokenizer folder of Qwen-Image."
        )
