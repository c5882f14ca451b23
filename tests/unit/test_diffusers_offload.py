"""Which parts of a diffusers pipeline wait in host memory, and their moves to the card and back."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from qwen_l40s.errors import SettingError, UnavailableError
from qwen_l40s.hosts.diffusers import load as loading
from qwen_l40s.hosts.diffusers.load import LoadedPipeline, Settings, load_pipeline
from qwen_l40s.hosts.diffusers.offload import (
    HOST,
    MODEL,
    NONE,
    OFFLOADS,
    TEXT_ENCODER,
    OffloadChoice,
    PlacedPipeline,
    Placement,
    choose_offload,
    part_activations,
    transformer_shape,
    weight_bytes,
)
from qwen_l40s.hosts.diffusers.sample import generate, sample
from qwen_l40s.loaders.source import bundled_micro_folder
from qwen_l40s.spec import GIB

GB = 10**9
# Parameters of the published Qwen-Image, as inspect counts them, in bf16.
PUBLISHED = {
    "transformer": 2 * 20_430_401_088,
    "text_encoder": 2 * 8_292_166_656,
    "vae": 2 * 126_892_531,
}
CONFIG = {
    "num_layers": 60,
    "num_attention_heads": 24,
    "attention_head_dim": 128,
    "joint_attention_dim": 3584,
    "in_channels": 64,
    "out_channels": 16,
    "patch_size": 2,
}
SHAPE = transformer_shape(CONFIG)
AT_1328 = part_activations(SHAPE, width=1328, height=1328, batch=1, itemsize=2)


def choose(requested="auto", free=80 * GIB, host=250 * GIB, device="cuda:0", **changes):
    given = {"weights": PUBLISHED, "activations": AT_1328} | changes
    return choose_offload(
        requested, what="X in bf16", device=device, free=free, host_free=host, **given
    )


# --- which way ---


def test_shape_is_that_of_the_config():
    assert (SHAPE.dim, SHAPE.blocks, SHAPE.packed_out_channels) == (3072, 60, 64)
    assert transformer_shape(CONFIG | {"out_channels": None}).packed_out_channels == 256


def test_activations_grow_with_the_image_and_the_dtype():
    assert 1.2 * GIB < AT_1328["transformer"] < 2.5 * GIB
    assert AT_1328["vae"] == 1259 * 1328 * 1328  # measured: 2.07 GiB
    more = part_activations(SHAPE, width=2656, height=1328, batch=2, itemsize=4)
    assert more["vae"] == 2 * 2 * AT_1328["vae"]
    assert more["text_encoder"] == 2 * AT_1328["text_encoder"]
    assert more["transformer"] > 4 * AT_1328["transformer"]


@pytest.mark.parametrize(
    ("free", "host", "name"),
    [
        (80 * GIB, 0, NONE),
        (56.5 * GIB, 0, NONE),
        (55 * GIB, 250 * GIB, TEXT_ENCODER),
        (44 * GIB, 16 * GIB, TEXT_ENCODER),  # an L40S
        (40.2 * GIB, 250 * GIB, MODEL),
        (40.2 * GIB, 54 * GIB, MODEL),
    ],
)
def test_auto_takes_the_first_that_fits(free, host, name):
    choice = choose(free=int(free), host=int(host))
    assert choice.name == name
    assert choice.reason.startswith("auto: takes ")
    ways = list(OFFLOADS[1:])
    for other in ways:
        assert (f"{other} would take" in choice.reason) == (ways.index(other) < ways.index(name))


def test_auto_is_exact_at_its_limits():
    resident = sum(PUBLISHED.values()) + max(AT_1328.values())
    assert choose(free=resident, host=0).name == NONE
    assert choose(free=resident - 1).name == TEXT_ENCODER
    two = PUBLISHED["transformer"] + PUBLISHED["vae"]
    two += max(AT_1328["transformer"], AT_1328["vae"])
    assert choose(free=two, host=PUBLISHED["text_encoder"]).name == TEXT_ENCODER
    assert choose(free=two - 1).name == MODEL
    one = PUBLISHED["transformer"] + AT_1328["transformer"]
    assert choose(free=one, host=sum(PUBLISHED.values())).name == MODEL
    with pytest.raises(UnavailableError):
        choose(free=one - 1)
    with pytest.raises(UnavailableError):
        choose(free=one, host=sum(PUBLISHED.values()) - 1)


@pytest.mark.parametrize(("free", "host"), [(24 * GIB, 250 * GIB), (45 * GIB, 8 * GIB)])
def test_auto_that_fits_nowhere_names_the_numbers(free, host):
    with pytest.raises(UnavailableError) as caught:
        choose(free=free, host=host)
    text = str(caught.value)
    for words in ("X in bf16 does not fit", *OFFLOADS[1:], "the transformer alone is 40.9 GB"):
        assert words in text
    assert f"{free / GB:.1f} GB and {host / GB:.1f} GB are free" in text
    assert "smaller size" in text and text.count(". ") == 0 and text.endswith(".")


@pytest.mark.parametrize(
    ("requested", "least", "host"),
    [
        (NONE, sum(PUBLISHED.values()), 0),
        (TEXT_ENCODER, PUBLISHED["transformer"] + PUBLISHED["vae"], PUBLISHED["text_encoder"]),
        (MODEL, PUBLISHED["transformer"], sum(PUBLISHED.values())),
    ],
)
def test_a_way_that_is_named_is_refused_for_its_weights_alone(requested, least, host):
    assert choose(requested, free=least, host=host) == OffloadChoice(requested, "requested")
    with pytest.raises(UnavailableError, match=r"its weights alone and cuda:0 has .* GB free"):
        choose(requested, free=least - 1)
    if host:
        with pytest.raises(UnavailableError, match="the waiting parts and the host has"):
            choose(requested, free=least, host=host - 1)


@pytest.mark.parametrize("requested", OFFLOADS)
def test_the_processor_offloads_nothing_and_says_so(requested):
    choice = choose(requested, device="cpu", free=60 * GIB, host=0)
    assert choice.name == NONE and "everything runs on the processor" in choice.reason
    assert (f"{requested} was asked for" in choice.reason) == (requested in (TEXT_ENCODER, MODEL))
    with pytest.raises(UnavailableError, match="cpu has") as caught:
        choose(requested, device="cpu", free=50 * GIB)
    assert "--offload" not in str(caught.value)


def test_unknown_way():
    with pytest.raises(SettingError, match=r"offload 'layers' is unknown: choose auto, none, text"):
        choose("layers")


# --- moves, counted on a card that is not there ---


class Card:
    """Memory that parts take, and that torch goes on holding when they have left."""

    def __init__(self, total: int) -> None:
        self.total, self.held, self.clears = total, 0, 0
        self.on_card: list[Part] = []
        self.log: list[str] = []

    def used(self) -> int:
        return sum(weight_bytes(part) for part in self.on_card)

    def free(self) -> int:
        return self.total - self.used() - self.held

    def clear(self) -> None:
        self.clears += 1
        self.held = 0


class Part(torch.nn.Module):
    def __init__(self, name: str, size: int, card: Card) -> None:
        super().__init__()
        self.name, self.card = name, card
        self.register_buffer("values", torch.zeros(size, dtype=torch.uint8))

    def to(self, device: torch.device) -> "Part":
        there = self in self.card.on_card
        if device.type == "cuda" and not there:
            if weight_bytes(self) > self.card.total - self.card.used():
                raise torch.cuda.OutOfMemoryError("tried to allocate")
            self.card.held = max(0, self.card.held - weight_bytes(self))
            self.card.on_card.append(self)
        elif device.type == "cpu" and there:
            self.card.on_card.remove(self)
            self.card.held += weight_bytes(self)
        self.card.log.append(f"{self.name} {device.type}")
        return self


SIZES = {"text_encoder": 30, "transformer": 60, "vae": 5}


def placed(way: str, total: int) -> tuple[Placement, Card]:
    card = Card(total)
    parts = {name: Part(name, size, card) for name, size in SIZES.items()}
    if way != MODEL:
        card.on_card += [part for name, part in parts.items() if name != "text_encoder"]
    if way == NONE:
        card.on_card.append(parts["text_encoder"])
    choice = OffloadChoice(way, "requested")
    return Placement(parts, choice, "cuda:0", free=card.free, clear=card.clear), card


def take_turns(placement: Placement, card: Card, parts=SIZES, activations=10) -> list[str]:
    """Where each part computed, and what was on the card then."""
    seen = []
    for name in parts:
        with placement.turn(name, activations) as device:
            there = "+".join(sorted(part.name for part in card.on_card))
            seen.append(f"{name} on {device.type} beside {there}")
    return seen


def test_parts_take_turns():
    placement, card = placed(MODEL, 1000)
    assert take_turns(placement, card) == [
        "text_encoder on cuda beside text_encoder",
        "transformer on cuda beside transformer",
        "vae on cuda beside vae",
    ]
    assert placement.moves == [
        ("text_encoder", "card"),
        ("text_encoder", "host"),
        ("transformer", "card"),
        ("transformer", "host"),
        ("vae", "card"),
    ]
    take_turns(placement, card, ["vae", "vae"])
    assert len(placement.moves) == 5  # whose turn it is stays
    take_turns(placement, card, ["transformer", "vae"])  # the prompt is remembered
    assert placement.moves[5:] == [
        ("vae", "host"),
        ("transformer", "card"),
        ("transformer", "host"),
        ("vae", "card"),
    ]
    assert card.clears == 0


def test_cache_is_emptied_only_for_what_would_not_fit():
    placement, card = placed(MODEL, 100)
    take_turns(placement, card, ["text_encoder"])
    assert card.clears == 0
    take_turns(placement, card, ["transformer"])  # 70 free, and 70 needed
    assert card.clears == 0 and card.held == 0
    take_turns(placement, card, ["vae"])
    assert card.clears == 0
    take_turns(placement, card, ["transformer"], activations=40)
    assert card.clears == 1
    card.held = 5
    take_turns(placement, card, ["transformer"], activations=35)
    assert card.clears == 1
    take_turns(placement, card, ["transformer"], activations=36)
    assert card.clears == 2
    placement, card = placed(NONE, 100)
    card.held = 3
    take_turns(placement, card, activations=2)
    assert card.clears == 0
    take_turns(placement, card, ["vae"], activations=3)
    assert card.clears == 1


def test_text_encoder_is_a_guest():
    placement, card = placed(TEXT_ENCODER, 105)
    assert take_turns(placement, card) == [
        "text_encoder on cuda beside text_encoder+transformer+vae",
        "transformer on cuda beside transformer+vae",
        "vae on cuda beside transformer+vae",
    ]
    assert placement.moves == [("text_encoder", "card"), ("text_encoder", "host")]


@pytest.mark.parametrize(("way", "total"), [(TEXT_ENCODER, 104), (MODEL, 39)])
def test_text_encoder_without_room_computes_on_the_processor(way, total):
    placement, card = placed(way, total)
    [seen] = take_turns(placement, card, ["text_encoder"])
    assert seen.startswith("text_encoder on cpu") and placement.moves == []
    assert card.clears == 1  # what torch held was no room either


def test_nothing_moves_where_all_is_resident():
    placement, card = placed(NONE, 200)
    everything = "text_encoder+transformer+vae"
    assert take_turns(placement, card) == [f"{name} on cuda beside {everything}" for name in SIZES]
    assert placement.moves == [] and card.log == []


def test_part_that_does_not_fit_is_brought_back():
    placement, card = placed(MODEL, 50)
    with pytest.raises(torch.cuda.OutOfMemoryError), placement.turn("transformer", 0):
        raise AssertionError("it had no turn")
    assert card.log == ["transformer cpu"] and card.on_card == []
    assert take_turns(placement, card, ["vae"]) == ["vae on cuda beside vae"]


@pytest.mark.parametrize(("way", "stays"), [(TEXT_ENCODER, False), (MODEL, True)])
def test_error_in_a_turn(way, stays):
    placement, card = placed(way, 200)
    with pytest.raises(KeyError), placement.turn("text_encoder", 0):
        raise KeyError
    assert ("text_encoder" in [part.name for part in card.on_card]) is stays
    assert take_turns(placement, card, ["transformer"])[0].startswith("transformer on cuda")
    assert "text_encoder" not in [part.name for part in card.on_card]


# --- whole runs, with the processor for a card ---


@pytest.fixture(scope="module")
def folder() -> Path:
    return bundled_micro_folder()


@pytest.fixture(scope="module")
def resident(folder: Path) -> LoadedPipeline:
    return load_pipeline(folder, precision="fp32", device="cpu")


def offloaded(pipeline: LoadedPipeline, way: str, free: int = GIB * 100) -> LoadedPipeline:
    """The same parts, placed as on a card with so much memory."""
    parts = {name: getattr(pipeline, name) for name in SIZES}
    clears = []
    placement = Placement(
        parts,
        OffloadChoice(way, "requested"),
        "cpu",
        free=lambda: free,
        clear=lambda: clears.append(1),
    )
    return replace(pipeline, placement=placement, embeddings=type(pipeline.embeddings)())


SETTINGS = {"width": 256, "height": 256, "steps": 2, "seed": 3, "progress": False}
PROMPT = "a small red star at the top left"


@pytest.mark.parametrize("way", [TEXT_ENCODER, MODEL])
def test_images_are_those_of_the_resident_pipeline(resident, way):
    [expected] = generate(resident, PROMPT, **SETTINGS).images
    pipeline = offloaded(resident, way)
    [first] = generate(pipeline, PROMPT, **SETTINGS).images
    moves = list(pipeline.placement.moves)
    [again] = generate(pipeline, PROMPT, **SETTINGS).images
    for image in (first, again):
        assert np.array_equal(np.asarray(image), np.asarray(expected))
    encoder = [("text_encoder", "card"), ("text_encoder", "host")]
    turns = [("transformer", "card"), ("transformer", "host"), ("vae", "card")]
    if way == TEXT_ENCODER:
        assert pipeline.placement.moves == moves == encoder
    else:
        assert moves == encoder + turns
        assert pipeline.placement.moves == [*moves, ("vae", "host"), *turns]


def test_unchanged_prompt_is_not_encoded(resident, monkeypatch):
    pipeline = offloaded(resident, MODEL)
    calls = []
    run = pipeline.text_encoder.forward
    monkeypatch.setattr(
        pipeline.text_encoder, "forward", lambda **given: calls.append(1) or run(**given)
    )
    settings = Settings(prompt=PROMPT, width=64, height=64, steps=1, cfg=4.0)
    first = sample(pipeline, settings, progress=False)
    assert len(calls) == 2  # the negative prompt too
    assert torch.equal(sample(pipeline, settings, progress=False), first)
    sample(pipeline, replace(settings, batch=2, width=128, seed=1, cfg=1.0), progress=False)
    assert len(calls) == 2
    other = sample(pipeline, replace(settings, prompt=f"{PROMPT} "), progress=False)
    assert len(calls) == 3 and not torch.equal(other, first)
    pipeline.embeddings.clear()
    sample(pipeline, replace(settings, cfg=1.0), progress=False)
    assert len(calls) == 4  # without guidance there is no negative prompt
    assert torch.equal(sample(pipeline, settings, progress=False), first)
    assert len(calls) == 5


def test_optimized_transformer_runs_between_moves(folder, resident):
    pipeline = load_pipeline(folder, precision="fp32", device="cpu", optimized=True)
    settings = Settings(prompt=PROMPT, width=64, height=64, steps=3)
    expected = sample(pipeline, settings, progress=False)
    pipeline = offloaded(pipeline, MODEL)
    for _ in range(2):
        found = sample(pipeline, settings, progress=False)
        assert torch.equal(found, expected)
        with pipeline.placement.turn("vae", 0):
            pass
    assert "blocks: fused" in pipeline.optimized.report()
    assert ("transformer", "host") in pipeline.placement.moves


def test_full_card_is_one_sentence_that_names_the_way_out(resident, monkeypatch):
    def run_out(*_given):
        raise torch.cuda.OutOfMemoryError("tried to allocate")

    for way, named in ((TEXT_ENCODER, True), (MODEL, False)):
        pipeline = offloaded(resident, way)
        with pytest.raises(UnavailableError, match="256x256 in a batch of 1") as caught:
            generate(pipeline, PROMPT, **SETTINGS, callback=run_out)
        assert ("--offload model" in str(caught.value)) is named


# --- loading, with torch's meta device for a card ---


@pytest.fixture
def pretend(monkeypatch):
    """Makes the meta device a card with so many bytes free."""

    def set_free(free: int, host: int = 100 * GIB) -> None:
        monkeypatch.setattr(loading, "choose_device", lambda _requested: "meta")
        monkeypatch.setattr(loading, "available_bytes", lambda _device: free)
        monkeypatch.setattr(loading, "available_memory", lambda: host)

    return set_free


@pytest.mark.parametrize(
    ("way", "on_card"),
    [(TEXT_ENCODER, {"transformer", "vae"}), (MODEL, set())],
)
def test_parts_are_loaded_to_where_they_wait(folder, pretend, way, on_card):
    pretend(100 * GIB)
    pipeline = load_pipeline(folder, offload=way)
    assert (pipeline.placement.choice.name, pipeline.device) == (way, "meta")
    devices = {name: getattr(pipeline, name).device.type for name in SIZES}
    assert devices == {name: "meta" if name in on_card else "cpu" for name in SIZES}
    pipe = pipeline.to_diffusers()
    assert isinstance(pipe, PlacedPipeline) and pipe._execution_device == torch.device("meta")
    assert not pipeline.transformer.training and not pipeline.vae.training


def test_auto_looks_at_the_size_of_the_run(folder, pretend, caplog):
    pretend(GIB * 4 // 5)
    caplog.set_level("INFO", logger="qwen_l40s")
    small = Settings(prompt="x", width=256, height=256)
    pipeline = load_pipeline(folder, offload="auto", settings=small)
    assert pipeline.placement.choice.name == TEXT_ENCODER
    assert "offload text-encoder: auto: takes" in caplog.text
    large = replace(small, width=4096, height=4096)
    with pytest.raises(UnavailableError, match=r"micro in bf16 does not fit: none would take 21"):
        load_pipeline(folder, offload="auto", settings=large)


def test_default_is_all_resident(folder, pretend):
    pretend(1000)
    with pytest.raises(UnavailableError, match=r"for its weights alone and meta has 0 MB free"):
        load_pipeline(folder)
    pretend(10 * GIB, host=0)
    with pytest.raises(UnavailableError, match="for the waiting parts and the host has 0 MB"):
        load_pipeline(folder, offload=MODEL)
    with pytest.raises(SettingError, match="offload 'disk' is unknown"):
        load_pipeline(folder, offload="disk")


# --- a real card ---

on_card = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA card"),
]


@pytest.mark.parametrize("way", [pytest.param(way, marks=on_card) for way in (TEXT_ENCODER, MODEL)])
@pytest.mark.parametrize("optimized", [False, True])
def test_card_gives_what_the_resident_pipeline_gives(folder, way, optimized):
    settings = Settings(prompt=PROMPT, width=256, height=256, steps=4)

    def load(offload):
        return load_pipeline(
            folder, precision="fp32", device="cuda", optimized=optimized, offload=offload
        )

    expected = sample(load(NONE), settings, progress=False)
    pipeline = load(way)
    for _ in range(2):
        found = sample(pipeline, settings, progress=False)
        assert found.is_cuda
        assert (found - expected).norm() / expected.norm() < 1e-3
    assert pipeline.text_encoder.device == HOST and pipeline.transformer.device.type == "cuda"
    assert pipeline.vae.device.type == ("cpu" if way == MODEL else "cuda")
    assert generate(pipeline, PROMPT, **SETTINGS).images[0].size == (256, 256)
    assert pipeline.vae.device.type == "cuda"
    assert pipeline.transformer.device.type == ("cpu" if way == MODEL else "cuda")
    assert pipeline.placement.moves[:2] == [("text_encoder", "card"), ("text_encoder", "host")]


@pytest.mark.parametrize("way", [pytest.param(way, marks=on_card) for way in (NONE, MODEL)])
def test_card_holds_one_part_at_a_time(folder, way):
    pipeline = load_pipeline(folder, precision="fp32", device="cuda", offload=way)
    sizes = {name: weight_bytes(getattr(pipeline, name)) for name in SIZES}
    before = torch.cuda.memory_allocated()
    with pipeline.placement.turn("transformer", 0):
        now = torch.cuda.memory_allocated()
    grown = now - before if way == MODEL else 0
    assert abs(grown - (sizes["transformer"] if way == MODEL else 0)) < 2**21
    with pipeline.placement.turn("vae", 0):
        change = torch.cuda.memory_allocated() - now
    assert abs(change - (sizes["vae"] - sizes["transformer"] if way == MODEL else 0)) < 2**21
