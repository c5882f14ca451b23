"""A run in which an operation fails leaves nothing behind, and the next paints the same picture."""

import gc
import re
from pathlib import Path
from unittest import mock

import comfy.model_management
import narrow_transformer as narrow
import published_attention
import pytest
import torch
from block_kernel_cases import with_kernels
from comfy.quant_ops import QuantizedTensor
from comfyui_boot import ROOT, folder
from narrow_21 import TEXT, strong_21
from narrow_transformer import random
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from qwen_l40s.errors import UnavailableError
from qwen_l40s.hosts.comfyui.decode.decode import decode
from qwen_l40s.hosts.comfyui.load.vae import load_vae
from qwen_l40s.hosts.comfyui.lora.apply import apply_lora
from qwen_l40s.hosts.comfyui.sample.optimize import OptimizeSettings, optimize, report_of
from qwen_l40s.hosts.comfyui.sample.step_cache import cache_steps
from qwen_l40s.optimizations import fused
from qwen_l40s.optimizations.attention.choice import TRIAL_TOKENS
from qwen_l40s.optimizations.run import Later
from qwen_l40s.planning.step_cache import cache_settings
from qwen_l40s.verdict import first_line

FOLDER = folder("faults")
WEIGHTS = narrow.weights()
PATH = narrow.write(FOLDER / "bf16.safetensors", WEIGHTS)
LORA = FOLDER / "lora.safetensors"
narrow.save_file(narrow.lora(WEIGHTS, narrow.layers(WEIGHTS)), LORA)
LATE_LORA = FOLDER / "late.safetensors"
narrow.save_file(narrow.lora(WEIGHTS, [narrow.LAYER]), LATE_LORA)
PLACES = 10
KINDS = (torch.Tensor, torch.nn.Parameter, QuantizedTensor)  # not those of torch.compile
ERRORS = {
    "memory": torch.OutOfMemoryError("CUDA out of memory"),
    "cancel": comfy.model_management.InterruptProcessingException(),
}


class FailingAt(TorchDispatchMode):
    """Raises in place of one operation of torch, and counts all."""

    def __init__(self, place=0, error=None):
        super().__init__()
        self.place, self.error, self.count = place, error, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += 1
        if self.count == self.place:
            raise self.error
        return operation(*args, **(kwargs or {}))


def load(precision):
    plain = narrow.load_patcher(PATH, precision, off_card=True)
    model, _ = apply_lora(plain, LORA, 1.0, how="bypass")
    return cache_steps(optimize(model, OptimizeSettings()), cache_settings("balanced"))


def latent(model, noise=None):
    return narrow.sample(model, [[random(1, 7, narrow.SHAPE.joint_dim), {}]], steps=6, noise=noise)


def paint(model, vae, noise=None):
    return decode(vae, latent(model, noise), ours=True)[0]


def live():
    """How many tensors there are, and of how many bytes."""
    gc.collect()
    tensors = [it for it in gc.get_objects() if type(it) in KINDS]
    held = [it.untyped_storage() for it in tensors if type(it) is not QuantizedTensor]
    return len(tensors), sum({it.data_ptr(): it.nbytes() for it in held}.values())


@pytest.mark.usefixtures("inference_mode")
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_run_that_fails_anywhere(precision, error):
    model, vae = load(precision), load_vae(ROOT / "models" / "micro")[0]
    known = paint(model, vae)
    assert report_of(model).startswith("blocks: fused, ")
    with FailingAt() as all_of_them:
        assert torch.equal(paint(model, vae), known)
    before, missed = live(), []
    for number in range(PLACES):
        place = 1 + number * (all_of_them.count - 1) // (PLACES - 1)
        try:
            with FailingAt(place, ERRORS[error]):
                paint(model, vae)
            missed.append(place)
        except (type(ERRORS[error]), UnavailableError):  # the decode says what to choose
            pass
        ERRORS[error].__traceback__ = None
        assert torch.equal(paint(model, vae), known), place
        assert live() == before, place
    # Out of memory is tried again: a pass, and a decode in tiles. The last place may be
    # one too many.
    assert set(missed) <= {all_of_them.count} if error == "cancel" else len(missed) < PLACES


@pytest.mark.cuda
@pytest.mark.usefixtures("inference_mode")
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_card_that_is_full_anywhere(precision):
    """As beside another process's ballast, by torch's limit of what this process may take."""
    model, vae, ended = load(precision), load_vae(ROOT / "models" / "micro")[0], 0
    noise, total = random(1, 16, 1, 256, 256), torch.cuda.get_device_properties(0).total_memory
    unload = comfy.model_management.unload_all_models

    def most(run):
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated()

    latent(model, noise)  # measures what is the fastest
    known = paint(model, vae, noise)
    unload()
    before, held = live(), torch.cuda.memory_allocated()
    sampled = most(lambda: latent(model, noise))
    decoded = most(lambda: paint(model, vae, noise))
    for number in range(2 * PLACES):
        low, high = (held, sampled) if number < PLACES else (sampled, decoded)
        limit = low + number % PLACES * (high - low) // PLACES
        unload()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(limit / total)
        try:
            paint(model, vae, noise)
        except (torch.OutOfMemoryError, UnavailableError):
            ended += 1
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert torch.equal(paint(model, vae, noise), known), number
        unload()
        assert live() == before, number
    assert ended > PLACES // 2


@pytest.mark.usefixtures("inference_mode")
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_load_that_fails_anywhere(precision):
    def fails_at(place):
        # safetensors makes its tensors past torch.
        read = mock.patch("comfy.utils.load_torch_file", return_value=load_file(PATH))
        with read, FailingAt(place, ERRORS["memory"]) as mode:
            narrow.load_patcher(PATH, precision, off_card=True)
        return mode.count

    comfy.model_management.unload_all_models()  # of other tests
    count = fails_at(0)
    before = live()
    for number in range(PLACES):
        place = 1 + number * (count - 1) // (PLACES - 1)
        # torch makes another error of one in load_state_dict.
        with pytest.raises(RuntimeError, match="CUDA out of memory"):
            fails_at(place)
        ERRORS["memory"].__traceback__ = None
        assert live() == before, place


@pytest.mark.host_has("comfy.model_base.QwenImage21")
@pytest.mark.usefixtures("inference_mode")
@pytest.mark.parametrize("whole_run", [False, True], ids=["pass again", "run again"])
def test_nan_of_attention_in_any_call_of_21(whole_run, monkeypatch):
    """What filled the prefix cache with NaN, or looks up the second prompt twice."""
    calls, bad = 0, 0

    def broken(out, q, _):
        nonlocal calls
        if q.shape[1] != TRIAL_TOKENS:
            calls += 1
            if calls == bad:
                out[0, -1] = torch.nan
        return out

    published_attention.on_every_device(monkeypatch, broken)
    model = strong_21()
    more = {"reference_latents": [random(1, 64, 4, 4)], "image_slots": [3]}
    texts = [[[random(1, tokens, TEXT, seed=tokens), more]] for tokens in (20, 7)]
    one = lambda model: narrow.sample(model, *texts, cfg=2.5, noise=random(1, 64, 8, 8))  # noqa: E731
    known, clone = one(model), optimize(model, OptimizeSettings(attention="kitchen_int8"))
    with mock.patch.object(Later, "ready", not whole_run):
        clean, most = one(clone), calls
        assert most >= 8
        for call in range(1, most + 1):
            calls, bad = 0, call
            found = one(clone)
            assert re.search("kitchen_int8.* gave NaN", report_of(clone)), call
            assert narrow.difference(found, known) < 0.03, call
            bad = 0
            assert torch.equal(one(clone), clean), call


@pytest.mark.usefixtures("inference_mode")
def test_switches_of_torch_that_another_pack_changes_between_two_prompts():
    """The modulation is computed anew; reading the older switch of TF32 would raise."""
    model, vae = load("bf16"), load_vae(ROOT / "models" / "micro")[0]
    known, switches = paint(model, vae), torch.backends.cuda.matmul
    for name, value in (("fp32_precision", "tf32"), ("allow_fp16_accumulation", True)):
        if not hasattr(switches, name):  # of a newer torch
            continue
        before = getattr(switches, name)
        setattr(switches, name, value)
        try:
            assert torch.equal(paint(model, vae), known)  # the processor has neither
            assert re.search("used .* times, [1-9].* computed in this run", report_of(model))
        finally:
            setattr(switches, name, "ieee" if before == "none" else before)
        assert torch.equal(paint(model, vae), known)


FAILS = {
    "compile": RuntimeError(
        "Failed to find C compiler. Please specify via CC environment variable"
    ),
    "read-only": PermissionError(13, "Permission denied", "/root/.triton/cache/x"),
    "full": OSError(28, "No space left on device", "/root/.triton/cache/x"),
}


@pytest.mark.usefixtures("inference_mode")
@pytest.mark.parametrize("kernel", ["residual_norm", "qk_norm_rope", "low_rank_rows"])
@pytest.mark.parametrize("error", FAILS)
def test_a_kernel_that_does_not_compile(kernel, error):
    """Of the first block, or one that only the second block needs, for its LoRA."""
    plain = narrow.load_patcher(PATH, "bf16", off_card=True)
    model, _ = apply_lora(plain, LATE_LORA, 1.0, how="bypass")
    one = lambda model: narrow.sample(model, [[random(1, 7, narrow.SHAPE.joint_dim), {}]])  # noqa: E731
    known, clone = one(model), optimize(model, OptimizeSettings())

    def fails(*_, **__):
        raise FAILS[error]

    ops = with_kernels(fused.choose_ops(torch.device("cpu")), **{kernel: fails})
    with mock.patch("qwen_l40s.optimizations.blocks.host.choose_ops", lambda device: ops):
        assert narrow.difference(one(clone), known) < 1e-5
        assert f"the fused block raised {first_line(FAILS[error])}" in report_of(clone)
    assert narrow.difference(one(clone), known) < 1e-5
    assert report_of(clone).startswith("blocks: fused, ")


@pytest.mark.usefixtures("inference_mode")
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_cancel_or_an_unload_at_every_step(precision):
    comfy.model_management.unload_all_models()  # of other tests
    model, steps = load(precision), 4
    text = [[random(1, 7, narrow.SHAPE.joint_dim), {}]]
    one = lambda **more: narrow.sample(model, text, steps=steps, **more)  # noqa: E731
    known = one()
    comfy.model_management.unload_all_models()
    assert torch.equal(one(), known)
    before, cancel = live(), ERRORS["cancel"]
    for at in range(steps):

        def cancels(step, *_, at=at):
            if step == at:
                raise cancel

        def unloads(step, *_, at=at):
            if step == at:
                comfy.model_management.unload_all_models()

        with pytest.raises(type(cancel)):
            one(callback=cancels)
        cancel.__traceback__ = None
        assert torch.equal(one(), known), at
        assert live() == before, at
        assert torch.equal(one(callback=unloads), known), at
        assert torch.equal(one(), known), at
        assert live() == before, at


def handles_of(path):
    """Open files and mappings of this process by a file, whatever it is called by now."""
    files = (it.resolve() for it in Path("/proc/self/fd").iterdir() if it.exists())
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sum(it == path for it in files) + sum(f" {path}" in line for line in maps)


@pytest.mark.usefixtures("inference_mode")
@pytest.mark.parametrize("gone", ["removed", "replaced"])
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads Linux's /proc")
def test_a_file_that_goes_while_it_is_mapped(gone, tmp_path):
    """As downloads and file managers do it; the next load reads what is there then."""
    path = narrow.write(tmp_path / "model.safetensors", WEIGHTS)
    text = [[random(1, 7, narrow.SHAPE.joint_dim), {}]]
    model = optimize(narrow.load_patcher(path, off_card=True), OptimizeSettings())
    known = narrow.sample(model, text)
    assert handles_of(path)
    if gone == "removed":
        path.unlink()
    else:
        other = narrow.write(tmp_path / "new", {name: it * 1.1 for name, it in WEIGHTS.items()})
        other.replace(path)
        new = optimize(narrow.load_patcher(path, off_card=True), OptimizeSettings())
        assert not torch.equal(narrow.sample(new, text), known)
        del new
    assert torch.equal(narrow.sample(model, text), known)
    comfy.model_management.unload_all_models()
    del model
    gc.collect()
    assert handles_of(path) == 0
