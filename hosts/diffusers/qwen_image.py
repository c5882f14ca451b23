"""Runs Qwen-Image 1.x in diffusers: its parts, and one call of it for an optimized run.

diffusers' own loop over the blocks stays, and a backend of attention that was chosen there is used.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from diffusers.models import attention_dispatch
from diffusers.models.transformers.transformer_qwenimage import (
    QwenDoubleStreamAttnProcessor2_0,
    QwenImageTransformerBlock,
)

from ...families.qwen_image import QWEN_IMAGE, TEXT_TO_IMAGE
from ...families.registry import blocks_of
from ...optimizations.attention import ChosenAttention, aligned_mask
from ...optimizations.blocks.block import Step
from ...optimizations.blocks.block_form import token_layers
from ...optimizations.blocks.host import BlockInputs, DoubleStream, Streams
from ...optimizations.modulation import Entry
from ...optimizations.reference import Rotary, Tokens
from ...spec.vae import VaeShape
from ...verdict import Verdict
from .layers import DiffusersLayers, TransformerModulation
from .parts import PipelineParts, load_tokenizer

# What a block is called with besides its streams, from diffusers 0.36 to 0.42.
SHARED = (
    "temb",
    "image_rotary_emb",
    "encoder_hidden_states_mask",
    "joint_attention_kwargs",
    "modulate_index",
)
OTHER_ARGUMENTS = Verdict("diffusers passes its blocks unknown arguments")
# diffusers' own attention, whatever is chosen there.
HOST_ATTENTION = "diffusers"
# diffusers 0.37 and 0.38 hand the joint mask on among the arguments of attention.
JOINT_MASK = "attention_mask"


class TransformerAttention(ChosenAttention):
    """Attends by the backend that is chosen for the shapes of the call; name may be "diffusers"."""

    host = "diffusers'"

    def start_pass(self, processor: object) -> None:
        """Finds out whether diffusers' own computes this pass: it was asked for, or the user chose
        a backend for this processor, which is the first block's, or for all.
        """
        if self.fallback and self.fallback.final:
            return
        theirs = _users_backend(processor)
        self.fallback = None
        if self.name == HOST_ATTENTION:
            self.fallback = Verdict(f"{theirs or 'native'}, as requested")
        elif self.name == "auto" and theirs:
            self.fallback = Verdict(f"{theirs}, chosen in diffusers")


def _backend_of(processor: object) -> Any:
    return getattr(processor, "_attention_backend", None)


def _users_backend(processor: object) -> str:
    """Names the diffusers backend that was chosen for a processor, or for all; else empty."""
    backend = _backend_of(processor)
    if backend is None:
        backend, _ = attention_dispatch._AttentionBackendRegistry.get_active_backend()
        if backend == attention_dispatch.AttentionBackendName.NATIVE:  # what it is without a choice
            return ""
    return str(getattr(backend, "value", backend))


class TransformerPass(DoubleStream):
    """Implements `optimizations.blocks.host.HostPass`."""

    block_class: type = QwenImageTransformerBlock
    processors: tuple[type, ...] = (QwenDoubleStreamAttnProcessor2_0,)
    state = None  # a transformer has one set of weights in a run
    steps = None
    peers = additions = ()  # diffusers runs a pass on one card
    in_turns = False

    def __init__(
        self,
        transformer: QwenImageTransformer2DModel,
        attention: TransformerAttention,
        layers: DiffusersLayers,
        modulation: TransformerModulation,
        given: dict[str, Any],
    ) -> None:
        self.owner = transformer
        self.blocks = blocks_of(transformer)
        self.latents = given["hidden_states"]
        self.device, self.dtype = self.latents.device, self.latents.dtype
        self.layers, self.modulation = layers, modulation
        self._given = given
        self._processor = _processor_of(self.blocks[0])
        self._attention = attention
        attention.start_pass(self._processor)
        self._controlled = given.get("controlnet_block_samples") is not None
        self._mask: torch.Tensor | None = None  # as diffusers passes it to attention

    @property
    def attention(self) -> TransformerAttention | None:
        return None if self._attention.fallback else self._attention

    def fallback(self) -> Verdict | None:
        if self.owner.training:
            return Verdict("the transformer is in training mode", remedy="call eval()")
        if torch.jit.is_tracing():
            return Verdict("torch.jit traces the model")
        if torch.is_autocast_enabled(self.device.type):
            return Verdict("autocast is on")
        if self.latents.is_cuda and torch.cuda.is_current_stream_capturing():
            return Verdict("a CUDA graph is being captured")
        classes = set(map(type, self.blocks))
        if classes != {self.block_class}:
            names = " and ".join(sorted(found.__name__ for found in classes))
            return Verdict(f"its blocks are {names}")
        if any(block._compiled_call_impl is not None for block in self.blocks):
            without = "without it, the fused blocks would run"
            return Verdict("torch.compile runs the blocks", remedy=without)
        return None

    def unsupported(self, block: torch.nn.Module) -> Verdict | None:
        if any(hasattr(layer.weight, "device_mesh") for layer in token_layers(block)):
            return Verdict("its weights are spread over several GPUs")
        processor = _processor_of(block)
        if type(processor) not in self.processors:
            return Verdict(f"its attention processor is {type(processor).__name__}")
        if getattr(processor, "_parallel_config", None) is not None:
            return Verdict("its attention runs on several GPUs")
        if _backend_of(processor) != _backend_of(self._processor):
            return Verdict("its attention backend differs from that of the first block")
        return None

    def inputs(
        self, block: torch.nn.Module, positional: tuple, arguments: dict[str, Any]
    ) -> BlockInputs | Verdict:
        if positional or not all(name in arguments for name in self.streams):
            return OTHER_ARGUMENTS
        shared = tuple(arguments.get(name) for name in SHARED)
        try:
            step = self.kept_step(shared, None, lambda: self._step_of(arguments))
        except _UnknownError as reason:
            return Verdict(str(reason))
        text, image, embedding = map(arguments.get, self.streams)
        return BlockInputs(text, image, embedding, step, self._controlled)

    def entry(self, embedding: torch.Tensor, batch: int) -> Entry:
        return self.modulation.entry(self.owner, self._given, embedding, batch)

    def host_attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        out = attention_dispatch.dispatch_attention_fn(
            q, k, v, attn_mask=self._mask, backend=_backend_of(self._processor)
        )
        return out.flatten(2, 3).to(q.dtype)

    def host_block(self, block: torch.nn.Module, arguments: dict[str, Any]) -> Streams:
        return type(block).forward(block, **arguments)

    def attention_mask(self, mask: torch.Tensor | None, image: torch.Tensor) -> Any:
        """Keeps diffusers' mask for its own attention; returns the scores to add in this one."""
        self._mask = mask
        if mask is None:
            return None
        scores = torch.zeros(mask.shape, dtype=image.dtype, device=image.device)
        return aligned_mask(scores.masked_fill_(~mask, float("-inf")))

    def _step_of(self, arguments: dict[str, Any]) -> Step:
        unknown = arguments.keys() - {*SHARED, *self.streams}
        if unknown:
            raise _UnknownError(f"its argument {', '.join(sorted(unknown))} is unknown")
        text, image, embedding = map(arguments.get, self.streams)
        index, batch = arguments.get("modulate_index"), len(image)
        if len(text) != batch or image.dtype != text.dtype:
            raise _UnknownError("text and image differ in batch or dtype")
        rows = batch if index is None else 2 * batch
        if embedding.dim() != 2 or len(embedding) != rows:
            raise _UnknownError(f"it has {len(embedding)} timestep embeddings instead of {rows}")
        zero_from = image.shape[1] if index is None else _zero_from(index, image)
        tokens = Tokens(batch, text.shape[1], image.shape[1], zero_from)
        rotary = _rotary_of(arguments.get("image_rotary_emb"), tokens)
        mask = self.attention_mask(_joint_mask(arguments, tokens), image)
        return Step(tokens, rotary, mask)


class _UnknownError(Exception):
    """Arguments of a block that the executor does not know, in one clause."""


def _processor_of(block: torch.nn.Module) -> object:
    return getattr(block.attn, "processor", None)


def _zero_from(index: torch.Tensor, image: torch.Tensor) -> int:
    """Finds the first image token of timestep 0 in diffusers' index: (1 or batch, tokens), 0 for
    the tokens of the image and 1 for those of reference images.
    """
    at_zero = index.cpu() != 0  # waits for the card once a pass, as the table's key does
    zero_from = int((~at_zero[0]).sum())
    expected = torch.arange(image.shape[1]) >= zero_from
    fits = at_zero.shape in ((1, image.shape[1]), image.shape[:2])
    if not fits or not (at_zero == expected).all():
        raise _UnknownError(
            "modulate_index does not have the image first and its references after it"
        )
    return zero_from


def _rotary_of(frequencies: Any, tokens: Tokens) -> Rotary:
    try:
        image, text = frequencies
        fits = image.is_complex() and text.is_complex()
        lengths: tuple[int, ...] = len(image), len(text)
    except (TypeError, ValueError, AttributeError):
        fits, lengths = False, ()
    if not fits or lengths != (tokens.image, tokens.text):
        raise _UnknownError("its rotary embedding is not complex, with one for each token")
    joint = torch.cat([text, image]).unsqueeze(0)
    return Rotary(joint.real.contiguous(), joint.imag.contiguous())


def _joint_mask(arguments: dict[str, Any], tokens: Tokens) -> torch.Tensor | None:
    more = dict(arguments.get("joint_attention_kwargs") or {})
    joint, text = more.pop(JOINT_MASK, None), arguments.get("encoder_hidden_states_mask")
    if more:
        raise _UnknownError(f"attention has the unknown argument {', '.join(sorted(more))}")
    if joint is None:
        if text is None or text.dtype != torch.bool:
            return None  # diffusers 0.36 passes numbers on, which its attention does not read
        joint = torch.cat([text, text.new_ones((len(text), tokens.image))], dim=1)
    elif text is not None or joint.dtype != torch.bool:
        raise _UnknownError("its attention has an unknown mask")
    if joint.numel() != tokens.batch * tokens.joint:
        raise _UnknownError("its attention has an unknown mask")
    return joint.reshape(tokens.batch, 1, 1, tokens.joint)


PIPELINE = "QwenImagePipeline"
PASSES = {QwenImageTransformer2DModel: TransformerPass}
VAE = AutoencoderKLQwenImage
MAX_PROMPT_TOKENS = 512  # the default of its pipeline
FRAMES = 3  # a kernel's reach over time; the class pads an image to it


def parts() -> PipelineParts:
    from diffusers import QwenImagePipeline
    from transformers import Qwen2_5_VLForConditionalGeneration

    return PipelineParts(
        pipeline=QwenImagePipeline,
        models={"transformer": QwenImageTransformer2DModel, "vae": AutoencoderKLQwenImage},
        text_encoder=Qwen2_5_VLForConditionalGeneration,
        words="tokenizer",
        load_words=load_tokenizer,
        arguments={"max_sequence_length": MAX_PROMPT_TOKENS},
        member=TEXT_TO_IMAGE,
    )


def vae_shape(config: Any) -> VaeShape | None:
    """Reads the sizes of a VAE's config; None of other layers than Qwen-Image's."""
    other = config.attn_scales or config.num_res_blocks != 2
    if other or tuple(config.dim_mult) != QWEN_IMAGE.vae.shape.widths:
        return None
    return VaeShape(
        dim=config.base_dim,
        latent_channels=config.z_dim,
        image_channels=config.input_channels,
        padded_frames=FRAMES,
    )


def denormalized(latents: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """Gives what the VAE decodes, by the pipeline's arithmetic."""
    return latents / (1.0 / std) + mean


def up_layers(block: Any) -> list[torch.nn.Module]:
    return [*block.resnets, *(block.upsamplers or ())]
