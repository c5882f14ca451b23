"""Under dynamic VRAM a model is prepared once: which changes between two runs it sees."""

import comfy.model_management
import comfy.model_patcher
import comfy_aimdo.host_buffer
import pytest
import torch
from comfy.model_patcher import ModelPatcherDynamic
from comfy.patcher_extension import CallbacksMP
from comfyui_boot import MODE

from qwen_l40s.hosts.comfyui.prepared import PreparedPatcher, prepare_once

pytestmark = pytest.mark.each_device
CPU = torch.device("cpu")


def rms_norm():
    return comfy.ops.manual_cast.RMSNorm(8, dtype=torch.bfloat16)


class Model(torch.nn.Module):
    """Layers as ComfyUI's: one of a size that it reads when needed, one that it moves at once."""

    def __init__(self):
        super().__init__()
        self.large = comfy.ops.manual_cast.Linear(256, 256, dtype=torch.bfloat16)
        self.small = rms_norm()
        self.register_buffer("rows", torch.ones(4))


@pytest.fixture
def device(monkeypatch):
    """The card; on the CPU `meta`, with stand-ins for comfy_aimdo, which needs one."""
    if MODE == "dynamic":
        return comfy.model_management.get_torch_device()
    if MODE == "card":
        pytest.skip("dynamic VRAM is off")

    class HostBuffer:
        def __init__(self, *sizes):
            self.size = 0

    class Pages:
        def prioritize(self):
            pass

        def alloc(self, size):
            return (0, 0, size)

        def free_memory(self, size):
            return 0

    monkeypatch.setattr(comfy_aimdo.host_buffer, "HostBuffer", HostBuffer)
    monkeypatch.setattr(ModelPatcherDynamic, "_vbar_get", lambda self, create=False: Pages())
    return torch.device("meta")


def walked(patcher, device):
    """Prepares a model as ComfyUI's loader; returns whether it was walked through."""
    found = []
    own = type(patcher)._load_list

    def walk(self, **kwargs):
        found.append(own(self, **kwargs))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(patcher), "_load_list", walk)
        patcher.partially_load(device)
    return bool(found[0])


def state(patcher):
    """What the loader leaves behind, by module."""
    return {
        name: (
            [it.device for it in module._parameters.values() if it is not None],
            getattr(module, "weight_function", None),
            type(getattr(module, "weight_lowvram_function", None)),
            getattr(module, "_v_signature", 0),
        )
        for name, module in patcher.model.named_modules()
    }, patcher.model.model_loaded_weight_memory


def lora(patcher):
    patch = {"large.weight": (torch.ones(256, 256, dtype=torch.bfloat16),)}
    assert patcher.add_patches(patch) == ["large.weight"]


def other_layer(patcher):
    patcher.model.small = rms_norm()


def other_weight(patcher):
    weight = torch.nn.Parameter(torch.ones(256, 256, dtype=torch.bfloat16), requires_grad=False)
    patcher.model.large.weight = weight


def other_loader(patcher):
    stock = patcher.clone()
    stock.__class__ = ModelPatcherDynamic
    stock.add_weight_wrapper("large.weight", lambda weight: weight)
    stock.partially_load(patcher.load_device)


OF_ONE_CLONE = {
    "a LoRA": lora,
    "a function around a weight": lambda it: it.add_weight_wrapper("large.weight", abs),
    "an object in another's place": lambda it: it.add_object_patch("small", rms_norm()),
}
OF_THE_MODEL = {
    "another layer": other_layer,
    "another weight": other_weight,
    "a weight cast in its place": lambda it: it.model.small.half(),
    "a patcher of ComfyUI's own": other_loader,
    "unloaded": lambda it: it.detach(),
    "small weights taken back": lambda it: it.partially_unload(CPU, 1e9),
}


def made(device):
    model = Model()
    ones = {"large.weight": (256, 256), "large.bias": (256,), "small.weight": (8,), "rows": (4,)}
    # With dynamic VRAM ComfyUI's layers have no weights until some are loaded.
    model.load_state_dict({name: torch.ones(size).bfloat16() for name, size in ones.items()})
    patcher = ModelPatcherDynamic(model, device, CPU)
    prepare_once(patcher)
    assert type(patcher) is PreparedPatcher
    return patcher


def test_nothing_has_changed(device):
    patcher = made(device)
    assert walked(patcher, device)
    left = state(patcher)
    for one in (patcher, patcher.clone(), patcher):
        assert not walked(one, device)
        assert state(one) == left and patcher.model.small.weight.device == device


@pytest.mark.parametrize("name", OF_ONE_CLONE | OF_THE_MODEL)
def test_a_change_is_seen(device, name):
    patcher = made(device)
    walked(patcher, device)
    changed = patcher.clone()
    (OF_ONE_CLONE | OF_THE_MODEL)[name](changed)
    assert walked(changed, device)
    left = state(changed)
    assert not walked(changed, device)
    assert walked(patcher, device) == walked(changed, device) == (name in OF_ONE_CLONE)
    ModelPatcherDynamic.load(changed, device)
    assert state(changed) == left, "ComfyUI's own loader leaves the same"


def test_what_others_add_to_each_load_is_there_once(device):
    patcher = made(device)

    def add(self, *_):
        self.model.large.weight_function.append(abs)

    patcher.add_callback(CallbacksMP.ON_LOAD, add)
    for one in (patcher, patcher.clone(), patcher):
        walked(one, device)
        assert patcher.model.large.weight_function == [abs]


def test_a_clone_does_not_read_what_was_added_to_another(device):
    patcher = made(device)
    lora(patcher)
    clone = patcher.clone()
    walked(patcher, device)
    lora(patcher)
    assert walked(clone, device)


def test_a_load_that_fails_is_done_again(device, monkeypatch):
    patcher = made(device)

    def no_room(*args, **kwargs):
        raise torch.OutOfMemoryError("no room")

    walked(patcher, device)
    lora(patcher)
    with monkeypatch.context() as patch:
        patch.setattr(ModelPatcherDynamic, "_load_list", no_room)
        with pytest.raises(torch.OutOfMemoryError):
            patcher.partially_load(device)
    assert walked(patcher, device)


def test_on_the_processor_nothing_is_dynamic():
    model = comfy.model_patcher.ModelPatcher(Model(), CPU, CPU)
    prepare_once(model)
    assert not model.is_dynamic()
    assert not PreparedPatcher(Model(), CPU, CPU).is_dynamic()
