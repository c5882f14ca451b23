"""`--set`: its grammar, which input a key means, and what values an input takes."""

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


# What is refused

RANGES = ("5..1", "1...4", "1..", "..4", "1..2..3", "1..2.5", "-1..1", f"1..{'9' * 5000}")
FILES = ("none.txt", "", ".", "zero\0byte", "x" * 5000, "~nobody-here/x")
REFUSED = [
    *((text, "KEY=VALUE") for text in ("", "seed", "=7", " =7", "@file")),
    (["seed=1", "seed=2"], "--set seed"),
    ("prompt=caf\udce9", "UTF-8"),
    *((f"prompt=@{name}", "--set prompt") for name in FILES),
    # A title of several inputs, an input of several nodes, and what there is, nearest first.
    ("size=512", "Size.width, Size.height, Size.batch_size"),
    ("text=x", "Prompt.text, Negative prompt.text"),
    ("sede=7", "'sede': choose one of Sample.seed, "),
    ("Prompt.txt=7", "'Prompt.txt': choose one of Prompt.text."),
    (f"{'a cat. ' * 20_000}x=7", "'a cat. a cat."),  # without `prompt=`; each dot may end a title
    ("Sample.positive=x", "set Prompt.text"),
    ("images=x", "(KSampler, id sample)"),
    ("Prompt.clip=x", "a missing node"),
    (["seed=1", "sample.seed=2"], "--set seed and --set sample.seed both set Sample.seed"),
    *((f"seed={text}", "Sample.seed is ") for text in ("", "1.5", "1_000", "9" * 5000)),
    ("seed=18446744073709551616", "from 0 to"),
    ("seed=-1", "from 0"),
    ("steps=0", "from 1 to 10000"),
    ("width=1000", "use 992 or 1008"),
    ("width=17000", "from 16 to 16384"),
    *((f"cfg={text}", "not a number") for text in ("four", "nan", "inf", "1e999")),
    ("cfg=101", "from 0.0 to 100.0"),
    ("sampler_name=eulr", "use euler, "),
    ("sampler_name=dpm_2m", " more."),
    ("precision=fp16", "is not a choice"),
    *((f"seed={text}", "") for text in RANGES),
    ("seed=1..1000001", "1,000,001 (seed)"),
    ("seed=0..18446744073709551615", "18,446,744,073,709,551,616 jobs"),
    (["seed=1..1001", "steps=1..1000"], "1,001 (seed) x 1,000 (steps)"),
]


@pytest.mark.parametrize(("texts", "named"), REFUSED, ids=lambda it: str(it)[:30])
def test_what_is_refused_is_named(texts, named):
    said = refused(*([texts] if isinstance(texts, str) else texts))
    assert named in said and len(said) < 15_000


@pytest.mark.parametrize("data", [b"", b" \r\n\n", b"caf\xe9"])
def test_a_file_without_usable_lines_is_refused(tmp_path, data):
    (tmp_path / "prompts.txt").write_bytes(data)
    assert "prompts.txt" in refused(f"prompt=@{tmp_path / 'prompts.txt'}")


OTHERS = {
    "decode": (node("VAEDecode", "Decode", samples=["sample", 0]), "decode=1", "no input to set"),
    "lora": (node("QwenL40S_LoadLora", "LoRA", strength=1.0), "LoRA.model=x", "of type MODEL"),
    "resize": (
        node("ResizeImageMaskNode", **{"resize_type.width": 512}, resize_type="scale dimensions"),
        "ResizeImageMaskNode.resize_type.width=-1",
        "from 0 to 16384",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_another_node_does_not_take_is_refused(name):
    content, text, named = OTHERS[name]
    assert named in refused(text, graph={name: content})


@pytest.mark.parametrize(
    ("spec", "text", "named"),
    [
        (NodeInput("BOOLEAN"), "maybe", "true or false"),
        (NodeInput("INT", {"min": 2}), "1", "2 or more"),
        (NodeInput("INT", {"min": None, "max": 2}), "3", "2 or less"),
        (NodeInput("INT", {"step": 8}), "9", "8 or 16"),
        (NodeInput("COMBO", choices=("A.pt", "a.pt"), closed=True), "a.PT", "is not a choice"),
    ],
    ids=str,
)
def test_a_value_that_an_input_does_not_take_is_refused(spec, text, named):
    with pytest.raises(SettingError, match=f"^x is .*{named}"):
        value_of(text, spec, "x")


# What is taken


def test_the_value_begins_after_the_first_equals_sign_and_keeps_its_spaces():
    assert parse_settings([" prompt = a = b "]) == {"prompt": (" a = b ",)}


def test_a_file_gives_a_value_for_each_line(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffa kettle\r\n\r\n  \nein Käfer\r水壶 \u2028 x".encode())
    lines = ("a kettle", "ein Käfer", "水壶 \u2028 x")
    assert parse_settings([f"prompt=@{file}"]) == {"prompt": lines}


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


EDIT = {"edit": node("TextEncodeQwenImageEditPlus", "Instruction", prompt="x")}
DOTS = {"5": node("CLIPTextEncode", "v1.5 prompt", text="x")}
TWO = {"6": GRAPH["positive"], "7": GRAPH["positive"]}


@pytest.mark.parametrize(
    ("graph", "key", "expected"),
    [
        # A title comes before an input of that name, but for a title of several inputs.
        (EDIT, "prompt", ("edit", "prompt")),
        ({**EDIT, "positive": GRAPH["positive"]}, "prompt", ("positive", "text")),
        ({"steps": GRAPH["empty"], "sample": GRAPH["sample"]}, "steps", ("sample", "steps")),
        (DOTS, "v1.5 prompt", ("5", "text")),
        (DOTS, "v1.5 prompt.text", ("5", "text")),
        (TWO, "7.text", ("7", "text")),
        # What the page saved beside the inputs is not meant.
        ({"9": node("LoadImage", "Photo", image="x", upload="image")}, "photo", ("9", "image")),
    ],
)
def test_a_key_finds_its_input_in_other_graphs(graph, key, expected):
    assert place(key, graph) == expected


def test_two_nodes_of_one_title_are_told_apart_by_id():
    assert "6.text, 7.text" in refused("prompt=x", graph=TWO)


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


def test_a_class_that_the_server_lacks_takes_the_type_of_its_value():
    graph = {"1": node("Unknown", "Other", number=3, text="x", flag=True, share=0.5)}
    texts = ["number=4", "text=5", "flag=no", "share=1"]
    assert chosen(*texts, graph=graph) == [[4, "5", False, 1.0]]


# Values


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed=7", [7]),
        ("seed=18446744073709551615", [2**64 - 1]),
        ("cfg=1", [1.0]),
        ("cfg=.5e1", [5.0]),
        ("sampler_name=euler", ["euler"]),
        ("sampler_name=EULER", ["euler"]),
        ("prompt=1..8", ["1..8"]),
        ("prompt=", [""]),
        ("prompt=@@home", ["@home"]),
        ("image=photos/My cat.png", ["photos/My cat.png"]),
        ("lora=any.safetensors", ["any.safetensors"]),
        ("width=1024", [1024]),
        ("seed=1..4", [1, 2, 3, 4]),
        ("seed=7..7", [7]),
        ("seed= 1..2 ", [1, 2]),
        ("cfg=1..3", [1.0, 2.0, 3.0]),
        ("offset=-3..2", [-3, -2, -1, 0, 1, 2]),
    ],
)
def test_a_text_becomes_what_the_input_takes(text, expected):
    graph = GRAPH | {"offset": node("PrimitiveInt", "Offset", value=0)}
    found = [value for [value] in chosen(text, graph=graph)]
    assert found == expected and list(map(type, found)) == list(map(type, expected))


@pytest.mark.parametrize(
    ("spec", "text", "expected"),
    [
        *((NodeInput("BOOLEAN"), text, True) for text in ("true", "YES", "On", "1")),
        *((NodeInput("BOOLEAN"), text, False) for text in ("false", "NO", "Off", "0")),
        (NodeInput("COMBO", choices=(5, 10), closed=True), "10", 10),
        (NodeInput("COMBO", choices=("A.pt", "a.pt"), closed=True), "a.pt", "a.pt"),
    ],
    ids=str,
)
def test_a_value_that_an_input_takes(spec, text, expected):
    assert value_of(text, spec, "x") == expected


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


# Ranges and combinations


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


def test_without_settings_there_is_the_graph_itself():
    [variation] = made()
    assert variation.graph == GRAPH
    assert variation.chosen == {}


def test_the_graph_that_was_given_stays_as_it_was():
    before = {key: {**value, "inputs": dict(value["inputs"])} for key, value in GRAPH.items()}
    made("seed=5..6", "prompt=x")
    assert before == GRAPH


def test_jobs_share_the_nodes_that_no_setting_changes():
    first, second = made("seed=1..2")
    assert all(
        first.graph[key] is GRAPH[key] is second.graph[key] for key in GRAPH.keys() - {"sample"}
    )
