"""The pictures and words of estimates: nothing is cut off, and what does not fit is red."""

import operator
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_l40s.charts import figures, run_chart, words
from qwen_l40s.charts.pictures import cost_chart, memory_chart
from qwen_l40s.machine.card_list import known_cards
from qwen_l40s.planning.advise import Advice, Offer
from qwen_l40s.planning.estimate import TIGHT_BYTES
from qwen_l40s.planning.files import CARD_MEMORY, Disk, GuideFigure
from qwen_l40s.planning.phases import KEPT_FREE_BYTES, PHASES, Phase, Range
from qwen_l40s.planning.rates import Basis
from qwen_l40s.planning.request import Loras, RunRequest
from qwen_l40s.spec.formats import GB, GIB

Image = pytest.importorskip("PIL.Image")
ImageColor = pytest.importorskip("PIL.ImageColor")
AMBER, BAD = map(ImageColor.getrgb, (run_chart.WARN, run_chart.BAD))
LONG = "a card of somebody's own with a name that goes on and on " * 3


def phase(name, weights, activations=0.1, resident=None):
    return Phase(
        name,
        round(weights * GIB),
        round(activations * GIB),
        round(0.1 * GIB),
        round(0.5 * GIB),
        {part: round(size * GIB) for part, size in (resident or {}).items()},
        Range(0.3, 0.5),
    )


def what_stays(phase, usable):
    """A phase of as much as a card holds: weights leave, the largest part first."""
    resident = dict(phase.resident)
    weights, over = phase.weights, max(0, phase.card_bytes - usable)
    for part in sorted(resident, key=resident.__getitem__, reverse=True):
        leaves = min(over, resident[part])
        resident[part], over = resident[part] - leaves, over - leaves
    return replace(phase, weights=max(0, weights - over), resident=resident)


def estimate_of(memory_gib, scale=1.0, *, name="L40S", request=None, resident=None):
    """An estimate of made-up sizes: `scale` 1 takes 41.5 GiB while sampling."""
    beside = {"text encoder": 14.4 * scale, "VAE": 0.24 * scale, **(resident or {})}
    phases = {
        "load": phase("load", 25.4 * scale, resident=beside),
        "text": phase("text", 14.4 * scale, resident={"transformer": 25.4 * scale}),
        "tables": phase("tables", 0.1 * scale, resident=beside),
        "sampling": phase("sampling", 25.4 * scale, resident=beside),
        "decode": phase("decode", 0.2 * scale, 2.1 * scale, beside | {"transformer": 25 * scale}),
    }
    memory = round(memory_gib * GIB)
    needs = {name: value.card_bytes for name, value in phases.items()}
    most = max(needs.values())
    spare = memory - KEPT_FREE_BYTES - most
    phases = {
        name: what_stays(value, max(0, memory - KEPT_FREE_BYTES)) for name, value in phases.items()
    }
    setting = SimpleNamespace(
        precision="bf16",
        modulation="off card",
        text_encoder="bf16",
        text_encoder_place="on card",
    )
    option = SimpleNamespace(
        setting=setting,
        tiles=1,
        resident=spare >= 0,
        needs=needs,
        peak_phase=max(needs, key=needs.__getitem__),
        peak_bytes=most,
        headroom_bytes=spare,
        moved_bytes=0,
        recommended=True,
        reasons={"precision": "the most faithful that stays", "room": "1.4 GiB to spare"},
    )
    return SimpleNamespace(
        card=SimpleNamespace(name=name, memory_bytes=memory),
        request=request or RunRequest(),
        option=option,
        options=(option,),
        phases=phases,
        fits=spare >= 0,
        verdict="fits" if spare >= 0 else "runs slowly",
        tight=0 <= spare < TIGHT_BYTES,
        safer=None,
        headroom_bytes=spare,
        step_seconds=Range(0.28, 0.47),
        bound="card",
        image_seconds=Range(11.5, 19.4),
        usd_per_image=Range(0.0023, 0.0038),
        disk=Disk({"transformer": 40_900_000_000}, {"software": 20_000_000_000}, {}),
        guides=(
            GuideFigure("volume", 80 * GB, 58 * GB, ""),
            GuideFigure(CARD_MEMORY, 88 * GB, 43 * GIB, ""),
        ),
        host_ram_bytes=20 * GIB,
        basis=Basis("predicted", "predicted: no L40S was measured"),
        notes=("a note",),
        card_note="",
        own_usd_per_hour=0.72,
    )


def colours_of(picture):
    return {colour for _, colour in picture.getcolors(picture.width * picture.height)}


@pytest.fixture(autouse=True)
def no_notes(monkeypatch):
    """Those of the stub alone: what an estimate has to say is in test_estimator."""
    monkeypatch.setattr(words, "notes_of", lambda estimate: ())


@pytest.fixture
def texts(monkeypatch):
    """[(text, its box, the drawing's size)] of everything that is written."""
    from PIL import ImageDraw

    written = []
    original = ImageDraw.ImageDraw.text

    def text(self, xy, text, **options):
        box = self.textbbox(xy, text, font=options["font"], anchor=options.get("anchor"))
        written.append((text, box, options["font"].size))
        return original(self, xy, text, **options)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", text)
    return written


def check_texts(written, picture, least=15):
    """Everything is inside, large enough, and on nothing else."""
    assert picture.mode == "RGB"
    assert picture.width == run_chart.WIDTH
    for text, (left, top, right, bottom), size in written:
        inside = min(left, top) >= 0 and right <= picture.width and bottom <= picture.height
        assert inside, f"{text!r} is cut off"
        assert size >= least
        assert text.isascii()
    for place, (text, box, _) in enumerate(written):
        for other, another, _ in written[:place]:
            apart = (
                box[2] <= another[0]
                or another[2] <= box[0]
                or box[3] <= another[1]
                or another[3] <= box[1]
            )
            assert apart, f"{text!r} lies on {other!r}"


@pytest.mark.parametrize(
    "estimate",
    [
        estimate_of(44.3),
        estimate_of(4),
        estimate_of(0.3),
        estimate_of(44.3, 0.995),
        estimate_of(139.8),
        estimate_of(139.8, 0.0001),
        estimate_of(31.4, 40),
        estimate_of(
            47.4,
            name=LONG,
            request=RunRequest(
                family="qwen-image-edit-2511",
                width=2048,
                height=2048,
                batch=4,
                references=3,
                loras=Loras(12, 256, "bypass"),
                controlnet_bytes=3 * GIB,
            ),
            resident={"LoRAs": 0.8, "ControlNet": 2.8, "modulation table": 0.1, LONG[:90]: 0.2},
        ),
        estimate_of(24, name="显卡 RTX™ — 24\nGB"),
    ],
    ids=lambda estimate: f"{estimate.card.name[:12]} {estimate.card.memory_bytes / GIB:g}",
)
def test_the_memory_chart_is_whole_and_legible(texts, estimate):
    check_texts(texts, picture := memory_chart(estimate), least=run_chart.LEAST)
    assert (AMBER in colours_of(picture)) == (estimate.tight or not estimate.fits)
    assert BAD not in colours_of(picture)  # it runs


def test_text_and_picture_say_that_the_processor_bounds_a_step(texts):
    estimate = estimate_of(48)
    estimate.bound = "processor"
    time = "Time: 12 to 19 s an image, 280 to 470 ms a step, bound by the processor (predicted)."
    assert words.summary_lines(estimate)[2] == time
    check_texts(texts, memory_chart(estimate), least=run_chart.LEAST)
    assert any(text == "A step is bound by the processor." for text, *_ in texts)


@settings(max_examples=15, deadline=None)
@given(
    memory=st.floats(0.1, 300),
    sizes=st.lists(st.floats(0, 200), min_size=10, max_size=10),
)
def test_any_sizes_give_a_legible_memory_chart(memory, sizes):
    estimate = estimate_of(memory)
    estimate.phases = {
        name: phase(name, sizes[2 * place], sizes[2 * place + 1] / 20, {"VAE": sizes[-place] / 9})
        for place, name in enumerate(PHASES)
    }
    with pytest.MonkeyPatch.context() as patch:
        written = []
        original = run_chart.Page.text

        def text(self, place, text, **options):
            font = run_chart.font(options.get("size", run_chart.LEAST))
            anchor = options.get("anchor", "lm")
            box = self.draw.textbbox(place, text, font=font, anchor=anchor)
            written.append((text, box, font.size))
            original(self, place, text, **options)

        patch.setattr(run_chart.Page, "text", text)
        check_texts(written, memory_chart(estimate))


def test_the_part_of_a_bar_that_waits_in_host_memory_is_amber():
    """Amber from what fits on: the same share of the bar's pixels as of its bytes."""
    estimate = estimate_of(20)
    picture = memory_chart(estimate)
    amber = [
        [picture.getpixel((x, y)) for x in range(picture.width)].count(AMBER)
        for y in range(picture.height)
    ]
    # Below the bar of the peak, which is amber as a whole.
    widest = max(amber[picture.height * 3 // 5 :])
    field = run_chart.WIDTH - 2 * run_chart.SIDE - run_chart.NAMES - run_chart.TIMES
    full = field - run_chart.SIZES
    beyond = 1 - (20 * GIB - KEPT_FREE_BYTES) / estimate.option.peak_bytes
    assert widest == pytest.approx(full * beyond, rel=0.05)


def test_small_parts_are_seen_where_not_all_fits():
    colours = colours_of(memory_chart(estimate_of(20)))
    for name in ("working memory", "other"):
        assert ImageColor.getrgb(run_chart.COLOURS[name]) in colours


def test_the_answer_has_a_word_beside_its_colour(texts):
    for memory, word, sign in (
        (4, "Runs slowly", "tight"),
        (43, "Tight", "tight"),
        (90, "Fits", "good"),
    ):
        texts.clear()
        colours = colours_of(memory_chart(estimate_of(memory)))
        assert texts[0][0].startswith(word)
        assert ImageColor.getrgb(run_chart.SIGNS[sign]) in colours


def contrast(one, other):
    """From 1, the same, to 21 (WCAG 2)."""
    found = []
    for colour in (one, other):
        shares = (share / 255 for share in ImageColor.getrgb(colour))
        linear = (it / 12.92 if it <= 0.04045 else ((it + 0.055) / 1.055) ** 2.4 for it in shares)
        found.append(sum(map(operator.mul, (0.2126, 0.7152, 0.0722), linear)) + 0.05)
    return max(found) / min(found)


def test_text_stands_out_from_what_it_is_written_on():
    """4.5 to 1, as WCAG 2 asks of text; of the parts of bars and of lines 3 to 1."""
    for ink in (run_chart.INK, run_chart.FAINT, run_chart.GOOD, run_chart.WARN, run_chart.BAD):
        assert contrast(ink, run_chart.PAPER) >= 4.5
    for colour in (*run_chart.COLOURS.values(), run_chart.FRAME):
        assert contrast(colour, run_chart.PAPER) >= 3


def test_a_node_shows_the_picture_as_wide_as_it_can():
    """ComfyUI's classic nodes give a picture 220 pixels of height until somebody enlarges them."""
    for memory in (4, 43, 90):
        picture = memory_chart(estimate_of(memory))
        assert picture.width / picture.height > 1.5


def test_the_frame_is_seen_on_a_light_page_and_on_a_dark_one():
    for page in ("#ffffff", "#000000"):
        assert contrast(run_chart.FRAME, page) >= 3


def offers_of(*fields):
    offers = []
    for name, low, high, usd in fields:
        found = estimate_of(90, name=name, request=RunRequest(loras=Loras(3)))
        found.image_seconds = Range(low, high)
        offers.append(Offer(found, usd))
    return offers


USUAL = (
    ("L40S", 12, 20, 0.72),
    ("A100 80GB SXM", 13, 22, 1.64),
    ("H100 SXM", 5, 8, 1.33),
)


@pytest.mark.parametrize(
    "load, offers",
    [
        (120, offers_of(*USUAL)),
        (0.01, offers_of(*USUAL)),
        (1e7, offers_of(*USUAL[:1])),
        (120, offers_of(("L40S", 10, 10, 0.5), ("L40S", 10, 10, 0.5), ("L40S", 1e-3, 10, 1e-6))),
        (99, offers_of(*((name, 9, 14, 0.5 + len(name) / 9) for name in known_cards()))),
        (1e-6, offers_of(("L40S", 12, 20, 999), ("H200", 3, 5, 0.7), ("L4", 40, 70, 0.02))),
        (1e9, offers_of((LONG, 9, 14, 0.5), (LONG.replace(" ", ""), 9, 14, 0.6))),
    ],
    ids=["usual", "hardly any", "millions, alone", "the same", "all cards", "dear", "long names"],
)
def test_the_cost_chart_is_whole_and_legible(texts, load, offers):
    check_texts(texts, cost_chart(Advice(load, offers)), least=run_chart.LEAST)
    assert f"Cheapest for {load:,.10g} images per hour" in {text for text, *_ in texts}


def test_the_cost_chart_has_the_six_cheapest_and_the_cheapest_on_top(texts):
    cards = list(known_cards())
    offers = offers_of(*((name, 9, 14, 1 + place) for place, name in enumerate(cards)))
    offers[0].found.tight = True
    cost_chart(Advice(9, offers[::-1]))
    written = [text for text, *_ in texts]
    assert written[0] == f"1 {cards[0]}, tight: $0.11 an image"
    assert [text for text in written if text[2:] in cards] == [f"1 {name}" for name in cards[1:6]]
    assert {"0.9 images/h", "9 images/h", "90 images/h"} <= set(written)


def test_what_does_not_fit_or_costs_nothing_is_not_drawn(texts):
    offers = offers_of(("H200", 3, 5, 0), ("L40S", 12, 20, 0.72), ("RTX 3090", 30, 60, 0.3))
    offers[2].found.fits = False
    cost_chart(Advice(9, offers))
    written = {text for text, *_ in texts}
    assert {"1 L40S", "$0.080"} <= written
    assert not any("H200" in text or "RTX 3090" in text for text in written)


@given(st.text(max_size=60), st.sampled_from([15, 18, 26]), st.integers(40, 900))
def test_wrapped_lines_are_never_wider(text, size, width):
    lines = run_chart.wrapped(text, size, width)
    assert all(run_chart.text_width(line, size) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == run_chart.plain(text).replace(" ", "")


@pytest.mark.parametrize(
    "low, high, text",
    [
        (0.28, 0.47, "280 to 470 ms"),
        (0.0123, 0.0123, "12 ms"),
        (0.0004, 0.0004, "0.4 ms"),
        (11.5, 19.4, "12 to 19 s"),
        (0.9, 1.9, "0.9 to 1.9 s"),
        (1.04, 1.04, "1.0 s"),
        (80, 89, "80 to 89 s"),
        (60, 200, "1.0 to 3.3 min"),
        (7200, 9000, "2.0 to 2.5 h"),
        (0, 0, "0 ms"),
    ],
)
def test_durations(low, high, text):
    assert figures.duration(Range(low, high)) == text


@pytest.mark.parametrize(
    "value, text",
    [(0, "0.00"), (12.5, "12.50"), (0.72, "0.72"), (0.0028, "0.0028"), (0.00004, "0.000040")],
)
def test_dollars(value, text):
    assert figures.dollars(value) == text


def test_the_text_says_first_whether_it_fits():
    lines = words.estimate_text(estimate_of(44.3)).splitlines()
    assert lines[0] == "Tight, not measured: 42.5 of 43.9 GiB in decode, 1.4 GiB to spare."
    assert lines[1].startswith("L40S: qwen-image, bf16, 1328x1328")
    assert lines[2] == "Time: 12 to 19 s an image, 280 to 470 ms a step (predicted)."
    assert lines[3].startswith("Cost: $0.0023 to 0.0038 an image, at $0.72 an hour")
    assert lines[4].startswith("Set: Load Qwen-Image Model: precision bf16, modulation off card;")
    assert lines[5:7] == [words.NOTHING_SAFER, ""]
    assert "Note: a note" in lines
    assert max(map(len, lines[6:])) <= figures.LINE
    first = words.estimate_text(estimate_of(48)).splitlines()[0]
    assert first == "Fits: 42.5 of 47.6 GiB in decode, 5.1 GiB to spare."
    first = words.estimate_text(estimate_of(24)).splitlines()[0]
    assert first == (
        "Runs slowly: 18.9 GiB leave the card for each image and come back; "
        "23.6 of 23.6 GiB in load."
    )
    assert words.summary_text(estimate_of(24)).count("\n") == 5


@given(st.lists(st.floats(0, 300), min_size=1, max_size=8))
def test_printed_figures_add_up(sizes):
    counts = [round(size * GIB) for size in sizes]
    printed = figures.adding_up(counts)
    assert f"{sum(map(float, printed)):.1f}" == figures.tenths(sum(counts))
    for text, count in zip(printed, counts, strict=True):
        assert abs(float(text) - count / GIB) < 0.11


def test_without_a_price_the_text_says_how_to_give_one():
    estimate = estimate_of(44.3)
    estimate.usd_per_image = None
    assert "no price known" in words.estimate_text(estimate)
