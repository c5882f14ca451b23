"""`qwen-l40s quantize` as a command."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from qwen_l40s import __version__
from qwen_l40s.cli import main
from qwen_l40s.errors import CheckpointError
from qwen_l40s.loaders import quantized_file
from qwen_l40s.loaders.checkpoint import inspect_checkpoint
from qwen_l40s.loaders.header import DTYPE_BITS, read_header
from qwen_l40s.loaders.quantize import (
    layers_to_quantize,
    quantize_rows,
    relative_error,
    row_format,
)
from qwen_l40s.loaders.quantized_file import plan_quantized, write_quantized
from qwen_l40s.loaders.source import open_source
from qwen_l40s.loaders.stored import StoredLayer
from qwen_l40s.spec.formats import QUANTIZED

pytestmark = pytest.mark.usefixtures("one_thread")

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
MICRO = ROOT / "models" / "micro"
WEIGHTS = MICRO / "transformer" / "diffusion_pytorch_model.safetensors"
CONFIG = WEIGHTS.parent / "config.json"
LAYER = "transformer_blocks.0.attn.to_q"


@pytest.fixture(scope="module")
def weights():
    return load_file(WEIGHTS)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantized")
    paths = {format: folder / f"{format}.safetensors" for format in QUANTIZED}
    for format, path in paths.items():
        assert command(MICRO, path, format) == 0
    return paths


def command(source, destination, precision="int8", *more):
    arguments = ["quantize", str(source), str(destination), "--precision", precision]
    return main([*arguments, "--device", "cpu", *more])


def layers_of(tensors):
    return [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]


# --- what is written


@pytest.mark.parametrize("format", QUANTIZED)
def test_every_tensor_of_the_file(tmp_path, capsys, files, weights, format, device):
    path = tmp_path / "out.safetensors"
    assert command(MICRO, path, format, "--device", device.type) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["device"].startswith(device.type)
    assert path.read_bytes() == files[format].read_bytes()
    written = load_file(path)
    quantized = layers_to_quantize(layers_of(weights))
    assert len(quantized) == 6 * 12
    names = {f"{layer}.{end}" for layer in quantized for end in ("weight_scale", "comfy_quant")}
    assert set(written) == set(weights) | names
    for name, tensor in weights.items():
        layer = name.removesuffix(".weight")
        if name.endswith(".weight") and layer in quantized:
            form = row_format(format, tensor.shape[1])
            size = 64 if tensor.shape[1] == 128 else 256
            assert form.rotation == (0 if format == "fp8" else size)
            values, scale = quantize_rows(tensor, format, rotation=form.rotation)
            stored = StoredLayer.rounded(values, scale, form).tensors(layer)
            assert torch.equal(written[name].float(), values.float())
            assert written[name].dtype == values.dtype
            assert torch.equal(written[f"{layer}.weight_scale"], scale)
            marker = f"{layer}.comfy_quant"
            assert torch.equal(written[marker], stored[marker])
        else:
            assert written[name].dtype == torch.bfloat16
            assert torch.equal(written[name], tensor.bfloat16())


@pytest.mark.parametrize("format", QUANTIZED)
def test_the_file_is_what_readers_want(files, format):
    header = read_header(files[format])
    assert header.data_start % 8 == 0
    for info in header.tensors.values():
        assert info.start % (DTYPE_BITS[info.dtype] // 8) == 0
    assert header.metadata["format"] == "pt"
    assert json.loads(header.metadata["qwen_l40s"]) == {
        "source": "micro",
        "precision": format,
        "format": {"fp8": "float8_e4m3fn_rowwise", "int8": "int8_tensorwise"}[format],
        "keep": [],
        "version": __version__,
        "config": {"axes_dims_rope": json.loads(CONFIG.read_text())["axes_dims_rope"]},
    }
    # No tensor tells it, and the file has no config.json beside it.
    assert open_source(files[format], "transformer").config["axes_dims_rope"]
    (part,) = inspect_checkpoint(files[format]).parts
    form = {"fp8": "fp8 e4m3, scaled per row", "int8": "int8 ConvRot"}[format]
    assert part.quantization.formats == {form: 72}
    assert part.quantization.granularity == {"per row": 72}
    assert part.cannot_run == part.errors == ()


def test_the_report_is_the_last_line(tmp_path, weights, capsys):
    path = tmp_path / "out.safetensors"
    assert command(MICRO, path, "fp8", "--keep", "transformer_blocks.0.*", "*.img_mlp.net.2") == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["path"] == str(path)
    assert report["source"] == str(MICRO / "transformer")
    assert report["bytes_before"] == sum(tensor.nbytes for tensor in weights.values())
    assert report["bytes_after"] == path.stat().st_size
    assert report["quantized"] == 72 - 17
    assert len(report["kept"]) == 12 + 5
    assert LAYER in report["kept"]
    assert report["seconds"] > 0
    assert report["readers"].startswith("this package only")
    errors = {
        layer: relative_error(weight, *quantize_rows(weight, "fp8"))
        for layer in layers_to_quantize(layers_of(weights)) - set(report["kept"])
        for weight in [weights[f"{layer}.weight"]]
    }
    assert report["worst_layer"] == max(errors, key=errors.get)
    assert report["worst_error"] == pytest.approx(max(errors.values()))
    assert report["mean_error"] == pytest.approx(sum(errors.values()) / len(errors))
    written = load_file(path)
    assert torch.equal(written[f"{LAYER}.weight"], weights[f"{LAYER}.weight"].bfloat16())
    assert f"{LAYER}.weight_scale" not in written


def test_the_source_in_every_form_gives_the_same_tensors(tmp_path, weights, files):
    expected = load_file(files["int8"])
    prefixed = {f"model.diffusion_model.{name}": weight for name, weight in weights.items()}
    prefixed["vae.decoder.middle.0.residual.0.gamma"] = torch.ones(3)
    save_file(prefixed, tmp_path / "full.safetensors", {"title": "kept", "format": "pt"})
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    index = {}
    for place, names in enumerate((sorted(weights)[::2], sorted(weights)[1::2]), 1):
        shard = f"diffusion_pytorch_model-{place:05}-of-00002.safetensors"
        save_file({name: weights[name] for name in names}, sharded / shard)
        index |= dict.fromkeys(names, shard)
    index = json.dumps({"weight_map": index})
    (sharded / "diffusion_pytorch_model.safetensors.index.json").write_text(index)
    for source in (WEIGHTS, sharded, tmp_path / "full.safetensors"):
        path = tmp_path / "out.safetensors"
        assert command(source, path, "int8", "--overwrite") == 0
        found = load_file(path)
        assert set(found) == set(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["title"] == "kept"
        assert json.loads(file.metadata()["qwen_l40s"])["source"] == "full.safetensors"


def test_markers_are_kept_and_edit_2511_gets_the_one_that_comfyui_looks_for(tmp_path, weights):
    """In a diffusers folder, config.json says what a tensor without values says in ComfyUI."""
    folder = tmp_path / "transformer"
    shutil.copytree(WEIGHTS.parent, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"zero_cond_t": True}))
    marker = {"__index_timestep_zero__": torch.empty(0)}
    save_file({**weights, **marker}, tmp_path / "marked.safetensors")
    for source in (folder, tmp_path / "marked.safetensors"):
        path = tmp_path / "out.safetensors"
        assert command(source, path, "int8", "--overwrite") == 0
        assert load_file(path)["__index_timestep_zero__"].dtype == torch.float32
        assert inspect_checkpoint(path).parts[0].family == "Qwen-Image-Edit-2511"


@pytest.mark.parametrize("format", QUANTIZED)
def test_what_the_file_says_of_attention_is_kept(tmp_path, weights, files, format, capsys):
    name = "transformer_blocks.1.attn.comfy_attention.config"
    text = b'[ {"attention": "comfy_kitchen_sol", "tau": 0.8}, {"attention":"comfy_kitchen_int8"} ]'
    said = {name: torch.tensor(list(text), dtype=torch.uint8)}
    save_file({**weights, **said}, tmp_path / "in.safetensors")
    path = tmp_path / "out.safetensors"
    assert command(tmp_path / "in.safetensors", path, format) == 0
    found, expected = load_file(path), load_file(files[format])
    assert bytes(found.pop(name).tolist()) == text
    assert set(found) == set(expected)
    assert all(torch.equal(found[key].float(), expected[key].float()) for key in expected)
    capsys.readouterr()
    assert main(["inspect", str(path)]) == 0
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line]
    assert ["attention", "comfy_kitchen_sol, else comfy_kitchen_int8 (1)"] in rows


def test_progress_counts_the_bytes_of_the_source(tmp_path):
    seen = []
    plan = plan_quantized(WEIGHTS, "int8")
    path = tmp_path / "out.safetensors"
    write_quantized(plan, path, progress=lambda *counts: seen.append(counts))
    assert seen == sorted(seen)
    assert seen[-1] == (plan.source.part.bytes, plan.source.part.bytes)
    assert len(seen) == plan.source.part.tensors
    assert plan.layout.file_bytes == path.stat().st_size


# --- what is refused


def refused(capsys, folder, *arguments):
    """Runs the command that must fail; gives its one sentence, after checking the folder."""
    before = {path: path.stat().st_size for path in folder.rglob("*")}
    assert command(*arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert len(output.err.splitlines()) == 1
    assert {path: path.stat().st_size for path in folder.rglob("*")} == before
    return output.err


def fp8(weights):
    return {name: weight.to(torch.float8_e4m3fn) for name, weight in weights.items()}


def given(name, tensor=None):
    """A source with this tensor; without it for None."""
    left = {} if tensor is None else {name: tensor}
    return lambda weights: {it: w for it, w in weights.items() if it != name} | left


def spoiled(name, value):
    def change(weights):
        tensor = weights[name].clone()
        tensor.view(-1)[-1] = value
        return weights | {name: tensor}

    return change


FLUX = {"double_blocks.0.img_attn.qkv.weight": torch.ones(3)}
E4M3, I32 = torch.ones(64).to(torch.float8_e4m3fn), torch.ones(128, 128, dtype=torch.int32)
# {name: (the source, what the error names, further arguments)}; one is made of the weights.
REFUSED = {
    "int8": ("int8", "int8 ConvRot in 72 layers", "fp8"),
    "fp8 by rows": ("fp8", "fp8 e4m3, scaled per row in 72 layers", "fp8"),
    "fp8": (fp8, "fp8 e4m3, unscaled in", "fp8"),
    "fp8 to int8": (fp8, "start from the bf16 file", "int8"),
    "a VAE": (MICRO / "vae", "Qwen-Image VAE"),
    "a text encoder": (MICRO / "text_encoder", "Qwen2.5-VL text encoder"),
    "FLUX": (lambda _: FLUX, "not Qwen-Image"),
    "no file": (MICRO / "no.safetensors", "no such file"),
    "no weight": (given(f"{LAYER}.weight"), f"'{LAYER}.weight'"),
    "a weight in int32": (given(f"{LAYER}.weight", I32), f"{LAYER}.weight' as I32"),
    "a bias in fp8": (given("proj_out.bias", E4M3), "'proj_out.bias' as F8_E4M3"),
    "a scale": (given(f"{LAYER}.input_scale", torch.ones(())), f"'{LAYER}.input_scale'"),
    "a marker": (given("scaled_fp8", torch.ones(2)), "'scaled_fp8'"),
    **{
        f"{value} in {name}": (spoiled(name, value), f"{name!r} has NaN or infinity")
        for name in (f"{LAYER}.weight", f"{LAYER}.bias", "img_in.weight")
        for value in (float("nan"), float("-inf"))
    },
    "fp4": (MICRO, "'fp4'", "fp4"),
    "no such layer": (MICRO, "'blocks.0.*'", "fp8", "--keep", "blocks.0.*"),
    "no layer": (MICRO, "leaves no layer", "fp8", "--keep", "*"),
    "a device": (MICRO, "'tpu'", "fp8", "--device", "tpu"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named_in_one_sentence(tmp_path, capsys, files, weights, name):
    source, named, *more = REFUSED[name]
    if callable(source):
        tensors, source = source(weights), tmp_path / "in.safetensors"
        save_file(tensors, source)
    source = files.get(source, source)
    assert named in refused(capsys, tmp_path, source, tmp_path / "out.safetensors", *more)


def test_a_source_that_is_cut_off(tmp_path, capsys):
    (tmp_path / "in.safetensors").write_bytes(WEIGHTS.read_bytes()[:-1])
    sentence = refused(capsys, tmp_path, tmp_path / "in.safetensors", tmp_path / "out.safetensors")
    assert "is truncated" in sentence


def test_destinations(tmp_path, capsys):
    source = shutil.copy(WEIGHTS, tmp_path / "in.safetensors")
    there = tmp_path / "there.safetensors"
    there.write_text("precious")
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "link.safetensors").symlink_to(source)
    for destination, rule in (
        (there, "exists: choose another name"),
        (tmp_path / "out.bin", "must end in .safetensors"),
        (tmp_path / "no" / "out.safetensors", "create it first"),
        (tmp_path / "folder.safetensors", "is a folder"),
        (source, "is the file to read"),
        (tmp_path / "link.safetensors", "is the file to read"),
    ):
        assert rule in refused(capsys, tmp_path, source, destination)
    sentence = refused(capsys, tmp_path, source, source, "int8", "--overwrite")
    assert "is the file to read" in sentence
    assert command(source, there, "int8", "--overwrite") == 0
    assert inspect_checkpoint(there).parts[0].quantization.formats == {"int8 ConvRot": 72}


def test_a_disk_without_room(tmp_path, capsys, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**9, 10**9, 5_000_000))
    sentence = refused(capsys, tmp_path, MICRO, tmp_path / "out.safetensors")
    assert "The file takes 5 MiB, but the disk has 5 MiB free" in sentence


# --- what is left behind


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_nothing_is_left_of_work_that_was_stopped(tmp_path, error):
    path = tmp_path / "out.safetensors"
    path.write_text("precious")

    def stop(done, total):
        assert len(list(tmp_path.iterdir())) == 2
        if done > total / 2:
            raise error

    with pytest.raises(error):
        write_quantized(plan_quantized(MICRO, "int8"), path, overwrite=True, progress=stop)
    assert [file.name for file in tmp_path.iterdir()] == ["out.safetensors"]
    assert path.read_text() == "precious"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_where_a_terminal_or_container_ends(tmp_path, monkeypatch, number):
    def end(source):
        assert list(tmp_path.glob(".*.part"))
        os.kill(os.getpid(), number)

    monkeypatch.setattr(quantized_file, "check_unchanged", end)
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(number, signal.SIG_DFL)  # under nohup it is ignored, by the command too
        arguments = [str(MICRO), str(tmp_path / "out.safetensors"), "--precision", "int8"]
        assert main(["quantize", *arguments]) == 130
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert not list(tmp_path.iterdir())


def test_a_source_that_changes_meanwhile(tmp_path):
    shutil.copytree(MICRO, tmp_path / "micro")
    source = tmp_path / "micro" / WEIGHTS.relative_to(MICRO)
    plan, path = plan_quantized(tmp_path / "micro", "int8"), tmp_path / "out.safetensors"

    def change(done, total):
        os.utime(source, ns=(0, done))

    with pytest.raises(CheckpointError, match=r"changed while it was read.*load it again once"):
        write_quantized(plan, path, progress=change)

    def remove(done, total):
        source.unlink(missing_ok=True)

    with pytest.raises(CheckpointError, match="changed while it was read"):
        write_quantized(plan, path, progress=remove)
    assert [file.name for file in tmp_path.iterdir()] == ["micro"]


def test_a_disk_that_fills_up(tmp_path):
    """A limit on the size of files is what a full disk is, for one process."""

    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000))

    path = tmp_path / "out.safetensors"
    arguments = [MICRO, path, "--precision", "int8", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, ROOT, "quantize", *arguments],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=small_files,
    )
    assert done.returncode == 2, done.stderr
    assert "cannot write (File too large): create the folder" in done.stderr
    assert list(tmp_path.iterdir()) == []
