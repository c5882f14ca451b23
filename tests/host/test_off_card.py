"""A MODEL whose modulation weights stay off the card."""

import gc
import weakref
from unittest import mock

import comfy.hooks
import comfy.model_management
import comfy.sample
import comfy.sd
import comfy.utils
import narrow_transformer as narrow
import pytest
import torch
from comfy.patcher_extension import WrappersMP
from comfy_api.torch_helpers import set_torch_compile_wrapper
from comfyui_boot import MODE, folder
from narrow_transformer import difference

from qwen_l40s.errors import SettingError
from qwen_l40s.hosts.comfyui.load import plan as load_plan
from qwen_l40s.hosts.comfyui.load import weights as loader
from qwen_l40s.hosts.comfyui.load.transformer import load_model
from qwen_l40s.hosts.comfyui.lora.apply import apply_lora
from qwen_l40s.hosts.comfyui.sample import off_card as off_card_pass
from qwen_l40s.hosts.comfyui.sample.modulation import ModelModulation
from qwen_l40s.hosts.comfyui.sample.off_card import OffCardLinear, PassFigures, off_card_layers
from qwen_l40s.hosts.comfyui.sample.optimize import OptimizeSettings, optimize, report_of
from qwen_l40s.hosts.comfyui.sample.run import OPTIMIZATION_KEY as OPTIMIZATION
from qwen_l40s.hosts.comfyui.save import loaded_weights
from qwen_l40s.optimizations.stream import WeightStream
from qwen_l40s.spec.formats import GIB, CardFacts

pytestmark = pytest.mark.each_device
FOLDER = folder("off_card")
WEIGHTS = narrow.weights()
PATH = narrow.write(FOLDER / "bf16.safetensors", WEIGHTS)
MODULATION = [name for name in WEIGHTS if "_mod.1." in name]
OFF_CARD_BYTES = sum(WEIGHTS[name].nbytes for name in MODULATION)
HOST_ATTENTION = OptimizeSettings(attention="comfyui")


def load(form="bf16", off_card=True, path=PATH, disable_dynamic=False):
    gc.collect()  # ComfyUI fails where a model disappears while it makes room for another one
    with torch.inference_mode():  # as loader nodes run
        return narrow.load_patcher(path, form, off_card, disable_dynamic)


def sample(model, cfg=1.0, steps=3, positive=20, hooks=None, **more):
    prompt = positive if hooks is None else narrow.prompt(positive, hooks=hooks)
    return narrow.sample(model, prompt, 7, steps=steps, cfg=cfg, **more)


def figures(model) -> PassFigures:
    return ModelModulation.of(model.model).passes


def same_off_card(known, found, **arguments):
    """Samples with both; off the card gives the bits of on the card."""
    expected, got = sample(known, **arguments), sample(found, **arguments)
    assert torch.equal(expected, got), difference(got, expected)
    return got


def lora(layers):
    path = FOLDER / "lora.safetensors"
    narrow.save_file(narrow.lora(WEIGHTS, layers), path)
    return path


MODULATION_LORA = lora([name.removesuffix(".weight") for name in MODULATION if "weight" in name])


# ------------------------------------------------------------------------- what ComfyUI sees of it


def test_weights_are_no_parameters_but_in_the_state_dict():
    model = load()
    known = load(off_card=False)
    parameters = dict(model.model.named_parameters())
    assert not any("_mod.1." in name for name in parameters)
    state, expected = model.model.state_dict(), known.model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name].cpu(), expected[name].cpu()) for name in expected)
    assert model.model_size() == known.model_size() - OFF_CARD_BYTES
    assert model.clone().model_size() == model.model_size()


def test_loading_moves_none_of_them():
    model = load()
    comfy.model_management.load_models_gpu([model])
    assert model.loaded_size() <= model.model_size() or MODE == "dynamic"
    layers = off_card_layers(model.model)
    assert {str(part.device) for layer in layers for part in layer.parts()} == {"cpu"}
    if MODE == "card":
        assert model.loaded_size() == model.model_size()
    comfy.model_management.unload_all_models()
    same_off_card(load(off_card=False), model)


def test_weights_are_mapped_and_not_copied():
    mapped = {}

    def noted(source):
        mapped.update(loader_map(source))
        return dict(mapped)

    loader_map = loader.map_tensors
    with mock.patch.object(loader, "map_tensors", noted):
        model = load()
    places = {tensor.data_ptr() for name, tensor in mapped.items() if "_mod.1." in name}
    held = {part.data_ptr() for layer in off_card_layers(model.model) for part in layer.parts()}
    assert held == places


def test_files_are_written_with_them():
    model = apply_lora(load(), MODULATION_LORA, 1.0, how="merge")[0]
    known = apply_lora(load(off_card=False), MODULATION_LORA, 1.0, how="merge")[0]
    ours, theirs = loaded_weights(model), loaded_weights(known)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name].cpu(), theirs[name].cpu()) for name in theirs)


@torch.inference_mode()
def test_comfyuis_own_saving_merges_a_lora():
    unscaled = {
        name: weight.to(torch.float8_e4m3fn) if weight.ndim == 2 else weight
        for name, weight in WEIGHTS.items()
    }
    fp8 = narrow.write(FOLDER / "saved_fp8.safetensors", unscaled)
    for form, path in (("bf16", PATH), ("fp8", fp8)):
        saved = []
        for off_card in (True, False):
            model = load(form, off_card, path)
            model = apply_lora(model, MODULATION_LORA, 1.0, how="merge")[0]
            comfy.model_management.load_models_gpu([model], force_patch_weights=MODE != "dynamic")
            state = model.state_dict_for_saving()
            saved.append({name: state[name].to("cpu") for name in state if "_mod.1." in name})
        assert saved[0].keys() == saved[1].keys(), form
        for name, known in saved[1].items():
            assert torch.equal(saved[0][name].float(), known.float()), (form, name)
        changed = f"model.diffusion_model.{MODULATION[0]}"
        assert not torch.equal(saved[0][changed].float(), WEIGHTS[MODULATION[0]].float()), form


def test_the_loader_decides_by_the_card():
    whole = load(off_card=False).model_size()
    small, large = CardFacts("small", 12 * GIB, (8, 9)), CardFacts("large", 80 * GIB, (8, 9))
    for card, place, off_card in (
        (small, "auto", True),
        (large, "auto", False),
        (large, "off card", True),
        (small, "on card", False),
    ):
        with mock.patch.object(load_plan, "card_facts", return_value=card):
            model, report = load_model(PATH, "bf16", modulation=place)
        assert bool(off_card_layers(model.model)) == off_card, (card, place)
        stays = "stays in system RAM" if off_card else "stays in VRAM"
        assert f"Modulation: 1 MiB {stays}" in report.text(), report.text()
        assert report.bytes == whole - OFF_CARD_BYTES * off_card
        again = model.cached_patcher_init[0](*model.cached_patcher_init[1], disable_dynamic=True)
        assert bool(off_card_layers(again.model)) == off_card


def test_what_is_booked_for_a_step():
    """ComfyUI books a tenth of what it has still to load; with it the whole need is asked for."""
    shape = [1, 16, 1, 128, 128]
    model, known = load(disable_dynamic=True), load(off_card=False, disable_dynamic=True)
    step = known.model.memory_required(shape) * off_card_pass.STEP_FACTOR / 1.8
    waiting = model.model_size()
    assert abs(model.model.memory_required(shape) - (step - 0.1 * waiting)) < 1 < step
    model.model.model_loaded_weight_memory = waiting
    assert abs(model.model.memory_required(shape) - step) < 1
    model.model.model_loaded_weight_memory = 0
    with mock.patch.object(comfy.model_management, "get_free_memory", return_value=waiting):
        model.model.model_loaded_weight_memory = 0
        assert abs(model.model.memory_required(shape) - step) < 1, "no room: the whole figure"
    assert load("int8", disable_dynamic=True).model.memory_usage_factor == 1.8


def test_nothing_keeps_the_model_alive():
    for form in ("bf16", "int8"):
        for off_card in (True, False):
            model = optimize(load(form, off_card, disable_dynamic=True), HOST_ATTENTION)
            sample(model)
            comfy.model_management.unload_all_models()
            held = weakref.ref(model.model), weakref.ref(model.model.diffusion_model)
            held += (weakref.ref(model.model.diffusion_model.transformer_blocks[0]),)
            optimization = model.get_attachment(OPTIMIZATION)
            gc.collect()
            gc.disable()
            try:
                del model
                assert [one() for one in held] == [None] * 3, (form, off_card)
            finally:
                gc.enable()
            assert optimization is not None


def test_an_unknown_place_is_refused():
    with pytest.raises(SettingError, match="'gpu'"):
        load_model(PATH, "bf16", modulation="gpu")


# ----------------------------------------------------------------------------- the picture is equal


def test_optimized_blocks():
    known, model = optimize(load(off_card=False), HOST_ATTENTION), optimize(load(), HOST_ATTENTION)
    same_off_card(known, model, cfg=2.5)
    report = report_of(model)
    assert "6 of 6" in report or "12 of 12" in report, report
    assert "weights stay in system RAM and were uploaded to the GPU 1 times" in report, report
    same_off_card(known, model, cfg=2.5)
    assert "weights stay in system RAM and were not needed in this run" in report_of(model)


def test_hooks():
    """A LoRA that ComfyUI switches on for one prompt alone."""
    stored = PATH.read_bytes()
    if MODE == "dynamic":
        known, model = (load(off_card=off, disable_dynamic=True) for off in (False, True))
    else:
        known, model = load(off_card=False), load()
    plain = same_off_card(known, model, cfg=2.5)
    outputs = []
    for one in (known, model):
        tensors = comfy.utils.load_torch_file(str(MODULATION_LORA))
        clone, _, hooks = comfy.hooks.load_hook_lora_for_models(one, None, tensors, 1.0, 0.0)
        outputs.append(sample(clone, cfg=2.5, hooks=hooks))
    assert difference(outputs[0], plain) > 1e-3
    assert difference(outputs[1], outputs[0]) < 1e-5, difference(outputs[1], outputs[0])
    same_off_card(known, model, cfg=2.5)
    assert PATH.read_bytes() == stored, "ComfyUI writes into weights, which are mapped"


def test_two_passes_through_the_model_in_one_call():
    model = load().clone()
    calls = []

    def twice(executor, x, t, *arguments, **more):
        calls.append(executor(x, t * 0.5, *arguments, **more))
        return executor(x, t, *arguments, **more)

    plain = sample(model)
    model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "twice", twice)
    own = OffCardLinear.on_card
    moved = []

    def counted(layer, *arguments):
        moved.append(layer)
        return own(layer, *arguments)

    with mock.patch.object(OffCardLinear, "on_card", counted):
        assert torch.equal(sample(model), plain)
        # The first pass is not of the schedule: it brings the weights once for each of its steps.
        assert len(calls) == 3 and len(moved) == 3 * len(off_card_layers(model.model))
        assert torch.equal(sample(model), plain) and len(moved) == 12


def test_a_compiled_block():
    known, model = (load(off_card=off, disable_dynamic=True) for off in (False, True))
    outputs = []
    for one in (known, model):
        clone, key = one.clone(), "diffusion_model.transformer_blocks.1"
        set_torch_compile_wrapper(clone, backend="eager", keys=[key])
        outputs.append(sample(clone))
    assert torch.equal(*outputs)
    assert len(ModelModulation.of(model.model).table) == 3


def test_another_extension_that_changes_a_layer():
    known, model = load(off_card=False), load()
    outputs = []
    for one in (known, model):
        linear = one.model.diffusion_model.transformer_blocks[0].img_mod[1]
        own = linear.forward
        linear.forward = lambda x, own=own: own(x) * 1.5
        try:
            outputs.append((sample(one), sample(optimize(one, HOST_ATTENTION))))
        finally:
            del linear.forward
    assert torch.equal(outputs[0][0], outputs[1][0]) and torch.equal(outputs[0][1], outputs[1][1])
    assert difference(outputs[0][0], sample(known)) > 1e-3


# --------------------------------------------------------------------------------- when they move


def test_a_second_image_moves_nothing():
    for prepare in (lambda m: m, lambda m: optimize(m, HOST_ATTENTION)):
        model = prepare(load())
        modulation = ModelModulation.of(model.model)
        sample(model)
        assert (modulation.table.passes, len(modulation.table)) == (1, 3)
        sample(model)
        sample(model, positive=11, cfg=2.5)
        assert modulation.table.passes == 1
        sample(model, steps=5)
        assert modulation.table.passes == 2
        sample(apply_lora(model, MODULATION_LORA, 1.0, how="merge")[0])
        assert modulation.table.passes == 3
        sample(model)
        assert modulation.table.passes == 3, "the plain weights' entries are still there"


def test_a_layer_is_brought_once_for_all_timesteps():
    """Though each timestep goes through it alone."""
    model = load()
    on_card, brought = OffCardLinear.on_card, []

    def counted(layer, *arguments):
        brought.append(layer)
        return on_card(layer, *arguments)

    with mock.patch.object(OffCardLinear, "on_card", counted):
        sample(model, steps=5)
    assert len(ModelModulation.of(model.model).table) == 5
    assert brought == off_card_layers(model.model)


def test_the_table_leaves_with_the_model():
    model = load()
    sample(model)
    modulation = ModelModulation.of(model.model)
    assert len(modulation.table) == 3
    comfy.model_management.unload_all_models()
    assert len(modulation.table) == 0
    sample(model)
    assert len(modulation.table) == 3


@pytest.mark.parametrize("how", ("merge", "bypass"))
def test_entries_of_a_lora_that_is_gone_leave(how):
    """A graph that runs again loads its LoRA again: the soak saw 17 MB more on a card each time."""
    model = optimize(load(), HOST_ATTENTION)
    table = ModelModulation.of(model.model).table
    sample(model)
    for _ in range(3):
        sample(apply_lora(model, MODULATION_LORA, 1.0, how=how)[0])
        gc.collect()
        assert len(table) == 3 + 3, "the plain weights' and the last LoRA's"


def test_timesteps_beside_the_schedule_are_kept_for_the_next_run():
    model = load()
    modulation = ModelModulation.of(model.model)
    sample(model, sampler="dpm_2")
    first = modulation.table.passes
    assert first > 1
    sample(model, sampler="dpm_2")
    assert modulation.table.passes == first


def test_a_schedule_longer_than_the_table():
    known, model = load(off_card=False), load()
    modulation = ModelModulation.of(model.model)
    sample(model)
    size = modulation.table.bytes // 3
    modulation.table._most_bytes = 8 * size
    same_off_card(known, model, steps=30)
    assert modulation.table.bytes <= 8 * size
    assert modulation.table.passes <= 1 + 4 + 1, modulation.table.passes


def test_no_room_for_the_weights_on_their_way():
    known, model = load(off_card=False), load()
    plain = sample(known)
    failures = [torch.OutOfMemoryError("no room")]

    class Full(WeightStream):
        def __iter__(self):
            if failures:
                raise failures.pop()
            return super().__iter__()

    asked = []
    free = comfy.model_management.free_memory

    def noted(needed, *arguments, **more):
        asked.append(needed)
        return free(needed, *arguments, **more)

    with (
        mock.patch.object(off_card_pass, "WeightStream", Full),
        mock.patch.object(comfy.model_management, "free_memory", noted),
    ):
        assert torch.equal(sample(model), plain)
        assert asked[-1] == 2 * max(layer.nbytes for layer in off_card_layers(model.model))
        notes = figures(model).notes
        assert len(notes) == 1 and "offloaded other models first" in notes[0]
        failures += [torch.OutOfMemoryError("no room")] * 2
        again = load()
        assert difference(sample(again), plain) < 1e-2
        assert "computed on the CPU" in figures(again).notes[-1]
    assert torch.equal(sample(again), plain), "what the processor computed is not kept"


def test_an_error_in_the_pass_leaves_the_model_whole():
    model = load()
    plain = sample(model)

    class Broken(WeightStream):
        def __iter__(self):
            for index, parts in enumerate(super().__iter__()):
                if index == 2:
                    raise KeyboardInterrupt
                yield parts

    broken = mock.patch.object(off_card_pass, "WeightStream", Broken)
    with broken, pytest.raises(KeyboardInterrupt):
        sample(model, steps=6)
    assert not any(layer.is_on_card for layer in off_card_layers(model.model))
    assert torch.equal(sample(model), plain)
    assert torch.equal(sample(model, steps=6), sample(load(off_card=False), steps=6))
