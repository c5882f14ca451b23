"""The nodes that write files: images, and a quantized model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import uuid4

import comfy.cli_args
import comfy.model_management
import comfy.utils
import folder_paths
import torch
from comfy_api.latest import io
from PIL.PngImagePlugin import PngInfo

from ..errors import SettingError, plain_write_errors
from ..files import name_file
from ..hosts.png import encode
from ..loaders.header import PICKLE_SUFFIXES
from ..loaders.quantized_file import check_destination
from .common import needs, schema, with_report
from .loaders import KEEP, keep_patterns

OTHER_FORMATS = (*PICKLE_SUFFIXES, ".gguf", ".sft")


def _destination(filename: str) -> Path:
    """Finds the path inside models/diffusion_models, which a name cannot leave."""
    name = PurePosixPath(filename.strip())
    outside = name.is_absolute() or ".." in name.parts or "\\" in filename or ":" in filename
    if outside or name.name in ("", ".safetensors"):
        raise SettingError(
            f"filename {filename!r} is outside models/diffusion_models: choose a name such as "
            "qwen_image_int8.safetensors."
        )
    if name.suffix.lower() in OTHER_FORMATS:
        raise SettingError(
            f"filename {filename!r} ends in {name.suffix}, but this node writes .safetensors "
            f"files: use {name.stem}.safetensors."
        )
    if name.suffix != ".safetensors":
        name = name.with_name(f"{name.name}.safetensors")
    folders = [Path(folder) for folder in folder_paths.get_folder_paths("diffusion_models")]
    # ComfyUI lists its older models/unet first.
    own = [folder for folder in folders if folder.name == "diffusion_models"]
    return (own or folders)[0] / name


class QwenL40SSaveQuantized(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="QwenL40S_SaveQuantized",
            display_name="Save Quantized Model (Qwen-Image)",
            description="Writes a MODEL, with its merged LoRAs, in int8 or fp8 to "
            "models/diffusion_models. Use it once for a bf16 model that you load "
            "often. The file has two thirds of the bf16 size. ComfyUI's loader also "
            "reads int8 files; fp8 files need this pack.",
            search_aliases=[
                "quantize",
                "save model",
                "model save",
                "checkpoint save",
                "convert to fp8",
                "convert to int8",
                "merge lora into model",
            ],
            is_output_node=True,
            inputs=[
                io.Model.Input(
                    "model", tooltip="Load it in bf16, so that each weight is rounded only once."
                ),
                io.Combo.Input(
                    "precision",
                    options=["int8", "fp8"],
                    default="int8",
                    tooltip="int8: closer to bf16; ComfyUI's loader reads it too. fp8: fast on Ada "
                    "GPUs and newer.",
                ),
                io.String.Input(
                    "filename",
                    default="qwen_image_int8.safetensors",
                    tooltip="A name inside models/diffusion_models; it may include subfolders. "
                    ".safetensors is added if it is missing.",
                ),
                io.Boolean.Input(
                    "overwrite", default=False, tooltip="Replaces the file if it exists."
                ),
                KEEP,
            ],
            outputs=[
                io.String.Output("report", tooltip="What was written, and which loaders read it.")
            ],
        )

    @classmethod
    def validate_inputs(cls, filename: str | None = None, overwrite: bool | None = None) -> bool:
        # Raised, as in the loaders. A linked input is None; a folder is made when it runs.
        if isinstance(filename, str) and (destination := _destination(filename)).exists():
            check_destination(destination, overwrite=overwrite is not False)
        return True

    @classmethod
    @needs("models", "layers", "runs", "saving")
    def execute(
        cls,
        model: io.Model.Type,
        precision: str,
        filename: str,
        overwrite: bool,
        keep_in_bf16: str = "",
    ) -> io.NodeOutput:
        from ..hosts.comfyui.save import save_quantized

        destination = _destination(filename)
        bar = comfy.utils.ProgressBar(1)
        saved = save_quantized(
            model,
            destination,
            precision,
            keep_patterns(keep_in_bf16),
            overwrite=overwrite,
            progress=lambda done, total: bar.update_absolute(done, total),
        )
        return with_report(report=saved.text())


def save_images(
    images: torch.Tensor, prefix: str, prompt: Any, extra: Mapping[str, Any] | None
) -> list[dict[str, str]]:
    """Writes each image to a file in the output folder, whole or not at all; replaces none.

    After an error or a cancel, the images that have their names stay.

    Args:
        images: [images, height, width, channels], from 0 to 1.
        prefix: as Save Image takes it: folders, `%width%` and others, `%batch_num%`.
        prompt, extra: what each file holds unless ComfyUI runs with --disable-metadata.

    Returns:
        What /view takes, for each file.
    """
    info = PngInfo()
    if not comfy.cli_args.args.disable_metadata:
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
                comfy.model_management.throw_exception_if_processing_interrupted()
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


class QwenL40SSaveImage(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="QwenL40S_SaveImage",
            display_name="Save Image (fast PNG)",
            description="Saves PNG files like Save Image, in about a tenth of its time. Use it "
            "instead of Save Image: pixels, names and workflow are the same. Files are "
            "a few percent larger. No file is replaced.",
            search_aliases=["save", "save image", "export image", "write image", "png", "download"],
            is_output_node=True,
            inputs=[
                io.Image.Input("images", tooltip="The images to save."),
                io.String.Input(
                    "filename_prefix",
                    default="ComfyUI",
                    tooltip="The beginning of the names, as in Save Image: it may include folders, "
                    "%date:yyyy-MM-dd%, %batch_num% or a value of a node, "
                    "%KSampler.seed%.",
                ),
            ],
            outputs=[io.Image.Output(display_name="images", tooltip="The images, unchanged.")],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo],
        )

    @classmethod
    @needs("images")
    def execute(cls, images: io.Image.Type, filename_prefix: str) -> io.NodeOutput:
        hidden = cls.hidden
        saved = save_images(images, filename_prefix, hidden.prompt, hidden.extra_pnginfo)
        return io.NodeOutput(images, ui={"images": saved})
