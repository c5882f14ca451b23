"""Names the files that are often passed where a safetensors file is needed, by content and, for
pickles, by suffix.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import CheckpointError

PICKLE_SUFFIXES = frozenset({".pt", ".pth", ".ckpt", ".bin", ".pkl"})


def _pickle_error(path: Path, evidence: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is a pickle ({evidence}), which can run any code when it is loaded and is never "
        "opened here: get the same weights as .safetensors."
    )


def refuse_pickle_suffix(path: Path) -> None:
    """Raises CheckpointError for a file that is named like pickled weights, whatever is in it."""
    if path.suffix.lower() in PICKLE_SUFFIXES and os.path.isfile(path):
        raise _pickle_error(path, f"by its suffix {path.suffix}")


def refuse_foreign_content(path: Path, first: bytes) -> None:
    """Raises CheckpointError when `first`, the first bytes of the file `path`, is the start of
    another known format.
    """
    # A zip's ninth byte is its compression method and a safetensors file's is `{`: by it, a header
    # whose length happens to spell one of these marks is still read as a header.
    if first[8:9] != b"{":
        if first.startswith(b"PK\x03\x04"):
            raise _pickle_error(path, "a zip archive, as torch.save writes it")
        if first.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
            raise _pickle_error(path, "its first bytes are the pickle protocol mark")
    if first.startswith(b"GGUF"):
        raise CheckpointError(
            f"{path} is a GGUF file and this package reads safetensors only: get the same model as "
            ".safetensors, or load this file with a GGUF node pack."
        )
    if first.startswith(b"version https://git-lfs.github.com/spec/"):
        raise CheckpointError(
            f"{path} is a git-LFS pointer, a note of where the weights are and not the weights: "
            "run `git lfs pull` in its folder."
        )
    if (
        first.lstrip(b"\xef\xbb\xbf \t\r\n")[:9]
        .lower()
        .startswith((b"<!doctype", b"<html", b"<?xml"))
    ):
        raise CheckpointError(
            f"{path} is a saved web page, not weights: download the file itself, not the page that "
            "shows it."
        )
