"""What holds of every estimate: random requests on random cards, and the choices of a plan."""

import itertools
import json
import math
import re
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qwen_l40s.charts.figures import duration, tenths
from qwen_l40s.charts.text import (
    Refusal,
    estimate_json,
    estimate_text,
    notes_of,
    reasons,
    remedy,
    summary_lines,
)
from qwen_l40s.errors import CheckpointError, DoesNotFitError, UnavailableError
from qwen_l40s.families.qwen_image import FULL_SIZE
from qwen_l40s.families.registry import find_member, members
from qwen_l40s.machine.store import known_cards
from qwen_l40s.planning.bytes import (
    TransformerBytes,
    buffer_bytes,
    encoding_bytes,
    graph_bytes,
    lora_bytes,
    step_bytes,
    table_bytes,
    weight_bytes,
)
from qwen_l40s.planning.card_list import BUNDLED
from qwen_l40s.planning.cards import card_by_driver, find_card
from qwen_l40s.planning.estimate import (
    DOES_NOT_FIT,
    FITS,
    RUNS_SLOWLY,
    TIGHT_BYTES,
    estimate,
    run_times,
)
from qwen_l40s.planning.files import host_memory
from qwen_l40s.planning.phases import (
    GRAPHS,
    KEPT_FREE_BYTES,
    PHASES,
    least_weights,
    phases,
    transformer_bytes,
)
from qwen_l40s.planning.plan import (
    LEAST_SIDE,
    PlanOption,
    auto_precision,
    encoder_precisions,
    plan,
    sized,
)
from qwen_l40s.planning.rates import attending, hiding, rates_of
from qwen_l40s.planning.request import (
    CFG_MODES,
    DROPPED,
    LORA_MODES,
    MOST_TOKENS,
    ON_PROCESSOR,
    TEXT_ENCODER_PLACEMENTS,
    TEXT_ENCODER_PRECISIONS,
    TEXT_PLACES,
    Loras,
    OtherModel,
    Parts,
    RunRequest,
    Setting,
    repaid_by,
)
from qwen_l40s.planning.times import (
    STOCK_FORMATS,
    forward_seconds,
    forward_times,
    sampling_seconds,
)
from qwen_l40s.planning.vae import decode_plan
from qwen_l40s.spec.formats import (
    BYTES_PER_WEIGHT,
    GIB,
    MIB,
    MULTIPLIED,
    QUANTIZED,
    CardFacts,
    format_gib,
)
from qwen_l40s.spec.sizes import MOST_TABLE_BYTES
from qwen_l40s.spec.transformer import OFF_CARD, ON_CARD, PLACES

CARDS = known_cards(BUNDLED)
L40S = CARDS["L40S"]
USUAL = RunRequest()
ORDER = (DOES_NOT_FIT, RUNS_SLOWLY, FITS)
LARGE = 2**43
# The same few each time; `make test-all` draws others, and many.
THOROUGH = settings().max_examples > 100
FEW = settings(max_examples=200 if THOROUGH else 30, derandomize=not THOROUGH)


def of_size(card, gib):
    return replace(card, memory_bytes=int(gib * GIB))


@st.composite
def requests(draw):
    """Any request that every card computes, with room for more of anything."""
    member = find_member(draw(st.sampled_from(list(members()))))
    longest = draw(st.sampled_from([320, 640, 1024, 1664, 2048, 3072]))
    sides = st.sampled_from(range(LEAST_SIDE, longest + 1, member.size_step))
    width, height = draw(sides), draw(sides)
    layers = draw(st.integers(0, 5)) if member.layers else 0
    most = MOST_TOKENS // (2 * (layers + 1) * (width // 16 + 8) * (height // 16 + 8))
    other = OtherModel(draw(st.sampled_from(list(members()))), "int8")
    return RunRequest(
        family=member.name,
        precision=draw(st.sampled_from(["auto", *MULTIPLIED])),
        width=width,
        height=height,
        batch=min(most, draw(st.sampled_from([1, 1, 1, 2, 3, 8, 40]))),
        steps=draw(st.sampled_from([1, 4, 7, 8, 13, 20, 50, 130, 1000])),
        cfg=draw(st.sampled_from(CFG_MODES)),
        references=draw(st.integers(0, member.most_references)),
        layers=layers,
        text_tokens=draw(st.sampled_from([1, 30, 200, 900])),
        nag_tokens=draw(st.sampled_from([0, 0, 0, 60])),
        modulation=draw(st.sampled_from(PLACES)),
        text_encoder=draw(st.sampled_from(TEXT_ENCODER_PRECISIONS)),
        text_encoder_place=draw(st.sampled_from(TEXT_ENCODER_PLACEMENTS)),
        loras=Loras(draw(st.sampled_from([0, 0, 2])), 32, draw(st.sampled_from(LORA_MODES))),
        controlnet_bytes=draw(st.sampled_from([0, 0, 0, 3_500_000_000])),
        others=draw(st.sampled_from([(), (), (), (other,)])),
        tiles=draw(st.sampled_from([0, 0, 0, 1, 4])),
    )


@st.composite
def cases(draw):
    """A request, and a card with any memory, or with what one of its settings needs, about."""
    request = draw(requests())
    able = [card for card in CARDS.values() if card.facts().multiplies(request.precision)]
    if request.precision == "auto":
        able = list(CARDS.values())
    card = draw(st.sampled_from(able))
    if draw(st.booleans()):
        sizes = st.sampled_from([6, 8, 12, 16, 24, 32, 48, 80, 140])
        return request, of_size(card, draw(sizes) * draw(st.floats(0.9, 1.1)))
    options = estimate(request, replace(card, memory_bytes=LARGE)).options
    room = draw(st.sampled_from([-5 * MIB, -1, 0, 5 * MIB, 50 * MIB, 300 * MIB]))
    needed = draw(st.sampled_from(options)).peak_bytes + KEPT_FREE_BYTES
    return request, replace(card, memory_bytes=needed + room)


def answer(request, card, **more):
    """An estimate; None where it does not fit."""
    try:
        return estimate(request, card, **more)
    except DoesNotFitError as error:
        refusal = Refusal(card, request, str(error))
        assert refusal.as_dict()["verdict"] == DOES_NOT_FIT
        assert refusal.text.startswith("Does not fit")
        return None


def rank(found):
    return ORDER.index(DOES_NOT_FIT if found is None else found.verdict)


def kept_of(request):
    """What of a request is named, by the names of a setting."""
    names = "precision", "modulation", "text_encoder", "text_encoder_place"
    return {name: getattr(request, name) for name in names if getattr(request, name) != "auto"}


# --- every answer


@FEW
@given(cases())
def test_verdict_phases_and_plan_agree(case):
    request, card = case
    if (found := answer(*case)) is None:
        return
    option, usable = found.option, card.memory_bytes - KEPT_FREE_BYTES
    assert found.fits == option.resident == all(it <= usable for it in option.needs.values())
    assert found.headroom_bytes == usable - max(option.needs.values()) == option.headroom_bytes
    assert option.peak_bytes == option.needs[option.peak_phase]
    assert tuple(found.phases) == PHASES
    for name, phase in found.phases.items():
        parts = [phase.weights, phase.activations, phase.workspace, phase.context]
        assert phase.name == name and phase.card_bytes <= usable
        assert all(isinstance(it, int) and it >= 0 for it in parts) and all(phase.resident.values())
        assert phase.peak_bytes == sum(parts[:3])
        assert phase.card_bytes == sum(parts) + sum(phase.resident.values())
        assert phase.needed_bytes == phase.card_bytes - phase.resident.get(GRAPHS, 0)
    sampling = found.phases["sampling"]
    held = transformer_bytes(option.request, option.setting)
    on_card = held.total - (held.modulation if option.setting.off_card else 0)
    assert sampling.weights + option.moved_bytes == on_card
    assert sampling.weights >= least_weights(option.request, on_card)
    assert found.fits or GRAPHS not in sampling.resident
    table = sampling.resident.get("modulation table", 0)
    assert table == table_bytes(option.request) <= MOST_TABLE_BYTES
    place = option.setting.text_encoder_place
    assert ("text encoder" in sampling.resident) <= (place == ON_CARD)
    # The plan: what is named comes first, and of what was not asked for only what stays.
    assert kept_of(request).items() <= vars(option.setting).items()
    assert (option.tiles == 1) == (request.tiles == 1) or not request.tiles
    assert option.tiles >= request.tiles
    assert len({it.setting for it in found.options}) == len(found.options)
    marked = [it.recommended for it in found.options]
    assert sum(marked) == 1
    assert marked[0] or (found.options[marked.index(True)].resident and not option.resident)
    for each in found.options:
        why = reasons(each)
        assert each.setting.precision in "; ".join(why.values())
        assert card.name in why["room"] and re.search(r"\d GiB", why["room"])
        assert all("\n" not in it and "None" not in it for it in why.values())
        assert (" moves to the GPU in every " in why["room"]) == (each.moved_bytes > 0)
    if found.tight and (safer := found.safer):
        assert safer.resident and safer.headroom_bytes >= TIGHT_BYTES > found.headroom_bytes >= 0


def found_by_chance(family, card, memory_bytes, **asked):
    """Gives a request, and a card of such memory, for which an estimate or a test was wrong."""
    return RunRequest(family, **asked), replace(CARDS[card], memory_bytes=memory_bytes)


@FEW
@given(cases())
# Both ends of a text phase differed by a rounding, in the other order.
@example(
    found_by_chance(
        "qwen-image-2.1",
        "H200",
        11_020_000_002,
        width=416,
        height=384,
        steps=1,
        cfg="off",
        text_encoder_place=ON_CARD,
    )
)
def test_times_add_up(case):
    if (found := answer(*case, usd_per_hour=1.8)) is None:
        return
    request, option = found.option.request, found.option
    seconds = {name: phase.seconds for name, phase in found.phases.items()}
    slow, fast, basis = rates_of(found.card)
    assert (basis.kind == "measured") == (slow == fast) and "None" not in basis.text
    # Where a schedule's table does not hold all timesteps, the first are computed for each image.
    refilled = table_bytes(request) < request.steps * table_bytes(replace(request, steps=1))
    for end in (0, 1):
        warm = sum(seconds[name][end] for name in ("text", "sampling", "decode"))
        if refilled:
            warm += seconds["tables"][end]
        assert found.image_seconds[end] == pytest.approx(warm / request.batch)
        first = warm + seconds["load"][end] + (0 if refilled else seconds["tables"][end])
        assert found.first_image_seconds[end] == pytest.approx(first)
        assert found.times.cold_start[end] > seconds["load"][end]
        step = seconds["sampling"][end] / request.computed_steps
        assert found.step_seconds[end] == pytest.approx(step)
        assert found.usd_per_image[end] == pytest.approx(found.image_seconds[end] * 1.8 / 3600)
        # Nothing crosses the link faster than it can.
        assert step * found.card.pcie_bytes_per_second >= option.moved_bytes
    for ends in (*seconds.values(), found.image_seconds, found.times.cold_start):
        assert 0 <= ends.low <= ends.high < math.inf
    # A card that was calibrated has one time, and a faster one is never slower.
    double = replace(slow, bandwidth=2 * slow.bandwidth)
    same, better = (answer(*case, calibration=rates).image_seconds for rates in (slow, double))
    assert all(less <= more * (1 + 1e-9) for less, more in zip(better, same, strict=True))


FIGURE = r"-?[\d.]+"


@FEW
@given(cases(), st.none() | st.integers(2, 64))
def test_text_and_json_agree_and_json_survives_a_round_trip(case, ram):
    if (found := answer(*case, ram_bytes=ram and ram * GIB)) is None:
        return
    data, text = estimate_json(found), estimate_text(found)
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    unlisted = card_by_driver(CardFacts("X", LARGE, (8, 9)), CARDS)
    assert data.keys() == estimate_json(estimate(USUAL, unlisted)).keys()
    first, heading, times, *_ = text.splitlines()
    assert summary_lines(found)[:3] == [first, heading, times]
    assert data["verdict"] == found.verdict and data["fits"] == (found.verdict == FITS)
    starts = {FITS: "Tight" if data["tight"] else "Fits:", RUNS_SLOWLY: "Fits with offloading"}
    assert first.startswith(starts.get(data["verdict"], "Not enough system RAM"))
    assert (
        f"{tenths(found.host_ram_bytes)}{f' of {ram}.0' if ram else ''} GiB of system RAM" in first
    )
    assert (data["verdict"] == DOES_NOT_FIT) == bool(ram and data["host_ram_gib"] > ram)
    if data["verdict"] != DOES_NOT_FIT:
        most = max(data["phases"][name]["card_gib"] for name in PHASES)
        peak, usable = map(
            float, re.search(rf"({FIGURE}) of ({FIGURE}) GiB of VRAM", first).groups()
        )
        graphs = max(it["parts"]["resident"].get(GRAPHS, 0) for it in data["phases"].values())
        assert most - graphs - 0.06 <= peak <= most + 0.06 <= usable + 0.12
        if data["fits"]:
            assert abs(usable - peak - float(re.search(FIGURE, first)[0])) < 1e-6
        elif streamed := data["offloaded_gib_per_step"]:
            count = found.request.passes * found.option.moved_bytes
            assert f": {format_gib(count)} stream from system RAM" in first
            moved = data["plan"][0]["moved_gib"]
            assert streamed == pytest.approx(found.request.passes * moved, abs=0.002)
    chosen = data["settings"]
    assert f"{chosen['width']}x{chosen['height']}, batch {chosen['batch']}" in heading
    assert all(it in heading for it in (data["card"], data["family"], chosen["precision"]))
    assert duration(found.image_seconds) in times and duration(found.step_seconds) in times
    assert ("bound by the CPU" in times) == (data["step_bound_by"] == "processor")
    for name, ends in data["ranges"].items():
        assert ends[0] <= ends[1] and data[name] == pytest.approx(math.prod(ends) ** 0.5, rel=2e-3)
    plain = " ".join(text.split())
    for (option, _), each in zip(found.plan, data["plan"], strict=True):
        assert each["precision"] in plain and f"{tenths(option.peak_bytes)} GiB" in plain
        assert each["headroom_gib"] >= 0 if each["resident"] else each["headroom_gib"] <= 0
    assert data["headroom_gib"] == data["plan"][0]["headroom_gib"]
    assert all(" ".join(note.split()) in plain for note in data["notes"])
    assert all(note.endswith(".") for note in data["notes"])
    multiplied = found.card.facts().multiplies
    rows = {name for name, how in STOCK_FORMATS.items() if multiplied(how.products)}
    additions = chosen["loras"]["count"] or chosen["controlnet_gib"] or found.request.member.layers
    assert data["stock"].keys() == (set() if additions else rows)
    slower = {name for name, it in data["stock"].items() if it["times_as_fast"][0] < 1}
    assert {*data["stock_as_fast"]} == slower and all(name in plain for name in slower)
    short = found.short_of_ram
    assert (
        all(count <= ram * GIB for count in found.with_less_ram.values())
        if short
        else (not found.with_less_ram)
    )
    assert all(what in remedy(found) for what in found.with_less_ram)
    assert (data["template"] is None) == (not found.request.member.templates)
    assert all(name.removesuffix(".safetensors") in plain for name in data["downloads_gib"])


# --- more is never less


def in_setting(found, setting):
    """Answers the same request, on the same card, in a setting that another answer's plan took."""
    facts, rates = found.card.facts(), rates_of(found.card)[:2]
    option = PlanOption(facts, sized(found.request, setting.precision), setting)
    rates = attending(found.card, setting.attention, *hiding(*rates))
    return replace(found, options=(option,), times=run_times(option, *rates))


def way(found):
    """Gives the place of a setting in the order in which a plan tries them."""
    setting = found.option.setting
    encoder = encoder_precisions(found.request).index(setting.text_encoder)
    return TEXT_PLACES.index(setting.text_encoder_place), encoder, setting.off_card


def check_better(better, worse):
    """Checks an answer to less work, or on a larger card, against another one's.

    In one setting nothing gets worse. A plan with more room takes an earlier setting, which may
    take longer: a more accurate encoder has more bytes, and weights that stay on the card leave
    less room to CUDA graphs and to the decoder's tiles.
    """
    assert better or not worse
    if not (better and worse):
        return
    if better.option.setting.precision == worse.option.setting.precision:
        assert rank(better) >= rank(worse)
        assert rank(better) > rank(worse) or way(better) <= way(worse)
    if replace(better.option.setting, resident=worse.fits) != worse.option.setting:
        better = in_setting(better, worse.option.setting)
        assert rank(better) >= rank(worse)
    seconds = [found.image_seconds.times(found.request.batch) for found in (better, worse)]
    if worse.verdict == RUNS_SLOWLY and better.option.tiles > worse.option.tiles:
        # The decoder gets the room that rows took while sampling, and more weights left.
        seconds = [
            found.phases["text"].seconds + found.phases["sampling"].seconds
            for found in (better, worse)
        ]
    assert all(less <= more * (1 + 1e-9) for less, more in zip(*seconds, strict=True))


def more_of(request, name):
    if name == "rank":
        return replace(request, loras=replace(request.loras, rank=request.loras.rank + 8))
    if name == "loras":
        return replace(request, loras=replace(request.loras, count=request.loras.count + 1))
    by = request.member.size_step if name in ("width", "height") else 1
    return replace(request, **{name: getattr(request, name) + by})


def seams(found):
    """Counts (tiles of a plan, latent pixels along their seams)."""
    (rows, columns), (height, width) = found.tiles, found.latent
    return found.count, (rows - 1) * width + (columns - 1) * height


SETTLED = st.builds(
    Setting,
    precision=st.sampled_from(MULTIPLIED),
    modulation=st.sampled_from([ON_CARD, OFF_CARD]),
    text_encoder=st.sampled_from(MULTIPLIED),
    text_encoder_place=st.sampled_from(TEXT_PLACES),
    weight_only=st.booleans(),
)


WORK = "width", "height", "batch", "steps", "text_tokens", "rank", "loras", "references", "layers"


@FEW
@given(cases(), SETTLED, st.lists(st.sampled_from(WORK), min_size=4, max_size=4, unique=True))
# At twice as wide as high, two by two tiles became four side by side.
@example(
    found_by_chance("qwen-image", "H200", LARGE, width=1616, height=816, tiles=4),
    Setting(),
    ["width"],
)
def test_more_work_is_never_less(case, setting, names):
    request, card = case
    found = answer(*case)
    limits = {"references": request.member.most_references, "layers": 6 * request.member.layers}
    for name in names:
        if name in limits and getattr(request, name) >= limits[name]:
            continue
        larger = more_of(request, name)
        check_better(found, answer(larger, card))
        # Rows of the buffers are rounded up, and those of few tokens beside a cached prefix wide.
        exact = 0.8 if request.step_tokens.prefix else 1
        for count in (encoding_bytes, table_bytes):
            assert count(larger) >= count(request), name
        for count in (lora_bytes, buffer_bytes):
            assert count(larger, setting) >= exact * count(request, setting), name
        memory = [sum(host_memory(it, setting).values()) for it in (request, larger)]
        assert memory[0] <= memory[1], name
        pairs = [*zip(step_bytes(request, setting), step_bytes(larger, setting), strict=True)]
        less, most = phases(request, setting), phases(larger, setting)
        tiles = [decode_plan(it, None) for it in (request, larger)]
        assert seams(tiles[0]) <= seams(tiles[1]), name
        for phase in PHASES:
            # Another grid of as many tiles has shorter seams, and may hold more.
            if phase != "decode" or tiles[0].tiles == tiles[1].tiles:
                pairs.append((less[phase].activations, most[phase].activations))
            pairs.append((less[phase].weights, most[phase].weights))
        assert all(exact * few <= many for few, many in pairs), name


@FEW
@given(cases(), st.sampled_from([1.0001, 1.01, 1.1, 1.4, 3]))
# A text encoder in 8 bits instead of 4 took longer to come back.
@example(
    found_by_chance(
        "qwen-image-2.1", "L40S", 5_798_205_849, width=1312, height=1312, modulation=ON_CARD
    ),
    3,
)
# The modulation stayed instead of CUDA graphs and larger tiles.
@example(
    found_by_chance(
        "qwen-image-edit",
        "RTX 6000 Ada",
        25_761_921_412,
        precision="int8",
        width=416,
        height=2912,
        cfg="off",
        text_tokens=1,
        text_encoder_place=ON_PROCESSOR,
    ),
    1.1438,
)
# A large batch ran in bf16 alone.
@example(
    found_by_chance(
        "qwen-image-2.1", "RTX 4090", 17_729_424_961, width=1344, height=1344, batch=16
    ),
    1.0001,
)
def test_more_memory_is_never_worse(case, times):
    request, card = case
    larger = replace(card, memory_bytes=int(card.memory_bytes * times))
    less, more = answer(*case), answer(request, larger)
    check_better(more, less)
    first = request.precision if request.precision != "auto" else auto_precision(card.facts())
    for found, there in ((less, card), (more, larger)):
        if found and found.option.setting.precision != first:
            # Of many rows int8 holds more than bf16 beside its smaller weights.
            assert request.precision == "auto"
            assert answer(replace(request, precision=first), there) is None
    if less:
        ram = less.host_ram_bytes
        # Too little system RAM takes another file, which may be smaller than what more RAM makes.
        found = [answer(*case, ram_bytes=ram + it) for it in (-1, 0, GIB)]
        for few, many in itertools.pairwise(found):
            if few is None or few.verdict == DOES_NOT_FIT:
                continue
            assert many and many.verdict != DOES_NOT_FIT
            if few.option.setting.precision == many.option.setting.precision:
                assert rank(few) <= rank(many)


@FEW
@given(requests(), SETTLED, st.sampled_from(list(CARDS)))
# The CPU bounds the only step.
@example(RunRequest(width=256, height=256, steps=1, text_tokens=1), Setting(), "H100 SXM")
def test_a_faster_card_and_fewer_passes_are_never_slower(request, setting, name):
    precision, (slow, fast, _) = setting.precision, rates_of(CARDS[name])
    seconds = [forward_seconds(request, precision, rates) for rates in (fast, slow)]
    assert seconds[0] <= seconds[1] * (1 + 1e-9)
    for field in ("attention", "bandwidth", "convolution", "encoder", "pcie"):
        half = replace(slow, **{field: getattr(slow, field) / 2})
        assert seconds[1] <= forward_seconds(request, precision, half) <= 2.01 * seconds[1]
    one, two = (replace(request, cfg=it, nag_tokens=0) for it in ("off", "two passes"))
    once, twice = (sampling_seconds(it, precision, slow) for it in (one, two))
    assert twice == pytest.approx(2 * once)
    guided = replace(one, nag_tokens=60)
    # The CPU launches as much; where it bounds a step, only the card has more to do.
    assert once <= sampling_seconds(guided, precision, slow) < twice * 1.2
    less, more = (forward_times(it, precision, slow) for it in (one, guided))
    assert less.card < more.card and less.processor <= more.processor
    assert (repaid_by(request, setting) > 0) == (graph_bytes(request, setting) > 0)


# --- choices


def short(option):
    setting = option.setting
    place = {ON_CARD: "text", DROPPED: "drop", ON_PROCESSOR: "cpu"}
    words = setting.precision, setting.modulation.split()[0], setting.text_encoder
    words = *words, place.get(setting.text_encoder_place, "stream")
    return " ".join(words if option.resident else (*words, "moved"))


NEWEST = RunRequest(family="qwen-image-2.1", width=None, height=None)


@pytest.mark.parametrize(
    ("asked", "name", "expected"),
    [
        (USUAL, "H200", ["int8 on bf16 text", "bf16 on bf16 text"]),
        (USUAL, "L40S", ["int8 on bf16 text", "bf16 off bf16 text"]),
        (USUAL, "5090", ["int8 off bf16 text", "bf16 off fp8 drop"]),
        (USUAL, "4090", ["int8 off fp8 drop", "bf16 off fp8 drop moved"]),
        (USUAL, "RTX 4060", ["int8 off fp8 stream moved", "bf16 off fp8 stream moved"]),
        (USUAL, "T4", ["bf16 off fp8 drop moved"]),
        (NEWEST, "4090", ["int8 on int8 text", "bf16 on int8 drop"]),
        (NEWEST, "RTX 4060", ["int8 on w4a8 stream moved", "bf16 on w4a8 stream moved"]),
        (
            replace(USUAL, precision="bf16"),
            "4090",
            ["bf16 off fp8 drop moved", "int8 off fp8 drop"],
        ),
        (
            replace(USUAL, modulation=ON_CARD),
            "RTX 3090",
            ["int8 on fp8 drop moved", "bf16 on fp8 drop moved", "int8 off fp8 drop"],
        ),
    ],
)
def test_what_a_plan_lists(asked, name, expected):
    assert [short(option) for option in plan(find_card(name, CARDS).facts(), asked)] == expected


@pytest.mark.parametrize("request_", [USUAL, NEWEST], ids=["1.x", "2.1"])
def test_more_memory_walks_through_the_places_in_order(request_):
    """Streamed, then dropped, then on the card; the modulation's weights last."""
    seen = [plan(CardFacts("card", gib * GIB // 2, (8, 9)), request_)[0] for gib in range(12, 160)]
    places = ["stream", "drop", "text"]
    ranks = [(it.resident, places.index(short(it).split()[3])) for it in seen]
    assert ranks == sorted(ranks)
    moved = [it.moved_bytes for it in seen]
    assert moved == sorted(moved, reverse=True) and moved[0] > 0 == moved[-1]
    assert short(seen[-1]) == "int8 on bf16 text"
    resident = [it for it in seen if it.resident]
    for place in ("drop", "text"):
        modulation = [it.setting.off_card for it in resident if place in short(it)]
        assert modulation == sorted(modulation, reverse=True)
    tiles = [it.tiles for it in resident if it.setting == resident[0].setting]
    assert tiles == sorted(tiles, reverse=True)


NAMED = {
    "precision": MULTIPLIED,
    "modulation": (ON_CARD, OFF_CARD),
    "text_encoder": TEXT_ENCODER_PRECISIONS[1:],
    "text_encoder_place": TEXT_ENCODER_PLACEMENTS[1:],
}


@pytest.mark.parametrize("name", ["H200", "L40S", "4090", "RTX 4060"])
def test_every_named_setting_comes_first_and_none_is_faster_than_auto(name):
    card = find_card(name, CARDS)
    auto = estimate(USUAL, card)
    for field, choices in NAMED.items():
        for choice in choices:
            found = estimate(replace(USUAL, **{field: choice}), card)
            assert getattr(found.option.setting, field) == choice
            assert choice != ON_CARD or "as requested" in "; ".join(reasons(found.option).values())
            same = found.option.setting.precision == auto.option.setting.precision
            if same and found.option.setting.text_encoder == auto.option.setting.text_encoder:
                assert (
                    found.image_seconds.high >= auto.image_seconds.high * 0.95
                )  # with a GiB to spare


def test_fast_attention_is_in_8_bits_where_that_is_faster():
    kitchen = "kitchen_int8"
    for name, form in (
        ("L40S", kitchen),
        ("RTX 3090", kitchen),
        ("H200", "exact"),
        ("T4", "exact"),
    ):
        (option, *_) = plan(CARDS[name].facts(), RunRequest(attention="fast"))
        assert option.setting.attention == form


@pytest.mark.parametrize("name", CARDS)
def test_every_listed_card_answers_for_every_model(name):
    """With weights that move where they do not stay, and never a refusal."""
    card = CARDS[name]
    for member, precision in itertools.product(members().values(), ("auto", *MULTIPLIED)):
        asked = RunRequest(member.name, precision, None, None, references=member.most_references)
        asked = replace(asked, references=min(1, asked.references))
        if precision != "auto" and not card.facts().multiplies(precision):
            with pytest.raises(UnavailableError, match=f"precision {precision} "):
                estimate(asked, card)
            continue
        found = estimate(asked, card)
        assert 0 < found.image_seconds.low <= found.image_seconds.high < 24 * 3600
        assert not (found.fits and found.option.moved_bytes)
        small = replace(asked, width=512, height=512)
        assert rank(estimate(small, card)) >= rank(found)


@pytest.mark.parametrize("name", ["L40S", "RTX 3090", "T4"])
@pytest.mark.parametrize("stored", list(BYTES_PER_WEIGHT))
def test_a_file_stays_as_it_is_where_its_products_run(name, stored):
    card = CARDS[name].facts()
    held = {"bf16": TransformerBytes(weight_bytes(FULL_SIZE, "fp32").total, 0)}
    kept = plan(card, USUAL, stored, as_stored=True, known_sizes=held if stored == "fp32" else {})
    size = weight_bytes(FULL_SIZE, stored).total
    assert kept[0].weights_bytes in (size, size - weight_bytes(FULL_SIZE, stored).modulation)
    options = plan(card, USUAL, stored)
    settings = [option.setting for option in options]
    if stored not in QUANTIZED:
        assert settings == [option.setting for option in plan(card, USUAL)]
        rounded = [it for it in options if it.setting.precision == "bf16"]
        words = ["rounded to bf16" in "; ".join(reasons(it).values()) for it in rounded]
        assert words == [stored != "bf16"] * len(words)
    elif card.runs(stored) or auto_precision(card) != "int8":
        assert {setting.precision for setting in settings} == {stored}
        assert all(setting.weight_only != card.runs(stored) for setting in settings)
    else:
        assert {setting.precision for setting in settings} == {"int8"}
    cast = replace(USUAL, parts=Parts(cast=stored == "fp8"))
    if stored in QUANTIZED and auto_precision(card) == "int8":
        assert plan(card, cast, stored)[0].setting.precision == "int8"


def test_a_file_in_another_precision_is_refused():
    with pytest.raises(CheckpointError, match="nf4"):
        plan(L40S.facts(), USUAL, "nf4")


def test_true_sizes_stand_above_published_ones():
    parts = Parts(None, 30 * GIB, 10 * GIB, text_encoder_bytes=5 * GIB, vae_bytes=GIB)
    found = phases(RunRequest(parts=parts), Setting(modulation=OFF_CARD))
    assert found["sampling"].weights == 20 * GIB
    assert found["text"].weights == found["sampling"].resident["text encoder"] == 5 * GIB
    assert found["decode"].weights == GIB
    smaller = RunRequest(parts=Parts(transformer_bytes=5 * GIB))  # less than its modulation
    assert phases(smaller, Setting(modulation=OFF_CARD))["sampling"].weights == 0
    # They are of what is stored, or else of the precision that is named; `known_sizes` is above.
    int8, bf16 = plan(L40S.facts(), RunRequest(parts=parts), "bf16")
    assert bf16.weights_bytes == (20 if bf16.setting.off_card else 30) * GIB
    assert int8.weights_bytes == weight_bytes(FULL_SIZE, "int8").total
    named = plan(L40S.facts(), RunRequest(precision="int8", parts=parts))[0]
    assert named.weights_bytes in (30 * GIB, 20 * GIB)
    held = {"int8": TransformerBytes(12 * GIB, 2 * GIB)}
    small = CardFacts("16 GB", 15_937 * MIB, (8, 9))
    assert (
        plan(small, RunRequest(parts=parts), "bf16", known_sizes=held)[0].weights_bytes == 10 * GIB
    )


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (RunRequest(controlnet_bytes=3 * 10**9), ["ControlNet"]),
        (RunRequest(loras=Loras(2, 64, "bypass")), ["LoRAs"]),
        (
            RunRequest("qwen-image-layered", layers=8, references=1, controlnet_bytes=10**10),
            ["ControlNet", "references", "layers"],
        ),
        (replace(USUAL, precision="int8", text_encoder_place=ON_CARD), []),
    ],
)
def test_a_refusal_names_what_is_in_the_request(asked, named):
    with pytest.raises(DoesNotFitError) as caught:
        plan(CardFacts("card", GIB, (8, 9)), asked)
    fact, remedies = str(caught.value).split(": ")
    for what in ("ControlNet", "LoRAs", "references", "layers", "other model"):
        assert (what in fact) == (what in remedies) == (what in named)


def test_decoding_has_whole_refused_and_tiles_left():
    request = RunRequest(width=1024, height=928)
    with pytest.raises(DoesNotFitError, match="tiles"):
        decode_plan(replace(request, tiles=1), GIB // 4, GIB // 8)
    assert decode_plan(request, GIB // 4, GIB // 8).count > 1
    # Where the transformer leaves the card for the decoder, that is said and counted.
    large = RunRequest(width=2048, height=2048, tiles=1, precision="bf16")
    tight, roomy = estimate(large, of_size(L40S, 28)), estimate(large, L40S)
    assert not tight.fits and tight.option.moved_bytes == 0 and tight.option.tiles == 1
    assert "come back" in estimate_text(tight)
    slow, quick = (it.phases["text"].seconds + it.phases["decode"].seconds for it in (tight, roomy))
    assert slow.high > quick.high
    assert tight.options[1].resident and tight.options[1].setting.precision == "int8"


# --- what is short, tight, priced


def with_spare(request, spare, listed):
    option = estimate(request, replace(listed, memory_bytes=200 * GIB)).option
    return replace(listed, memory_bytes=option.peak_bytes + KEPT_FREE_BYTES + spare)


@pytest.mark.parametrize("spare", [-1, 0, TIGHT_BYTES - 1, TIGHT_BYTES])
def test_tight_is_what_fits_with_little_to_spare_on_a_card_that_nobody_measured(spare):
    request = RunRequest(precision="bf16", modulation=ON_CARD, text_encoder_place=ON_CARD, tiles=1)
    assert estimate(request, with_spare(request, spare, L40S)).tight == (0 <= spare < TIGHT_BYTES)
    assert not estimate(request, with_spare(request, spare, CARDS["H200"])).tight
    near = of_size(L40S, L40S.memory_bytes / GIB - 1)
    assert estimate(USUAL, near, calibration=rates_of(L40S)[0]).tight  # it measures no memory
    assert estimate(USUAL, near).safer.headroom_bytes >= TIGHT_BYTES
    assert estimate(USUAL, CARDS["H100 SXM"]).safer is None
    least = estimate(USUAL, of_size(CARDS["RTX 4090"], 16))
    assert least.tight and least.safer is None


def test_a_step_cache_takes_its_computed_steps():
    asked = RunRequest(steps=50, cache="balanced")
    found, plain = (estimate(replace(asked, cache=cache), L40S) for cache in ("balanced", "off"))
    assert found.step_seconds == pytest.approx(plain.step_seconds)
    sampling, whole = (each.phases["sampling"] for each in (found, plain))
    assert sampling.seconds.high == pytest.approx(whole.seconds.high * 26 / 50)
    assert sampling.card_bytes - whole.card_bytes == 3 * 4 * 16 * (1328 // 8) ** 2
    custom = estimate(replace(asked, cache="custom", computed=26), L40S)
    assert custom.phases["sampling"].card_bytes == sampling.card_bytes
    assert estimate_json(found)["step_cache"] == {"name": "balanced", "computed_steps": 26}
    assert "26 of 50 steps" in " ".join(estimate_text(found).split())
    none = estimate(replace(asked, steps=8), L40S)
    assert none.step_seconds == estimate(replace(USUAL, steps=8), L40S).step_seconds
    assert estimate_json(none)["step_cache"]["computed_steps"] == 8


def test_a_price_is_the_users_or_the_lists():
    listed, own = estimate(USUAL, L40S), estimate(USUAL, L40S, usd_per_hour=2.0)
    price = L40S.price().usd_per_hour
    for found, usd in ((listed, price), (own, 2.0)):
        assert found.usd_per_image == pytest.approx(found.image_seconds.times(usd / 3600))
        assert any(f"${usd:g}" in note or "your own" in note for note in notes_of(found))
    assert estimate_json(estimate(USUAL, L40S, usd_per_hour=0))["usd_per_image"] == 0
    assert estimate(USUAL, CARDS["H200"]).usd_per_image is None


def test_additions_have_their_notes():
    def notes(**asked):
        return " ".join(notes_of(estimate(replace(USUAL, **asked), L40S)))

    assert "2 LoRAs in bypass mode" in notes(loras=Loras(2, 64, "bypass"))
    assert "LoRA" not in notes(loras=Loras(2, 64, "merge"))
    assert "ControlNet" in notes(controlnet_bytes=10**9)
    assert "16 cores" in notes(text_encoder_place=ON_PROCESSOR)
    at_hand = Parts(transformer_bytes=27 * GIB, modulation_bytes=12 * GIB)
    for parts, made in ((Parts(), True), (at_hand, False)):
        assert ("qwen-l40s quantize" in notes(precision="int8", parts=parts)) == made
        assert bool(estimate(replace(USUAL, parts=parts), L40S).downloads) == made


@pytest.mark.parametrize("name", ["T4", "4070", "L40S"])
@pytest.mark.parametrize("ram", [4, 8, 16, 32])
def test_where_system_ram_is_short_the_answer_names_what_does(name, ram):
    for family, precision in itertools.product(members(), ("auto", "bf16", "int8", "fp8")):
        asked = RunRequest(family, precision, width=None, height=None)
        if not find_card(name, CARDS).facts().multiplies(precision):
            continue
        found = estimate(asked, find_card(name, CARDS), ram_bytes=ram * GIB)
        answer = estimate_json(found)
        short = found.host_ram_bytes > ram * GIB
        assert (
            (answer["verdict"] == DOES_NOT_FIT) == short == estimate_text(found).startswith("Not")
        )
        assert answer["ram_gib"] == ram and f" of {ram}.0 GiB of system RAM" in estimate_text(found)
        less = found.with_less_ram
        assert all(count <= ram * GIB for count in less.values()) and not (less and not short)
        assert all(what in remedy(found) for what in less)
        others = [RunRequest(what, width=None, height=None) for what in less if what in members()]
        if set_so := SET.findall(remedy(found)):
            others.append(replace(asked, **{NAMES[name]: value for name, value in set_so}))
        for other in others:
            again = estimate(other, find_card(name, CARDS), ram_bytes=ram * GIB)
            assert not again.short_of_ram and (short or again.verdict == FITS)


NAMES = {
    "precision": "precision",
    "modulation": "modulation",
    "text_encoder_precision": "text_encoder",
    "text_encoder_placement": "text_encoder_place",
}
SET = re.compile(rf"\b({'|'.join(NAMES)}) ([^,(]+)(?:,| \()")


def test_auto_takes_the_file_as_it_is_where_system_ram_is_short():
    for family, stored in ("qwen-image-2512", "fp8"), ("qwen-image-layered", "bf16"):
        asked = RunRequest(family, width=None, height=None)
        found = estimate(asked, find_card("4090", CARDS), ram_bytes=16 * GIB)
        assert not found.short_of_ram and found.option.setting.precision == stored
        assert found.downloads[0].name == asked.member.files[stored].name
        named = estimate(
            replace(asked, precision="int8"), find_card("4090", CARDS), ram_bytes=16 * GIB
        )
        assert named.short_of_ram and len(named.with_less_ram) == 3
    count = weight_bytes(FULL_SIZE, "fp8").total
    cast = Parts(FULL_SIZE, count, 0, file_bytes=(("transformer", count),), kept="fp8", cast=True)
    for gib, precision in (16, "fp8"), (32, "int8"):
        found = estimate(RunRequest(precision="fp8", parts=cast), L40S, ram_bytes=gib * GIB)
        assert not found.short_of_ram and found.option.setting.precision == precision
