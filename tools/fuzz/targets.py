"""Lists what is fuzzed: what valid files hold, how they are made of it, and who reads them."""

import contextlib
import io
import json
import math
import os
import re
import struct
import sys
from collections.abc import Callable
from importlib.util import find_spec
from itertools import product
from operator import index
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.torch import load_file

from ...client import journal, results, servers, settings, workflow
from ...errors import CheckpointError, SettingError
from ...families import identify, qwen_image
from ...loaders import checkpoint, gguf, quantization, sizes, source
from ...loaders.header import DTYPE_BITS, read_header
from ...machine import settings as own
from ...machine import store
from ...planning import advise, card_list, cards

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
import server_nodes

ROOT = Path(__file__).resolve().parents[2]


class Target(NamedTuple):
    """Says what valid files hold, how they are made of it, and who reads them."""

    seeds: list[Any]
    read: Callable[[Path], Any]
    # Gives the bytes, and how many zeros follow them in the file.
    join: Callable[[Any], tuple[bytes, int | None]] = lambda value: (dumped(value), 0)
    clean: type[Exception] | tuple[()] = SettingError  # in which `read` may refuse
    name: str = "case"  # of the file, where its reader looks at it


# How files are made.


def dumped(value: Any) -> bytes:
    """Writes JSON, with what `HOSTILE` cannot say in Python's types."""
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    # A change adds digits, and a case of gigabytes would fill the fuzzer's own memory.
    text = re.sub(rb'"@deep(\d{1,6})"', lambda it: b"[" * int(it[1]) + b"]" * int(it[1]), text)
    return re.sub(rb'"@(1e999|NaN)"', rb"\1", text.replace(b'"@digits"', b"9" * 5000))


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else dumped(value).decode("utf-8", "replace")


def framed(entries: Any) -> tuple[bytes, int]:
    """Returns a safetensors file of {name: {"dtype", "shape"}} or {name: {"text": bytes}}."""
    made, body, zeros = entries, b"", {}
    if isinstance(entries, dict):
        made = {**entries}
        for name, entry in ((name, it) for name, it in entries.items() if isinstance(it, dict)):
            if name == "__metadata__":  # whose values are texts, of JSON where there is some
                made[name] = {key: as_text(it) for key, it in entry.items()}
            elif "text" in entry:
                start, body = len(body), body + dumped(entry["text"])
                offsets = {"shape": [len(body) - start], "data_offsets": [start, len(body)]}
                made[name] = {"dtype": "U8", **offsets}
            elif {*entry} == {"dtype", "shape"}:
                zeros[name] = 0
                with contextlib.suppress(TypeError, KeyError):
                    bits = DTYPE_BITS[entry["dtype"]]
                    zeros[name] = math.prod(map(index, entry["shape"])) * bits // 8
    at = len(body)
    for name, size in zeros.items():
        made[name] = {**entries[name], "data_offsets": [at, at + size]}
        at += size
    text = dumped(made)
    return len(text).to_bytes(8, "little") + text + body, min(max(0, at - len(body)), 2**24)


def lines(values: Any) -> tuple[bytes, int]:
    return b"\n".join(map(dumped, values if isinstance(values, list) else [values])) + b"\n", 0


def texts(values: Any) -> tuple[bytes, int | None]:
    return "\n".join(map(as_text, values)).encode("utf-8", "surrogatepass"), None


def png(values: Any) -> tuple[bytes, int]:
    info, file = PngInfo(), io.BytesIO()
    for number, (key, value) in enumerate(values.items()):
        with contextlib.suppress(ValueError, UnicodeError):
            add = (info.add_text, info.add_itxt)[number % 2]
            add(key, dumped(value).decode("utf-8", "replace"), zip=bool(number % 3))
    Image.new("L", (1, 1)).save(file, "PNG", pnginfo=info)
    return file.getvalue(), 0


def gguf_file(values: Any) -> tuple[bytes, int]:
    """Returns a file of [{key: [type, number, text or texts]}, {name: [type, shape, offset]}]."""
    about, tensors = values
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(about))]
    for key, (kind, value) in about.items():
        parts += [packed(key), struct.pack("<I", kind % 2**32)]
        if isinstance(value, list):
            parts += [struct.pack("<IQ", 8, len(value)), *map(packed, value)]
        elif isinstance(value, str):
            parts.append(packed(value))
        else:
            parts.append(struct.pack("<" + gguf.NUMBERS.get(kind, "I"), value))
    for name, (kind, shape, offset) in tensors.items():
        parts += [packed(name), struct.pack(f"<I{len(shape)}Q", len(shape), *shape)]
        parts.append(struct.pack("<IQ", kind, offset))
    return b"".join(parts), 2**16


def packed(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


# What is read, each by public functions, and used as far as that takes no server and no card.


def text_of(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "surrogateescape")  # as a terminal gives it


def read_graph(path: Path) -> Any:
    graph = workflow.read_workflow(path)
    for node in graph:
        workflow.called(graph, node)
        settings.find_input(graph, f"{node}.seed", INFO) if "seed" in graph[node]["inputs"] else 0
    workflow.nodes_called(graph, "prompt")
    workflow.loaders_key(graph)
    json.dumps(workflow.with_job_id(graph, INFO, workflow.key_of(graph)))
    servers.Checker(INFO).check(graph)


def read_set(path: Path) -> None:
    settings.variations(GRAPH, settings.parse_settings(text_of(path).split("\n"), GRAPH), INFO)


def read_checkpoint(path: Path) -> None:
    json.dumps(checkpoint.inspect_checkpoint(path).as_dict()).encode()
    sizes.read_sizes(path)


def read_own_cards(path: Path) -> None:
    for name, card in card_list.read_cards(path)[1].items():
        card.price()
        cards.find_card(name, {name: card})


def read_journal(path: Path) -> None:
    with journal.Journal(path.parent, "case") as found:
        for key, record in found.records.items():
            found.finished(key), found.attempts(key), found.changed(key)
            found.kept(record.server, record.local)
            f"{record.seconds or 0.0:.1f}", [len(name) + 1 for name in record.files]
            {text.strip() for texts in record.texts.values() for text in texts}
        found.ended("done", "k", "p", server="a:1", files=["k_1.png"], sizes=[1])


def read_cache(path: Path) -> None:
    for name in (store.CALIBRATION, store.ATTENTION):
        (path.parent / name).unlink(missing_ok=True)
        os.link(path, path.parent / name)
    store.read_calibrations(path.parent)
    own.use_settings(own.Settings(cache=str(path.parent)))
    store.load_attention("a"), store.load_attention("b")


# Valid files.

INFO = server_nodes.stored()
CARDS = card_list.read_cards()[1]
GRAPH = json.loads((ROOT / "workflows" / "api" / "edit_2511.json").read_bytes())
if find_spec("comfy") is None:  # which reads a LoRA with the same library
    comfy: Any = ModuleType("comfy")
    sys.modules["comfy"] = comfy
    comfy.utils = sys.modules["comfy.utils"] = ModuleType("comfy.utils")
    comfy.utils.load_torch_file = lambda path, **_: (load_file(path), read_header(path).metadata)
    comfy.lora = sys.modules["comfy.lora"] = ModuleType("comfy.lora")
    comfy.lora.load_lora = lambda tensors, modules, log_missing: {}
from ...hosts.comfyui.lora import file as lora  # noqa: E402

BLOCK = "transformer_blocks.0."
WEIGHT = {"dtype": "BF16", "shape": [4, 8]}


def checkpoints() -> list[Any]:
    read = source.open_source(source.bundled_micro_folder(), "transformer").tensors.items()
    plain = {name: {"dtype": it.dtype, "shape": [*it.shape]} for name, it in read}
    half = {name: entry for name, entry in plain.items() if name.startswith(BLOCK)}
    other = {"model.diffusion_model." + name: entry for name, entry in half.items()}
    vae = {"vae.decoder.conv_in.weight": WEIGHT, "first_stage_model.x": WEIGHT}
    kinds = (f"{BLOCK}attn.to_q.qweight", f"{BLOCK}attn.to_q.wscales", "a.SCB")
    folded = {**dict.fromkeys(kinds, WEIGHT), "__metadata__": {"format": "pt"}}
    placed = {"b.weight": {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}, **half}
    return [plain, half, {**other, **vae}, folded, placed]


def markers() -> list[Any]:
    fp8 = {"dtype": "F8_E4M3", "shape": [4, 8]}
    found = []
    for kind in (*quantization.COMFY_FORMATS, "of tomorrow"):
        said = {"format": kind, "convrot": True, "convrot_groupsize": 256, "params": {}}
        layer, other = f"{BLOCK}attn.to_q", f"{BLOCK}attn.to_k"
        entries: dict[str, Any] = {
            f"{layer}.weight": fp8,
            f"{layer}.weight_scale": fp8,
            f"{other}.weight": WEIGHT,
        }
        entries[f"{layer}.comfy_quant"] = {"text": said}
        entries[f"{BLOCK}attn.comfy_attention.config"] = {"text": [{"attention": "sage"}, {}]}
        about = {"_quantization_metadata": {"format_version": "1.0", "layers": {other: said}}}
        found.append({**entries, "__metadata__": about})
    return [*found, {**CHECKPOINTS[0], **found[0]}]


def loras() -> list[Any]:
    config = {"r": 4, "lora_alpha": 2, "alpha_pattern": {"attn.to_q": 1}, "use_rslora": True}
    config["rank_pattern"] = {r"transformer_blocks.\d.*": 4}
    found = []
    for style in (*identify.PREFIXES, "base_model.model.transformer.", "single_blocks."):
        for kinds in (("lora_A.default.weight", "lora_B.weight", "alpha"), ("lokr_w1", "lokr_w2")):
            targets = product(qwen_image.QWEN_IMAGE.lora_targets[:4], kinds)
            made = {f"{style}{BLOCK}{target}.{kind}": WEIGHT for target, kind in targets}
            made |= {name: {**it, "shape": []} for name, it in made.items() if "alpha" in name}
            about = {f"transformer.{name}": value for name, value in config.items()}
            found.append({"__metadata__": {"lora_adapter_metadata": about}, **made})
    return found


def graphs(folder: str) -> list[Any]:
    return [json.loads(it.read_bytes()) for it in sorted((ROOT / folder).glob("*.json"))]


CHECKPOINTS = checkpoints()
_about = {"general.architecture": [8, "qwen_image"], "general.alignment": [4, 32]}
_split = {"split.no": [2, 0], "split.count": [2, 1], "split.tensors.count": [5, 2]}
_words = {"tokenizer.ggml.tokens": [9, ["a", "b"]], "n": [10, 2**40], "f": [6, 0.5]}
_tensors = {f"{BLOCK}attn.to_q.weight": [8, [64, 4], 0], "b.weight": [12, [256, 2], 288]}
GGUFS = [[{**_about, **it}, _tensors] for it in (_words, _split)]
API = graphs("workflows/api")
PNGS = [{"prompt": it, "workflow": {"nodes": []}} for it in API]
_some = [f"{key}={value}" for key in GRAPH for value in ("7", "1..3", "@@x")]
_plain = ["seed=1..4", "prompt=a cat", "cfg=2.5", "sampler_name=euler", "steps=4", "width=1024"]
SETS = [_plain, *([it] for it in (*_some, *_plain, "prompt=@nowhere.txt", "Prompt.text=x"))]
_bundled = json.loads(card_list.BUNDLED.read_bytes())
_own = {"cards": {"L40S": {"prices": [{"usd_per_hour": 0.9}]}}}
OWN_CARDS = [_own, {"notes": {}, "cards": dict([*_bundled["cards"].items()][:1])}]
PRICES = [["L40S = 0.79", "4090 = $0.3 # mine", "H100 SXM=2"]]
_run = {"event": "run", "time": 1.5, "version": 2, "workflow": "w.json", "servers": ["a:1"]}
_posted = {"event": "queued", "key": "k", "prompt_id": "p", "server": "a:1", "boot": "b"}
_done = {"event": "done", "key": "k", "prompt_id": "p", "seconds": 1.5, "server": "a:1"}
_done |= {"files": ["k_1.png"], "sizes": [10], "texts": {"Report": ["text"]}, "kept": True}
JOURNALS = [[_run, {**_posted, "local": {"/m/x": [1, 2]}}, _done, {"event": "again", "key": "k"}]]
JOURNALS += [[_run, _posted, _done, {**_done, "event": it}] for it in ("late", "failed", "running")]
_server = {"url": "http://127.0.0.1:8188", "boot": "b", "log": "x.log", "state": "ready"}
_other = {**_server, "url": "https://me:secret@host:1/path"}
SERVERS = [{"version": 1, "servers": [_server, _other]}]
SETTINGS = [{"version": 1, "cache": "~/x", "attention": "fast"}]
_rates = {"gemm": {"bf16": 1e14, "int8": 2e14}, **dict.fromkeys(store.FIGURES, 1e12)}
_rates |= {"launch_seconds": {"bf16": 1e-4, "graph": 1e-5}}
_card = {"card": "L40S", "driver": "1", "torch": "2", "date": "2026", "rates": _rates}
_timed = {"a": {"tokens": 4096, "ms": {"sdpa": 1.5, "int8": 1}}, "b": {}}
CACHES = [{"version": 1, "measured": it} for it in ([_card], _timed)]
TARGETS = {
    "LoRA": Target(
        loras(), lambda it: (lora.inspect_lora(it), lora.read_lora(it)), framed, CheckpointError
    ),
    "workflow, API form": Target(API, read_graph),
    "workflow, UI form": Target(graphs("workflows"), read_graph),
    "--set": Target(SETS, read_set, texts),
    "cards.json": Target(OWN_CARDS, read_own_cards),
    "prices": Target(PRICES, lambda it: advise.read_prices(text_of(it), CARDS), texts),
    "journal": Target(JOURNALS, read_journal, lines, name="case.submit.jsonl"),
    "GGUF": Target(GGUFS, gguf.read_gguf_set, gguf_file, CheckpointError, "x-00001-of-00001.gguf"),
    "safetensors": Target(CHECKPOINTS, read_checkpoint, framed, CheckpointError),
    "markers": Target(markers(), read_checkpoint, framed, CheckpointError),
    "PNG": Target(PNGS, lambda it: (results.owned(it, "0" * 16, ["1" * 16]), read_graph(it)), png),
    "servers.json": Target(SERVERS, lambda path: servers.ServerList(file=path).read()),
    "settings": Target(SETTINGS, own.read_settings),
    "measurements": Target(CACHES, read_cache, clean=()),
}
