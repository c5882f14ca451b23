"""`qwen-l40s bench --calibrate`: measures this card, and keeps what estimates for it then use."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from ..errors import SettingError, UnavailableError, plain_write_errors
from ..planning.calibration import NAME, Calibration, cache_folder, with_calibration
from ..planning.cards import Card, find_card, known_cards
from ..planning.rates import PRECISIONS
from .images import write_whole

# Options of the other measurements, which mean nothing here.
FOREIGN = ("size", "references", "layers", "only", "repeats", "warm_up", "profile", "plot")


def check(args: argparse.Namespace) -> None:
    """Raises SettingError: `--calibrate` stands beside what it does not go with."""
    if args.what:
        raise SettingError(
            f"bench {args.what} and --calibrate are two measurements: leave one of them out."
        )
    given = next((name for name in FOREIGN if getattr(args, name)), None)
    if given:
        option = f"--{given.replace('_', '-')}"
        raise SettingError(f"{option} and --calibrate, whose sizes are fixed: leave {option} out.")


def run(args: argparse.Namespace, device: Any) -> int:
    """Measures, prints and keeps the result.

    Args:
        device: a torch.device; the CPU's figures are printed only.

    Returns:
        0.

    Raises:
        UnavailableError: the fused blocks do not run on the card, it is full, or a file cannot be
            written.
    """
    from ..optimizations.calibrate import calibrate, full_sizes, small_sizes
    from ..planning.work import FULL_SIZE, SMALL

    on_card, small = device.type == "cuda", args.width == "small"
    if not on_card and not small:
        raise UnavailableError(
            "bench --calibrate at full width takes hours on a CPU: add --width small, which only "
            "shows that it runs."
        )
    sizes = small_sizes(SMALL) if small else full_sizes(FULL_SIZE)
    begin = time.perf_counter()
    found, left_out = calibrate(device, sizes, lambda what: print(f"measuring: {what}", flush=True))
    print(f"{found.card}, torch {found.torch}, {time.perf_counter() - begin:.0f} s")
    print("\n".join(table(found, _known(found.card))))
    for precision, reason in left_out.items():
        print(f"{precision} left out: {reason}")
    if on_card and not small:
        print(f"kept in {_keep(found)}: estimates for this card use it")
    else:
        print("These only show that the command works: nothing was kept.")
    if args.json:
        write_whole(Path(args.json), json.dumps(found.as_dict(), indent=1).encode() + b"\n")
    print(json.dumps(found.as_dict()))
    return 0


def table(found: Calibration, card: Card | None) -> list[str]:
    """One line for each rate, with its share of the card's dense peak where that is known."""
    rates = found.rates
    peaks = card.dense_flops if card else {}
    rows = [
        (f"{name} products", rates.gemm[name], peaks.get(name))
        for name in PRECISIONS
        if name in rates.gemm
    ]
    rows += [
        ("attention, bf16", rates.attention, peaks.get("bf16")),
        ("VAE convolutions, bf16", rates.convolution, peaks.get("bf16")),
        ("text encoder, fp32", rates.encoder, peaks.get("fp32")),
    ]
    lines = [f"{'':24}{'TFLOP/s':>9}{'of peak':>9}"]
    lines += [_line(name, rate / 1e12, rate, peak) for name, rate, peak in rows]
    lines.append(f"{'':24}{'GB/s':>9}{'of peak':>9}")
    for name, rate, peak in (
        ("memory, fused norm", rates.bandwidth, card and card.bandwidth),
        ("host to card, pinned", rates.pcie, card and card.pcie_bytes_per_second),
    ):
        lines.append(_line(name, rate / 1e9, rate, peak))
    return lines


def _line(name: str, shown: float, rate: float, peak: float | None) -> str:
    return f"{name:24}{shown:9.4g}" + (f"{rate / peak:9.0%}" if peak else "")


def _known(name: str) -> Card | None:
    try:
        return find_card(name, known_cards())
    except SettingError:  # a card that nobody has listed, or a damaged list of the user's own
        return None


def _keep(found: Calibration) -> Path:
    folder = cache_folder()
    with plain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / NAME, with_calibration(folder, found).encode())
    return folder / NAME
