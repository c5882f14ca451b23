"""Times one forward pass of a transformer, whichever program computes it, on the same inputs."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import re
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..errors import UnavailableError
from ..loaders.quantize import layers_to_quantize
from ..spec.transformer import REFERENCE_SIDE, TransformerShape
from . import timing as measure
from .inputs import Inputs

STEPS = 20
SHIFT = 1.15  # of ComfyUI's Qwen-Image
# The timestep at which outputs are compared, one of the schedule's.
CHECKED = 6
KERNELS_SHOWN = 20
LATENT_SIDE = 8  # pixels to a latent's side
# In this order: the first that a name matches. Names are those of ComfyUI's, diffusers' and this
# package's kernels, of cuBLAS, cuDNN and CUTLASS, of torch's own, and on a CPU of its operators.
GROUPS = (
    ("attention", r"flash|fmha|sdpa|sage|attention|attn"),
    ("rope", r"rope|rotary|view_as_complex|fused.*_polar"),
    ("GEMM", r"gemm|nvjet|xmma|cutlass|cublas|splitk|gemv|scaled_mm|addmm|::(_int_|b)?mm\b"),
    ("quantize", r"quant|amax|absmax|float8|fp8"),
    ("norm+modulate", r"norm|adaln|addcmul|modulate|residual"),
    ("copies", r"copy|memcpy|memset|catarray|fused_cat|fillfunctor|::(cat|fill_|zero_)$"),
)
OTHER = "other"


class InputTensors(NamedTuple):
    """What is handed to a program, on its device.

    Attributes:
        inputs: Their sizes.
        latents: (batch, channels, 1, height / 8, width / 8), fp32.
        text: (batch, text tokens, joint_dim), bf16.
        references: Of each reference image (batch, channels, 1, 128, 128), bf16.
        sigmas: The timesteps of a schedule, each (batch,), fp32.
        between: As many that are in no schedule.
    """

    inputs: Inputs
    latents: torch.Tensor
    text: torch.Tensor
    references: tuple[torch.Tensor, ...]
    sigmas: tuple[torch.Tensor, ...]
    between: tuple[torch.Tensor, ...]


class ForwardProgram(NamedTuple):
    """One program, ready to run.

    Attributes:
        call: The forward pass at a timestep (batch,): latents and text to noise prediction.
        prediction: What `call` has returned and its timestep to the noise prediction, in the
            latents' shape.
        norm_out: The module that reads the image stream after the last block.
        paths: Says afterwards which code ran; empty where there is nothing to say.
    """

    call: Callable[[torch.Tensor], Any]
    prediction: Callable[[Any, torch.Tensor], torch.Tensor]
    norm_out: torch.nn.Module
    paths: Callable[[], str] = str


class ForwardOutput(NamedTuple):
    """What a program computes, in fp32 on the CPU: the noise prediction, and the image stream after
    the last block, (batch, tokens, D).
    """

    prediction: torch.Tensor
    stream: torch.Tensor


@dataclass(frozen=True)
class Repeats:
    """How often a row is run.

    Args:
        warmup: calls before those that count, at least 1.
        repeats: calls that count.
        kernels: whether the longest kernels are kept by name.
    """

    warmup: int
    repeats: int
    kernels: bool = False


def schedule(steps: int = STEPS, offset: float = 0.0) -> list[float]:
    """Timesteps from 1 down to above 0 as ComfyUI's `simple` scheduler has them.

    Rounded to bf16, in which diffusers takes its timestep, so that every program gets the same.

    Args:
        offset: 0.5 for timesteps halfway between, not rounded.
    """
    moved = math.exp(SHIFT)
    times = [1 - (step + offset) / steps for step in range(steps)]
    sigmas = [moved * t / (1 + (moved - 1) * t) for t in times]
    return sigmas if offset else torch.tensor(sigmas).bfloat16().tolist()


def input_tensors(shape: TransformerShape, inputs: Inputs, device: torch.device) -> InputTensors:
    """The same random values in every run on one kind of device."""
    generator = torch.Generator(device).manual_seed(1)
    channels = shape.in_channels // 4

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device)

    def timesteps(values: Sequence[float]) -> tuple[torch.Tensor, ...]:
        return tuple(torch.full((inputs.batch,), value, device=device) for value in values)

    side = REFERENCE_SIDE // LATENT_SIDE
    height, width = inputs.height // LATENT_SIDE, inputs.width // LATENT_SIDE
    return InputTensors(
        inputs,
        # In bf16 too, which is what the transformer gets of them.
        latents=random(inputs.batch, channels, 1, height, width).bfloat16().float(),
        text=random(inputs.batch, inputs.text, shape.joint_dim).bfloat16(),
        references=tuple(
            random(inputs.batch, channels, 1, side, side).bfloat16()
            for _ in range(inputs.references)
        ),
        sigmas=timesteps(schedule()),
        between=timesteps(schedule(8 * STEPS, 0.5)),
    )


def measure_forward(
    program: ForwardProgram,
    sigmas: Sequence[torch.Tensor],
    device: torch.device,
    repeats: Repeats,
    checked: torch.Tensor,
) -> tuple[dict[str, Any], ForwardOutput]:
    """Warms a program up and times it, with the next timestep in each call.

    Args:
        sigmas: The timesteps; after the last comes the first again.
        checked: The timestep of the output that is returned.

    Returns:
        What a row of results has of it, times in milliseconds and memory in GiB, and the output.

    Raises:
        UnavailableError: The output holds NaN or infinity.
    """
    gc.collect()
    following = itertools.cycle(sigmas)
    resting_gib = measure.allocated_gib(device)
    measure.reset_peaks(device)
    start = time.perf_counter()
    program.call(next(following))
    measure.synchronize(device)
    first = (time.perf_counter() - start) * 1e3
    for _ in range(repeats.warmup - 1):
        program.call(next(following))
    warm = measure.peaks(device)
    measure.reset_peaks(device)
    timing = measure.time_calls(lambda: program.call(next(following)), device, repeats.repeats)
    peaks = measure.peaks(device)
    row: dict[str, Any] = {
        **timing_fields(timing),
        "first_ms": first,
        **_memory_fields(peaks, warm, resting_gib),
        **kernel_fields(lambda: program.call(next(following)), device, repeats.kernels),
    }
    if row["kernel_ms"]:
        row["ms_over_kernels"] = row["ms"] / row["kernel_ms"]
    output = _output(program, checked)
    if paths := program.paths():
        row["paths"] = paths
    return row, output


def relative_errors(
    output: ForwardOutput, reference: ForwardOutput | None
) -> dict[str, float | None]:
    """|output - reference| / |reference| of the noise prediction and of the image stream."""
    if reference is None:
        return {"rel_error": None, "rel_error_blocks": None}
    return {
        "rel_error": _relative(output.prediction, reference.prediction),
        "rel_error_blocks": _relative(output.stream, reference.stream),
    }


def timing_fields(timing: measure.Timing) -> dict[str, Any]:
    """Median, spread and raw samples."""
    return {
        "ms": timing.median,
        "ms_p10": timing.quantile(0.1),
        "ms_p90": timing.quantile(0.9),
        "wall_ms": measure.quantile(timing.wall, 0.5),
        "host_ms": measure.quantile(timing.host, 0.5),
        "samples_ms": list(timing.samples),
    }


def kernel_fields(call: Callable[[], Any], device: torch.device, by_name: bool) -> dict[str, Any]:
    """The kernels of one call, summed in all and by purpose; a CPU's operators only by name."""
    on_card = device.type == "cuda"
    if not on_card and not by_name:
        return {"kernel_ms": None}
    kernels = kernel_table(measure.device_events(call, device))
    # A driver that lets nobody look at its counters shows no kernels.
    total = sum(kernel.ms for kernel in kernels) if on_card and kernels else None
    fields: dict[str, Any] = {"kernel_ms": total, "kernel_groups_ms": group_sums(kernels)}
    if by_name:
        fields["kernels"] = [kernel._asdict() for kernel in kernels[:KERNELS_SHOWN]]
    return fields


def _memory_fields(
    peaks: measure.Peaks | None, warm: measure.Peaks | None, resting_gib: float
) -> dict[str, float | None]:
    """`extra_gib` is what the timed calls take beyond weights and inputs, with what they keep from
    call to call; `warmup_extra_gib` the same of the calls before.
    """
    if peaks is None or warm is None:
        names = ("peak_gib", "peak_reserved_gib", "extra_gib", "warmup_extra_gib")
        return dict.fromkeys(names)
    return {
        "peak_gib": peaks.allocated,
        "peak_reserved_gib": peaks.reserved,
        "extra_gib": peaks.allocated - resting_gib,
        "warmup_extra_gib": warm.allocated - resting_gib,
    }


def _output(program: ForwardProgram, sigma: torch.Tensor) -> ForwardOutput:
    seen: list[torch.Tensor] = []

    def look(_module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        seen.append(arguments[0].float().cpu())

    handle = program.norm_out.register_forward_pre_hook(look)
    try:
        result = program.call(sigma)
    finally:
        handle.remove()
    prediction = program.prediction(result, sigma).float().cpu()
    for what, tensor in (("noise prediction", prediction), ("image stream", seen[0])):
        if not tensor.isfinite().all():
            raise UnavailableError(f"the {what} holds NaN or infinity")
    return ForwardOutput(prediction, seen[0])


def _relative(found: torch.Tensor, known: torch.Tensor) -> float:
    norm = functools.partial(torch.linalg.vector_norm, dtype=torch.float64)
    return float(norm(found - known) / norm(known))


class Kernel(NamedTuple):
    """All launches of one kernel: `ms` is their sum."""

    name: str
    group: str
    ms: float
    count: int


def group_of(name: str) -> str:
    """One of `GROUPS`' names, or "other"."""
    lowered = name.lower()
    return next((group for group, pattern in GROUPS if re.search(pattern, lowered)), OTHER)


def kernel_table(events: Iterable[tuple[str, float]]) -> list[Kernel]:
    """Sums (name, milliseconds) by name, the longest first."""
    times: dict[str, list[float]] = defaultdict(list)
    for name, ms in events:
        times[name].append(ms)
    kernels = [Kernel(name, group_of(name), sum(each), len(each)) for name, each in times.items()]
    return sorted(kernels, key=lambda kernel: -kernel.ms)


def group_sums(kernels: Iterable[Kernel]) -> dict[str, float]:
    """{group: milliseconds}, of every group, in the order of `GROUPS`."""
    sums = dict.fromkeys([*(group for group, _ in GROUPS), OTHER], 0.0)
    for kernel in kernels:
        sums[kernel.group] += kernel.ms
    return sums


def random_tensors(
    shape: TransformerShape, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, bf16 tensor) of every parameter of a transformer.

    A tensor depends on its name and its device alone, so that a quantized model can be made tensor
    by tensor from the same weights. Activations stay finite through 60 blocks.
    """
    for name, size in shape.tensors().items():
        yield name, random_tensor(name, size, device)


def random_tensor(name: str, size: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """bf16: deviation 0.5 / sqrt(K) for a weight [N, K, ...], 0.02 for a bias; a norm's is ones."""
    tensor = torch.empty(size, dtype=torch.bfloat16, device=device)
    fan_in = math.prod(size[1:])
    if name.endswith("bias"):
        deviation = 0.02
    elif fan_in == 1:
        return tensor.fill_(1.0)
    else:
        deviation = 0.5 / math.sqrt(fan_in)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return tensor.normal_(0.0, deviation, generator=generator)


def quantizable_weights(shape: TransformerShape) -> frozenset[str]:
    """Names of the weights that fp8 and int8 models hold quantized."""
    weights = (name for name in shape.tensors() if name.endswith(".weight"))
    layers = layers_to_quantize(name.removesuffix(".weight") for name in weights)
    return frozenset(f"{layer}.weight" for layer in layers)
