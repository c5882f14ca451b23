"""Encodes what the last instruction has encoded only once: images, and all that stands before the
instruction.

Templates of Qwen-Image put system text and images first, and the language model is causal: keys
and values of those rows do not depend on what follows. An encoding with images therefore runs in
two parts, up to the last image and behind it, whether or not the first part is kept; so results do
not depend on what ran before. Both parts are ComfyUI's own forward with its own layers; only the
layers' mask and cache are given to them here. Text without images runs as ComfyUI runs it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import comfy.ops
import comfy.quant_ops
import torch
from comfy import model_management as management
from torch.nn.functional import pad
from torch.utils import _pytree as tree

from ...caches import cached, remembered
from ...errors import SettingError
from ...machine.memory import available_memory
from ...optimizations.inventory import (
    Blueprint,
    blueprint,
    difference,
    functions_behind,
    is_changed,
    replaced,
)
from ...optimizations.patches import put
from ...optimizations.reference import rotate
from ...spec.formats import GIB, format_gib, multiplies_bf16
from ...verdict import Verdict, read_or, try_once
from .contract import unsupported_host

ROOM = 4 * GIB
RESERVE = 2 * GIB  # of system RAM, which stays free
AUTO, EXACT, BF16X2, BF16, INT8 = "auto", "exact", "bf16x2", "bf16", "int8"
# {choice: what it says}
ARITHMETIC = {
    AUTO: "bf16x2 on a GPU that multiplies bf16 (compute capability 8.0 or newer), else exact",
    EXACT: "products in fp32, as ComfyUI's",
    BF16X2: "products of two bf16 numbers for each input, added up in fp32; all else in fp32",
    BF16: "products in bf16, all else in fp32",
    INT8: "products of int8 layers in int8, others in bf16, all else in fp32",
}
OWN = "ComfyUI's encoding runs"
UNKNOWN = Verdict("this text encoder has an unknown form")
HOOKED = Verdict("hooks change the text encoder's weights")
# What `Llama2_.forward` is given by name in an encoding.
GIVEN = {
    *("num_tokens", "intermediate_output", "final_layer_norm_intermediate", "dtype"),
    *("position_ids", "embeds_info", "visual_pos_masks", "deepstack_embeds"),
}
HOMES = ("comfy.", "torch.", __name__.removesuffix("hosts.comfyui.encode"))


class EncodeSettings(NamedTuple):
    """How a CLIP encodes.

    Attributes:
        room: Bytes of system RAM for what is kept; 0 keeps nothing and runs ComfyUI's one part.
        arithmetic: A key of `ARITHMETIC`.
    """

    room: int = ROOM
    arithmetic: str = AUTO


REUSE, STOCK = EncodeSettings(), EncodeSettings(0, EXACT)


class Kept:
    """Holds results in system RAM, by their keys: those of all CLIPs, the oldest out first."""

    def __init__(self) -> None:
        self._found: OrderedDict[tuple[Hashable, ...], tuple[Any, int]] = OrderedDict()
        self._lock = threading.RLock()  # a model may be collected at any time
        self.bytes = 0

    def get(self, key: tuple[Hashable, ...]) -> Any:
        """Gives what was put under a key; None for nothing."""
        with self._lock:
            if key not in self._found:
                return None
            self._found.move_to_end(key)
            return self._found[key][0]

    def put(self, key: tuple[Hashable, ...], value: Any, room: int) -> None:
        """Keeps a tree of tensors in system RAM, where it and others fit in `room` bytes."""
        size = sum(_bytes(it) for it in tree.tree_leaves(value) if torch.is_tensor(it))
        with self._lock:
            self._drop(key)
            if size > room:
                return
            while self._found and (self.bytes + size > room or available_memory() < RESERVE):
                self._drop(next(iter(self._found)))
            if available_memory() >= RESERVE:
                self._found[key] = value, size
                self.bytes += size

    def drop(self, owner: object) -> None:
        """Drops what is one model's."""
        with self._lock:
            for key in [key for key in self._found if key[0] is owner]:
                self._drop(key)

    def clear(self) -> None:
        with self._lock:
            self._found.clear()
            self.bytes = 0

    def _drop(self, key: tuple[Hashable, ...]) -> None:
        _, size = self._found.pop(key, (None, 0))
        self.bytes -= size


KEPT = remembered(Kept())


_owners: weakref.WeakKeyDictionary[torch.nn.Module, object] = remembered(
    weakref.WeakKeyDictionary()
)


def owner_of(model: torch.nn.Module) -> object:
    """Returns what begins the keys of a model's results, which go with the model."""
    if model not in _owners:
        _owners[model] = owner = object()
        weakref.finalize(model, KEPT.drop, owner)
    return _owners[model]


class _Known(NamedTuple):
    # Of a text encoder at its first encoding: its modules, and what they were.
    modules: tuple[torch.nn.Module, ...]
    made: Blueprint


_known: weakref.WeakKeyDictionary[torch.nn.Module, _Known] = remembered(weakref.WeakKeyDictionary())


class _Unload(NamedTuple):
    """ComfyUI's function behind /free, of which no hook tells; drops what is kept, too."""

    own: Callable[[], None]

    def __call__(self) -> None:
        KEPT.clear()
        self.own()


def listen() -> None:
    """Has ComfyUI's /free drop what is kept."""
    own = management.unload_all_models
    if not isinstance(own, _Unload):
        put(management, unload_all_models=_Unload(own))


def encoder_for(clip: Any, settings: EncodeSettings, note: Callable[[str], None]) -> Any:
    """Returns what encodes in place of a loaded CLIP's `cond_stage_model`, which stays as it is:
    that itself where it is not as ComfyUI made it.

    Args:
        note: Takes a line for the report.
    """
    encoder = clip.cond_stage_model
    why = read_or(UNKNOWN, objection, clip)
    if why is None:
        return _Encoding(clip, settings, note).encoder
    note(f"{OWN}: {why}")
    if why.fact not in _told:
        _told.add(why.fact)
        why.log(OWN)
    return encoder


_told: set[str] = remembered(set())


def objection(clip: Any) -> Verdict | None:
    """Says why a loaded CLIP's text encoder is left to ComfyUI; None where it is as ComfyUI made
    it, or as a LoRA has patched it.
    """
    if why := unsupported_host(("encoding",)):
        return why
    patcher, encoder = clip.patcher, clip.cond_stage_model
    if patcher.forced_hooks is not None or patcher.current_hooks or patcher.hook_patches:
        return HOOKED
    if others := patcher.object_patches.keys() - {"manual_cast_dtype"}:
        return Verdict(f"another node has replaced {min(others)}")
    text = getattr(encoder, encoder.clip)
    model = text.transformer
    modules = tuple(model.modules())
    around = (encoder, text)
    for module in (*around, *(it for it in modules if it._modules)):
        if not type(module).__module__.startswith(HOMES):
            return Verdict(f"another extension has inserted a {type(module).__name__}")
    kinds = dict.fromkeys(map(type, (*around, *modules)))
    homes = [it.__module__ for it in kinds if it.__module__.startswith("comfy.")]
    if why := replaced(functions_behind((*around, *modules), homes)):
        return why
    known = _known.get(encoder)
    made = known.made if known else blueprint(model)
    name = next((type(it).__name__ for it in around if is_changed(it)), None)
    if name := name or difference(model, made):
        return Verdict(f"another extension has changed {name}")
    if known is None or known.modules != modules:  # by identity
        KEPT.drop(_owners.pop(encoder, None))
        _known[encoder] = _Known(modules, made)
    what = "encoding in two steps", type(model.model), type(model.model.config)
    return try_once(what, lambda: _trial(model.model))


def _trial(language: Any) -> str:
    """Says whether a small model of the same class gives in two parts what it gives in one."""
    small = {"vocab_size": 8, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = dataclasses.replace(language.config, **small, **heads)
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        # ComfyUI's own layers have no weights until some are loaded, with dynamic VRAM.
        model = type(language)(config, device="cpu", dtype=torch.float32, ops=torch.nn)
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        embeds = torch.randn(1, 7, 64, generator=generator)
        mask, places = torch.ones(1, 7, dtype=torch.long), torch.arange(7).expand(3, 7)
        given = {"position_ids": places, "intermediate_output": -1}
        given["final_layer_norm_intermediate"] = False
        call = _Call(model, embeds, mask, given, 1)
        whole = call.run(0, None, list(model.layers))
        first = _first_part(call, 4)
        found = torch.cat([first["rows"], _other_part(call, 4, first["pairs"])], dim=1)
        error = (found - whole).norm() / whole.norm()
    return "" if error < 1e-4 else "this ComfyUI's language model has an unknown form"


def shadow(module: torch.nn.Module, **own: Any) -> Any:
    """Makes another object of a module's class around the same parameters and parts.

    Args:
        own: Attributes in which it differs: parts, or methods without `self`.
    """
    made = object.__new__(type(module))
    made.__dict__.update(module.__dict__, **own)
    return made


def _ram(tensor: torch.Tensor) -> torch.Tensor:
    """Copies to system RAM; from a card, where ComfyUI pins memory, it is there after `_copied`."""
    tensor = tensor.detach()
    if not tensor.is_cuda or getattr(management, "MAX_PINNED_MEMORY", 0) <= 0:
        return tensor.to("cpu", copy=True).contiguous()
    try:
        found = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    except RuntimeError:  # the system pins no more
        return tensor.to("cpu", copy=True).contiguous()
    return found.copy_(tensor, non_blocking=True)


def _copied(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _bytes(tensor: torch.Tensor) -> int:
    # torch takes pinned memory in powers of two.
    return 1 << (tensor.nbytes - 1).bit_length() if tensor.is_pinned() else tensor.nbytes


class _Call(NamedTuple):
    """A call of `Llama2_.forward` for one prompt; `used` is the place of its result that counts."""

    language: Any
    embeds: torch.Tensor
    mask: torch.Tensor
    given: Mapping[str, Any]
    used: int

    def run(self, start: int, end: int | None, layers: list[Any]) -> torch.Tensor:
        """ComfyUI's own forward over some rows, with other layers; rows in system RAM."""
        given = dict(self.given)
        if start:  # all images are before
            given.pop("deepstack_embeds", None)
            given.pop("visual_pos_masks", None)
        for name in ("position_ids", "visual_pos_masks"):
            if given.get(name) is not None:
                given[name] = given[name][..., start:end]
        given |= {
            "attention_mask": self.mask[:, start:end],
            "embeds": self.embeds[:, start:end].clone(),  # a layer writes into its input
        }
        language = shadow(self.language, layers=layers)
        return _ram(type(language).forward(language, None, **given)[self.used])


def _first_part(call: _Call, length: int) -> dict[str, Any]:
    """Runs the first `length` rows; gives these, and each layer's keys and values."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def around(layer: Any) -> Any:
        def forward(**given: Any) -> tuple[torch.Tensor, None]:
            out, (key, value, _) = layer(**(given | {"past_key_value": []}))
            pairs.append((_ram(key), _ram(value)))
            return out, None

        return shadow(layer, forward=forward)

    rows = call.run(0, length, list(map(around, call.language.layers)))
    return {"rows": rows, "pairs": pairs}


def _other_part(call: _Call, length: int, pairs: Sequence[Any]) -> torch.Tensor:
    """Runs the rows behind the first `length`, whose keys and values it gives each layer."""

    def around(layer: Any, pair: tuple[torch.Tensor, torch.Tensor]) -> Any:
        def forward(attention_mask: torch.Tensor, **given: Any) -> tuple[torch.Tensor, None]:
            key, value = (it.to(attention_mask.device, non_blocking=True) for it in pair)
            # ComfyUI's forward makes a square one, of no use to several rows behind others.
            mask = pad(attention_mask, (length, 0))
            given["past_key_value"] = key, value, length
            return layer(attention_mask=mask, **given)[0], None

        return shadow(layer, forward=forward)

    return call.run(length, None, list(map(around, call.language.layers, pairs)))


class _Encoding:
    """One encoding of one CLIP, in objects around its modules that no other thread sees."""

    def __init__(self, clip: Any, settings: EncodeSettings, note: Callable[[str], None]) -> None:
        listen()
        encoder = clip.cond_stage_model
        text = getattr(encoder, encoder.clip)
        arithmetic = arithmetic_on(clip.patcher.load_device, settings.arithmetic)
        model = _multiplying(text.transformer, arithmetic)
        self._room, self._note, self._device = settings.room, note, clip.patcher.load_device
        self._images: dict[int, bytes] = {}
        self._start = self._whole = b""
        self._length = 0  # of the first part, in rows
        self._sure = False
        self._language = model.model
        language = shadow(model.model, forward=self._forward)
        model = shadow(model, model=language, preprocess_embed=self._preprocess)
        self._model = model
        self._text = shadow(text, transformer=model, process_tokens=self._process)
        self.encoder = shadow(encoder, **{encoder.clip: self._text})
        self._key = (
            owner_of(encoder),
            clip.patcher.patches_uuid,
            str(self._device),
            str(clip.patcher.object_patches.get("manual_cast_dtype")),
            arithmetic,
            torch.get_float32_matmul_precision(),
        )

    def _kept(self, what: Hashable, run: Callable[[], Any]) -> Any:
        key = (*self._key, what)
        found = KEPT.get(key)
        if found is None:
            found = run()
            _copied(self._device)
            KEPT.put(key, found, self._room)
        return found

    def _process(self, tokens: list[list[Any]], device: Any) -> Any:
        """In place of `SDClipModel.process_tokens`: learns what is encoded."""
        row = tokens[0] if len(tokens) == 1 and self._room else []
        seen, images = hashlib.sha256(), 0
        for token in row:
            if isinstance(token, dict):
                self._images[id(token)] = image = digest(token)
                seen.update(b"image" + image)
                if token.get("type") == "image":
                    images += 1
                    self._start = seen.digest()
            else:
                seen.update(digest({"": token}))
        self._whole = seen.digest()
        found = type(self._text).process_tokens(self._text, tokens, device)
        embeds, _, counts, places = found
        ends = [it["index"] + it["size"] for it in places if it.get("type") == "image"]
        # Else ComfyUI has left something out, or pads.
        self._sure = bool(row) and counts == [embeds.shape[1]] and len(ends) == images
        self._length = max(ends, default=0) % embeds.shape[1]
        return found

    def _preprocess(self, embed: dict[str, Any], device: Any) -> Any:
        """In place of the model's `preprocess_embed`: an image's rows, in system RAM."""

        def run() -> Any:
            found = type(self._model).preprocess_embed(self._model, embed, device)
            return tree.tree_map_only(torch.Tensor, _ram, found)

        image = self._images.get(id(embed))
        if image is not None:
            return self._kept(image, run)
        return type(self._model).preprocess_embed(self._model, embed, device)

    def _forward(
        self,
        tokens: Any,
        attention_mask: torch.Tensor | None = None,
        embeds: torch.Tensor | None = None,
        **given: Any,
    ) -> Any:
        """In place of `Llama2_.forward`."""
        language, layer = self._language, given.get("intermediate_output")
        used = 0 if self._text.layer == "last" else 1

        def whole() -> Any:
            forward = type(language).forward
            return forward(language, tokens, attention_mask=attention_mask, embeds=embeds, **given)

        plain = layer is None or isinstance(layer, int)
        if not (self._sure and plain and given.keys() <= GIVEN and attention_mask is not None):
            return whole()
        length, found = self._length, []
        call = _Call(language, embeds, attention_mask, given, used)
        options = length, used, layer, given.get("final_layer_norm_intermediate"), embeds.dtype
        rest = "rest", self._whole, options
        if length:
            key = "start", self._start, options
            known = KEPT.get((*self._key, key)) is not None
            first = self._kept(key, lambda: _first_part(call, length))
            found.append(first["rows"])
            found.append(self._kept(rest, lambda: _other_part(call, length, first["pairs"])))
            self._note(
                f"the first {length} of {embeds.shape[1]} tokens "
                f"{'were kept' if known else 'were encoded'}; {format_gib(KEPT.bytes)} are kept"
            )
        else:
            found.append(self._kept(rest, lambda: _ram(whole()[used])))
        # ComfyUI takes the result to system RAM anyway; what is kept stays as it is.
        out: list[torch.Tensor | None] = [None, None]
        out[used] = torch.cat(found, dim=1)
        return tuple(out)


def digest(fields: Mapping[str, Any]) -> bytes:
    """Hashes tensors by their values and other fields by their text."""
    found = hashlib.sha256()
    for name in sorted(fields):
        value = fields[name]
        if torch.is_tensor(value):
            found.update(f"{name}: {value.dtype} {tuple(value.shape)}".encode())
            flat = value.detach().to("cpu").contiguous().reshape(-1)
            found.update(flat.view(torch.uint8).numpy().data)
        else:
            found.update(f"{name}: {value!r}".encode())
    return found.digest()


def _multiplying(module: torch.nn.Module, arithmetic: str, shared: _Split | None = None) -> Any:
    """A model whose linear layers multiply in another arithmetic, around the same layers."""
    if arithmetic == EXACT:
        return module
    if hasattr(module, "in_features"):
        return _SplitProduct(module, shared) if shared else _Product(module, arithmetic)
    shared = shared or (_Split() if arithmetic == BF16X2 else None)
    parts = {
        name: _multiplying(it, arithmetic, shared)
        for name, it in module._modules.items()
        if it is not None
    }
    if isinstance(module, torch.nn.ModuleList):
        return list(parts.values())
    if isinstance(module, torch.nn.Sequential):
        return lambda x: functools.reduce(lambda y, part: part(y), parts.values(), x)
    changed = {name: it for name, it in parts.items() if it is not module._modules[name]}
    return shadow(module, **changed) if changed else module


class _Around:
    """Stands for a linear layer, in all but how it multiplies."""

    _layer: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class _Product(_Around):
    """A linear layer whose product is in bf16 or int8, between fp32 and fp32."""

    def __init__(self, layer: torch.nn.Module, arithmetic: str) -> None:
        self._layer = layer
        if arithmetic == INT8 and is_int8(layer):
            # The same layer, state and all, of a class that may multiply what is stored.
            self._layer = object.__new__(_unlocked(type(layer)))
            self._layer.__dict__ = layer.__dict__

    def __call__(self, rows: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        return self._layer(rows.to(torch.bfloat16), *more, **named).to(rows.dtype)


class _Split:
    """The last input of a model's layers in two parts: those side by side share it."""

    rows: torch.Tensor | None = None
    turn = 0  # how many columns are rotated together
    parts: torch.Tensor


class _SplitProduct(_Around):
    """A linear layer that multiplies bf16 numbers and loses 2**-17 of an input.

    An fp32 input is nearly the sum of two bf16 numbers, and weights in bf16, fp8 or int8 are bf16
    numbers, the latter two with a scale behind the product. Tensor cores multiply both exactly and
    add up in fp32, in one product of twice the rows (G. Henry, P. Tang, A. Heinecke: Leveraging the
    bfloat16 Artificial Intelligence Datatype for Higher-Precision Computations, ARITH 2019).
    """

    def __init__(self, layer: torch.nn.Module, shared: _Split) -> None:
        self._layer, self._shared = layer, shared

    def __call__(self, rows: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        layer, shared = self._layer, self._shared
        if more or named or rows.dtype != torch.float32 or not is_split(layer):
            return layer(rows, *more, **named)
        comfy.ops.run_every_op()
        given = {"dtype": layer.weight.dtype, "bias_dtype": torch.float32, "device": rows.device}
        with comfy.ops.CastBiasWeightContext(layer, **given, offloadable=True) as (weight, bias):
            scale, turn = None, 0
            if isinstance(weight, comfy.quant_ops.QuantizedTensor):
                params, weight = weight._params, weight._qdata
                scale = params.scale.to(rows.device).flatten()
                turn = params.convrot_groupsize if getattr(params, "convrot", False) else 0
            if rows is not shared.rows or turn != shared.turn:
                x = rows.flatten(0, -2)
                shared.parts = split(rotate(x, turn) if turn else x)
                shared.rows, shared.turn = rows, turn
            out = split_product(shared.parts, weight.to(torch.bfloat16))
            if scale is not None:
                out *= scale
            if bias is not None:
                out += bias
        return out.unflatten(0, rows.shape[:-1])


def split(rows: torch.Tensor) -> torch.Tensor:
    """Writes fp32 numbers as sums of two bf16 numbers, with a relative error of at most 2**-17.

    Args:
        rows: (M, K), fp32.

    Returns:
        (2 M, K), bf16: the larger ones, then what is left.
    """
    parts = rows.new_empty((2 * len(rows), rows.shape[1]), dtype=torch.bfloat16)
    high = parts[: len(rows)]
    torch.sub(rows, high.copy_(rows), out=parts[len(rows) :])
    return parts


def split_product(parts: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiplies rows in two parts by a bf16 matrix, with sums in fp32.

    Args:
        parts: (2 M, K), bf16, as `split` makes them.
        weight: (N, K), bf16.

    Returns:
        (M, N), fp32.
    """
    if parts.is_cuda:
        out = torch.mm(parts, weight.t(), out_dtype=torch.float32)
    else:
        out = parts.float() @ weight.t().float()
    rows = len(parts) // 2
    return out[:rows].add_(out[rows:])


# Formats whose numbers are bf16 numbers too, and have one scale a tensor or a row.
SPLIT = {"float8_e4m3fn", "float8_e5m2", "int8_tensorwise"}


def is_split(layer: torch.nn.Module) -> bool:
    """Tells whether a linear layer's weights are bf16 numbers as they are stored."""
    state, weight = vars(layer), layer.weight
    if getattr(layer, "weight_function", True) or layer.bias_function:  # a layer of ComfyUI's has
        return False
    if state.get("weight_lowvram_function") or state.get("bias_lowvram_function"):
        return False
    if isinstance(weight, comfy.quant_ops.QuantizedTensor):
        known = layer.quant_format in SPLIT and not getattr(weight._params, "transposed", False)
        return known and getattr(layer, "pre_quant_scale", None) is None
    return weight.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def arithmetic_on(device: torch.device, arithmetic: str) -> str:
    """Settles `AUTO` for a device."""
    if arithmetic != AUTO:
        return arithmetic
    if (
        device.type != "cuda"
        or torch.version.hip
        or not multiplies_bf16(torch.cuda.get_device_capability(device))
    ):
        return EXACT
    return EXACT if try_once((BF16X2, device), lambda: _split_trial(device)) else BF16X2


def _split_trial(device: torch.device) -> str:
    with torch.inference_mode():
        rows = torch.linspace(-1, 1, 16 * 64, device=device).view(16, 64)
        exact = rows.double() @ rows.bfloat16().double().t()
        error = (split_product(split(rows), rows.bfloat16()) - exact).norm() / exact.norm()
    return "" if error < 1e-4 else f"products in two parts differ by {error:.1g}"


@cached
def _unlocked(kind: type) -> type:
    return type(kind.__name__, (kind,), {"_full_precision_mm": property(lambda self: False)})


def is_int8(layer: torch.nn.Module) -> bool:
    """Tells whether a linear layer is stored in 8-bit integers that ComfyUI multiplies."""
    return str(getattr(layer, "quant_format", "")).startswith("int8")


def check_arithmetic(encoder: torch.nn.Module, arithmetic: str) -> None:
    """Checks that a text encoder can multiply so.

    Raises:
        SettingError: int8, and the file holds no int8.
    """
    if arithmetic == INT8 and not any(map(is_int8, encoder.modules())):
        raise SettingError(
            "arithmetic is int8, but the text encoder has no int8 layers: load an int8 file, or "
            "choose exact or bf16."
        )
