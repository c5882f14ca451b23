"""Qwen-Image-2.1's text encoder by the package's loader, against ComfyUI's own: a small one."""

import functools
import itertools
from functools import partial

import comfy.model_base
import comfy.sd
import comfyui_boot
import narrow_text_encoder as narrow
import pytest
import torch
from comfy.text_encoders import llama
from comfyui_boot import folder
from micro_models import SYSTEM_21, USER, build_21, hidden_states
from safetensors.torch import save_file
from transformers import AutoTokenizer

from qwen_l40s.caches import forget
from qwen_l40s.errors import CheckpointError, UnavailableError
from qwen_l40s.hosts.comfyui.encode import STOCK
from qwen_l40s.hosts.comfyui.load.text_encoder import encode_with, load_text_encoder
from qwen_l40s.hosts.comfyui.load.transformer import load_model
from qwen_l40s.loaders.source import open_source

pytestmark = pytest.mark.usefixtures("inference_mode")
newer = pytest.mark.host_has("comfy.model_base.QwenImage21")
FOLDER = folder("qwen3_vl")
WIDTH = narrow.HIDDEN
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
def small():
    """ComfyUI's class with other sizes, and files of these sizes taken for the published one's."""
    with narrow.small() as stack:
        forget()  # the published sizes, which another test may have read
        yield stack
    forget()


weights = functools.cache(narrow.weights_21)


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
    assert ("lm_head left out" in report.text()) and report.load.precision == "bf16"
    assert report.source.part.family.startswith("Qwen3-VL text encoder")


@newer
@pytest.mark.parametrize(("precision", "most"), [("int8", 0.03), ("fp8", 0.15)])
def test_quantized_and_placed(precision, most):
    exact = encoded(own(write("ComfyUI's")))["cond"]
    path = write("nested")
    place = "drop after encoding" if precision == "fp8" else "cpu"
    clip, report = load_text_encoder(path, precision, place)
    found = encoded(clip)["cond"]
    assert 0 < (found - exact).norm() / exact.norm() < most
    assert report.load.precision == precision and "21 layers quantized" in report.text()


@newer
def test_a_file_that_lacks_a_tensor():
    path = FOLDER / "half.safetensors"
    found = {NAMES["flat"](name): weight for name, weight in weights().items()}
    del found["model.layers.1.mlp.up_proj.weight"]
    save_file(found, path)
    comfyui_boot.refused(
        CheckpointError,
        "lacks the tensor 'model.layers.1.mlp.up_proj.weight'",
        "ComfyUI's Qwen3-VL 8B: download it again",
        run=partial(load_text_encoder, path),
    )


# {as a ComfyUI that merges parallel layers might have them: the layers apart}
PARALLEL = {"gate_up_proj": ("gate_proj", "up_proj"), "qkv_proj": ("q_proj", "k_proj", "v_proj")}


def merge(found, whole):
    first, *_ = apart = PARALLEL[whole]
    for name in [it for it in found if it.endswith(f"{first}.weight")]:
        parts = [found.pop(name.replace(first, it)) for it in apart]
        found[name.replace(first, whole)] = torch.cat(parts)


def merge_in_mlp(_, found, *more):
    merge(found, "gate_up_proj")


def split(_, found, *more):
    for whole, apart in PARALLEL.items():
        for name in [it for it in found if it.endswith(f"{whole}.weight")]:
            places = [name.replace(whole, it) for it in apart]
            rows = [len(weights()["model.layers." + it.split("layers.")[1]]) for it in places]
            found |= dict(zip(places, found.pop(name).split(rows), strict=True))


def merge_layers(model):
    for mlp in (layer.mlp for layer in model.model.layers):
        gate, rows = mlp.gate_proj, mlp.gate_proj.out_features
        where = {"device": gate.weight.device, "dtype": gate.weight.dtype}
        del mlp.gate_proj, mlp.up_proj
        mlp.gate_up_proj = whole = type(gate)(WIDTH, 2 * rows, bias=False, **where)
        vars(mlp)["gate_proj"] = lambda x, whole=whole: whole(x).chunk(2, -1)[0]
        vars(mlp)["up_proj"] = lambda x, whole=whole: whole(x).chunk(2, -1)[1]


PRUNED, BUILT = "pruned vocabulary", "merged in ComfyUI"


@newer
@pytest.mark.parametrize(
    ("form", "known"), [*itertools.product((*PARALLEL, PRUNED), (False, True)), (BUILT, True)]
)
def test_a_form_that_only_comfyui_knows(form, known, monkeypatch):
    """Its own loading takes it; where that lacks a tensor or fails, the file is refused."""
    from comfy.text_encoders import qwen3vl

    core = encoded(own(write("ComfyUI's")))["cond"]
    names = {NAMES["ComfyUI's"](name): weight.clone() for name, weight in weights().items()}
    build = qwen3vl.Qwen3VL.__init__

    def init(self, *args, **more):
        build(self, *args, **more)
        if form == BUILT:
            merge_layers(self)
        hook = merge_in_mlp if form == BUILT else split
        self.register_load_state_dict_pre_hook(hook)

    if form in PARALLEL:
        merge(names, form)
    if form == PRUNED:
        rows = 151_660
        for name in ("model.embed_tokens.weight", "model.lm_head.weight"):
            names[name] = names[name][:rows].clone()
        small = partial(llama.Qwen3VL_8BConfig, **narrow.TEXT_21, vocab_size=rows)
        if known:
            monkeypatch.setitem(qwen3vl.QWEN3VL_CONFIGS, "qwen3vl_8b", lambda **it: small(**it))
    elif known:
        monkeypatch.setattr(qwen3vl.Qwen3VL, "__init__", init)
    path = FOLDER / f"{form} {known}.safetensors"
    save_file(names, path)
    forget()
    if not known:
        comfyui_boot.refused(
            CheckpointError, str(FOLDER.parent), run=lambda: load_text_encoder(path)
        )
        return
    clip, report = load_text_encoder(path, "int8", "cpu")
    assert "ComfyUI loaded this file" in report.summary() and report.load.precision == "as stored"
    assert clip.placement == "cpu"
    for each in (clip, clip.clone(disable_dynamic=True)):
        assert torch.allclose(encoded(each)["cond"], core, rtol=0, atol=1e-5)


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
def test_a_small_one_with_a_tokenizer_of_its_own(small):
    """The micro model's: ComfyUI encodes a prompt as transformers does."""
    small.close()
    path = FOLDER / "micro_21"
    build_21().save(path)
    assert type(load_model(path)[0].model) is comfy.model_base.QwenImage21  # its MLP is narrower
    clip, report = load_text_encoder(path)
    assert "vision tower left out, because it is 32 wide" in report.text()
    words = AutoTokenizer.from_pretrained(path / "processor")
    prompt = "a small red star at the top left"
    ids = words(
        f"{SYSTEM_21}{USER}{prompt}<|im_end|>\n<|im_start|>assistant\n", return_tensors="pt"
    )
    language = build_21().text_encoder.model.language_model
    for weight in language.parameters():
        weight.copy_(weight.bfloat16())  # as the file has it
    hidden = hidden_states(language, ids.input_ids)
    dropped = len(words(SYSTEM_21).input_ids)
    found = encoded(clip, prompt)["cond"]
    torch.testing.assert_close(found, hidden[:, dropped:].float(), atol=1e-4, rtol=0)
    with pytest.raises(UnavailableError, match="has no vision tower"):
        clip.tokenize(prompt, images=[torch.rand(1, 64, 64, 3)])
