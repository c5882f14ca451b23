"""The list of cards: what the bundled one says, how names are found, and what a file may not be."""

import contextlib
import json
from dataclasses import replace

import pytest

from qwen_l40s.charts.text import estimate_json, estimate_text, notes_of
from qwen_l40s.errors import SettingError
from qwen_l40s.machine.store import known_cards
from qwen_l40s.planning.card_list import BUNDLED, FIELDS, PRICE_FIELDS
from qwen_l40s.planning.cards import Price, UnlistedCard, card_by_driver, find_card
from qwen_l40s.planning.estimate import estimate
from qwen_l40s.planning.rates import rates_of
from qwen_l40s.planning.request import RunRequest
from qwen_l40s.spec.formats import GIB, MIB, CardFacts

CARDS = known_cards(BUNDLED)
LISTED = json.loads(BUNDLED.read_text(encoding="utf-8"))
L40S = LISTED["cards"]["L40S"]
PRICE = {
    "usd_per_hour": 0.9,
    "provider": "Somebody",
    "kind": "spot",
    "date": "2026-01",
    "source": "x",
}
# What people and drivers write, and the card that it is.
NAMES = """
NVIDIA L40S > L40S; l40s > L40S; NVIDIA L40 > L40; NVIDIA A100-SXM4-40GB > A100 40GB SXM;
NVIDIA A100-PCIE-40GB > A100 40GB PCIe; NVIDIA A100-SXM4-80GB > A100 80GB SXM;
NVIDIA A100 80GB PCIe > A100 80GB PCIe; a100 sxm 80gb > A100 80GB SXM;
NVIDIA H100 80GB HBM3 > H100 SXM; NVIDIA H100 PCIe > H100 PCIe; NVIDIA H200 > H200;
NVIDIA RTX A6000 > RTX A6000; A6000 > RTX A6000; NVIDIA RTX 6000 Ada Generation > RTX 6000 Ada;
NVIDIA GeForce RTX 4090 > RTX 4090; rtx4090 > RTX 4090; 5090 > RTX 5090;
GeForce RTX 3090 > RTX 3090; 4090 > RTX 4090;
NVIDIA GeForce RTX 4090 Laptop GPU > RTX 4090 Laptop; 4080 > RTX 4080;
NVIDIA GeForce RTX 4080 > RTX 4080; NVIDIA GeForce RTX 4080 SUPER > RTX 4080 SUPER;
rtx 4080super > RTX 4080 SUPER; NVIDIA GeForce RTX 4070 Ti SUPER > RTX 4070 Ti SUPER;
RTX 4070 > RTX 4070; RTX 4060 Ti 16 GB > RTX 4060 Ti 16GB; 4060ti 8gb > RTX 4060 Ti 8GB;
RTX 4070 Ti > RTX 4070 Ti; RTX 4070 Ti 12GB > RTX 4070 Ti; 4070 super > RTX 4070 SUPER;
NVIDIA GeForce RTX 4060 > RTX 4060; NVIDIA GeForce RTX 5080 > RTX 5080;
NVIDIA GeForce RTX 5070 Ti > RTX 5070 Ti; RTX 5070 > RTX 5070;
RTX 5060 Ti 16GB > RTX 5060 Ti 16GB; RTX 5060 Ti 8G > RTX 5060 Ti 8GB;
NVIDIA GeForce RTX 5060 > RTX 5060;
NVIDIA RTX PRO 6000 Blackwell Workstation Edition > RTX PRO 6000 Blackwell;
rtx pro 6000 > RTX PRO 6000 Blackwell; RTX PRO 6000 server > RTX PRO 6000 Blackwell Server;
NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition > RTX PRO 6000 Blackwell Max-Q;
NVIDIA L4 > L4; NVIDIA A10 > A10; Tesla T4 > T4; B200 > B200; 3090 Ti > RTX 3090 Ti;
3080 Ti > RTX 3080 Ti; 3080 12GB > RTX 3080 12GB; RTX 3080 10GB > RTX 3080 10GB;
RTX 3070 Ti > RTX 3070 Ti; 3070 > RTX 3070; RTX 3060 Ti > RTX 3060 Ti;
3060 12GB > RTX 3060 12GB; 3060 8GB > RTX 3060 8GB
"""
NAMES = [it.split(" > ") for it in NAMES.strip().replace("\n", " ").split("; ")]
NAMES += [("  L 40 S ", "L40S")]
# Each of another model than the same name without it.
VARIANTS = ("Ti", "SUPER", "Ti SUPER", "Laptop GPU", "D", "Ada", "Max-Q", "Server", "NVL", "24Q")


def write(folder, content):
    path = folder / "my cards.json"
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text, encoding="utf-8")
    return path


def changed(**fields):
    """A card of a new name, with some fields of the L40S's changed; ... removes one."""
    entry = {**L40S, "also": [], **fields}
    return {"cards": {"Mine": {name: value for name, value in entry.items() if value is not ...}}}


def test_every_card_that_people_ask_about_is_listed():
    assert {name for _, name in NAMES} == set(CARDS)


def test_bundled_file_says_every_field_of_every_card_and_price_itself():
    for entry in LISTED["cards"].values():
        assert set(entry) == set(FIELDS)
        for price in entry["prices"]:
            assert set(price) == set(PRICE_FIELDS)


def test_figures_are_plausible():
    """Catches a slip of a digit or a sparse peak: what no such card leaves."""
    for card in CARDS.values():
        peaks = card.dense_flops
        assert 7 * GIB < card.memory_bytes < 180 * GIB
        assert 2.3e11 < card.bandwidth < 8e12
        assert ("int8" in peaks) == card.facts().multiplies("int8") == (card.capability >= (8, 0))
        if card.facts().computes_in == "fp32":
            assert peaks["bf16"] == peaks["fp32"]
            continue
        assert 1.99 <= peaks["int8"] / peaks["bf16"] <= 4.01
        assert card.facts().multiplies("fp8") == (card.capability >= (8, 9))
        if "fp8" in peaks:
            assert peaks["fp8"] / peaks["bf16"] == pytest.approx(2, rel=0.02)
        assert 60 < peaks["bf16"] / card.bandwidth < 450  # FLOP a byte
        assert card.facts() == CardFacts(card.name, card.memory_bytes, card.capability)


def test_names_are_found():
    for name, expected in NAMES:
        assert find_card(name, CARDS).name == expected


def refusal(name):
    with pytest.raises(SettingError) as caught:
        find_card(name, CARDS)
    return str(caught.value)


def test_unclear_and_unknown_names_are_refused():
    for name, several in (
        ("A100", ["A100 40GB SXM", "A100 40GB PCIe", "A100 80GB SXM", "A100 80GB PCIe"]),
        ("h100", ["H100 SXM", "H100 PCIe"]),
        ("NVIDIA A100 80GB", ["A100 80GB SXM", "A100 80GB PCIe"]),
        ("RTX 4060 Ti", ["RTX 4060 Ti 16GB", "RTX 4060 Ti 8GB"]),
        ("NVIDIA GeForce RTX 5060 Ti", ["RTX 5060 Ti 16GB", "RTX 5060 Ti 8GB"]),
        ("3080", ["RTX 3080 12GB", "RTX 3080 10GB"]),
        ("3060", ["RTX 3060 12GB", "RTX 3060 8GB"]),
    ):
        assert f"choose {', '.join(several)}." in refusal(name)
    for name, nearest in (
        ("L50S", "L40S"),
        ("NVIDIA GeForce RTX 4080 Laptop GPU", "RTX 4080"),
        ("NVIDIA H100 NVL", "H100 PCIe"),
        ("RTX 3O90", "RTX 3090"),
        ("RTX 6000", "RTX A6000, RTX 6000 Ada, RTX PRO 6000 Blackwell"),
        ("RTX 4070 Ti 16GB", "RTX 4070 Ti"),
        ("RTX 2080 Ti", "RTX 3080 Ti"),
    ):
        assert nearest in refusal(name).partition(": choose one of")[0]
    for name in ("", "NVIDIA", "s", "ada", "Radeon", "16GB", "RTX", "\ud800"):
        assert "cards.json" in refusal(name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_card_answers_for_another_whose_name_is_longer_or_shorter(variant):
    words = {*variant.removesuffix(" GPU").split()}
    for name in CARDS:
        with contextlib.suppress(SettingError):
            found = find_card(f"{name} {variant}", CARDS)
            assert words <= {*found.name.split()}
        if words <= {*name.split()}:
            with contextlib.suppress(SettingError):
                found = find_card(" ".join(it for it in name.split() if it not in words), CARDS)
                assert not words <= {*found.name.split()}


def test_a_driver_names_each_card_exactly_and_its_memory_tells_two_of_one_name():
    for card in CARDS.values():
        for name in card.also:
            for memory in (card.memory_bytes, card.memory_bytes + 400 * MIB):
                facts = CardFacts(name, memory, card.capability)
                assert card_by_driver(facts, CARDS) == replace(card, memory_bytes=memory)
            laptop = replace(facts, name=f"{name} Laptop GPU")
            if not any(laptop.name in other.also for other in CARDS.values()):
                assert isinstance(card_by_driver(laptop, CARDS), UnlistedCard)


def test_lowest_price_on_demand_counts():
    offers = [(3.0, "on demand"), (2.0, "on demand"), (1.0, "spot"), (1.5, "serverless")]
    prices = tuple(Price(usd, "x", kind, "undated", "x") for usd, kind in offers)
    assert replace(CARDS["L40S"], prices=prices).price() is prices[1]
    assert replace(CARDS["L40S"], prices=prices[2:]).price() is None


def test_own_price_of_a_known_card(tmp_path):
    price = Price(0.9, "your own", "on demand", "undated", "your list")
    for name in ("L40S", "l40s", "NVIDIA L40S"):
        path = write(tmp_path, {"cards": {name: {"prices": [{"usd_per_hour": 0.9}]}}})
        assert known_cards(path) == {**CARDS, "L40S": replace(CARDS["L40S"], prices=(price,))}


def test_own_card(tmp_path):
    peaks = {"bf16": 100, "fp32": 50.5}
    path = write(tmp_path, changed(dense_tflops=peaks, memory_mib=4096, prices=[PRICE]))
    card = known_cards(str(path))["Mine"]
    assert card.memory_bytes == 4 * GIB
    assert card.dense_flops == {"bf16": 100e12, "fp32": 50.5e12}
    assert card.prices == (Price(**PRICE),)
    assert find_card("mine", known_cards(path)) == card


@pytest.mark.parametrize("broken", ["text", "folder", "link"])
def test_damaged_list_in_the_cache_folder_is_named(tmp_path, set_settings, broken):
    set_settings(cache=str(tmp_path))
    path = tmp_path / "cards.json"
    if broken == "text":
        path.write_text("{")
    elif broken == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "none.json")
    with pytest.raises(SettingError) as caught:
        known_cards()
    assert str(path) in str(caught.value)


DRIVERS = [
    ("NVIDIA L40S-48Q", 45, (8, 9), "L40S"),
    ("NVIDIA L40S-24Q", 24, (8, 9), "L40S"),
    ("NVIDIA GeForce RTX 4090 D", 23.5, (8, 9), "RTX 4090"),
    ("NVIDIA H100 NVL", 93, (9, 0), "H100 SXM"),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.8, (9, 0), "H100 SXM"),
    ("NVIDIA H200 NVL", 139, (9, 0), "H200"),
    ("NVIDIA A40", 44.4, (8, 6), "RTX A6000"),  # a part of two A100s' names
    ("NVIDIA A100-SXM-64GB", 63, (8, 0), "A100 80GB SXM"),
    ("NVIDIA B300 SXM6 AC", 268, (10, 3), "B200"),
    ("\ud800", 1, (3, 0), None),
]


def test_card_that_is_not_listed_is_what_the_driver_tells():
    for name, gib, capability, nearest in DRIVERS:
        facts = CardFacts(name, int(gib * GIB), capability)
        card = card_by_driver(facts, CARDS)
        assert isinstance(card, UnlistedCard)
        assert card.facts() == facts
        assert card.nearest in CARDS
        assert nearest in (None, card.nearest)
        assert card.price() is None
        assert replace(card, memory_bytes=2 * GIB).nearest == card.nearest


def test_card_that_is_not_listed_is_estimated_without_times_or_cost():
    """Until it is calibrated; its memory counts as another card's."""
    card = card_by_driver(CardFacts("NVIDIA A40", 45634 * MIB, (8, 6)), CARDS)
    found = estimate(RunRequest(), card, usd_per_hour=2.0)
    alike = estimate(RunRequest(), replace(CARDS["RTX A6000"], memory_bytes=card.memory_bytes))
    answer, expected = map(estimate_json, (found, alike))
    for name in ("step_ms", "image_seconds", "first_image_seconds", "usd_per_image"):
        assert answer[name] is None and expected[name] > 0
    assert answer["ranges"] == {} and answer["basis"] == "unknown"
    for name in ("fits", "template", "headroom_gib", "disk", "host_ram_gib", "settings"):
        assert answer[name] == expected[name]
    for name, phase in answer["phases"].items():
        assert phase["seconds"] is None
        assert phase["card_gib"] == expected["phases"][name]["card_gib"]
    (note,) = (note for note in notes_of(found) if card.name in note)
    assert "RTX A6000" in note and "bench --calibrate" in note and "USD" not in estimate_text(found)
    rates = rates_of(CARDS["RTX A6000"])[0]
    free, paid = (
        estimate(RunRequest(), card, calibration=rates, usd_per_hour=it) for it in (None, 2)
    )
    assert free.basis.kind == "measured" and free.step_seconds.low > 0
    assert free.usd_per_image is None and paid.usd_per_image.low > 0


def test_own_list_may_have_a_byte_order_mark_and_notes(tmp_path):
    path = write(tmp_path, "\ufeff" + json.dumps({"notes": {"mine": "text"}, "cards": {}}))
    assert known_cards(path) == CARDS


def test_missing_field_is_named(tmp_path):
    for field in FIELDS:
        path = write(tmp_path, changed(**{field: ...}))
        with pytest.raises(SettingError) as caught:
            known_cards(path)
        for part in (str(path), "'Mine'", repr(field), FIELDS[field][1]):
            assert part in str(caught.value)


NUMBERS = [
    "memory_mib",
    "bandwidth_gb_per_second",
    "l2_mib",
    "pcie_generation",
    "pcie_lanes",
    "tdp_watts",
]
NO_NUMBERS = ["0", "-1", "1e999", "9" * 400, "true", '"8"', "null"]
WRONG = [
    *(f'"{field}": {value}' for field in NUMBERS for value in [*NO_NUMBERS, "[1]"]),
    *(f'"dense_tflops": {{"bf16": {value}, "fp32": 1}}' for value in NO_NUMBERS),
    '"dense_tflops": {"bf16": 1}',
    '"dense_tflops": {"bf16": 2, "fp8": 1, "fp32": 1}',
    '"dense_tflops": {"bf16": 1, "fp32": 2}',
    '"dense_tflops": {"bf16": 1, "fp32": 1, "fp4": 1}',
    '"dense_tflops": [1, 2]',
    '"memory_mib": 24081.5',
    '"capability": [8]',
    '"capability": [8, -1]',
    '"capability": [true, 9]',
    '"capability": "8.9"',
    '"pcie_generation": 7',
    '"pcie_lanes": 3',
    '"pcie_lanes": 16.0',
    '"also": "L40S"',
    '"also": [1]',
    '"architecture": ""',
    '"source": "  "',
    '"source": ["data sheet"]',
    f'"source": "{"x" * 3000}"',
    '"prices": {}',
    '"prices": null',
]


def test_wrong_value_is_named(tmp_path):
    for field in WRONG:
        path = write(tmp_path, f'{{"cards": {{"L40S": {{{field}}}}}}}')
        name = field.partition(":")[0].strip('"')
        with pytest.raises(SettingError) as caught:
            known_cards(path)
        text = str(caught.value)
        for part in (str(path), "'L40S'", repr(name), FIELDS[name][1]):
            assert part in text
        assert len(text) < 500


def test_wrong_price_is_named(tmp_path):
    for field, value in (
        *(("usd_per_hour", value) for value in NO_NUMBERS),
        ("usd_per_hour", "-0.72"),
        ("kind", '"monthly"'),
        ("kind", "1"),
        ("date", '"yesterday"'),
        ("date", '"2026-13"'),
        ("date", "2026"),
        ("provider", '""'),
        ("source", "[]"),
    ):
        entry = {name: good for name, good in PRICE.items() if name != field}
        prices = f'[{json.dumps(PRICE)}, {json.dumps(entry)[:-1]}, "{field}": {value}}}]'
        path = write(tmp_path, f'{{"cards": {{"H200": {{"prices": {prices}}}}}}}')
        with pytest.raises(SettingError) as caught:
            known_cards(path)
        for part in (str(path), "'H200'", "entry 2", repr(field), PRICE_FIELDS[field][1]):
            assert part in str(caught.value)


BROKEN = [  # what is named, besides the file; what the file holds
    ("JSON", ""),
    ("JSON", "{"),
    ("object", "[]"),
    ("NaN", '{"cards": {"L40S": {"memory_mib": NaN}}}'),
    ("JSON|nested", "[" * 100_000),
    ("'cards'", '{"cards": {}, "cards": {}}'),
    ("'cards'", "{}"),
    ("'cards'", '{"cards": [1]}'),
    ("'card'.*'cards'", '{"card": {}}'),
    ("'notes'", '{"cards": {}, "notes": [1]}'),
    ("'L40S'", '{"cards": {"L40S": 0.72}}'),
    ("'price'.*'prices'", '{"cards": {"L40S": {"price": []}}}'),
    ("'zzz'.*also, ", '{"cards": {"L40S": {"zzz": 1}}}'),
    ("entry 1", '{"cards": {"L40S": {"prices": [0.7]}}}'),
    ("'usd_per_hour'", '{"cards": {"L40S": {"prices": [{}]}}}'),
    ("'usd'", '{"cards": {"L40S": {"prices": [{"usd": 1}]}}}'),
    ("entry 2", '{"cards": {"L40S": {"prices": [{"usd_per_hour": 1}, {"usd_per_hour": 2}]}}}'),
    ("'L40S' and 'l40s'", '{"cards": {"L40S": {}, "l40s": {}}}'),
    ("RTX 4060 Ti 16GB, RTX 4060 Ti 8GB", '{"cards": {"RTX 4060 Ti": {}}}'),
    ("''", '{"cards": {"": {}}}'),
    ("UTF-8", '{"cards": {"\\ud800": {}}}'),
    ("'L40S' and 'L40'", '{"cards": {"L40S": {"also": ["NVIDIA L40"]}}}'),
    ("1 MiB", " " * (2**20 + 1)),
]


@pytest.mark.parametrize(("named", "content"), BROKEN, ids=range(len(BROKEN)))
def test_file_that_breaks_the_form_is_refused(tmp_path, named, content):
    path = write(tmp_path, content)
    with pytest.raises(SettingError, match=named) as caught:
        known_cards(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 600


def test_file_that_cannot_be_read_is_refused(tmp_path):
    path = tmp_path / "latin.json"
    path.write_bytes(b'{"cards": {"\xe9": {}}}')
    for broken in (path, tmp_path, tmp_path / "none.json"):
        with pytest.raises(SettingError, match=str(broken)):
            known_cards(broken)
