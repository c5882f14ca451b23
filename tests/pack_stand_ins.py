"""Other packs' ways into a MODEL and a sampler: each does, in short, what the named file does.

For tests/host, inside ComfyUI's Python. Effects are made large enough to be seen in a few steps.
"""

import contextlib
import itertools
import types
from unittest import mock

import comfy.samplers
import torch
from comfy.patcher_extension import CallbacksMP, WrappersMP
from comfy_api.torch_helpers import set_torch_compile_wrapper

SLOT = "optimized_attention_override"


def attend(q, k, v, heads, mask=None, skip_reshape=False, **others):
    """Attention, sharper than ComfyUI's."""
    if not skip_reshape:
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (q, k, v))
    scale = 2 * q.shape[-1] ** -0.5
    found = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)
    return found.transpose(1, 2).flatten(2)


def in_slot(function):
    def patch(model):
        clone = model.clone()
        clone.model_options["transformer_options"][SLOT] = function
        return clone

    return patch


# KJNodes, nodes/model_optimization_nodes.py: PathchSageAttentionKJ never calls ComfyUI's function.
kj_sage = in_slot(lambda func, *given, **named: attend(*given, **named))


def kj_compile(model):
    """TorchCompileModelQwenImage: each block under a key of its own."""
    clone = model.clone()
    blocks = clone.get_model_object("diffusion_model").transformer_blocks
    keys = [f"diffusion_model.transformer_blocks.{index}" for index in range(len(blocks))]
    set_torch_compile_wrapper(model=clone, keys=keys, backend="eager")
    return clone


def compiled_model(model):
    """CompileModel of TeaCache and of MagCache: an object patch in the transformer's place."""
    clone = model.clone()
    transformer = clone.get_model_object("diffusion_model")
    clone.add_object_patch("diffusion_model", torch.compile(transformer, backend="eager"))
    return clone


def kj_torch_settings(model):
    """ModelPatchTorchSettings: a flag between two callbacks."""
    clone, matmul = model.clone(), torch.backends.cuda.matmul

    def switch(value):
        return lambda patcher: setattr(matmul, "allow_fp16_accumulation", value)

    clone.add_callback(CallbacksMP.ON_PRE_RUN, switch(True))
    clone.add_callback(CallbacksMP.ON_CLEANUP, switch(False))
    return clone


def attention_by_block(func, *given, **named):
    """A reference attention, which asks which block it is in."""
    index = named["transformer_options"]["block_index"]
    return func(*given, **named) * (0.5 if index == 1 else 1.0)


reference_attention = in_slot(attention_by_block)


def older_forward(
    self,
    x,
    timesteps,
    context,
    attention_mask=None,
    guidance=None,
    ref_latents=None,
    transformer_options=None,
    control=None,
    **named,
):
    """MagCache, nodes.py: a copy of ComfyUI's loop before it had `timestep_zero_index`, which adds
    in each second call what the blocks added in the one before.
    """
    image, ids, shape = self.process_img(x)
    start = round(max(x.shape[-1] // 4, x.shape[-2] // 4))
    text_ids = torch.arange(start, start + context.shape[1]).reshape(1, -1, 1)
    ids = torch.cat((text_ids.repeat(len(x), 1, 3).to(ids), ids), dim=1)
    rotary = self.pe_embedder(ids).to(x.dtype).contiguous()
    image, text = self.img_in(image), self.txt_in(self.txt_norm(context))
    embedding = self.time_text_embed(timesteps, image)
    self.calls = getattr(self, "calls", 0) + 1
    if self.calls % 2 == 0:
        image = image + self.residual
    else:
        before = image.clone()
        for block in self.transformer_blocks:
            text, image = block(
                hidden_states=image,
                encoder_hidden_states=text,
                encoder_hidden_states_mask=attention_mask,
                temb=embedding,
                image_rotary_emb=rotary,
                transformer_options=transformer_options,
            )
        self.residual = image - before
    image = self.proj_out(self.norm_out(image, embedding))
    image = image.view(shape[0], shape[-2] // 2, shape[-1] // 2, shape[1], 2, 2)
    return image.permute(0, 3, 1, 4, 2, 5).reshape(shape)


def around_model_function(wrap):
    """A pack in the one place of `set_model_unet_function_wrapper`."""

    def patch(model):
        clone = model.clone()
        clone.set_model_unet_function_wrapper(wrap(clone))
        return clone

    return patch


@around_model_function
def mag_cache(model):
    transformer = model.get_model_object("diffusion_model")
    theirs = types.MethodType(older_forward, transformer)

    def wrapper(function, given):
        with mock.patch.multiple(transformer, _forward=theirs):
            return function(given["input"], given["timestep"], **given["c"])

    transformer.calls = 0
    return wrapper


@around_model_function
def spectrum(model):
    """Spectrum-Qwen, spectrum_qwen/forward_qwen.py: `forward` gives a step's output from what a
    hook before `norm_out` saw in earlier ones.
    """
    core, seen = model.get_model_object("diffusion_model"), []

    def forward(original):
        def run(x, timestep, *given, **named):
            if len(seen) == 2:
                hidden = 2 * seen.pop() - seen.pop()
                embedding = core.time_text_embed(timestep, hidden, None)
                found, (_, _, shape) = (
                    core.proj_out(core.norm_out(hidden, embedding)),
                    core.process_img(x),
                )
                found = found.view(shape[0], shape[-2] // 2, shape[-1] // 2, shape[1], 2, 2)
                return found.permute(0, 3, 1, 4, 2, 5).reshape(shape)
            keep = lambda module, inputs: seen.append(inputs[0].detach().clone())  # noqa: E731
            handle = core.norm_out.register_forward_pre_hook(keep)
            with contextlib.closing(mock.Mock(close=handle.remove)):
                return original(x, timestep, *given, **named)

        return run

    def wrapper(function, given):
        with mock.patch.multiple(core, forward=forward(core.forward)):
            return function(given["input"], given["timestep"], **given["c"])

    return wrapper


class Stretched(torch.nn.Module):
    """DyPE, src/models/qwen.py: other positions, that change with the step."""

    def __init__(self, own):
        super().__init__()
        self.own, self.scale = [own], 1.0

    def forward(self, ids):
        return self.own[0](ids * self.scale)


def dype(model):
    """src/patch_utils.py: an object patch, and the step's place from the model function."""
    clone = model.clone()
    embedder = Stretched(clone.get_model_object("diffusion_model.pe_embedder"))
    clone.add_object_patch("diffusion_model.pe_embedder", embedder)

    def wrapper(function, given):
        embedder.scale = 1 + float(given["timestep"].flatten()[0])
        return function(given["input"], given["timestep"], **given["c"])

    clone.set_model_unet_function_wrapper(wrapper)
    return clone


def cache_dit(model):
    """CacheDiT, nodes.py: when a run begins `forward` of the transformer is replaced for good; it
    gives each third call the output of the one before.
    """
    clone = model.clone()

    def outer_sample(executor, *given, **named):
        transformer = executor.class_obj.model_patcher.model.diffusion_model
        own, state = transformer.forward, {"calls": 0}

        def cached(*given, **named):
            state["calls"] += 1
            if state["calls"] % 3 or "last" not in state:
                state["last"] = own(*given, **named)
            return state["last"]

        transformer.forward = cached
        return executor(*given, **named)

    clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "cache_dit", outer_sample)
    return clone


@around_model_function
def tiled_diffusion(model):
    """TiledDiffusion, tiled_diffusion.py: the latent in tiles that overlap, blended."""

    def wrapper(function, given):
        x, found = given["input"], torch.zeros_like(given["input"])
        weight = torch.zeros_like(x[..., :1, :])
        for start in (0, x.shape[-1] // 2 - 2):
            tile = slice(start, start + x.shape[-1] // 2 + 2)
            found[..., tile] += function(x[..., tile], given["timestep"], **given["c"])
            weight[..., tile] += 1
        return found / weight

    return wrapper


@contextlib.contextmanager
def nag_fork(model, scale=3.0):
    """A NAG for Qwen-Image: while a run lasts, `forward` doubles the batch and each `attn.forward`
    guides its second half.
    """
    transformer = model.model.diffusion_model

    def attention(self, *given, **named):
        image, text = self.forward_origin(*given, **named)
        positive, negative = image.chunk(2)
        return torch.cat([positive, positive * scale - negative * (scale - 1)]), text

    def forward(self, x, timestep, context, *given, **named):
        text = torch.cat([context, torch.zeros_like(context)])
        return self.forward_origin(torch.cat([x, x]), timestep, text, *given, **named)[1:]

    modules = [(transformer, forward)]
    modules += [(block.attn, attention) for block in transformer.transformer_blocks]
    for module, theirs in modules:
        module.forward_origin = module.forward
        module.forward = types.MethodType(theirs, module)
    try:
        yield
    finally:
        for module, _ in modules:
            del module.forward, module.forward_origin


def detail_daemon(sampler):
    """Detail-Daemon, detail_daemon_node.py: a sampler that tells the model other sigmas."""

    def function(model, x, sigmas, **named):
        def lying(x, sigma, **more):
            return model(x, sigma * (1 - 0.1 * float(sigma.max())), **more)

        lying.inner_model = model.inner_model
        return sampler.sampler_function(lying, x, sigmas, **named, **sampler.extra_options)

    return comfy.samplers.KSAMPLER(function)


def res_2s(model, x, sigmas, extra_args=None, callback=None, disable=None, **options):
    """RES4LYF, beta/rk_sampler_beta.py: two stages a step, the second between two sigmas."""
    ones = x.new_ones([len(x)])
    for index, (sigma, following) in enumerate(itertools.pairwise(sigmas)):
        first = model(x, sigma * ones, **(extra_args or {}))
        between = sigma + (following - sigma) * 0.5
        middle = x + (x - first) / sigma * (between - sigma)
        second = model(middle, between * ones, **(extra_args or {}))
        if callback is not None:
            callback({"x": x, "i": index, "sigma": sigma, "sigma_hat": sigma, "denoised": second})
        x = x + (middle - second) / between * (following - sigma)
    return x


@contextlib.contextmanager
def lan_paint():
    """LanPaint, src/LanPaint/nodes.py: while a run lasts, CFGGuider predicts at two guidances, and
    a step asks the model again around what it found.
    """
    samplers, again = comfy.samplers, comfy.samplers.KSamplerX0Inpaint.__call__

    def predict_noise(self, x, timestep, model_options, seed=None):
        conds = [self.conds.get("positive"), self.conds.get("negative")]
        out = samplers.calc_cond_batch(self.inner_model, conds, x, timestep, model_options)
        guided = [
            samplers.cfg_function(self.inner_model, *out, scale, x, timestep, model_options, *conds)
            for scale in (self.cfg, 2 * self.cfg)
        ]
        return sum(guided) / 2

    def call(self, x, sigma, denoise_mask, **named):
        found = again(self, x, sigma, denoise_mask, **named)
        return again(self, x + 0.1 * (found - x), sigma, denoise_mask, **named)

    with (
        mock.patch.object(samplers.CFGGuider, "predict_noise", predict_noise),
        mock.patch.object(samplers.KSamplerX0Inpaint, "__call__", call),
    ):
        yield
