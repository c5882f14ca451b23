"""What is compiled ahead: the kernels of the first pass, and no error of it shows before."""

import itertools
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
pytest.importorskip("diffusers")

import test_single_stream as single
from test_block import DIM, HEAD_DIM, LAYERS, Layers, attend, new_block
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from qwen_l40s.caches import forget
from qwen_l40s.optimizations import fused, kernels, linear, warm_up
from qwen_l40s.optimizations.blocks.block import BlockExecutor, LayerTensors, Step
from qwen_l40s.optimizations.blocks.workspace import Prefix
from qwen_l40s.optimizations.kernels import compiler, scaled_gemm
from qwen_l40s.optimizations.linear import Gemm, choose_gemm
from qwen_l40s.optimizations.modulation import Entry
from qwen_l40s.optimizations.reference import Rotary, Tokens
from qwen_l40s.verdict import Verdict

pytestmark = [
    pytest.mark.skipif(kernels.interpreted(), reason="TRITON_INTERPRET=1 compiles nothing"),
    pytest.mark.skipif(not hasattr(triton, "AsyncCompileMode"), reason="needs Triton 3.5"),
]

CARD = torch.device("cuda", 0)
COMPILE, ELSEWHERE = triton.compiler.compile, compiler.compile_elsewhere
BACKENDS = {"dense": None, "rotated": ("int8", "triton"), "fp8": ("fp8", "scaled_mm")}
fresh = itertools.count(70)  # indices of cards for which nothing is compiled yet


@pytest.fixture(autouse=True)
def nothing_rehearsed(monkeypatch):
    monkeypatch.setattr(warm_up, "_rehearsed", set())
    with torch.inference_mode():
        yield


@pytest.fixture
def no_card(monkeypatch):
    return put_card(monkeypatch)


def put_card(monkeypatch):
    """An H100 that is not there; gives the names of the kernels that are compiled for it."""
    index, compiled = next(fresh), []
    active = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: index,
        get_current_stream=lambda device: 0,
        launcher_cls=lambda *_: None,
    )
    monkeypatch.setattr(driver, "_active", active)
    kernel = SimpleNamespace(
        run=lambda *_: None, function=0, packed_metadata=0, src=None, metadata=None
    )

    def compile_kernel(source, **_):
        compiled.append(source.fn.__name__)
        return kernel

    monkeypatch.setattr("triton.compiler.compile", compile_kernel)
    monkeypatch.setattr(compiler, "compile_elsewhere", None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: index)
    monkeypatch.setattr(scaled_gemm, "capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(warm_up, "choose_ops", lambda _: fused._triton())
    return compiled


class OnDevice(Layers):
    def __init__(self, block, kind, device, gemm):
        super().__init__(block, dict.fromkeys(LAYERS, kind))
        self.gemms = {gemm.format: gemm} if gemm else {}
        self.weights = {
            layer: tuple(part.to(device) for part in parts) for layer, parts in self.weights.items()
        }
        block.to(device)

    def tensors(self, layer, like):
        return nullcontext(LayerTensors(*self.weights.get(layer, (layer.weight, None)), layer.bias))


class Chain:
    def __init__(self, parts):
        self._parts = {layer: part for part in parts for layer in part.kinds}
        self.gemm = parts[0].gemm
        self.norm_weight = parts[0].norm_weight

    def __getattr__(self, name):
        return lambda layer, *given: getattr(self._parts[layer], name)(layer, *given)


def first_pass(layers, blocks, ops, device, text):
    tokens = Tokens(1, text, 2304, 2304)

    def empty(*shape):
        return torch.zeros(shape, dtype=torch.bfloat16, device=device)

    rotary = Rotary(*(empty(1, tokens.joint, HEAD_DIM // 2) for _ in range(2)))
    entry = Entry(*(empty(len(blocks), 1, 6 * DIM) for _ in range(2)))
    executor = BlockExecutor(layers, ops, attend, None, {})
    executor.run_all(blocks, empty(tokens.rows, DIM), Step(tokens, rotary, None), entry)


@pytest.mark.parametrize("text", [90, 20])
@pytest.mark.parametrize("kind", BACKENDS)
def test_a_first_pass_compiles_nothing_that_is_not_compiled_ahead(no_card, monkeypatch, kind, text):
    blocks, cpu = [new_block(0, torch.bfloat16), new_block(1, torch.bfloat16)], torch.device("cpu")
    gemm = BACKENDS[kind] and Gemm(*BACKENDS[kind], "", "triton")
    chain = Chain([OnDevice(block, kind, cpu, gemm) for block in blocks])
    given = chain, blocks, torch.bfloat16, cpu
    warm_up.warm_up(CARD, lambda: warm_up.rehearse(*given)).result()
    ahead = sorted(no_card)
    expected = ["_qk_norm_rope_kernel", *["_residual_norm_kernel"] * 3]
    if kind != "dense":
        expected += ["_gelu_quantize_kernel", *["_row_quantize_kernel"] * 2]
    if kind == "rotated":  # two tiles of text and one of the image, of two widths
        expected += ["_scaled_gemm_kernel"] * 6
    assert ahead == sorted(expected)
    monkeypatch.setattr(torch, "_scaled_mm", lambda *_, out, **__: out)
    first_pass(chain, blocks, fused._triton(), cpu, text)
    assert sorted(no_card) == ahead
    warm_up.warm_up(CARD, lambda: warm_up.rehearse(*given)).result()
    assert sorted(no_card) == ahead


@pytest.mark.parametrize("text", [90, 20])
@pytest.mark.parametrize("kind", ["dense", "int8"])
def test_a_first_pass_of_2_1_compiles_nothing_that_is_not_compiled_ahead(no_card, kind, text):
    """Of the text alone, and of the image beside what is kept of it."""
    cpu, blocks = torch.device("cpu"), [single.new_block(True, seed).bfloat16() for seed in (0, 1)]
    parts = [single.Layers(block, kind) for block in blocks]
    parts[0].gemms = {"int8": Gemm("int8", "triton", "", "triton")}
    layers = Chain(parts)
    warm_up.warm_up(CARD, lambda: warm_up.rehearse(layers, blocks, torch.bfloat16, cpu)).result()
    ahead = sorted(no_card)

    def empty(*shape):
        return torch.zeros(shape, dtype=torch.bfloat16)

    heads = single.HEADS, single.HEAD_DIM
    kept = [Prefix(*(empty(1, text, *heads) for _ in range(2))) for _ in blocks]
    for rows, prefixes in ((text, None), (2304, kept)):
        rotary = Rotary(*(empty(1, rows, single.HEAD_DIM // 2) for _ in range(2)))
        entry = Entry(*(empty(len(blocks), 1, 6 * single.DIM) for _ in range(2)))
        step = Step(Tokens(1, 0, rows, rows), rotary, None)
        executor = BlockExecutor(layers, fused._triton(), attend, None, {})
        executor.run_all(blocks, empty(rows, single.DIM), step, entry, prefixes=prefixes)
    assert sorted(no_card) == ahead


def test_the_trial_of_the_blocks_kernels_is_compiled_ahead(no_card):
    warm_up.warm_up(CARD, fused.prepare_trial).result()
    assert sorted(no_card) == ["_qk_norm_rope_kernel", "_residual_norm_kernel"]


@pytest.fixture
def launch(no_card):
    return prepare


def prepare(device, columns=512):
    from qwen_l40s.optimizations.kernels.rows import row_quantize
    from qwen_l40s.optimizations.reference import QuantizedRows
    from qwen_l40s.spec.formats import RowFormat

    x = torch.zeros(8, columns, dtype=torch.bfloat16, device=device)
    out = QuantizedRows(x.to(torch.int8), x.new_empty(8, 1, dtype=torch.float32), 8)
    return row_quantize(x, RowFormat("int8"), out).prepared()


def test_loads_compile_in_their_order_and_each_kernel_once(launch, monkeypatch):
    go_on, compiled, compile_kernel = threading.Event(), [], triton.compiler.compile

    def slowly(source, **how):
        assert go_on.wait(60)
        compiled.append(max(it for it in source.constants.values() if type(it) is int))
        return compile_kernel(source, **how)

    monkeypatch.setattr("triton.compiler.compile", slowly)
    loads = [
        warm_up.warm_up(CARD, lambda widths=widths: [launch("meta", it) for it in widths])
        for widths in ((512, 1024, 2048), (1024, 4096), (512, 8192))
    ]
    go_on.set()
    for load in loads:
        load.result()
    assert (sorted(compiled[:3]), compiled[3:]) == ([512, 1024, 2048], [4096, 8192])


def test_what_is_compiled_for_is_not_kept_alive_meanwhile(launch, monkeypatch):
    compiling, go_on = threading.Event(), threading.Event()
    models = [torch.nn.Linear(width, 1) for width in (1024, 2048)]
    kernel, prepared = SimpleNamespace(src=None, metadata=None), []

    def compile_kernel(*_, **__):
        compiling.set()
        assert go_on.wait(60)
        return kernel

    monkeypatch.setattr("triton.compiler.compile", compile_kernel)

    def work(model):
        prepared.append(model.in_features)
        launch("meta", model.in_features)

    known = [weakref.ref(model) for model in models]
    first, queued = (warm_up.warm_up(CARD, work, model) for model in models)
    assert compiling.wait(60)
    del models
    assert known[1]() is None, "it waits for its turn"
    until = time.monotonic() + 60
    while known[0]() is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert known[0]() is None and not first.done()
    go_on.set()
    queued.result()
    assert prepared == [1024]


ENDS = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor

import pytest, triton

sys.path[:0] = sys.argv[1:]
from test_warm_up import CARD, prepare, put_card
from qwen_l40s.optimizations.warm_up import warm_up

put_card(pytest.MonkeyPatch())
probe, compiling, queued = ThreadPoolExecutor(1), threading.Event(), threading.Event()

def until_the_end(*_, **__):
    print("compiles", flush=True)
    compiling.set()
    while True:
        probe.submit(int)  # raises once this process ends
        time.sleep(0.01)

triton.compiler.compile = until_the_end
warm_up(CARD, lambda: ([prepare("meta", 256 * i) for i in range(1, 9)], queued.set()))
warm_up(CARD, lambda: prepare("meta", 4096))
assert queued.wait(60) and compiling.wait(60)
print("ends")
"""


@pytest.mark.slow
def test_a_process_that_ends_compiles_nothing_that_is_queued():
    folders = map(str, Path(__file__).parents[:2])
    done = subprocess.run([sys.executable, "-c", ENDS, *folders], capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert "ends" in done.stdout and done.stdout.count("compiles") <= 4


def test_a_kernel_that_two_threads_compile_stays_as_long_as_it_is_launched(launch, monkeypatch):
    """Since 3.8 Triton unloads a kernel that nobody holds, and it holds the one that came last."""
    begun, go_on, both = threading.Event(), threading.Event(), []

    class Kernel:
        run, function, packed_metadata, src, metadata = staticmethod(print), 0, 0, None, None

    def compile_kernel(*_, **__):
        kernel = Kernel()
        both.append(weakref.ref(kernel))
        if len(both) == 1:
            begun.set()
            assert go_on.wait(60)
        return kernel

    monkeypatch.setattr("triton.compiler.compile", compile_kernel)
    prepared = []
    needs = threading.Thread(target=lambda: prepared.append(launch("cpu")))
    needs.start()
    assert begun.wait(60)

    def work():
        launch("meta")
        go_on.set()
        needs.join()

    warm_up.warm_up(CARD, work).result()
    assert len(both) == 2 and both[0]() is not None
    prepared.clear()
    assert both[0]() is None


def test_an_error_of_the_compiler_shows_where_the_kernel_is_needed(launch, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("ptxas died")

    monkeypatch.setattr("triton.compiler.compile", fails)
    warm_up.warm_up(CARD, lambda: launch("meta")).result()
    with pytest.raises(RuntimeError, match="ptxas died"):
        launch("cpu")


def test_threads_take_short_turns_while_kernels_are_compiled(launch, monkeypatch):
    kernel, turns = SimpleNamespace(src=None, metadata=None), []

    def compile_kernel(*_, **__):
        turns.append(sys.getswitchinterval())
        return kernel

    monkeypatch.setattr("triton.compiler.compile", compile_kernel)
    usual = sys.getswitchinterval()
    warm_up.warm_up(CARD, lambda: launch("meta")).result()
    assert turns[0] < usual == sys.getswitchinterval()


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Triton's own compiler with an empty cache; gives whether each kernel was found there."""
    put_card(monkeypatch)
    monkeypatch.setattr("triton.compiler.compile", COMPILE)
    monkeypatch.setattr(compiler, "compile_elsewhere", ELSEWHERE)
    monkeypatch.setattr(compiler, "_own", threading.local())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = []
    listen = lambda cache_hit, **_: found.append(cache_hit)  # noqa: E731
    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    return found


@pytest.mark.slow
def test_another_process_compiles_what_triton_has_not_kept(kept, monkeypatch):
    def load():
        trials = fused.prepare_trial, partial(linear.prepare_trial, "int8")
        warm_up.warm_up(CARD, lambda: [prepare() for prepare in trials]).result()

    load()
    assert kept == [True] * 4
    put_card(monkeypatch)  # another one like it, for which nothing is loaded
    monkeypatch.setattr("triton.compiler.compile", COMPILE)
    monkeypatch.setattr(compiler, "compile_elsewhere", None)
    load()
    assert kept == [True] * 8


@pytest.mark.parametrize(
    "code", ["", "import time; time.sleep(1)", "raise SystemExit(1)", "print()"]
)
def test_a_process_that_ends_early_leaves_the_kernel_to_this_one(kept, monkeypatch, code):
    """And its pipes are closed before another one begins: none warns that it was left open."""
    monkeypatch.setattr(compiler, "CODE", code)
    monkeypatch.setattr(warm_up, "_compilers", ThreadPoolExecutor(1))
    for columns in (512, 1024):
        warm_up.warm_up(CARD, partial(prepare, "meta", columns)).result()
    assert kept == [False] * 2


def test_nothing_is_compiled_without_a_card():
    assert warm_up.warm_up(torch.device("cpu"), None) is None


@pytest.fixture
def compiled():
    from triton import knobs

    found = []
    knobs.runtime.jit_post_compile_hook = lambda **of: found.append(of["repr"])
    yield found
    knobs.runtime.jit_post_compile_hook = None


def taken(device):
    """How often torch has taken memory of a card: what takes none in another thread."""
    return torch.cuda.memory_stats(device)["allocation.all.allocated"]


@pytest.mark.cuda
@pytest.mark.parametrize("format", [None, "int8", "fp8"])
def test_a_trial_launches_what_is_compiled_ahead_without_memory(compiled, format):
    device = torch.device("cuda", torch.cuda.current_device())
    torch.ones(1, device=device)
    before = taken(device)
    prepare = partial(linear.prepare_trial, format) if format else fused.prepare_trial
    warm_up.warm_up(device, prepare).result()
    assert taken(device) == before
    compiled.clear()
    forget()
    if format:
        assert choose_gemm(format, device, backend="triton").row_quantizer == "triton"
    else:
        assert not isinstance(fused.choose_ops(device), Verdict)
    assert compiled == []


@pytest.mark.cuda
@pytest.mark.parametrize("kind", BACKENDS)
def test_a_card_compiles_nothing_in_its_first_pass(kind, compiled):
    device = torch.device("cuda", torch.cuda.current_device())
    blocks = [new_block(0, torch.bfloat16), new_block(1, torch.bfloat16)]
    gemm = BACKENDS[kind] and choose_gemm(BACKENDS[kind][0], device)
    chain = Chain([OnDevice(block, kind, device, gemm) for block in blocks])
    fused.choose_ops(device)  # tried by who calls, as the GEMM is
    given, before = (chain, blocks, torch.bfloat16, device), taken(device)
    warm_up.warm_up(device, lambda: warm_up.rehearse(*given)).result()
    assert taken(device) == before
    compiled.clear()
    for text in (90, 20):
        first_pass(chain, blocks, fused.choose_ops(device), device, text)
    torch.cuda.synchronize()
    assert compiled == []
