"""Qwen-Image's joint attention through every backend that runs here, against float32.

    python benchmarks/attention.py            the table, under two minutes
    python benchmarks/attention.py --quick    the shortest shape alone

Times are those of the card, median of 20 after 3, with its L2 cache emptied before each; "host us"
is the processor's time for one call. The error is relative to attention in float32, computed in
slices. Below each table stands what "auto" chooses from a measurement of its own and how long that
took. The last line is JSON. `ORDER` in optimizations/attention/choice.py rests on these numbers.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from linear import host_us, installed, median_ms

from qwen_l40s.errors import UnavailableError
from qwen_l40s.optimizations.attention import BACKENDS, Request, aligned_mask, choose_attention
from qwen_l40s.optimizations.attention.cache import Cache

HEADS, HEAD_DIM = 24, 128
# 1024x1024 and 1328x1328 with 200 text tokens, and an edit of 1024x1024 with one reference.
TOKENS = (4296, 7089, 8392)
BATCHES = (1, 2)
# Text tokens of the shorter prompt that the mask leaves out.
PADDED = 96
# Some take 30 ms.
HOST_CALLS = 20


def operands(request: Request) -> tuple:
    """q, k and v, each contiguous as in the blocks, and the mask."""
    shape = (request.batch, request.tokens, request.heads, request.head_dim)
    q, k, v = (torch.randn(shape, device=request.device).to(request.dtype) for _ in range(3))
    if not request.masked:
        return q, k, v, None
    mask = torch.zeros(request.batch, 1, 1, request.tokens, device=q.device, dtype=q.dtype)
    mask[-1, ..., 200 - PADDED : 200] = -torch.inf
    return q, k, v, aligned_mask(mask)


def rows_of(request: Request) -> list[dict]:
    """One result for each backend that runs the request; tells of the others why not."""
    q, k, v, mask = operands(request)
    exact = BACKENDS["sliced"].attend(q.float(), k.float(), v.float(), mask)
    flop = 4 * request.batch * request.heads * request.head_dim * request.tokens**2
    rows = []
    for name in BACKENDS:
        try:
            attention = choose_attention(request, name)
            error = (attention(q, k, v, mask).float() - exact).norm() / exact.norm()
            ms = median_ms(lambda attention=attention: attention(q, k, v, mask))
            host = host_us(lambda attention=attention: attention(q, k, v, mask), HOST_CALLS)
        except UnavailableError as refused:
            tell(f"# {str(refused).partition('; use ')[0]}")
            continue
        except torch.OutOfMemoryError:
            tell(f"# attention {name}: out of memory at {request.tokens} tokens")
            continue
        shape = {"batch": request.batch, "tokens": request.tokens, "masked": request.masked}
        speed = {"ms": ms, "tflops": flop / ms / 1e9, "host_us": host}
        rows.append({"attention": name, **shape, **speed, "error": error.item()})
    return rows


@functools.cache
def tell(line: str) -> None:
    """Prints a line once."""
    print(line)


def show(rows: list[dict]) -> None:
    first = rows[0]
    masked = "masked" if first["masked"] else "unmasked"
    print(f"\nbatch {first['batch']}, {first['tokens']} tokens, {masked}")
    print(f"{'':16}{'ms':>9}{'TFLOP/s':>9}{'host us':>9}{'error':>10}")
    for row in sorted(rows, key=lambda row: row["ms"]):
        print(f"{row['attention']:16}{row['ms']:9.3f}{row['tflops']:9.1f}", end="")
        print(f"{row['host_us']:9.1f}{row['error']:10.5f}")


def chosen(request: Request, folder: str) -> dict:
    """What "auto" takes where nothing was measured before, and the seconds that it takes for it."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    attention = choose_attention(request, cache=Cache(Path(folder, "attention.json")))
    seconds = time.perf_counter() - begin
    print(f"auto {attention} (chosen in {seconds:.2f} s)")
    return {"auto": attention.name, "reason": attention.reason, "seconds": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the shortest shape alone")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch sees no CUDA card: this benchmark measures one", file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    about = {"card": torch.cuda.get_device_name(device), "torch": torch.__version__}
    about |= {"cudnn": torch.backends.cudnn.version()}
    packages = ("comfy-kitchen", "flash-attn", "flash-attn-3", "sageattention")
    about |= {name: installed(name) for name in packages}
    print(f"# {about}")
    rows = []
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        for tokens in TOKENS[:1] if arguments.quick else TOKENS:
            for batch in BATCHES[:1] if arguments.quick else BATCHES:
                for masked in (False, True):
                    request = Request(
                        device, torch.bfloat16, batch, HEADS, HEAD_DIM, tokens, masked
                    )
                    results = rows_of(request)
                    show(results)
                    choice = chosen(request, folder)
                    rows += [
                        *results,
                        {"batch": batch, "tokens": tokens, "masked": masked} | choice,
                    ]
    for row in rows:
        row |= {name: float(f"{x:.4g}") for name, x in row.items() if isinstance(x, float)}
    print(json.dumps({**about, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
