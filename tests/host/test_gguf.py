"""GGUF files in the loader: their values in int8, as those of a file that holds the values."""

import folder_paths
import narrow_transformer as narrow
import pytest
import torch
from comfy.quant_ops import QuantizedTensor
from comfyui_boot import folder
from gguf_files import blocks_of, gguf_of, write_gguf
from safetensors.torch import load_file, save_file

from qwen_l40s.errors import CheckpointError, UnavailableError
from qwen_l40s.families.qwen_image import QwenImageShape
from qwen_l40s.hosts.comfyui.load import plan
from qwen_l40s.hosts.comfyui.load.choose import choices, source_of
from qwen_l40s.hosts.comfyui.load.transformer import load_model
from qwen_l40s.loaders.gguf import BLOCK_TYPES, read_gguf
from qwen_l40s.loaders.gguf_blocks import BlockRows, map_gguf
from qwen_l40s.loaders.quantized_file import plan_quantized, write_quantized
from qwen_l40s.loaders.sizes import read_sizes
from qwen_l40s.planning.bytes import weight_bytes
from qwen_l40s.spec.sizes import STAGING_BYTES

pytestmark = pytest.mark.usefixtures("inference_mode")
FOLDER = folder("gguf")
ONE_BLOCK = QwenImageShape(1, 1024, 8, 128, 512, 64, 64)


def check_same(ours, expected) -> None:
    """Weights are equal; what is not rounded to 8 bits comes out of blocks in bf16."""
    found, known = (patcher.model.state_dict() for patcher in (ours, expected))
    assert found.keys() == known.keys()
    for name, weight in known.items():
        in_bf16 = weight if isinstance(weight, QuantizedTensor) else weight.bfloat16()
        assert any(torch.equal(found[name], it.to(weight.dtype)) for it in (weight, in_bf16)), name


def expanded(path):
    values = {
        name: it.expand(it.values) if isinstance(it, BlockRows) else it
        for name, it in map_gguf(read_gguf(path)).items()
    }
    file = path.with_suffix(".safetensors")
    save_file({name: value.float() for name, value in values.items()}, file)
    return file


@pytest.fixture(scope="module", params=["Q8_0", "Q4_1", "F16"])
def files(request):
    """A GGUF file, and one of safetensors with its values in fp32."""
    plain = FOLDER / "bf16.safetensors"
    save_file(narrow.weights(ONE_BLOCK), plain)
    path = gguf_of(plain, FOLDER / f"{request.param}.gguf", request.param)
    return path, expanded(path)


@pytest.mark.parametrize("precision", ["int8", "fp8", "bf16"])
def test_a_file_loads_as_one_that_holds_its_values(files, precision):
    ours, expected = (load_model(file, precision) for file in files)
    check_same(ours[0], expected[0])
    assert ours[1].load.precision == expected[1].load.precision


def test_auto_rounds_blocks_to_int8_and_says_so(files):
    _, report = load_model(files[0])
    if files[0].stem == "F16":  # no blocks: as of any other file
        assert report.load.precision != "int8"
        return
    assert report.load.precision == "int8"
    assert "GGUF's blocks are expanded and rounded to int8" in report.text()
    assert f"layers stored in GGUF {files[0].stem} were expanded." in report.text()
    assert report.load.why.startswith("auto: GGUF's blocks become int8")


def test_layers_that_are_kept_are_bf16_and_not_the_blocks(files):
    ours, expected = (load_model(file, "int8", ("*.to_q",)) for file in files)
    check_same(ours[0], expected[0])


def test_the_loader_lists_files_and_the_first_part_of_a_split_one(tmp_path, monkeypatch):
    known = {
        name: ([*paths], ends)
        for name, (paths, ends) in folder_paths.folder_names_and_paths.items()
    }
    monkeypatch.setattr(folder_paths, "folder_names_and_paths", known)
    known["diffusion_models"][0].append(str(tmp_path))
    plain = tmp_path / "plain.safetensors"
    save_file(narrow.weights(ONE_BLOCK), plain)
    gguf_of(plain, tmp_path / "qwen-image-Q8_0.gguf")
    for number in (1, 2):
        write_gguf(tmp_path / f"a-{number:05}-of-00002.gguf", {})
    names = choices("transformer")
    assert {"qwen-image-Q8_0.gguf", "a-00001-of-00002.gguf"} <= set(names)
    assert "a-00002-of-00002.gguf" not in names
    assert names[0] in ("qwen-image-Q8_0.gguf", "plain.safetensors")
    assert source_of("qwen-image-Q8_0.gguf", "transformer").part.quantization.gguf
    with pytest.raises(CheckpointError, match="model: This GGUF file holds no tensors"):
        source_of("a-00001-of-00002.gguf", "transformer")
    assert not [name for name in choices("text_encoder") if name.endswith(".gguf")]


@pytest.mark.parametrize("dtype", ["Q4_1", "Q4_0", "Q5_1"])
def test_few_bits_become_w4a8_where_int8_has_no_room(dtype, monkeypatch):
    room = weight_bytes(ONE_BLOCK, "int8").total + STAGING_BYTES - 1
    monkeypatch.setattr(plan, "available_memory", lambda: room)
    save_file(weights := narrow.weights(ONE_BLOCK), FOLDER / "bf16.safetensors")
    path = gguf_of(FOLDER / "bf16.safetensors", FOLDER / f"small-{dtype}.gguf", dtype)
    if dtype == "Q5_1":
        with pytest.raises(UnavailableError, match=r"int8 needs .* of system RAM"):
            load_model(path)
        return
    patcher, report = load_model(path)
    count = len(ONE_BLOCK.quantizable_layers())
    assert f"{count} layers stay in w4a8, because system RAM has no room" in report.text()
    blocks = map_gguf(read_gguf(path))
    for name, module in patcher.model.diffusion_model.named_modules():
        if not isinstance(getattr(module, "weight", None), QuantizedTensor):
            continue
        rows, known = blocks[f"{name}.weight"], weights[f"{name}.weight"].float()
        of_file = (rows.expand(rows.values) - known).norm()
        assert (module.weight.dequantize().float() - known).norm() < 1.5 * of_file
        assert module.weight._qdata.shape[1] == known.shape[1] // 2
        count -= 1
    assert count == 0
    monkeypatch.setattr(plan, "available_memory", lambda: 0)
    with pytest.raises(UnavailableError, match=r"in w4a8 needs .* of system RAM"):
        load_model(path)


# A tensor for each thing that tensors are in a transformer.
ROLES = {
    "norm": "txt_norm.weight",
    "bias": "transformer_blocks.0.attn.to_q.bias",
    "layer of a block": "transformer_blocks.0.attn.to_q.weight",
    "modulation": "transformer_blocks.0.img_mod.1.weight",
    "outer layer": "txt_in.weight",
}


@pytest.mark.parametrize("dtype", BLOCK_TYPES)
def test_every_tensor_may_be_of_every_type(dtype):
    """Published files have norms in Q8_0 and no metadata."""
    shapes = QwenImageShape(1, 512, 4, 128, 256, 64, 64).tensors()
    tensors = {name: blocks_of(shape, dtype, len(name)) for name, shape in shapes.items()}
    assert {tensors[name].dtype for name in ROLES.values()} == {dtype}
    path = write_gguf(FOLDER / f"all-{dtype}.gguf", tensors, None)
    plain = expanded(path)
    for precision in ("int8", "bf16"):
        check_same(*(load_model(file, precision)[0] for file in (path, plain)))
    sizes, written = read_sizes(path), path.with_name(f"int8-of-{dtype}.safetensors")
    in_blocks = BLOCK_TYPES[dtype].elements > 1
    matrices = {it.removesuffix(".weight") for it, size in shapes.items() if len(size) == 2}
    assert sizes.transformer.quantization.layers.keys() <= (matrices if in_blocks else {*()})
    write_quantized(plan_quantized(path, "int8"), written)
    check_same(*(load_model(file, "int8")[0] for file in (written, path)))
    if in_blocks and {it.dtype for it in tensors.values()} == {dtype}:
        known = {k: it.nbytes for k, it in load_file(written).items() if "comfy_quant" not in k}
        assert sizes.loaded.total == sum(known.values())
