"""The kept file: what a load has quantized, taken by the next load instead of quantizing again."""

import contextlib
import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path
from unittest import mock

import comfy.model_management
import comfy.sample
import comfy.utils
import folder_paths
import narrow_transformer as narrow
import pytest
import torch
from comfyui_boot import BASE, ROOT
from safetensors.torch import load_file, save_file

from qwen_l40s.errors import CheckpointError
from qwen_l40s.hosts.comfyui.load import choose, weights
from qwen_l40s.hosts.comfyui.load import plan as load_plan
from qwen_l40s.hosts.comfyui.lora.apply import apply_lora
from qwen_l40s.loaders import writer
from qwen_l40s.loaders import writer as kept
from qwen_l40s.loaders.source import open_source
from qwen_l40s.nodes.loaders import QwenL40SLoad, QwenL40SLoadModel
from qwen_l40s.spec.formats import CardFacts

pytestmark = pytest.mark.usefixtures("inference_mode")
WEIGHTS = narrow.weights()
LAYER = narrow.LAYER
ADA = CardFacts("NVIDIA L40S", 48 * 2**30, (8, 9))
KEEP = "*.img_mlp.net.2"
TAKEN, BEING = "weights from the cached quantized file", "is being saved for the next load"


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A models/diffusion_models that is empty, and models/checkpoints in it."""
    known = dict(folder_paths.folder_names_and_paths)
    for name in ("diffusion_models", "checkpoints", "diffusers"):
        (tmp_path / name).mkdir()
        known[name] = ([str(tmp_path / name)], known[name][1])
    monkeypatch.setattr(folder_paths, "folder_names_and_paths", known)
    monkeypatch.setattr(folder_paths, "filename_list_cache", {})
    return tmp_path / "diffusion_models"


@pytest.fixture
def original(models):
    return narrow.write(models / "qwen.safetensors", WEIGHTS)


def load(name="qwen.safetensors", precision="int8", keep_quantized=True, keep=""):
    values = {"model": name, "precision": precision, "keep_in_bf16": keep}
    output = QwenL40SLoadModel.execute(**values, keep_quantized=keep_quantized)
    written()
    return output.args


def written():
    for thread in threading.enumerate():
        if thread.name == "keep_quantized":
            thread.join()


def taken(**settings):
    with mock.patch.object(weights, "quantize_shown", side_effect=AssertionError):
        model, report = load(**settings)
    assert TAKEN in report
    return model, report


def same(*models):
    first, second = (
        {name: it for name, it in model.model.diffusion_model.state_dict().items() if it.numel()}
        for model in models
    )
    assert first.keys() == second.keys()
    for name, one in first.items():
        other = second[name]
        assert (one.dtype, one.shape) == (other.dtype, other.shape), name
        assert torch.equal(*(it.contiguous().view(torch.uint8) for it in (one, other))), name


def sample(model):
    return narrow.sample(model, 20, 7, cfg=2.0)


def contents(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def forms(models):
    """{choice: (where its kept file is, `keep_in_bf16`)}"""
    narrow.write(models / "qwen.safetensors", WEIGHTS)
    whole = {f"model.diffusion_model.{name}": weight for name, weight in WEIGHTS.items()}
    whole |= {"first_stage_model.decoder.conv1.weight": torch.ones(1)}
    narrow.write(models.parent / "checkpoints" / "whole.safetensors", whole)
    halves = {name: weight.half() for name, weight in WEIGHTS.items()}
    narrow.write(models / "half.safetensors", halves)
    shards = narrow.sharded(models / "shards", WEIGHTS, config={"zero_cond_t": True})
    pipeline = models.parent / "diffusers" / "pipeline"
    part = narrow.sharded(pipeline / "transformer", WEIGHTS)
    (pipeline / "model_index.json").write_text('{"_class_name": "QwenImageEditPlusPipeline"}')
    return {
        "qwen.safetensors": (models / "qwen.safetensors", KEEP),
        "whole.safetensors": (models.parent / "checkpoints" / "whole.safetensors", ""),
        "half.safetensors": (models / "half.safetensors", ""),
        "shards/": (shards, ""),
        "pipeline/": (part, KEEP),
    }


@pytest.mark.each_device
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_weights_and_latents_are_those_of_quantizing_at_load(models, tmp_path, precision):
    save_file(narrow.lora(WEIGHTS, [LAYER]), tmp_path / "lora.safetensors")
    for name, (path, keep) in forms(models).items():
        settings = {"name": name, "precision": precision, "keep": keep}
        made, report = load(**settings, keep_quantized=False)
        assert report.count("cache_quantized_file") == 1
        file = path.with_name(f"{path.name}.{precision}.kept")
        assert not file.exists()
        _, report = load(**settings)
        assert f"cache_quantized_file: {file.name} (" in report and BEING in report
        found, report = taken(**settings)
        assert f"{TAKEN} {file.name}." in report
        source = open_source(choose.resolve(name, "transformer"), "transformer")
        assert report.startswith(f"transformer: {source.part.family} from {source.path}\n")
        same(made, found)
        assert made.model_size() == found.model_size()
        assert torch.equal(sample(made), sample(found))
        for mode in ("merge", "bypass"):
            patched = [
                apply_lora(model, tmp_path / "lora.safetensors", 1.0, how=mode)[0]
                for model in (made, found)
            ]
            assert torch.equal(*map(sample, patched))


def test_off_or_in_bf16_nothing_is_written_and_auto_takes_what_is_there(models, original):
    load(keep_quantized=True)
    _, report = load(keep_quantized=False)
    assert TAKEN not in report
    before = contents(models)
    with mock.patch.object(load_plan, "card_facts", return_value=ADA):
        _, report = load(precision="auto", keep_quantized=False)
    assert f"{TAKEN} qwen.safetensors.int8.kept." in report
    _, report = load(precision="bf16")
    assert "cache_quantized_file" not in report
    narrow.write(models / "int8.safetensors", load_file(models / "qwen.safetensors.int8.kept"))
    _, report = load("int8.safetensors")
    assert "cache_quantized_file" not in report
    assert contents(models) == sorted([*before, "int8.safetensors"])


def test_the_node_for_all_three_parts_has_it_too():
    folder = Path(folder_paths.models_dir) / "diffusers" / "copy"
    shutil.copytree(ROOT / "models" / "micro", folder)
    try:
        for words in (BEING, TAKEN):
            found = QwenL40SLoad.execute(
                "copy/", "int8", "automatic", "automatic", "", keep_quantized=True
            )
            written()
            assert words in found.args[-1]
    finally:
        shutil.rmtree(folder)


def test_no_list_of_models_has_it(models, original):
    load()
    load(precision="fp8")
    names = ["qwen.safetensors", "qwen.safetensors.fp8.kept", "qwen.safetensors.int8.kept"]
    assert contents(models) == names
    # What a write has there meanwhile, or leaves when it is killed.
    for name in (".qwen.safetensors.int8.kept.lock", ".qwen.safetensors.int8.kept.0f.part"):
        (models / name).touch()
    folder_paths.filename_list_cache.clear()
    for kind in ("diffusion_models", "checkpoints"):
        assert set(folder_paths.get_filename_list(kind)) <= {"qwen.safetensors"}
    assert [name for name in choose.choices("transformer") if "qwen" in name] == names[:1]
    assert open_source(models, "transformer").files == (original,)


def test_it_is_a_quantized_file_like_others(models, original):
    """Under another name it is a model; its header says how a head is split."""
    made, _ = load()
    (models / "qwen.safetensors.int8.kept").rename(models / "named.safetensors")
    found, _ = load("named.safetensors", "as stored", keep_quantized=False)
    same(made, found)


def rewritten(original):
    narrow.write(original, {**WEIGHTS, f"{LAYER}.bias": WEIGHTS[f"{LAYER}.bias"] + 1})


def touched(original):
    state = original.stat()
    os.utime(original, ns=(state.st_atime_ns, state.st_mtime_ns + 1))


def another_header(original):
    """Of the same size and time."""
    state = original.stat()
    data = original.read_bytes()
    with original.open("r+b") as file:
        at = data.index(b"img_mod.1.weight")
        other = data.index(b"txt_mod.1.weight")
        for place, name in ((at, b"txt_mod.1.weight"), (other, b"img_mod.1.weight")):
            file.seek(place)
            file.write(name)
    os.utime(original, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert original.stat().st_size == state.st_size


@pytest.mark.parametrize("change", [rewritten, touched, another_header])
def test_another_original_is_quantized_anew(models, original, change):
    load()
    change(original)
    made, report = load()
    assert BEING in report
    found, _ = taken()
    same(made, found)
    assert len(contents(models)) == 2


def test_other_settings_are_quantized_anew(models, original, monkeypatch):
    load()
    file = models / "qwen.safetensors.int8.kept"
    before = file.stat().st_size
    _, report = load(keep=KEEP)
    assert BEING in report and file.stat().st_size > before
    _, report = taken(keep=KEEP)
    assert "layers kept in" in report
    monkeypatch.setattr(kept, "FORMAT", kept.FORMAT + 1)
    _, report = load(keep=KEEP)
    assert BEING in report
    _, report = load(precision="fp8")
    assert BEING in report
    assert len(contents(models)) == 3


@pytest.mark.parametrize("damage", ["cut", "empty", "foreign", "no metadata"])
def test_a_damaged_file_is_quantized_anew(models, original, damage):
    load()
    file = models / "qwen.safetensors.int8.kept"
    whole = file.read_bytes()
    if damage == "no metadata":
        save_file(load_file(file), file)
    else:
        file.write_bytes({"cut": whole[:-1], "empty": b"", "foreign": b"PK\x03\x04" * 9}[damage])
    _, report = load()
    assert BEING in report
    assert file.read_bytes() == whole
    taken()


@pytest.mark.parametrize("folder_is_read_only", [False, True])
def test_a_file_of_damaged_scales_is_quantized_anew(models, original, folder_is_read_only):
    made, _ = load()
    file = models / "qwen.safetensors.int8.kept"
    whole = file.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    begin, end = json.loads(whole[8:start])[f"{LAYER}.weight_scale"]["data_offsets"]
    damaged = whole[: start + begin] + bytes(end - begin) + whole[start + end :]
    file.write_bytes(damaged)
    refuses = mock.patch.object(kept, "lock", side_effect=OSError(errno.EROFS, "Read-only"))
    with refuses if folder_is_read_only else contextlib.nullcontext():
        found, report = load()
    same(made, found)
    if folder_is_read_only:
        assert "no file is saved: cannot write (Read-only)" in report
    else:
        assert BEING in report and file.read_bytes() == whole
        taken()


def refused(models, *words):
    """A load that works, keeps nothing, leaves nothing and says why in one line."""
    _, report = load()
    (line,) = [line for line in report.splitlines() if "cache_quantized_file" in line]
    assert "no file is saved" in line and all(word in line for word in words), line
    assert contents(models) == ["qwen.safetensors"]


def test_a_dtype_that_is_not_written(models):
    """Of a tensor that ComfyUI passes over."""
    foreign = {"__foreign": torch.zeros(2, dtype=torch.uint16)}
    narrow.write(models / "qwen.safetensors", WEIGHTS | foreign)
    refused(models, "a tensor is torch.uint16")


def test_a_read_only_folder(models, original):
    real = Path.open

    def read_only(path, mode="r", *rest, **more):
        if set(mode) & set("wax+"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, mode, *rest, **more)

    with mock.patch.object(Path, "open", read_only):
        refused(models, "cannot write (Read-only file system)", str(models))


def test_a_folder_of_its_name(models, original):
    folder = models / "qwen.safetensors.int8.kept"
    folder.mkdir()
    refused(models, f"a folder has this name: rename it ({folder}).")


def test_a_disk_with_too_little_room(models, original, monkeypatch):
    load()
    size = (models / "qwen.safetensors.int8.kept").stat().st_size
    (models / "qwen.safetensors.int8.kept").unlink()
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, size * 11 // 10 - 1))
    refused(models, "needed and", "free disk space", str(models))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, size * 11 // 10 + 2))
    load()
    taken()


@pytest.mark.parametrize("left", [1.0, 0.5])
def test_a_disk_that_is_full_in_the_middle(models, original, caplog, file_limit, left):
    load()
    file = models / "qwen.safetensors.int8.kept"
    size = file.stat().st_size
    file.unlink()
    file_limit(int(size * left) - 1)
    with caplog.at_level(logging.INFO, kept.__name__):
        _, report = load()
    assert BEING in report
    (line,) = [record.getMessage() for record in caplog.records if record.name == kept.__name__]
    assert line.startswith(f"cache_quantized_file: {file.name} is not saved: cannot write (")
    assert contents(models) == ["qwen.safetensors"]


@pytest.mark.parametrize("change", [touched, lambda it: it.unlink(missing_ok=True)])
def test_an_original_that_changes_while_it_is_quantized(models, original, caplog, change):
    quantize, write = weights.quantize_shown, writer.TensorFile.write

    def quantized(*arguments, **more):
        touched(original)
        return quantize(*arguments, **more)

    def changing(file, name, tensor):
        change(original)
        write(file, name, tensor)

    with mock.patch.object(weights, "quantize_shown", quantized), pytest.raises(CheckpointError):
        load()
    with mock.patch.object(writer.TensorFile, "write", changing):
        load()
    assert "is not saved: " in caplog.messages[-1]
    assert contents(models) == [original.name] * original.exists()


def test_a_cancelled_load_writes_nothing(models, original):
    stop = comfy.model_management.InterruptProcessingException
    with (
        mock.patch.object(comfy.utils.ProgressBar, "update", side_effect=stop),
        pytest.raises(stop),
    ):
        load()
    assert contents(models) == ["qwen.safetensors"]


def test_host_memory_for_quantizing_is_not_asked_for(models, original):
    load()
    with mock.patch.object(load_plan, "available_memory", return_value=1000):
        taken()


@pytest.mark.host_has("comfy.storage.state_dict_fast_disk")
def test_a_fast_disk_is_known(models, original):
    with mock.patch("comfy.storage.fast_storage", return_value=True):
        made, _ = load()
        found, _ = taken()
        again = found.cached_patcher_init[0](*found.cached_patcher_init[1])
    assert (made.fast_disk, found.fast_disk, again.fast_disk) == (False, True, True)


def test_two_loads_write_it_once(models, original):
    write, going = writer.TensorFile.write, threading.Event()

    def waiting(file, name, tensor):
        assert going.wait(60)
        write(file, name, tensor)

    values = {"model": original.name, "precision": "int8", "keep_quantized": True}
    with mock.patch.object(writer.TensorFile, "write", waiting):
        _, first = QwenL40SLoadModel.execute(**values).args
        _, second = QwenL40SLoadModel.execute(**values).args
        going.set()
        written()
    assert BEING in first
    assert "no file is saved: another load is already saving" in second
    assert contents(models) == ["qwen.safetensors", "qwen.safetensors.int8.kept"]


# Other processes. They need no ComfyUI to write.

PROCESS = """
import sys, threading
import torch
sys.path.insert(0, {tests!r})
import comfyui_boot
comfyui_boot.import_package()
from qwen_l40s.loaders.writer import KeptFile
from qwen_l40s.loaders import writer
from qwen_l40s.loaders.source import open_source
write, slow = writer.TensorFile.write, threading.Event()
def slowly(file, name, tensor):
    write(file, name, tensor)
    slow.wait(0.01)
writer.TensorFile.write = slowly
kept = KeptFile(open_source({path!r}, "transformer"), "int8", ())
tensors = {{str(number): torch.zeros(9, 99) for number in range({count})}}
print(kept.write(tensors), flush=True)
{then}
"""


def process(original, count, then):
    values = {"tests": str(ROOT / "tests"), "path": str(original), "count": count, "then": then}
    command = [sys.executable, "-c", PROCESS.format(**values)]
    started = subprocess.Popen(command, cwd=BASE, stdout=subprocess.PIPE, text=True)
    return started, started.stdout.readline()


def test_of_two_processes_one_writes_and_what_a_killed_one_left_is_removed(models, original):
    other, said = process(original, 3000, "slow.wait()")
    try:
        assert BEING in said
        refusal = load()[1]
        assert "no file is saved: another load is already saving" in refusal
        assert any(name.endswith(".part") for name in contents(models))
    finally:
        other.kill()
        other.communicate()
    assert other.returncode == -signal.SIGKILL
    left = contents(models)
    assert [name.rpartition(".")[2] for name in left] == ["part", "lock", "safetensors"]
    _, report = load()
    assert BEING in report
    assert contents(models) == ["qwen.safetensors", "qwen.safetensors.int8.kept"]
    taken()


@pytest.mark.parametrize("end", ["pass", "raise KeyboardInterrupt", "sys.exit(3)"])
def test_a_process_that_ends_leaves_nothing(models, original, end):
    other, said = process(original, 3000, end)
    assert BEING in said
    other.communicate(timeout=60)
    assert contents(models) == ["qwen.safetensors"]
