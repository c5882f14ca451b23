"""`qwen-l40s advise` as a command."""

import json

import pytest

from qwen_l40s.cli import main
from qwen_l40s.machine.store import known_cards


def found(capsys, *argv, code=0):
    """The object that the command prints, which is all that it prints."""
    assert main(["advise", *argv, "--json"]) == code
    (line,) = capsys.readouterr().out.splitlines()
    return json.loads(line)


def refused(capsys, *argv):
    """The one sentence of an error."""
    assert main(["advise", *argv]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith("qwen-l40s: error: ")
    return line


def test_cards_are_ranked_by_what_an_image_costs(capsys):
    output = found(capsys, "--images-per-hour", "100")
    fitting = [advice for advice in output["advices"] if advice["fits"]]
    costs = [advice["usd_per_image"] for advice in fitting]
    assert costs == sorted(costs)
    for advice in output["advices"]:
        low, high = advice["ranges"]["seconds_per_image"]
        assert low <= advice["seconds_per_image"] <= high
        for name in ("cards", "usd_per_image"):  # what the slowest time takes
            low, high = advice["ranges"][name]
            assert low <= high == advice[name]
        assert advice["basis"] in ("measured", "predicted")
        assert advice["note"]
        assert advice["price_source"]
    named = {advice["card"] for advice in output["advices"]}
    assert named | set(output["unpriced"]) | set(output["refused"]) == set(known_cards())
    assert "L40" in output["unpriced"]


def test_what_an_image_costs_at_three_loads(capsys):
    output = found(capsys, "--images-per-hour", "100")
    assert output["loads"] == [10, 100, 1000]
    for advice in output["advices"]:
        assert advice["usd_at_loads"][1] == pytest.approx(advice["usd_per_image"], rel=1e-3)
        assert advice["usd_at_loads"][0] >= advice["usd_at_loads"][2] * (1 - 1e-9)


def test_the_text(capsys):
    assert main(["advise", "--images-per-hour", "100"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Cheapest for 100 images per hour: ")
    assert "L40S" in text
    assert "A100 80GB SXM" in text
    assert '--price "L40=1.00"' in text
    assert all(len(line) <= 100 for line in text.splitlines() if not line.startswith("Set: "))


def test_a_step_cache_is_cheaper_and_says_what_else_is(capsys):
    plain, cached = (
        found(capsys, "--images-per-hour", "100", "--cache", cache)["advices"]
        for cache in ("off", "balanced")
    )
    seconds = [{each["card"]: each["seconds_per_image"] for each in all} for all in (plain, cached)]
    assert all(seconds[1][card] < 0.6 * took for card, took in seconds[0].items())
    assert main(["advise", "--images-per-hour", "100", "--cache", "balanced"]) == 0
    text = capsys.readouterr().out
    assert "\nStep cache: balanced computes 26 of 50 steps, " in text


def test_the_summary_says_what_is_safer_than_a_tight_card_in_six_lines(capsys):
    large = ["--price", "L40S=0.01", "--size", "2048x2048"]
    assert main(["advise", "--images-per-hour", "50", *large]) == 0
    lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert "L40S in int8, tight, $" in lines[0]
    assert lines[1].startswith("Tight, not measured: ") and lines[2].startswith("Safer: ")
    assert len(lines) <= 6


def test_prices_of_ones_own(capsys):
    listed, own = (
        found(capsys, "--images-per-hour", "9", "--only", "L40S", *price)["advices"][0]
        for price in ((), ("--price", "l40s=7.2"))
    )
    assert own["usd_per_image"] == pytest.approx(10 * listed["usd_per_image"], rel=1e-3)
    assert own["price_source"] == "your own"
    both = found(capsys, "--images-per-hour", "9", "--price", "H200=3", "L40=1.1")
    assert {"H200", "L40"} <= {advice["card"] for advice in both["advices"]}


def test_only_some_cards(capsys):
    output = found(capsys, "--images-per-hour", "9", "--only", "H100 SXM", "a100 80gb sxm")
    assert {advice["card"] for advice in output["advices"]} == {"H100 SXM", "A100 80GB SXM"}


def test_a_list_of_ones_own(capsys, tmp_path):
    path = tmp_path / "cards.json"
    path.write_text(json.dumps({"cards": {"H200": {"prices": [{"usd_per_hour": 0.01}]}}}))
    output = found(capsys, "--images-per-hour", "9", "--cards", str(path))
    assert output["advices"][0]["card"] == "H200"


def test_no_card_with_a_price_is_exit_code_1(capsys):
    output = found(capsys, "--images-per-hour", "9", "--only", "L40", code=1)
    assert output["advices"] == []
    assert output["unpriced"] == ["L40"]
    assert main(["advise", "--images-per-hour", "9", "--only", "L40"]) == 1
    text = capsys.readouterr().out
    assert text.startswith("None of these GPUs has a price") and "--price" in text


def test_the_plot(tmp_path, capsys):
    image = pytest.importorskip("PIL.Image")
    path = tmp_path / "advise.png"
    assert main(["advise", "--images-per-hour", "100", "--plot", str(path)]) == 0
    with image.open(path) as picture:
        assert (picture.mode, picture.width) == ("RGB", 1280)


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--images-per-hour", "0"], ["images-per-hour", "above 0"]),
        (["--images-per-hour", "-3"], ["images-per-hour"]),
        (["--images-per-hour", "nan"], ["images-per-hour"]),
        (["--images-per-hour", "inf"], ["images-per-hour"]),
        (["--images-per-hour", "9", "--price", "L40S=-1"], ["at least 0", "-1"]),
        (["--images-per-hour", "9", "--price", "L40S"], ["L40S = 0.79"]),
        (["--images-per-hour", "9", "--price", "L40SS=1"], ["'L40SS'", "L40S,"]),
        (["--images-per-hour", "9", "--price", "L40S=1", "l40s=2"], ["L40S already has a price"]),
        (["--images-per-hour", "9", "--only", "toaster"], ["toaster"]),
        (["--images-per-hour", "9", "--size", "1000x1000"], ["divisible by 16"]),
        (["--images-per-hour", "9", "--plot", "x.jpg"], [".png"]),
        (["--images-per-hour", "9", "--cards", "nowhere.json"], ["nowhere.json"]),
        (
            [*("--images-per-hour", "9", "--plot", "x.png"), "--only", "L40S", "--price", "L40S=0"],
            ["--plot", "--price"],
        ),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, list) else None,
)
def test_bad_input_is_one_sentence_with_the_remedy(capsys, argv, words):
    line = refused(capsys, *argv)
    assert all(word in line for word in words), line
