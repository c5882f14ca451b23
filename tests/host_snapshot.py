"""What modules, classes and model instances of the hosts are, to compare before and after."""

import sys
from types import FunctionType, ModuleType

HOSTS = {"accelerate", "comfy", "comfy_aimdo", "comfy_api", "comfy_execution", "comfy_kitchen"}
HOSTS |= {"diffusers", "torch", "triton"}
# What a model keeps of this package until it goes, and what it has under dynamic VRAM.
LISTED = {"_parameters", "weight", "bias", "_v_weight", "_v_bias", "_v_signature", "size"}
LISTED |= {"comfy_cast_weights", "custom_operations", "img_mod", "txt_mod", "modulation"}
LISTED |= {"memory_required", "memory_usage_factor", "get_key_patches", "qwen_l40s_modulation"}
LISTED |= {"cached_patcher_init", "prefix_cache", "current_loaded_models", "PREFETCH_QUEUES"}
LISTED.add("__class__")
# What a run of ComfyUI's or diffusers' alone changes, and a late import of Triton's.
OF_THEIRS = {"current_weight_patches_uuid", "global_progress_registry", "latent_shapes", "modules"}
OF_THEIRS |= {"sigmas", "timesteps"}
PLAIN = (bool, int, float, str, bytes, type(None))


def is_of_host(module):
    return str(module).partition(".")[0] in HOSTS


def modules_and_classes():
    """{(where, attribute): what is there} of the hosts' modules that are imported."""
    found = {}
    for name, module in list(sys.modules.items()):
        if not is_of_host(name) or not issubclass(type(module), ModuleType):
            continue
        found |= _attributes(name, vars(module))
        for value in list(vars(module).values()):
            if issubclass(type(value), type) and value.__module__ == name:
                found |= _attributes(f"{name}.{value.__qualname__}", vars(value))
    return found


def instances(**owners):
    """The same of objects, and of the modules in those that are torch's, by the names given."""
    found = {}
    for name, owner in owners.items():
        parts = owner.named_modules() if hasattr(owner, "named_modules") else [("", owner)]
        for path, part in parts:
            found |= _attributes(f"{name}.{path}", vars(part))
    return found


def _attributes(where, namespace):
    found = {}
    for name, value in list(namespace.items()):
        if issubclass(type(value), ModuleType):
            continue  # imported meanwhile
        # A model that is moved to its card and back has other buffers under the same names.
        found[where, name] = _state(
            list(value) if name == "_buffers" and type(value) is dict else value
        )
        if issubclass(type(value), FunctionType):
            found[where, f"{name}()"] = value.__code__, value.__defaults__
    return found


def _state(value):
    """What tells a value, which may warn when it is asked for its class: itself, or its parts."""
    if issubclass(type(value), dict):
        return [(key, _same(it)) for key, it in value.items() if isinstance(key, str)]
    if issubclass(type(value), (list, tuple)):
        return list(map(_same, value))
    return _same(value)


class _Same:
    """Equal to the same object alone."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, _Same) and self.value is other.value

    __hash__ = None


def _same(value):
    return repr(value) if type(value) in PLAIN else _Same(value)


def changed(before, after):
    """(where, attribute) of what has changed, come or gone and is not in LISTED."""
    gone, places = before.keys() - after.keys(), {place for place, _ in before}
    new = {it for it in after.keys() - before.keys() if it[0] in places}
    other = {it for it in before.keys() & after.keys() if before[it] != after[it]}
    return sorted(it for it in gone | new | other if it[1] not in LISTED | OF_THEIRS)
