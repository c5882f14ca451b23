"""Checks whether this package knows the running ComfyUI, and a MODEL. Where a name or parameter of
`HOOKS` is gone, only the nodes that need it refuse to run. Where ComfyUI calls a function of this
package with a new parameter, ComfyUI's own code runs. Tests hold the list to every name and every
call, and each node to what it needs.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from ...caches import cached
from ...errors import SettingError
from ...families.comfyui import kind_of
from ...machine.packages import COMFYUI_FLOOR, TESTED, is_newer_than_tested, release
from ...verdict import Verdict, read_or

# What ComfyUI's loop gives a block of Qwen-Image, all by name.
BLOCK_ARGUMENTS = (
    *("hidden_states", "encoder_hidden_states", "encoder_hidden_states_mask", "temb"),
    *("image_rotary_emb", "timestep_zero_index", "transformer_options"),
)
# What a block gives attention by name, as far as the fused blocks give it too.
ATTENTION_ARGUMENTS = ("mask", "transformer_options", "skip_reshape", "preferred_attention")

Hooks = dict[str, dict[str, tuple[str, ...]]]
# The names that each capability needs of ComfyUI, with the parameters that are passed or read.
# "models" tells the kind of a MODEL; "layers" holds, quantizes and patches weights; "runs" are the
# wrappers of a run. Without "blocks" or "fused VAE" ComfyUI's own code runs.
_NEEDED = f"""
# images
comfy.cli_args: args
comfy.model_management: throw_exception_if_processing_interrupted
# estimate
comfy.model_management: get_torch_device
comfy_execution.graph_utils: ExecutionBlocker
# sizes
comfy.model_management: get_torch_device is_device_cpu module_size
# models
comfy.model_base: QwenImage
comfy.supported_models: QwenImage
comfy.ldm.qwen_image.model: QwenImageTransformer2DModel
# layers
comfy.model_patcher: ModelPatcher[model load_device offload_device]
comfy.ops: disable_weight_init.Linear
    manual_cast.Linear[in_features out_features bias device]
comfy.patcher_extension: WrappersMP.APPLY_MODEL CallbacksMP.ON_CLONE
comfy.quant_ops: QuantizedLayout QuantizedTensor[qdata layout_cls params]
    TensorWiseINT8Layout.Params[scale orig_dtype orig_shape convrot convrot_groupsize]
    register_layout_class[name cls]
comfy_kitchen.tensor.base: BaseLayoutParams
# runs
comfy.model_patcher: ModelPatcherDynamic.load[device_to]
    ModelPatcherDynamic.restore_loaded_backups
    ModelPatcherDynamic.unpatch_model[device_to unpatch_weights]
comfy.patcher_extension: WrappersMP.OUTER_SAMPLE WrappersMP.PREDICT_NOISE
    CallbacksMP.ON_DETACH CallbacksMP.ON_LOAD add_wrapper_with_key[wrapper_type key wrapper
    transformer_options is_model_options]
comfy.samplers: CFGGuider.predict_noise
# blocks
comfy.cli_args: args
comfy.ldm.modules.attention: attention_pytorch optimized_attention
    optimized_attention_masked[q k v heads mask skip_reshape]
comfy.ldm.qwen_image.model: QwenImageTransformer2DModel._forward
    QwenImageTransformerBlock.forward[{" ".join(BLOCK_ARGUMENTS)}]
comfy.memory_management: interpret_gathered_like[tensors gathered]
    tensors_to_geometries[tensors]
comfy.model_base: BaseModel.apply_model[x t c_concat c_crossattn control
    transformer_options]
comfy.model_management: cuda_device_context extra_reserved_memory
    get_free_memory[dev torch_free_too] mark_mmap_dirty minimum_inference_memory
comfy.ops: CastBiasWeightContext run_every_op disable_weight_init.Linear.forward[input]
    cast_bias_weight[s input offloadable compute_dtype want_requant]
# transformer
comfy.memory_management: aimdo_enabled
comfy.model_detection: detect_unet_config[state_dict key_prefix]
comfy.model_management: VRAMState current_loaded_models
    free_memory[memory_required device keep_loaded] get_free_memory[dev torch_free_too]
    get_torch_device is_device_cpu minimum_inference_memory module_size soft_empty_cache
    unet_dtype[model_params supported_dtypes weight_dtype]
    unet_manual_cast[weight_dtype inference_device supported_dtypes]
    unet_offload_device vram_state
comfy.model_patcher: CoreModelPatcher ModelPatcher._load_list[for_dynamic default_device]
    ModelPatcher.patch_weight_to_device[key device_to return_weight]
comfy.ops: CastBiasWeightContext mixed_precision_ops[quant_config compute_dtype]
    mixed_precision_ops().Linear.forward[input] run_every_op
comfy.quant_ops: QUANT_ALGOS
comfy.utils: ProgressBar calculate_parameters load_safetensors
    load_torch_file[ckpt safe_load return_metadata] weight_dtype
comfy_kitchen: quantize_w4a8_int8_weight
# text encoder
comfy.memory_management: aimdo_enabled
comfy.model_management: free_memory[memory_required device keep_loaded] get_torch_device
    loaded_models unload_model_and_clones[model all_devices]
comfy.model_patcher: ModelPatcher ModelPatcherDynamic.load[device_to]
    ModelPatcherDynamic.restore_loaded_backups
    ModelPatcherDynamic.unpatch_model[device_to unpatch_weights]
comfy.patcher_extension: CallbacksMP.ON_LOAD
comfy.sd: CLIP[target embedding_directory parameters state_dict model_options
    disable_dynamic] CLIP.load_sd CLIPType TEModel detect_te_model llama_detect
    load_clip[ckpt_paths embedding_directory clip_type model_options disable_dynamic]
    load_text_encoder_state_dicts[state_dicts embedding_directory clip_type model_options
    disable_dynamic]
comfy.sd1_clip: SD1ClipModel SD1Tokenizer SDClipModel SDTokenizer
comfy.text_encoders.llama: Qwen25_7BVLI Qwen25_7BVLI_Config
comfy.text_encoders.qwen_image: Qwen25_7BVLIModel QwenImageTEModel QwenImageTokenizer te
comfy.utils: ProgressBar calculate_parameters load_safetensors
    load_torch_file[ckpt safe_load return_metadata]
# encoding
comfy.model_management: unload_all_models
comfy.model_patcher: ModelPatcher[model load_device offload_device]
comfy.ops: CastBiasWeightContext run_every_op
comfy.quant_ops: QuantizedTensor[qdata layout_cls params]
comfy.sd: CLIP.encode_from_tokens[tokens return_pooled return_dict] CLIP.load_model
comfy.sd1_clip: SDClipModel.process_tokens[tokens device]
comfy.text_encoders.llama: Llama2_.forward[x attention_mask embeds num_tokens
    intermediate_output final_layer_norm_intermediate dtype position_ids embeds_info
    deepstack_embeds visual_pos_masks] Qwen25_7BVLI.preprocess_embed[embed device]
    TransformerBlock.forward[x attention_mask freqs_cis optimized_attention past_key_value]
# VAE
comfy.ldm.wan.vae: WanVAE[dim z_dim dim_mult num_res_blocks attn_scales
    temperal_downsample image_channels conv_out_channels]
comfy.sd: VAE[sd dtype] VAE.decode[samples_in] VAE.encode[pixel_samples]
# loading a VAE
comfy.memory_management: aimdo_enabled
comfy.model_management: vae_device
comfy.utils: load_safetensors load_torch_file[ckpt safe_load return_metadata]
# using a VAE
comfy.model_management: cuda_device_context extra_reserved_memory
    get_free_memory[dev torch_free_too] is_device_cpu
    load_models_gpu[models memory_required force_full_load] loaded_models raise_non_oom
    soft_empty_cache
comfy.utils: ProgressBar
# fused VAE
comfy.ops: CastBiasWeightContext run_every_op
# LoRA
comfy.lora: load_lora[lora to_load log_missing] model_lora_keys_unet[model key_map]
comfy.lora_convert: convert_lora
comfy.ops: cast_bias_weight[s input offloadable compute_dtype want_requant]
comfy.utils: get_attr[obj attr] load_torch_file[ckpt safe_load return_metadata]
comfy.weight_adapter: LoHaAdapter LoKrAdapter LoRAAdapter WeightAdapterBase
# saving
comfy.lora: calculate_weight[patches weight key]
comfy.model_management: free_memory[memory_required device keep_loaded] get_torch_device
comfy.utils: ProgressBar
# step cache
comfy.model_sampling: CONST
# NAG
comfy.patcher_extension: WrappersMP.DIFFUSION_MODEL
comfy.utils: repeat_to_batch_size[tensor batch_size]
# cards
comfy.model_management: get_all_torch_devices get_free_memory[dev torch_free_too]
    loaded_models
comfy.patcher_extension: WrappersMP.CALC_COND_BATCH
comfy.samplers: get_area_and_mult[conds x_in timestep_in]
"""


def _hooks(text: str) -> Hooks:
    found: Hooks = {}
    for word in re.findall(r"[^\s\[]+(?:\[[^]]+\])?", text):
        if word.endswith(":"):
            names = found.setdefault(word[:-1], {})
        else:
            name, _, parameters = word.removesuffix("]").partition("[")
            names[name] = tuple(parameters.split())
    return found


_, *_parts = re.split(r"^# (.+)$", _NEEDED, flags=re.MULTILINE)
# {capability: {module: {name: parameters}}}; without parameters only the name is looked for.
CAPABILITIES = dict(zip(_parts[::2], map(_hooks, _parts[1::2]), strict=True))
# All of them: {module: {name: parameters}}.
HOOKS: Hooks = {}
for _capability in CAPABILITIES.values():
    for _module, _names in _capability.items():
        HOOKS.setdefault(_module, {}).update(_names)

# What ComfyUI calls here in place of its own code: every parameter that is known.
KNOWN: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "comfy.ldm.qwen_image.model": {"QwenImageTransformerBlock.forward": BLOCK_ARGUMENTS},
    "comfy.ops": dict.fromkeys(
        ("disable_weight_init.Linear.forward", "mixed_precision_ops().Linear.forward"),
        ("input", "input_act", "act_weight", "residual", "residual_scale"),
    ),
}


@cached
def unsupported_host(capabilities: tuple[str, ...] = tuple(CAPABILITIES)) -> Verdict | None:
    """Says why something of this package does not run in this ComfyUI, in one sentence; None when
    all is well.
    """
    floor = ".".join(map(str, COMFYUI_FLOOR))
    try:
        found = importlib.import_module("comfyui_version").__version__
    except (ImportError, AttributeError):
        return Verdict(
            "this ComfyUI does not give its version",
            rule=f"Qwen-Image Accelerator needs {floor} or newer.",
            final=True,
        )
    if release(found) < COMFYUI_FLOOR:
        old = f"ComfyUI is {found} and Qwen-Image Accelerator needs {floor} or newer"
        return Verdict(old, remedy="update ComfyUI.", final=True)
    for hooks in map(CAPABILITIES.__getitem__, capabilities):
        for module, names in hooks.items():
            for name, parameters in names.items():
                if fault := _fault(module, name, parameters):
                    return Verdict(
                        f"ComfyUI {found} {fault}, which Qwen-Image Accelerator uses",
                        remedy="update Qwen-Image Accelerator; until then, use ComfyUI's loaders.",
                        final=True,
                    )
    return None


def news_of_host() -> list[str]:
    """Returns what to tell once about a ComfyUI that runs but is newer than this package knows."""
    found = importlib.import_module("comfyui_version").__version__
    news = []
    if is_newer_than_tested(found):
        news.append(
            f"ComfyUI {found} is newer than the tested version ({TESTED}). If an image looks "
            "wrong, compare it with ComfyUI's nodes and report it."
        )
    for module, names in KNOWN.items():
        for name, known in names.items():
            new = [
                parameter.name
                for parameter in inspect.signature(_target(module, name)).parameters.values()
                if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
                and parameter.name not in ("self", *known)
            ]
            if new:
                news.append(
                    f"ComfyUI {found} has the new parameters {', '.join(new)} in {module}.{name}. "
                    "Blocks with them run ComfyUI's code, and LoRAs as a bypass are refused."
                )
    if unknown := unknown_attention_arguments():
        news.append(
            f"ComfyUI {found} gives attention the new arguments {', '.join(unknown)}: ComfyUI's "
            "blocks run."
        )
    return news


def is_known(replaced: tuple[str, str], block: tuple[str, str], arguments: tuple[str, ...]) -> bool:
    """Returns whether ComfyUI has what is replaced, and calls a block as is known here."""
    if _fault(*replaced, ()):
        return False
    forward = _target(*block)
    return tuple(inspect.signature(forward).parameters)[1:] == arguments


def transformer_of(model: Any) -> Any:
    """Returns a MODEL's transformer, also where another MODEL's object patch stands for it."""
    return model.object_patches_backup.get("diffusion_model", model.model.diffusion_model)


def read_sizes(look: Callable[..., Any], *given: Any) -> Any:
    """Looks at the sizes of a Qwen-Image MODEL."""
    found = read_or(None, look, *given)
    if found is None:
        raise SettingError(
            "the sizes of the MODEL cannot be read, because another node changed it: connect the "
            "MODEL from before that node."
        )
    return found


def unsupported_model(model: Any) -> Verdict | None:
    """Says why a MODEL is not optimized, in one sentence; None when it is Qwen-Image."""
    inner = model.model
    kind = kind_of(inner)
    if kind and kind.holds(transformer_of(model)):
        return None
    return Verdict(
        f"The model is {type(inner).__name__}, not Qwen-Image (2512, Edit, Layered, 2.1): it is "
        "left unchanged.",
        final=True,
    )


@cached
def unknown_attention_arguments() -> tuple[str, ...]:
    """Names of what ComfyUI's block gives attention and the fused blocks would not.

    Read from the source of the call: attention functions take any argument, and ComfyUI's wrapper
    takes some of them out before.
    """
    try:
        forward = _target("comfy.ldm.qwen_image.model", "Attention.forward")
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (ImportError, AttributeError, OSError, TypeError, SyntaxError):
        return ()
    given = {
        keyword.arg
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("optimized_attention")
        for keyword in call.keywords
    }
    return tuple(sorted(str(name) for name in given - {*ATTENTION_ARGUMENTS}))


def _target(module: str, name: str) -> Any:
    """Finds what the name stands for; a part that ends in () is called for its result."""
    target = importlib.import_module(module)
    for part in name.split("."):
        target = getattr(target, part.removesuffix("()"))
        target = target() if part.endswith("()") else target
    return target


def _fault(module: str, name: str, parameters: tuple[str, ...]) -> str | None:
    try:
        target = _target(module, name)
    except (ImportError, AttributeError, TypeError):
        return f"has no {module}.{name}"
    if not parameters:
        return None
    if not callable(target):
        return f"has {module}.{name} as a {type(target).__name__}"
    known = inspect.signature(target).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return None
    missing = [parameter for parameter in parameters if parameter not in known]
    return f"has no parameter {missing[0]!r} in {module}.{name}" if missing else None
