"""Qwen-Image-2.1's text encoder by the package's loader, against ComfyUI's own: a small one."""

import functools
from functools import partial

import comfy.model_base
import comfy.sd
import comfyui_boot
import pytest
import torch
from comfy.text_encoders import llama
from comfyui_boot import folder
from safetensors.torch import save_file
from transformers import AutoTokenizer

from qwen_l40s.caches import forget
from qwen_l40s.errors import CheckpointError, UnavailableError
from qwen_l40s.hosts.comfyui.encode import STOCK
from qwen_l40s.hosts.comfyui.load.text_encoder import encode_with, load_text_encoder
from qwen_l40s.hosts.comfyui.load.transformer import load_model
from qwen_l40s.loaders.source import open_source
from qwen_l40s.tools.micro.model import QWEN_IMAGE_21, SYSTEM_21, USER, build

pytestmark = pytest.mark.usefixtures("inference_mode")
newer = pytest.mark.host_has("comfy.model_base.QwenImage21")
FOLDER = folder("qwen3_vl")
WIDTH = 64
TEXT = {
    "hidden_size": WIDTH,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
VISION = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "depth": 1,
    "deepstack_visual_indexes": [0],
}
NAMES = {
    "ComfyUI's": lambda name: name.replace("visual.", "model.visual."),
    "flat": lambda name: name.replace("model.lm_head", "lm_head"),
    "nested": lambda name: (
        name.replace("model.", "model.language_model.")
        .replace("visual.", "model.visual.")
        .replace("model.language_model.lm_head", "lm_head")
    ),
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """ComfyUI's class with other sizes, and files of these sizes taken for the published one's."""
    if not hasattr(llama, "Qwen3VL_8BConfig"):
        yield
        return
    from comfy.text_encoders import qwen3vl

    read = qwen3vl.Qwen2Tokenizer.from_pretrained
    monkeypatch.setattr(qwen3vl.Qwen2Tokenizer, "from_pretrained", functools.lru_cache(read))
    small = partial(llama.Qwen3VL_8BConfig, **TEXT)
    monkeypatch.setitem(qwen3vl.QWEN3VL_CONFIGS, "qwen3vl_8b", lambda **config: small(**config))
    monkeypatch.setitem(qwen3vl.QWEN3VL_VISION, "qwen3vl_8b", VISION)
    forget()  # the published sizes, which another test may have read
    yield
    forget()


@functools.cache
def weights():
    from comfy.text_encoders.qwen3vl import Qwen3VL

    generator = torch.Generator().manual_seed(0)
    model = Qwen3VL({}, torch.bfloat16, "meta", torch.nn)
    found = {}
    for name, weight in model.state_dict().items():
        value = torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5
        found[name] = (value if weight.dim() > 1 else 1 + 0.1 * value).bfloat16()
    return found


def write(names):
    path = FOLDER / f"{names}.safetensors"
    save_file({NAMES[names](name): weight for name, weight in weights().items()}, path)
    return path


def own(path):
    return comfy.sd.load_clip([str(path)], clip_type=comfy.sd.CLIPType.QWEN_IMAGE)


def encoded(clip, prompt="a red star", **more):
    return clip.encode_from_tokens(clip.tokenize(prompt, **more), return_dict=True)


@newer
@pytest.mark.parametrize("names", NAMES)
def test_it_encodes_as_comfyuis_own(names):
    path = write(names)
    clip, report = load_text_encoder(path)
    clip, _ = encode_with(clip, STOCK)
    core = own(write("ComfyUI's"))
    assert type(clip.cond_stage_model).__bases__ == type(core.cond_stage_model).__bases__
    for more in ({}, {"images": [torch.rand(1, 64, 64, 3)]}):
        ours, theirs = encoded(clip, **more), encoded(core, **more)
        assert torch.equal(ours["cond"], theirs["cond"]) and ours["cond"].shape[-1] == WIDTH
        assert ours.get("image_slots") == theirs.get("image_slots")
    assert ("lm_head left out" in report.text()) and report.precision == "bf16"
    assert report.family.startswith("Qwen3-VL text encoder")


@newer
@pytest.mark.parametrize(("precision", "most"), [("int8", 0.03), ("fp8", 0.15)])
def test_quantized_and_placed(precision, most):
    exact = encoded(own(write("ComfyUI's")))["cond"]
    path = write("nested")
    place = "drop after encoding" if precision == "fp8" else "cpu"
    clip, report = load_text_encoder(path, precision, place)
    found = encoded(clip)["cond"]
    assert 0 < (found - exact).norm() / exact.norm() < most
    assert report.precision == precision and "14 layers quantized" in report.text()


@newer
def test_a_file_that_lacks_a_tensor():
    path = FOLDER / "half.safetensors"
    found = {NAMES["flat"](name): weight for name, weight in weights().items()}
    del found["model.layers.1.mlp.up_proj.weight"]
    save_file(found, path)
    comfyui_boot.refused(
        CheckpointError,
        "lacks the tensor 'model.layers.1.mlp.up_proj.weight'",
        "ComfyUI's Qwen3-VL 8B has: download it again",
        run=partial(load_text_encoder, path),
    )


def test_an_older_comfyui_is_told(monkeypatch):
    import comfy.supported_models

    monkeypatch.delattr(comfy.supported_models, "QwenImage21", raising=False)
    path = FOLDER / "older.safetensors"
    names = ("norm.weight", "visual.deepstack_merger_list.0.norm.weight", "embed_tokens.weight")
    save_file({f"model.{name}": torch.ones(WIDTH) for name in names}, path)
    comfyui_boot.refused(
        UnavailableError,
        "Qwen-Image-2.1 needs ComfyUI 0.37 or newer",
        run=partial(load_text_encoder, open_source(path, "text_encoder")),
    )


@newer
def test_a_small_one_with_a_tokenizer_of_its_own(monkeypatch):
    """The micro model's: ComfyUI encodes a prompt as transformers does."""
    monkeypatch.undo()
    path = FOLDER / "micro_21"
    build(0, QWEN_IMAGE_21).save(path)
    assert type(load_model(path)[0].model) is comfy.model_base.QwenImage21  # its MLP is narrower
    clip, report = load_text_encoder(path)
    assert "vision tower left out: it is 32 wide" in report.text()
    words = AutoTokenizer.from_pretrained(path / "processor")
    prompt = "a small red star at the top left"
    ids = words(
        f"{SYSTEM_21}{USER}{prompt}<|im_end|>\n<|im_start|>assistant\n", return_tensors="pt"
    )
    language = build(0, QWEN_IMAGE_21).text_encoder.model.language_model
    for weight in language.parameters():
        weight.copy_(weight.bfloat16())  # as the file has it
    hidden = QWEN_IMAGE_21.stream.hidden_states(language, ids.input_ids)
    dropped = len(words(SYSTEM_21).input_ids)
    found = encoded(clip, prompt)["cond"]
    torch.testing.assert_close(found, hidden[:, dropped:].float(), atol=1e-4, rtol=0)
    with pytest.raises(UnavailableError, match="has no vision tower"):
        clip.tokenize(prompt, images=[torch.rand(1, 64, 64, 3)])
