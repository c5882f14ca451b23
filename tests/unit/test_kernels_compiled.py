"""The Triton kernels compiled for cards that are not there: they fit, and use the tensor cores."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from qwen_l40s.optimizations import kernels
from qwen_l40s.spec.formats import RowFormat

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(kernels.missing()), reason=kernels.missing() or "-"),
    pytest.mark.skipif(kernels.interpreted(), reason="TRITON_INTERPRET=1 compiles nothing"),
]

FORMATS = ("fp8", "int8")
FP8, INT8, ROTATED = RowFormat("fp8"), RowFormat("int8"), RowFormat("int8", 256)
OPERAND = {"fp8": "fp8e4nv", "int8": "i8", "bf16": "bf16"}
STREAMS = ("text", "image")
COUNTS = ("batch", "text", "image", "zero_from", "gap")
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


def case(sm, *values, usual=True):
    """`make test` compiles what an L40S usually runs, `make test-all` all that a card can run."""
    return pytest.param(sm, *values, marks=[] if usual and sm == 89 else pytest.mark.slow)


def tiles():
    """(compute capability, operands, tile, rank of LoRAs, whether SwiGLU is in the epilogue) of all
    that a card can be given.
    """
    if kernels.missing():
        return []
    from qwen_l40s.optimizations.kernels.scaled_gemm import (
        TILE_BF16,
        TILES,
        TILES_SM90,
        TILES_SM90_INT8,
    )

    cases = [(89, format, tile) for format in FORMATS for _, tile in TILES]
    cases += [(90, "fp8", tile) for _, tile in TILES_SM90]
    cases += [(90, "int8", tile) for _, tile in TILES_SM90_INT8]
    cases.append((80, "int8", TILES[-1][1]))  # where there is no e4m3
    cases += [(sm, "bf16", TILE_BF16) for sm in (89, 80, 90)]
    ranks = {"bf16": (64, 40)}  # without LoRAs cuBLAS multiplies
    return [
        case(*values, rank, swiglu, usual=rank != 40 and values[2] in (TILES[-1][1], TILE_BF16))
        for values in cases
        for rank in ranks.get(values[1], (0, 64, 40))
        for swiglu in ((False, True) if values[1] == "int8" and rank != 40 else (False,))
    ]


@pytest.mark.parametrize(("sm", "format", "tile", "rank", "swiglu"), tiles(), ids=str)
def test_scaled_gemm_fits_the_card_and_uses_its_tensor_cores(
    compile_kernel, sm, format, tile, rank, swiglu
):
    from triton import language

    from qwen_l40s.optimizations.kernels.scaled_gemm import _scaled_gemm_kernel

    operand = OPERAND[format]
    pointers = {"a_ptr": operand, "b_ptr": operand, "out_ptr": "bf16", "bias_ptr": "bf16"}
    constants = {"k": 3072, "group_m": 8, "unroll": tile.unroll, "gelu": format == "bf16"}
    constants |= {"rank": rank, "block_rank": 16 if rank % 32 else 32, "swiglu": swiglu}
    scales, low_rank = ("scale_a_ptr", "scale_b_ptr"), ("t_ptr", "up_ptr")
    pointers |= dict.fromkeys(scales if format != "bf16" else (), "fp32")
    pointers |= dict.fromkeys(low_rank if rank else (), "bf16")
    constants |= dict.fromkeys({*scales, *low_rank} - {*pointers})
    constants |= {"block_m": tile.m, "block_n": tile.n, "block_k": tile.k}
    constants["sum_dtype"] = language.int32 if format == "int8" else language.float32
    numbers = {"m": False, "n": True, "t_stride": True}
    ptx = compile_kernel(
        _scaled_gemm_kernel, sm, pointers, numbers, constants, tile.warps, tile.stages
    )
    product = {"fp8": r"f32\.e4m3\.e4m3", "int8": r"s32\.s8\.s8", "bf16": r"f32\.bf16\.bf16"}
    instruction = r"mma\.sync" if sm < 90 else r"wgmma\.mma_async"
    assert re.search(rf"{instruction}\S*\.{product[format]}", ptx)
    # Nothing is widened before it; what LoRAs add is bf16.
    assert bool(re.search(r"mma\S*\.(f16|bf16)\.", ptx)) == bool(rank)
    assert "cp.async.cg.shared.global" in ptx  # 16 bytes at a time, loaded ahead


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("sm", [case(89), case(80), case(90)])
def test_low_rank_rows_fits_the_card_and_uses_its_tensor_cores(compile_kernel, sm, splits):
    from qwen_l40s.optimizations.kernels.low_rank import TILE, TILE_OF_MANY, _low_rank_rows_kernel

    for tile in (TILE, TILE_OF_MANY):
        names = ("x_ptr", "text_down_ptr", "image_down_ptr", "out_ptr")
        constants = {"k": 12288, "text_rank": 192, "image_rank": 192, "splits": splits}
        constants |= {"block_m": tile.m, "block_n": tile.n, "block_k": tile.k}
        numbers = {"text": False, "image": False, "x_stride": True, "out_stride": True}
        numbers["part_stride"] = True
        pointers = dict.fromkeys(names, "bf16")
        if splits > 1:
            pointers |= {"part_ptr": "fp32", "ticket_ptr": "i32"}
        else:
            constants |= {"part_ptr": None, "ticket_ptr": None}
        ptx = compile_kernel(
            _low_rank_rows_kernel, sm, pointers, numbers, constants, tile.warps, tile.stages
        )
        instruction = r"mma\.sync" if sm < 90 else r"wgmma\.mma_async"
        assert re.search(rf"{instruction}\S*\.f32\.bf16\.bf16", ptx)
        assert "cp.async.cg.shared.global" in ptx  # 16 bytes at a time, loaded ahead
        assert ("atom.global.gpu.acq_rel" in ptx) == (splits > 1)


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("sm", [case(89), case(80), case(90)])
def test_guided_rows_fits_the_card(compile_kernel, sm, merged):
    from qwen_l40s.optimizations.kernels.guided_rows import _guided_rows_kernel

    sums = {f"{name}_lse_ptr": "fp32" for name in ("shared", "positive", "negative")}
    pointers = {"out_ptr": "bf16", "positive_ptr": "bf16"}
    pointers |= {"shared_ptr": "bf16", **sums} if merged else {}
    names = ("tokens", "first", "second", "guided", "of_item", "of_head", "of_token")
    constants = {"scale": 5.0, "tau": 2.5, "alpha": 0.25, "heads": 24, "head_dim": 128}
    constants |= {"some": 32, "wide": 128} if merged else {"some": 1, "wide": 4096}
    constants |= {} if merged else dict.fromkeys(("shared_ptr", *sums))
    ptx = compile_kernel(
        _guided_rows_kernel, sm, pointers, dict.fromkeys(names, False), constants, warps=8
    )
    assert re.search(r"ld\.global\S*\.v[24]\.b(32|64)", ptx)  # 8 or 16 bytes for each thread


# Compute capability, format and width of a row: in three parts, in one that fits, in one that is
# masked.
ROWS = [(89, FP8, 12288), (89, INT8, 768), (89, FP8, 4096), (89, INT8, 16384)]
ROWS += [(89, FP8, 12000), (80, INT8, 12288), (90, FP8, 12288)]
ROWS += [(89, ROTATED, 3072), (89, ROTATED, 12288), (90, ROTATED, 12288)]
ROWS += [(89, RowFormat("int8", 16), 12000), (89, RowFormat("int8", 1024), 16384)]
ROWS = [case(*row, usual=row[2] in (3072, 12288)) for row in ROWS]


@pytest.mark.parametrize("name", ["row_quantize", "gelu_quantize"])
@pytest.mark.parametrize(("sm", "format", "k"), ROWS, ids=str)
def test_quantization_holds_a_row_in_registers(compile_kernel, name, sm, format, k):
    from qwen_l40s.optimizations.kernels import rows

    part, parts, warps = rows.launch_shape(k, format.rotation > 0)
    pointers = {"x_ptr": "bf16", "q_ptr": OPERAND[format.storage], "scale_ptr": "fp32"}
    constants = {"k": k, "part": part, "parts": parts, **rows.quantization(format)}
    kernel = getattr(rows, f"_{name}_kernel")
    numbers = {"x_stride": True, "cut": False, "gap": False}
    # `exact` is for weights.
    form = "keep" if name == "gelu_quantize" else "exact"
    for chosen in (False, True):
        ptx = compile_kernel(kernel, sm, pointers, numbers, constants | {form: chosen}, warps)
        assert_wide(ptx, format, masked_at=None if part * parts == k else k)
        if form == "exact" and chosen:
            assert "div.full" not in ptx and "fma" not in ptx


SWIGLU = [(89, None, 12288), (89, FP8, 12288), (89, ROTATED, 12288), (80, INT8, 12000)]
SWIGLU = [case(*row, usual=row[1] is ROTATED) for row in SWIGLU]


@pytest.mark.parametrize(("sm", "format", "k"), SWIGLU, ids=str)
def test_swiglu_holds_two_rows_in_registers(compile_kernel, sm, format, k):
    from qwen_l40s.optimizations.kernels import rows

    part, parts, warps = rows.launch_shape(k, format is not None and format.rotation > 0)
    pointers = {"gate_ptr": "bf16", "up_ptr": "bf16"}
    constants = {"k": k, "part": part, "parts": parts, **rows.quantization(format)}
    if format is None:
        constants |= {"q_ptr": None, "scale_ptr": None}
    else:
        pointers |= {"q_ptr": OPERAND[format.storage], "scale_ptr": "fp32"}
    numbers = {"stride": True, "cut": False, "gap": False}
    for keep in (True,) if format is None else (False, True):
        constants["keep"] = keep
        kernel = rows._swiglu_quantize_kernel
        ptx = compile_kernel(kernel, sm, pointers, numbers, constants, warps)
        masked_at = None if part * parts == k else k
        assert_wide(ptx, format, masked_at=masked_at) if format else None
        assert "ld.global.v4.b32" in ptx


@pytest.mark.parametrize(("sm", "bits"), [case(89, 4), case(89, 6), case(80, 4)])
def test_decode_weight_reads_and_writes_wide(compile_kernel, sm, bits):
    from qwen_l40s.optimizations.kernels import scaled_gemm

    unit = 16
    pointers = {"codes_ptr": "i8", "scale_ptr": "u8", "out_ptr": "i8"}
    constants = {"k": 12288, "group": unit, "unit": unit, "bits": bits, "is_e4m3": True}
    constants["at_once"] = scaled_gemm.DECODED_AT_ONCE // unit
    if bits == 4:
        pointers["codebook_ptr"] = "fp32"
    else:
        constants["codebook_ptr"] = None
    kernel, warps = scaled_gemm._decode_weight_kernel, scaled_gemm.DECODING_WARPS
    ptx = compile_kernel(kernel, sm, pointers, {"units": False}, constants, warps)
    assert "st.global.v4.b32" in ptx
    assert "ld.global.v2.b32" in ptx


# sm_80 has nothing that converts to e4m3.
FORMS = [(sm, format) for sm in (89, 80, 90) for format in (None, FP8, INT8, ROTATED)]
FORMS.remove((80, FP8))
FORMS = [case(*form) for form in FORMS]


@pytest.mark.parametrize(("sm", "format"), FORMS, ids=str)
def test_residual_norm_holds_a_row_in_registers(compile_kernel, sm, format):
    ptx = compile_kernel(*residual_norm_of(sm, 3072, "bf16", format, "residual and norm"))
    assert_wide(ptx, format)


@pytest.mark.parametrize(
    ("width", "dtype", "format", "steps"),
    [
        (3072, "bf16", None, "residual"),
        (3072, "bf16", None, "norm"),
        (3072, "bf16", FP8, "norm"),
        (3072, "bf16", INT8, "norm"),
        (3072, "bf16", ROTATED, "norm"),
        (3072, "fp32", None, "residual and norm"),
        (3072, "fp32", FP8, "residual and norm"),
        (4096, "bf16", FP8, "residual and norm"),
        (16384, "bf16", FP8, "residual and norm"),
        (16384, "fp32", None, "residual and norm"),
    ],
    ids=str,
)
def test_other_forms_of_residual_norm_fit_an_l40s(compile_kernel, width, dtype, format, steps):
    ptx = compile_kernel(*residual_norm_of(89, width, dtype, format, steps))
    assert_wide(ptx, format)


def residual_norm_of(sm, width, dtype, format, steps):
    """What `compile_kernel` takes; `steps` are those that the launch asks for."""
    from qwen_l40s.optimizations.kernels import rows
    from qwen_l40s.optimizations.kernels.residual_norm import _residual_norm_kernel

    part, parts, warps = rows.launch_shape(width, format is not None and format.rotation > 0)
    pointers = {"x_ptr": dtype}
    constants = {
        "width": width,
        "eps": 1e-6,
        "part": part,
        "parts": parts,
        **rows.quantization(format),
    }
    residual = ("branch_ptr", "text_gate_ptr", "image_gate_ptr")
    norm = ("text_norm_ptr", "image_norm_ptr", "h_ptr")
    pointers |= dict.fromkeys(residual if "residual" in steps else (), dtype)
    pointers |= dict.fromkeys(norm if "norm" in steps else (), dtype)
    if format is not None:
        pointers |= {"h_ptr": OPERAND[format.storage], "scale_ptr": "fp32"}
    pointers |= {"plain_ptr": dtype} if "plain" in steps else {}
    constants |= dict.fromkeys({*residual, *norm, "scale_ptr", "plain_ptr"} - {*pointers})
    strides = [f"{stream}_{step}_stride" for stream in STREAMS for step in ("gate", "norm")]
    numbers = dict.fromkeys(strides, True) | dict.fromkeys(COUNTS, False)
    return _residual_norm_kernel, sm, pointers, numbers, constants, warps


@pytest.mark.parametrize(
    ("sm", "heads", "head_dim", "dtype"),
    [
        (89, 24, 128, "bf16"),
        case(80, 24, 128, "bf16"),
        case(90, 24, 128, "bf16"),
        (89, 24, 128, "fp32"),
        (89, 24, 256, "fp32"),
        (89, 16, 64, "fp16"),
        (89, 3, 16, "bf16"),
    ],
    ids=str,
)
def test_qk_norm_rope_moves_whole_heads(compile_kernel, sm, heads, head_dim, dtype):
    from qwen_l40s.optimizations.kernels.qk_norm_rope import _qk_norm_rope_kernel, launch_shape

    together, warps = launch_shape(heads, head_dim)
    names = _qk_norm_rope_kernel.arg_names
    pointers = {name: dtype for name in names if name.endswith("_ptr")}
    pointers |= {"cos_ptr": "fp32", "sin_ptr": "fp32"}
    numbers = {name: True for name in names if name.endswith("_stride")}
    numbers |= {"joint": False, "text": False, "first": False, "queries": False}
    constants = {"heads": heads, "head_dim": head_dim, "block_heads": together}
    constants |= {"eps": 1e-6, "one_rotation": True}
    ptx = compile_kernel(_qk_norm_rope_kernel, sm, pointers, numbers, constants, warps)
    if together > 1:  # a program of one narrow head has fewer bytes than that for a thread
        assert "ld.global.v4.b32" in ptx
        assert set(re.findall(r"st\.global\S*", ptx)) == {"st.global.v4.b32"}


def assert_wide(ptx, format, masked_at=None):
    """Rows are read 16 bytes at a time and written 8 or more elements at a time.

    8 quantized elements are 8 bytes; only the scale is alone. An instruction makes two e4m3, and
    only rows that are `masked_at` their end look where that is.
    """
    assert set(re.findall(r"ld\.global\S*", ptx)) == {"ld.global.v4.b32"}
    stores = re.findall(r"st\.global\S*", ptx)
    alone = stores.count("st.global.b32")
    assert alone == (format is not None)
    quantized = {"st.global.v2.b32"} if format is not None else set()
    assert {*stores} - {"st.global.b32"} <= {"st.global.v4.b32", *quantized}
    if format == FP8:
        assert "cvt.rn.satfinite.e4m3x2" in ptx
    ends = re.findall(r"setp\.lt\S*\s.*, (\d{3,});", ptx)
    assert {*map(int, ends)} == ({masked_at} if masked_at else set())


# Of 1.x in full and in half the image's size, and of 2.1.
WIDTHS = [case(89, width, dtype) for width in (96, 192, 144) for dtype in ("bf16", "fp32")]
WIDTHS += [case(sm, width, "bf16") for sm in (80, 90) for width in (96, 1152)]


@pytest.mark.parametrize(("sm", "width", "dtype"), WIDTHS)
def test_what_is_between_convolutions_moves_whole_pixels(compile_kernel, sm, width, dtype):
    from qwen_l40s.optimizations.kernels import vae_pixels

    block = 1 << (width - 1).bit_length()
    sizes = dict.fromkeys(vae_pixels.SIZES, False)
    shape = {"channels": width, "block": block, "each": vae_pixels.BLOCK // block}
    alike = {"doubled": False, "shared": 4, "last": 0}
    doubled = {"doubled": True, "shared": 4, "last": 1}
    forms = [
        (vae_pixels._norm_kernel, {"silu": True}, ("bias_ptr",)),
        (vae_pixels._norm_kernel, {"silu": True}, ()),
        (vae_pixels._sum_kernel, alike, ("other_ptr",)),
        (vae_pixels._sum_kernel, doubled, ()),
        (vae_pixels._sum_kernel, doubled, ("other_ptr",)),
    ]
    for kernel, constants, given in forms:
        names = [name for name in kernel.arg_names if name.endswith("_ptr")]
        left_out = {"bias_ptr", "other_ptr"} & {*names} - {*given}
        left_out -= {"bias_ptr"} if kernel is vae_pixels._sum_kernel else set()
        pointers = {name: dtype for name in names if name not in left_out}
        numbers = {name: value for name, value in sizes.items() if name in kernel.arg_names}
        constants = constants | shape | dict.fromkeys(left_out)
        ptx = compile_kernel(kernel, sm, pointers, numbers, constants, vae_pixels.WARPS)
        assert "ld.global.v4.b32" in ptx
        assert set(re.findall(r"st\.global\S*", ptx)) == {"st.global.v4.b32"}


COMPILES = """
import hashlib, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from qwen_l40s.optimizations.kernels.rows import _row_quantize_kernel as kernel
types = {"x_ptr": "*bf16", "q_ptr": "*i8", "scale_ptr": "*fp32", "x_stride": "i32"}
types |= {"cut": "i32", "gap": "i32"}
constants = {"k": 3072, "largest": 127.0, "smallest_row": 1e-12, "to_integer": True}
constants |= {"rotation": 256, "part": 1024, "parts": 3, "exact": False}
source = ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), constexprs=constants)
built = triton.compile(source, target=GPUTarget("cuda", 89, 32), options={"num_warps": 4})
print(hashlib.sha256(built.asm["cubin"]).hexdigest())
"""


def test_two_processes_share_a_cache(tmp_path):
    """Whichever of them is first: both have the kernel, and a third compiles nothing."""
    path = os.pathsep.join(sys.path)
    given = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}

    def start():
        command = [sys.executable, "-c", COMPILES]
        return subprocess.Popen(command, env=given, stdout=subprocess.PIPE, text=True)

    both = [start(), start()]
    found = {process.communicate()[0] for process in both}
    assert not any(process.returncode for process in both) and len(found) == 1
    files = {it: it.stat().st_mtime_ns for it in tmp_path.rglob("*") if it.is_file()}
    assert {start().communicate()[0]} == found and any(it.suffix == ".cubin" for it in files)
    assert {it: it.stat().st_mtime_ns for it in tmp_path.rglob("*") if it.is_file()} == files


def test_numbers_of_tokens_make_no_kernels_of_their_own():
    """Triton compiles again where a number turns 1 or a multiple of 16, if it is not told."""
    from qwen_l40s.optimizations.kernels.qk_norm_rope import _qk_norm_rope_kernel
    from qwen_l40s.optimizations.kernels.residual_norm import _residual_norm_kernel

    def free(kernel):
        return {param.name for param in kernel.params if param.do_not_specialize}

    assert free(_residual_norm_kernel) == set(COUNTS)
    assert free(_qk_norm_rope_kernel) == {"joint", "text", "first", "queries"}


def test_tile_by_rows():
    from qwen_l40s.optimizations.kernels.scaled_gemm import (
        TILE_BF16,
        TILES,
        TILES_SM90,
        TILES_SM90_INT8,
        choose_tile,
    )

    int8, fp8 = torch.int8, torch.float8_e4m3fn

    assert choose_tile(1, (8, 9), fp8) is choose_tile(16, (8, 0), fp8) is TILES[0][1]
    assert choose_tile(17, (8, 9), fp8) is TILES[1][1]
    assert choose_tile(4296, (8, 9), fp8) is choose_tile(513, (12, 0), fp8) is TILES[-1][1]
    assert choose_tile(1, (9, 0), fp8) is TILES_SM90[0][1]
    assert choose_tile(4296, (9, 0), fp8) is TILES_SM90[-1][1]
    assert choose_tile(4296, (9, 0), int8) is TILES_SM90_INT8[-1][1]
    assert choose_tile(4296, (8, 9), int8) is TILES[-1][1]
    assert choose_tile(1100, (9, 0), int8) is TILES_SM90_INT8[-2][1]
    assert choose_tile(4296, (9, 0), torch.bfloat16) is TILE_BF16
