"""The block executor against diffusers' own block and against plain arithmetic; the tables."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("diffusers")

from block_kernel_cases import with_kernels
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock

from qwen_l40s.optimizations import reference
from qwen_l40s.optimizations.blocks import host as block_host
from qwen_l40s.optimizations.blocks.block import BlockExecutor, LayerTensors, Step
from qwen_l40s.optimizations.blocks.block_form import (
    DENSE,
    LowRank,
    unsupported_block,
)
from qwen_l40s.optimizations.blocks.products import PackedWeight
from qwen_l40s.optimizations.fused import TORCH
from qwen_l40s.optimizations.inventory import is_changed
from qwen_l40s.optimizations.modulation import ModulationTable, compute_entry
from qwen_l40s.optimizations.reference import Rotary, Tokens
from qwen_l40s.spec.formats import FORMATS, RowFormat

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, HEAD_DIM = 2, 32
DIM = HEADS * HEAD_DIM
ONE, TWO, FIVE = Tokens(1, 3, 10, 10), Tokens(2, 3, 10, 10), Tokens(5, 2, 6, 6)
SHAPES = {
    "one item": ONE,
    "two items": TWO,
    "five items": FIVE,
    "one text token": Tokens(1, 1, 10, 10),
    "one text token of each of two items": Tokens(2, 1, 7, 7),
    "one token of each": Tokens(1, 1, 1, 1),
    "a reference image": Tokens(1, 3, 10, 6),
    "a reference image, two items": Tokens(2, 3, 10, 6),
    "the whole image at timestep zero": Tokens(2, 3, 10, 0),
}
LAYERS = {
    "text q": "attn.add_q_proj",
    "text k": "attn.add_k_proj",
    "text v": "attn.add_v_proj",
    "image q": "attn.to_q",
    "image k": "attn.to_k",
    "image v": "attn.to_v",
    "text out": "attn.to_add_out",
    "image out": "attn.to_out.0",
    "text inner": "txt_mlp.net.0.proj",
    "image inner": "img_mlp.net.0.proj",
    "text outer": "txt_mlp.net.2",
    "image outer": "img_mlp.net.2",
}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.inference_mode():
        yield


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def new_block(seed=0, dtype=torch.float32, zero_cond_t=False):
    """diffusers' block with weights at which activations stay around 1 and every part shows."""
    block = QwenImageTransformerBlock(DIM, HEADS, HEAD_DIM, zero_cond_t=zero_cond_t)
    for i, weight in enumerate(block.parameters()):
        scale = weight.shape[1] ** -0.5 if weight.dim() == 2 else 0.2
        weight.copy_(random(*weight.shape, seed=1000 * seed + i) * scale)
    for name, weight in block.named_parameters():
        if "norm" in name:
            weight += 1
    return block.eval().to(dtype)


class Case:
    def __init__(self, tokens, *, masked=False, dtype=torch.float32):
        self.tokens = tokens
        self.zero = tokens.zero_from < tokens.image
        self.text = random(tokens.batch, tokens.text, DIM, seed=1, dtype=dtype)
        self.image = random(tokens.batch, tokens.image, DIM, seed=2, dtype=dtype)
        rows = tokens.batch * (1 + self.zero)
        self.temb = random(rows, DIM, seed=3, dtype=dtype)
        angles = random(tokens.joint, HEAD_DIM // 2, seed=4)
        self.rotation = torch.polar(torch.ones_like(angles), angles)
        self.text_mask = None
        mask = None
        if masked:
            # Every item loses its last text token, the first one all but one.
            self.text_mask = torch.ones(tokens.batch, tokens.text, dtype=torch.bool)
            self.text_mask[:, tokens.text - 1 :] = False
            self.text_mask[0, 1:] = False
            mask = torch.zeros(tokens.batch, 1, 1, tokens.joint, dtype=dtype)
            mask[:, 0, 0, : tokens.text].masked_fill_(~self.text_mask, float("-inf"))
        rotary = Rotary(
            self.rotation.real[None].contiguous(), self.rotation.imag[None].contiguous()
        )
        self.step = Step(tokens, rotary, mask)

    def host(self, block, text=None, image=None):
        index = None
        if self.zero:
            index = (torch.arange(self.tokens.image) >= self.tokens.zero_from).int()
            index = index.expand(self.tokens.batch, -1)
        return block(
            hidden_states=self.image if image is None else image,
            encoder_hidden_states=self.text if text is None else text,
            encoder_hidden_states_mask=self.text_mask,
            temb=self.temb,
            image_rotary_emb=(
                self.rotation[self.tokens.text :],
                self.rotation[: self.tokens.text],
            ),
            modulate_index=index,
        )

    def entry(self, *blocks):
        return compute_entry(blocks, self.temb, self.tokens.batch)


def attend(q, k, v, mask):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


ROWS = {"fp8": RowFormat("fp8"), "int8": RowFormat("int8"), "rotated": RowFormat("int8", 16)}
ROWS["packed"] = ROWS["rotated"]


def packed(weight):
    """Numbers as large as a weight's, in 4 or, where there are more columns than rows, 6 bits."""
    (rows, columns), generator = weight.shape, torch.Generator().manual_seed(len(weight))
    bits = 6 if columns > rows else 4
    codes = torch.randint(-128, 128, (rows, columns * bits // 8), generator=generator)
    scale = torch.rand(rows, columns // 16, generator=generator) * 50 / 2**bits + 1
    codebook = torch.randn(16, generator=generator) * 4 if bits == 4 else None
    found = PackedWeight(codes.to(torch.int8), scale, codebook, bits)
    return found, torch.full((rows, 1), weight.std().item() / 30)


def as_int8(weight):
    return reference.decode_weight(*weight) if isinstance(weight, PackedWeight) else weight


def rotated(x, size):
    return reference.rotate(x.flatten(0, -2), size).view(x.shape) if size else x


class Gemm:
    """A GEMM of 8-bit rows and weights that adds up as a tensor core does."""

    backend = row_quantizer = "of these tests"

    def __init__(self, format, weight_only=False):
        self.format, self.weight_only = format, weight_only

    def takes(self, n, k):
        return True

    def linear(self, x, weight, scale, bias, rotation):
        assert self.weight_only, "rows were to be quantized"
        x = rotated(x, rotation)
        return F.linear(x, weight.to(x.dtype) * scale.to(x.dtype), bias)

    def linear_quantized(self, xq, x_scale, weight, scale, bias, out_dtype, out=None):
        assert not self.weight_only
        assert xq.dtype == weight.dtype == reference.storage_of(RowFormat(self.format))
        return out.copy_(reference.scaled_gemm(xq, weight, x_scale, scale, bias, out_dtype))


class Layers:
    """Layers held as `kinds` says, by a layer's name; "opaque" is a layer that runs itself.

    `ranks` are those of LoRAs, by a layer's name.
    """

    def __init__(self, block, kinds=None, weight_only=(), ranks=()):
        kinds, self.lows = kinds or {}, {}
        for stream in ("text", "image"):
            for readers in (("q", "k", "v"), ("out",), ("inner",), ("outer",)):
                names = [place for it in readers if (place := f"{stream} {it}") in ranks]
                layers = {name: block.get_submodule(LAYERS[name]) for name in names}
                width = max((layer.in_features for layer in layers.values()), default=1)
                down = random(sum(ranks[it] for it in names), width, seed=7) * width**-0.5
                start = 0
                for i, (name, layer) in enumerate(layers.items()):
                    up = random(layer.out_features, ranks[name], seed=70 + i) * ranks[name] ** -0.5
                    dtype = layer.weight.dtype
                    self.lows[layer] = LowRank(down.to(dtype), start, up.to(dtype))
                    start += ranks[name]
        self.kinds = {
            block.get_submodule(name): kinds.get(place, DENSE) for place, name in LAYERS.items()
        }
        self.weights = {
            layer: packed(layer.weight)
            if kind == "packed"
            else reference.row_quantize(layer.weight, ROWS[kind])
            for layer, kind in self.kinds.items()
            if kind in ROWS
        }
        self.gemms = {format: Gemm(format, format in weight_only) for format in FORMATS}

    def kind(self, layer):
        kind = self.kinds.get(layer, DENSE)
        return None if kind == "opaque" else ROWS.get(kind, kind)

    is_foreign = staticmethod(is_changed)

    def tensors(self, layer, like):
        if self.kind(layer) is None:
            raise AssertionError("a layer that runs itself was read")
        return nullcontext(LayerTensors(*self.weights.get(layer, (layer.weight, None)), layer.bias))

    def low_rank(self, layer):
        assert self.kind(layer) is not None, "the LoRA of a layer that runs itself was read"
        return self.lows.get(layer)

    def norm_weight(self, norm, like):
        return norm.weight

    def gemm(self, format, device):
        return self.gemms[format]

    def apply(self, layer, x):
        out = self.apply_weight(layer, x)
        if low := self.lows.get(layer):
            down = low.down[low.start : low.start + low.up.shape[1]]
            out = out + F.linear(F.linear(x, down), low.up)
        return out

    def apply_weight(self, layer, x):
        kind = self.kinds[layer]
        if kind in (DENSE, "opaque"):
            return layer(x)
        weight, scale = self.weights[layer]
        weight = as_int8(weight)
        if self.gemms[ROWS[kind].storage].weight_only:
            x = rotated(x, ROWS[kind].rotation)
            return F.linear(x, weight.to(x.dtype) * scale, layer.bias)
        q, x_scale = reference.row_quantize(x.reshape(-1, x.shape[-1]), ROWS[kind])
        out = reference.scaled_gemm(q, weight, x_scale, scale, layer.bias, x.dtype)
        return out.view(*x.shape[:-1], -1)


def run(block, case, layers=None, ops=TORCH, text=None, image=None):
    executor = BlockExecutor(layers or Layers(block), ops, attend)
    text = case.text if text is None else text
    image = case.image if image is None else image
    return executor.run(block, text, image, case.step, case.entry(block).of(0))


def relative(ours, theirs):
    ours, theirs = (torch.cat([x.double().flatten() for x in pair]) for pair in (ours, theirs))
    return ((ours - theirs).norm() / theirs.norm()).item()


def in_plain_arithmetic(block, case, layers):
    tokens, attn = case.tokens, block.attn
    image_mod, text_mod = block.img_mod(case.temb), block.txt_mod(case.temb[: tokens.batch])
    results = []
    for item in range(tokens.batch):
        text, image = case.text[item], case.image[item]
        rows = [item if i < tokens.zero_from else tokens.batch + item for i in range(tokens.image)]
        halves = text_mod[item].expand(tokens.text, -1), image_mod[rows]
        parts = [half.chunk(6, dim=-1) for half in halves]

        def normed(x, shift, scale):
            return F.layer_norm(x, (DIM,), eps=1e-6) * (1 + scale) + shift

        def heads(layers_, norms, x, rotation):
            found = []
            for layer, norm in zip(layers_, norms, strict=True):
                part = layers.apply(layer, x).unflatten(-1, (HEADS, HEAD_DIM))
                if norm is not None:
                    part = part * (part.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
                    pairs = torch.view_as_complex((part * norm.weight).unflatten(-1, (-1, 2)))
                    part = torch.view_as_real(pairs * rotation[:, None]).flatten(-2)
                found.append(part)
            return found

        rotations = case.rotation[: tokens.text], case.rotation[tokens.text :]
        of_text = heads(
            (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj),
            (attn.norm_added_q, attn.norm_added_k, None),
            normed(text, *parts[0][:2]),
            rotations[0],
        )
        of_image = heads(
            (attn.to_q, attn.to_k, attn.to_v),
            (attn.norm_q, attn.norm_k, None),
            normed(image, *parts[1][:2]),
            rotations[1],
        )
        q, k, v = (torch.cat(pair) for pair in zip(of_text, of_image, strict=True))
        scores = torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
        if case.step.mask is not None:
            scores = scores + case.step.mask[item, 0]
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        outs = attn.to_add_out, attn.to_out[0]
        mixed = mixed[: tokens.text], mixed[tokens.text :]
        streams = []
        mlps = block.txt_mlp, block.img_mlp
        for x, part, out, branch, mlp in zip((text, image), parts, outs, mixed, mlps, strict=True):
            x = x + part[2] * layers.apply(out, branch)
            hidden = layers.apply(mlp.net[0].proj, normed(x, *part[3:5]))
            hidden = F.gelu(hidden, approximate="tanh")
            streams.append(x + part[5] * layers.apply(mlp.net[2], hidden))
        results.append(streams)
    return tuple(torch.stack(stream) for stream in zip(*results, strict=True))


# --- against diffusers' own block ---


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_fp32_block_is_that_of_diffusers(name, masked):
    case = Case(SHAPES[name], masked=masked)
    block = new_block(zero_cond_t=case.zero)
    assert relative(run(block, case), case.host(block)) <= 1e-6


@pytest.mark.parametrize("name", SHAPES)
def test_bf16_block_is_nearer_to_the_truth_than_that_of_diffusers(name):
    case, truth = (Case(SHAPES[name], dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    block = new_block(dtype=torch.bfloat16, zero_cond_t=case.zero)
    exact = new_block(zero_cond_t=case.zero)
    exact.load_state_dict(block.state_dict())
    for field in ("text", "image", "temb"):
        setattr(truth, field, getattr(case, field).float())
    expected = truth.host(exact)
    ours, host = relative(run(block, case), expected), relative(case.host(block), expected)
    assert ours < 0.01
    assert ours < 1.2 * host


def test_inputs_of_any_strides():
    case, block = Case(TWO), new_block()
    text = torch.empty(DIM, TWO.batch, TWO.text).permute(1, 2, 0).copy_(case.text)
    image = torch.empty(TWO.batch, 2 * TWO.image, DIM)[:, ::2].copy_(case.image)
    assert not text.is_contiguous() and not image.is_contiguous()
    assert relative(run(block, case, text=text, image=image), run(block, case)) == 0


# --- quantized layers, and layers that run themselves ---

TEXT = tuple(place for place in LAYERS if place.startswith("text"))
IMAGE = tuple(place for place in LAYERS if place.startswith("image"))
MIXES = {
    "all fp8": dict.fromkeys(LAYERS, "fp8"),
    "all int8": dict.fromkeys(LAYERS, "int8"),
    "all rotated": dict.fromkeys(LAYERS, "rotated"),
    "all packed": dict.fromkeys(LAYERS, "packed"),
    "packed among rotated and fp8": dict.fromkeys(TEXT, "fp8")
    | dict.fromkeys(("image q", "image inner"), "packed")
    | dict.fromkeys(("image k", "image v", "image out", "image outer"), "rotated"),
    "rotated text, int8 image": dict.fromkeys(TEXT, "rotated") | dict.fromkeys(IMAGE, "int8"),
    "rotated inner, int8 outer": {
        "text inner": "rotated", "image inner": "rotated",
        "text outer": "int8", "image outer": "int8",
    },
    "opaque and dense among rotated": dict.fromkeys(LAYERS, "rotated")
    | {"image q": "opaque", "text outer": "opaque", "text k": DENSE},
    "dense text, fp8 image": dict.fromkeys(IMAGE, "fp8"),
    "int8 text, dense image": dict.fromkeys(TEXT, "int8"),
    "fp8 text, int8 image": dict.fromkeys(TEXT, "fp8") | dict.fromkeys(IMAGE, "int8"),
    "int8 inner, dense outer": {"text inner": "int8", "image inner": "int8"},
    "dense inner, int8 outer": {"text outer": "int8", "image outer": "int8"},
    "fp8 inner, int8 outer": {
        "text inner": "fp8", "image inner": "fp8", "text outer": "int8", "image outer": "int8",
    },
    "inner quantized in the text alone": {"text inner": "int8", "image outer": "int8"},
    "inner quantized in the image alone": {"image inner": "fp8", "text outer": "fp8"},
    "k alone quantized": {"image k": "int8", "text k": "fp8"},
    "out of the image alone": {"image out": "int8"},
    "outs in two formats": {"image out": "int8", "text out": "fp8"},
    "all opaque": dict.fromkeys(LAYERS, "opaque"),
    "opaque among fp8": dict.fromkeys(LAYERS, "fp8") | {"image q": "opaque", "text v": "opaque"},
    "opaque inner of fp8": dict.fromkeys(LAYERS, "fp8") | {"image inner": "opaque"},
    "opaque outer of int8": dict.fromkeys(LAYERS, "int8") | {"text outer": "opaque"},
    "opaque out of int8": dict.fromkeys(LAYERS, "int8") | {"image out": "opaque"},
}  # fmt: skip
MIX_SHAPES = {name: SHAPES[name] for name in ("one item", "two items", "five items")} | {
    "one text token": SHAPES["one text token"],
    "one text token of each of two items": SHAPES["one text token of each of two items"],
}


@pytest.mark.parametrize("shape", MIX_SHAPES)
@pytest.mark.parametrize("mix", MIXES)
def test_layers_of_any_kinds_beside_each_other(mix, shape):
    case, block = Case(MIX_SHAPES[shape]), new_block()
    layers = Layers(block, MIXES[mix])
    error = relative(run(block, case, layers), in_plain_arithmetic(block, case, layers))
    # Another order of sums puts a number on the other side of the middle of two steps now and then.
    assert error < 1e-3
    if set(MIXES[mix].values()) != {"opaque"}:
        assert relative(run(block, case, layers), case.host(block)) > 1e-3


@pytest.mark.parametrize("seed", range(12))
def test_layers_of_kinds_drawn_at_random(seed):
    generator = torch.Generator().manual_seed(seed)
    names = (DENSE, "fp8", "int8", "rotated", "packed", "opaque")
    drawn = torch.randint(len(names), (len(LAYERS),), generator=generator).tolist()
    kinds = {place: names[i] for place, i in zip(LAYERS, drawn, strict=True)}
    tokens = list(SHAPES.values())[seed % len(SHAPES)]
    case = Case(tokens, masked=seed % 2 == 0)
    block = new_block(seed, zero_cond_t=case.zero)
    layers = Layers(block, kinds, weight_only=("fp8",) if seed % 3 == 0 else ())
    assert relative(run(block, case, layers), in_plain_arithmetic(block, case, layers)) < 1e-3


@pytest.mark.parametrize(
    "mix", ["all fp8", "all rotated", "all packed", "dense text, fp8 image", "opaque inner of fp8"]
)
def test_weights_that_are_expanded_leave_activations_as_they_are(mix):
    case, block = Case(TWO), new_block()
    layers = Layers(block, MIXES[mix], weight_only=("fp8", "int8"))
    assert relative(run(block, case, layers), in_plain_arithmetic(block, case, layers)) < 1e-6


def test_loras_beside_layers_of_any_kinds():
    """Of all layers and of some, of one rank and of several, in one stream and in both."""
    some = {"image k": 3, "image v": 24, "text q": 16, "text inner": 40, "image outer": 8}
    for seed, ranks in enumerate(
        (dict.fromkeys(LAYERS, 16), some, {"image out": 5, "text out": 32}, {"text outer": 16})
    ):
        for name in ("all dense", "all fp8", *MIXES):
            kinds = MIXES.get(name, {})
            beside = {place: ranks[place] for place in ranks if kinds.get(place) != "opaque"}
            weight_only = ("int8",) if seed == 1 else ()
            tokens = list(SHAPES.values())[(seed + len(name)) % len(SHAPES)]
            case = Case(tokens, masked=True)
            block = new_block(seed, zero_cond_t=case.zero)
            layers = Layers(block, kinds, weight_only, beside)
            expected = in_plain_arithmetic(block, case, layers)
            error = relative(run(block, case, layers), expected)
            assert error < (1e-6 if set(kinds.values()) <= {DENSE, "opaque"} else 1e-3), name
            without = relative(run(block, case, Layers(block, kinds, weight_only)), expected)
            assert not beside or without > 5e-3, name


class Plain(Layers):
    def tensors(self, layer, like):
        return nullcontext(LayerTensors(layer.weight, None, layer.bias))


@pytest.mark.parametrize("ranks", [{}, dict.fromkeys(LAYERS, 16)], ids=["alone", "loras"])
def test_layer_that_is_expanded_may_turn_out_dense(ranks):
    """As fp8 weights do that ComfyUI casts on their way, on a card without fp8 products."""
    case, block = Case(TWO), new_block()
    layers = Plain(block, MIXES["all fp8"], weight_only=("fp8",), ranks=ranks)
    expected = in_plain_arithmetic(block, case, Layers(block, ranks=ranks))
    assert relative(run(block, case, layers), expected) < 1e-6


@pytest.mark.parametrize("kind", ["fp8", "rotated"])
def test_layer_that_turns_out_dense_reads_the_quantized_rows_back(kind):
    """As ComfyUI's fp8 layers do where a LoRA was merged into the weight on its way."""
    case, block = Case(TWO), new_block()

    class Merged(Plain):
        def apply_weight(self, layer, x):
            if layer in (block.attn.to_add_out, block.attn.to_out[0]):
                return layer(x)  # what attention gives is there unrounded too
            q, scale = reference.row_quantize(x.reshape(-1, x.shape[-1]), ROWS[kind])
            read = rotated((q.float() * scale).view(x.shape), ROWS[kind].rotation)
            return F.linear(read, layer.weight, layer.bias)

    layers = Merged(block, MIXES[f"all {kind}"])
    assert relative(run(block, case, layers), in_plain_arithmetic(block, case, layers)) < 1e-3


@pytest.mark.parametrize(
    ("mix", "expected"),
    [
        ("all fp8", "norm:fp8 rope row norm:fp8 gelu norm"),
        ("all rotated", "norm:int8 rotated by 16 rope row norm:int8 rotated by 16 gelu norm"),
        ("rotated text, int8 image", "norm row row rope row row norm row row gelu gelu norm"),
        ("fp8 text, int8 image", "norm row row rope row row norm row row gelu gelu norm"),
        ("dense inner, int8 outer", "norm rope norm row norm"),
        ("outs in two formats", "norm rope row row norm norm"),
        ("all dense", "norm rope norm norm"),
    ],
)
def test_each_activation_is_quantized_once(mix, expected):
    case, block = Case(ONE), new_block()
    names = {"residual_norm": "norm", "qk_norm_rope": "rope"}
    names |= {"row_quantize": "row", "gelu_quantize": "gelu"}
    calls = []

    def counted(field):
        def prepare(*like, **how):
            launch = getattr(TORCH, field)(*like, **how)
            fused = field == "residual_norm" and isinstance(like[6], RowFormat)
            name = names[field] + (f":{like[6]}" if fused else "")

            def run(*given):
                calls.append(name)
                launch(*given)

            return run

        return prepare

    ops = with_kernels(TORCH, **{name: counted(name) for name in names})
    run(block, case, Layers(block, MIXES.get(mix)), ops)
    assert " ".join(calls) == expected


# --- from block to block ---


def chain(blocks, case, executor, *, across, exchange=None):
    entry = case.entry(*blocks)
    text, image = case.text, case.image
    for index, block in enumerate(blocks):
        following = None
        if across and index + 1 < len(blocks):
            following = blocks[index + 1], entry.of(index + 1)[0]
        text, image = executor.run(block, text, image, case.step, entry.of(index), following)
        if exchange is not None:
            text, image = exchange(text, image)
    return text, image


@pytest.mark.parametrize("which", ["text", "image"])
def test_streams_that_are_exchanged_between_blocks_count(which):
    """As ControlNet does, were the border crossed all the same."""
    case, blocks = Case(TWO), [new_block(seed) for seed in range(3)]

    def exchange(text, image):
        return (text + 0.5, image) if which == "text" else (text, image + 0.5)

    text, image = case.text, case.image
    for block in blocks:
        text, image = exchange(*case.host(block, text, image))
    executor = BlockExecutor(Layers(blocks[0]), TORCH, attend)
    ours = chain(blocks, case, executor, across=True, exchange=exchange)
    assert relative(ours, (text, image)) <= 1e-6


def test_modulation_that_is_exchanged_between_blocks_counts():
    """As when another extension changes the timestep embedding on the way to a block."""
    case, blocks = Case(TWO), [new_block(seed) for seed in range(2)]
    executor = BlockExecutor(Layers(blocks[0]), TORCH, attend)
    announced, other = (
        compute_entry(blocks, case.temb * factor, case.tokens.batch) for factor in (1.0, 1.5)
    )
    first = case.text, case.image, case.step, announced.of(0)
    streams = executor.run(blocks[0], *first, (blocks[1], announced.of(1)[0]))
    ours = executor.run(blocks[1], *streams, case.step, other.of(1))
    executor = BlockExecutor(Layers(blocks[0]), TORCH, attend)
    streams = executor.run(blocks[0], *first)
    theirs = executor.run(blocks[1], *streams, case.step, other.of(1))
    assert relative(ours, theirs) <= 1e-6


def test_inputs_are_never_written_to():
    for tokens in (ONE, TWO, SHAPES["one token of each"]):
        case, blocks = Case(tokens), [new_block(seed) for seed in range(2)]
        held = case.text, case.image, case.temb, *case.step.rotary
        copies = [tensor.clone() for tensor in held]
        executor = BlockExecutor(Layers(blocks[0]), TORCH, attend)
        chain(blocks, case, executor, across=True)
        for tensor, copy in zip(held, copies, strict=True):
            assert torch.equal(tensor, copy)


def test_results_without_a_following_block_stay_as_they_are():
    case, blocks = Case(TWO), [new_block(seed) for seed in range(2)]
    executor = BlockExecutor(Layers(blocks[0]), TORCH, attend)
    entry = case.entry(*blocks)
    first = executor.run(blocks[0], case.text, case.image, case.step, entry.of(0))
    copies = [tensor.clone() for tensor in first]
    executor.run(blocks[1], *first, case.step, entry.of(1))
    for tensor, copy in zip(first, copies, strict=True):
        assert torch.equal(tensor, copy)


# --- which blocks ---


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda block: setattr(block.img_norm1, "forward", print), "img_norm1 was changed"),
        (lambda block: block.txt_norm2.register_forward_hook(print), "txt_norm2 was changed"),
        (lambda block: setattr(block, "img_norm1", torch.nn.LayerNorm(DIM)), "have weights"),
        (lambda block: setattr(block.img_norm2, "eps", 1e-5), "differ in form"),
        (lambda block: setattr(block.txt_mlp.net[0], "approximate", "none"), "not the tanh form"),
        (lambda block: setattr(block.attn, "norm_k", None), "it has an unknown form"),
        (lambda block: setattr(block.attn, "heads", 3), "heads of 21 are not supported"),
        (lambda block: delattr(block, "txt_mlp"), "it has an unknown form"),
    ],
)
def test_block_of_another_form_is_told(change, reason):
    block = new_block()
    assert unsupported_block(block, torch.float32) is None
    change(block)
    assert reason in str(unsupported_block(block, torch.float32))


# --- the modulation table ---


def embeddings(count, rows, dtype, device="cpu"):
    return [random(rows, DIM, seed=50 + i, dtype=dtype).to(device) for i in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (1, 2), (2, 2), (2, 4), (5, 5)])
def test_table_holds_what_the_modules_give_bit_for_bit(batch, rows, at_once, dtype, device):
    blocks = [new_block(seed, dtype).to(device) for seed in range(3)]
    table, given = ModulationTable(blocks), embeddings(20 if at_once else 3, rows, dtype, device)
    if at_once:
        table.entry(given[2], batch, schedule=lambda: given)
        assert len(table) == 20
    for embedding in given:
        for _ in range(2):
            entry = table.entry(embedding, batch)
            for index, block in enumerate(blocks):
                attention, mlp = entry.of(index)
                image, text = block.img_mod(embedding), block.txt_mod(embedding[:batch])
                assert torch.equal(torch.cat([attention.image, mlp.image], dim=1), image)
                assert torch.equal(torch.cat([attention.text, mlp.text], dim=1), text)
    assert (len(table), table.hits) == ((20, 40) if at_once else (3, 3))


def test_each_timestep_goes_alone_through_every_layer():
    """A GEMM may add up in another order for more rows: a later block's, where not the first's."""
    blocks = [new_block(seed) for seed in range(3)]

    class Batched(torch.nn.Module):
        def __init__(self, part, changes):
            super().__init__()
            self.part, self.changes = part, changes

        def forward(self, x):
            return torch.cat([self.part(row[None]) for row in x]) + self.changes * len(x)

    for changes, block in zip((0, 1e-3, 1e-3), blocks, strict=True):
        block.img_mod = Batched(block.img_mod, changes)
    schedule = embeddings(4, 1, torch.float32)
    table = ModulationTable(blocks)
    table.entry(schedule[0], 1, schedule=lambda: schedule)
    for embedding in schedule:
        entry = table.entry(embedding, 1)
        for index, block in enumerate(blocks):
            assert torch.equal(entry.image[index], block.img_mod(embedding))


def test_table_is_bounded_and_the_oldest_entries_leave():
    blocks = [new_block()]
    schedule = embeddings(6, 1, torch.float32)
    size = ModulationTable(blocks).entry(schedule[0], 1).bytes
    table = ModulationTable(blocks, most_bytes=3 * size)
    for embedding in schedule:
        table.entry(embedding, 1)
        assert table.bytes == size * len(table) <= 3 * size
    assert len(table) == 3
    table.entry(schedule[5], 1)
    assert table.hits == 1
    table.entry(schedule[0], 1)
    assert table.hits == 1
    table.entry(schedule[1], 1, schedule=lambda: schedule)  # does not fit as a whole
    assert len(table) == 3
    assert table.bytes == 3 * size
    table.drop()
    assert (len(table), table.bytes) == (0, 0)


def test_entries_of_another_dtype_or_batch_are_others():
    blocks = [new_block()]
    table = ModulationTable(blocks)
    zeros = torch.zeros(2, DIM)
    table.entry(zeros, 2)
    table.entry(zeros, 1)  # its second row is for timestep 0
    table.entry(torch.zeros(1, DIM), 1)
    table.entry(-zeros, 2)  # other bits, the same number
    assert (len(table), table.hits) == (4, 0)
    assert table.entry(zeros, 2).text.shape == (1, 2, 6 * DIM)
    assert table.entry(zeros, 1).text.shape == (1, 1, 6 * DIM)
    blocks[0].bfloat16()
    table.entry(zeros.bfloat16(), 2)
    assert (len(table), table.hits) == (5, 2)


def test_the_check_compares_whole_streams_in_parts(monkeypatch):
    """What it finds does not depend on how many tokens it takes at a time."""
    before, ours, host = ((random(2, 5, DIM, seed=seed), random(2, 9, DIM)) for seed in (1, 2, 3))
    step, found = Step(Tokens(2, 5, 9, 9), None, None), []
    for count in (512, 4, 1):
        monkeypatch.setattr(block_host, "COMPARED_AT_ONCE", count)
        check = block_host.FirstBlockCheck(rounds=False)
        check._most = 10.0
        assert check.passes(before, ours, host, step)
        found.append(check.worst)
    exact = (ours[0] - host[0]).norm() / host[0].norm()
    assert found == pytest.approx(3 * [exact.item()], rel=1e-5)
