"""What is recommended on which card, and what of a request is kept."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_l40s.charts.text import estimate_json, reasons
from qwen_l40s.errors import CheckpointError, UnavailableError
from qwen_l40s.families.qwen_image import FULL_SIZE
from qwen_l40s.machine.store import known_cards
from qwen_l40s.planning.bytes import TransformerBytes, weight_bytes
from qwen_l40s.planning.cards import find_card
from qwen_l40s.planning.estimate import estimate
from qwen_l40s.planning.phases import KEPT_FREE_BYTES
from qwen_l40s.planning.plan import auto_precision, plan
from qwen_l40s.planning.request import DROPPED, ON_PROCESSOR, STREAMED, Loras, Parts, RunRequest
from qwen_l40s.planning.vae import decode_plan
from qwen_l40s.spec.formats import BYTES_PER_WEIGHT, GIB, MIB, CardFacts
from qwen_l40s.spec.transformer import OFF_CARD, ON_CARD

CARDS = known_cards()
OTHERS = {
    # What CUDA shows of cards that are in no list.
    "16 GB": CardFacts("RTX 4080", 15_937 * MIB, (8, 9)),
    "8 GB": CardFacts("RTX 4060", 7_940 * MIB, (8, 9)),
    "no Triton": CardFacts("RTX 4090", 24_082 * MIB, (8, 9), no_int8="triton is not installed"),
    "4 GB": CardFacts("RTX 3050 Ti", 4_096 * MIB, (8, 6)),
}


def card(name):
    return OTHERS[name] if name in OTHERS else find_card(name, CARDS).facts()


def why(option):
    return "; ".join(reasons(option).values())


def short(option):
    setting = option.setting
    place = {ON_CARD: "text", DROPPED: "drop", STREAMED: "stream", ON_PROCESSOR: "cpu"}[
        setting.text_encoder_place
    ]
    modulation = "on" if setting.modulation == ON_CARD else "off"
    words = [setting.precision, modulation, setting.text_encoder, place]
    return " ".join(words if option.resident else [*words, "moved"])


# --- cards and requests ---

USUAL = RunRequest()
LARGE = RunRequest(width=2048, height=2048, batch=2)
NEWEST = RunRequest(family="qwen-image-2.1", width=None, height=None)
EDIT = RunRequest(family="qwen-image-edit-2511", width=1024, height=1024, references=3)
TABLE = [
    (USUAL, "H200", ["int8 on bf16 text", "bf16 on bf16 text"]),
    (USUAL, "A100 80GB SXM", ["int8 on bf16 text", "bf16 on bf16 text"]),
    (USUAL, "L40S", ["int8 on bf16 text", "bf16 off bf16 text"]),
    (USUAL, "A100 40GB PCIe", ["int8 off bf16 text", "bf16 off fp8 text"]),
    (USUAL, "5090", ["int8 off bf16 text", "bf16 off fp8 drop"]),
    (USUAL, "4090", ["int8 off fp8 drop", "bf16 off fp8 drop moved"]),
    (USUAL, "3090", ["int8 off fp8 drop", "bf16 off fp8 drop moved"]),
    (USUAL, "4070", ["int8 off fp8 drop moved", "bf16 off fp8 drop moved"]),
    (USUAL, "4060", ["int8 off fp8 stream moved", "bf16 off fp8 stream moved"]),
    (USUAL, "4 GB", ["int8 off fp8 stream moved", "bf16 off fp8 stream moved"]),
    (USUAL, "T4", ["bf16 off fp8 drop moved"]),
    (USUAL, "no Triton", ["bf16 off fp8 drop moved", "int8 off fp8 drop"]),
    (LARGE, "L40S", ["int8 on bf16 text", "bf16 off bf16 text"]),
    (EDIT, "4090", ["int8 off fp8 drop", "bf16 off fp8 drop moved"]),
    (NEWEST, "L40S", ["int8 on bf16 text", "bf16 on bf16 text"]),
    (NEWEST, "4090", ["int8 on int8 text", "bf16 on int8 drop"]),
    (NEWEST, "4070", ["int8 on int8 drop", "bf16 on int8 drop moved"]),
    (NEWEST, "4060", ["int8 on w4a8 stream moved", "bf16 on w4a8 stream moved"]),
]


@pytest.mark.parametrize(("asked", "name", "expected"), TABLE)
def test_options(asked, name, expected):
    assert [short(option) for option in plan(card(name), asked)] == expected


@pytest.mark.parametrize("name", [*CARDS, *OTHERS])
def test_every_reason_has_figures_and_is_one_line(name):
    for option in plan(card(name), USUAL):
        assert re.search(r"\d GiB", why(option))
        assert "\n" not in why(option)
        assert "None" not in why(option)
        assert option.setting.precision in why(option)
        assert card(name).name in reasons(option)["room"]
        if option.moved_bytes:
            each = option.moved_bytes / GIB
            assert f"{each:.1f} GiB moves to the GPU in every pass" in why(option)
            assert f"{2 * each:.1f} GiB in every step" in why(option)


def test_the_reasons_of_the_card_that_this_is_made_for():
    first, second = plan(card("L40S"), USUAL)
    assert why(first).startswith("auto: int8 products run on L40S; int8 with rotation ")
    assert all(figure in why(first) for figure in ("0.0058", "0.0042", "0.995", "38.8 dB"))
    assert why(second).startswith("bf16 (most accurate) is what the model was trained in")
    words = "12.7 GiB stays in system RAM"
    accurate = plan(card("L40S"), replace(USUAL, precision="bf16"))[0]
    assert words in why(accurate)
    assert 41.5 * GIB < accurate.peak_bytes < 43.5 * GIB  # 42.0 measured on an H200


@pytest.mark.parametrize(("name", "words"), [("T4", "sm_80"), ("no Triton", "not installed")])
def test_where_int_8_products_do_not_run_the_reason_says_why(name, words):
    first, *others = plan(card(name), USUAL)
    assert first.recommended and not any(option.recommended for option in others)
    assert why(first).startswith("auto: bf16 (most accurate)") and words in why(first)
    assert all(words in why(it) and "save memory, not time" in why(it) for it in others)


SMALL = 59 * GIB // 4  # where int8 stays, and leaves half a GiB


def test_what_is_left_decides_about_tiles():
    whole, tiled = (plan(CardFacts("card", size, (8, 9)), USUAL) for size in (46 * GIB, SMALL))
    assert whole[0].tiles == 1
    assert tiled[0].tiles > 1
    assert tiled[0].resident


def test_nothing_is_moved_without_guidance_but_once():
    request = replace(USUAL, cfg="off")
    assert "in every step" in why(plan(card("8 GB"), request)[0])
    assert "in every forward pass" not in why(plan(card("8 GB"), request)[0])


# --- properties ---

sizes = st.integers(8 * GIB, 100 * GIB)
capabilities = st.sampled_from([(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0)])
requests = st.builds(
    RunRequest,
    width=st.sampled_from([512, 1024, 1328, 1664]),
    height=st.sampled_from([928, 1024, 1328]),
    batch=st.integers(1, 2),
    cfg=st.sampled_from(["two passes", "one pass", "off"]),
    loras=st.builds(Loras, st.integers(0, 2), st.just(32), st.sampled_from(["merge", "bypass"])),
    text_encoder=st.sampled_from(["auto", "bf16", "int8"]),
)


@given(request=requests, total=sizes, more=st.integers(0, 40 * GIB), capability=capabilities)
@settings(max_examples=25, deadline=None)
def test_memory_does_not_change_the_precision(request, total, more, capability):
    small, large = (
        plan(CardFacts("card", size, capability), request) for size in (total, total + more)
    )
    expected = auto_precision(CardFacts("card", total, capability))
    assert small[0].setting.precision == large[0].setting.precision == expected
    assert small[0].resident <= large[0].resident
    for options in (small, large):
        assert len({option.setting for option in options}) == len(options)


named = st.fixed_dictionaries(
    {},
    optional={
        "precision": st.sampled_from(["bf16", "int8", "fp8"]),
        "modulation": st.sampled_from([ON_CARD, OFF_CARD]),
        "text_encoder_place": st.sampled_from([ON_CARD, DROPPED, ON_PROCESSOR]),
        "tiles": st.sampled_from([1, 2, 5]),
    },
)


@given(named=named, total=sizes)
@settings(max_examples=40, deadline=None)
def test_what_is_named_is_kept(named, total):
    options = plan(CardFacts("card", total, (8, 9)), replace(USUAL, **named))
    kept = [options[0]]
    if options[0].resident:
        kept = options
    for option in kept:
        found = {
            "precision": option.setting.precision,
            "modulation": option.setting.modulation,
            "text_encoder_place": option.setting.text_encoder_place,
        }
        assert {name: found[name] for name in named.keys() & found.keys()}.items() <= named.items()
        if "tiles" in named:
            assert (option.tiles == 1) == (named["tiles"] == 1)
            assert option.tiles >= named["tiles"]
    if not options[0].resident:
        # Of those that move something too, only others of the same request precede what would stay.
        rest = [option for option in options if option.resident]
        assert options[len(options) - len(rest) :] == tuple(rest)


def test_a_whole_decode_that_no_model_could_make_room_for_is_refused():
    request = RunRequest(width=1024, height=928)
    with pytest.raises(UnavailableError, match=r"1024x928 whole takes .* set tiles to 0"):
        decode_plan(replace(request, tiles=1), GIB // 4, GIB // 8)
    assert decode_plan(request, GIB // 4, GIB // 8).count > 1


@pytest.mark.parametrize("total", [4, 8, 16, 30])
def test_an_estimate_says_the_same_everywhere(total):
    request = RunRequest(precision="bf16", text_encoder_place=ON_CARD)
    found = estimate(request, replace(CARDS["L40S"], memory_bytes=total * GIB))
    option, answer = found.options[0], estimate_json(found)
    assert not found.fits and not option.resident
    assert found.headroom_bytes == option.headroom_bytes < 0
    usable = total * GIB - KEPT_FREE_BYTES
    assert option.peak_bytes == option.needs[option.peak_phase] == usable - found.headroom_bytes
    assert answer["headroom_gib"] == answer["plan"][0]["headroom_gib"]
    assert max(phase["card_gib"] for phase in answer["phases"].values()) <= usable / GIB + 1e-3
    assert found.host_memory["transformer that is moved in each pass"] == option.moved_bytes > 0


def test_one_option_of_a_plan_is_recommended():
    for name in ("L40S", "4090", "8 GB"):
        options = plan(card(name), USUAL)
        assert [option.recommended for option in options] == [True] + [False] * (len(options) - 1)
    asked, *others = plan(card("4090"), replace(USUAL, precision="bf16"))
    assert asked.setting.precision == "bf16" and not asked.recommended and not asked.resident
    assert [(it.setting.precision, it.recommended) for it in others] == [("int8", True)]
    (only,) = plan(card("4 GB"), replace(USUAL, precision="int8"))
    assert only.recommended and only.setting.precision == "int8"


# --- settings by name ---


@pytest.mark.parametrize(
    ("name", "asked", "first", "then"),
    [
        ("4090", {"precision": "bf16"}, "bf16 off fp8 drop moved", ["int8 off fp8 drop"]),
        ("3090", {"modulation": ON_CARD}, "int8 on fp8 drop moved", ["int8 off fp8 drop"]),
        ("L40S", {"modulation": ON_CARD}, "int8 on bf16 text", ["bf16 on fp8 drop"]),
        ("4090", {"precision": "fp8"}, "fp8 off fp8 drop", []),
        ("4090", {"text_encoder": "bf16"}, "int8 off bf16 drop", []),
        ("5090", {"precision": "bf16", "text_encoder_place": ON_CARD}, None, None),
        ("4 GB", {"precision": "int8"}, "int8 off fp8 stream moved", []),
    ],
)
def test_a_named_setting_comes_first(name, asked, first, then):
    options = plan(card(name), replace(USUAL, **asked))
    assert first is None or short(options[0]) == first
    if then is not None:
        assert [short(option) for option in options[1:] if option.resident] == then
    for what in asked.values():
        assert what != ON_CARD or "as requested" in why(options[0])


def test_whole_decoding_by_name():
    request = RunRequest(width=2048, height=2048, tiles=1)
    options = plan(card("5090"), request)
    assert options[0].tiles == 1
    assert options[0].resident == (options[0].headroom_bytes >= 0)
    tight = plan(CardFacts("card", 28 * GIB, (8, 9)), replace(request, precision="bf16"))
    assert tight[0].tiles == 1
    assert not tight[0].resident
    assert tight[0].moved_bytes == 0
    assert "stay on card while sampling, but decoding needs" in why(tight[0])
    assert "leaves VRAM and comes back for each image" in why(tight[0])
    assert tight[1].resident and tight[1].setting.precision == "int8"


@pytest.mark.parametrize("name", ["A100 80GB PCIe", "3090"])
def test_a_precision_that_the_card_does_not_multiply(name):
    message = r"fp8 needs a GPU of sm_89 or newer .*: choose auto, bf16, int8"
    with pytest.raises(UnavailableError, match=message):
        plan(card(name), RunRequest(precision="fp8"))
    # Weights at hand are quantized already.
    at_hand = RunRequest(precision="fp8", parts=Parts(transformer_bytes=26 * GIB))
    option = plan(card(name), at_hand)[0]
    assert option.setting.weight_only
    assert "save memory, not time" in why(option)


def test_turing_computes_in_bf16():
    with pytest.raises(UnavailableError, match="int8 needs a GPU of sm_80 or newer"):
        plan(card("T4"), RunRequest(precision="int8"))
    option = plan(card("T4"), RunRequest(), "int8")[0]  # a file that holds it
    assert option.setting.precision == "int8" and option.setting.weight_only


# --- files ---


@pytest.mark.parametrize("stored", ["fp8", "int8"])
@pytest.mark.parametrize("name", ["H200", "L40S", "3090", "8 GB"])
def test_a_quantized_file_stays_as_it_is_where_its_products_run(stored, name):
    cast = replace(USUAL, parts=Parts(cast=stored == "fp8"))
    assert plan(card(name), cast, stored)[0].setting.precision == "int8"
    if not card(name).runs(stored):
        (option,) = plan(card(name), USUAL, stored)
        assert option.setting.precision == "int8" and "fp8 is quantized again" in why(option)
        return
    for option in plan(card(name), USUAL, stored):
        assert option.setting.precision == stored
        assert f"the file holds {stored}, and expanding it would gain nothing" in why(option)


@pytest.mark.parametrize("stored", ["bf16", "fp16", "fp32"])
def test_any_other_file_is_as_none(stored):
    for name in ("L40S", "4090"):
        known = [option.setting for option in plan(card(name), USUAL)]
        assert [option.setting for option in plan(card(name), USUAL, stored)] == known
    first, second = plan(card("L40S"), USUAL, stored)
    assert f"the file's {stored} is quantized to int8 on load" in why(first)
    assert ("rounded to bf16" in why(second)) == (stored != "bf16")


@pytest.mark.parametrize("stored", list(BYTES_PER_WEIGHT))
def test_as_stored_is_never_refused(stored):
    held = (
        {"bf16": TransformerBytes(weight_bytes(FULL_SIZE, "fp32").total, 0)}
        if stored == "fp32"
        else {}
    )
    option = plan(card("A100 80GB PCIe"), USUAL, stored, as_stored=True, known_sizes=held)[0]
    assert why(option).startswith(f"as stored: the file holds {stored}; ")
    weights = 76.1 if stored == "fp32" else weight_bytes(FULL_SIZE, stored).total / GIB
    assert f"{weights:.1f} GiB of weights" in why(option)


def test_true_sizes_are_of_what_is_stored():
    parts = Parts(transformer_bytes=30 * GIB, modulation_bytes=10 * GIB)
    request = RunRequest(parts=parts)
    facts = card("L40S")
    stored = plan(facts, request, "bf16")
    int8, bf16 = stored
    assert bf16.phases["sampling"].weights == 30 * GIB - 10 * GIB * bf16.setting.off_card
    assert int8.phases["sampling"].weights == weight_bytes(FULL_SIZE, "int8").total
    # Without a file they are of the precision that is named.
    option = plan(facts, replace(request, precision="int8"))[0]
    assert option.phases["sampling"].weights in (30 * GIB, 20 * GIB)
    # And where both are known, `held` stands above them.
    held = {"int8": TransformerBytes(12 * GIB, 2 * GIB)}
    option = plan(card("16 GB"), request, "bf16", known_sizes=held)[0]
    assert option.phases["sampling"].weights == 10 * GIB


# --- refusals ---


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (RunRequest(controlnet_bytes=3 * 10**9), ["ControlNet"]),
        (RunRequest(loras=Loras(2, 64, "bypass")), ["LoRAs"]),
        (
            RunRequest("qwen-image-layered", layers=8, references=1, controlnet_bytes=10**10),
            ["ControlNet", "references", "layers"],
        ),
    ],
    ids=["ControlNet", "LoRAs", "layers"],
)
def test_a_refusal_names_what_is_in_the_request(asked, named):
    with pytest.raises(UnavailableError) as caught:
        plan(CardFacts("card", 4 * GIB, (8, 9)), asked)
    fact, remedies = str(caught.value).split(": ")
    for what in ("ControlNet", "LoRAs", "references", "layers", "other model"):
        assert (what in fact) == (what in remedies) == (what in named)
    assert "size or batch" in remedies and "more memory" in remedies


def test_a_file_in_a_precision_that_is_not_run():
    with pytest.raises(CheckpointError, match="as 'nf4': this package computes with bf16"):
        plan(card("L40S"), USUAL, "nf4")
