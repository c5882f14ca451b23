"""Every form of LoRA that ComfyUI's own loader takes: what stands behind a module's name."""

from __future__ import annotations

from collections.abc import Callable

import narrow_transformer as narrow
import torch

Tensors = dict[str, torch.Tensor]
Form = Callable[[int, int], Tensors]
RANK = 4


def random(*shape: int, seed: int = 1, scale: float = 0.1) -> torch.Tensor:
    return narrow.random(*shape, seed=seed) * scale


def pair(down: str, up: str) -> Form:
    return lambda rows, columns: {down: random(RANK, columns), up: random(rows, RANK, seed=2)}


def with_more(form: Form, more: Form) -> Form:
    return lambda rows, columns: form(rows, columns) | more(rows, columns)


def loha(rows: int, columns: int, tucker: bool = False) -> Tensors:
    found = {}
    for n in (1, 2):
        found[f".hada_w{n}_a"] = random(*((RANK, rows) if tucker else (rows, RANK)), seed=n)
        found[f".hada_w{n}_b"] = random(RANK, columns, seed=n + 2, scale=1)
        if tucker:
            found[f".hada_t{n}"] = random(RANK, RANK, 1, 1, seed=n, scale=1)
    return found


def lokr(rows: int, columns: int, tucker: bool = False) -> Tensors:
    inner = (RANK, rows // 8) if tucker else (rows // 8, RANK)
    found = {
        ".lokr_w1_a": random(8, 2, scale=0.3),
        ".lokr_w1_b": random(2, 8, scale=0.3),
        ".lokr_w2_a": random(*inner, seed=2),
        ".lokr_w2_b": random(RANK, columns // 8, seed=3),
    }
    return found | ({".lokr_t2": random(RANK, RANK, 1, 1, scale=1)} if tucker else {})


def whole_lokr(rows: int, columns: int, *ones: int) -> Tensors:
    inner = random(rows // 8, columns // 8, *ones)
    return {".lokr_w1": random(8, 8, scale=0.3), ".lokr_w2": inner}


def oft(*limits: int) -> Form:
    return lambda rows, columns: {
        ".oft_blocks": random(*limits, rows // 16, 16, 16),
        ".rescale": 1 + random(rows, 1),
        ".alpha": torch.tensor(3.0),
    }


LORA = pair(".lora_down.weight", ".lora_up.weight")
FORMS: dict[str, Form] = {
    "LoRA": LORA,
    "with a middle": with_more(
        LORA, lambda *_: {".lora_mid.weight": random(RANK, RANK, 1, 1, scale=1)}
    ),
    "with a whole alpha": with_more(LORA, lambda *_: {".alpha": torch.tensor(2)}),
    "DoRA": with_more(LORA, lambda rows, _: {".dora_scale": 1 + random(rows, 1)}),
    "of its weight's shape": with_more(LORA, lambda *at: {".reshape_weight": torch.tensor(at)}),
    "PEFT": pair(".lora_A.weight", ".lora_B.weight"),
    "PEFT, default": pair(".lora_A.default.weight", ".lora_B.default.weight"),
    "without .weight": pair(".lora_A", ".lora_B"),
    "diffusers": pair(".lora.down.weight", ".lora.up.weight"),
    "older diffusers": pair("_lora.down.weight", "_lora.up.weight"),
    "lora_linear_layer": pair(".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight"),
    "LoHa": loha,
    "LoHa, Tucker": lambda rows, columns: loha(rows, columns, tucker=True),
    "LoKr": lokr,
    "LoKr, whole": whole_lokr,
    "LoKr, 1x1": lambda rows, columns: whole_lokr(rows, columns, 1, 1),
    "GLoRA": lambda rows, columns: {
        ".a1.weight": random(columns, RANK),
        ".a2.weight": random(RANK, columns, seed=2),
        ".b1.weight": random(rows, RANK, seed=3),
        ".b2.weight": random(RANK, columns, seed=4),
    },
    "OFT": lambda rows, columns: {".oft_blocks": random(rows // 16, 16, 16)},
    "OFT, limited": oft(),
    "BOFT": oft(2),
    "whole difference": lambda rows, columns: {
        ".diff": random(rows, columns, scale=0.02),
        ".diff_b": random(rows),
    },
    "as of a norm": lambda rows, columns: {
        ".w_norm": random(rows, columns, scale=0.02),
        ".b_norm": random(rows),
    },
    "whole weight": lambda rows, columns: {".set_weight": random(rows, columns)},
}
# On which ComfyUI 0.33 logs an error for each layer, and changes nothing.
FAILING: dict[str, Form] = {
    "LoKr, Tucker": lambda rows, columns: lokr(rows, columns, tucker=True),
    "BOFT without a limit": lambda *at: {".oft_blocks": oft(2)(*at)[".oft_blocks"]},
    "OFT of too few blocks": lambda rows, columns: {".oft_blocks": random(rows // 16 - 1, 16, 16)},
    "a middle of a matrix": with_more(LORA, lambda *_: {".lora_mid.weight": random(RANK, RANK)}),
    "GLoRA of another width": lambda *at: FORMS["GLoRA"](*at) | {".a2.weight": random(RANK, 7)},
    "another difference": lambda rows, columns: {".diff": random(rows, columns + 1)},
    "another weight": lambda rows, columns: {".set_weight": random(rows - 1, columns)},
    "as many elements": lambda rows, columns: FORMS["LoRA"](rows // 2, columns * 2),
}


class Asked(dict):
    """A file's tensors, with each name that was looked for in it."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(tensors)
        self.names: set[str] = set()

    def keys(self) -> Asked:
        return self

    def __contains__(self, name: object) -> bool:
        self.names.add(name)
        return super().__contains__(name)

    def get(self, name: str, default: object = None) -> object:
        return self[name] if self.__contains__(name) else default

    def __getitem__(self, name: str) -> torch.Tensor:
        self.names.add(name)
        return super().get(name, torch.ones(1))


def asked_suffixes(load_lora: Callable[..., object]) -> set[str]:
    """What ComfyUI's loader looks for behind a module's name, also where it has found one."""
    found: set[str] = set()
    to_try: list[Tensors] = [{}]
    while to_try:
        asked = Asked(to_try.pop())
        load_lora(asked, {"x": "x.weight"}, log_missing=False)
        more = ({it: torch.ones((1,) * n)} for it in asked.names - found for n in (1, 3, 4))
        to_try += [{**asked, **it} for it in more]
        found |= asked.names
    return {name.removeprefix("x") for name in found}
