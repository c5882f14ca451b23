"""Prices that somebody types in, line by line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_l40s.errors import SettingError
from qwen_l40s.machine.store import known_cards
from qwen_l40s.planning.advise import read_prices

CARDS = known_cards()


def test_every_form_of_a_line_is_read():
    text = "L40S = 0.79\n\n# rented\n  nvidia h200=$3.5  # per hour\r\nRTX 4090 = 0\n"
    assert read_prices(text, CARDS) == {"L40S": 0.79, "H200": 3.5, "RTX 4090": 0.0}
    assert read_prices("", CARDS) == read_prices("\n # \n", CARDS) == {}


@given(st.dictionaries(st.sampled_from(sorted(CARDS)), st.floats(0, 1e6)), st.integers(0, 3))
def test_what_is_written_is_read(prices, gap):
    text = ("\n" * (gap + 1)).join(f"{name} = {price!r}" for name, price in prices.items())
    assert read_prices(text, CARDS) == prices


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("L40S", ("'L40S' is not a GPU and its price in USD per hour", "'L40S = 0.79'")),
        ("L40S 0.79", ("'L40S 0.79'", "write")),
        ("= 0.79", ("'= 0.79'", "write")),
        ("L40S = cheap", ("'L40S = cheap'", "write")),
        ("L40S = nan", ("'L40S = nan'", "write")),
        ("L40S = -0.5", ("at least 0 USD per hour", "-0.5")),
        ("L40S = inf", ("at least 0 USD per hour", "inf")),
        ("L41S = 0.79", ("'L41S'", "nearest", "L40S")),
        ("h200 = 3", ("H200 already has a price above", "keep one")),
    ],
)
def test_a_bad_line_is_named_by_its_number(line, words):
    with pytest.raises(SettingError) as caught:
        read_prices(f"H200 = 2\n\n{line}\nA100 = 1", CARDS)
    text = str(caught.value)
    assert text.startswith("prices, line 3: ") and text.endswith(".") and "\n" not in text
    assert all(word in text for word in words), text
