"""Recognizes LoRA, LoHa and LoKr files, their key style, their rank, and whether they are for
Qwen-Image.

A LoRA names the modules it changes. Only names that nobody else has (`img_mlp`, `txt_mlp`,
`img_mod`, `txt_mod`) or a block number beyond everybody else's stack prove Qwen-Image: FLUX and SD
3 use the same names for joint attention.
"""

from __future__ import annotations

import re

from .parts import Identity, Tensors, known

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
    "transformer_blocks.": "bare (transformer_blocks.)",
}
# Module names inside a block of Qwen-Image, in the dotted form; kohya and LyCORIS write "_" for
# ".".
TARGETS = (
    *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
    *(f"attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
    *(
        f"{stream}_{module}"
        for stream in ("img", "txt")
        for module in ("mlp.net.0.proj", "mlp.net.2", "mod.1")
    ),
)
DOTTED = {name.replace(".", "_"): name for name in TARGETS}
BLOCK = re.compile(r"(?:^|[._])transformer_blocks[._](\d{1,4})[._](.+)$")
OWN_TARGETS = ("img_mlp", "img_mod", "txt_mlp", "txt_mod")
FOREIGN_STACKS = ("single_transformer_blocks", "single_blocks", "double_blocks", "joint_blocks")
LARGEST_OTHER_STACK = 38  # joint blocks of SD 3.5 Large; FLUX has 19


def lora(tensors: Tensors) -> Identity | None:
    """Any low-rank adapter; `blocks` is the number of transformer blocks it touches."""
    found = {name: match for name in tensors if (match := SUFFIX.search(name))}
    if not found or not any(
        match["kind"].startswith(("lora", "lokr", "hada")) for match in found.values()
    ):
        return None
    modules = sorted({name[: match.start()] for name, match in found.items()})
    blocks = {int(match[1]) for module in modules if (match := BLOCK.search(module))}
    targets = {_target(module) for module in modules}
    kinds = {match["kind"] for match in found.values()}
    algorithm = next(
        label
        for start, label in ALGORITHMS.items()
        if any(kind.startswith(start) for kind in kinds)
    )
    family = _family(modules, targets, blocks, algorithm)
    styles = sorted({_style(module) for module in modules})
    return Identity(
        family=family,
        role="lora",
        variant=f"{' and '.join(styles)} keys, {'with' if 'alpha' in kinds else 'without'} alpha",
        dims=known(
            **_ranks(tensors, found),
            modules=len(modules),
            targets=", ".join(sorted(targets)),
        ),
        blocks=len(blocks) or None,
        folder="loras",
    )


def _target(module: str) -> str:
    match = BLOCK.search(module)
    name = match[2] if match else _without_prefix(module)
    return DOTTED.get(name, name)


def _without_prefix(module: str) -> str:
    prefix = next((prefix for prefix in PREFIXES if module.startswith(prefix)), "")
    return module.removeprefix(prefix)


def _style(module: str) -> str:
    return next(
        (label for prefix, label in PREFIXES.items() if module.startswith(prefix)), "unknown"
    )


def _family(modules: list[str], targets: set[str], blocks: set[int], algorithm: str) -> str:
    foreign = any(other in module for module in modules for other in FOREIGN_STACKS)
    if blocks and not foreign:
        if max(blocks) >= LARGEST_OTHER_STACK or any(
            name.startswith(OWN_TARGETS) for name in targets
        ):
            return f"{algorithm} for Qwen-Image"
        if targets <= set(TARGETS):
            return f"{algorithm} for Qwen-Image, FLUX or SD 3 (they share the names it changes)"
    return f"not Qwen-Image: a {algorithm} for another model"


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


# Brings the tensor names of a LoRA for Qwen-Image into a form that ComfyUI maps.
#
# ComfyUI 0.33 maps, for Qwen-Image, bare names (`transformer_blocks.`), `transformer.`,
# `diffusion_model.`, `lora_unet_` and `lycoris_`, and takes `.lora_A.default.weight` only under
# `default`. PEFT, DiffSynth-Studio, OneTrainer and ai-toolkit also write names that it skips with a
# line in the log.

# What trainers put before a module's name, in any combination.
_WRAPPERS = (
    "base_model.model.",
    "model.diffusion_model.",
    "diffusion_model.",
    "pipe.dit.",
    "dit.",
    "transformer.",
    "_orig_mod.",
)
# Names with "_" for ".", which only the list of the model's own modules can undo.
_FLAT = ("lora_transformer_", "lycoris_")
# PEFT writes the adapter's own name into the middle.
_ADAPTER = re.compile(r"\.lora_([AB])\.[^.]+\.weight$")


def normalize_name(name: str) -> str:
    """The same tensor's name as ComfyUI maps it; a normalized name stays as it is.

    Example:
        base_model.model.transformer_blocks.0.attn.to_q.lora_A.default.weight
        becomes transformer_blocks.0.attn.to_q.lora_A.weight
    """
    simpler = _ADAPTER.sub(r".lora_\1.weight", name)
    for prefix in _WRAPPERS:
        simpler = simpler.removeprefix(prefix)
    for prefix in _FLAT:
        if simpler.startswith(prefix):
            simpler = f"lora_unet_{simpler.removeprefix(prefix)}"
    return name if simpler == name else normalize_name(simpler)
