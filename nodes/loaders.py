"""The loader nodes: a file or a folder becomes MODEL, CLIP and VAE."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..hosts.comfyui.load.choose import (
    AUTOMATIC,
    check_text_width,
    choices,
    find_companion,
    first_choice,
    source_of,
)
from ..hosts.loading import LOADER_PRECISIONS
from ..loaders.source import Source, fingerprint
from ..planning.request import TEXT_ENCODER_PLACEMENTS
from ..spec import PLACES
from .common import CATEGORY, require_host, with_report

# What people search for when they want weights in another form, or in less memory.
WEIGHT_WORDS = ["bf16", "fp8", "scaled fp8", "int8", "quantized", "low vram", "gguf"]
VAE_PRECISIONS = ["auto", "bf16", "fp32"]
KEEP_TOOLTIP = (
    "Layers that stay in bf16 when the rest is quantized: shell patterns separated by commas, such "
    "as transformer_blocks.0.*, *.img_mlp.net.2. A kept layer takes twice the memory."
)


def keep_patterns(text: str) -> tuple[str, ...]:
    """Splits what the widget holds at commas and line ends."""
    return tuple(part.strip() for part in text.replace("\n", ",").split(",") if part.strip())


# What `validate_inputs` finds is raised, not returned: ComfyUI repeats what is returned for each
# input that is named there, and its page hides it behind a click.


def check_transformer(model: str | None, precision: str | None, keep: str | None) -> None:
    """Raises what is wrong with a choice and its settings, from file headers alone.

    A linked input is None: it is known only when it runs.
    """
    if not isinstance(model, str):
        return
    source = source_of(model, "transformer")
    if keep or precision not in (None, "auto"):
        require_host()
        from ..hosts.comfyui.load.plan import check_settings

        check_settings(source, precision or "auto", keep_patterns(keep or ""))


def files_behind(name: str | None, role: str) -> Any:
    """Changes when a file behind the choice is replaced, so that it is loaded again."""
    if not isinstance(name, str):  # a linked input is known only when it runs
        return None
    return fingerprint(source_of(name, role).files)


def _model_input() -> io.Combo.Input:
    return io.Combo.Input(
        "model",
        options=choices("transformer"),
        default=first_choice("transformer"),
        tooltip="A file in models/diffusion_models or models/checkpoints, a diffusers folder (its "
        "name ends with /), or micro (bundled), which needs no download and paints 256x256.",
    )


def _precision_input() -> io.Combo.Input:
    return io.Combo.Input(
        "precision",
        options=list(LOADER_PRECISIONS),
        default="auto",
        tooltip="auto: the most faithful that stays on the card. bf16: 25 GiB on the card with the "
        "modulation off it, else 38. int8 and fp8: 13, else 25; int8 is closer to bf16, fp8 needs "
        "an Ada card or newer. as stored: the file's own.",
    )


def _modulation_input() -> io.Combo.Input:
    return io.Combo.Input(
        "modulation",
        options=list(PLACES),
        default="auto",
        optional=True,
        advanced=True,
        tooltip="A third of the weights sees only the timestep: 12.7 GiB in bf16. off card: they "
        "stay in host memory and a small table of their results is on the card; each new schedule "
        "brings them there once, and a sampler that asks for timesteps off its schedule "
        "does so at each of these. auto: off the card where transformer and text encoder would not "
        "both fit it.",
    )


def _placement_input(*, advanced: bool | None) -> io.Combo.Input:
    return io.Combo.Input(
        "placement",
        options=list(TEXT_ENCODER_PLACEMENTS),
        default="auto",
        optional=True,
        advanced=advanced,
        tooltip="Of the text encoder. auto, on card: on the card while there is room. cpu: "
        "computes on the processor, slowly, and takes no room on the card. drop after encoding: "
        "leaves the card at once, so that the transformer need not share it. An unchanged prompt "
        "is not encoded again.",
    )


def keep_input() -> io.String.Input:
    """Layers that stay in bf16; `keep_patterns` reads what it holds."""
    return io.String.Input(
        "keep_in_bf16",
        default="",
        optional=True,
        advanced=True,
        tooltip=KEEP_TOOLTIP,
    )


def _report_output() -> io.String.Output:
    return io.String.Output(
        "report", tooltip="What was loaded, from what, in which precision and why."
    )


def _model_output() -> io.Model.Output:
    return io.Model.Output(tooltip="To LoRA loaders, then Optimize Qwen-Image, then the sampler.")


def _clip_output() -> io.Clip.Output:
    return io.Clip.Output(tooltip="To CLIP Text Encode, or to the encoders of Qwen-Image Edit.")


def _vae_output() -> io.Vae.Output:
    return io.Vae.Output(
        tooltip="To VAE Decode and VAE Encode Qwen-Image, ComfyUI's own, or the Edit encoders."
    )


class QwenL40SLoadModel(io.ComfyNode):
    """Loads the transformer."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QwenL40S_LoadModel",
            display_name="Load Qwen-Image Model",
            category=CATEGORY,
            description="Loads a Qwen-Image transformer: text to image, 2512, Edit or Layered; "
            "bf16, fp8 or int8 files, or a diffusers folder.",
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
            inputs=[_model_input(), _precision_input(), keep_input(), _modulation_input()],
            outputs=[_model_output(), _report_output()],
        )

    @classmethod
    def validate_inputs(
        cls, model: str | None, precision: str | None = "auto", keep_in_bf16: str | None = ""
    ) -> bool:
        check_transformer(model, precision, keep_in_bf16)
        return True

    @classmethod
    def fingerprint_inputs(cls, model: str, **settings: Any) -> Any:
        return files_behind(model, "transformer")

    @classmethod
    def execute(
        cls, model: str, precision: str, keep_in_bf16: str = "", modulation: str = "auto"
    ) -> io.NodeOutput:
        require_host()
        from ..hosts.comfyui.load.transformer import load_model

        source = source_of(model, "transformer")
        patcher, report = load_model(source, precision, keep_patterns(keep_in_bf16), modulation)
        return with_report(patcher, report=report.text(), summary=report.summary())


class QwenL40SLoadTextEncoder(io.ComfyNode):
    """Loads the text encoder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QwenL40S_LoadTextEncoder",
            display_name="Load Qwen-Image Text Encoder",
            category=CATEGORY,
            description="Loads Qwen2.5-VL, which turns prompts (and in Edit, images) into "
            "conditioning.",
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
                    options=choices("text_encoder"),
                    default=first_choice("text_encoder"),
                    tooltip="A file in models/text_encoders or models/checkpoints, a diffusers "
                    "folder, or that of micro (bundled).",
                ),
                io.Combo.Input(
                    "precision",
                    options=list(LOADER_PRECISIONS),
                    default="auto",
                    tooltip="How the weights are stored; ComfyUI computes this model in fp32 "
                    "whatever it is. bf16: 14.4 GiB, fp8 and int8: 8.4 GiB. auto and as stored: "
                    "the file's own.",
                ),
                _placement_input(advanced=None),
            ],
            outputs=[_clip_output(), _report_output()],
        )

    @classmethod
    def validate_inputs(cls, text_encoder: str | None) -> bool:
        if isinstance(text_encoder, str):
            source_of(text_encoder, "text_encoder")
        return True

    @classmethod
    def fingerprint_inputs(cls, text_encoder: str, **settings: Any) -> Any:
        return files_behind(text_encoder, "text_encoder")

    @classmethod
    def execute(cls, text_encoder: str, precision: str, placement: str = "auto") -> io.NodeOutput:
        require_host()
        from ..hosts.comfyui.load.text_encoder import load_text_encoder

        source = source_of(text_encoder, "text_encoder")
        clip, report = load_text_encoder(source, precision, placement)
        return with_report(clip, report=report.text(), summary=report.summary())


class QwenL40SLoadVAE(io.ComfyNode):
    """Loads the VAE."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QwenL40S_LoadVAE",
            display_name="Load Qwen-Image VAE",
            category=CATEGORY,
            description="Loads the VAE of Qwen-Image, in ComfyUI's or in diffusers' names.",
            search_aliases=["load vae", "vae loader", "qwen image vae", "wan vae"],
            has_intermediate_output=True,
            inputs=[
                io.Combo.Input(
                    "vae",
                    options=choices("vae"),
                    default=first_choice("vae"),
                    tooltip="A file in models/vae or models/checkpoints, a diffusers folder, or "
                    "that of micro (bundled).",
                ),
                io.Combo.Input(
                    "precision",
                    options=VAE_PRECISIONS,
                    default="auto",
                    tooltip="auto: what ComfyUI chooses for the card. fp32 takes twice the memory.",
                ),
            ],
            outputs=[_vae_output(), _report_output()],
        )

    @classmethod
    def validate_inputs(cls, vae: str | None) -> bool:
        if isinstance(vae, str):
            source_of(vae, "vae")
        return True

    @classmethod
    def fingerprint_inputs(cls, vae: str, **settings: Any) -> Any:
        return files_behind(vae, "vae")

    @classmethod
    def execute(cls, vae: str, precision: str) -> io.NodeOutput:
        require_host()
        from ..hosts.comfyui.load.vae import load_vae

        loaded, report = load_vae(source_of(vae, "vae"), precision)
        return with_report(loaded, report=report.text(), summary=report.summary())


class QwenL40SLoad(io.ComfyNode):
    """Loads all three parts from one choice."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QwenL40S_Load",
            display_name="Load Qwen-Image",
            category=CATEGORY,
            description="Loads transformer, text encoder and VAE from one choice: a diffusers "
            "folder, the bundled micro model, or a file whose text encoder and VAE are found in "
            "their folders.",
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
                _precision_input(),
                io.Combo.Input(
                    "text_encoder",
                    options=[AUTOMATIC, *choices("text_encoder")],
                    default=AUTOMATIC,
                    tooltip="automatic: from the same folder, or the file in models/text_encoders "
                    "whose width fits the model.",
                ),
                io.Combo.Input(
                    "vae",
                    options=[AUTOMATIC, *choices("vae")],
                    default=AUTOMATIC,
                    tooltip="automatic: from the same folder, or the file in models/vae that fits.",
                ),
                keep_input(),
                _modulation_input(),
                _placement_input(advanced=True),
            ],
            outputs=[_model_output(), _clip_output(), _vae_output(), _report_output()],
        )

    @classmethod
    def _sources(cls, model: str, text_encoder: str, vae: str) -> list[Source]:
        """The three parts, in the order of the outputs."""
        sources = [source_of(model, "transformer")]
        for name, role in ((text_encoder, "text_encoder"), (vae, "vae")):
            automatic = name == AUTOMATIC
            sources.append(find_companion(sources[0], role) if automatic else source_of(name, role))
        check_text_width(*sources[:2])
        return sources

    @classmethod
    def validate_inputs(
        cls,
        model: str | None,
        precision: str | None = "auto",
        text_encoder: str | None = AUTOMATIC,
        vae: str | None = AUTOMATIC,
        keep_in_bf16: str | None = "",
    ) -> bool:
        check_transformer(model, precision, keep_in_bf16)
        if all(isinstance(name, str) for name in (model, text_encoder, vae)):
            cls._sources(model, text_encoder, vae)
        return True

    @classmethod
    def fingerprint_inputs(cls, model: str, text_encoder: str, vae: str, **settings: Any) -> Any:
        if not all(isinstance(name, str) for name in (model, text_encoder, vae)):
            return None  # a linked input is known only when it runs
        sources = cls._sources(model, text_encoder, vae)
        return tuple(fingerprint(source.files) for source in sources)

    @classmethod
    def execute(
        cls,
        model: str,
        precision: str,
        text_encoder: str,
        vae: str,
        keep_in_bf16: str = "",
        modulation: str = "auto",
        placement: str = "auto",
    ) -> io.NodeOutput:
        require_host()
        from ..hosts.comfyui.load.text_encoder import load_text_encoder
        from ..hosts.comfyui.load.transformer import load_model
        from ..hosts.comfyui.load.vae import load_vae

        transformer, encoder, decoder = cls._sources(model, text_encoder, vae)
        # The largest comes last: what is wrong with the others is said before it is read.
        decoder, vae_report = load_vae(decoder, "auto")
        clip, clip_report = load_text_encoder(encoder, "auto", placement)
        patcher, model_report = load_model(
            transformer, precision, keep_patterns(keep_in_bf16), modulation
        )
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
