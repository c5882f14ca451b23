"""Which moves of weights a token of held weights tells apart, and what stays pinned."""

import itertools

import comfy.model_management
import narrow_transformer as narrow
import pytest
import torch
from comfyui_boot import folder

from qwen_l40s.hosts.comfyui.load.transformer import load_model
from qwen_l40s.hosts.comfyui.sample.layers import ComfyLayers
from qwen_l40s.hosts.comfyui.sample.optimize import OptimizeSettings, optimize
from qwen_l40s.optimizations.block_form import HEAD_NORMS, blocks_of, token_layers

FOLDER = folder("held")
WEIGHTS = narrow.weights()
PATH = narrow.write(FOLDER / "bf16.safetensors", WEIGHTS)


def loaded(form="bf16"):
    model = load_model(PATH, form)[0]
    if form == "bf16":
        model.model.manual_cast_dtype = None  # on a processor ComfyUI computes it in fp32
    model = optimize(model, OptimizeSettings(attention="comfyui"))
    comfy.model_management.load_models_gpu([model])
    model.pre_run()
    return model


class Passes:
    """The passes of one run; a token that comes again has to find the same tensors."""

    def __init__(self, model):
        self.model, self.blocks = model.model, blocks_of(model.model.diffusion_model)
        self.like = torch.empty(0, dtype=self.model.get_dtype_inference())
        self.known = {}
        self.run = object()

    def __call__(self):
        layers = ComfyLayers(self.model, self.run)
        with layers.hold(self.blocks) as token:
            if token is None:
                return layers.moving.reason
            found = self.places(layers)
            assert self.known.setdefault(token, found) == found
            return token

    def places(self, layers):
        norms = (block.get_submodule(name) for block in self.blocks for name in HEAD_NORMS)
        found = [layers.norm_weight(norm, self.like).data_ptr() for norm in norms]
        for layer in itertools.chain.from_iterable(map(token_layers, self.blocks)):
            with layers.tensors(layer, self.like) as tensors:
                found += [part if part is None else part.data_ptr() for part in tensors]
        return found


@pytest.mark.parametrize("form", ["bf16", "fp8", "int8"])
def test_a_model_that_stays_is_held(form):
    passes = Passes(loaded(form))
    token = passes()
    assert isinstance(token, bytes), token
    assert passes() == token
    passes.run = object()
    assert passes() == token
