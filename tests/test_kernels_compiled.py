"""The Triton kernels compiled for cards that are not there: they fit, and use the tensor cores."""

import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")

from qwen_l40s.optimizations import kernels, reference

pytestmark = [
    pytest.mark.skipif(bool(kernels.missing()), reason=kernels.missing() or "-"),
    pytest.mark.skipif(kernels.interpreted(), reason="TRITON_INTERPRET=1 compiles nothing"),
]

FORMATS = ("fp8", "int8")
KIB = 1024
# Shared memory that one block can have: CUDA C++ Programming Guide, compute capabilities.
SHARED = {80: 163 * KIB, 89: 99 * KIB, 90: 227 * KIB}


@pytest.fixture(scope="module")
def compile_kernel(tmp_path_factory):
    """Compiles a kernel for a card that is not there, from scratch."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    if not (tools / "cuobjdump").is_file():
        pytest.skip("this Triton brings no cuobjdump, which tells of spills")

    def compile_one(kernel, sm, pointers, numbers, constants, warps, stages=3):
        signature = {name: f"*{dtype}" for name, dtype in pointers.items()}
        signature |= dict.fromkeys(numbers, "i32") | dict.fromkeys(constants, "constexpr")
        # What a launch finds out: torch's memory and the widths of this model are aligned.
        aligned = {*pointers, *(name for name, multiple in numbers.items() if multiple)}
        attributes = {
            (kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned
        }
        source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
        options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
        built = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
        cubin = tmp_path_factory.mktemp("cubin") / "kernel.cubin"
        cubin.write_bytes(built.asm["cubin"])
        command = [tools / "cuobjdump", "-res-usage", cubin]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
        assert stack == 0, f"spills: {usage}"
        assert registers * warps * 32 <= 65536
        assert built.metadata.shared <= SHARED[sm]
        return built.asm["ptx"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield compile_one


def tiles():
    """(compute capability, format, tile) of every tile that a card can be given."""
    if kernels.missing():
        return []
    from qwen_l40s.optimizations.kernels.scaled_gemm import TILES, TILES_SM90

    cases = [(89, format, tile) for format in FORMATS for _, tile in TILES]
    cases += [(90, format, tile) for format in FORMATS for _, tile in TILES_SM90]
    return [*cases, (80, "int8", TILES[-1][1])]  # where there is no e4m3


@pytest.mark.parametrize(("sm", "format", "tile"), tiles(), ids=str)
def test_scaled_gemm_fits_the_card_and_uses_its_tensor_cores(compile_kernel, sm, format, tile):
    from triton import language

    from qwen_l40s.optimizations.kernels.scaled_gemm import _scaled_gemm_kernel

    operand = {"fp8": "fp8e4nv", "int8": "i8"}[format]
    pointers = {"a_ptr": operand, "b_ptr": operand, "out_ptr": "bf16", "bias_ptr": "bf16"}
    pointers |= {"scale_a_ptr": "fp32", "scale_b_ptr": "fp32"}
    constants = {"k": 3072, "has_bias": True, "group_m": 8, "unroll": tile.unroll}
    constants |= {"block_m": tile.m, "block_n": tile.n, "block_k": tile.k}
    constants["sum_dtype"] = language.int32 if format == "int8" else language.float32
    numbers = {"m": False, "n": True}
    ptx = compile_kernel(
        _scaled_gemm_kernel, sm, pointers, numbers, constants, tile.warps, tile.stages
    )
    product = {"fp8": r"f32\.e4m3\.e4m3", "int8": r"s32\.s8\.s8"}[format]
    instruction = r"mma\.sync" if sm < 90 else r"wgmma\.mma_async"
    assert re.search(rf"{instruction}\S*\.{product}", ptx)
    assert not re.search(r"mma\S*\.(f16|bf16)\.", ptx)  # nothing is widened before it
    assert "cp.async.cg.shared.global" in ptx  # 16 bytes at a time, loaded ahead


@pytest.mark.parametrize(
    ("sm", "format", "k"),
    [(89, "fp8", 3072), (89, "fp8", 12288), (89, "int8", 12288), (90, "fp8", 12288)],
    ids=str,
)
def test_row_quantize_holds_a_row_in_registers(compile_kernel, sm, format, k):
    from qwen_l40s.optimizations.kernels.row_quantize import _row_quantize_kernel, launch_shape

    block, warps = launch_shape(k)
    pointers = {"x_ptr": "bf16", "scale_ptr": "fp32"}
    pointers["q_ptr"] = {"fp8": "fp8e4nv", "int8": "i8"}[format]
    constants = {"block_k": block, "to_integer": format == "int8"}
    constants |= {"largest": reference.LARGEST[format], "smallest_row": reference.SMALLEST_ROW}
    numbers = {"x_stride": True, "k": True}
    ptx = compile_kernel(_row_quantize_kernel, sm, pointers, numbers, constants, warps)
    assert "ld.global.v4.b32" in ptx  # 8 bf16 at a time
    if format == "fp8":
        assert "cvt.rn.satfinite.e4m3x2" in ptx


def test_tile_by_rows():
    from qwen_l40s.optimizations.kernels.scaled_gemm import TILES, TILES_SM90, choose_tile

    assert choose_tile(1, (8, 9)) is choose_tile(16, (8, 0)) is TILES[0][1]
    assert choose_tile(17, (8, 9)) is TILES[1][1]
    assert choose_tile(4296, (8, 9)) is choose_tile(513, (12, 0)) is TILES[-1][1]
    assert choose_tile(1, (9, 0)) is TILES_SM90[0][1]
    assert choose_tile(4296, (9, 0)) is TILES_SM90[-1][1]
