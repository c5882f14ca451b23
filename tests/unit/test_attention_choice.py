"""Which attention backend is chosen, by what measurement, and what is remembered of it."""

import json
import logging
import pickle
import re
import threading
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import published_attention

from qwen_l40s import UnavailableError
from qwen_l40s.caches import forget
from qwen_l40s.machine import store
from qwen_l40s.machine.store import AttentionTimings, save_attention
from qwen_l40s.optimizations.attention import (
    BACKENDS,
    Attention,
    AttentionRequest,
    ChosenAttention,
    choice,
    choose_attention,
    chosen,
)

CPU = torch.device("cpu")
CARD = torch.device("cuda", 0)
own_refusal = choice.refusal


@pytest.fixture(autouse=True)
def nothing_remembered(set_settings, tmp_path):
    set_settings(cache=str(tmp_path / "cache"))
    forget()
    yield
    forget()


@pytest.fixture
def card(monkeypatch):
    """Sets up a card that is not there: what runs on it, and how many milliseconds each takes.

    Gives the list of the backends that are timed, in order.
    """
    timed = []

    def set_up(ms, sm=(8, 9), refused=None, name="NVIDIA L40S"):
        refused = refused or {}

        def refuse(key, request, tried=False):
            declared = choice.limits_of(key, request)
            return declared or ("" if key in ms else refused.get(key, "not installed"))

        def timed_ms(call, *_):
            (key,) = (key for key, backend in BACKENDS.items() if backend.attend is call)
            timed.append(key)
            taken = ms[key]
            if isinstance(taken, Exception):
                raise taken
            return taken.pop(0) if isinstance(taken, list) else taken

        monkeypatch.setattr(choice, "sm_of", lambda device: sm)
        monkeypatch.setattr(choice, "refusal", refuse)
        monkeypatch.setattr(choice, "_machine", lambda device: name)
        monkeypatch.setattr(choice, "timed_ms", timed_ms)
        monkeypatch.setattr(choice, "BUDGET_S", 10**6)  # however busy this machine is
        for key in ms:  # the call that is not timed
            backend = BACKENDS[key]
            monkeypatch.setitem(BACKENDS, key, replace(backend, attend=lambda *x, key=key: key))
        timed.clear()
        return timed

    return set_up


def request(tokens=400, **about):
    shape = {"dtype": torch.bfloat16, "batch": 1, "heads": 2, "head_dim": 64, "tokens": tokens}
    return AttentionRequest(CPU, **{**shape, **about})


SDPA = {"sdpa_flash": 0.8, "sdpa_cudnn": 0.454, "sdpa_efficient": 1.407, "math": 9}

# ------------------------------------------------------------------------------------ without cards


def test_without_a_card_the_first_that_runs_is_taken(monkeypatch):
    monkeypatch.setattr(choice, "measure", None)
    for dtype, masked in ((torch.bfloat16, False), (torch.float32, True)):
        attention = choose_attention(request(dtype=dtype, masked=masked))
        assert attention == Attention(
            "sdpa_flash", "no GPU to measure on: the first that runs", masked
        )
    assert not store.cache_folder().exists()


def test_a_device_that_torch_does_not_reach(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnavailableError, match="cuda:7 is not an NVIDIA GPU that torch can use"):
        choose_attention(AttentionRequest(torch.device("cuda", 7), torch.bfloat16, 1, 2, 64, 400))


def test_a_backend_that_is_asked_for_runs_or_raises():
    assert choose_attention(request(), "math") == Attention("math", "requested")
    with pytest.raises(UnavailableError) as caught:
        choose_attention(request(), "sdpa_cudnn")
    assert str(caught.value).startswith(
        "attention sdpa_cudnn cannot run on cpu: needs an NVIDIA GPU; "
        "use auto or sdpa_flash or math; "
        "not sdpa_efficient: needs an NVIDIA GPU; "
    )


def test_the_settings_ask_unless_the_caller_does(set_settings):
    set_settings(attention="math")
    attention = choose_attention(request())
    assert (attention.name, attention.reason) == ("math", "requested by the settings")
    assert choose_attention(request(), "sdpa_flash").name == "sdpa_flash"
    set_settings(attention="auto")
    assert choose_attention(request()).name == "sdpa_flash"


def test_a_choice_is_plain_data():
    """Hosts copy and send models: nothing in it belongs to a device or a process."""
    attention = choose_attention(request())
    assert pickle.loads(pickle.dumps(attention)) == attention
    assert str(attention) == f"sdpa_flash: {attention.reason}"


def test_what_is_chosen_once_serves_every_call_of_its_kind(monkeypatch):
    q, k, v = torch.randn(3, 2, 50, 3, 64).to(torch.bfloat16)
    attention = ChosenAttention("math")
    assert not attention.used and attention.lines() == ["attention: math, chosen in the first step"]
    asked = AttentionRequest.of(q, None)
    assert asked == AttentionRequest(CPU, torch.bfloat16, 2, 3, 64, 50)
    assert AttentionRequest.of(q, q) == replace(asked, masked=True)
    found = attention.choose(asked)
    assert attention.used and attention.lines() == ["attention: math: requested"]
    monkeypatch.setattr(chosen, "choose_attention", None)
    assert attention.choose(AttentionRequest.of(q, None)) is found
    assert torch.equal(attention.attend(q, k, v, None), found(q, k, v))
    attention.give_up()
    assert not attention.used and "math gave NaN or infinity" in attention.lines()[0]
    attention.start_run()
    assert not attention.used and attention.fallback is None


def test_a_choice_can_be_called_in_compiled_code():
    attention = choose_attention(request(50))
    q, k, v = torch.randn(3, 1, 50, 2, 64).to(torch.bfloat16)
    torch.compiler.reset()
    compiled = torch.compile(lambda *x: attention(*x) + 1, backend="eager")
    torch.testing.assert_close(compiled(q, k, v), attention(q, k, v) + 1)


# ---------------------------------------------------------------------------------- the measurement


def test_the_fastest_exact_one_is_taken_and_told_with_its_times(card):
    card(SDPA)
    attention = choose_attention(request(400))
    assert attention.name == "sdpa_cudnn"
    assert attention.reason == (
        "fastest exact of 3 on this GPU at 400 tokens: 0.45 ms, "
        "sdpa_flash 0.80, sdpa_efficient 1.41"
    )


def test_what_plans_each_length_is_not_taken_for_one_pass(card):
    card(SDPA)
    attention = ChosenAttention("auto")
    assert attention.choose(request()).name == "sdpa_cudnn"
    once = attention.choose(request(), once=True)
    assert str(once).startswith(
        "sdpa_flash: in one forward pass, for which sdpa_cudnn would make a plan ("
    )
    assert attention.choose(request()).name == "sdpa_cudnn"
    assert ChosenAttention("sdpa_cudnn").choose(request(), once=True).name == "sdpa_cudnn"
    card({"sdpa_cudnn": 0.5, "math": 9}, name="another")
    assert ChosenAttention("auto").choose(request(), once=True).name == "sdpa_cudnn"
    card(SDPA, name="a third")
    times = {"sdpa_cudnn": 0.2, "of another version": 0.25, "sdpa_flash": 0.3}
    save_attention(choice.measurement_key(request()), AttentionTimings(400, times))
    assert ChosenAttention("auto").choose(request(), once=True).name == "sdpa_flash"


def test_quantized_ones_are_never_measured_nor_taken(card):
    timed = card({**SDPA, "kitchen_int8": 0.1})
    assert choose_attention(request()).name == "sdpa_cudnn"
    assert {"int8", "math"}.isdisjoint(timed)


def test_long_runs_are_repeated_less(card):
    timed = card({"sdpa_flash": 90, "sdpa_cudnn": 150, "sdpa_efficient": 250})
    choose_attention(request())
    assert [timed.count(name) for name in ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient")] == [
        3,
        2,
        1,
    ]


def test_one_slow_run_does_not_decide(card):
    card({"sdpa_flash": 0.5, "sdpa_cudnn": [0.3, 9, 0.3, 0.3, 8, 0.3, 0.3], "sdpa_efficient": 2})
    assert choose_attention(request()).name == "sdpa_cudnn"


def test_no_backend_is_begun_when_the_time_is_up(card, monkeypatch):
    timed = card(SDPA, sm=(9, 0))
    now = iter(range(0, 100, 2))
    monkeypatch.setattr(choice, "BUDGET_S", 1.5)
    monkeypatch.setattr(choice.time, "monotonic", lambda: next(now))
    attention = choose_attention(request())
    assert set(timed) == {"sdpa_cudnn"}
    assert attention.name == "sdpa_cudnn"
    assert attention.reason == (
        "the only exact one measured on this GPU at 400 tokens: 0.45 ms; "
        "not sdpa_flash: the time for measuring was over; "
        "not sdpa_efficient: the time for measuring was over"
    )


def test_a_backend_that_fails_at_the_shape_is_passed_over(card):
    card({**SDPA, "sdpa_cudnn": RuntimeError("no plan for this shape\nstack")})
    attention = choose_attention(request())
    assert attention.name == "sdpa_flash"
    assert attention.reason.endswith("; not sdpa_cudnn: no plan for this shape")


def test_without_any_measurement_the_order_decides(card):
    card({name: torch.cuda.OutOfMemoryError("CUDA out of memory") for name in SDPA})
    attention = choose_attention(request())
    assert attention.name == "sdpa_flash"
    assert attention.reason.startswith("predicted; not sdpa_flash: CUDA out of memory")
    assert not store.cache_folder().exists()


def test_a_mask_leaves_what_takes_one(card):
    card(SDPA)
    attention = choose_attention(request(masked=True))
    assert attention.masked and attention.name == "sdpa_cudnn"
    assert attention.reason.endswith("sdpa_efficient 1.41; not sdpa_flash: takes no mask")


@pytest.mark.parametrize(
    ("sm", "dtype", "name", "reason"),
    [
        ((7, 5), torch.float16, "sdpa_efficient", "the only one that runs here without all scores"),
        ((8, 9), torch.float32, "sdpa_efficient", "the only one that runs here without all scores"),
        (
            (3, 7),
            torch.float32,
            "math",
            "every attention here keeps all scores in memory",
        ),
    ],
)
def test_a_single_one_is_not_measured(card, sm, dtype, name, reason):
    timed = card(SDPA, sm=sm)
    attention = choose_attention(request(dtype=dtype))
    assert (attention.name, timed) == (name, [])
    assert attention.reason.startswith(reason)


@pytest.mark.parametrize("state", ["compiles", "captures"])
def test_nothing_is_launched_while_torch_compiles_or_captures(card, monkeypatch, state):
    timed = card(SDPA, sm=(9, 0))
    if state == "compiles":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        device = CPU
    else:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        device = CARD
    monkeypatch.setattr(choice, "refusal", None)
    asked = replace(request(), device=device)
    attention = choose_attention(asked)
    assert (attention.name, timed) == ("sdpa_cudnn", [])
    assert attention.reason.startswith(
        "predicted, because nothing is measured while torch compiles"
    )
    assert choose_attention(asked, "sdpa_flash").name == "sdpa_flash"


def test_work_is_cut_to_what_fits_the_time():
    for (batch, heads, tokens), expected in (
        ((1, 24, 4296), (1, 24)),
        ((2, 24, 8392), (2, 24)),
        ((2, 24, 16384), (1, 24)),
        ((5, 24, 40000), (1, 4)),
        ((1, 24, 200000), (1, 1)),
    ):
        asked = AttentionRequest(CPU, torch.bfloat16, batch, heads, 128, tokens)
        found = choice.cut(asked)
        assert (found.batch, found.heads, found.tokens) == (*expected, tokens)


# ------------------------------------------------------------------------------------ what is kept


def path():
    return store.cache_folder() / store.ATTENTION


def kept():
    return json.loads(path().read_text())["measured"]


def test_a_measurement_is_made_once_in_a_process_and_once_on_a_machine(card, monkeypatch):
    timed = card(SDPA)
    first = choose_attention(request(400))
    assert timed
    timed.clear()
    assert choose_attention(request(400)) == first
    monkeypatch.setattr(choice, "_measured", {})
    assert choose_attention(request(400)) == first
    assert choose_attention(request(512)) == first  # rounds up to the same
    assert timed == []
    (key,) = kept()
    assert key == "NVIDIA L40S|bfloat16|1x512x2x64|unmasked"


@pytest.mark.parametrize("driver", ["the same", "another"])
def test_what_another_process_has_measured_needs_no_trial(card, monkeypatch, driver):
    card(SDPA, name="NVIDIA L40S, the same driver")
    asked, tried = replace(request(), device=CARD), []
    key = choice.measurement_key(asked)
    save_attention(key, AttentionTimings(400, {name: SDPA[name] for name in list(SDPA)[:3]}))
    card(SDPA, name=f"NVIDIA L40S, {driver} driver")

    def trial(name, *_):
        tried.append(name)
        return "a trial failed"

    monkeypatch.setattr(choice, "refusal", own_refusal)
    monkeypatch.setattr(choice, "trial", trial)
    monkeypatch.setattr(choice, "_may_launch", lambda *_: True)
    if driver == "another":
        with pytest.raises(UnavailableError, match="not sdpa_cudnn: a trial failed"):
            choose_attention(asked)
        assert tried[:3] == ["sdpa_flash", "sdpa_cudnn", "sdpa_efficient"]
    else:
        assert choose_attention(asked).name == "sdpa_cudnn"
        assert tried == []


def test_another_shape_is_measured_for_itself(card):
    timed = card(SDPA)
    choose_attention(request())
    others = ({"tokens": 513}, {"batch": 2}, {"heads": 3}, {"head_dim": 128})
    for count, other in enumerate((*others, {"dtype": torch.float16}, {"masked": True}), start=2):
        timed.clear()
        choose_attention(request(**other))
        assert timed
        assert len(kept()) == count


def test_a_kept_choice_that_no_longer_runs_is_measured_anew(card, monkeypatch):
    card(SDPA)
    assert choose_attention(request()).name == "sdpa_cudnn"
    monkeypatch.setattr(choice, "_measured", {})
    timed = card({name: ms for name, ms in SDPA.items() if name != "sdpa_cudnn"})
    assert choose_attention(request()).name == "sdpa_flash"
    assert timed
    assert list(kept().values()) == [
        {"tokens": 400, "ms": {"sdpa_flash": 0.8, "sdpa_efficient": 1.407}}
    ]


DAMAGED = {
    "empty": "",
    "half": '{"version": 1, "measured": {"a": {"tok',
    "list": "[]",
    "binary": b"\x00\xff\xfe\x80",
    "deep": "[" * 100_000,
    "other version": '{"version": 99, "measured": {"KEY": {"tokens": 1, "ms": {"math": 1}}}}',
    "entry": '{"version": 1, "measured": {"KEY": 7}}',
    "no times": '{"version": 1, "measured": {"KEY": {"tokens": 5, "ms": {}}}}',
    "words": '{"version": 1, "measured": {"KEY": {"tokens": 5, "ms": {"math": "fast"}}}}',
    "nan": '{"version": 1, "measured": {"KEY": {"tokens": 5, "ms": {"math": NaN}}}}',
    "negative": '{"version": 1, "measured": {"KEY": {"tokens": 5, "ms": {"math": -1}}}}',
    "table": '{"version": 1, "measured": []}',
}


def test_a_damaged_file_is_told_once_and_measured_over(card, monkeypatch, caplog):
    card(SDPA)
    key = choice.measurement_key(request())
    path().parent.mkdir()
    for text in DAMAGED.values():
        monkeypatch.setattr(choice, "_measured", {})
        path().write_bytes(text if isinstance(text, bytes) else text.replace("KEY", key).encode())
        assert choose_attention(request()).name == "sdpa_cudnn"
        assert key in kept()
    (record,) = caplog.records
    assert str(path()) in record.message and "measured again" in record.message


def test_a_file_that_cannot_be_written_is_told_once_and_does_no_harm(card, caplog, tmp_path):
    card(SDPA)
    (tmp_path / "cache").write_text("a file where the folder would be")
    with caplog.at_level(logging.WARNING):
        assert choose_attention(request(400)).name == "sdpa_cudnn"
        assert choose_attention(request(4000)).name == "sdpa_cudnn"
    assert sum("cannot be used" in record.message for record in caplog.records) == 1


# ---------------------------------------------------------------------------------- on a true card


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("masked", [False, True])
def test_a_card_is_measured_once(masked):
    """On a busy machine the time for it may end before the last."""
    asked = AttentionRequest(CARD, torch.bfloat16, 1, 24, 128, 4296, masked)
    names = [name for name in choice._order(None) if not choice.refusal(name, asked)]
    quick = [name for name in names if not BACKENDS[name].whole_scores]
    measurement, without = choice.measure(quick, asked)
    left_out = {name for name in quick if any(name in it for it in without)}
    assert measurement.ms and {*quick} == {*measurement.ms, *left_out}
    attention = choose_attention(asked)
    assert BACKENDS[attention.name].exact
    assert choose_attention(asked) == attention
    (key,) = kept()
    assert torch.cuda.get_device_name(CARD) in key and torch.__version__ in key


# --------------------------------------------------------------------------------------------- fast


@pytest.mark.parametrize(("most", "name"), [(0.005, ""), (0.02, "kitchen_int8")])
def test_fast_takes_the_fastest_within_its_bound(monkeypatch, most, name):
    q, k, v = torch.randn(3, 1, 400, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    times = AttentionTimings(400, {"kitchen_int8": 0.6, "sdpa_flash": 0.8})
    published_attention.on_every_device(monkeypatch)
    monkeypatch.setattr(chosen, "sm_of", lambda device: (8, 9))
    monkeypatch.setattr(chosen, "measurement", lambda *_: (times, []))
    exact = BACKENDS["sdpa_flash"].attend(q, k, v)
    expected = BACKENDS[name].attend(q, k, v) if name else exact
    attention = ChosenAttention("fast", True, most)
    for _ in range(2):  # runs
        attention.start_run()
        for out in (exact, expected, expected):
            attention.start_blocks(7)
            for _ in range(7):
                assert torch.equal(attention.attend(q, k, v, None), out)
        lines = "\n".join(attention.lines())
        assert "in the first forward pass, as the reference" in lines
        assert re.search(r"kitchen_int8 error 0\.0\d+; at most", lines)
        assert (
            f"at most {most} allowed" in lines and f"attention: {name or 'sdpa_flash'}: " in lines
        )


def test_fast_stays_exact_where_that_is_faster(monkeypatch):
    q, k, v = torch.randn(3, 1, 400, 2, 64).bfloat16()
    published_attention.on_every_device(monkeypatch)
    monkeypatch.setattr(chosen, "sm_of", lambda device: (9, 0))
    times = AttentionTimings(400, {"sdpa_flash": 0.5, "kitchen_int8": 0.6})
    monkeypatch.setattr(chosen, "measurement", lambda *_: (times, []))
    attention = ChosenAttention("fast", True)
    for _ in range(2):
        attention.start_blocks(1)
        attention.attend(q, k, v, None)
    assert "attention: sdpa_flash: fastest at 400 tokens" in "\n".join(attention.lines())


def test_fast_counts_the_blocks_of_each_card_for_itself(monkeypatch):
    """Each computes a prompt in a thread; the second begins in the pass of the first."""
    q, k, v = torch.randn(3, 1, 200, 2, 64).bfloat16()
    monkeypatch.setattr(chosen, "sm_of", lambda device: (8, 9))
    measured, block, turn = [], threading.local(), threading.Barrier(2, timeout=20)

    def seen(out, queries, _):
        if queries.shape == q.shape:  # else of a trial
            measured.append(block.index)
        return out

    published_attention.on_every_device(monkeypatch, seen)
    attention = ChosenAttention("fast", True)

    def run(blocks):
        for block.index in blocks:
            assert attention.measuring
            attention.attend(q, k, v, None)

    def second():
        turn.wait()  # the first card has computed three blocks
        attention.start_blocks(7)
        run(range(5))
        turn.wait()
        turn.wait()  # and all
        run(range(5, 7))

    other = threading.Thread(target=second)
    attention.start_blocks(7)
    run(range(3))
    other.start()
    turn.wait()
    turn.wait()
    run(range(3, 7))
    assert not attention.measuring
    turn.wait()
    other.join()
    assert measured == [0, 0, 3, 3, 6, 6]
    attention.start_blocks(7)
    assert not attention.measuring


def test_fast_keeps_exact_attention_where_one_gives_nan(monkeypatch):
    q, k, v = torch.randn(3, 1, 200, 2, 64).bfloat16()
    published_attention.on_every_device(monkeypatch, lambda out, *_: out * torch.nan)
    monkeypatch.setattr(chosen, "sm_of", lambda device: (8, 9))
    attention = ChosenAttention("fast", True)
    for _ in range(2):
        attention.start_blocks(1)
        assert attention.attend(q, k, v, None).isfinite().all()
    assert "not kitchen_int8: a trial gave values that are not finite" in "".join(attention.lines())
