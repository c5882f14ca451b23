"""The kernels between the GEMMs of a block against other ways to the same result.

    python benchmarks/kernels.py            the table, about a minute
    python benchmarks/kernels.py --sweep    our kernels with other numbers of parts and warps

The other ways are ComfyUI's sequence of torch's operations, comfy-kitchen's `adaln`, `rms_rope_`,
`apply_rope1` and `quantize_int8_rowwise` where it is installed, and our twins in plain torch. Times
are those of the card, measured as benchmarks/linear.py does; "host" is what the processor takes to
launch. GB/s counts what has to be moved at least, each tensor once, for all ways alike. The error
is relative to float64. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from linear import host_us, installed, median_ms

from qwen_l40s.optimizations import kernels, reference
from qwen_l40s.optimizations.streams import Modulation, QKNorm, Rotary, Tokens

WIDTH, HEADS, HEAD_DIM, INNER = 3072, 24, 128, 12288
EPS = 1e-6
HALF = torch.bfloat16
SIZES = {
    "1024x1024": Tokens(1, 200, 4096, 4096),
    "1024x1024, batch of 2": Tokens(2, 200, 4096, 4096),
    "1328x1328": Tokens(1, 200, 6889, 6889),
    "1024x1024 with a reference image": Tokens(1, 200, 8192, 4096),
}
OURS = "ours"


class Task(NamedTuple):
    """A result and the ways to it.

    Attributes:
        name: What is computed.
        fresh: Gives new operands: some ways write to theirs.
        ways: Functions of the operands by name.
        value: Of what a way gives, the numbers that `exact` has.
        exact: The result in float64.
        bytes: What has to be moved for it at least.
    """

    name: str
    fresh: Callable[[], tuple]
    ways: dict[str, Callable]
    value: Callable[..., torch.Tensor]
    exact: torch.Tensor
    bytes: int


def tasks_of(tokens: Tokens, kitchen) -> Iterator[Task]:
    yield from norm_tasks(tokens, kitchen)
    yield rope_task(tokens, kitchen)
    for format in ("fp8", "int8"):
        yield gelu_task(tokens, format, kitchen)
        for width in (WIDTH, INNER):
            yield quantize_task(tokens, width, format, kitchen)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(HALF)


def rows_of(found) -> torch.Tensor:
    """Rows as numbers: of (rows, None), of (quantized, scale), or of a list of such parts."""
    if isinstance(found, list):
        return torch.cat([rows_of(part) for part in found])
    rows, scale = found
    return rows if scale is None else rows.float() * scale


def quantizers(format: str | None, kitchen) -> dict[str, Callable]:
    """How rows get into a format where that is a step of its own."""
    if format is None:
        return {"": lambda rows: (rows, None)}
    from qwen_l40s.optimizations.kernels.row_quantize import row_quantize

    found = {", row_quantize": lambda rows: row_quantize(rows, format)}
    if format == "int8" and kitchen is not None:
        found[", kitchen's quantizer"] = kitchen.quantize_int8_rowwise
    return found


# ----------------------------------------------------------------------------------- residual, norm


def norm_tasks(tokens: Tokens, kitchen) -> Iterator[Task]:
    """The norm alone, and residual and norm in each format."""
    from qwen_l40s.optimizations.kernels.residual_norm import residual_norm

    entries = tokens.batch * (2 if tokens.zero_from < tokens.image else 1)
    text, image = random(tokens.batch, 6 * WIDTH), random(entries, 6 * WIDTH)
    gates = Modulation(text[:, : 3 * WIDTH], image[:, : 3 * WIDTH])
    norms = Modulation(text[:, 3 * WIDTH :], image[:, 3 * WIDTH :])
    before, added = random(tokens.rows, WIDTH), random(tokens.rows, WIDTH)
    adalns = {"ComfyUI's": layer_norm_and_modulation}
    if kitchen is not None:
        adalns["kitchen's adaln"] = lambda x, shift, scale: kitchen.adaln(x, scale, shift, EPS)

    def fused(function, format, x, branch, gates=gates, norms=norms):
        return function(x, branch, None if branch is None else gates, norms, tokens, EPS, format)

    def in_parts(adaln, quantize, x, branch):
        return [
            quantize(adaln(part, shift, scale).flatten(0, 1))
            for part, shift, scale in add_in_parts(tokens, x, branch, gates, norms)
        ]

    for branch, format in ((None, None), (added, None), (added, "fp8"), (added, "int8")):
        ways = {OURS: partial(fused, residual_norm, format)}
        for adaln_name, adaln in adalns.items():
            for name, quantize in quantizers(format, kitchen).items():
                ways[adaln_name + name] = partial(in_parts, adaln, quantize)
        ways["our twin"] = partial(fused, reference.residual_norm, format)
        doubles = [Modulation(*(half.double() for half in part)) for part in (gates, norms)]
        branch64 = None if branch is None else branch.double()
        exact, _ = fused(reference.residual_norm, None, before.double(), branch64, *doubles)
        # x read and written, branch read; h written.
        residual = 2 if branch is None else 6
        moved = tokens.rows * WIDTH * (residual + (2 if format is None else 1))
        name = f"{'norm' if branch is None else 'residual_norm'} {format or 'bf16'}"
        fresh = partial(lambda branch: (before.clone(), branch), branch)
        yield Task(name, fresh, ways, rows_of, exact, moved)


def layer_norm_and_modulation(x, shift, scale):
    """`_modulate` of ComfyUI's comfy/ldm/qwen_image/model.py."""
    return torch.addcmul(shift, F.layer_norm(x, (WIDTH,), eps=EPS), 1 + scale)


def add_in_parts(tokens, x, branch, gates, norms):
    """Adds the branch to text, image and image at timestep zero; their new x, shift and scale."""
    parts = parts_of(tokens, x)
    branches = [None] * len(parts) if branch is None else parts_of(tokens, branch)
    halves = halves_of(tokens, gates), halves_of(tokens, norms)
    for part, addend, (_, _, gate), (shift, scale, _) in zip(parts, branches, *halves, strict=True):
        yield part if addend is None else torch.addcmul(part, gate, addend), shift, scale


def parts_of(tokens: Tokens, x: torch.Tensor) -> list[torch.Tensor]:
    """Each part of the streams, (batch, tokens, D)."""
    text, image = x.split([tokens.text_rows, tokens.rows - tokens.text_rows])
    image = image.unflatten(0, (tokens.batch, tokens.image))
    zero = [image[:, tokens.zero_from :]] if tokens.zero_from < tokens.image else []
    return [text.unflatten(0, (tokens.batch, tokens.text)), image[:, : tokens.zero_from], *zero]


def halves_of(tokens: Tokens, modulation: Modulation) -> list[tuple[torch.Tensor, ...]]:
    """Shift, scale and gate of each part, (batch, 1, D)."""
    parts = [modulation.text, *modulation.image.split(tokens.batch)]
    return [part.unsqueeze(1).chunk(3, dim=-1) for part in parts]


# ------------------------------------------------------------------------------- heads and rotation


def rope_task(tokens: Tokens, kitchen) -> Task:
    from qwen_l40s.optimizations.kernels.qk_norm_rope import qk_norm_rope

    shape = tokens.batch, tokens.joint, HEADS, HEAD_DIM
    q0, k0, norm = random(*shape), random(*shape), QKNorm(*random(4, HEAD_DIM).abs())
    angle = torch.rand(1, tokens.joint, HEAD_DIM // 2, device="cuda") * 6
    rotary = Rotary(angle.cos(), angle.sin())
    # As both ComfyUI and comfy-kitchen take it: (1, joint, 1, head_dim / 2, 2, 2).
    table = torch.stack([rotary.cos, -rotary.sin, rotary.sin, rotary.cos], dim=-1)
    table = table.unflatten(-1, (2, 2)).unsqueeze(2)
    text, image = slice(0, tokens.text), slice(tokens.text, None)

    def fused(function, q, k):
        function(q, k, norm, rotary, tokens, EPS)
        return q, k

    def rms_rope(q, k):
        """Each stream has weights of its own, so that it takes two launches."""
        weights = (text, norm.text_query, norm.text_key), (image, norm.query, norm.key)
        for here, of_q, of_k in weights:
            kitchen.rms_rope_(q[:, here], k[:, here], table[:, here], of_q, of_k, EPS)
        return q, k

    def stock(q, k):
        """`Attention.forward` of ComfyUI's comfy/ldm/qwen_image/model.py."""
        found = []
        for x, of_text, of_image in (
            (q, norm.text_query, norm.query),
            (k, norm.text_key, norm.key),
        ):
            parts = [
                F.rms_norm(x[:, here].transpose(1, 2).contiguous(), (HEAD_DIM,), weight, EPS)
                for here, weight in ((text, of_text), (image, of_image))
            ]
            joined = kitchen.apply_rope1(torch.cat(parts, dim=2), table.transpose(1, 2))
            found.append(joined.transpose(1, 2))
        return found

    ways = {OURS: partial(fused, qk_norm_rope)}
    if kitchen is not None:
        ways |= {"kitchen's rms_rope_": rms_rope, "ComfyUI's": stock}
    ways["our twin"] = partial(fused, reference.qk_norm_rope)
    exact = q0.double(), k0.double()
    doubles = QKNorm(*(w.double() for w in norm)), Rotary(*(part.double() for part in rotary))
    reference.qk_norm_rope(*exact, *doubles, tokens, EPS)
    moved = 8 * q0.numel() + 8 * angle.numel()
    fresh = lambda: (q0.clone(), k0.clone())  # noqa: E731
    return Task("qk_norm_rope bf16", fresh, ways, torch.stack, torch.stack(exact), moved)


# ------------------------------------------------------------------------------- GELU, quantization


def gelu_task(tokens: Tokens, format: str, kitchen) -> Task:
    from qwen_l40s.optimizations.kernels.gelu_quantize import gelu_quantize

    x = random(tokens.rows, INNER)
    ways = {OURS: partial(gelu_quantize, format=format)}
    for name, quantize in quantizers(format, kitchen).items():
        ways[f"GELU{name}"] = partial(
            lambda quantize, x: quantize(F.gelu(x, approximate="tanh")), quantize
        )
    ways["our twin"] = partial(reference.gelu_quantize, format=format)
    exact = F.gelu(x.double(), approximate="tanh")
    return Task(f"gelu_quantize {format}", lambda: (x,), ways, rows_of, exact, 3 * x.numel())


def quantize_task(tokens: Tokens, width: int, format: str, kitchen) -> Task:
    """Rows of attention's output, or of the MLP where GELU is a step of its own."""
    x = random(tokens.rows, width)
    found = quantizers(format, kitchen)
    ways = {OURS: found.pop(", row_quantize")}
    ways |= {name.removeprefix(", "): quantize for name, quantize in found.items()}
    ways["our twin"] = partial(reference.row_quantize, format=format)
    name = f"row_quantize {format} of {width}"
    return Task(name, lambda: (x,), ways, rows_of, x.double(), 3 * x.numel())


# ---------------------------------------------------------------------------------------- measuring


def measure(task: Task, size: str) -> list[dict]:
    """One result for each way; prints the table of the task."""
    print(f"\n{task.name:38}{'ms':>9}{'x ours':>8}{'GB/s':>8}{'error':>10}{'host us':>9}")
    results = []
    for name, run in task.ways.items():
        found = task.value(run(*task.fresh())).double()
        error = ((found - task.exact).norm() / task.exact.norm()).item()
        del found
        operands = task.fresh()
        call = partial(run, *operands)
        ms, host = median_ms(call), host_us(call)
        row = {"task": task.name, "size": size, "way": name, "ms": ms, "error": error}
        results.append({**row, "gb_s": task.bytes / ms / 1e6, "host_us": host})
        times = f"{ms:9.4f}{ms / results[0]['ms']:8.2f}{task.bytes / ms / 1e6:8.0f}"
        print(f"  {name:36}{times}{error:10.6f}{host:9.1f}")
    return results


def sweep(tokens: Tokens) -> list[dict]:
    """Our kernels with other launch shapes than their own."""
    results = []
    for task in tasks_of(tokens, None):
        module, row, shapes = launch_shapes(task.name)
        own = module.launch_shape(*row)
        print(f"\n{task.name:38}{'ms':>9}{'GB/s':>8}")
        call = partial(task.ways[OURS], *task.fresh())
        for shape in shapes:
            with mock.patch.object(module, "launch_shape", lambda *_, shape=shape: shape):
                ms = median_ms(call)
            mark = "  (its own)" if shape == own else ""
            print(f"  {shape!s:36}{ms:9.4f}{task.bytes / ms / 1e6:8.0f}{mark}")
            results.append({"sweep": task.name, "shape": shape, "ms": ms})
    return results


def launch_shapes(task: str) -> tuple[ModuleType, tuple[int, ...], list[tuple[int, ...]]]:
    """Where a task's `launch_shape` is found, what it takes, and what it could give instead."""
    kernel = "residual_norm" if task.startswith("norm") else task.split()[0]
    holder = "whole_row" if kernel.endswith("_quantize") else kernel
    module = import_module(f"qwen_l40s.optimizations.kernels.{holder}")
    if kernel == "qk_norm_rope":
        return module, (HEADS, HEAD_DIM), list(product((1, 2, 4, 8), (1, 2, 4, 8)))
    wide = kernel == "gelu_quantize" or task.endswith(str(INNER))
    width = INNER if wide else WIDTH
    # Three parts that fit the row, and one that is masked; each with numbers of warps.
    held = [(width // 3, 3), (width // 3 * 4, 1)]
    warps = (4, 8, 16, 32) if wide else (1, 2, 4, 8, 16)
    return module, (width,), [(*parts, count) for parts, count in product(held, warps)]


def find_kitchen():
    """comfy-kitchen, or None, after a line about what it has."""
    try:
        import comfy_kitchen
    except ImportError as error:
        print(f"# comfy-kitchen: {error}")
        return None
    backends = comfy_kitchen.list_backends()
    usable = [name for name, about in backends.items() if about["available"]]
    print(f"# comfy-kitchen: {', '.join(usable)}")
    return comfy_kitchen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sweep", action="store_true", help="compare launch shapes of our kernels")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the last line there too")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or kernels.missing():
        print(kernels.missing() or "torch sees no CUDA card", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    about = {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
    about |= {name: installed(name) for name in ("triton", "comfy-kitchen")}
    print(f"# {about}")
    rows = []
    with torch.inference_mode():
        if arguments.sweep:
            rows = sweep(SIZES["1024x1024"])
        else:
            kitchen = find_kitchen()
            for size, tokens in SIZES.items():
                print(f"\n# {size}: {tokens}")
                for task in tasks_of(tokens, kitchen):
                    rows += measure(task, size)
    for row in rows:
        row |= {name: float(f"{x:.4g}") for name, x in row.items() if isinstance(x, float)}
    line = json.dumps({**about, "rows": rows})
    if arguments.json is not None:
        arguments.json.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
