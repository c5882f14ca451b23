"""Whether the running ComfyUI is one that this package knows, checked once.

ComfyUI has no frozen internal interface. What the loaders call is listed here with the parameters
that they use, so that a change upstream is one sentence to the user instead of a traceback.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from functools import lru_cache

from ...machine.packages import COMFYUI_FLOOR, release

# {module: {name: parameters that are passed}}; without parameters only the name must be there.
CALLED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "comfy.ops": {
        "mixed_precision_ops": ("quant_config", "compute_dtype"),
        "CastBiasWeightContext": (),
        # What that passes its arguments on to.
        "cast_bias_weight": ("s", "input", "offloadable", "compute_dtype", "want_requant"),
        "run_every_op": (),
        "disable_weight_init.Linear": ("in_features", "out_features", "bias", "device"),
        "manual_cast.Linear": ("in_features", "out_features", "bias", "device"),
    },
    "comfy.quant_ops": {
        "QUANT_ALGOS": (),
        "QuantizedTensor": ("qdata", "layout_cls", "params"),
        "QuantizedTensor.from_float": ("tensor", "layout_cls"),
        "QuantizedLayout": (),
        "register_layout_class": ("name", "cls"),
    },
    "comfy_kitchen.tensor.base": {"BaseLayoutParams": ("scale", "orig_dtype", "orig_shape")},
    "comfy.supported_models": {
        "QwenImage": ("unet_config",),
        "QwenImage.get_model": ("state_dict", "prefix"),
        "QwenImage.set_inference_dtype": ("dtype", "manual_cast_dtype", "device"),
    },
    "comfy.model_base": {
        "QwenImage": (),
        "BaseModel.load_model_weights": ("sd", "unet_prefix", "assign"),
        "BaseModel.get_dtype_inference": (),
    },
    "comfy.model_detection": {"detect_unet_config": ("state_dict", "key_prefix")},
    "comfy.model_management": {
        "get_torch_device": (),
        "unet_offload_device": (),
        "is_device_cpu": ("device",),
        "unet_dtype": ("model_params", "supported_dtypes", "weight_dtype"),
        "unet_manual_cast": ("weight_dtype", "inference_device", "supported_dtypes"),
        "free_memory": ("memory_required", "device", "keep_loaded"),
        "soft_empty_cache": (),
        "minimum_inference_memory": (),
        "current_loaded_models": (),
        "module_size": ("module",),
        "unload_all_models": (),
        "unload_model_and_clones": ("model", "all_devices"),
        "loaded_models": (),
        "load_models_gpu": ("models", "memory_required", "force_full_load"),
        "get_free_memory": ("dev", "torch_free_too"),
        "extra_reserved_memory": (),
        "cuda_device_context": ("device",),
        "raise_non_oom": ("e",),
        "vram_state": (),
        "VRAMState.HIGH_VRAM": (),
    },
    "comfy.memory_management": {"aimdo_enabled": ()},
    "comfy.conds": {"CONDRegular": ("cond",)},
    "comfy.sample": {"sample": ("model", "noise", "steps", "cfg", "sampler_name", "scheduler")},
    "comfy.samplers": {
        "CFGGuider": ("model_patcher",),
        "CFGGuider.predict_noise": (),
        "KSAMPLER": ("sampler_function",),
        "can_concat_cond": ("c1", "c2"),
        "get_area_and_mult": ("conds", "x_in", "timestep_in"),
    },
    "comfy.model_patcher": {
        "CoreModelPatcher": ("model", "load_device", "offload_device"),
        "ModelPatcher": ("model", "load_device", "offload_device"),
        "ModelPatcherDynamic": ("model", "load_device", "offload_device"),
        "ModelPatcher.add_callback_with_key": ("call_type", "key", "callback"),
        "ModelPatcher.add_patches": ("patches", "strength_patch"),
        "ModelPatcher.add_wrapper_with_key": ("wrapper_type", "key", "wrapper"),
        "ModelPatcher.clone": (),
        "ModelPatcher.get_additional_models_with_key": ("key",),
        "ModelPatcher.get_attachment": ("key",),
        "ModelPatcher.get_injections": ("key",),
        "ModelPatcher.get_all_wrappers": ("wrapper_type",),
        "ModelPatcher.get_wrappers": ("wrapper_type", "key"),
        "ModelPatcher.is_dynamic": (),
        "ModelPatcher.current_loaded_device": (),
        "ModelPatcher.loaded_size": (),
        "ModelPatcher.model_size": (),
        "ModelPatcher._load_list": ("for_dynamic", "default_device"),
        "ModelPatcher.patch_weight_to_device": ("key", "device_to", "return_weight"),
        "ModelPatcher.remove_attachments": ("key",),
        "ModelPatcher.remove_callbacks_with_key": ("call_type", "key"),
        "ModelPatcher.remove_wrappers_with_key": ("wrapper_type", "key"),
        "ModelPatcher.set_additional_models": ("key", "models"),
        "ModelPatcher.set_attachments": ("key", "attachment"),
        "ModelPatcher.unpatch_model": ("unpatch_weights",),
    },
    "comfy.patcher_extension": {
        "WrappersMP.APPLY_MODEL": (),
        "merge_nested_dicts": ("dict1", "dict2", "copy_dict1"),
        "WrappersMP.CALC_COND_BATCH": (),
        "WrappersMP.OUTER_SAMPLE": (),
        "WrappersMP.PREDICT_NOISE": (),
        "CallbacksMP.ON_DETACH": (),
    },
    "comfy_execution.utils": {"get_executing_context": ()},
    "comfy.ldm.modules.attention": {
        "optimized_attention_masked": ("q", "k", "v", "heads", "mask", "skip_reshape"),
    },
    "comfy.lora": {
        "load_lora": ("lora", "to_load", "log_missing"),
        "model_lora_keys_unet": ("model", "key_map"),
        "calculate_weight": ("patches", "weight", "key"),
    },
    "comfy.lora_convert": {"convert_lora": ("sd",)},
    "comfy.weight_adapter": {
        "WeightAdapterBase": (),
        "LoRAAdapter": (),
        "LoHaAdapter": (),
        "LoKrAdapter": (),
    },
    "comfy.sd": {
        "VAE": ("sd", "dtype"),
        "VAE.decode": ("samples_in",),
        "VAE.encode": ("pixel_samples",),
        "VAE.vae_encode_crop_pixels": ("pixels",),
        "VAE.vae_output_dtype": (),
        "CLIP": (
            "target",
            "embedding_directory",
            "parameters",
            "state_dict",
            "model_options",
            "disable_dynamic",
        ),
        "CLIP.clone": ("disable_dynamic",),
        "CLIP.encode_from_tokens": ("tokens", "return_pooled", "return_dict"),
        "CLIP.encode_from_tokens_scheduled": (),
        "CLIP.generate": (),
        "CLIP.load_model": (),
        "load_text_encoder_state_dicts": (
            "state_dicts",
            "embedding_directory",
            "clip_type",
            "model_options",
            "disable_dynamic",
        ),
        "CLIPType.QWEN_IMAGE": (),
        "TEModel.QWEN25_7B": (),
        "detect_te_model": ("sd",),
        "llama_detect": ("clip_data",),
    },
    "comfy.sd1_clip": {
        "SDClipModel": (
            "device",
            "dtype",
            "textmodel_json_config",
            "special_tokens",
            "layer_norm_hidden_state",
            "model_class",
            "enable_attention_masks",
            "return_attention_masks",
            "model_options",
        ),
        "SDTokenizer": (
            "tokenizer_path",
            "pad_with_end",
            "embedding_size",
            "embedding_key",
            "tokenizer_class",
            "has_start_token",
            "has_end_token",
            "pad_to_max_length",
            "max_length",
            "min_length",
            "pad_token",
            "tokenizer_data",
            "tokenizer_args",
        ),
    },
    "comfy.text_encoders.llama": {
        "BaseLlama": (),
        "Llama2_": ("config", "device", "dtype", "ops"),
        "Qwen25_7BVLI": ("config_dict", "dtype", "device", "operations"),
        "Qwen25_7BVLI_Config": (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "rms_norm_eps",
            "rope_theta",
        ),
    },
    "comfy.text_encoders.qwen_image": {
        "te": ("dtype_llama", "llama_quantization_metadata"),
        "QwenImageTEModel": (),
        "QwenImageTEModel.encode_token_weights": ("token_weight_pairs", "template_end"),
        "QwenImageTokenizer": ("embedding_directory", "tokenizer_data"),
        "QwenImageTokenizer.tokenize_with_weights": ("text", "return_word_ids"),
    },
    "comfy.ldm.qwen_image.model": {
        "QwenImageTransformer2DModel": (
            "in_channels",
            "out_channels",
            "num_layers",
            "attention_head_dim",
            "num_attention_heads",
            "joint_attention_dim",
            "axes_dims_rope",
            "default_ref_method",
            "use_additional_t_cond",
        ),
        "QwenImageTransformerBlock.forward": (
            "hidden_states",
            "encoder_hidden_states",
            "encoder_hidden_states_mask",
            "temb",
            "image_rotary_emb",
            "timestep_zero_index",
            "transformer_options",
        ),
    },
    "comfy.ldm.wan.vae": {
        "WanVAE": (
            "dim",
            "z_dim",
            "dim_mult",
            "num_res_blocks",
            "attn_scales",
            "temperal_downsample",
            "image_channels",
            "conv_out_channels",
        ),
        "AttentionBlock": (),
        "ResidualBlock": (),
    },
    "comfy.utils": {
        "load_torch_file": ("ckpt", "safe_load", "return_metadata"),
        "calculate_parameters": ("sd",),
        "detect_layer_quantization": ("state_dict", "prefix"),
        "weight_dtype": ("sd",),
        "get_attr": ("obj", "attr"),
        "ProgressBar": ("total",),
        "ProgressBar.update": ("value",),
        "ProgressBar.update_absolute": ("value", "total"),
    },
    "folder_paths": {
        "get_filename_list": ("folder_name",),
        "get_full_path": ("folder_name", "filename"),
        "get_folder_paths": ("folder_name",),
        "folder_names_and_paths": (),
    },
}


@lru_cache(maxsize=1)
def what_is_off() -> str | None:
    """One sentence when this ComfyUI is too old or not as expected; None when all is well."""
    floor = ".".join(map(str, COMFYUI_FLOOR))
    try:
        found = importlib.import_module("comfyui_version").__version__
    except (ImportError, AttributeError):
        return f"this ComfyUI does not tell its version: Qwen-Image L40S needs {floor} or newer."
    if release(found) < COMFYUI_FLOOR:
        return f"ComfyUI is {found} and Qwen-Image L40S needs {floor} or newer: update ComfyUI."
    for module, names in CALLED.items():
        for name, parameters in names.items():
            if fault := _fault(module, name, parameters):
                return (
                    f"ComfyUI {found} {fault}, which Qwen-Image L40S calls: update Qwen-Image "
                    "L40S, and until then use ComfyUI's own loaders."
                )
    return None


def _fault(module: str, name: str, parameters: tuple[str, ...]) -> str | None:
    try:
        target = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError):
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
