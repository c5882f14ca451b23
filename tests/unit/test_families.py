"""The families behind their protocol: nothing outside asks which one it has, and each is whole."""

import ast
import re
from types import SimpleNamespace

import pytest
from test_checkpoint import write
from test_project_text import FILES, ROOT, tree_of

from qwen_l40s.caches import forget
from qwen_l40s.errors import CheckpointError, UnavailableError
from qwen_l40s.families import comfyui, registry
from qwen_l40s.families.identify import SIGNS, identify
from qwen_l40s.families.protocol import Family
from qwen_l40s.families.registry import FAMILIES, shape_from_header
from qwen_l40s.loaders.source import PLACES, open_source
from qwen_l40s.spec.transformer import TransformerShape

ENCODERS, VAES = registry.text_encoders(), registry.vaes()
MEMBERS = list(registry.members().values())

# --- nothing outside asks who the family is

# The hosts' modules that a family or its parts name: they belong to it, and may ask.
ADAPTERS = {
    ROOT.joinpath(*name.partition(":")[0].strip(".").split(".")).with_suffix(".py")
    for named in (*FAMILIES, *ENCODERS, *VAES)
    for name in (named.comfyui, getattr(named, "diffusers", named.comfyui))
}
ADAPTERS.add(ROOT / "hosts" / "comfyui" / "qwen_image.py")  # which `kinds.py` names
# What trains the two bundled models, each in its own way.
TRAINER = ROOT / "tools" / "micro"
GUARDED = [it for it in FILES if it not in ADAPTERS]
GUARDED = [it for it in GUARDED if it.parent not in (ROOT / "families", TRAINER)]
# {file: why it names some}
ALLOWED = {
    "hosts/comfyui/contract.py": "what is called in ComfyUI, by its names there",
    "tools/readme.py": "rows of the tables in README.md",
    "tools/workflows/notes.py": "the inputs of a workflow's nodes",
}

WHO = {"family", "families", "kin", "member", "told_as", "latent_channels", "image_channels"}
TITLES = {
    *(it for family in FAMILIES for it in (family.title, family.label, family.comfyui_class)),
    *(it for member in MEMBERS for it in (member.name, member.told_as, member.marker) if it),
    *(it for encoder in ENCODERS for it in (encoder.name, encoder.title, encoder.part)),
    *(it for vae in VAES for it in (vae.title, vae.part)),
}
NAMED = re.compile(r"qwen[-_. ]?image|qwen[23]|wan_?vae|AutoencoderKLQwen", re.I)
SHAPES = "|".join(kind.__name__ for kind in TransformerShape.__subclasses__())
CLASS = re.compile(f"QwenImage|WanVAE|Qwen3_?VL|Qwen2_?5|{SHAPES}")
LOOKS = {"get", "startswith", "endswith", "removeprefix", "removesuffix"}


def asked(node):
    """The expressions in which a node may ask who a family is."""
    match node:
        case ast.Compare(
            ops=[ast.Eq() | ast.NotEq() | ast.In() | ast.NotIn() | ast.Is() | ast.IsNot()]
        ):
            known = {"AUTO", "None"} & {ast.unparse(it) for it in node.comparators}
            return [] if known else [node.left, *node.comparators]
        case ast.Match():
            return [node.subject, *(case.pattern for case in node.cases)]
        case ast.Call(func=ast.Name("isinstance" | "issubclass")):
            return node.args[1:]
        case ast.Call(func=ast.Attribute(attr=name)) if name in LOOKS:
            return node.args[:1]
        case ast.Subscript(ctx=ast.Load()):
            return [node.slice]
        case ast.Dict():
            return filter(None, node.keys)
    return []


def names_one(node):
    """Whether an expression is a family, a name of one, or a class of one."""
    name = getattr(node, "attr", getattr(node, "id", ""))
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value in TITLES or bool(NAMED.search(node.value))
    return name in WHO or bool(CLASS.search(name))


def questions(tree):
    """Every (line, code) that compares, looks up or matches a family; tests/toy_family/ is what
    finds the others.
    """
    for node in ast.walk(tree):
        for each in asked(node):
            ends = getattr(each, "elts", [each])
            if isinstance(each, ast.pattern):
                ends = [getattr(it, "value", getattr(it, "cls", it)) for it in ast.walk(each)]
            if any(map(names_one, ends)):
                yield node.lineno, ast.unparse(node)


def test_nothing_outside_asks_who_the_family_is():
    found = {
        file: lines
        for path in GUARDED
        if (lines := [*questions(tree_of(path))])
        and (file := path.relative_to(ROOT).as_posix()) not in ALLOWED
    }
    assert found == {}


# --- the registry


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_what_the_protocol_lists(family):
    own = {name for kind in type(family).__mro__[: -len(Family.__mro__)] for name in vars(kind)}
    assert {name for name in vars(Family) if name[0] != "_"} <= own
    assert [name for name in Family.__annotations__ if not hasattr(family, name)] == []


def test_titles_and_members_are_there_once():
    names = [it.name for family in FAMILIES for it in family.members]
    assert len(names) == len({*names}) == len(registry.members())
    assert len({family.title for family in FAMILIES}) == len(FAMILIES)


@pytest.mark.parametrize(
    ("role", "tensors"),
    {
        "transformer": (
            *("txt_norm.weight", "transformer_blocks.0.attn.norm_added_q.weight"),
            *("txt_in.text_norm.weight", "transformer_blocks.0.img_mlp.gate_up.weight"),
        ),
        "controlnet": (
            *("txt_norm.weight", "controlnet_x_embedder.weight", "control_img_in.weight"),
            *("control_blocks.0.after_proj.weight", "control_blocks.0.img_mlp.gate_up.weight"),
        ),
    }.items(),
)
def test_tensors_that_two_families_claim(role, tensors):
    found = identify(dict.fromkeys(tensors, SimpleNamespace(shape=(8, 8))))
    assert found.role == role
    (error,) = found.errors
    assert f"The {role} has the tensors of Qwen-Image and Qwen-Image-2.1, " in error


def test_what_a_newer_comfyui_has_renamed_leaves_the_others(monkeypatch, caplog):
    known, renamed, *others = FAMILIES
    kind = SimpleNamespace(family=known)

    def load(name):
        if name == renamed.comfyui:
            raise ImportError("cannot import name 'QwenImage21Transformer2DModel'")
        return kind

    monkeypatch.setattr(comfyui, "load", load)
    forget()
    try:
        assert comfyui.kinds() == (kind,) * (1 + len(others))
        assert comfyui.kind_of_family(known, ROOT) is kind
        with pytest.raises(
            UnavailableError,
            match=f"{renamed.title} code, and Qwen-Image Accelerator does not support it yet",
        ):
            comfyui.kind_of_family(renamed, ROOT)
    finally:
        forget()
    assert "cannot import name 'QwenImage21Transformer2DModel'" in caplog.text


DIMS = {"dim": 8, "heads": 2, "head_dim": 4}
DIMS |= {"joint_dim": 16, "in_channels": 64, "packed_out_channels": 64}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda it: it.title)
@pytest.mark.parametrize("lacks", [*DIMS, "blocks"])
def test_a_size_that_a_header_leaves_open(family, lacks):
    assert shape_from_header(family.title, DIMS, 2).family is family
    dims = {name: size for name, size in DIMS.items() if name != lacks}
    with pytest.raises(CheckpointError, match=f"the {family.title} transformer's {lacks}, "):
        shape_from_header(family.title, dims, None if lacks == "blocks" else 2)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda it: it.title)
def test_heads_that_do_not_make_up_the_width(family):
    with pytest.raises(CheckpointError) as error:
        shape_from_header(family.title, {**DIMS, "dim": 9}, 2)
    assert f"the {family.title} transformer is 9 wide with heads of 4" in str(error.value)


def test_a_model_of_no_family_has_no_shape():
    with pytest.raises(CheckpointError, match="This is FLUX, whose transformer cannot run"):
        shape_from_header("FLUX", DIMS, 2)


@pytest.mark.parametrize("name", SIGNS)
def test_a_known_model_of_no_family_is_refused_by_its_name(tmp_path, name):
    for sign in SIGNS[name]:
        path = write(tmp_path / "file.safetensors", {sign: ("F16", (2, 2))})
        for role in PLACES:
            with pytest.raises(CheckpointError) as error:
                open_source(path, role)
            assert f"This looks like {name}, not Qwen-Image: choose " in str(error.value)
