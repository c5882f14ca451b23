"""Gives the rates of a card, for products and bytes: measured, or a range by data sheet.

The constants of `measured.json`, which `bench/fit.py` fits to one half of its runs, are the only
fits in an estimate. Figures of the CPU and its link were measured once, on an H200's machine. The
shares of their peaks that other cards reach are in `public.json`, with the figures behind them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..caches import cached
from ..errors import SettingError
from ..spec.formats import KITCHEN_INT8, MULTIPLIED
from .cards import Card, is_named
from .request import EXACT

MEASURED = Path(__file__).with_name("measured.json")
PUBLIC = Path(__file__).with_name("public.json")


@dataclass(frozen=True)
class Constants:
    """How much of a card's dense peaks the programs reach, and what memory cannot be counted."""

    # gemm_bf16, gemm_fp8, gemm_int8: of the precision's own peak.
    gemm_bf16: float
    gemm_fp8: float
    gemm_int8: float
    attention: float  # of the bf16 peak
    bandwidth: float
    convolution: float  # of the bf16 peak, in the VAE
    workspace: float  # bytes besides weights and activations while sampling
    context: float

    def gemm(self, precision: str) -> float:
        return getattr(self, f"gemm_{precision}")


CONSTANT_NAMES = tuple(field.name for field in fields(Constants))


@cached
def measured() -> Mapping[str, Any]:
    """Reads `measured.json`: conditions, constants, their errors, runs and loads."""
    return json.loads(MEASURED.read_text(encoding="utf-8"))


@cached
def constants() -> Constants:
    return Constants(**measured()["constants"])


@dataclass(frozen=True)
class CardClass:
    """What cards of one kind reach, as (slowest, fastest) shares of their dense peaks."""

    name: str
    source: str  # whose figures, with the date; empty where nobody has published one
    within: float  # how far the measured card's constants are off; 0 where the shares below count
    gemm: Mapping[str, Sequence[float]]
    # attention, convolution: of the bf16 peak.
    attention: Sequence[float]
    bandwidth: Sequence[float]
    convolution: Sequence[float]
    vae: float  # time of our VAE layers in that of ComfyUI's
    stock: Mapping[str, float]  # {"int8", "fp8", "attention": ComfyUI's time in ours}


@cached
def public() -> Mapping[str, Any]:
    """Reads `public.json`: sources, figures, and classes of cards."""
    return json.loads(PUBLIC.read_text(encoding="utf-8"))


def class_of(card: Card) -> CardClass:
    """Finds the class of a card by its own and its driver's names; the last one takes all."""
    return _class_named((card.name, *card.also))


@cached
def _class_named(names: Sequence[str]) -> CardClass:
    for row in public()["classes"]:
        known = [name for name in names if name.startswith(tuple(row["names"]))]
        if known and not any(word in name for word in row["but"] for name in names):
            break
    source = public()["sources"].get(row["source"])
    told = f"{source['short']}, {source['date']}" if source else ""
    kept = {each.name: row[each.name] for each in fields(CardClass)}
    return CardClass(**{**kept, "source": told})


# Attention in 8 bits, predicted: its time in that of exact attention. What warps execute for 128
# queries and 64 keys of 128 channels, counted in the code for sm_89 of FlashAttention-2's algorithm
# (Triton 3.9) and of comfy-kitchen 0.2.40:
#
#                                         bf16   kitchen_int8
#     in bf16 (HMMA.16816)                1024              0
#     in int8 (IMMA.16832)                   0            512
#     cycles of an L40S's tensor cores    4096           2048
#     exponentials (MUFU.EX2)              272            264
#     conversions (I2FP, F2FP, F2IP)       128            712
#     FMUL, FFMA, FADD, FMNMX             1376            904
#     IMNMX                                  0            248
#     read from shared memory (LDSM, LDS)  576            280
#     instructions besides products       2672           2840
#     cycles to issue these                668            710
#
# No other unit is as busy as the tensor cores. At best products hide all the rest, at worst nothing
# of it; kitchen_int8 is taken to reach the same share of that as FlashAttention-2. What it reads
# and writes before and after is in `times.heads_moved`. Both together are 0.36 to 0.57 of exact
# attention on an RTX 4090 at 1024x1024, where ComfyUI's step took 0.51 of it.
BESIDE_PRODUCTS = {EXACT: 668 / 4096, KITCHEN_INT8: 710 / 4096}
# Where cuDNN has a faster exact attention for the GPU's instructions: the middle of 1.56 and
# 1.22, by which int8 steps of 2.1 took 11 and 60 ms longer on an H200 (1024x1024, 2048x2048).
CUDNN_GENERATIONS = (9, 10)
BESIDE_CUDNN = 1.4
# Around what was measured on one card.
LINK = (0.75, 0.95)
# ComfyUI copies and casts a layer's weights in streams of their own, ahead of the card, where it
# can pin system RAM; else the card waits for each.
HIDES = (0.0, 1.0)
# Our VAE layers, of ComfyUI's time: 0.35 to 0.43 of it to decode 1024x1024 to 2048x2048 (H200).
FUSED_VAE = 0.4
# A lower power limit takes its own share of the clock at worst, and this power of it at best, where
# the voltage falls with the clock.
LIMITED = 1 / 3
# Of the fp32 peak. Not fitted: the middle stands for the measured card too, on which six prompts
# took up to a tenth more or less than that (text_worst in `measured.json`).
ENCODER = (0.4, 0.6)
# Pinned memory to an H200: 55.3 of the 64 GB/s of 16 lanes of PCIe 5.
MEASURED_LINK = 0.864
# What measured products may reach of a listed peak; a 4090's reach 1.05 at its boost clock.
MOST_OF_PEAK = 1.25


@dataclass(frozen=True)
class Launches:
    """Holds the seconds that the CPU needs for a forward pass."""

    block: Mapping[str, float]  # to launch one kernel by kernel, by precision of weights
    graph: float  # to replay all blocks as a CUDA graph
    host: float  # for the host's code before and after the blocks

    def seconds(self, blocks: int, precision: str, *, graph: bool = False) -> float:
        return self.host + (self.graph if graph else blocks * self.block[precision])


# Of a machine that was not calibrated: measured on an H200's host at 256x256; `graph` is what a
# replay adds.
LAUNCHES = Launches({"bf16": 0.00025, "fp8": 0.00028, "int8": 0.00017}, graph=0.0005, host=0.0033)


@dataclass(frozen=True)
class Rates:
    """The rates that a card reaches, per second, and what its CPU launches."""

    gemm: Mapping[str, float]  # FLOP/s of products by precision, of those that run
    attention: float  # FLOP/s in bf16; in 8 bits after `attending`
    bandwidth: float
    convolution: float  # FLOP/s of the VAE's convolutions in bf16
    encoder: float  # FLOP/s of matrix products in fp32, in which ComfyUI computes the text encoder
    pcie: float  # bytes/s from pinned system RAM
    launches: Launches = LAUNCHES
    vae: float = FUSED_VAE  # time of our VAE layers in that of ComfyUI's
    hides: float = 1.0  # share of weights' copies that computing hides, or the reverse


@dataclass(frozen=True)
class Basis:
    kind: str  # "measured" on this card, "predicted", or "unknown" where there are no times
    text: str
    origin: str = ""  # where measured rates are from, in words; empty where none are
    left_out: tuple[str, ...] = ()  # precisions that are predicted although others were measured


def rates_of(card: Card, calibration: Rates | None = None) -> tuple[Rates, Rates, Basis]:
    """Gives the slowest and fastest rates to expect of a card, equal where it was measured; what a
    calibration left out is predicted. Raises SettingError where the user's peak is far below it.
    """
    if calibration is not None:
        return _calibrated(card, calibration)
    found, kind = constants(), class_of(card)
    conditions = measured()["conditions"]
    here = is_named(card, conditions["card"])
    # The clock's share under the power limit that is set.
    share = min(1.0, card.limit_watts / card.tdp_watts) if card.tdp_watts else 1.0
    worst, best = (share, share**LIMITED) if share else (1.0, 1.0)
    if here and not card.changed and worst == 1:
        rates = rates_by(found, card)
        origin = f"measured on an {conditions['card']} on {conditions['date']}"
        error = measured()["fit"]["test"]["step_worst"]
        text = f"{origin}; for runs outside the fit, a step is within {error:.1%}"
        return rates, rates, Basis("measured", text, origin)
    changed = " with the figures of your list" * (here and card.changed)
    text = f"predicted as a range: no {card.name}{changed} was measured"
    if kind.within:
        text += f"; taken as an {conditions['card']}'s rates, within {kind.within - 1:.0%}"
        slow, fast = (_scaled(rates_by(found, card), kind.within**sign) for sign in (-1, 1))
    else:
        basis = f"from the figures of {kind.source}" if kind.source else "no public figure"
        text += f" ({kind.name}: {basis})"
        slow, fast = (_predicted(card, kind, end) for end in (0, 1))
    if worst < 1:
        text += f"; its power limit is set to {card.limit_watts} of {card.tdp_watts} W, counted as "
        text += f"{worst:.0%} to {best:.0%} of its clock"
    text += "; `qwen-l40s bench --calibrate` measures yours"
    return _scaled(slow, worst), _scaled(fast, best), Basis("predicted", text)


def _scaled(rates: Rates, share: float) -> Rates:
    # What follows the clock; memory and link have their own.
    clocked = ("attention", "convolution", "encoder")
    return replace(
        rates,
        gemm={name: share * rate for name, rate in rates.gemm.items()},
        **{name: share * getattr(rates, name) for name in clocked},
    )


def attention_share(card: Card, form: str) -> tuple[float, float]:
    """Gives the time of attention in a form, in that of exact attention: (at best, at worst)."""
    if form == EXACT:
        return 1.0, 1.0
    if card.capability[0] in CUDNN_GENERATIONS:
        return BESIDE_CUDNN, BESIDE_CUDNN
    # Nobody has listed the peaks of a card that is only calibrated.
    peaks = card.dense_flops or {"bf16": 1, "int8": 2}
    products = peaks["bf16"] / peaks.get("int8", peaks["bf16"])
    worst = (products + BESIDE_PRODUCTS[form]) / (1 + BESIDE_PRODUCTS[EXACT])
    return products, worst


def attending(card: Card, form: str, slow: Rates, fast: Rates) -> tuple[Rates, Rates]:
    """Changes a card's slowest and fastest rates to those of a form of attention."""
    best, worst = attention_share(card, form)
    return (
        replace(slow, attention=slow.attention / worst),
        replace(fast, attention=fast.attention / best),
    )


def hiding(slow: Rates, fast: Rates) -> tuple[Rates, Rates]:
    """Changes a card's slowest and fastest rates to those of a host that hides copies or not."""
    return replace(slow, hides=HIDES[0]), replace(fast, hides=HIDES[1])


def rates_by(found: Constants, card: Card) -> Rates:
    """Gives the rates of the card that constants were fitted on."""
    peaks, known = card.dense_flops, card.facts().multiplies
    return Rates(
        gemm={name: found.gemm(name) * _peak(card, name) for name in filter(known, MULTIPLIED)},
        attention=found.attention * peaks["bf16"],
        bandwidth=found.bandwidth * card.bandwidth,
        convolution=found.convolution * peaks["bf16"],
        encoder=sum(ENCODER) / 2 * peaks["fp32"],
        pcie=MEASURED_LINK * card.pcie_bytes_per_second,
    )


def _calibrated(card: Card, calibration: Rates) -> tuple[Rates, Rates, Basis]:
    text = origin = f"measured on this {card.name} by `qwen-l40s bench --calibrate`"
    for name, rate in calibration.gemm.items() if card.changed else ():
        if rate > MOST_OF_PEAK * (peak := _peak(card, name)):
            raise SettingError(
                f"your list gives the {card.name} {peak / 1e12:g} dense TFLOPS in {name}, but "
                f"`qwen-l40s bench --calibrate` measured {rate / 1e12:.0f} on it: correct "
                "'dense_tflops', or calibrate again."
            )
    multiplies = card.facts().multiplies
    lacks = [name for name in MULTIPLIED if name not in calibration.gemm and multiplies(name)]
    calibration = replace(calibration, vae=class_of(card).vae)
    if not lacks:
        return calibration, calibration, Basis("measured", text, origin)
    text += f", except {' and '.join(lacks)}, which it did not measure and which is predicted"
    ends = []
    for end in (0, 1):
        gemm = dict.fromkeys(lacks, calibration.gemm["bf16"])
        if card.dense_flops:  # somebody has listed them
            shares = class_of(card).gemm
            gemm = {name: shares[name][end] * _peak(card, name) for name in lacks}
        ends.append(replace(calibration, gemm={**calibration.gemm, **gemm}))
    slow, fast = ends
    return slow, fast, Basis("measured", text, origin, tuple(lacks))


def _peak(card: Card, precision: str) -> float:
    # bf16's where its list gives none.
    return card.dense_flops.get(precision, card.dense_flops["bf16"])


def _predicted(card: Card, kind: CardClass, end: int) -> Rates:
    peaks, multiplies = card.dense_flops, card.facts().multiplies
    gemm = {name: share[end] * _peak(card, name) for name, share in kind.gemm.items()}
    return Rates(
        gemm={name: rate for name, rate in gemm.items() if multiplies(name)},
        attention=kind.attention[end] * peaks["bf16"],
        bandwidth=kind.bandwidth[end] * card.bandwidth,
        convolution=kind.convolution[end] * peaks["bf16"],
        encoder=ENCODER[end] * peaks["fp32"],
        pcie=LINK[end] * card.pcie_bytes_per_second,
        vae=kind.vae,
    )
