"""The price of an image, and which prices and times are none."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_l40s.errors import SettingError
from qwen_l40s.planning.cards import check_positive, usd_per_image
from qwen_l40s.planning.estimate import usd_range
from qwen_l40s.planning.phases import Range

PRICES = st.floats(0, 1000)
SECONDS = st.floats(1e-3, 1e5)


def test_an_hour_of_images_costs_an_hour():
    assert usd_per_image(0.72, 30) == pytest.approx(0.006)
    assert usd_per_image(1.33, 3600) == 1.33
    assert usd_per_image(0, 30) == 0
    assert usd_range(0.72, Range(15, 30)) == pytest.approx(Range(0.003, 0.006))


@given(PRICES, SECONDS, SECONDS)
def test_a_longer_time_costs_more(price, one, other):
    low, high = sorted((one, other))
    costs = usd_range(price, Range(low, high))
    assert costs.low <= costs.high
    assert costs.high == usd_per_image(price, high)


@pytest.mark.parametrize("price", [-0.01, math.nan, math.inf, 10**400, True, "0.72", None])
def test_no_price(price):
    with pytest.raises(SettingError, match=r"usd_per_hour is .*: give the price of one card"):
        usd_per_image(price, 30)


@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf, -math.inf, 10**400, True, "30"])
def test_no_time(seconds):
    with pytest.raises(
        SettingError, match=r"seconds per image is .*: give a finite number above 0"
    ):
        usd_per_image(0.72, seconds)
    with pytest.raises(SettingError, match=r"load is"):
        check_positive("load", seconds)
