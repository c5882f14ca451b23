"""What a pass costs over several cards: the research's table, measured floors, and who decides."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_l40s.families.protocol import StepTokens
from qwen_l40s.planning.split_cost import LEAST_GAIN, BlockSeconds, SplitCost, row_bytes

DIM, TEXT = 3072, 128
SIZES = {1024: 4096, 1328: 6889, 2048: 16384}
# An L40S, predicted: milliseconds of a block's products and attention, by the side in pixels.
BF16 = {1024: (4.40, 1.01), 1328: (7.32, 2.79), 2048: (17.2, 15.4)}
INT8 = {1024: (2.90, 1.01), 1328: (4.82, 2.79), 2048: (11.3, 15.4)}


def cost(side, link, times=BF16, cards=2):
    """The research's block: its products are as long for every row."""
    products, attention = (ms / 1000 for ms in times[side])
    image = SIZES[side]
    text = products * TEXT / (TEXT + image)
    return SplitCost(
        StepTokens(TEXT, image),
        DIM,
        BlockSeconds(products - text, text, attention),
        row_bytes(DIM, quantized=times is INT8),
        cards=cards,
        link=link * 1e9,
    )


def gain(found):
    return sum(found.block) / found.best.seconds


def test_each_link_has_its_exchange():
    assert cost(1024, 17).best.name == cost(1024, 17, INT8).best.name == "rows"
    assert cost(1024, 380).best.name == cost(1024, 380, INT8).best.name == "keys"


def test_text_takes_the_place_of_image_rows():
    found = cost(1024, 17)
    first, other = found.best.image_rows
    assert first + TEXT == pytest.approx(other, abs=20)
    text_bound = replace(found, block=found.block._replace(text=3 * found.block.text))
    assert text_bound.best.image_rows[0] < first
    long = replace(
        found, tokens=found.tokens._replace(text=9000), block=BlockSeconds(0.005, 0.01, 0.2)
    )
    assert long.best.image_rows[0] == 1


@given(
    st.integers(1, 300),
    st.integers(2, 5000),
    st.integers(1, 3),
    st.integers(2, 8),
    st.floats(1e9, 1e12),
)
def test_all_rows_are_somewhere(text, image, items, cards, link):
    cards = min(cards, image)
    tokens = StepTokens(text, image, items=items)
    seconds = 1e-6 * items * (text + image)
    block = BlockSeconds.shared(seconds, tokens, DIM, quantized=True, text=0.1 * seconds)
    found = SplitCost(tokens, DIM, block, DIM + 4, cards, link)
    for each in (found.best, replace(found, row_bytes=None).best):
        assert len(each.image_rows) == cards
        assert sum(each.image_rows) == image
        assert min(each.image_rows) >= 1
    assert 0 < found.gain <= cards


def test_a_measured_block_decides():
    slow = cost(1024, 17)
    block = slow.block
    fast = replace(slow, block=BlockSeconds(block.image / 5, block.text / 5, block.joint / 5))
    assert slow.pays
    assert not fast.pays
    assert slow.gain > LEAST_GAIN > fast.gain
    assert fast.words.endswith(f"a split needs {LEAST_GAIN}x: one GPU computes the forward pass.")
    # And so does a processor that launches both cards' blocks.
    assert not replace(slow, launch=sum(slow.block) / 2).pays


def test_parts_of_a_measured_block():
    tokens = StepTokens(TEXT, 4096)
    for quantized, times in ((False, BF16), (True, INT8)):
        products, attention = (ms / 1000 for ms in times[1024])
        text = products * TEXT / (TEXT + 4096)
        found = BlockSeconds.shared(
            products + attention, tokens, DIM, quantized=quantized, text=text
        )
        assert sum(found) == pytest.approx(products + attention)
        assert found.text == text
        assert found.joint == pytest.approx(attention, rel=0.05)
