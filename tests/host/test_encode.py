"""What a text encoder keeps from one encoding for the next, against ComfyUI's own encoding."""

import functools
import gc
import itertools
import random
import threading
from functools import partial
from unittest import mock

import comfy.hooks
import comfy.memory_management
import comfy.model_management
import comfy.sd
import narrow_text_encoder as narrow
import pytest
import torch
from comfy.text_encoders import llama
from comfyui_boot import folder, refused
from safetensors.torch import save_file

import nodes as core
from qwen_l40s.caches import forget
from qwen_l40s.errors import SettingError, UnavailableError
from qwen_l40s.hosts.comfyui import encode as ours
from qwen_l40s.hosts.comfyui.encode import KEPT
from qwen_l40s.hosts.comfyui.load.text_encoder import load_text_encoder
from qwen_l40s.hosts.comfyui.load.vae import load_vae
from qwen_l40s.loaders.source import MICRO as MICRO_NAME
from qwen_l40s.loaders.source import bundled_micro_folder
from qwen_l40s.nodes.encoder_cache import QwenL40SEncoderCache

pytestmark = [pytest.mark.usefixtures("inference_mode", "small"), pytest.mark.each_device]
FOLDER = folder("encode")
NEWER = pytest.mark.host_has("comfy.model_base.QwenImage21")
KINDS = ["1.x", pytest.param("2.1", marks=NEWER)]
EACH = pytest.mark.parametrize("kind", KINDS)
SHAPES = [(56, 84), (64, 64), (84, 56), (96, 32), (64, 64), (56, 56), (32, 96), (64, 96)]
IMAGES = [
    torch.rand(1, *shape, 3, generator=torch.Generator().manual_seed(number))
    for number, shape in enumerate(SHAPES)
]
PIXEL = IMAGES[0].clone()
PIXEL[0, 3, 5, 1] += 0.25
NAMED = {"1.x": "qwen25_7b", "2.1": "qwen3vl_8b"}


@pytest.fixture
def small():
    """ComfyUI's encoders with fewer and narrower layers, and nothing kept."""
    with narrow.small():
        forget()
        yield
        forget()


@functools.cache
def file(kind):
    if kind == "1.x":
        tower = llama.qwen_vl.Qwen2VLVisionTransformer(
            1280, narrow.HIDDEN, device="meta", dtype=torch.bfloat16, ops=torch.nn
        )
        vision = {f"visual.{name}": it for name, it in narrow.random_like(tower).items()}
        tensors = narrow.weights() | vision
    else:
        tensors = narrow.weights_21().items()
        tensors = {name.replace("visual.", "model.visual."): it for name, it in tensors}
    path = FOLDER / f"{kind}.safetensors"
    save_file(tensors, path)
    return path


def load(kind, precision="auto"):
    """A CLIP that multiplies as ComfyUI does."""
    return with_settings(load_text_encoder(file(kind), precision)[0])


@pytest.fixture(scope="module", autouse=True)
def no_clips_left():
    yield
    unchanged.cache_clear()


@functools.cache
def unchanged(kind):
    """A CLIP for tests that leave it as it is."""
    return load(kind)


def with_settings(clip, reuse=True, memory=4.0, arithmetic="exact"):
    return QwenL40SEncoderCache.execute(clip, reuse, memory, arithmetic).args[0]


def stock_of(clip):
    return with_settings(clip, reuse=False)


def encode(clip, text="a red star", images=(), **more):
    tokens = clip.tokenize(text, images=list(images), **more)
    return clip.encode_from_tokens(tokens, return_dict=True)


def is_same(found, other):
    assert found.keys() == other.keys()
    return all(
        torch.equal(it, other[name]) if torch.is_tensor(it) else it == other[name]
        for name, it in found.items()
    )


def error(found, exact):
    assert found.keys() == exact.keys()
    assert found["cond"].shape == exact["cond"].shape
    assert found.get("image_slots") == exact.get("image_slots")
    return float((found["cond"] - exact["cond"]).norm() / exact["cond"].norm())


PROMPTS = {
    "no image": {},
    "one": {"images": IMAGES[:1]},
    "two": {"images": IMAGES[:2]},
    "the other way round": {"images": IMAGES[1::-1]},
    "one pixel": {"images": [PIXEL, IMAGES[1]]},
    "twice the same": {"images": [IMAGES[0], IMAGES[0].clone()]},
    "eight": {"images": IMAGES},
    "an empty text": {"text": "", "images": IMAGES[:1]},
    "one token": {"text": "a", "images": IMAGES[:1]},
    "4,000 tokens": {"text": "a red star " * 1333, "images": IMAGES[:1]},
    "brackets": {"text": "(a red:1.3) star", "images": IMAGES[:1]},
    "padding": {"text": "a <|endoftext|> star", "images": IMAGES[:1]},
    "vision kept": {"images": IMAGES[:2], "keep_vision": True},
}


def prompts(kind):
    """{name: what `encode` takes}; the template of 1.x has a place for one image."""
    found = {}
    for name, asked in PROMPTS.items():
        asked = dict(asked)
        if kind == "1.x":
            asked.pop("keep_vision", None)
            count, block = len(asked.get("images", ())), "<|vision_start|><|image_pad|>"
            places = "".join(f"Picture {it + 1}: {block}<|vision_end|>" for it in range(count))
            if count:
                system = "<|im_start|>system\nDescribe.<|im_end|>\n<|im_start|>user\n"
                asked["llama_template"] = system + places + "{}<|im_end|>\n<|im_start|>assistant\n"
        found[name] = asked
    return found


@EACH
def test_each_prompt_is_comfyuis_up_to_rounding(kind):
    clip, stock = unchanged(kind), comfy.sd.CLIP(no_init=True)
    vars(stock).update(vars(clip))
    for name, asked in prompts(kind).items():
        exact = encode(stock, **asked)
        assert is_same(encode(stock_of(clip), **asked), exact), name
        found = encode(clip, **asked)
        assert is_same(found, exact) if name in ("no image", "padding") else True, name
        assert error(found, exact) <= 2e-6, name
        assert is_same(encode(clip, **asked), found), name


@EACH
def test_any_order_gives_the_same_bits(kind):
    clip, asked = unchanged(kind), prompts(kind)
    del asked["4,000 tokens"]
    alone = {}
    for name, prompt in asked.items():
        KEPT.clear()
        alone[name] = encode(clip, **prompt)
    different = [it["cond"].numpy().tobytes() for it in alone.values()]
    assert len(set(different)) == len(asked) - (kind == "1.x")  # which has no `keep_vision`
    order = list(asked) * 2
    random.Random(0).shuffle(order)
    for room in (4.0, 1e-3):  # where all stays, and where most must go
        KEPT.clear()
        for name in order:
            assert is_same(encode(with_settings(clip, memory=room), **asked[name]), alone[name])
    assert 0 < KEPT.bytes <= 1e-3 * 2**30


def tower_runs(clip, **asked):
    """Whether the vision tower ran in an encoding, and how many tokens the first layer saw."""
    model = getattr(clip.cond_stage_model, clip.cond_stage_model.clip).transformer
    seen = {"images": 0, "tokens": 0}
    own = {it: it.forward for it in (model.visual, model.model.layers[0].mlp)}

    def of(module, name, count):
        def forward(x, *given, **named):
            seen[name] += count(x)
            return own[module](x, *given, **named)

        return forward

    # On the class, and told as ComfyUI's own.
    for module, name, count in (
        (model.visual, "images", lambda x: 1),
        (model.model.layers[0].mlp, "tokens", lambda x: x.shape[1]),
    ):
        module.__dict__["forward"] = of(module, name, count)
    with mock.patch.object(ours, "objection", lambda clip: known(clip)):
        encode(clip, **asked)
    for module in own:
        del module.__dict__["forward"]
    return seen["images"], seen["tokens"]


def known(clip):
    assert clip.cond_stage_model in ours._known
    return None


@EACH
def test_what_is_encoded_again(kind):
    clip, asked = unchanged(kind), prompts(kind)
    encode(clip, **asked["two"])
    whole = tower_runs(stock_of(clip), **asked["two"])
    assert whole[0] == 2
    runs = {
        "the same": (asked["two"], 0, 0),
        "the same under other names": (
            asked["two"] | {"images": [it.clone() for it in asked["two"]["images"]]},
            *(0, 0),
        ),
        "another text": (asked["two"] | {"text": "blue"}, 0, 15),
        "an empty text": (asked["two"] | {"text": ""}, 0, 15),
        "another order": (asked["the other way round"], 0, whole[1]),
        "one pixel": (asked["one pixel"], 1, whole[1]),
    }
    for name, (prompt, images, tokens) in runs.items():
        found = tower_runs(clip, **prompt)
        assert found[0] == images and found[1] <= tokens, (name, found)
    # What does not change the result is no reason to encode it again.
    assert tower_runs(clip.clone(), **asked["two"]) == (0, 0)


@EACH
@pytest.mark.skipif(
    comfy.memory_management.aimdo_enabled,
    reason="dynamic VRAM rounds a patched weight once it has used it unrounded",
)
def test_a_change_of_anything_encodes_again(kind):
    clip, asked = unchanged(kind), prompts(kind)["two"]
    plain = encode(clip, **asked)
    name = f"{NAMED[kind]}.transformer.model.layers.0.self_attn.o_proj.weight"
    shape = clip.cond_stage_model.state_dict()[name].shape
    patched = clip.clone()
    patched.add_patches({name: ("diff", (torch.ones(shape),))}, 0.1)
    layer = core.CLIPSetLastLayer().set_last_layer(clip, -2)[0]
    for changed in (patched, layer):
        KEPT.clear()
        alone = encode(changed, **asked)
        assert not is_same(alone, plain)
        exact = encode(stock_of(changed), **asked)
        assert error(alone, exact) <= 2e-6
        assert error(encode(with_settings(changed, arithmetic="bf16x2"), **asked), exact) < 3e-5
        for which, same in ((clip, plain), (changed, alone), (clip, plain), (changed, alone)):
            assert is_same(encode(which, **asked), same)


def hooked(clip):
    group = comfy.hooks.HookGroup()
    group.add(comfy.hooks.WeightHook())
    clip.patcher.forced_hooks = group


def language(clip):
    return getattr(clip.cond_stage_model, clip.cond_stage_model.clip).transformer.model


class Wrapped(torch.nn.Module):
    """A layer in another one, as packs make them."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *given, **named):
        return self.layer(*given, **named)

    def __getattr__(self, name):  # dynamic VRAM reads a layer's parts
        layer = super().__getattr__("layer")
        return layer if name == "layer" else getattr(layer, name)


def wrap(clip):
    language(clip).layers[1] = Wrapped(language(clip).layers[1])


def wrap_encoder(clip):
    own = clip.cond_stage_model.encode_token_weights
    clip.cond_stage_model.encode_token_weights = lambda tokens: own(tokens)


def change_number(clip):
    norm = language(clip).layers[0].input_layernorm
    norm.eps = 0.5


def bypass(clip):
    layer = language(clip).layers[0].self_attn.q_proj
    own = layer.forward
    layer.forward = lambda x: own(x) * 2


def add_hook(clip):
    language(clip).layers[0].mlp.register_forward_hook(lambda module, given, out: out * 2)


@EACH
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("change", [hooked, wrap, wrap_encoder, change_number, bypass, add_hook])
def test_what_another_extension_changes_is_comfyuis_to_encode(kind, change, first, caplog):
    """Also where it changes the text encoder after its first encoding."""
    if not first and change is change_number:
        pytest.skip("a file may have any")
    clip, asked = load(kind), prompts(kind)["two"]
    if first:
        encode(clip, **asked)
    change(clip)
    caplog.clear()
    found = encode(clip, **asked)
    assert is_same(found, encode(stock_of(clip), **asked))
    assert is_same(encode(clip, **asked), found)
    told = [it for it in caplog.records if ours.OWN in it.getMessage()]
    assert len(told) == 1


@EACH
def test_a_forward_of_another_form_is_comfyuis_to_run(kind, monkeypatch):
    """As of a later ComfyUI whose attention keeps its keys in another way."""
    clip, asked = unchanged(kind), prompts(kind)["two"]
    attention = type(language(clip).layers[0].self_attn)
    own = attention.forward

    def forward(self, *given, past_key_value=None, **named):
        return own(self, *given, past_key_value=past_key_value or None, **named)

    forward.__code__ = forward.__code__.replace(co_filename=own.__code__.co_filename)
    monkeypatch.setattr(attention, "forward", forward)
    forget()
    exact = encode(stock_of(clip), **asked)
    assert is_same(encode(clip, **asked), exact) and not KEPT.bytes


@EACH
def test_other_clips_and_wrapped_ones(kind):
    class Theirs(comfy.sd.CLIP):
        pass

    clip = unchanged(kind)
    theirs = Theirs(no_init=True)
    vars(theirs).update(vars(clip))
    instance = clip.clone()
    instance.encode_from_tokens = functools.partial(comfy.sd.CLIP.encode_from_tokens, instance)
    for other in (theirs, instance, object()):
        found, report = QwenL40SEncoderCache.execute(other, True, 4.0, "exact").args
        assert found is other and "unchanged" in report
    stock = comfy.sd.CLIP(no_init=True)
    vars(stock).update(vars(clip))
    asked = prompts(kind)["one"]
    assert is_same(encode(with_settings(stock), **asked), encode(clip, **asked))


@EACH
@pytest.mark.skipif(
    comfy.memory_management.aimdo_enabled, reason="dynamic VRAM takes a layer for one thread"
)
def test_two_threads(kind):
    # In ComfyUI itself two threads exchange what one text encoder remembers of an encoding.
    clips = [unchanged(kind), stock_of(load(kind))]
    asked = {name: it for name, it in prompts(kind).items() if not name.startswith("4,")}
    exact = [{name: encode(clip, **it) for name, it in asked.items()} for clip in clips]
    KEPT.clear()
    lock, load_models = threading.RLock(), comfy.model_management.load_models_gpu
    errors = []

    def locked(*given, **named):
        with lock:  # ComfyUI loads models for one thread at a time
            return load_models(*given, **named)

    def work(which):
        try:
            with torch.inference_mode():
                for name in [*asked, *reversed(asked)]:
                    assert is_same(encode(clips[which], **asked[name]), exact[which][name])
        except BaseException as fault:
            errors.append(fault)

    with mock.patch.object(comfy.model_management, "load_models_gpu", locked):
        threads = [threading.Thread(target=work, args=[which]) for which in (0, 0, 0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors, errors


@EACH
def test_cancelled_in_the_middle(kind):
    clip, asked = unchanged(kind), prompts(kind)["two"]
    exact = encode(clip, **asked)
    own = ours._ram
    for stop in range(2 * len(language(clip).layers)):
        KEPT.clear()
        seen = itertools.count()

        def ram(tensor, seen=seen, stop=stop):
            if next(seen) == stop:
                raise comfy.model_management.InterruptProcessingException
            return own(tensor)

        stopped = pytest.raises(comfy.model_management.InterruptProcessingException)
        with mock.patch.object(ours, "_ram", ram), stopped:
            encode(clip, **asked)
        assert is_same(encode(clip, **asked), exact)


@EACH
def test_no_room(kind):
    clip, asked = unchanged(kind), prompts(kind)["two"]
    exact = encode(clip, **asked)
    KEPT.clear()
    with mock.patch.object(ours, "available_memory", return_value=1 << 20):
        for _ in range(2):
            assert is_same(encode(clip, **asked), exact)
            assert not KEPT.bytes
    nothing = with_settings(clip, memory=0.0)
    assert is_same(encode(nothing, **asked), encode(stock_of(clip), **asked))


@EACH
def test_what_drops_it(kind):
    clip, asked = load(kind), prompts(kind)["two"]
    encode(clip, **asked)
    other = load(kind)
    encode(other, **asked)
    whole = KEPT.bytes
    assert clip.settings.room > whole > 0
    comfy.model_management.unload_model_and_clones(clip.patcher)
    assert whole == KEPT.bytes  # it leaves the card, as for the transformer
    del clip
    comfy.model_management.current_loaded_models.clear()
    gc.collect()
    assert KEPT.bytes == whole // 2
    comfy.model_management.unload_all_models()  # what /free does
    assert not KEPT.bytes


@EACH
def test_the_arithmetic(kind):
    asked = prompts(kind)["two"]
    exact = encode(stock_of(load(kind, "bf16")), **asked)
    errors = {}
    for precision, arithmetic in (("bf16", "bf16"), ("int8", "exact"), ("int8", "int8")):
        clip = load(kind, precision)
        for reuse in (False, True):
            found = with_settings(clip, reuse, 4.0, arithmetic)
            errors[precision, arithmetic, reuse] = error(encode(found, **asked), exact)
        assert is_same(encode(found, **asked), encode(found, **asked))
        # The same modules, for whoever else uses them.
        plain = encode(stock_of(clip), **asked)
        assert is_same(plain, encode(stock_of(load(kind, precision)), **asked))
    assert 1e-4 < errors["bf16", "bf16", True] < 0.02
    assert errors["int8", "exact", True] < errors["int8", "int8", True] < 0.05
    for arithmetic in ("int8", "fp4"):
        words = ["arithmetic", "exact"]
        run = partial(with_settings, load(kind), arithmetic=arithmetic)
        refused(SettingError, *words, run=run)


@EACH
@pytest.mark.parametrize("precision", ["bf16", "fp8", "int8"])
def test_two_bf16_numbers_for_an_input(kind, precision):
    clip = load(kind, precision)
    for asked in (prompts(kind)["no image"], prompts(kind)["two"]):
        exact = encode(stock_of(clip), **asked)
        found = encode(with_settings(clip, arithmetic="bf16x2"), **asked)
        # TF32 would lose 2**-11 of an input, bf16 2**-8.
        assert 1e-8 < error(found, exact) < 3e-5
        default = encode(with_settings(clip, arithmetic="auto"), **asked)
        on_card = comfy.model_management.get_torch_device().type == "cuda"
        assert is_same(default, found if on_card else encode(clip, **asked))


MICRO = pytest.mark.parametrize("name", [MICRO_NAME, pytest.param("2.1", marks=NEWER)])


@MICRO
def test_encoders_with_their_own_tokenizer(name):
    clip = with_settings(load_text_encoder(bundled_micro_folder(name))[0])
    exact = encode(clip)
    assert is_same(exact, encode(stock_of(clip)))
    found = encode(with_settings(clip, arithmetic="bf16"))
    assert 1e-4 < error(found, exact) < 0.02
    refused(UnavailableError, "vision tower", run=lambda: encode(clip, images=IMAGES[:1]))


@MICRO
def test_the_vae_encodes_an_image_once(name):
    vae, _ = load_vae(bundled_micro_folder(name), "fp32")
    stock = comfy.sd.VAE(sd=vae.get_sd(), dtype=torch.float32)
    image, other = torch.rand(2, 1, 64, 48, 3).unbind()
    exact = stock.encode(image)
    for _ in range(3):
        found = vae.encode(image)
        assert torch.equal(found, exact)
        found.zero_()  # a node may change what it is given
    size = KEPT.bytes
    assert size == exact.nbytes
    vae.encode(image.clone())
    assert KEPT.bytes == size
    assert not torch.equal(vae.encode(other), exact) and KEPT.bytes == 2 * size
    weights = vae.patcher.model_state_dict()
    key = next(it for it in weights if it.startswith("encoder") and weights[it].dim() > 3)
    vae.patcher.add_patches({key: ("diff", (torch.ones(weights[key].shape),))}, 0.1)
    assert not torch.equal(vae.encode(image), exact)
    comfy.model_management.unload_all_models()
    assert not KEPT.bytes
    # In tiles, as where memory runs out, the latents are others.
    comfy.model_management.load_models_gpu([vae.patcher])
    with mock.patch.object(vae, "memory_used_encode", side_effect=torch.OutOfMemoryError):
        vae.encode(image)
    vae.encode_tiled(image)
    assert not KEPT.bytes
    vae.encode(image)
    assert KEPT.bytes
