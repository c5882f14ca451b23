"""One image on several cards, and many images on as many servers: what the estimate says."""

import json
from pathlib import Path

import pytest

from qwen_l40s.charts.figures import between
from qwen_l40s.charts.text import cards_json, cards_lines
from qwen_l40s.cli import main
from qwen_l40s.machine.store import known_cards
from qwen_l40s.planning.advise import LINKS, together
from qwen_l40s.planning.estimate import estimate
from qwen_l40s.planning.request import Loras, RunRequest
from qwen_l40s.planning.split_cost import LEAST_GAIN

CARDS = known_cards()
LIGHTNING = {"width": 1024, "height": 1024, "steps": 8, "cfg": "off"}


def on_cards(cards=2, link=None, name="L40S", **settings):
    """An image on cards of a name, by default Lightning's on two L40S."""
    return together(estimate(RunRequest(**{**LIGHTNING, **settings}), CARDS[name]), cards, link)


def test_what_two_l40s_are_expected_to_gain():
    """At the likely link; the slower the card, the more of a copy its products hide."""
    for precision in ("bf16", "int8"):
        for side, least, most in ((1024, 1.5, 1.82), (2048, 1.65, 1.92)):
            found = on_cards(2, LINKS[1], precision=precision, width=side, height=side)
            assert least < found.gain.low <= found.gain.high < most
            assert found.likely.best.name == "rows"
            assert 1 < found.faster.low <= found.faster.high < found.gain.high


def test_the_table_in_the_docs():
    text = (Path(__file__).resolve().parents[2] / "docs" / "several_gpus.md").read_text(
        encoding="utf-8"
    )
    for side in (1024, 1328, 2048):
        gain = on_cards(precision="bf16", width=side, height=side).gain
        assert f"| {side}x{side} | {between(gain, '{:.2f}'.format)} |" in text


def test_servers_paint_more_images_than_one_split_paints():
    for settings in ({}, {"cfg": "two passes"}, {"cfg": "one pass"}, {"batch": 4}):
        for cards in (2, 3, 4, 8):
            servers, one = on_cards(cards, **settings).per_hour
            assert servers.low > one.low
            assert servers.high > one.high


def test_cfg_has_a_card_for_each_prompt_and_rows_for_the_others():
    two, three, four = (on_cards(count, cfg="two passes") for count in (2, 3, 4))
    assert not two.splits
    assert 1.5 < two.faster.low < two.faster.high < 1.95
    assert three.faster == two.faster
    assert "1 GPU has nothing to do" in next(cards_lines(three))
    assert four.splits
    assert four.gain == on_cards(2).gain
    assert four.faster.low > 1.4 * two.faster.low
    assert on_cards(2, cfg="one pass").faster.low > 1.5


def test_where_a_split_steps_aside():
    """It takes one card's time then, and says why."""
    small = on_cards(4, name="H100 SXM", width=256, height=256)
    moves = on_cards(2, name="RTX 4070")
    tiny = on_cards(4, width=16, height=32)
    for found, why in (
        (small, f"less than {LEAST_GAIN} does not pay"),
        (moves, "its weights do not stay there"),
        (tiny, "fewer image tokens than GPUs"),
    ):
        line, *_ = cards_lines(found)
        assert not found.splits
        assert found.together == pytest.approx(found.alone)
        assert why in line
        assert not any(text.startswith("Memory") for text in cards_lines(found))


def test_loras_beside_weights_send_keys_and_values():
    plain, beside = (
        on_cards(precision="int8", loras=loras) for loras in (Loras(), Loras(1, 32, "bypass"))
    )
    assert (plain.likely.best.name, beside.likely.best.name) == ("rows", "keys")
    assert beside.gain.high < plain.gain.high


def test_an_assumed_link_is_that_of_pcie():
    assert on_cards().links == LINKS
    assert on_cards(name="H100 SXM").links == tuple(2 * link for link in LINKS)  # PCIe 5
    assert "12 to 24 GB/s" in " ".join(cards_lines(on_cards()))
    assert "17 GB/s each way" in " ".join(cards_lines(on_cards(2, LINKS[1])))


def test_memory_of_each_card():
    """Every card holds the transformer; others than the first have nothing else of the models."""
    found = on_cards(precision="bf16", modulation="on card", name="H100 SXM")
    alone = estimate(RunRequest(**LIGHTNING, precision="bf16"), CARDS["H100 SXM"])
    assert found.first_bytes == max(phase.card_bytes for phase in alone.phases.values())
    sampling = alone.phases["sampling"]
    assert sampling.weights < found.other_bytes <= sampling.card_bytes
    assert "VAE" in sampling.resident and found.other_bytes < found.first_bytes


def printed(capsys, *argv):
    code = main(["estimate", "--card", "L40S", "--size", "1024x1024", "--cfg", "1", *argv])
    return code, capsys.readouterr()


def test_the_command(capsys, tmp_path):
    own = tmp_path / "cards.json"
    own.write_text(json.dumps({"cards": {"L40S": {"prices": [{"usd_per_hour": 0.9}]}}}))
    code, output = printed(capsys, "--cards", "2", "--cards", str(own), "--link", "17", "--json")
    answer = json.loads(output.out)
    assert code == 0
    assert answer["usd_per_image"] > 0
    assert answer["cards"] == cards_json(on_cards(2, LINKS[1], steps=50))
    assert answer["cards"]["basis"] == "predicted"
    assert sum(answer["cards"]["image_rows"]) == 4096
    _, output = printed(capsys, "--cards", "2")
    assert "\nOne image on 2 GPUs: " in output.out
    assert "(predicted)" in output.out
    for argv in ((), ("--cards", "1")):
        assert "One image on" not in printed(capsys, *argv)[1].out


def test_what_the_command_refuses(capsys):
    for named, argv in (
        ("cards", "--cards 0"),
        ("cards", "--cards -2"),
        ("--cards 2.5", "--cards 2.5"),
        ("--cards nan", "--cards nan"),
        *(("link", f"--cards 2 --link {value}") for value in ("0", "-1", "nan", "inf")),
        ("--link", "--link 17"),
    ):
        code, output = printed(capsys, *argv.split())
        assert (code, output.out) == (2, "") and named in output.err
