"""The pictures and words of estimates: nothing is cut off, and what does not fit is red."""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_l40s.charts import figures
from qwen_l40s.charts import picture as pictures
from qwen_l40s.charts import text as texts_of
from qwen_l40s.charts.picture import cost_chart, memory_chart, refusal_chart
from qwen_l40s.charts.text import Refusal
from qwen_l40s.errors import UnavailableError
from qwen_l40s.machine.store import known_cards
from qwen_l40s.planning.advise import Advice, Offer
from qwen_l40s.planning.estimate import estimate
from qwen_l40s.planning.phases import Range
from qwen_l40s.planning.rates import Basis
from qwen_l40s.planning.request import Loras, RunRequest
from qwen_l40s.spec.formats import GIB

Image = pytest.importorskip("PIL.Image")
ImageColor = pytest.importorskip("PIL.ImageColor")
AMBER, BAD = map(ImageColor.getrgb, (pictures.WARN, pictures.BAD))
LONG = "a card of somebody's own with a name that goes on and on " * 3
CARDS = known_cards()
USUAL = RunRequest()
IN_BF16 = RunRequest(precision="bf16", text_encoder_place="on card")


def estimate_of(memory_gib, request=USUAL, *, name="L40S", like="L40S"):
    card = replace(CARDS[like], memory_bytes=round(memory_gib * GIB))
    return estimate(request, replace(card, name=name), usd_per_hour=0.72)


def colours_of(picture):
    return {colour for _, colour in picture.getcolors(picture.width * picture.height)}


@contextmanager
def written():
    """Lists (text, its box, the drawing's size) of everything that is written."""
    from PIL import ImageDraw

    found = []
    original = ImageDraw.ImageDraw.text

    def text(self, xy, text, **options):
        box = self.textbbox(xy, text, font=options["font"], anchor=options.get("anchor"))
        found.append((text, box, options["font"].size))
        return original(self, xy, text, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ImageDraw.ImageDraw, "text", text)
        yield found


@pytest.fixture
def texts():
    with written() as found:
        yield found


def check_texts(written, picture):
    """Everything is inside, large enough, and on nothing else."""
    assert picture.mode == "RGB"
    assert picture.width == pictures.WIDTH
    for text, (left, top, right, bottom), size in written:
        inside = min(left, top) >= 0 and right <= picture.width and bottom <= picture.height
        assert inside, f"{text!r} is cut off"
        assert size >= pictures.LEAST
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
    "found",
    [
        estimate_of(44.3),
        estimate_of(4),
        estimate_of(43),
        estimate_of(139.8, replace(IN_BF16, steps=50, cache="balanced")),
        estimate_of(31.4, replace(USUAL, width=2048, height=2048, batch=16)),
        estimate_of(
            60,
            RunRequest(
                family="qwen-image-edit-2511",
                width=2048,
                height=2048,
                batch=4,
                references=3,
                loras=Loras(12, 256, "bypass"),
                controlnet_bytes=3 * GIB,
            ),
            name=LONG,
        ),
        estimate_of(24, name="显卡 RTX™ — 24\nGB"),
    ],
    ids=lambda found: f"{found.card.name[:12]} {found.card.memory_bytes / GIB:g}",
)
def test_the_memory_chart_is_whole_and_legible(texts, found):
    check_texts(texts, picture := memory_chart(found))
    assert (AMBER in colours_of(picture)) == (found.tight or not found.fits)
    assert BAD not in colours_of(picture)  # it runs


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    memory=st.floats(0.1, 300),
    side=st.integers(16, 192).map(lambda tokens: 16 * tokens),
    batch=st.integers(1, 9),
    loras=st.integers(0, 9),
)
def test_any_sizes_give_a_legible_memory_chart(memory, side, batch, loras):
    request = RunRequest(width=side, height=side, batch=batch, loras=Loras(loras))
    with written() as texts:
        try:
            picture = memory_chart(estimate_of(memory, request))
        except UnavailableError as error:
            picture = refusal_chart(Refusal(CARDS["L40S"], request, str(error)))
            assert BAD in colours_of(picture)
        check_texts(texts, picture)


def test_the_answer_has_a_word_beside_its_colour(texts):
    for memory, word, sign in (
        (4, "Fits with offloading", "tight"),
        (43, "Tight", "tight"),
        (90, "Fits", "good"),
    ):
        texts.clear()
        picture = memory_chart(estimate_of(memory))
        assert texts[0][0].startswith(word)
        assert ImageColor.getrgb(pictures.SIGNS[sign]) in colours_of(picture)
        # ComfyUI's classic nodes give a picture 220 pixels of height until somebody enlarges them.
        assert picture.width / picture.height > 1.5
    colours = colours_of(memory_chart(estimate_of(20, IN_BF16)))
    for name in ("working memory", "other"):  # small parts, where not all fits
        assert ImageColor.getrgb(pictures.COLOURS[name]) in colours
    texts.clear()
    small = RunRequest(precision="int8", width=256, height=256, steps=4)
    memory_chart(estimate_of(139, small, like="H200"))
    assert any("CPU" in text for text, *_ in texts)


def offers_of(*fields):
    known = {"request": RunRequest(loras=Loras(3)), "basis": Basis("predicted", "")}
    return [
        Offer(
            SimpleNamespace(
                card=SimpleNamespace(name=name),
                image_seconds=Range(low, high),
                fits=True,
                tight=False,
                **known,
            ),
            usd,
        )
        for name, low, high, usd in fields
    ]


OFFERED = (
    ("L40S", 12, 20, 0.72),
    ("A100 80GB SXM", 13, 22, 1.64),
    ("H100 SXM", 5, 8, 1.33),
)


@pytest.mark.parametrize(
    "load, offers",
    [
        (120, offers_of(*OFFERED)),
        (0.01, offers_of(*OFFERED)),
        (1e7, offers_of(*OFFERED[:1])),
        (120, offers_of(("L40S", 10, 10, 0.5), ("L40S", 10, 10, 0.5), ("L40S", 1e-3, 10, 1e-6))),
        (99, offers_of(*((name, 9, 14, 0.5 + len(name) / 9) for name in known_cards()))),
        (1e-6, offers_of(("L40S", 12, 20, 999), ("H200", 3, 5, 0.7), ("L4", 40, 70, 0.02))),
        (1e9, offers_of((LONG, 9, 14, 0.5), (LONG.replace(" ", ""), 9, 14, 0.6))),
    ],
    ids=["usual", "hardly any", "millions, alone", "the same", "all cards", "dear", "long names"],
)
def test_the_cost_chart_is_whole_and_legible(texts, load, offers):
    check_texts(texts, cost_chart(Advice(load, offers)))
    assert f"Cheapest for {load:,.10g} images per hour" in {text for text, *_ in texts}


def test_the_cost_chart_has_the_six_cheapest_that_fit_and_cost_something(texts):
    cards = list(known_cards())
    offers = offers_of(*((name, 9, 14, 1 + place) for place, name in enumerate(cards)))
    offers[0].found.tight, offers[1].found.fits = True, False
    cost_chart(Advice(9, [*offers[::-1], *offers_of(("a gift", 3, 5, 0))]))
    written = [text for text, *_ in texts]
    assert written[0] == f"1 {cards[0]}, tight: $0.11 an image"
    assert [text for text in written if text[2:] in cards] == [f"1 {name}" for name in cards[2:7]]
    assert {"0.9 images/h", "9 images/h", "90 images/h"} <= set(written)
    assert not any("a gift" in text for text in written)


@given(st.text(max_size=60), st.sampled_from([15, 18, 26]), st.integers(40, 900))
def test_wrapped_lines_are_never_wider(text, size, width):
    lines = pictures.wrapped(text, size, width)
    assert all(pictures.text_width(line, size) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == pictures.plain(text).replace(" ", "")


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


def test_text_is_folded_and_has_the_callers_notes():
    found = replace(estimate_of(43), notes=("a note about qwen-image-edit-2511 " * 9,))
    lines = texts_of.estimate_text(found).splitlines()
    assert max(map(len, lines[6:])) <= figures.LINE
    assert sum(line.count("qwen-image-edit-2511") for line in lines) == 9
    assert texts_of.remedy(estimate_of(16, like="RTX 4090")) == texts_of.NOTHING_SAFER


@given(st.lists(st.floats(0, 300), min_size=1, max_size=8))
def test_printed_figures_add_up(sizes):
    counts = [round(size * GIB) for size in sizes]
    printed = figures.adding_up(counts)
    assert f"{sum(map(float, printed)):.1f}" == figures.tenths(sum(counts))
    for text, count in zip(printed, counts, strict=True):
        assert abs(float(text) - count / GIB) < 0.11
