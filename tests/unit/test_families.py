"""The families behind their protocol: nothing outside asks which one it has, and each is whole."""

import ast
import re
from dataclasses import fields
from types import SimpleNamespace

import pytest
from test_checkpoint import write
from test_project_text import FILES, ROOT, tree_of

from qwen_l40s.caches import forget
from qwen_l40s.errors import CheckpointError, UnavailableError
from qwen_l40s.families import comfyui, protocol, registry
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
CONTRACT = "what is called in ComfyUI, by its names there: looked up in ComfyUI, not by a family"
INPUTS = "the inputs of a workflow's node"
TABLE = "a row of a table in README.md"
GONE = "of a form that is known, what another pack has taken away"
# {(file, code): why it asks nobody who the family is}
ALLOWED = {
    ("hosts/comfyui/contract.py", "'comfy.ldm.qwen_image.model'"): CONTRACT,
    ("hosts/comfyui/contract.py", "'QwenImageTransformerBlock.forward'"): CONTRACT,
    ("hosts/comfyui/decode/decode.py", "getattr(vae, 'latent_channels', None)"): (
        "another pack's VAE, which may be of any class"
    ),
    ("optimizations/blocks/block_form.py", "return [part_of(block, name) for name in names]"): GONE,
    (
        "optimizations/blocks/block_form.py",
        "norms = [part_of(block, name) for name in spec.norms]",
    ): GONE,
    ("tools/readme.py", "'2.1'"): TABLE,
    ("tools/readme.py", "'Qwen-Image-2512'"): TABLE,
    ("tools/readme.py", "('1.x', '1328x1328')"): TABLE,
    ("tools/readme.py", "('2.1', '1024x1024')"): TABLE,
    ("tools/workflows/notes.py", "nodes.get('EmptyQwenImageLayeredLatentImage', {})"): INPUTS,
    ("tools/workflows/notes.py", "nodes.get('TextEncodeQwenImage21', {})"): INPUTS,
}

OLD = re.compile(
    r"(?<![A-Za-z0-9])(FAMILY_21|SINGLE_STREAM|SingleStream|SHAPE_21|QWEN_IMAGE_21|QWEN3_VL"
    r"|LATENT_CHANNELS_21|is_21|StripVae|cached_prefix|gate_up|add_q_proj)"
)
# Names and keys that hold a family, a size that tells it, or what its config.json does.
WHO = {"family", "families", "kin", "member", "told_as", "comfyui_class", "comfyui_code"}
CHANNELS = {"latent_channels", "z_dim", "image_channels"}
TELLING = {"zero_cond_t", *(key for it in FAMILIES for key in it.config_facts({}))}
TITLES = {
    *(it for family in FAMILIES for it in (family.title, family.label, family.comfyui_class)),
    *(it for family in FAMILIES for pair in family.pipelines.items() for it in pair),
    *(family.micro[1] for family in FAMILIES if family.micro),
    *(it for member in MEMBERS for it in (member.name, member.told_as, member.marker) if it),
    *(it for encoder in ENCODERS for it in (encoder.name, encoder.title, encoder.part)),
    *(it for vae in VAES for it in (vae.title, vae.part)),
}
NAMED = re.compile(r"qwen[-_. ]?image|qwen[23]|wan_?vae|AutoencoderKLQwen", re.I)
# Where families and their parts are defined, whose constants are theirs.
OWN_MODULES = {
    it.__module__.rpartition(".")[2]
    for it in (*map(type, FAMILIES), *(part.identify for part in (*ENCODERS, *VAES)))
}
# The lists of all families, their parts and their adapters.
TABLES = {"FAMILIES"}
LISTS = {"members", "vaes", "text_encoders", "block_specs", "kinds", "_kinds"}

SHAPES = TransformerShape.__subclasses__()
OWN_SIZES = {it.name for kind in SHAPES for it in fields(kind)}
OWN_SIZES -= {it.name for it in fields(TransformerShape)}
CLASS = re.compile(
    "|".join(["QwenImage|WanVAE|Qwen3_?VL|Qwen2_?5", *(it.__name__ for it in SHAPES)])
)
HOST_MODULE = re.compile(r"(comfy|diffusers|transformers)\..*(qwen|\bwan\b)")
HOST_CLASSES = {"base", "transformer", "config", "VAE", "PASSES"}  # as adapters call them
HOST_OBJECTS = {"block", "transformer", "decoder", "encoder"}
FORM_READERS = {"spec_of", "part_of", "blocks_of"}
STRING_METHODS = {"lower", "upper", "casefold", "strip", "replace"}
AFFIXES = {"startswith", "endswith", "removeprefix", "removesuffix"}


def modules_of(family):
    """The names of all modules in a family's blocks and around them."""
    shapes = [member.transformer for member in family.members]
    found = {it for shape in shapes for it in (*shape.outer_layers(), *shape.other_tensors())}
    for spec in family.blocks:
        found |= {*spec.gemms, *spec.places, *spec.norms, *spec.head_norms}
        found |= {*spec.modulation.values(), spec.told_by}
    return {part for name in found for part in name.split(".") if not part.isdigit()}


EACH = [modules_of(family) for family in FAMILIES]
# Modules that one family alone has; those behind are of its transformer's or its VAE's class.
MODULES = set().union(*EACH) - set.intersection(*EACH)
MODULES |= {"txt_in", "default_ref_method", "prefix_cache", "layer_caches", "addition_t_embedding"}
MODULES |= {"avg_shortcut", "upsampler", "upsamplers"}


def leaf(node):
    """The last name of a dotted expression, of what is called, or of a key; a constant's value."""
    if isinstance(node, ast.Call):
        return leaf(node.func)
    if isinstance(node, ast.Subscript):
        return leaf(node.slice)
    found = (getattr(node, name, None) for name in ("attr", "id", "value"))
    return next((it for it in found if isinstance(it, str)), None)


def root(node):
    """The first name of a dotted expression."""
    while isinstance(node, (ast.Attribute, ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return getattr(node, "id", None)


def first(found):
    return next(filter(None, found), "")


def is_list(node):
    """Whether an expression is the list of all families, their parts or their adapters."""
    if isinstance(node, ast.Call) and leaf(node) in {"items", "keys", "values"}:
        return is_list(node.func.value)
    if isinstance(node, (ast.GeneratorExp, ast.ListComp)):
        return any(is_list(it.iter) for it in node.generators)
    return leaf(node) in (LISTS if isinstance(node, ast.Call) else TABLES)


def is_type(node):
    """Whether an expression is `type(...)`, `...__class__`, or its name."""
    if isinstance(node, ast.Attribute) and node.attr in {"__name__", "__module__"}:
        return is_type(node.value)
    return leaf(node) == "__class__" or (isinstance(node, ast.Call) and leaf(node) == "type")


class Questions(ast.NodeVisitor):
    """Collects (line, what is wrong, code) of every place that asks who a family is."""

    def __init__(self):
        self.found = []
        self.own, self.host = set(), set()  # names imported from a family, or a host's module of it
        self.each = []  # variables that run over all families

    def note(self, node, what, code=None):
        if what:
            self.found.append((node.lineno, what, ast.unparse(code or node)))

    # What an expression tells of a family; "" for nothing.

    def about(self, node):
        match node:
            case ast.Tuple() | ast.List() | ast.Set():
                return first(map(self.about, node.elts))
            case ast.Starred() | ast.NamedExpr():
                return self.about(node.value)
            case ast.IfExp():
                return self.about(node.body) or self.about(node.orelse)
            case ast.GeneratorExp() | ast.ListComp() | ast.SetComp():
                listed = any(is_list(it.iter) for it in node.generators)
                return self.about(node.elt) or ("what all families list" if listed else "")
            case ast.Constant(value=str(text)):
                return "a family's name" if text in TITLES or NAMED.search(text) else ""
            case ast.Call(func=ast.Attribute(attr="get"), args=[key, *_]):
                return "what tells a family" if leaf(key) in CHANNELS | WHO | TELLING else ""
            case ast.Call(func=ast.Attribute(attr=name)) if name in STRING_METHODS:
                return self.about(node.func.value)
            case ast.Call(func=ast.Name(id="set" | "tuple" | "list" | "str"), args=[inner, *_]):
                return self.about(inner)
            case ast.Name() | ast.Attribute() | ast.Subscript():
                if leaf(node) in WHO or is_list(node):
                    return "a family"
                if leaf(node) in CHANNELS | TELLING:
                    return "what tells a family"
                if root(node) in self.own or any(root(node) in each for each in self.each):
                    return "what a family has"
                return self.own_class(node)
        return ""

    def own_class(self, node):
        own = CLASS.search(str(leaf(node))) or root(node) in self.host
        return "a family's class" if own else ""

    def class_of(self, node):
        """The same of what has to be a class."""
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            return first(map(self.class_of, node.elts))
        if isinstance(node, ast.BinOp):
            return self.class_of(node.left) or self.class_of(node.right)
        adapter = isinstance(node, ast.Attribute) and node.attr in HOST_CLASSES
        return self.own_class(node) or ("an adapter's class" if adapter else "")

    def key(self, node):
        """The same of what is looked up in a dictionary."""
        if is_type(node) and isinstance(node, ast.Call) and leaf(node.args[0]) in HOST_OBJECTS:
            return "a host's class"
        return self.about(node)

    # Where it is asked.

    def visit(self, node):
        for kinds, ask in self.ASKS.items():
            if isinstance(node, kinds):
                ask(self, node)
        loops = getattr(node, "generators", [node] if isinstance(node, ast.For) else [])
        targets = [it.target for it in loops if is_list(it.iter)]
        self.each.append({name.id for it in targets for name in ast.walk(it) if root(name)})
        self.generic_visit(node)
        self.each.pop()

    def imported(self, node):
        module = node.module or ""
        for it in node.names:
            titled = module.endswith("families.protocol") and getattr(protocol, it.name) in TITLES
            if titled or ("families." in module and module.rpartition(".")[2] in OWN_MODULES):
                self.own.add(it.asname or it.name)
            if not node.level and HOST_MODULE.match(f"{module}.{it.name}"):
                self.host.add(it.asname or it.name)

    def compared(self, node):
        sides = [node.left, *node.comparators]
        for op, *pair in zip(node.ops, sides, sides[1:], strict=False):
            if isinstance(op, (ast.Lt, ast.LtE, ast.Gt, ast.GtE)):
                continue
            if any(leaf(it) == "AUTO" or ast.unparse(it) == "None" for it in pair):
                continue  # asks whether it is known
            what = first(map(self.about, pair))
            if any(map(is_type, pair)):
                what = what or first(map(self.class_of, pair))
            self.note(node, what and f"compares {what}")

    def matched(self, node):
        asked = [node.subject]
        for it in (it for case in node.cases for it in ast.walk(case.pattern)):
            asked += [getattr(it, name) for name in ("value", "cls") if hasattr(it, name)]
        for it in asked:
            what = isinstance(it, ast.AST) and self.about(it)
            self.note(it, what and f"matches {what}")

    def called(self, node):
        match leaf(node), node.args:
            case "isinstance" | "issubclass", [_, kind]:
                what = self.class_of(kind) or self.about(kind)
                self.note(node, what and f"asks for {what}")
            case ("hasattr", [whom, name]) | ("getattr", [whom, name, _]):
                asked = leaf(name) in MODULES | CHANNELS | OWN_SIZES | WHO
                if not isinstance(name, ast.Constant):
                    asked = leaf(whom) in HOST_OBJECTS
                if asked or leaf(whom) in WHO or root(whom) in self.host:
                    self.note(node, "asks for what one family has")
            case affix, [text, *_] if affix in AFFIXES and isinstance(node.func, ast.Attribute):
                what = "a family" if leaf(node.func.value) in WHO else self.about(text)
                self.note(node, what and f"{affix} of {what}")
            case "get", [key, *_] if isinstance(node.func, ast.Attribute):
                what = self.key(key)
                self.note(node, what and f"looks up {what}")

    def subscripted(self, node):
        what = self.key(node.slice)
        if isinstance(node.ctx, ast.Load) and what != "a family's class":  # as in type[WanVAE]
            self.note(node, what and f"looks up {what}")

    def keyed(self, node):
        for key in filter(None, node.keys):
            what = self.key(key)
            self.note(key, what and f"keyed by {what}")

    def keyed_by_each(self, node):
        if self.about(node.key) or any(is_list(it.iter) for it in node.generators):
            self.note(node, "keyed by family")

    def caught(self, node):
        """An AttributeError that says which family's modules there are."""
        if isinstance(node, ast.Try):
            types = [it.type for it in node.handlers if it.type]
        else:
            calls = (it.context_expr for it in node.items if leaf(it.context_expr) == "suppress")
            types = [it for call in calls for it in call.args]
        types = [it for one in types for it in getattr(one, "elts", [one])]
        parts = [it for line in node.body for it in ast.walk(line)]
        reads = any(isinstance(it, ast.Attribute) and it.attr in MODULES for it in parts)
        reads = reads or any(isinstance(it, ast.Call) and leaf(it) in FORM_READERS for it in parts)
        if reads and "AttributeError" in map(leaf, types):
            self.note(node, "catches AttributeError", node.body[0])

    def tested(self, node):
        asked = [getattr(node, "test", None), getattr(node, "operand", None)]
        for it in (*asked, *getattr(node, "values", ())):
            if isinstance(it, ast.Attribute) and it.attr == "shortcuts":
                self.note(it, "asks whether a VAE has shortcuts")

    def spelled(self, node):
        for field in ("id", "attr", "name", "arg", "asname"):
            if OLD.search(getattr(node, field, None) or ""):
                self.found.append((node.lineno, "old spelling", getattr(node, field)))
        if getattr(node, "attr", None) in OWN_SIZES:
            self.note(node, "reads a size that one shape has")

    ASKS = {  # noqa: RUF012
        ast.ImportFrom: imported,
        ast.Compare: compared,
        ast.Match: matched,
        ast.Call: called,
        ast.Subscript: subscripted,
        ast.Dict: keyed,
        ast.DictComp: keyed_by_each,
        (ast.Try, ast.With): caught,
        (ast.If, ast.IfExp, ast.While, ast.BoolOp, ast.UnaryOp): tested,
        (ast.Name, ast.Attribute, ast.alias, ast.arg, ast.keyword): spelled,
        (ast.FunctionDef, ast.ClassDef): spelled,
    }


def questions(tree):
    """Every (line, what is wrong, code) once, in the order of lines."""
    asks = Questions()
    asks.visit(tree)
    return sorted(set(asks.found))


def test_nothing_outside_asks_who_the_family_is():
    asked, allowed = [], set()
    for path in GUARDED:
        file = path.relative_to(ROOT).as_posix()
        for line, what, code in questions(tree_of(path)):
            if (file, code) in ALLOWED:
                allowed.add((file, code))
            else:
                asked.append(f"{file}:{line} {what}: {code}")
    assert asked == []
    assert allowed == ALLOWED.keys()


@pytest.mark.parametrize(
    "code",
    [
        "part.family == 'Other'",
        "run.member != other",
        "x.family in (first, second)",
        "x.family.lower() not in allowed",
        "family is chosen",
        "name == 'Qwen-Image-2.1'",
        "'QwenImagePipeline' in index",
        "next(it for it in FAMILIES if it.stack == stack)",
        "from .families.qwen_image import LAYERED\nfound == LAYERED",
        "part.family.startswith(text)",
        "name.removeprefix('Qwen-Image')",
        "isinstance(shape, QwenImage21Shape)",
        "type(shape) is QwenImageShape",
        "isinstance(model, (WanVAE, Other))",
        "type(model).__name__ == 'WanVAE'",
        "type(model) is kind.base",
        "PASSES.get(type(transformer))",
        "shape.latent_channels == 64",
        "dims.get('image_channels') == 4",
        "vae.z_dim not in counts",
        "if shape.shortcuts:\n    pass",
        "shape.fused_mlp",
        "hasattr(block, 'txt_mlp')",
        "hasattr(block, name)",
        "getattr(block.attn, 'norm_added_q', None)",
        "getattr(family, 'sigmas', '')",
        "try:\n    spec_of(block)\nexcept AttributeError:\n    pass",
        "try:\n    block.txt_mlp\nexcept (KeyError, AttributeError):\n    pass",
        "with suppress(AttributeError):\n    block.img_mod",
        "WAYS[shape.family]",
        "WAYS.get(family)",
        "{'Qwen-Image': 1, 'Qwen-Image-2.1': 2}",
        "{it.title: it for it in FAMILIES}",
        "match family:\n    case _:\n        pass",
        "match title:\n    case 'Qwen-Image':\n        pass",
        "match shape:\n    case QwenImageShape():\n        pass",
        "def _is_21(shape):\n    pass",
        "block.attn.add_q_proj",
        "from .x import SHAPE_21 as OTHER",
        "class SingleStreamOf:\n    pass",
        "f(cached_prefix=1)",
    ],
)
def test_the_guard_finds_each_way_of_asking(code):
    assert questions(ast.parse(code))


@pytest.mark.parametrize(
    "code",
    [
        "if family is None or not family.needs:\n    pass",
        "family == AUTO",
        "tokens = request.member.family.step_tokens(words, painted, references)",
        "spec.activation == SWIGLU and spec.biases",
        "getattr(family, role).part",
        "find_member(run['family']).transformer",
        "request.transformer != request.member.transformer",
        "def take(found: dict[str, WanVAE]) -> type[QwenImage21Shape]:\n    pass",
        "getattr(properties, 'uuid', '')",
        "isinstance(weight, QuantizedTensor) and type(linear) is Linear",
        "try:\n    torch.cuda.cudart()\nexcept AttributeError:\n    pass",
        "'''SHAPE_21 of `gate_up`'''  # is_21",
        "[it.title for it in FAMILIES if it.micro]",
        "raise SettingError('choose a LoRA for Qwen-Image')",
    ],
)
def test_the_guard_lets_what_does_not_ask_be(code):
    assert questions(ast.parse(code)) == []


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
