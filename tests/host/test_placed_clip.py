"""Where the text encoder stays, and what it remembers."""

import contextlib
import functools
import gc
import os
import shutil
from unittest import mock

import comfy.hooks
import comfy.model_management
import comfy.patcher_extension
import comfy.sd
import narrow_text_encoder as narrow
import pytest
import torch
from comfy.text_encoders import llama
from comfy_extras.nodes_multigpu import SelectCLIPDeviceNode
from comfyui_boot import MODE, ROOT, folder, refused

import nodes as host_nodes
from qwen_l40s.errors import SettingError, UnavailableError
from qwen_l40s.hosts.comfyui.load import text_encoder
from qwen_l40s.hosts.comfyui.load.text_encoder import (
    DROP,
    PLACEMENTS,
    RESULTS,
    PlacedClip,
    device_options,
    load_text_encoder,
)
from qwen_l40s.nodes.loaders import TEXT_ENCODER_PLACEMENTS, QwenL40SLoadTextEncoder

pytestmark = [pytest.mark.usefixtures("inference_mode"), pytest.mark.each_device]
FOLDER = folder("placed_clip")
MICRO = ROOT / "models" / "micro"
CPU = torch.device("cpu")
PROMPT = "a small red star at the top left"
WEIGHT = "qwen25_7b.transformer.model.layers.0.self_attn.o_proj.weight"


def load(placement="auto", precision="auto", path=MICRO):
    """A text encoder of which nothing is remembered."""
    RESULTS.clear()
    return load_text_encoder(path, precision, placement)[0]


def encode(clip, prompt=PROMPT, **options):
    """What CLIPTextEncode does."""
    [[conditioning, extra]] = clip.encode_from_tokens_scheduled(clip.tokenize(prompt, **options))
    assert extra["pooled_output"] is None
    return conditioning


def plain(clip):
    """ComfyUI's own CLIP over the same model."""
    own = comfy.sd.CLIP(no_init=True)
    vars(own).update(vars(clip))
    return own


@contextlib.contextmanager
def spied():
    """Yields [encodings, loadings] that happen meanwhile."""
    counts = [0, 0]
    model = text_encoder.comfy.text_encoders.qwen_image.QwenImageTEModel
    run, move = model.encode_token_weights, comfy.model_management.load_models_gpu

    def running(*args, **kwargs):
        counts[0] += 1
        return run(*args, **kwargs)

    def moving(*args, **kwargs):
        counts[1] += 1
        return move(*args, **kwargs)

    with (
        mock.patch.object(model, "encode_token_weights", running),
        mock.patch.object(comfy.model_management, "load_models_gpu", moving),
    ):
        yield counts


def encodings(*calls):
    """How often the encoder runs in each of these calls."""
    found = []
    for call in calls:
        with spied() as counts:
            call()
        assert counts[0] == counts[1], counts
        found.append(counts[0])
    return found


def is_loaded(clip):
    base = clip.patcher.clone_base_uuid
    return any(model.clone_base_uuid == base for model in comfy.model_management.loaded_models())


# --- what is remembered


def test_an_unchanged_prompt_is_neither_loaded_nor_encoded():
    clip = load()
    exact = encode(plain(clip))
    with spied() as counts:
        first = encode(clip)
        assert counts == [1, 1]
        again = [encode(clip) for _ in range(3)]
        assert counts == [1, 1]
        other = encode(clip, PROMPT.replace("red", "green"))
        assert counts == [2, 2]
        again.append(encode(clip))
        assert counts == [2, 2]
    assert torch.equal(first, exact) and not torch.equal(other, exact)
    for found in again:
        assert torch.equal(found, exact) and found.device == first.device
        assert (found.dtype, found.shape) == (exact.dtype, exact.shape)


def test_every_form_of_the_result():
    clip = load()
    tokens = clip.tokenize(PROMPT)
    forms = [(False, False), (True, False), ("unprojected", False), (True, True)]
    expected = [plain(clip).encode_from_tokens(tokens, *form) for form in forms]
    for _ in range(2):
        for form, exact in zip(forms, expected, strict=True):
            found = clip.encode_from_tokens(tokens, *form)
            assert type(found) is type(exact), form
            if isinstance(found, dict):
                assert list(found) == list(exact)
                found, exact = list(found.values()), list(exact.values())
            pairs = zip(found, exact, strict=True) if isinstance(found, tuple | list) else ()
            for ours, theirs in pairs or [(found, exact)]:
                assert theirs is ours is None or torch.equal(ours, theirs), form
    assert len(RESULTS) == len(forms)
    assert torch.equal(clip.encode(PROMPT), expected[0])


def test_the_mask_of_padding_is_remembered():
    clip = load()
    tokens = clip.tokenize(f"{PROMPT}<|endoftext|>")
    [[_, first]] = clip.encode_from_tokens_scheduled(tokens)
    [[_, again]] = clip.encode_from_tokens_scheduled(tokens)
    assert 0 < first["attention_mask"].sum() < first["attention_mask"].numel()
    assert torch.equal(again["attention_mask"], first["attention_mask"])
    assert again["attention_mask"] is not first["attention_mask"]


def test_what_nodes_do_to_a_result_does_not_reach_the_next():
    clip = load()
    exact = encode(plain(clip))
    tokens = clip.tokenize(PROMPT)
    for _ in range(3):
        [[conditioning, extra]] = clip.encode_from_tokens_scheduled(tokens, add_dict={"mine": 1})
        assert torch.equal(conditioning, exact) and extra["mine"] == 1
        conditioning.mul_(0)
        extra["theirs"] = 2
    [[_, extra]] = clip.encode_from_tokens_scheduled(tokens)
    assert list(extra) == ["pooled_output"]


def test_what_decides_the_result_is_asked_for_anew():
    clip = load()
    tokens = clip.tokenize(PROMPT)
    heavier = {name: [list(row) for row in rows] for name, rows in tokens.items()}
    last = heavier["qwen25_7b"][0][-4]
    heavier["qwen25_7b"][0][-4] = (last[0], 1.2, *last[2:])
    (layer,) = host_nodes.CLIPSetLastLayer().set_last_layer(clip, -2)
    variants = {
        "the tokens": lambda: clip.encode_from_tokens(tokens),
        "a weight": lambda: clip.encode_from_tokens(heavier),
        "the layer": lambda: layer.encode_from_tokens(tokens),
        "a template": lambda: clip.encode(f"<|im_start|>{PROMPT}"),
    }
    exact = {}
    for name, call in variants.items():
        with spied() as counts:
            exact[name] = call()
        assert counts == [1, 1], name
    assert encodings(*variants.values()) == [0] * len(variants)
    for name, call in variants.items():
        same = [other for other in exact if torch.equal(call(), exact[other])]
        assert same == [name], (name, same)
    assert torch.equal(plain(layer).encode_from_tokens(tokens), exact["the layer"])


def test_a_lora_and_its_strength_are_told_apart():
    clip = load()
    exact = encode(clip)
    generator = torch.Generator().manual_seed(0)
    change = torch.randn(clip.cond_stage_model.state_dict()[WEIGHT].shape, generator=generator)
    lora = {f"text_encoders.{WEIGHT.removesuffix('.weight')}.diff": change}
    weak, strong = (
        comfy.sd.load_lora_for_models(None, clip, lora, 0.0, strength)[1] for strength in (0.1, 0.5)
    )
    assert isinstance(weak, PlacedClip) and weak.patcher.patches
    results = [encode(found) for found in (weak, strong)]
    assert (
        encodings(*(functools.partial(encode, found) for found in (weak, strong, clip))) == [0] * 3
    )
    assert torch.equal(encode(clip), exact)
    for found, result in zip((weak, strong), results, strict=True):
        assert not torch.equal(result, exact)
        assert torch.equal(encode(plain(found)), result) and torch.equal(encode(found), result)
    assert torch.equal(encode(plain(clip)), exact)
    weak.add_patches({WEIGHT: ("diff", (change,))}, 0.2)  # to a clone that has encoded already
    assert encodings(lambda: encode(weak)) == [1]


def test_clones_and_the_same_file_loaded_again_share():
    clip = load()
    exact = encode(clip)
    clone = clip.clone()
    assert type(clone) is PlacedClip and clone.placement == clip.placement
    again, _ = load_text_encoder(MICRO)
    assert again.patcher.patches_uuid != clip.patcher.patches_uuid
    assert encodings(lambda: encode(clone), lambda: encode(again)) == [0, 0]
    assert torch.equal(encode(again), exact) and torch.equal(encode(clone), exact)
    other, _ = load_text_encoder(MICRO, "int8")
    assert encodings(lambda: encode(other)) == [1]


def test_a_replaced_file_is_read():
    folder = shutil.copytree(MICRO, FOLDER / "replaced")
    exact = encode(load(path=folder))
    file = folder / "text_encoder" / "model.safetensors"
    os.utime(file, ns=(1, 1))
    again, _ = load_text_encoder(folder)
    assert encodings(lambda: encode(again)) == [1]
    assert torch.equal(encode(again), exact)


def test_hooks_and_injections_are_not_remembered():
    clip = load()
    encode(clip)
    hooked = clip.clone(disable_dynamic=True)
    group = comfy.hooks.HookGroup()
    group.add(comfy.hooks.WeightHook())
    hooked.apply_hooks_to_conds = group
    hooked.patcher.forced_hooks = group
    scheduled = clip.clone(disable_dynamic=True)
    scheduled.patcher.forced_hooks, scheduled.use_clip_schedule = group, True
    marked = clip.clone()
    marked.apply_hooks_to_conds = group
    injected = clip.clone()
    nothing = comfy.patcher_extension.PatcherInjection(lambda model: None, lambda model: None)
    injected.patcher.set_injections("mine", [nothing])
    replaced = clip.clone()
    replaced.patcher.add_object_patch("mine", lambda: None)
    watched = clip.clone()
    watched.patcher.add_callback("on_load", lambda *args: None)
    for changed in (hooked, scheduled, marked, injected, replaced, watched):
        tokens = changed.tokenize(PROMPT)
        for _ in range(2):
            assert encodings(lambda c=changed, t=tokens: c.encode_from_tokens_scheduled(t)) == [1]
    for found in (hooked, marked):
        [[_, extra]] = found.encode_from_tokens_scheduled(found.tokenize(PROMPT))
        assert extra["hooks"] is group
    assert len(RESULTS) == 1


def test_a_picture_is_known_by_its_pixels():
    """ComfyUI's own tower with fewer blocks, at its own width."""
    whole = llama.qwen_vl.Qwen2VLVisionTransformer
    small = functools.partial(whole, num_layers=2, intermediate_size=64)
    with mock.patch.object(llama.qwen_vl, "Qwen2VLVisionTransformer", small):
        tower = small(1280, narrow.HIDDEN, device="cpu", dtype=torch.bfloat16, ops=torch.nn)
        tensors = {f"visual.{name}": tensor for name, tensor in tower.state_dict().items()}
        path = narrow.write(FOLDER / "tower.safetensors", narrow.weights() | tensors, None)
        clip = load(path=path)
    image = torch.rand(1, 56, 84, 3, generator=torch.Generator().manual_seed(0))
    changed = image.clone()
    changed[0, 3, 4, 1] += 0.5
    results = []
    for pictures in ([image], [changed], []):
        with spied() as counts:
            results.append(encode(clip, images=pictures))
        assert counts == [1, 1]
    assert not torch.equal(results[0], results[1])
    assert encodings(lambda: encode(clip, images=[image.clone()])) == [0]
    assert torch.equal(encode(clip, images=[image]), encode(plain(clip), images=[image]))


def test_memory_is_bounded():
    clip = load()
    size = encode(clip).nbytes
    with mock.patch.object(RESULTS, "limit", 3 * size + 2):
        for word in ("red", "blue", "green", "red"):
            encode(clip, PROMPT.replace("red", word))
        assert RESULTS.bytes <= 3 * size + 2
    assert RESULTS.limit == 64 * 2**20


def test_an_encoding_that_fails_leaves_nothing():
    image = torch.rand(1, 56, 56, 3)
    for placement in PLACEMENTS:
        clip = load(placement)
        refused(UnavailableError, "vision tower", run=lambda c=clip: encode(c, images=[image]))
        assert len(RESULTS) == 0


# --- where it stays


def test_auto_leaves_it_to_comfyui():
    clip = load()
    encode(clip)
    assert is_loaded(clip)
    assert clip.patcher.load_device == comfy.model_management.text_encoder_device()


def test_dropped_after_each_encoding():
    other = load()
    encode(other)
    for precision in ("auto", "fp8"):
        clip = load(DROP, precision)
        assert clip.patcher.load_device == comfy.model_management.text_encoder_device()
        assert clip.patcher.offload_device == CPU
        exact = encode(load("auto", precision))
        RESULTS.clear()
        with spied() as counts:
            for prompt in (PROMPT, PROMPT.replace("red", "blue"), PROMPT):
                encode(clip, prompt)
                assert not is_loaded(clip) and is_loaded(other)
            assert counts == [2, 2]
        assert torch.equal(encode(clip), exact)
        # A clone with a LoRA leaves the card with it.
        clone = clip.clone()
        shape = clip.cond_stage_model.state_dict()[WEIGHT].shape
        clone.add_patches({WEIGHT: ("diff", (torch.ones(shape),))}, 0.1)
        assert not torch.equal(encode(clone), exact)
        assert not is_loaded(clip) and not is_loaded(clone)
        # Single numbers of modules that have children stay where dynamic VRAM has put them.
        parameters = clip.cond_stage_model.parameters()
        weights = {weight.device.type for weight in parameters if weight.numel() > 1}
        assert weights == {"cpu"}
        assert torch.equal(encode(clip), exact)


def test_dropped_after_failing_and_after_scheduled_hooks():
    clip = load(DROP)
    with mock.patch.object(comfy.sd.CLIP, "add_hooks_to_dict", side_effect=KeyError):
        try:
            clip.encode_from_tokens(clip.tokenize(PROMPT), return_dict=True)
        except KeyError:
            assert not is_loaded(clip)
        else:
            raise AssertionError("nothing failed")
    group = comfy.hooks.HookGroup()
    group.add(comfy.hooks.WeightHook())
    scheduled = clip.clone(disable_dynamic=True)
    scheduled.patcher.forced_hooks, scheduled.use_clip_schedule = group, True
    assert encodings(lambda: encode(scheduled)) == [1]
    assert not is_loaded(scheduled)


def test_on_the_processor():
    exact = encode(load())
    clip = load("cpu")
    assert (clip.patcher.load_device, clip.patcher.offload_device) == (CPU, CPU)
    assert not clip.is_dynamic()
    found = encode(clip)
    if MODE == "cpu":
        assert torch.equal(found, exact)
    assert (found - exact).norm() / exact.norm() <= 1e-4
    assert {parameter.device.type for parameter in clip.cond_stage_model.parameters()} == {"cpu"}


def test_another_device_is_asked_anew():
    clip = load()
    encode(clip)
    (moved,) = SelectCLIPDeviceNode.execute(clip, "cpu").args
    assert isinstance(moved, PlacedClip) and moved.patcher.load_device == CPU
    assert encodings(lambda: encode(moved)) == [0 if MODE == "cpu" else 1]
    (back,) = SelectCLIPDeviceNode.execute(clip, "default").args
    assert encodings(lambda: encode(back)) == [0]


def test_the_placement_goes_with_a_reload():
    for placement in PLACEMENTS:
        clip = load(placement)
        exact = encode(clip)
        function, arguments = clip.patcher.cached_patcher_init
        patcher = function(*arguments, disable_dynamic=True)
        assert patcher.cached_patcher_init == clip.patcher.cached_patcher_init
        assert arguments[2] == placement
        devices = [(p.load_device, p.offload_device) for p in (clip.patcher, patcher)]
        assert devices[0] == devices[1] and not patcher.is_dynamic()
        again = clip.clone()
        again.patcher, again.cond_stage_model = patcher, patcher.model
        RESULTS.clear()
        assert torch.equal(encode(again), exact)
        gc.collect()  # ComfyUI fails where a model disappears while it makes room for another


def test_what_comfyui_is_told():
    """The small model never starts on a card, and in a ComfyUI on the processor nothing does."""
    assert device_options("auto") == {}
    assert device_options("cpu") == {"load_device": CPU, "offload_device": CPU}
    assert device_options(DROP) == {"offload_device": CPU, "initial_device": CPU}
    build = comfy.sd.CLIP.__init__
    for placement in PLACEMENTS:
        with mock.patch.object(comfy.sd.CLIP, "__init__", autospec=True, side_effect=build) as init:
            load(placement)
        told = init.call_args_list[0].kwargs["model_options"]
        assert device_options(placement).items() <= told.items()


def test_an_unknown_placement_is_refused():
    refused(
        SettingError,
        *("'card'", *PLACEMENTS),
        run=lambda: load_text_encoder(MICRO, "auto", "card"),
    )


def test_host_memory_counts_the_copy_of_the_processor():
    with (
        mock.patch.object(text_encoder, "available_memory", return_value=1000),
        mock.patch.object(text_encoder.comfy.memory_management, "aimdo_enabled", True),
    ):
        words = ["text_encoder in auto", "of host memory"]
        refused(UnavailableError, *words, run=lambda: load_text_encoder(MICRO, "auto", "cpu"))


def test_the_node():
    assert list(PLACEMENTS) == TEXT_ENCODER_PLACEMENTS
    ids = [entry.id for entry in QwenL40SLoadTextEncoder.define_schema().inputs]
    assert ids == ["text_encoder", "precision", "placement"]
    choice = {"text_encoder": "micro (bundled)", "precision": "auto"}
    clip, report = QwenL40SLoadTextEncoder.execute(**choice).args
    assert clip.placement == "auto" and f"placement auto: {PLACEMENTS['auto']}" in report
    for placement, words in PLACEMENTS.items():
        clip, report = QwenL40SLoadTextEncoder.execute(**choice, placement=placement).args
        assert clip.placement == placement and f"placement {placement}: {words}" in report
        RESULTS.clear()
        assert torch.isfinite(encode(clip)).all()
        assert is_loaded(clip) == (placement != DROP)
