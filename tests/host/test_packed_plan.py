"""Where a transformer in 4 or 6 bits is decoded on load, and where it stays as small as it is."""

import json
from unittest import mock

import pytest
from comfy.quant_ops import QUANT_ALGOS
from comfyui_boot import folder

from qwen_l40s.families.qwen_image import FULL_SIZE
from qwen_l40s.hosts.comfyui.load import plan as load_plan
from qwen_l40s.loaders.source import Source, open_source
from qwen_l40s.loaders.writer import SafetensorsLayout
from qwen_l40s.spec.formats import GIB, CardFacts

FOLDER = folder("packed_plan")
FORMATS = {4: "asym_w4a8_int8", 6: "w6a8_int8"}


def published(bits: int) -> Source:
    """The header of a published transformer with all of its blocks' matrices in so many bits."""
    specs, texts = {}, {}
    for name, shape in FULL_SIZE.tensors().items():
        specs[name] = "BF16", shape
        if "transformer_blocks" not in name or len(shape) != 2:
            continue
        layer, (rows, columns) = name.removesuffix(".weight"), shape
        texts[f"{layer}.comfy_quant"] = json.dumps({"format": FORMATS[bits]}).encode()
        specs[name] = "I8", (rows, columns * bits // 8)
        specs[f"{layer}.weight_s_rel"] = "F8_E4M3", (rows, columns // 16)
        specs[f"{layer}.weight_s_channel"] = "F32", (rows,)
        specs[f"{layer}.comfy_quant"] = "U8", (len(texts[f"{layer}.comfy_quant"]),)
    path = FOLDER / f"{bits}.safetensors"
    layout = SafetensorsLayout(specs, {})
    with path.open("wb") as file:
        file.write(layout.header)
        for name, text in texts.items():
            file.seek(len(layout.header) + layout.tensors[name].start)
            file.write(text)
        file.truncate(layout.file_bytes)  # sparse
    return open_source(path, "transformer")


@pytest.mark.parametrize("bits", FORMATS)
def test_the_loader_decides_by_the_card(bits):
    """Blocks of 7.1 GiB in 4 bits, and 12.7 GiB in int8."""
    source, known = published(bits), FORMATS[bits] in QUANT_ALGOS
    for gib, room, packed, off_card in (
        (10, 64, "in int8 they would not fit in VRAM", True),
        (12, 64, "in int8 they would not fit in VRAM", True),
        (16, 64, "", True),
        (48, 64, "", False),
        (48, 16, "system RAM has no room for them in int8", False),
    ):
        if not known and room == 16:
            continue
        card = CardFacts("card", gib * GIB, (8, 9))
        with (
            mock.patch.object(load_plan, "card_facts", return_value=card),
            mock.patch.object(load_plan, "available_memory", return_value=room * GIB),
        ):
            plan = load_plan.plan_load(source, "auto")
        assert (plan.packed, plan.precision) == (packed if known else "", "int8"), gib
        assert plan.off_card == off_card, gib
        bytes_of_modulation = 60 * 2 * 3072 * 6 * 3072
        share = bits / 8 + 1 / 16 if plan.packed else 1  # and a scale for each 16 columns
        assert plan.modulation_bytes == pytest.approx(share * bytes_of_modulation, rel=1e-2)
