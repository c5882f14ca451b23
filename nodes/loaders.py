"""The loader nodes: a file or a folder becomes MODEL, CLIP and VAE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from comfy_api.latest import io

from ..errors import QwenL40SError, SettingError
from ..families.comfyui import require
from ..families.registry import member_of_file
from ..hosts.comfyui.load.choose import (
    AUTOMATIC,
    check_text_width,
    choices,
    find_companion,
    offered,
    source_of,
)
from ..hosts.comfyui.load.plan import check_settings
from ..hosts.loading import LOADER_PRECISIONS
from ..loaders.source import Source
from ..planning.request import TEXT_ENCODER_PLACEMENTS
from ..spec.transformer import PLACES
from .common import needs, schema, with_report

# Search words of people who want another precision, or less memory.
WEIGHT_WORDS = ["bf16", "fp8", "scaled fp8", "int8", "quantized", "low vram", "gguf"]
VAE_PRECISIONS = ["auto", "bf16", "fp32"]
MODEL, VAE = ("models", "layers", "runs", "transformer"), ("VAE", "loading a VAE")


def keep_patterns(text: str) -> tuple[str, ...]:
    """Splits what the widget holds at commas and line ends."""
    return tuple(part.strip() for part in text.replace("\n", ",").split(",") if part.strip())


# What `validate_inputs` finds is raised, not returned: ComfyUI repeats what is returned for each
# input that is named there, and its page hides it behind a click. A linked input is None there, and
# so is one that is missing, which ComfyUI says itself.


def check_transformer(model: str | None, precision: str | None, keep: str | None) -> None:
    """Raises what is wrong with a choice and its settings, from file headers alone.

    A linked input is None: it is known only when it runs.
    """
    if not isinstance(model, str):
        return
    source, patterns = wanted(model, "transformer"), keep_patterns(keep or "")
    if keep or precision not in (None, "auto"):
        with needs("transformer"):
            check_settings(source, precision or "auto", patterns)
    if precision is not None:
        with needs(*MODEL):
            from ..hosts.comfyui.load.ahead import compile_early

            compile_early(source, precision, patterns)


def wanted(name: str, role: str) -> Source:
    """Reads headers as `source_of`; refuses what this ComfyUI is too old for."""
    try:
        return source_of(name, role)
    except SettingError:
        if member := member_of_file(name):
            require(member.family, Path(name))
        raise


def _load_model(source: Source, precision: str, keep: str, settings: dict[str, Any]) -> Any:
    from ..hosts.comfyui.load.transformer import load_model
    from ..hosts.comfyui.sample.layers import compile_ahead

    patcher, report = load_model(source, precision, keep_patterns(keep), **settings)
    compile_ahead(patcher)  # while the text is encoded, not while the host brings the weights
    return patcher, report


def files_behind(name: str | None, role: str) -> Any:
    """Changes when a file behind the choice is replaced, so that it is loaded again."""
    if not isinstance(name, str):  # a linked input is known only when it runs
        return None
    return source_of(name, role).state_now()


def _model_input() -> io.Combo.Input:
    return io.Combo.Input(
        "model",
        **offered("transformer"),
        tooltip="A file in models/diffusion_models or models/checkpoints, a diffusers folder (its "
        "name ends with /), or micro (bundled): a tiny model for 256x256 that needs no "
        "download.",
    )


PRECISION = io.Combo.Input(
    "precision",
    options=list(LOADER_PRECISIONS),
    default="auto",
    tooltip="Precision of the transformer. auto: int8 with rotation where the GPU has int8 "
    "products, else bf16; an fp8 file with scales stays fp8. bf16: 38 GiB. int8: closest "
    "to bf16. fp8: needs an Ada GPU or newer. int8 and fp8 take 25 GiB. Offloaded "
    "modulation weights take 12.7 GiB of each.",
)
MODULATION = io.Combo.Input(
    "modulation",
    options=list(PLACES),
    default="auto",
    optional=True,
    advanced=True,
    tooltip="Where the modulation weights stay, a third of the transformer. off card: in system "
    "RAM, with a small table of their results on the GPU; a new schedule loads them once. "
    "auto: in system RAM if transformer and text encoder do not fit in VRAM together.",
)
KEEP = io.String.Input(  # `keep_patterns` reads what it holds
    "keep_in_bf16",
    default="",
    optional=True,
    advanced=True,
    tooltip="Layers to keep in bf16 when quantizing: shell patterns separated by commas, such as "
    "transformer_blocks.0.*, *.img_mlp.net.2. A kept layer takes twice the memory.",
)
KEPT = io.Boolean.Input(
    "keep_quantized",
    default=False,
    optional=True,
    advanced=True,
    tooltip="Writes weights that are quantized on load to a file beside the original. The next "
    "start reads this file and does not quantize; the weights are the same. Takes 25 GiB "
    "and needs 30 GB of free disk.",
)


def _placement_input(*, advanced: bool | None) -> io.Combo.Input:
    return io.Combo.Input(
        "placement",
        options=list(TEXT_ENCODER_PLACEMENTS),
        default="auto",
        optional=True,
        advanced=advanced,
        tooltip="Where the text encoder stays. auto: in VRAM while there is room. cpu: runs on the "
        "CPU, slowly. drop after encoding: leaves the GPU right after encoding, so that "
        "the transformer has room. An unchanged prompt is not encoded again.",
    )


def _report_output() -> io.String.Output:
    return io.String.Output(
        "report", tooltip="What was loaded, from which file, in which precision, and why."
    )


def _model_output() -> io.Model.Output:
    return io.Model.Output(tooltip="To LoRA loaders, then Qwen-Image Optimize, then the sampler.")


def _clip_output() -> io.Clip.Output:
    return io.Clip.Output(tooltip="To CLIP Text Encode, or TextEncodeQwenImageEditPlus for edits.")


def _vae_output() -> io.Vae.Output:
    return io.Vae.Output(tooltip="To VAE Decode, VAE Encode or TextEncodeQwenImageEditPlus.")


class QwenL40SLoadModel(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="QwenL40S_LoadModel",
            display_name="Load Qwen-Image Model",
            description="Loads a Qwen-Image transformer from a bf16, fp8, int8 or GGUF file or a "
            "diffusers folder: text to image, 2512, Edit, Layered or 2.1. Use it with "
            "separate loaders for text encoder and VAE.",
            search_aliases=[
                "load diffusion model",
                "unet loader",
                "diffusion model loader",
                "unet loader gguf",
                "nunchaku qwen image dit loader",
                "diffusers loader",
                "qwen image",
                "qwen edit",
                "qwen image layered",
                *WEIGHT_WORDS,
            ],
            has_intermediate_output=True,
            inputs=[
                _model_input(),
                PRECISION,
                KEEP,
                MODULATION,
                KEPT,
            ],
            outputs=[_model_output(), _report_output()],
        )

    @classmethod
    def validate_inputs(
        cls, model: str | None = None, precision: str | None = "auto", keep_in_bf16: str | None = ""
    ) -> bool:
        check_transformer(model, precision, keep_in_bf16)
        return True

    @classmethod
    def fingerprint_inputs(cls, model: str, **settings: Any) -> Any:
        return files_behind(model, "transformer")

    @classmethod
    @needs(*MODEL)
    def execute(
        cls, model: str, precision: str, keep_in_bf16: str = "", **settings: Any
    ) -> io.NodeOutput:
        source = source_of(model, "transformer")
        patcher, report = _load_model(source, precision, keep_in_bf16, settings)
        return with_report(patcher, report=report.text(), summary=report.summary())


class QwenL40SLoadTextEncoder(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="QwenL40S_LoadTextEncoder",
            display_name="Load Qwen-Image Text Encoder",
            description="Loads the text encoder of Qwen-Image, Qwen2.5-VL, or Qwen3-VL for 2.1. It "
            "turns prompts, and for edits images, into conditioning. Use it with Load "
            "Qwen-Image Model, instead of Load CLIP.",
            search_aliases=[
                "load clip",
                "clip loader",
                "dual clip loader",
                "clip loader gguf",
                "qwen 2.5 vl",
                "qwen2.5-vl",
                "text encoder",
                *WEIGHT_WORDS,
            ],
            has_intermediate_output=True,
            inputs=[
                io.Combo.Input(
                    "text_encoder",
                    **offered("text_encoder"),
                    tooltip="A file in models/text_encoders or models/checkpoints, a diffusers "
                    "folder (its name ends with /), or micro (bundled).",
                ),
                io.Combo.Input(
                    "precision",
                    options=list(LOADER_PRECISIONS),
                    default="auto",
                    tooltip="Precision of the stored weights; ComfyUI always computes in fp32. "
                    "bf16: 14.4 GiB. fp8, int8: 8.4 GiB. auto: as in the file.",
                ),
                _placement_input(advanced=None),
            ],
            outputs=[_clip_output(), _report_output()],
        )

    @classmethod
    def validate_inputs(cls, text_encoder: str | None = None) -> bool:
        if isinstance(text_encoder, str):
            source_of(text_encoder, "text_encoder")
        return True

    @classmethod
    def fingerprint_inputs(cls, text_encoder: str, **settings: Any) -> Any:
        return files_behind(text_encoder, "text_encoder")

    @classmethod
    @needs("text encoder")
    def execute(cls, text_encoder: str, precision: str, placement: str = "auto") -> io.NodeOutput:
        from ..hosts.comfyui.load.text_encoder import load_text_encoder

        source = source_of(text_encoder, "text_encoder")
        clip, report = load_text_encoder(source, precision, placement)
        return with_report(clip, report=report.text(), summary=report.summary())


class QwenL40SLoadVAE(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="QwenL40S_LoadVAE",
            display_name="Load Qwen-Image VAE",
            description="Loads the Qwen-Image VAE from a file of ComfyUI or of diffusers. Use it "
            "with Load Qwen-Image Model, instead of Load VAE.",
            search_aliases=["load vae", "vae loader", "qwen image vae", "wan vae"],
            has_intermediate_output=True,
            inputs=[
                io.Combo.Input(
                    "vae",
                    **offered("vae"),
                    tooltip="A file in models/vae or models/checkpoints, a diffusers folder (its "
                    "name ends with /), or micro (bundled).",
                ),
                io.Combo.Input(
                    "precision",
                    options=VAE_PRECISIONS,
                    default="auto",
                    tooltip="auto: ComfyUI's choice for the GPU. fp32: the most accurate, twice "
                    "the memory of bf16.",
                ),
            ],
            outputs=[_vae_output(), _report_output()],
        )

    @classmethod
    def validate_inputs(cls, vae: str | None = None) -> bool:
        if isinstance(vae, str):
            source_of(vae, "vae")
        return True

    @classmethod
    def fingerprint_inputs(cls, vae: str, **settings: Any) -> Any:
        return files_behind(vae, "vae")

    @classmethod
    @needs(*VAE)
    def execute(cls, vae: str, precision: str) -> io.NodeOutput:
        from ..hosts.comfyui.decode.fused import compile_ahead
        from ..hosts.comfyui.load.vae import load_vae

        loaded, report = load_vae(source_of(vae, "vae"), precision)
        compile_ahead(loaded)
        return with_report(loaded, report=report.text(), summary=report.summary())


class QwenL40SLoad(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="QwenL40S_Load",
            display_name="Load Qwen-Image",
            description="Loads transformer, text encoder and VAE in one node. Use it first in a "
            "workflow. For a transformer file, the node finds the matching text "
            "encoder and VAE in their folders. A diffusers folder or the bundled micro "
            "model has all three.",
            search_aliases=[
                "load checkpoint",
                "checkpoint loader",
                "checkpoint loader simple",
                "diffusers loader",
                "load diffusers model",
                "pipeline loader",
                "qwen image",
                "qwen edit",
                *WEIGHT_WORDS,
            ],
            has_intermediate_output=True,
            inputs=[
                _model_input(),
                PRECISION,
                io.Combo.Input(
                    "text_encoder",
                    options=[AUTOMATIC, *choices("text_encoder")],
                    default=AUTOMATIC,
                    tooltip="automatic: from the same diffusers folder, else the file in "
                    "models/text_encoders that matches the model.",
                ),
                io.Combo.Input(
                    "vae",
                    options=[AUTOMATIC, *choices("vae")],
                    default=AUTOMATIC,
                    tooltip="automatic: from the same diffusers folder, else the file in "
                    "models/vae that matches the model.",
                ),
                KEEP,
                MODULATION,
                _placement_input(advanced=True),
                KEPT,
            ],
            outputs=[_model_output(), _clip_output(), _vae_output(), _report_output()],
        )

    @classmethod
    def _sources(
        cls, model: str, text_encoder: str, vae: str, *, look: bool = False
    ) -> list[Source]:
        sources = [source_of(model, "transformer")]
        for name, role in ((text_encoder, "text_encoder"), (vae, "vae")):
            if name == AUTOMATIC:
                sources.append(find_companion(sources[0], role, look=look))
            else:
                sources.append(source_of(name, role))
        check_text_width(*sources[:2])
        return sources

    @classmethod
    def validate_inputs(
        cls,
        model: str | None = None,
        precision: str | None = "auto",
        text_encoder: str | None = None,
        vae: str | None = None,
        keep_in_bf16: str | None = "",
    ) -> bool:
        wrong: list[QwenL40SError] = []
        for name, role in ((model, "transformer"), (text_encoder, "text_encoder"), (vae, "vae")):
            try:
                if isinstance(name, str) and name != AUTOMATIC:
                    wanted(name, role)
            except QwenL40SError as error:
                wrong.append(error)
        if wrong[1:]:  # all that is to be downloaded is named at once
            raise SettingError("\n".join(map(str, wrong)))
        if wrong:
            raise wrong[0]
        check_transformer(model, precision, keep_in_bf16)
        if isinstance(model, str) and isinstance(text_encoder, str) and isinstance(vae, str):
            cls._sources(model, text_encoder, vae, look=True)
        return True

    @classmethod
    def fingerprint_inputs(cls, model: str, text_encoder: str, vae: str, **settings: Any) -> Any:
        if not all(isinstance(name, str) for name in (model, text_encoder, vae)):
            return None  # a linked input is known only when it runs
        sources = cls._sources(model, text_encoder, vae)
        return tuple(source.state_now() for source in sources)

    @classmethod
    @needs(*MODEL, "text encoder", *VAE)
    def execute(
        cls,
        model: str,
        precision: str,
        text_encoder: str,
        vae: str,
        keep_in_bf16: str = "",
        placement: str = "auto",
        **settings: Any,
    ) -> io.NodeOutput:
        from ..hosts.comfyui.decode.fused import compile_ahead
        from ..hosts.comfyui.load.text_encoder import load_text_encoder
        from ..hosts.comfyui.load.vae import load_vae

        transformer, encoder, decoder = cls._sources(model, text_encoder, vae)
        # The transformer comes last: the others fail before its 38 GiB are read.
        decoder, vae_report = load_vae(decoder, "auto")
        clip, clip_report = load_text_encoder(encoder, "auto", placement)
        patcher, model_report = _load_model(transformer, precision, keep_in_bf16, settings)
        compile_ahead(decoder)  # after what a step launches
        reports = (model_report, clip_report, vae_report)
        summary = (
            f"transformer: {model_report.summary()}",
            *(f"{report.what}: {report.chosen}" for report in reports[1:]),
        )
        return with_report(
            patcher,
            clip,
            decoder,
            report="\n\n".join(report.text() for report in reports),
            summary="\n".join(summary),
        )
