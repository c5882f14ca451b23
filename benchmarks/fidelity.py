"""What fp8 and int8 lose with and without outliers, on one layer and on one block of full width.

    python benchmarks/fidelity.py                      all tables; about 4 minutes of one CPU core
    python benchmarks/fidelity.py --only gemm kinds

Outliers are planted in 0.1 % of the channels, x30 and x100: in what a layer reads, in its weight's
columns (other channels than in what it reads), in its weight's rows. Weights and activations are
Gaussian besides. Both operands are rounded, products and everything between the layers are fp32
(optimizations/w8a8.py), so that nothing but the format is measured; on a card the GEMMs that really
run come beside them. Errors are relative, in Frobenius norms; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import package  # noqa: F401, by which the next imports find qwen_l40s
import torch
import torch.nn.functional as F

from qwen_l40s.loaders.convrot import DEFAULT_GROUP, rotate
from qwen_l40s.optimizations.fidelity import (
    OUTLIER_FACTORS,
    PLACES,
    outlier_channels,
    plant,
    planted_operands,
    relative_error,
)
from qwen_l40s.optimizations.linear import choose_gemm
from qwen_l40s.optimizations.reference import row_quantize
from qwen_l40s.optimizations.w8a8 import W8A8
from qwen_l40s.planning.keep import bytes_to_keep
from qwen_l40s.planning.memory import BLOCK_GEMMS, MIB

WIDTH, HEADS, BLOCKS = 3072, 24, 60
CONDITIONS = [("", 1.0), *((place, factor) for place in PLACES for factor in OUTLIER_FACTORS)]


@dataclass(frozen=True)
class Rotated(W8A8):
    """int8 after a rotation of both operands in groups of columns, as ConvRot files have it."""

    def quantize_weight(self, weight):
        return super().quantize_weight(rotate(weight, DEFAULT_GROUP))

    def linear(self, x, weight, scale, bias=None):
        turned = rotate(x.reshape(-1, x.shape[-1]), DEFAULT_GROUP).view(x.shape)
        return super().linear(turned, weight, scale, bias)


class OnCard:
    """The GEMM that runs on the card, from and to bf16."""

    def __init__(self, format: str, device: torch.device) -> None:
        self.gemm = choose_gemm(format, device)

    def quantize_weight(self, weight):
        return row_quantize(weight, self.gemm.format)

    def linear(self, x, weight, scale, bias=None):
        return self.gemm.linear(x.bfloat16(), weight, scale, bias).to(x.dtype)


def settings(device: torch.device) -> dict:
    found = {
        "fp8 rows": W8A8("fp8"),
        "fp8 one scale": W8A8("fp8", "tensor", "tensor"),
        "fp8 ComfyUI core": W8A8("fp8", "tensor", "unit"),
        "int8 rows": W8A8("int8"),
        "int8 one scale": W8A8("int8", "tensor", "tensor"),
        "int8 rows, ConvRot": Rotated("int8"),
    }
    if device.type == "cuda":
        for format in ("fp8", "int8"):
            card = OnCard(format, device)
            found[f"{format} rows, {card.gemm.backend}"] = card
    return found


def gemm_rows(device: torch.device) -> Iterator[dict]:
    """One layer: 256 tokens, 3072 x 3072."""
    for place, factor in CONDITIONS:
        x, weight = (t.to(device) for t in planted_operands(256, WIDTH, WIDTH, place, factor))
        exact = x.double() @ weight.double().t()
        for name, setting in settings(device).items():
            error = relative_error(setting.linear(x, *setting.quantize_weight(weight)), exact)
            yield {"table": "gemm", "setting": name, "place": place, "factor": factor} | {
                "error": error
            }


class PlantedLayer(torch.nn.Module):
    """A linear layer with outliers planted in what it reads and in its weight."""

    def __init__(self, layer: torch.nn.Linear, place: str, factor: float, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        rows, columns = layer.weight.shape
        drawn = [outlier_channels(width, generator) for width in (columns, columns, rows)]
        in_x, in_columns, in_rows = PLACES[place] if place else (False, False, False)
        weight = layer.weight.detach()
        weight = plant(weight, drawn[1], factor) if in_columns else weight
        weight = plant(weight, drawn[2], factor, dim=0) if in_rows else weight
        self.channels = drawn[0] if in_x else None
        self.factor, self.weight, self.bias = factor, weight, layer.bias
        self.quantize(None)

    def quantize(self, setting) -> None:
        """Rounds with a setting from here on; None for fp32."""
        self.setting = setting
        self.held = None if setting is None else setting.quantize_weight(self.weight)

    def forward(self, x):
        if self.channels is not None:
            x = plant(x, self.channels, self.factor)
        if self.setting is None:
            return F.linear(x, self.weight, self.bias)
        return self.setting.linear(x, *self.held, self.bias)


def rotation(tokens: int) -> torch.Tensor:
    """Turns of (tokens, head_dim / 2), complex64, along one axis, as if all were text."""
    half = WIDTH // HEADS // 2
    angles = torch.arange(tokens)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    return torch.polar(torch.ones_like(angles), angles)


class Block:
    """One block of the published size with Gaussian weights, and the inputs of one pass."""

    def __init__(self, device: torch.device, image: int, text: int) -> None:
        from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock

        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) * scale).bfloat16().float().to(device)

        self.block = QwenImageTransformerBlock(WIDTH, HEADS, WIDTH // HEADS).to(device).eval()
        self.block.requires_grad_(False)
        for name, weight in self.block.named_parameters():
            if weight.dim() == 2:
                # modulation of a size at which shift, scale and gate stay around 0.2
                scale = (0.3 if "_mod." in name else 1.0) * weight.shape[1] ** -0.5
                weight.data = normal(*weight.shape, scale=scale)
            elif name.endswith("bias"):
                weight.data = normal(*weight.shape, scale=0.02)
        self.inputs = {
            "hidden_states": normal(1, image, WIDTH),
            "encoder_hidden_states": normal(1, text, WIDTH),
            "encoder_hidden_states_mask": None,
            "temb": normal(1, WIDTH),
            "image_rotary_emb": (rotation(image).to(device), rotation(text).to(device)),
        }
        self.plain = {name: self.block.get_submodule(name) for name in BLOCK_GEMMS}
        self.layers: dict[str, PlantedLayer] = {}

    def plant(self, place: str, factor: float) -> None:
        for seed, (name, layer) in enumerate(self.plain.items()):
            self.layers[name] = PlantedLayer(layer, place, factor, seed)
            owner, _, leaf = name.rpartition(".")
            setattr(self.block.get_submodule(owner), leaf, self.layers[name])

    def quantize(self, setting, only: str | None = None) -> None:
        for name, layer in self.layers.items():
            layer.quantize(setting if only in (None, name) else None)

    def update(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the block adds to the image stream and to the text stream."""
        text, image = self.block(**self.inputs)
        inputs = self.inputs
        return image - inputs["hidden_states"], text - inputs["encoder_hidden_states"]


def block_rows(block: Block, device: torch.device) -> Iterator[dict]:
    for place, factor in CONDITIONS:
        block.plant(place, factor)
        exact = block.update()
        for name, setting in settings(device).items():
            block.quantize(setting)
            image, text = map(relative_error, block.update(), exact)
            yield {
                "table": "block",
                "setting": name,
                "place": place,
                "factor": factor,
                "error": image,
                "text_error": text,
            }


def kind_rows(block: Block) -> Iterator[dict]:
    """Each layer alone: without outliers, and with both kinds at x30."""
    for place, factor in (("", 1.0), ("activations and weight columns", OUTLIER_FACTORS[0])):
        block.plant(place, factor)
        exact = block.update()
        for format in ("fp8", "int8"):
            for name, (rows, columns) in BLOCK_GEMMS.items():
                block.quantize(W8A8(format), only=name)
                image, text = map(relative_error, block.update(), exact)
                yield {
                    "table": "kinds",
                    "setting": f"{format} rows",
                    "place": place,
                    "factor": factor,
                    "kind": name,
                    "error": image,
                    "text_error": text,
                    "bytes": BLOCKS * bytes_to_keep(rows * WIDTH, columns * WIDTH),
                }
    block.quantize(None)


def show(rows: list[dict], title: str) -> None:
    """Settings down, conditions across."""
    print(f"\n{title}")
    heads = [f"{place.replace('activations', 'act.')} x{factor:g}" for place, factor in CONDITIONS]
    heads[0] = "none"
    for number, head in enumerate(heads):
        print(f"  ({number}) {head}", end="\n" if number % 3 == 2 else "")
    print(f"{'':28}" + "".join(f"{f'({number})':>8}" for number in range(len(heads))))
    for name in dict.fromkeys(row["setting"] for row in rows):
        errors = [row["error"] for row in rows if row["setting"] == name]
        print(f"{name:28}" + "".join(f"{error:8.4f}" for error in errors))


def show_kinds(rows: list[dict]) -> None:
    print("\neach kind of layer alone: relative error of the block's update (image, text)")
    for setting, place in dict.fromkeys((row["setting"], row["place"]) for row in rows):
        print(f"\n{setting}, outliers: {place or 'none'}{'' if not place else ' x30'}")
        chosen = [row for row in rows if (row["setting"], row["place"]) == (setting, place)]
        for row in sorted(chosen, key=lambda row: -row["error"]):
            size = f"{row['bytes'] / MIB:8.0f} MiB in {BLOCKS} blocks"
            print(f"  {row['kind']:22}{row['error']:9.4f}{row['text_error']:9.4f}{size}")


def main() -> int:
    tables = ("gemm", "block", "kinds")
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=tables, default=tables)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--image-tokens", type=int, help="default: 4096, on a CPU 64")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device(arguments.device)
    card = device.type == "cuda"
    image, text = arguments.image_tokens or (4096 if card else 64), 200 if card else 16
    name = torch.cuda.get_device_name(device) if card else "CPU"
    about = {"device": name, "torch": torch.__version__, "image_tokens": image, "text_tokens": text}
    print(f"# {about}")
    rows: list[dict] = []
    with torch.inference_mode():
        if "gemm" in arguments.only:
            rows += gemm_rows(device)
            show(rows, "one layer, 256 tokens, 3072 x 3072: relative error of its output")
        block = Block(device, image, text) if {"block", "kinds"} & set(arguments.only) else None
        if "block" in arguments.only:
            found = list(block_rows(block, device))
            show(found, "one block, all 12 layers: relative error of the image stream's update")
            rows += found
        if "kinds" in arguments.only:
            found = list(kind_rows(block))
            show_kinds(found)
            rows += found
    for row in rows:
        row |= {key: float(f"{x:.4g}") for key, x in row.items() if isinstance(x, float)}
    print(json.dumps({**about, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
