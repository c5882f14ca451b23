"""The linear layers of Qwen-Image through every GEMM that runs here, against bf16.

    python benchmarks/linear.py            the table, under a minute
    python benchmarks/linear.py --sweep    candidate tiles of the Triton GEMM, some minutes

Times are those of the card, median of 20 after 3, with its L2 cache emptied before each; "layer" is
from bf16 activations to bf16 output, "GEMM" of rows that are quantized already. The last line is
JSON. `PREFERENCE` in optimizations/linear.py and the tiles in kernels/scaled_gemm.py are chosen by
these numbers.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from importlib.metadata import PackageNotFoundError, version

import package  # noqa: F401, by which the next imports find qwen_l40s
import torch
import torch.nn.functional as F

from qwen_l40s.errors import UnavailableError
from qwen_l40s.optimizations import kernels, reference
from qwen_l40s.optimizations.linear import BACKENDS, choose_gemm
from qwen_l40s.optimizations.measure import time_cold

# Image and text tokens of one 1024x1024 image, text alone, one token, few, and a batch of two.
ROWS = (4296, 256, 1, 17, 8192)
# K, N: attention, MLP in, MLP out
LAYERS = ((3072, 3072), (3072, 12288), (12288, 3072))
WARM_UP, REPEATS = 3, 20
# More than any L2 cache; writing it also takes longer than launching what is timed after it.
FLUSHED = 2**30


def median_ms(call) -> float:
    """The card's time for one call, in milliseconds."""
    return time_cold(call, torch.device("cuda"), WARM_UP, REPEATS, FLUSHED).median


def host_us(call, calls: int = 100) -> float:
    """The processor's time to launch one call, in microseconds."""
    call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    elapsed = time.perf_counter() - begin
    torch.cuda.synchronize()
    return elapsed * 1e6 / calls


def usable_gemms(device: torch.device) -> list:
    """Every GEMM of every format that runs; tells of the others why not."""
    found = []
    for format, names in BACKENDS.items():
        for name in names:
            try:
                found.append(choose_gemm(format, device, backend=name))
            except UnavailableError as error:
                print(f"# {str(error).partition('; use ')[0]}")
    return found


def layer_rows(gemms: list, m: int, k: int, n: int, device: torch.device) -> list[dict]:
    """One result for bf16 and for each GEMM, of one shape."""
    x = torch.randn(m, k, device=device).to(torch.bfloat16)
    weight = (torch.randn(n, k, device=device) * k**-0.5).to(torch.bfloat16)
    bias = torch.randn(n, device=device).to(torch.bfloat16)
    exact = F.linear(x.float(), weight.float(), bias.float())

    def measured(name, call, gemm_call=None):
        ms = median_ms(call)
        gemm_ms = median_ms(gemm_call) if gemm_call else None
        error = (call().float() - exact).norm() / exact.norm()
        row = {"gemm": name, "m": m, "k": k, "n": n, "ms": ms, "gemm_ms": gemm_ms}
        # The smallest layer's kernels are shorter than their launch.
        host = host_us(call) if m * k * n <= 3072 * 3072 else None
        return {**row, "host_us": host, "error": error.item(), "tflops": tera(m, k, n, ms)}

    rows = [measured("bf16", lambda: F.linear(x, weight, bias))]
    for gemm in gemms:
        q, scale = reference.row_quantize(weight, gemm.format)
        xq, x_scale = gemm.quantize(x)
        alone = (xq, x_scale, q, scale, bias, torch.bfloat16)
        # comfy-kitchen has no call for quantized rows.
        without = gemm.weight_only or gemm.backend == "kitchen"
        rows.append(
            measured(
                f"{gemm.format} {gemm.backend}",
                lambda gemm=gemm, q=q, scale=scale: gemm.linear(x, q, scale, bias),
                None if without else lambda gemm=gemm, a=alone: gemm.linear_quantized(*a),
            )
        )
    return rows


def tera(m: int, k: int, n: int, ms: float) -> float:
    """TFLOP/s."""
    return 2 * m * k * n / ms / 1e9


def show(rows: list[dict]) -> None:
    first = rows[0]
    print(f"\nM {first['m']}, K {first['k']}, N {first['n']}")
    print(f"{'':18}{'layer ms':>9}{'TFLOP/s':>9}{'GEMM ms':>9}{'TFLOP/s':>9}", end="")
    print(f"{'x bf16':>8}{'error':>9}{'host us':>9}")
    for row in rows:
        alone, host = row["gemm_ms"], row["host_us"]
        print(f"{row['gemm']:18}{row['ms']:9.4f}{row['tflops']:9.1f}", end="")
        speed = tera(row["m"], row["k"], row["n"], alone) if alone else 0
        print(f"{alone:9.4f}{speed:9.1f}" if alone else f"{'':18}", end="")
        print(f"{first['ms'] / row['ms']:8.2f}{row['error']:9.5f}", end="")
        print(f"{host:9.1f}" if host else "")


def quantize_rows(gemms: list, device: torch.device) -> list[dict]:
    """The row quantizers: the one that is used and plain torch."""
    print(f"\n{'row_quantize':18}{'M x K':>14}{'ms':>9}{'TB/s':>9}{'torch ms':>10}")
    rows = []
    for gemm in {gemm.format: gemm for gemm in gemms if not gemm.weight_only}.values():
        for k in (3072, 12288):
            x = torch.randn(4296, k, device=device).to(torch.bfloat16)
            ms = median_ms(lambda gemm=gemm, x=x: gemm.quantize(x))
            plain = median_ms(lambda gemm=gemm, x=x: reference.row_quantize(x, gemm.format))
            row = {"quantizer": gemm.row_quantizer, "format": gemm.format, "m": 4296, "k": k}
            rows.append({**row, "ms": ms, "torch_ms": plain})
            moved = 4296 * k * 3 / ms / 1e9
            name = f"{gemm.format} {gemm.row_quantizer}"
            print(f"{name:18}{f'4296 x {k}':>14}{ms:9.4f}{moved:9.2f}{plain:10.4f}")
    return rows


def sweep(device: torch.device) -> list[dict]:
    """Tiles of the Triton GEMM by time; those that do not fit the card are left out."""
    from qwen_l40s.optimizations.kernels.scaled_gemm import Tile, choose_tile, scaled_gemm

    sm = torch.cuda.get_device_capability(device)
    large = [(128, 256, 8), (256, 128, 8), (128, 128, 4), (128, 128, 8), (64, 256, 8)]
    small = [(64, 128, 4), (64, 64, 4), (128, 64, 4), (32, 64, 4), (16, 64, 4), (16, 128, 4)]
    depths = [(128, 3, 1), (128, 4, 1), (64, 3, 2), (64, 4, 2), (256, 3, 1)]
    rows = []
    for format in ("fp8", "int8"):
        for m, shapes in ((4296, large), (256, small), (17, small)):
            for k, n in LAYERS:
                a, scale_a = reference.row_quantize(torch.randn(m, k, device=device), format)
                b, scale_b = reference.row_quantize(torch.randn(n, k, device=device), format)
                own = choose_tile(m, sm)
                tiles = {own} | {
                    Tile(rows_, columns, depth, warps, stages, unroll)
                    for rows_, columns, warps in shapes
                    for depth, stages, unroll in depths
                }
                results = []
                for tile in tiles:
                    operands = (a, b, scale_a, scale_b, None, torch.bfloat16)
                    try:
                        ms = median_ms(lambda o=operands, tile=tile: scaled_gemm(*o, tile=tile))
                    except Exception:  # Triton's OutOfResources, or a shape its compiler refuses
                        continue
                    results.append((ms, tile))
                results.sort(key=lambda result: result[0])
                print(f"\n{format} M {m} K {k} N {n}, TFLOP/s")
                for ms, tile in [*results[:4], *(r for r in results[4:] if r[1] == own)]:
                    mark = "  (the table's)" if tile == own else ""
                    print(f"{tera(m, k, n, ms):8.1f}  {tile}{mark}")
                best = {"ms": results[0][0], "tile": str(results[0][1])}
                rows.append({"sweep": format, "m": m, "k": k, "n": n, **best})
    return rows


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sweep", action="store_true", help="compare tiles of the Triton GEMM")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch sees no CUDA card: this benchmark measures one", file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    about = {"card": torch.cuda.get_device_name(device), "torch": torch.__version__}
    about |= {name: installed(name) for name in ("triton", "comfy-kitchen")}
    print(f"# {about}")
    with torch.inference_mode():
        if arguments.sweep:
            if kernels.missing():
                print(kernels.missing(), file=sys.stderr)
                return 2
            rows = sweep(device)
        else:
            gemms = usable_gemms(device)
            rows = quantize_rows(gemms, device)
            for m in ROWS:
                for k, n in LAYERS:
                    results = layer_rows(gemms, m, k, n, device)
                    show(results)
                    rows += results
    for row in rows:
        row |= {name: float(f"{x:.4g}") for name, x in row.items() if isinstance(x, float)}
    print(json.dumps({**about, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
