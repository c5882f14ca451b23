"""Qwen-Image-2.1's blocks: fused in diffusers' own model, and the executor beside a prefix."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from diffusers import QwenImage21Transformer2DModel
from diffusers.models.transformers.transformer_qwenimage21 import (
    QwenImage21KVCache,
    QwenImage21TransformerBlock,
)
from test_block import Gemm, attend, random, relative
from test_block import Layers as DoubleLayers
from test_passes import Graph, Host, OnCard, with_graphs

from qwen_l40s.hosts.diffusers.patch import optimize
from qwen_l40s.optimizations import reference
from qwen_l40s.optimizations.blocks import workspace
from qwen_l40s.optimizations.blocks.block import BlockExecutor, Step
from qwen_l40s.optimizations.blocks.block_form import (
    DENSE,
    LowRank,
    part_of,
    spec_of,
    unsupported_block,
)
from qwen_l40s.optimizations.blocks.host import BlockInputs, PrefixedStream
from qwen_l40s.optimizations.blocks.workspace import Prefix, Workspace
from qwen_l40s.optimizations.fused import TORCH
from qwen_l40s.optimizations.modulation import shared_entry
from qwen_l40s.optimizations.reference import Rotary, Tokens
from qwen_l40s.optimizations.run import Optimization
from qwen_l40s.spec.formats import FORMATS

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, HEAD_DIM, BLOCKS = 4, 32, 3
DIM = HEADS * HEAD_DIM
REFERENCE, TARGET, TEXT = (1, 4, 4), (1, 8, 8), 9


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.inference_mode():
        yield


def fill(module, seed=0):
    for i, weight in enumerate(module.parameters()):
        scale = weight.shape[1] ** -0.5 if weight.dim() == 2 else 0.2
        weight.copy_(random(*weight.shape, seed=1000 * seed + i) * scale + (weight.dim() == 1))
    return module.eval()


# --- in diffusers


def new_model():
    return fill(
        QwenImage21Transformer2DModel(
            in_channels=16,
            out_channels=16,
            num_layers=BLOCKS,
            attention_head_dim=HEAD_DIM,
            num_attention_heads=HEADS,
            context_in_dim=24,
            axes_dims_rope=(8, 12, 12),
        )
    )


def paint(model, batch=1, masked=False, cached=True, steps=3):
    """Predictions along a schedule, with a reference image in the middle of the text."""
    slots, target = 4, 64
    text = random(batch, TEXT + slots, 24, seed=1).to(model.dtype)
    x, picture = (random(batch, rows, 16, seed=2).to(model.dtype) for rows in (target, 16))
    images = torch.zeros(batch, TEXT + slots + target // 4, dtype=torch.bool)
    images[:, 3 : 3 + slots] = images[:, TEXT + slots :] = True
    mask = torch.ones(batch, TEXT + slots, dtype=torch.bool)
    mask[0, -2:] = not masked
    cache, found = QwenImage21KVCache(BLOCKS), []
    for step in range(steps):
        mode = "cached" if step else "extract"
        out = model(
            hidden_states=torch.cat([picture, x], 1),
            encoder_hidden_states=text,
            timestep=torch.full((batch,), 1 - step / 4),
            img_shapes=[[REFERENCE, TARGET]] * batch,
            img_mask=images,
            encoder_hidden_states_mask=mask if masked else None,
            kv_cache=cache if cached else None,
            kv_cache_mode=mode if cached else None,
            return_dict=False,
        )[0][:, -target:]
        found.append(out)
        x = x - 0.25 * out
    return torch.stack(found)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_the_blocks_are_diffusers_own_but_for_rounding(batch, masked):
    model = new_model()
    expected = paint(model, batch, masked)
    with optimize(model) as optimized:
        with optimized.run():
            found = paint(model, batch, masked)
        report = optimized.report()
    assert relative([found], [expected]) < 1e-6
    assert f"blocks: fused, {2 * BLOCKS} of {2 * BLOCKS} in 3 forward passes" in report
    assert torch.equal(paint(model, batch, masked), expected)


def test_bf16_is_as_near_to_fp32_as_diffusers_own():
    model = new_model()
    exact = paint(model)
    model.bfloat16()
    theirs = relative([paint(model)], [exact])
    with optimize(model) as optimized, optimized.run():
        ours = relative([paint(model)], [exact])
        assert "fused" in optimized.report()
    assert ours < 1.1 * theirs


def test_without_the_prefix_cache_diffusers_blocks_run():
    model = new_model()
    expected = paint(model, cached=False)
    with optimize(model) as optimized, optimized.run():
        assert torch.equal(paint(model, cached=False), expected)
        assert "diffusers runs without its prefix cache" in optimized.report()


# --- the executor

TOKENS, BEFORE = Tokens(2, 0, 11, 11), 5


def fuse(mlp):
    """Gate and up in one weight, as in ComfyUI's gated MLP."""
    mlp.gate_up = torch.nn.Linear(DIM, 2 * mlp.proj.out_features, bias=False)
    mlp.gate_up.weight.copy_(torch.cat([mlp.gate_layer.weight, mlp.proj.weight]))
    del mlp.gate_layer, mlp.proj


def new_block(fused, seed=0):
    block = fill(QwenImage21TransformerBlock(DIM, HEADS, HEAD_DIM), seed)
    if fused:
        fuse(block.img_mlp)
    return block


class Layers(DoubleLayers):
    def __init__(self, block, kind=DENSE, ranks=None, weight_only=()):
        layers = {part_of(block, name): name for name in spec_of(block).places}
        self.kinds = dict.fromkeys(layers, kind)
        formats = {"int8": reference.RowFormat("int8", 16), "fp8": reference.RowFormat("fp8")}
        self.formats, self.weights, self.lows = formats, {}, {}
        for layer, name in layers.items():
            if kind in formats:
                self.weights[layer] = reference.row_quantize(layer.weight, formats[kind])
            if rank := (ranks or {}).get(name):
                down = random(rank, layer.in_features, seed=7) * layer.in_features**-0.5
                up = random(layer.out_features, rank, seed=8)
                self.lows[layer] = LowRank(down, 0, up * rank**-0.5)
        self.gemms = {it: Gemm(it, it in weight_only) for it in FORMATS}

    def kind(self, layer):
        kind = self.kinds[layer]
        return None if kind == "opaque" else self.formats.get(kind, kind)

    def apply_weight(self, layer, x):
        if layer not in self.weights:
            return layer(x)
        (weight, scale), format = self.weights[layer], self.kind(layer)
        if self.gemms[format.storage].weight_only:
            x = reference.rotate(x, format.rotation) if format.rotation else x
            return F.linear(x, weight.to(x.dtype) * scale)
        q, x_scale = reference.row_quantize(x, format)
        return reference.scaled_gemm(q, weight, x_scale, scale, None, x.dtype)


class Case:
    """A pass beside a prefix, for the executor and in plain arithmetic."""

    def __init__(self, masked=False, blocks=1):
        batch, _, tokens, _ = TOKENS
        self.x = random(batch, tokens, DIM, seed=1)
        self.prefixes = [
            Prefix(*random(2, batch, BEFORE, HEADS, HEAD_DIM, seed=20 + i)) for i in range(blocks)
        ]
        angles = random(tokens, HEAD_DIM // 2, seed=3)
        self.turns = torch.polar(torch.ones_like(angles), angles)
        self.rows = random(4, batch, DIM, seed=4) * 0.5
        mask = None
        if masked:
            mask = torch.zeros(batch, 1, 1, BEFORE + tokens)
            mask[0, ..., :2] = -torch.inf
        rotary = Rotary(self.turns.real[None].contiguous(), self.turns.imag[None].contiguous())
        self.step = Step(TOKENS, rotary, mask)
        scale1, gate1, scale2, gate2 = self.rows
        self.entry = shared_entry((scale1, scale2), (gate1, gate2), blocks, batch)

    def run(self, block, layers):
        executor = BlockExecutor(layers, TORCH, attend)
        step = self.step._replace(prefix=self.prefixes[0])
        return executor.run(block, self.x[:, :0], self.x, step, self.entry.of(0))[1]

    def expected(self, block, layers):
        scale1, gate1, scale2, gate2 = (row.unsqueeze(1) for row in self.rows)
        attn, mlp, prefix = block.attn, block.img_mlp, self.prefixes[0]

        def apply(layer, x):
            return layers.apply(layer, x.flatten(0, 1)).unflatten(0, x.shape[:2])

        def turned(x, norm):
            x = F.rms_norm(x.unflatten(-1, (HEADS, HEAD_DIM)), (HEAD_DIM,), norm.weight, norm.eps)
            pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
            return torch.view_as_real(pairs * self.turns[:, None]).flatten(-2)

        h = F.layer_norm(self.x, (DIM,), eps=1e-6) * (1 + scale1)
        q, k = turned(apply(attn.to_q, h), attn.norm_q), turned(apply(attn.to_k, h), attn.norm_k)
        v = apply(attn.to_v, h).unflatten(-1, (HEADS, HEAD_DIM))
        k, v = torch.cat([prefix.keys, k], 1), torch.cat([prefix.values, v], 1)
        x = self.x + gate1 * apply(attn.to_out[0], attend(q, k, v, self.step.mask))
        h = F.layer_norm(x, (DIM,), eps=1e-6) * (1 + scale2)
        if hasattr(mlp, "gate_up"):
            gate, up = apply(mlp.gate_up, h).chunk(2, -1)
        else:
            gate, up = apply(mlp.gate_layer, h), apply(mlp.proj, h)
        return x + gate2 * apply(mlp.out, F.silu(gate) * up)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", [DENSE, "int8", "fp8", "opaque"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_block_beside_a_prefix(fused, kind, masked):
    block, case = new_block(fused), Case(masked)
    assert unsupported_block(block, torch.float32) is None
    layers = Layers(block, kind)
    tolerance = 1e-6 if kind in (DENSE, "opaque") else 2e-3  # a rounded step apart
    assert relative([case.run(block, layers)], [case.expected(block, layers)]) < tolerance


@pytest.mark.parametrize("kind", [DENSE, "int8"])
@pytest.mark.parametrize("fused", [True, False])
def test_loras_beside_its_layers(fused, kind):
    block, case = new_block(fused), Case()
    names = dict.fromkeys(spec_of(block).places)
    ranks = {name: 4 for name in names if not name.startswith(("attn.to_k", "img_mlp.gate_l"))}
    layers = Layers(block, kind, ranks)
    tolerance = 1e-6 if kind == DENSE else 2e-3
    assert relative([case.run(block, layers)], [case.expected(block, layers)]) < tolerance
    assert relative([case.run(block, Layers(block, kind))], [case.expected(block, layers)]) > 0.01


@pytest.fixture
def by_triton(monkeypatch):
    """Triton's GEMM, whose twin stands in for it; gives whether SwiGLU was in each that is made."""
    pytest.importorskip("triton")
    from qwen_l40s.optimizations.kernels import scaled_gemm

    made = []

    def prepare(a, b, scale_a, scale_b, bias, out, beside, gelu, swiglu):
        def run(b, scale_b, bias, up, a):
            low = beside and (beside[0], up)
            given = a, b, scale_a, scale_b, bias, out.dtype, low, gelu, swiglu
            out.copy_(reference.scaled_gemm(*given))

        made.append(swiglu)
        return SimpleNamespace(prepared=lambda: run)

    monkeypatch.setattr(scaled_gemm, "scaled_gemm", prepare)
    monkeypatch.setattr(Gemm, "backend", "triton")
    monkeypatch.setattr(Gemm, "row_quantizer", "triton")
    return made


@pytest.mark.parametrize("outer", ["int8", DENSE, "opaque"])
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("rank", [0, 4])
def test_the_product_of_gate_and_up_makes_their_swiglu(by_triton, monkeypatch, outer, merged, rank):
    """With the same result as apart, and half the room; of a weight that turned out plain too."""
    block, case, found, room = new_block(True), Case(), [], []
    layers = Layers(block, "int8", {"img_mlp.gate_up": rank, "img_mlp.out": rank})
    layers.kinds[block.img_mlp.out] = outer
    for layer, plain in ((block.img_mlp.out, outer == DENSE), (block.img_mlp.gate_up, merged)):
        if plain:
            del layers.weights[layer]
    for inside in (True, False):
        if not inside:
            monkeypatch.setattr(workspace, "swiglu_inside", lambda layer: False)
        space = Workspace(TORCH)
        executor = BlockExecutor(layers, TORCH, attend, space)
        step = case.step._replace(prefix=case.prefixes[0])
        found.append(executor.run(block, case.x[:, :0], case.x, step, case.entry.of(0))[1])
        room.append(space.bytes)
        assert any(by_triton) == (inside and not merged)
        by_triton.clear()
    assert torch.equal(*found)
    assert room[0] < room[1]
    apart = new_block(False)
    executor = BlockExecutor(Layers(apart, "int8"), TORCH, attend)
    executor.run(apart, case.x[:, :0], case.x, step, case.entry.of(0))
    assert not any(by_triton)


def test_weights_that_are_expanded():
    block, case = new_block(True), Case()
    layers = Layers(block, "fp8", weight_only=("fp8",))
    assert relative([case.run(block, layers)], [case.expected(block, layers)]) < 1e-6


def test_all_blocks_at_once_are_one_after_the_other():
    blocks, case = [new_block(True, seed) for seed in range(3)], Case(blocks=3)
    layers = Layers(blocks[0])
    for block in blocks[1:]:
        layers.kinds |= Layers(block).kinds
    executor, x = BlockExecutor(layers, TORCH, attend), case.x.flatten(0, 1).clone()
    executor.run_all(blocks, x, case.step, case.entry, prefixes=case.prefixes)
    expected = case.x
    for index, block in enumerate(blocks):
        executor = BlockExecutor(layers, TORCH, attend)
        step = case.step._replace(prefix=case.prefixes[index])
        given = expected[:, :0], expected, step, case.entry.of(index)
        _, expected = executor.run(block, *given)
    assert torch.equal(x.view_as(expected), expected)


# --- graphs of a pass


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(new_block(True, seed) for seed in range(BLOCKS))
        self.chain = SimpleNamespace(layers=Layers(self.blocks[0]))
        for block in self.blocks[1:]:
            self.chain.layers.kinds |= Layers(block).kinds

    def forward(self, case, x, exchange=None):
        x = x.as_subclass(OnCard)
        for index, block in enumerate(self.blocks):
            prefix = case.prefixes[index if exchange is None else exchange(index)]
            x = block(x, case.entry, step=case.step._replace(prefix=prefix))
        return x


class Pass(PrefixedStream, Host):
    names = streams = ("x", "mod")

    def __init__(self, model, case):
        super().__init__(model)
        self.prefixes = case.prefixes

    def inputs(self, block, positional, arguments):
        x, entry, step = (arguments[name] for name in ("x", "mod", "step"))
        return BlockInputs(x[:, :0], x, entry, step, False)

    def prefix_of(self, arguments):
        return arguments["step"].prefix

    def entry(self, embedding, batch):
        return embedding

    def host_block(self, block, arguments):
        executor = BlockExecutor(self.layers, TORCH, attend)
        x, step = arguments["x"], arguments["step"]
        return executor.run(block, x[:, :0], x, step, arguments["mod"].of(0))


def test_a_graph_reads_the_prefix_where_it_is_until_the_run_ends(monkeypatch):
    with_graphs(monkeypatch)
    model, optimization = Model(), Optimization(None)
    cases = [Case(blocks=BLOCKS), Case(blocks=BLOCKS)]
    for i, prefix in enumerate(cases[1].prefixes):  # of another prompt
        cases[1].prefixes[i] = Prefix(prefix.keys + 1, prefix.values)

    def passed(case, seed, exchange=None):
        x = random(*case.x.shape, seed=seed)
        call = partial(model, case, x, exchange)
        found = optimization.run_pass(Pass(model, case), call)
        for index, block in enumerate(model.blocks):
            step = case.step._replace(prefix=case.prefixes[index if not exchange else 0])
            executor = BlockExecutor(model.chain.layers, TORCH, attend)
            x = executor.run(block, x[:, :0], x, step, case.entry.of(index))[1]
        assert torch.equal(found, x)

    optimization.start_run()
    for seed in range(5):
        for case in cases:
            passed(case, seed)
    figures = optimization._last.graphs
    assert (figures.captured, figures.replayed) == (2, 7)  # the shape is compared once
    passed(cases[0], 9, exchange=lambda index: 0)  # the second block gets another prefix
    assert optimization._last.exchanged
    optimization.end_run()
    assert not any(graph.work for graph in Graph.made)
