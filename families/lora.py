"""LoRA, LoHa and LoKr files: their key style, their rank, and which family they are for."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence

from . import registry
from .protocol import Adapted, Identity, Tensors, known, size

SUFFIX = re.compile(
    r"\.(?P<kind>lora_A|lora_B|lora_down|lora_up|lora\.down|lora\.up|lokr_w[12](_[ab])?|lokr_t2"
    r"|hada_w[12]_[ab]|hada_t[12]|dora_scale|lora_magnitude_vector|diff|diff_b|alpha)(\..*)?$"
)
RANK_AXIS = {"lora_A": 0, "lora_down": 0, "lora.down": 0, "hada_w1_b": 0, "lokr_w2_a": 1}
ALGORITHMS = {"lokr": "LoKr", "hada": "LoHa", "lora": "LoRA"}
PREFIXES = {
    "model.diffusion_model.": "checkpoint (model.diffusion_model.)",
    "diffusion_model.": "ComfyUI (diffusion_model.)",
    "base_model.model.": "PEFT (base_model.model.)",
    "transformer.": "diffusers (transformer.)",
    "lora_unet_": "kohya (lora_unet_)",
    "lycoris_": "LyCORIS (lycoris_)",
    "lora_transformer_": "OneTrainer (lora_transformer_)",
    "pipe.dit.": "DiffSynth (pipe.dit.)",
    "transformer_blocks.": "bare (transformer_blocks.)",
}
# The second axes of LoKr's two factors multiply to a layer's input.
READS_INPUT = {"lora_A", "lora_down", "lora.down", "hada_w1_b"} | {
    f"lokr_w{factor}{part}" for factor in (1, 2) for part in ("", "_b")
}
FOREIGN_STACKS = ("single_transformer_blocks", "single_blocks", "double_blocks", "joint_blocks")


def lora(tensors: Tensors) -> Identity | None:
    """Recognizes any low-rank adapter; `blocks` counts the transformer blocks that it touches."""
    found = {name: match for name in tensors if (match := SUFFIX.search(name))}
    if not found or not any(
        match["kind"].startswith(("lora", "lokr", "hada")) for match in found.values()
    ):
        return None
    modules = sorted({name[: match.start()] for name, match in found.items()})
    kinds = {match["kind"] for match in found.values()}
    algorithm = next(
        label
        for start, label in ALGORITHMS.items()
        if any(kind.startswith(start) for kind in kinds)
    )
    foreign = any(stack in module for module in modules for stack in FOREIGN_STACKS)
    widths = _widths(tensors, found)

    @functools.cache
    def adapted(stack: str) -> Adapted:
        return _adapted(modules, widths, foreign, stack)

    fits, (targets, blocks, *_) = registry.adapted_by(adapted, tensors)
    styles = sorted({PREFIXES.get(_prefix(module), "unknown") for module in modules})
    return Identity(
        family=f"{algorithm} for {fits.title}"
        if fits
        else f"not Qwen-Image: a {algorithm} for another model",
        role="lora",
        variant=f"{' and '.join(styles)} keys, {'with' if 'alpha' in kinds else 'without'} alpha",
        dims=known(
            **_ranks(tensors, found),
            modules=len(modules),
            targets=", ".join(sorted(targets)),
        ),
        blocks=len(blocks) or None,
        folder="loras",
        licence=fits and fits.licence,
        cannot_run=fits.cannot_run if fits else (),
    )


def _widths(tensors: Tensors, found: dict[str, re.Match[str]]) -> dict[str, int]:
    # Of what each module reads.
    widths: dict[str, int] = {}
    for name, match in found.items():
        if match["kind"] in READS_INPUT:
            module = name[: match.start()]
            widths[module] = widths.get(module, 1) * (size(tensors, name, 1) or 0)
    return widths


def _adapted(
    modules: Sequence[str], widths: Mapping[str, int], foreign: bool, stack: str
) -> Adapted:
    # As a family sees it whose blocks are in this stack.
    block = re.compile(rf"(?:^|[._]){re.escape(stack)}[._](\d{{1,4}})[._](.+)$")
    dotted, by_target, blocks = registry.dotted_targets(), {}, set()
    for module in modules:
        match = block.search(module)
        name = match[2] if match else module.removeprefix(_prefix(module))
        target = by_target.setdefault(dotted.get(name, name), set())
        if module in widths:
            target.add(widths[module])
        if match:
            blocks.add(int(match[1]))
    return Adapted({*by_target}, blocks, by_target, foreign)


def _prefix(module: str) -> str:
    return next((prefix for prefix in PREFIXES if module.startswith(prefix)), "")


def _ranks(tensors: Tensors, found: dict[str, re.Match[str]]) -> dict[str, int | None]:
    ranks = set()
    for name, match in found.items():
        axis, shape = RANK_AXIS.get(match["kind"]), tensors[name].shape
        if axis is not None and len(shape) > axis:
            ranks.add(shape[axis])
    return {
        "rank": min(ranks, default=None),
        "largest_rank": max(ranks) if len(ranks) > 1 else None,
    }
