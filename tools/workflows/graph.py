"""A workflow as it is described here, the model files it names, and the form of POST /prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ... import __version__
from .definitions import DYNAMIC_COMBO, Definition, definitions

COMFY_QWEN = "https://huggingface.co/Comfy-Org/Qwen-Image_ComfyUI/resolve/main/split_files"
COMFY_EDIT = "https://huggingface.co/Comfy-Org/Qwen-Image-Edit_ComfyUI/resolve/main/split_files"
LIGHTNING = "https://huggingface.co/lightx2v/Qwen-Image-2512-Lightning/resolve/main"
EDIT_LIGHTNING = "https://huggingface.co/lightx2v/Qwen-Image-Edit-2511-Lightning/resolve/main"
COMFY_LAYERED = (
    "https://huggingface.co/Comfy-Org/Qwen-Image-Layered_ComfyUI/resolve/main/split_files"
)
FUN_CONTROL = "https://huggingface.co/alibaba-pai/Qwen-Image-2512-Fun-Controlnet-Union/resolve/main"
COMFY_21 = "https://huggingface.co/Comfy-Org/Qwen-Image-2.1/resolve/main"
PANORAMA = "https://huggingface.co/ProGamerGov/qwen-360-diffusion/resolve/main"


@dataclass(frozen=True)
class ModelFile:
    """One published file.

    Attributes:
        name: as loaders name it.
        folder: where it is published, without the name.
        directory: under ComfyUI's `models`.
        gb: its size in decimal gigabytes, rounded as published; None where it is not known.
    """

    name: str
    folder: str
    directory: str
    gb: float | None = None

    @property
    def url(self) -> str:
        return f"{self.folder}/{self.name}"

    def link(self) -> dict[str, str]:
        """What the page's dialog of missing models reads."""
        return {"name": self.name, "url": self.url, "directory": self.directory}


def _transformer(name: str, folder: str, gb: float) -> ModelFile:
    return ModelFile(name, f"{folder}/diffusion_models", "diffusion_models", gb)


def _text_encoder(name: str, gb: float, folder: str = COMFY_QWEN) -> ModelFile:
    return ModelFile(name, f"{folder}/text_encoders", "text_encoders", gb)


QWEN_2512 = _transformer("qwen_image_2512_bf16.safetensors", COMFY_QWEN, 40.9)
QWEN_2512_FP8 = _transformer("qwen_image_2512_fp8_e4m3fn.safetensors", COMFY_QWEN, 20.4)
EDIT_2511 = _transformer("qwen_image_edit_2511_bf16.safetensors", COMFY_EDIT, 40.9)
TEXT_ENCODER = _text_encoder("qwen_2.5_vl_7b.safetensors", 16.58)
TEXT_ENCODER_FP8 = _text_encoder("qwen_2.5_vl_7b_fp8_scaled.safetensors", 9.38)
VAE = ModelFile("qwen_image_vae.safetensors", f"{COMFY_QWEN}/vae", "vae", 0.25)
# In bf16, not the fp32 of ComfyUI's own template: half the bytes, and merged into bf16 weights.
LIGHTNING_4 = ModelFile(
    "Qwen-Image-2512-Lightning-4steps-V1.0-bf16.safetensors", LIGHTNING, "loras", 0.85
)
LIGHTNING_8 = ModelFile(
    "Qwen-Image-2512-Lightning-8steps-V1.0-bf16.safetensors", LIGHTNING, "loras", 0.85
)
PANORAMA_360 = ModelFile("qwen-360-diffusion-2512-int8-bf16-v2.safetensors", PANORAMA, "loras")
LAYERED = _transformer("qwen_image_layered_bf16.safetensors", COMFY_LAYERED, 40.9)
LAYERED_VAE = ModelFile("qwen_image_layered_vae.safetensors", f"{COMFY_LAYERED}/vae", "vae", 0.25)
EDIT_LIGHTNING_4 = ModelFile(
    "Qwen-Image-Edit-2511-Lightning-4steps-V1.0-bf16.safetensors", EDIT_LIGHTNING, "loras", 0.85
)
# Five blocks, made for 2512; the union of InstantX was made for the first Qwen-Image.
CONTROL_UNION = ModelFile(
    "Qwen-Image-2512-Fun-Controlnet-Union-2602.safetensors", FUN_CONTROL, "controlnet", 3.51
)
QWEN_21 = _transformer("qwen_image_2.1_bf16.safetensors", COMFY_21, 14.23)
QWEN_21_INT8 = _transformer("qwen_image_2.1_int8_convrot.safetensors", COMFY_21, 7.26)
TURBO_21 = _transformer("qwen_image_2.1_turbo_int8_convrot.safetensors", COMFY_21, 7.26)
TEXT_ENCODER_21 = _text_encoder("qwen3vl_8b_int8_convrot.safetensors", 9.35, COMFY_21)
VAE_21 = ModelFile("qwen_image_2.1_vae_bf16.safetensors", f"{COMFY_21}/vae", "vae", 0.68)


# Numbers of a widget's type; bool is an int to Python and none to ComfyUI.
FITS = {
    "INT": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "FLOAT": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "STRING": lambda value: isinstance(value, str),
    "BOOLEAN": lambda value: isinstance(value, bool),
    "COMBO": lambda value: isinstance(value, str),
    DYNAMIC_COMBO: lambda value: isinstance(value, str),
}


class Link(NamedTuple):
    """An output of another node."""

    node: str
    index: int


@dataclass(frozen=True)
class Node:
    """One node of a workflow.

    Attributes:
        id: A short word, which is its name in the API form.
        about: Which one it is, where a graph has several of its class.
        group: The frame of the page that it stands in.
        inputs: Values of widgets, and links.
        models: The files that its widgets name.
        folded: Whether the page shows its title alone: nothing in it needs a look.
        width: In the page, where more than usual is needed to read what it shows; 0 elsewhere.
        shown: The height of what it shows, likewise.
    """

    id: str
    definition: Definition
    about: str
    group: str
    inputs: dict[str, Any]
    models: tuple[ModelFile, ...] = ()
    folded: bool = False
    width: int = 0
    shown: int = 0

    @property
    def title(self) -> str:
        """As the page's search calls it, with what tells it from others of its class."""
        if not self.about:
            return self.definition.title
        return f"{self.definition.title.partition(' (')[0]} ({self.about})"

    def __getitem__(self, output: str) -> Link:
        """An output by its name, to be linked."""
        return Link(self.id, self.definition.output_index(output))


@dataclass
class Workflow:
    """A graph with its note and its place on the page.

    Attributes:
        name: Of its files.
        title: As the page lists it.
        note: Markdown, on the page.
        columns: From left to right, the frames that stand below one another in each; the note is
            above the first. Frames that hold no node are left out.
    """

    name: str
    title: str
    note: str = ""
    columns: Sequence[Sequence[str]] = (("Models",), ("Prompt", "LoRA"), ("Sampling",), ("Image",))
    nodes: dict[str, Node] = field(default_factory=dict)

    def add(
        self,
        id: str,
        class_type: str,
        group: str,
        *,
        about: str = "",
        models: Sequence[ModelFile] = (),
        folded: bool = False,
        wide: int = 0,
        shown: int = 0,
        **inputs: Any,
    ) -> Node:
        """Adds a node; widgets that are not named get their defaults.

        Args:
            about: see `Node.about`.
            folded: see `Node.folded`.
            wide: see `Node.width`; an input may be called so itself.
            shown: see `Node.shown`.

        Raises:
            KeyError: the node or an input of it is not known.
            ValueError: the id is taken, an input is missing or has a value that it cannot have.
        """
        if id in self.nodes:
            raise ValueError(f"{self.name}: two nodes are called {id!r}")
        definition = definitions()[class_type]
        for name in inputs:
            definition.input(name)
        filled = {}
        for known in definition.inputs:
            if known.name in inputs:
                filled[known.name] = inputs[known.name]
            elif known.widget and "default" in known.options:
                filled[known.name] = known.options["default"]
            elif known.widget and known.choices:
                filled[known.name] = known.choices[0]
            elif not known.optional:
                raise ValueError(f"{self.name}: {id}.{known.name} is missing")
        node = Node(id, definition, about, group, filled, tuple(models), folded, wide, shown)
        self._check(node)
        self.nodes[id] = node
        return node

    def links(self) -> list[tuple[Link, Node, str]]:
        """(from, node, input) of every wire, in the order of nodes and their inputs."""
        return [
            (value, node, name)
            for node in self.nodes.values()
            for name, value in node.inputs.items()
            if isinstance(value, Link)
        ]

    def _check(self, node: Node) -> None:
        for name, value in node.inputs.items():
            known = node.definition.input(name)
            where = f"{self.name}: {node.id}.{name}"
            if isinstance(value, Link):
                given = self.nodes[value.node].definition.outputs[value.index].type
                if known.type not in (given, "*"):
                    raise ValueError(f"{where} takes {known.type}, got {given}")
            elif not known.widget or not FITS[known.type](value):
                raise ValueError(f"{where} takes {known.type}, got {value!r}")
            elif known.choices is not None and value not in known.choices:
                raise ValueError(f"{where}: {value!r} is none of {', '.join(known.choices)}")


def api_form(workflow: Workflow) -> dict[str, Any]:
    """{node id: {class_type, inputs, _meta}}; ComfyUI itself reads nothing of `_meta`."""
    return {
        node.id: {
            "class_type": node.definition.class_type,
            "inputs": {
                name: [value.node, value.index] if isinstance(value, Link) else value
                for name, value in node.inputs.items()
            },
            "_meta": _meta(node),
        }
        for node in workflow.nodes.values()
    }


def _meta(node: Node) -> dict[str, Any]:
    meta: dict[str, Any] = {"title": node.title}
    if node.definition.is_ours:
        meta["version"] = __version__
    if node.models:
        meta["models"] = [model.link() for model in node.models]
    return meta
