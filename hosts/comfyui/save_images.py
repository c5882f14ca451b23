"""Writes images as ComfyUI's Save Image does: names, texts and pixels are the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import folder_paths
import torch
from comfy.cli_args import args
from comfy.model_management import throw_exception_if_processing_interrupted
from PIL.PngImagePlugin import PngInfo

from ...errors import plain_write_errors
from ...files import name_file
from ...png import encode


def save_images(
    images: torch.Tensor, prefix: str, prompt: Any, extra: Mapping[str, Any] | None
) -> list[dict[str, str]]:
    """Writes each image to a file in the output folder, whole or not at all; replaces none.

    After an error or a cancel, the images that have their names stay.

    Args:
        images: [images, height, width, channels], from 0 to 1.
        prefix: as Save Image takes it: folders, `%width%` and others, `%batch_num%`.
        prompt, extra: ComfyUI's hidden inputs `prompt` and `extra_pnginfo`, which each file holds
            unless ComfyUI runs with --disable-metadata.

    Returns:
        What /view takes, for each file.

    Raises:
        UnavailableError: the folder is read-only, or its disk full.
    """
    info = PngInfo()
    if not args.disable_metadata:
        if prompt is not None:
            info.add_text("prompt", json.dumps(prompt))
        for key, value in (extra or {}).items():
            info.add_text(key, json.dumps(value))
    output = folder_paths.get_output_directory()
    height, width = images[0].shape[:2]
    saved = []
    with plain_write_errors(Path(output)):
        folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(
            prefix, output, width, height
        )
        for number, image in enumerate(images):
            numbered = name.replace("%batch_num%", str(number))
            counter, path = _write(image, info, Path(folder), numbered, counter)
            saved.append({"filename": path.name, "subfolder": subfolder, "type": "output"})
    return saved


def _write(
    image: torch.Tensor, info: PngInfo, folder: Path, name: str, counter: int
) -> tuple[int, Path]:
    """Gives the image the next free number; returns the number after it, and the file."""
    # A name of its own for every file: that of the image may be as long as names can be.
    part = folder / f".{uuid4().hex}.part"
    try:
        with part.open("xb") as file:
            for piece in encode(image.cpu().numpy(), info):
                throw_exception_if_processing_interrupted()
                file.write(piece)
        while True:
            path, counter = folder / f"{name}_{counter:05}_.png", counter + 1
            try:
                name_file(part, path)
            except FileExistsError:
                continue
            return counter, path
    finally:
        part.unlink(missing_ok=True)
