"""SaveQuantized on models of every kind."""

import functools
import json
from dataclasses import replace

import comfy.model_management
import comfy.model_patcher
import comfy.sd
import comfy.supported_models
import comfy.utils
import comfyui_boot
import narrow_transformer as narrow
import pytest
import torch
from comfyui_boot import BASE
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from qwen_l40s.errors import CheckpointError, SettingError, UnavailableError
from qwen_l40s.hosts.comfyui.load.transformer import load_model
from qwen_l40s.hosts.comfyui.save import save_quantized
from qwen_l40s.loaders.quantize import dequantize_rows, quantize_rows
from qwen_l40s.loaders.source import open_source
from qwen_l40s.loaders.stored import rotate
from qwen_l40s.nodes.lora import QwenL40SLoadLora
from qwen_l40s.nodes.save import QwenL40SSaveQuantized
from qwen_l40s.spec.formats import QUANTIZED

pytestmark = pytest.mark.usefixtures("inference_mode")
LAYER, MODULATION = narrow.LAYER, narrow.MODULATION
NAME = f"{LAYER}.weight"
MODELS = BASE / "models" / "diffusion_models"
WEIGHTS = narrow.weights()
LAYERS = narrow.layers(WEIGHTS)
RANK, ALPHA, STRENGTH = 4, 2.0, 0.7
FP8 = torch.float8_e4m3fn


def model(precision="bf16", tensors=WEIGHTS, config=None):
    return load_model(narrow.write(BASE / "source.safetensors", tensors, config), precision)[0]


@functools.cache
def lora():
    """The name of a LoRA of every matrix in the blocks, and the change of each, in float32."""
    changed = [n for n, w in WEIGHTS.items() if "_blocks." in n and w.dim() == 2]
    layers = [name.removesuffix(".weight") for name in changed]
    tensors, changes = narrow.lora(WEIGHTS, layers, RANK), {}
    for layer in layers:
        down, up = (tensors[f"{layer}.lora_{end}.weight"] for end in ("down", "up"))
        tensors[f"{layer}.alpha"] = torch.tensor(ALPHA)
        changes[f"{layer}.weight"] = STRENGTH * (ALPHA / RANK) * (up @ down)
    folder = BASE / "models" / "loras"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "lora.safetensors")
    return "lora.safetensors", changes


def with_lora(base, how="merge"):
    patched, report = QwenL40SLoadLora.execute(base, lora()[0], STRENGTH, lora_mode=how).args
    assert f"{len(lora()[1])} of {len(lora()[1])} keys applied" in report
    return patched


def save(saved, precision, keep="", filename="saved", overwrite=True):
    output = QwenL40SSaveQuantized.execute(saved, precision, filename, overwrite, keep)
    (report,) = output.args
    path = MODELS / f"{filename}.safetensors"
    assert [file.name for file in MODELS.glob(f"*{filename}*")] == [path.name]
    return load_file(path), report


def settings(tensors, layer):
    return json.loads(bytes(tensors[f"{layer}.comfy_quant"].tolist()))


def dequantized(tensors, layer):
    values, scale = tensors[f"{layer}.weight"], tensors[f"{layer}.weight_scale"]
    return dequantize_rows(values, scale, torch.float32)


def is_rounded_once(tensors, precision, exact):
    for layer in LAYERS:
        stored = narrow.rounded(exact[f"{layer}.weight"], precision)
        for name, tensor in stored.tensors(layer).items():
            assert tensors[name].dtype == tensor.dtype
            assert torch.equal(tensors[name].float(), tensor.float()), name
    return True


def others_are(tensors, expected):
    quantized = {f"{layer}.weight" for layer in LAYERS}
    extra = {f"{layer}.{end}" for layer in LAYERS for end in ("weight_scale", "comfy_quant")}
    assert set(tensors) == set(expected) | extra
    for name in expected.keys() - quantized:
        assert tensors[name].dtype == torch.bfloat16, name
        assert torch.equal(tensors[name], expected[name].bfloat16()), name
    return True


def refused(error, *words, run=None, precision="int8", **settings):
    """Checks that a save, or `run`, is refused and writes nothing."""
    before = files_there()
    run = run or functools.partial(save, precision=precision, **settings)
    comfyui_boot.refused(error, *words, run=run)
    assert files_there() == before


def files_there():
    """{path: what changes when it is written}, of files and folders."""
    return {path: (path.stat().st_ino, path.stat().st_size) for path in BASE.rglob("*")}


def load_on_its_device(loaded):
    comfy.model_management.load_models_gpu([loaded])


# --- what is written


def test_a_bf16_model_is_rounded_once():
    for precision in QUANTIZED:
        tensors, report = save(model(), precision)
        assert is_rounded_once(tensors, precision, WEIGHTS) and others_are(tensors, WEIGHTS)
        assert f"24 layers in {precision}" in report, report
        assert report.splitlines()[1:] == [
            "In models/diffusion_models: press R, then choose the file in Load Qwen-Image Model"
        ]
        reader = {"int8": "ComfyUI itself", "fp8": "this package only"}[precision]
        assert reader in report


def test_the_file_says_what_no_tensor_tells():
    save(model(), "int8", keep="*.to_q")
    with safe_open(MODELS / "saved.safetensors", framework="pt") as file:
        entry = json.loads(file.metadata()["qwen_l40s"])
    assert entry["precision"] == "int8" and entry["format"] == "int8_tensorwise"
    assert entry["keep"] == ["*.to_q"] and entry["config"] == {"axes_dims_rope": narrow.AXES}
    assert str(BASE) not in json.dumps(entry)


def test_what_was_saved_loads_as_it_is_stored():
    for precision in QUANTIZED:
        tensors, _ = save(model(), precision)
        loaded, report = load_model(MODELS / "saved.safetensors")
        assert f"auto: the file holds {precision}" in report.text()
        held = loaded.model.diffusion_model.get_parameter(NAME)
        assert torch.equal(held._qdata.float(), tensors[NAME].float())
        assert torch.equal(held._params.scale, tensors[f"{LAYER}.weight_scale"])
        again, _ = save(loaded, precision, filename="again")
        assert again.keys() == tensors.keys()
        assert all(torch.equal(again[name].float(), tensors[name].float()) for name in tensors)


def test_a_lora_is_added_and_rounded_once():
    _, changes = lora()
    merged = {n: w.float() + changes[n] if n in changes else w for n, w in WEIGHTS.items()}
    for precision in QUANTIZED:
        tensors, report = save(with_lora(model()), precision)
        assert is_rounded_once(tensors, precision, merged) and others_are(tensors, merged)
        assert report.endswith(f"\n{len(changes)} weights have LoRAs merged into them"), report


def test_a_lora_on_quantized_weights_starts_from_their_exact_values():
    _, changes = lora()
    for held in QUANTIZED:
        merged = {}
        for name, weight in WEIGHTS.items():
            if name.removesuffix(".weight") in LAYERS:
                weight = narrow.rounded(weight, held).dequantized(torch.float32)
            merged[name] = weight.float() + changes[name] if name in changes else weight
        for precision in QUANTIZED:
            tensors, report = save(with_lora(model(held)), precision)
            assert is_rounded_once(tensors, precision, merged) and others_are(tensors, merged)
            assert "24 layers were already quantized" in report, report
            assert "28 weights have LoRAs" in report


def test_weights_on_the_device_are_not_merged_twice():
    """Patched weights lie in the module then, and what they were in the backup."""
    for held in ("bf16", "int8"):
        base = model(held)
        patched = with_lora(base)
        plain, _ = save(base, "int8")
        expected, _ = save(patched, "int8")
        load_on_its_device(patched)
        assert base.backup, "nothing was patched in place"
        for saved, known in ((patched, expected), (base, plain)):
            tensors, _ = save(saved, "int8")
            assert all(torch.equal(tensors[name], known[name]) for name in known), held
        assert torch.equal(save(patched, "int8")[0][NAME], expected[NAME])
        comfy.model_management.unload_all_models()


def test_kept_layers_are_bf16_whatever_the_model_holds():
    for held in ("bf16", "int8", "fp8"):
        tensors, report = save(model(held), "int8", keep="transformer_blocks.0.*")
        kept = [layer for layer in LAYERS if layer.startswith("transformer_blocks.0.")]
        assert "12 layers in int8" in report
        for layer in kept:
            weight = WEIGHTS[f"{layer}.weight"]
            if held != "bf16":
                weight = narrow.rounded(weight, held).dequantized()
            assert torch.equal(tensors[f"{layer}.weight"], weight)
            assert f"{layer}.comfy_quant" not in tensors
            assert f"{layer}.weight_scale" not in tensors
        assert tensors[NAME].dtype == torch.int8


# --- models of ComfyUI's own loader


def test_core_fp8_keeps_its_values():
    marker = {"format": "float8_e4m3fn", "full_precision_matrix_mult": True}
    file = narrow.quantized(WEIGHTS, narrow.fp8_of_one_scale, marker, [*LAYERS, MODULATION])
    tensors, report = save(narrow.stock(file), "fp8")
    assert "25 layers in fp8" in report and "quantized again" not in report
    assert not [name for name in tensors if name.endswith("input_scale")]
    for layer in (*LAYERS, MODULATION):
        assert torch.equal(tensors[f"{layer}.weight"].float(), file[f"{layer}.weight"].float())
        scale = tensors[f"{layer}.weight_scale"]
        assert scale.shape == (len(tensors[f"{layer}.weight"]), 1)
        assert (scale == file[f"{layer}.weight_scale"]).all()
        expected = {"format": "float8_e4m3fn_rowwise", "full_precision_matrix_mult": True}
        assert settings(tensors, layer) == expected
    loaded, _ = load_model(MODELS / "saved.safetensors")
    assert loaded.model.diffusion_model.get_submodule(LAYER)._full_precision_mm


def test_core_fp8_to_int8_starts_from_its_exact_values():
    file = narrow.quantized(WEIGHTS, narrow.fp8_of_one_scale, {"format": "float8_e4m3fn"})
    exact = dict(WEIGHTS)
    for layer in LAYERS:
        exact[f"{layer}.weight"] = file[f"{layer}.weight"].float() * file[f"{layer}.weight_scale"]
    tensors, report = save(narrow.stock(file), "int8")
    assert is_rounded_once(tensors, "int8", exact) and others_are(tensors, WEIGHTS)
    assert "24 layers were already quantized" in report


def test_unscaled_fp8_keeps_its_values():
    file = {name: weight.to(FP8) for name, weight in WEIGHTS.items()}
    for loaded in (narrow.stock(file, FP8), narrow.stock(WEIGHTS, FP8)):
        tensors, _ = save(loaded, "fp8")
        assert others_are(tensors, {name: weight.bfloat16() for name, weight in file.items()})
        for layer in LAYERS:
            assert torch.equal(dequantized(tensors, layer), file[f"{layer}.weight"].float())
    exact = {name: weight.float() for name, weight in file.items()}
    assert is_rounded_once(save(narrow.stock(file, FP8), "int8")[0], "int8", exact)


def test_every_dtype_of_comfyuis_menu():
    for dtype in (torch.float8_e5m2, torch.float16, torch.float32):
        exact = {name: weight.to(dtype).float() for name, weight in WEIGHTS.items()}
        for precision in QUANTIZED:
            tensors, _ = save(narrow.stock(WEIGHTS, dtype), precision)
            assert is_rounded_once(tensors, precision, exact) and others_are(tensors, exact)


def test_core_int8_stays_as_it_is_rotated_or_with_one_scale():
    def one_scale(weight):
        scale = weight.abs().max().float() / 127
        return {"weight": (weight.float() / scale).round().to(torch.int8), "weight_scale": scale}

    def rotated(weight):
        values, scale = quantize_rows(rotate(weight.float(), 64), "int8")
        return {"weight": values, "weight_scale": scale}

    marker = {"format": "int8_tensorwise"}
    convrot = {**marker, "convrot": True, "convrot_groupsize": 64}
    for change, known, group in ((one_scale, marker, None), (rotated, convrot, 64)):
        file = narrow.quantized(WEIGHTS, change, known)
        loaded = narrow.stock(file)
        tensors, report = save(loaded, "int8")
        assert "quantized again" not in report
        exact = dict(WEIGHTS)
        for layer in LAYERS:
            values = file[f"{layer}.weight"]
            rows = file[f"{layer}.weight_scale"].expand(len(values), 1)
            assert torch.equal(tensors[f"{layer}.weight"], values)
            assert torch.equal(tensors[f"{layer}.weight_scale"], rows)
            assert settings(tensors, layer) == known
            weight = dequantize_rows(values, rows, torch.float32)
            exact[f"{layer}.weight"] = rotate(weight, group) if group else weight
        again, _ = save(load_model(MODELS / "saved.safetensors")[0], "int8", filename="again")
        assert all(torch.equal(again[name], tensors[name]) for name in tensors)
        for_fp8, report = save(loaded, "fp8")
        assert "24 layers were already quantized" in report
        assert is_rounded_once(for_fp8, "fp8", exact) and others_are(for_fp8, WEIGHTS)


def test_a_quantized_modulation_stays_quantized_in_its_own_format_only():
    def by_row(weight):
        return dict(zip(("weight", "weight_scale"), quantize_rows(weight, "int8"), strict=True))

    marker = {"format": "int8_tensorwise"}
    file = narrow.quantized(WEIGHTS, by_row, marker, [*LAYERS, MODULATION])
    path = BASE / "modulation.safetensors"
    loaded, _ = load_model(narrow.write(path, file))
    tensors, report = save(loaded, "int8")
    assert "25 layers in int8" in report
    assert torch.equal(tensors[f"{MODULATION}.weight"], file[f"{MODULATION}.weight"])
    assert settings(tensors, MODULATION)["full_precision_matrix_mult"] is True
    tensors, report = save(loaded, "fp8")
    assert "24 layers in fp8" in report
    expected = dequantize_rows(
        *quantize_rows(WEIGHTS[f"{MODULATION}.weight"], "int8"), torch.bfloat16
    )
    assert torch.equal(tensors[f"{MODULATION}.weight"], expected)


# --- the family


def test_edit_2511_and_layered_keep_what_makes_them():
    marked = WEIGHTS | {narrow.MARKER_2511: torch.empty(0)}
    layered = narrow.weights(replace(narrow.SHAPE, addition_t_cond=True))
    for tensors, config, family, name in (
        (marked, {}, "Qwen-Image-Edit-2511", narrow.MARKER_2511),
        (WEIGHTS, {"zero_cond_t": True}, "Qwen-Image-Edit-2511", narrow.MARKER_2511),
        (layered, {}, "Qwen-Image-Layered", "time_text_embed.addition_t_embedding.weight"),
    ):
        loaded = model("bf16", tensors, config)
        for _ in range(2):  # also once it was on its device
            written, _ = save(loaded, "int8")
            assert name in written
            assert open_source(MODELS / "saved.safetensors", "transformer").part.family == family
            load_on_its_device(loaded)
        method = loaded.model.diffusion_model.default_ref_method
        again = load_model(MODELS / "saved.safetensors")[0].model.diffusion_model
        assert again.default_ref_method == method != "index"


def test_modules_that_others_put_in_do_not_change_the_names():
    class Wrapped(torch.nn.Module):
        def __init__(self, block):
            super().__init__()
            self._orig_mod = block

    loaded = model().clone()
    name = "diffusion_model.transformer_blocks.0"
    loaded.add_object_patch(name, Wrapped(loaded.get_model_object(name)))
    for other in (loaded, loaded.clone()):
        load_on_its_device(loaded)
        assert isinstance(loaded.model.diffusion_model.transformer_blocks[0], Wrapped)
        tensors, _ = save(other, "int8")
        assert is_rounded_once(tensors, "int8", WEIGHTS) and others_are(tensors, WEIGHTS)
    load_on_its_device(loaded)
    assert isinstance(loaded.model.diffusion_model.transformer_blocks[0], Wrapped)


# --- what is refused


def test_where_a_file_may_go():
    loaded = model()
    for filename in ("../x", "/x", "a/../../x", "C:x", "a\\x", "", "  ", ".safetensors", ".."):
        words = ("is outside models/diffusion_models", "qwen_image_int8.safetensors")
        refused(SettingError, *words, saved=loaded, filename=filename)
    for suffix in ("ckpt", "PT", "gguf"):
        run = functools.partial(QwenL40SSaveQuantized.validate_inputs, f"x.{suffix}", False)
        refused(SettingError, f"ends in .{suffix}", "x.safetensors", run=run)
    assert QwenL40SSaveQuantized.validate_inputs("qwen_v1.0", False) is True
    _, report = save(loaded, "int8", filename="deeper/and_deeper")
    assert report.startswith("deeper/and_deeper.safetensors: "), report
    run = functools.partial(QwenL40SSaveQuantized.validate_inputs, "deeper/and_deeper", False)
    refused(SettingError, "The file exists", "overwrite", run=run)
    (MODELS / "folder.safetensors").mkdir()
    refused(
        SettingError, "This is a folder", "folder.safetensors)", saved=loaded, filename="folder"
    )
    words = ("The folder cannot be created", "choose another name")
    refused(UnavailableError, *words, saved=loaded, filename="deeper/and_deeper.safetensors/x")


def test_a_file_is_replaced_on_demand_only():
    first, _ = save(model(), "int8", filename="there")
    words = ("The file exists", "overwrite", "there.safetensors)")
    refused(SettingError, *words, saved=model(), filename="there", overwrite=False)
    second, _ = save(model(), "fp8", filename="there")
    assert first[NAME].dtype == torch.int8 and second[NAME].dtype == FP8
    # Also the file that the model is mapped from.
    loaded, _ = load_model(MODELS / "there.safetensors")
    tensors, _ = save(with_lora(loaded), "int8", filename="there")
    assert tensors[NAME].dtype == torch.int8
    held = loaded.model.diffusion_model.get_parameter(NAME)._qdata
    assert torch.equal(held.float(), second[NAME].float())


def test_other_models_and_settings():
    class Flux(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.double_blocks = torch.nn.ModuleList([torch.nn.Linear(2, 2)])

    other = torch.nn.Module()
    other.diffusion_model = Flux()
    cpu = torch.device("cpu")
    flux = comfy.model_patcher.ModelPatcher(other, cpu, cpu)
    words = ("The model is a Flux", "only Qwen-Image transformers", "connect a Qwen-Image MODEL")
    refused(CheckpointError, *words, saved=flux, filename="new_folder/flux")
    plain = model()
    refused(SettingError, "'int4' is unknown", "fp8 or int8", saved=plain, precision="int4")
    for keep, sentence in (("*.to_z", "keep_in_bf16"), ("*", "leaves no layer to quantize")):
        refused(SettingError, sentence, saved=plain, keep=keep)
    bypassed, _ = comfy.sd.load_bypass_lora_for_models(
        model(), None, load_file(BASE / "models" / "loras" / lora()[0]), 1.0, 0
    )
    refused(SettingError, "LoRA bypass", "Load LoRA", saved=bypassed)
    packed = model()
    module = packed.model.diffusion_model.get_submodule(LAYER)
    module.weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    refused(CheckpointError, NAME, "torch.uint8", "safetensors", saved=packed)


def test_a_failure_leaves_what_was_there():
    save(model(), "int8", filename="failing")
    for name in (NAME, f"{MODULATION}.weight"):
        damaged = model().clone()
        change = torch.zeros_like(WEIGHTS[name])
        change[1, 2] = torch.nan
        damaged.add_patches({f"diffusion_model.{name}": ("diff", (change,))})
        words = (f"'{name}'", "NaN or infinity", "LoRA")
        refused(CheckpointError, *words, saved=damaged, filename="failing")

    class Cancelled(BaseException):
        pass

    calls = []

    def cancel(done, total):
        calls.append((done, total))
        if done == 30:
            raise Cancelled

    failing, loaded = MODELS / "failing.safetensors", model()
    before = files_there()
    with pytest.raises(Cancelled):
        save_quantized(loaded, failing, "fp8", overwrite=True, progress=cancel)
    assert calls == [(done, len(WEIGHTS)) for done in range(1, 31)]
    assert files_there() == before
