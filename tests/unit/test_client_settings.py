"""`--set`: its grammar, which input a key means, and what values an input takes."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from server_nodes import stored

from qwen_l40s.client.settings import find_input, parse_settings, value_of, variations
from qwen_l40s.client.workflow import NodeInput
from qwen_l40s.errors import SettingError

INFO = stored()


def node(kind, title=None, **inputs):
    return {"class_type": kind, "inputs": inputs, **({"_meta": {"title": title}} if title else {})}


GRAPH = {
    "model": node(
        "QwenL40S_LoadModel", "Model", model="micro (bundled)", precision="auto", keep_in_bf16=""
    ),
    "positive": node("CLIPTextEncode", "Prompt", text="a kettle", clip=["clip", 0]),
    "negative": node("CLIPTextEncode", "Negative prompt", text=" ", clip=["clip", 0]),
    "empty": node("EmptySD3LatentImage", "Size", width=1328, height=1328, batch_size=1),
    "sample": node(
        "KSampler",
        "Sample",
        model=["model", 0],
        positive=["positive", 0],
        seed=1,
        steps=20,
        cfg=4.0,
        sampler_name="euler",
        scheduler="simple",
    ),
    "lora": node("QwenL40S_LoadLora", "LoRA", lora="x.safetensors", strength=1.0),
    "image": node("LoadImage", "Image 1", image="cat.png"),
    "save": node("SaveImage", "Save", filename_prefix="x", images=["sample", 0]),
}


def place(key, graph=GRAPH):
    target = find_input(graph, key, INFO)
    return target.node, target.input


def made(*texts, graph=GRAPH, info=INFO):
    return variations(graph, parse_settings(texts), info)


def chosen(*texts, **options):
    return [list(variation.chosen.values()) for variation in made(*texts, **options)]


def refused(*texts, **options):
    with pytest.raises(SettingError) as caught:
        made(*texts, **options)
    return str(caught.value)


# The grammar


def test_the_value_begins_after_the_first_equals_sign_and_keeps_its_spaces():
    assert parse_settings([" prompt = a = b "]) == {"prompt": (" a = b ",)}


@pytest.mark.parametrize("text", ["", "seed", "=7", " =7", "@file"])
def test_what_is_no_key_and_value_is_refused(text):
    with pytest.raises(SettingError, match="must be KEY=VALUE"):
        parse_settings([text])


def test_a_key_given_twice_is_refused():
    with pytest.raises(SettingError, match="--set seed is given twice"):
        parse_settings(["seed=1", "seed=2"])


def test_bytes_that_are_not_utf8_are_refused():
    with pytest.raises(SettingError, match="not UTF-8"):
        parse_settings(["prompt=caf\udce9"])


def test_a_file_gives_a_value_for_each_line(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffa kettle\r\n\r\n  \nein Käfer\r水壶 \u2028 x".encode())
    lines = ("a kettle", "ein Käfer", "水壶 \u2028 x")
    assert parse_settings([f"prompt=@{file}"]) == {"prompt": lines}


@pytest.mark.parametrize(
    ("data", "says"),
    [(b"", "has no text"), (b" \r\n\n", "no text"), (b"caf\xe9", "is not UTF-8")],
)
def test_a_file_without_usable_lines_is_refused(tmp_path, data, says):
    file = tmp_path / "prompts.txt"
    file.write_bytes(data)
    with pytest.raises(SettingError, match=says):
        parse_settings([f"prompt=@{file}"])


@pytest.mark.parametrize("name", ["none.txt", "", ".", "zero\0byte", "x" * 5000, "~nobody-here/x"])
def test_a_file_that_cannot_be_read_is_refused(name):
    with pytest.raises(SettingError, match=r"cannot read the file .* of --set prompt"):
        parse_settings([f"prompt=@{name}"])


def test_two_at_signs_are_a_text_that_begins_with_one():
    assert parse_settings(["prompt=@@home"]) == {"prompt": ("@home",)}


@pytest.mark.parametrize(
    ("title", "text", "place", "value"),
    [
        ("cfg=4, fast", "cfg=4, fast.seed=7", "sample", 7),
        ("CFG = 4", "cfg=4.seed=7", "sample", 7),
        ("a=b.c=d", "a=b.c=d.seed=7", "sample", 7),
        ("cfg=4", "prompt=cfg=4.seed=7", "positive", "cfg=4.seed=7"),
        ("cfg=4", "cfg=4.sampler_name=x=y", "sample", "x=y"),
        ("cfg=4", "cfg=7", "sample", 7.0),
    ],
)
def test_a_title_may_hold_an_equals_sign(title, text, place, value):
    graph = {**GRAPH, "sample": {**GRAPH["sample"], "_meta": {"title": title}}}
    [variation] = variations(graph, parse_settings([text], graph), {})
    assert value in variation.graph[place]["inputs"].values()


@given(texts=st.lists(st.text(max_size=30), max_size=3))
def test_any_text_is_read_or_refused(texts):
    try:
        settings = parse_settings(texts)
    except SettingError:
        return
    assert len(settings) == len(texts)
    try:
        variations(GRAPH, settings, INFO)
    except SettingError as error:
        assert str(error)


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_prompt_comes_through(text):
    typed = f"@{text}" if text.startswith("@") else text
    [variation] = made(f"prompt={typed}")
    assert variation.graph["positive"]["inputs"]["text"] == text
    assert variation.chosen == {"prompt": text}


# Keys


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("seed", ("sample", "seed")),
        ("sample.seed", ("sample", "seed")),
        ("Sample.seed", ("sample", "seed")),
        ("SAMPLE.Seed", ("sample", "seed")),
        ("sampler-name", ("sample", "sampler_name")),
        ("prompt", ("positive", "text")),
        ("positive", ("positive", "text")),
        ("Negative prompt", ("negative", "text")),
        ("negative_prompt", ("negative", "text")),
        ("negative-prompt", ("negative", "text")),
        ("Negative prompt.text", ("negative", "text")),
        ("width", ("empty", "width")),
        ("Image 1", ("image", "image")),
        ("image1", ("image", "image")),
        ("image", ("image", "image")),
        ("model", ("model", "model")),
        ("lora", ("lora", "lora")),
        ("save", ("save", "filename_prefix")),
        ("Model.modulation", ("model", "modulation")),
    ],
)
def test_a_key_finds_its_input(key, expected):
    assert place(key) == expected


def test_a_title_comes_before_an_input_of_that_name():
    edit = {"edit": node("TextEncodeQwenImageEditPlus", "Instruction", prompt="x")}
    assert place("prompt", edit) == ("edit", "prompt")
    assert place("prompt", {**edit, "positive": GRAPH["positive"]}) == ("positive", "text")


def test_a_title_of_several_inputs_gives_way_to_one_input_of_that_name():
    graph = {"steps": GRAPH["empty"], "sample": GRAPH["sample"]}
    assert place("steps", graph) == ("sample", "steps")


def test_titles_and_inputs_may_hold_dots():
    graph = {
        "5": node("CLIPTextEncode", "v1.5 prompt", text="x"),
        "6": node(
            "ResizeImageMaskNode",
            "Resize",
            **{"resize_type": "scale dimensions", "resize_type.width": 512},
        ),
    }
    assert place("v1.5 prompt", graph) == ("5", "text")
    assert place("v1.5 prompt.text", graph) == ("5", "text")
    assert place("Resize.resize_type.width", graph) == ("6", "resize_type.width")
    assert refused("Resize.resize_type.width=-1", graph=graph).endswith("from 0 to 16384.")


def test_a_title_of_several_inputs_lists_them():
    assert refused("size=512") == (
        "'size' names several inputs: write one of Size.width, Size.height, Size.batch_size."
    )


def test_an_input_of_several_nodes_lists_them():
    assert "Prompt.text, Negative prompt.text" in refused("text=x")


def test_two_nodes_of_one_title_are_told_apart_by_id():
    graph = {"6": GRAPH["positive"], "7": GRAPH["positive"]}
    assert "6.text, 7.text" in refused("prompt=x", graph=graph)
    assert place("7.text", graph) == ("7", "text")


def untitled(**more):
    graph = {"3": node("CLIPTextEncode", text="a"), "4": node("CLIPTextEncode", text="b"), **more}
    return {**graph, "9": node("KSampler", positive=["5", 0], negative=["6", 0], seed=1)}


def test_the_prompts_are_known_by_where_they_lead():
    graph = untitled(
        **{
            "5": node(
                "ControlNetApplyAdvanced", positive=["3", 0], negative=["4", 0], strength=1.0
            ),
            "6": node("ControlNetApplyAdvanced", positive=["3", 0], negative=["4", 0]),
        }
    )
    assert place("prompt", graph) == place("Positive prompt.text", graph) == ("3", "text")
    assert place("negative_prompt", graph) == ("4", "text")


def test_a_zeroed_prompt_is_no_negative_prompt():
    graph = untitled(
        **{
            "5": node("FluxGuidance", conditioning=["3", 0], guidance=3.5),
            "6": node("ConditioningZeroOut", conditioning=["3", 0]),
        }
    )
    assert place("prompt", graph) == ("3", "text")
    assert "no input 'negative prompt'" in refused("negative prompt=x", graph=graph)


def test_an_older_name_of_an_input_is_taken_with_its_older_values():
    info = stored()
    rules = info["QwenL40S_LoadLora"]["input"]["optional"]["lora_mode"][1]
    rules |= {"older_name": "how", "older": {"merged": "merge", "beside": "bypass"}}
    old = {"lora": node("QwenL40S_LoadLora", "LoRA", lora="x", strength=1.0, how="beside")}
    assert chosen("how=merged", graph=old, info=info) == [["merged"]]
    [variation] = made("LoRA.lora_mode=merge", graph=old, info=info)
    held = variation.graph["lora"]["inputs"]
    assert held["lora_mode"] == "merge" and "how" not in held
    [variation] = made("how=beside", graph={"lora": {**old["lora"], "inputs": held}}, info=info)
    held = variation.graph["lora"]["inputs"]
    assert held["how"] == "beside" and "lora_mode" not in held
    assert "both set" in refused("how=merge", "LoRA.lora_mode=bypass", graph=old, info=info)
    assert "is not a choice" in refused("how=never", graph=old, info=info)


def test_a_key_that_means_nothing_lists_what_is_there_nearest_first():
    says = refused("sede=7")
    assert says.startswith("there is no input 'sede': choose one of Sample.seed, ")
    assert "Sample.positive" not in says


def test_a_wrong_input_of_a_right_node_lists_that_node():
    assert refused("Prompt.txt=7") == ("there is no input 'Prompt.txt': choose one of Prompt.text.")


def test_a_wired_input_names_what_feeds_it():
    assert refused("Sample.positive=x") == (
        "Sample.positive cannot be set: 'Prompt' (CLIPTextEncode, id positive) is connected to it, "
        "so set Prompt.text instead."
    )
    assert "'Sample' (KSampler, id sample) is connected to it" in refused("images=x")
    assert "a missing node" in refused("Prompt.clip=x")


def test_a_node_without_values_says_so():
    graph = {"decode": node("VAEDecode", "Decode", samples=["sample", 0])}
    assert refused("decode=1", graph=graph) == (
        "'Decode' (VAEDecode, id decode) has no input to set."
    )
    assert refused("seed=1", graph=graph) == "the workflow has no input to set."


def test_a_socket_cannot_be_typed():
    assert refused("Negative prompt.clip=x").endswith("a missing node.")
    graph = {"lora": node("QwenL40S_LoadLora", "LoRA", strength=1.0)}
    assert refused("LoRA.model=x", graph=graph).startswith(
        "LoRA.model takes a connection of type MODEL"
    )


def test_two_keys_of_one_input_are_refused():
    assert refused("seed=1", "sample.seed=2") == (
        "--set seed and --set sample.seed both set Sample.seed: give one of them."
    )


def test_what_the_page_saved_beside_the_inputs_is_not_meant():
    graph = {"9": node("LoadImage", "Photo", image="cat.png", upload="image")}
    assert place("photo", graph) == ("9", "image")


def test_a_class_that_the_server_lacks_takes_the_type_of_its_value():
    graph = {"1": node("Unknown", "Other", number=3, text="x", flag=True, share=0.5)}
    texts = ["number=4", "text=5", "flag=no", "share=1"]
    assert chosen(*texts, graph=graph) == [[4, "5", False, 1.0]]


# Values


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed=7", 7),
        ("seed=18446744073709551615", 2**64 - 1),
        ("cfg=1", 1.0),
        ("cfg=.5e1", 5.0),
        ("sampler_name=euler", "euler"),
        ("sampler_name=EULER", "euler"),
        ("prompt=1..8", "1..8"),
        ("prompt=", ""),
        ("image=photos/My cat.png", "photos/My cat.png"),
        ("lora=any.safetensors", "any.safetensors"),
        ("width=1024", 1024),
    ],
)
def test_a_text_becomes_what_the_input_takes(text, expected):
    [[value]] = chosen(text)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("seed=", "Sample.seed is '', which is not a whole number"),
        ("seed=1.5", "is not a whole number"),
        ("seed=1_000", "is not a whole number"),
        ("seed=" + "9" * 5000, "is not a whole number"),
        ("seed=18446744073709551616", "is 18446744073709551616: give a number from 0 to"),
        ("seed=-1", "is -1: give a number from 0"),
        ("steps=0", "is 0: give a number from 1 to 10000"),
        ("width=1000", "Size.width is 1000, but goes in steps of 16: use 992 or 1008."),
        ("width=17000", "give a number from 16 to 16384"),
        ("cfg=four", "is 'four', which is not a number"),
        ("cfg=nan", "is not a number"),
        ("cfg=inf", "is not a number"),
        ("cfg=1e999", "is not a number"),
        ("cfg=101", "is 101.0: give a number from 0.0 to 100.0"),
        ("sampler_name=eulr", "is 'eulr', which is not a choice: use euler, "),
        ("precision=fp16", "is not a choice"),
    ],
)
def test_a_text_that_the_input_does_not_take_is_refused(text, says):
    assert says in refused(text)


def test_of_many_choices_the_nearest_are_listed():
    says = refused("sampler_name=dpm_2m")
    assert len(says.partition(" use ")[2].split(", ")) == 8
    assert re.search(r" and 3\d more\.$", says)


@pytest.mark.parametrize("text", ["true", "YES", "On", "1", "false", "NO", "Off", "0"])
def test_yes_and_no(text):
    expected = text.lower() in ("true", "yes", "on", "1")
    assert value_of(text, NodeInput("BOOLEAN"), "x") is expected


def test_neither_yes_nor_no():
    with pytest.raises(SettingError, match="x is 'maybe': give true or false"):
        value_of("maybe", NodeInput("BOOLEAN"), "x")


@pytest.mark.parametrize(
    ("rules", "text", "says"),
    [
        ({"min": 2}, "1", "x is 1: give a number of 2 or more."),
        ({"min": None, "max": 2}, "3", "x is 3: give a number of 2 or less."),
        ({"step": 8}, "9", "x is 9, but goes in steps of 8: use 8 or 16."),
    ],
)
def test_a_rule_may_bound_one_side(rules, text, says):
    with pytest.raises(SettingError) as caught:
        value_of(text, NodeInput("INT", rules), "x")
    assert str(caught.value) == says


def test_a_choice_that_is_a_number_stays_one():
    spec = NodeInput("COMBO", choices=(5, 10), closed=True)
    assert value_of("10", spec, "x") == 10


def test_two_choices_that_differ_in_case_must_be_written_exactly():
    spec = NodeInput("COMBO", choices=("A.pt", "a.pt"), closed=True)
    assert value_of("a.pt", spec, "x") == "a.pt"
    with pytest.raises(SettingError, match="is not a choice"):
        value_of("a.PT", spec, "x")


def test_a_list_that_the_server_does_not_hold_to_takes_any_text():
    graph = {
        "1": node("CustomCombo", "Choice", choice="a"),
        "2": node("LoadImageOutput", "Last", image="x.png [output]"),
    }
    assert chosen("choice=zebra", "last=y.png [output]", graph=graph) == [
        ["zebra", "y.png [output]"]
    ]


@given(text=st.text(max_size=40), kind=st.sampled_from(["INT", "FLOAT", "BOOLEAN", "COMBO"]))
@example("0\x1f", "FLOAT")
def test_any_text_is_a_value_or_refused(text, kind):
    spec = NodeInput(kind, {"min": -5, "max": 5}, choices=("a", "b", 3), closed=True)
    try:
        value = value_of(text, spec, "x")
    except SettingError as error:
        assert str(error).startswith("x is ")
        return
    assert value in spec.choices if kind == "COMBO" else -5 <= value <= 5


@given(value=st.integers(0, 2**64 - 1))
def test_any_seed_comes_back(value):
    assert chosen(f"seed={value}") == [[value]]


def test_a_text_in_the_place_of_a_key_is_refused_at_once():
    """As where `prompt=` was left out of a long prompt; each dot may end a title."""
    said = refused(f"{'a cat. ' * 20_000}x=7")
    assert "there is no input 'a cat. a cat." in said and len(said) < 300


# Ranges and combinations


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed=1..4", [1, 2, 3, 4]),
        ("seed=7..7", [7]),
        ("seed= 1..2 ", [1, 2]),
        ("cfg=1..3", [1.0, 2.0, 3.0]),
    ],
)
def test_a_range_takes_both_ends(text, expected):
    assert [value for [value] in chosen(text)] == expected


def test_a_range_may_start_below_zero():
    graph = {"1": node("PrimitiveInt", "Offset", value=0)}
    assert [value for [value] in chosen("offset=-3..2", graph=graph)] == [-3, -2, -1, 0, 1, 2]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("seed=5..1", "a range goes upwards: write 1..5."),
        ("seed=1...4", "is not a whole number"),
        ("seed=1..", "is not a whole number"),
        ("seed=..4", "is not a whole number"),
        ("seed=1..2..3", "is not a whole number"),
        ("seed=1..2.5", "is not a whole number"),
        ("seed=-1..1", "is -1: give a number from 0"),
        (f"seed=1..{'9' * 5000}", "is not a whole number"),
    ],
)
def test_a_range_that_is_none_is_refused(text, says):
    assert says in refused(text)


@given(first=st.integers(0, 10**6), count=st.integers(1, 40))
def test_any_range_gives_each_of_its_numbers(first, count):
    assert chosen(f"seed={first}..{first + count - 1}") == [[first + i] for i in range(count)]


def test_the_last_setting_varies_fastest(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("a\nb\n")
    found = made(f"prompt=@{file}", "seed=1..2")
    assert [variation.chosen for variation in found] == [
        {"prompt": "a", "seed": 1},
        {"prompt": "a", "seed": 2},
        {"prompt": "b", "seed": 1},
        {"prompt": "b", "seed": 2},
    ]
    assert [variation.graph["positive"]["inputs"]["text"] for variation in found] == [*"aabb"]
    assert [variation.graph["sample"]["inputs"]["seed"] for variation in found] == [1, 2, 1, 2]


def test_a_file_may_hold_ranges_of_a_number(tmp_path):
    file = tmp_path / "seeds.txt"
    file.write_text("1..2\n9\n")
    assert chosen(f"seed=@{file}") == [[1], [2], [9]]


def test_without_settings_there_is_the_graph_itself():
    [variation] = made()
    assert variation.graph == GRAPH
    assert variation.chosen == {}


def test_the_graph_that_was_given_stays_as_it_was():
    before = {key: {**value, "inputs": dict(value["inputs"])} for key, value in GRAPH.items()}
    made("seed=5..6", "prompt=x")
    assert before == GRAPH


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["seed=1..1000001"], r"asks for 1,000,001 jobs, 1,000,001 \(seed\), but .* 1,000,000:"),
        (["seed=0..18446744073709551615"], "18,446,744,073,709,551,616 jobs"),
        (["seed=1..1001", "steps=1..1000"], r"1,001,000 jobs, 1,001 \(seed\) x 1,000 \(steps\)"),
    ],
)
def test_too_many_jobs_are_counted_and_refused(texts, says):
    assert re.search(says, refused(*texts))


def test_jobs_share_the_nodes_that_no_setting_changes():
    first, second = made("seed=1..2")
    assert all(
        first.graph[key] is GRAPH[key] is second.graph[key] for key in GRAPH.keys() - {"sample"}
    )
