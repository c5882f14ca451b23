"""What holds of every answer before a run, tried on 2,000 random requests."""

import json
import random
from dataclasses import replace

import pytest

from qwen_l40s.charts.text import Refusal, estimate_json, estimate_text
from qwen_l40s.errors import DoesNotFitError
from qwen_l40s.families.registry import find_member, members
from qwen_l40s.machine.store import known_cards
from qwen_l40s.planning.card_list import BUNDLED
from qwen_l40s.planning.estimate import DOES_NOT_FIT, FITS, RUNS_SLOWLY, estimate
from qwen_l40s.planning.phases import GRAPHS, KEPT_FREE_BYTES, least_weights, transformer_bytes
from qwen_l40s.planning.plan import LEAST_SIDE
from qwen_l40s.planning.request import (
    CFG_MODES,
    DROPPED,
    LORA_MODES,
    MOST_TOKENS,
    ON_PROCESSOR,
    TEXT_ENCODER_PLACEMENTS,
    TEXT_ENCODER_PRECISIONS,
    Loras,
    OtherModel,
    RunRequest,
)
from qwen_l40s.spec.formats import GIB, MIB, MULTIPLIED
from qwen_l40s.spec.transformer import OFF_CARD, ON_CARD, PLACES

CARDS = list(known_cards(BUNDLED).values())
ORDER = (DOES_NOT_FIT, RUNS_SLOWLY, FITS)
GROUPS, EACH = 20, 100
LARGE = 2**43
MORE = ("width", "height", "batch", "steps", "text_tokens", "references")


def random_request(dice, precision):
    member = find_member(dice.choice(list(members())))
    longest = dice.choice([320, 640, 1024, 1664, 2048, 3072])
    sides = [*range(LEAST_SIDE, longest + 1, member.size_step)]
    width, height, layers = dice.choice(sides), dice.choice(sides), dice.randint(0, 5)
    layers *= member.layers > 0
    # With room for what more work adds.
    most = MOST_TOKENS // (2 * (layers + 1) * (width // 16 + 8) * (height // 16 + 8))
    return RunRequest(
        family=member.name,
        precision=precision,
        width=width,
        height=height,
        batch=min(most, dice.choice([1, 1, 1, 2, 3, 8, 40])),
        steps=dice.choice([1, 4, 7, 8, 13, 20, 50, 130, 1000]),
        cfg=dice.choice(CFG_MODES),
        references=dice.randint(0, member.most_references),
        layers=layers,
        text_tokens=dice.choice([1, 30, 200, 900]),
        nag_tokens=60 * (dice.random() < 0.1),
        modulation=dice.choice(PLACES),
        text_encoder=dice.choice(TEXT_ENCODER_PRECISIONS),
        text_encoder_place=dice.choice(TEXT_ENCODER_PLACEMENTS),
        loras=Loras(dice.choice([0, 0, 2]), 32, dice.choice(LORA_MODES)),
        controlnet_bytes=3_500_000_000 * (dice.random() < 0.2),
        others=(OtherModel(dice.choice(list(members())), "int8"),) * (dice.random() < 0.1),
        tiles=dice.choice([0, 0, 0, 1, 4]),
    )


def random_card(dice, request):
    """Has any memory, or what one of the request's settings needs, give or take little."""
    precision = request.precision
    card = dice.choice([card for card in CARDS if card.facts().multiplies(precision)])
    if dice.random() < 0.5:
        sizes = [6, 8, 12, 16, 24, 32, 48, 80, 140]
        return with_memory(card, dice.choice(sizes) * GIB * dice.uniform(0.9, 1.1))
    options = estimate(request, with_memory(card, LARGE)).options
    room = dice.choice([-5 * MIB, -1, 0, 5 * MIB, 50 * MIB, 300 * MIB])
    return with_memory(card, dice.choice(options).peak_bytes + KEPT_FREE_BYTES + room)


def with_memory(card, count):
    return replace(card, memory_bytes=int(count))


def answer(request, card):
    """Gives an estimate, or None where it does not fit; checks what is said of it."""
    try:
        found = estimate(request, card)
    except DoesNotFitError as error:
        refusal = Refusal(card, request, str(error))
        assert refusal.as_dict()["verdict"] == DOES_NOT_FIT
        assert refusal.text.startswith("Does not fit")
        return None
    option, usable = found.option, card.memory_bytes - KEPT_FREE_BYTES
    assert found.fits == option.resident == all(it <= usable for it in option.needs.values())
    assert found.headroom_bytes == usable - max(option.needs.values())
    assert all(phase.card_bytes <= usable for phase in found.phases.values())
    sampling = found.phases["sampling"]
    held = transformer_bytes(option.request, option.setting)
    on_card = held.total - (held.modulation if option.setting.off_card else 0)
    assert sampling.weights + option.moved_bytes == on_card
    assert sampling.weights >= least_weights(option.request, on_card)
    assert found.fits or GRAPHS not in sampling.resident
    return found


def check_words(found):
    data = estimate_json(found)
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["verdict"] == found.verdict and data["fits"] == found.fits
    text = estimate_text(found)
    assert text.startswith(
        {FITS: ("Fits", "Tight"), RUNS_SLOWLY: "Fits with offloading"}[found.verdict]
    )


def verdict(found):
    return ORDER.index(DOES_NOT_FIT if found is None else found.verdict)


def check_better(better, worse):
    """Checks an answer to less work, or on a larger card, against another one's."""
    assert verdict(better) >= verdict(worse)
    if not (better and worse):
        return
    seconds = [found.image_seconds.times(found.request.batch) for found in (better, worse)]
    if worse.verdict == RUNS_SLOWLY and better.option.tiles > worse.option.tiles:
        # The decoder gets the room that rows took while sampling, and more weights left.
        seconds = [
            found.phases["text"].seconds + found.phases["sampling"].seconds
            for found in (better, worse)
        ]
    assert all(less <= more * (1 + 1e-9) for less, more in zip(*seconds, strict=True))


def check_peaks(dice, request, larger, card):
    """Nothing is left to choose, so that a peak compares with another one."""
    settled = {
        "modulation": dice.choice([ON_CARD, OFF_CARD]),
        "text_encoder_place": dice.choice([ON_CARD, DROPPED, ON_PROCESSOR]),
        "tiles": 1,
    }
    less, more = (
        estimate(replace(it, **settled), with_memory(card, LARGE)) for it in (request, larger)
    )
    assert less.option.peak_bytes <= more.option.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("group", range(GROUPS))
def test_more_work_is_never_less_and_more_memory_never_worse(group):
    dice = random.Random(group)
    for _ in range(EACH):
        request = random_request(dice, dice.choice(MULTIPLIED))
        card = random_card(dice, request)
        found = answer(request, card)
        if found is not None:
            check_words(found)
        for name in MORE:
            if name == "references" and request.references == request.member.most_references:
                continue
            by = request.member.size_step if name in ("width", "height") else 1
            larger = replace(request, **{name: getattr(request, name) + by})
            check_better(found, answer(larger, card))
            if dice.random() < 0.3:
                check_peaks(dice, request, larger, card)
        more = with_memory(card, card.memory_bytes * dice.choice([1.0001, 1.01, 1.1, 1.4]))
        check_better(answer(request, more), found)


@pytest.mark.parametrize("more", [{"width": 768, "height": 768}, {"batch": 2}, {"steps": 50}])
@pytest.mark.parametrize("name", [card.name for card in CARDS])
def test_what_fits_does_so_with_less_work(name, more):
    """512x512 replayed CUDA graphs, for which no 16 GB had room, and 768x768 none."""
    card = next(card for card in CARDS if card.name == name)
    request = RunRequest("qwen-image-edit-2511", "auto", 512, 512, references=1)
    assert verdict(answer(request, card)) >= verdict(answer(replace(request, **more), card))


def test_a_model_that_is_to_stay_on_the_card_is_refused_where_an_encoder_then_has_no_room():
    card = with_memory(CARDS[0], 31.4 * GIB)
    request = RunRequest(precision="int8", text_encoder_place=ON_CARD)
    beside = replace(request, others=(OtherModel("qwen-image", "bf16"),))
    assert answer(request, card) is not None and answer(beside, card) is None
