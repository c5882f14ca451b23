"""What is read over all models and shapes, while the threads of other cards add some."""

import sys
import weakref
from dataclasses import replace

import pytest
import torch

pytest.importorskip("diffusers")

from test_block import Case
from test_passes import SMALL, Host, Model

from qwen_l40s.optimizations import run
from qwen_l40s.optimizations.attention import BACKENDS, chosen

pytestmark = pytest.mark.usefixtures("one_thread")


def between_bytecodes(modules, act, read):
    """What `read` gives, with `act` between its first bytecodes in these modules: where Python
    gives other threads their turn.
    """
    files, turns = {module.__file__ for module in modules}, iter(range(100))

    def trace(frame, event, _):
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and next(turns, None) is not None:
            act()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return read()
    finally:
        sys.settrace(before)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("start_run", "end_run", "release")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["confirm", *SLOW])
@torch.no_grad()
def test_passes_of_models_that_are_new(name):
    optimization, models = run.Optimization(None), [Model({})]
    optimization.start_run()

    def run_pass():
        models.append(Model({}))
        for model in models[0], models[-1]:
            host = Host(model)
            host.state = len(models)
            optimization.run_pass(host, lambda model=model: model(Case(SMALL)))

    run_pass()
    given = models[:1] if name == "release" else []
    between_bytecodes([run, weakref], run_pass, lambda: getattr(optimization, name)(*given))
    assert len(models) > 10


def test_errors_of_backends_that_are_new(monkeypatch):
    monkeypatch.setattr(chosen, "refusal", lambda *_: "")
    errors, names = chosen.MeasuredErrors(0.02), []
    monkeypatch.setattr(chosen, "TRIED_BY_FAST", names)
    q = torch.ones(1, 4, 1, 2)

    def measure():
        names.append(f"new {len(names)}")
        monkeypatch.setitem(
            BACKENDS, names[-1], replace(BACKENDS["kitchen_int8"], attend=lambda q, *_: 2 * q)
        )
        errors.start_pass(3)
        errors.add(q, q, q, None, q)

    measure()
    found = between_bytecodes([chosen], measure, lambda: errors.errors)
    assert found.items() <= dict.fromkeys(names, 1.0).items()
    assert len(names) > 10
