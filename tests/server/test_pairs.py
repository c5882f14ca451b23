"""One seed, painted by stock ComfyUI's code and by each way of this package."""

from pathlib import Path

import numpy as np
from comfyui_server import Server
from PIL import Image

from qwen_l40s.cli.output import SHEET_MARGIN
from qwen_l40s.measure.fidelity import psnr
from qwen_l40s.tools.pairs import WAYS, main

SIDE = 256  # of the micro model's pictures


def test_one_seed_is_nearly_one_picture(server: Server, tmp_path: Path):
    output = tmp_path / "pairs.png"
    address = f"http://127.0.0.1:{server.port}"
    assert main(["--micro", "--server", address, "--output", str(output)]) == 0
    with Image.open(output) as sheet:
        lefts = range(SHEET_MARGIN, sheet.width, SIDE + SHEET_MARGIN)
        top = SHEET_MARGIN
        crops = [sheet.crop((left, top, left + SIDE, top + SIDE)) for left in lefts]
    assert len(crops) == len(WAYS)
    assert len(crops[0].getcolors(SIDE * SIDE)) > 100
    stock, *others = map(np.asarray, crops)
    near = dict(zip(list(WAYS)[1:], (psnr(other, stock) for other in others), strict=True))
    assert near["bf16"] > 60
    assert all(30 < near[way] < 60 for way in ("int8", "fp8", "bf16, cached"))
