"""Quantized linear layers: the numbers of every backend, and which backend is chosen and why."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from qwen_l40s import UnavailableError
from qwen_l40s.caches import forget
from qwen_l40s.machine.card import State
from qwen_l40s.optimizations import linear, reference
from qwen_l40s.optimizations.linear import Gemm, choose_gemm, dense_linear, known_gemm
from qwen_l40s.spec.formats import FORMATS, RowFormat

CPU = torch.device("cpu")
CARD = torch.device("cuda", 0)
PAIRS = [(format, backend) for format, form in FORMATS.items() for backend in form.gemms]
# What rounding the result leaves of it; rowwise scaled_mm writes bf16 whatever is asked for.
ROUNDING = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 1e-6}
on_card = [
    pytest.mark.cuda,
    # Triton 3.9 announces another default with every kernel.
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]
# Triton and comfy-kitchen need a card; tests/interpreted_kernels.py has Triton without one.
CASES = [pytest.param(*pair, CPU) for pair in PAIRS if pair[1] not in ("triton", "kitchen")]
CASES += [pytest.param(*pair, CARD, marks=on_card) for pair in PAIRS]
on_each = pytest.mark.parametrize(("format", "backend", "device"), CASES, ids=str)


@pytest.fixture(autouse=True)
def nothing_remembered():
    forget()
    yield
    forget()


def random(*shape, device=CPU):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(device)


def runnable(format, backend, device):
    """The GEMM, or a visible skip with the reason why this machine cannot."""
    try:
        return choose_gemm(format, device, backend=backend)
    except UnavailableError as error:
        pytest.skip(str(error))


def layer(n, k, format, device):
    weight, scale = reference.row_quantize(random(n, k, device=device), RowFormat(format))
    return weight, scale, random(n, device=device).to(torch.bfloat16)


def distance(out, exact):
    return ((out.double() - exact).norm() / exact.norm()).item()


# ----------------------------------------------------------------------------------------- numerics


@on_each
def test_layer_is_the_product_of_what_it_holds(format, backend, device):
    gemm = runnable(format, backend, device)
    weight, scale, bias = layer(96, 256, format, device)
    for dtype, rounding in ROUNDING.items():
        x = random(40, 256, device=device).to(dtype)
        meant = x.double()
        if not gemm.weight_only:
            q, x_scale = reference.row_quantize(x, RowFormat(format))
            meant = q.double() * x_scale
        exact = meant @ (weight.double() * scale).t()
        out = gemm.linear(x, weight, scale, bias)
        assert (out.dtype, out.shape) == (dtype, (40, 96))
        # scaled_mm writes bf16, and Hopper adds e4m3 products with fewer bits than fp32.
        triton_on_card = (format, backend, device.type) == ("fp8", "triton", "cuda")
        coarse = backend.startswith("scaled_mm") or triton_on_card
        most = 4e-3 if coarse else 4 * rounding
        assert distance(out, exact + bias.double()) < most
        assert distance(gemm.linear(x, weight, scale), exact) < most


@on_each
def test_error_against_the_layer_before_quantization(format, backend, device):
    """The formats' own errors: a token or a channel scaled wrongly would be far beyond them."""
    gemm = runnable(format, backend, device)
    weight = random(64, 512, device=device)
    x = random(33, 512, device=device) * torch.logspace(-2, 2, 33, device=device)[:, None]
    exact = x.double() @ weight.double().t()
    out = gemm.linear(x.to(torch.bfloat16), *reference.row_quantize(weight, RowFormat(format)))
    rows = (out.double() - exact).norm(dim=1) / exact.norm(dim=1)
    assert rows.max() < {"fp8": 0.05, "int8": 0.015}[format]


@on_each
def test_a_rotated_weight_takes_rotated_rows(format, backend, device):
    gemm = runnable(format, backend, device)
    rows = RowFormat(format, 64)
    x, weight = random(2, 20, 256, device=device), random(48, 256, device=device)
    x[..., 7] *= 30
    exact = x.double() @ weight.double().t()
    held = reference.row_quantize(weight, rows)
    assert distance(gemm.linear(x, *held, None, rows.rotation), exact) < 0.06
    q, x_scale = gemm.quantize(x.flatten(0, 1), rows.rotation)
    out = gemm.linear_quantized(q, x_scale, *held, None, torch.float32)
    assert distance(out, exact.flatten(0, 1)) < 0.06


@on_each
def test_any_leading_shape(format, backend, device):
    gemm = runnable(format, backend, device)
    weight, scale, bias = layer(32, 64, format, device)
    for shape in ((), (1,), (17,), (2, 3), (0,), (2, 0)):
        x = random(*shape, 64, device=device)
        out = gemm.linear(x, weight, scale, bias)
        assert out.shape == (*shape, 32)
        rows = [gemm.linear(row[None], weight, scale, bias)[0] for row in x.reshape(-1, 64)]
        if rows:
            torch.testing.assert_close(out.reshape(-1, 32), torch.stack(rows), rtol=1e-2, atol=1e-2)


@on_each
def test_strides_do_not_matter(format, backend, device):
    gemm = runnable(format, backend, device)
    weight, scale, bias = layer(32, 64, format, device)
    joint = random(2, 50, 192, device=device).to(torch.bfloat16)
    for x in (joint[:, 10:, 64:128], joint[..., :64].transpose(0, 1), joint[:, ::2, ::3]):
        out = gemm.linear(x, weight, scale, bias)
        packed = gemm.linear(x.contiguous(), weight, scale, bias)
        torch.testing.assert_close(out, packed, rtol=1e-2, atol=1e-2)


@on_each
def test_shapes_that_the_instruction_does_not_take(format, backend, device):
    gemm = runnable(format, backend, device)
    weight, scale, bias = layer(33, 70, format, device)
    x = random(20, 70, device=device)
    exact = x.double() @ (weight.double() * scale).t() + bias
    assert gemm.takes(33, 70) is (backend in ("triton", "dequantize"))
    assert distance(gemm.linear(x, weight, scale, bias), exact) < 0.05
    rows = gemm.quantize(x)
    out = gemm.linear_quantized(*rows, weight, scale, bias, torch.float32)
    assert distance(out, exact) < 0.05


@on_each
def test_nan_is_not_hidden(format, backend, device):
    """A broken activation must not become a plausible image."""
    if backend == "kitchen":
        pytest.skip("comfy-kitchen has a row quantizer of its own")
    gemm = runnable(format, backend, device)
    weight, scale, bias = layer(32, 64, format, device)
    x = random(20, 64, device=device)
    x[3, 5] = torch.nan
    out = gemm.linear(x, weight, scale, bias)
    assert out[3].isnan().all()
    assert out[:3].isfinite().all()
    assert out[4:].isfinite().all()


@on_each
def test_result_goes_where_it_is_wanted(format, backend, device):
    """Rows from the middle of a matrix, as the image's are behind any number of text tokens."""
    gemm = runnable(format, backend, device)
    x = random(103, 64, device=device).to(torch.bfloat16)
    weight, scale, bias = layer(48, 64, format, device)
    q, x_scale = gemm.quantize(x)
    for start in (0, 1, 7, 100):
        rows = q[start:], x_scale[start:], weight, scale, bias, torch.bfloat16
        out = torch.full((103, 48), 7.0, dtype=torch.bfloat16, device=device)
        given = gemm.linear_quantized(*rows, out=out[start:])
        assert given.data_ptr() == out[start:].data_ptr()
        assert torch.equal(out[start:], gemm.linear_quantized(*rows))
        assert (out[:start] == 7).all()


@pytest.mark.parametrize("device", [CPU, pytest.param(CARD, marks=on_card)], ids=str)
def test_dense_layer_with_the_tanh_form_of_gelu(device):
    """The forms differ most at |x| = 2.2, by 4.7e-4; on the negative side a GELU of bf16 rounds by
    less. With these weights x @ weight.T is x itself.
    """
    for dtype in ROUNDING:
        x = torch.linspace(-2.6, -1.8, 64, device=device).repeat(5, 1).to(dtype)
        weight, bias = torch.eye(64, device=device).to(dtype), torch.zeros(64, device=device)
        assert torch.equal(dense_linear(x, weight, bias), x)
        activated = dense_linear(x, weight, bias, gelu=True).double()
        tanh, erf = (
            (activated - torch.nn.functional.gelu(x.double(), approximate=form)).abs().mean().item()
            for form in ("tanh", "none")
        )
        assert tanh < erf / 4


@pytest.mark.parametrize(
    ("gelu", "with_bias"), [(False, False), (False, True), (True, False), (True, True)]
)
@pytest.mark.parametrize("device", [CPU, pytest.param(CARD, marks=on_card)], ids=str)
def test_dense_layer_goes_where_it_is_wanted(device, with_bias, gelu):
    x = random(9, 64, device=device).to(torch.bfloat16)
    weight = random(48, 64, device=device).to(torch.bfloat16)
    bias = random(48, device=device) if with_bias else None
    out = torch.full((12, 48), 7.0, dtype=torch.bfloat16, device=device)
    given = dense_linear(x, weight, bias, gelu=gelu, out=out[3:])
    assert given.data_ptr() == out[3:].data_ptr()
    assert torch.equal(out[3:], dense_linear(x, weight, bias, gelu=gelu))
    assert (out[:3] == 7).all()
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.to(torch.bfloat16))
    if gelu:
        exact = torch.nn.functional.gelu(exact, approximate="tanh")
    assert distance(out[3:], exact) < ROUNDING[torch.bfloat16]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("device", [CPU, pytest.param(CARD, marks=on_card)], ids=str)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own imports
def test_torch_compile_takes_it_whole(format, device):
    weight, scale, bias = layer(32, 64, format, device)
    x = random(20, 64, device=device).to(torch.bfloat16)
    # The graph alone on the processor: no C++ compiler is needed.
    how = "inductor" if device.type == "cuda" else "eager"
    torch.compiler.reset()
    whole = torch.compile(linear.quantized_linear, fullgraph=True, backend=how)
    out = whole(x, weight, scale, bias, format)
    exact = choose_gemm(format, device).linear(x, weight, scale, bias)
    torch.testing.assert_close(out, exact, rtol=0, atol=0)


# ------------------------------------------------------------------------------------------- choice


@pytest.fixture
def card(monkeypatch):
    """Sets up a card that is not there: its compute capability, and what fails its trial."""

    def set_up(sm, failing=(), kitchen=True):
        monkeypatch.setattr(linear, "sm_of", lambda device: sm if device.type == "cuda" else None)
        monkeypatch.setattr(linear.kernels, "missing", lambda: "")
        monkeypatch.setattr(linear.kernels, "interpreted", lambda: False)
        state = State.USABLE if kitchen else State.NOT_USABLE
        capability = state.of("comfy-kitchen", "0.2" if kitchen else "not installed")
        monkeypatch.setattr(linear, "check_kitchen", lambda torch: capability)

        def trial(gemm, device):
            return "a trial failed: no kernel image" if gemm.backend in failing else ""

        monkeypatch.setattr(linear, "_trial", trial)
        forget()

    return set_up


@pytest.mark.parametrize("format", FORMATS)
def test_without_a_card_the_weights_are_expanded(format):
    gemm = choose_gemm(format, CPU)
    assert gemm.backend == "dequantize"
    assert gemm.weight_only
    assert gemm.reason == f"no GPU: {format} saves memory here, not time"


@pytest.mark.parametrize(
    ("sm", "format", "backend", "quantizer"),
    [
        ((8, 9), "fp8", "scaled_mm", "triton"),
        ((8, 9), "int8", "kitchen", "triton"),
        ((9, 0), "fp8", "scaled_mm", "triton"),
        ((12, 0), "fp8", "scaled_mm", "triton"),
        ((8, 6), "fp8", "dequantize", "torch"),
        ((8, 6), "int8", "kitchen", "triton"),
        ((7, 5), "int8", "dequantize", "torch"),
    ],
    ids=str,
)
def test_choice_by_card(card, sm, format, backend, quantizer):
    card(sm)
    gemm = choose_gemm(format, CARD)
    assert (gemm.backend, gemm.row_quantizer) == (backend, quantizer)


def test_reason_tells_what_was_passed_over(card):
    card((8, 9), failing=("scaled_mm",))
    gemm = choose_gemm("fp8", CARD)
    assert gemm.backend == "triton"
    assert gemm.reason.endswith("; not scaled_mm: a trial failed: no kernel image")
    card((8, 9), failing=("triton",), kitchen=False)
    gemm = choose_gemm("int8", CARD)
    assert (gemm.backend, gemm.row_quantizer) == ("int_mm", "torch")
    assert "; not kitchen: comfy-kitchen not installed; not triton: " in gemm.reason
    card((8, 6))
    gemm = choose_gemm("fp8", CARD)
    assert gemm.reason.startswith("not scaled_mm: sm_86, needs sm_89 or newer; not triton: ")
    assert str(gemm) == f"fp8 through dequantize: {gemm.reason}"


def test_a_backend_that_is_asked_for_runs_or_raises(card):
    card((8, 9), failing=("triton",))
    assert choose_gemm("int8", CARD, backend="int_mm") == Gemm("int8", "int_mm", "requested")
    with pytest.raises(UnavailableError) as caught:
        choose_gemm("int8", CARD, backend="triton")
    assert str(caught.value) == (
        "the int8 GEMM triton cannot run on cuda:0: a trial failed: no kernel image; "
        "use kitchen or int_mm or dequantize"
    )
    with pytest.raises(UnavailableError, match=r"needs an NVIDIA GPU; use .*dequantize"):
        choose_gemm("int8", CPU, backend="kitchen")


@pytest.mark.parametrize("device", ["cuda:0", "mps"])
def test_a_device_that_torch_does_not_reach(monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gemm = choose_gemm("fp8", torch.device(device))
    assert gemm.backend == "dequantize"
    assert f"{device} is not an NVIDIA GPU that torch can use" in gemm.reason


def test_the_settings_ask_unless_the_caller_does(set_settings, card):
    card((8, 9))
    set_settings(gemm_int8="triton")
    gemm = choose_gemm("int8", CARD)
    assert (gemm.backend, gemm.reason) == ("triton", "requested by the settings")
    assert choose_gemm("int8", CARD, backend="int_mm").backend == "int_mm"
    assert choose_gemm("fp8", CARD).backend == "scaled_mm"


def test_a_trial_that_fails_in_another_thread_leaves_a_success(monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def multiply(*args, multiply=torch._int_mm):
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            assert go_on.wait(60)
            raise RuntimeError("not here")
        return multiply(*args)

    monkeypatch.setattr(torch, "_int_mm", multiply)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(choose_gemm, "int8", CPU, backend="int_mm")
        assert begun.wait(60)
        chosen = choose_gemm("int8", CPU, backend="int_mm")
        go_on.set()
    assert other.result() == chosen == choose_gemm("int8", CPU, backend="int_mm")


def test_a_trial_that_goes_wrong_is_told(monkeypatch):
    def fails(*_, **__):
        raise NotImplementedError("not compiled for this card\nstack")

    monkeypatch.setattr(torch, "_int_mm", fails)
    with pytest.raises(UnavailableError, match="trial failed: not compiled for this card; use"):
        choose_gemm("int8", CPU, backend="int_mm")
    forget()
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: torch.zeros(32, 32, dtype=torch.int32))
    with pytest.raises(UnavailableError, match="wrong result"):
        choose_gemm("int8", CPU, backend="int_mm")


def test_a_full_card_refuses_no_gemm_for_good(monkeypatch):
    full = [True]

    def multiply(*args, multiply=torch._int_mm):
        if full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return multiply(*args)

    monkeypatch.setattr(torch, "_int_mm", multiply)
    with pytest.raises(
        UnavailableError, match="int_mm cannot run on cpu: too little memory is free for"
    ):
        choose_gemm("int8", CPU, backend="int_mm")
    full.clear()
    assert choose_gemm("int8", CPU, backend="int_mm").backend == "int_mm"


def test_what_a_full_card_leaves_is_chosen_again(monkeypatch, card):
    """Each layer of the hosts asks for the choice that is known."""
    for full, chosen in (
        ({"kitchen", "triton", "int_mm"}, ("dequantize", "torch")),
        ({"triton"}, ("kitchen", "torch")),
        ({"kitchen"}, ("triton", "triton")),
    ):
        card((8, 9))
        room = linear._trial

        def trial(gemm, device, full=full, room=room):
            if gemm.backend in full:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return room(gemm, device)

        monkeypatch.setattr(linear, "_trial", trial)
        gemm = known_gemm("int8", CARD)
        assert (gemm.backend, gemm.row_quantizer) == chosen
        full.clear()
        gemm = known_gemm("int8", CARD)
        assert (gemm.backend, gemm.row_quantizer) == ("kitchen", "triton")
        assert known_gemm("int8", CARD) is gemm
