"""What is fuzzed: valid files of each kind, how they come apart into JSON, and who reads them."""

import contextlib
import io
import json
import logging
import math
import os
import re
import struct
import sys
from collections.abc import Callable
from importlib.util import find_spec
from operator import index
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.torch import load_file

from ...client import journal, results, settings, workflow
from ...client.servers import Checker, ServerList
from ...errors import CheckpointError, SettingError
from ...families.identify import PREFIXES
from ...families.qwen_image import QWEN_IMAGE
from ...loaders.checkpoint import inspect_checkpoint
from ...loaders.gguf import NUMBERS, read_gguf_set
from ...loaders.header import DTYPE_BITS, read_header
from ...loaders.quantization import COMFY_FORMATS
from ...loaders.sizes import read_sizes
from ...loaders.source import bundled_micro_folder
from ...machine import store
from ...machine.settings import Settings, read_settings, use_settings
from ...planning.advise import read_prices
from ...planning.cards import BUNDLED, find_card, read_cards

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
import server_nodes

ROOT = Path(__file__).resolve().parents[2]
logging.disable(logging.WARNING)  # in which a damaged measurement is told
settings.MAX_JOBS = 1000  # each takes its microseconds, as many as somebody asks for


class Target(NamedTuple):
    """Says how a valid file comes apart into JSON and together again, and who reads it.

    Args:
        join: gives the bytes, and how many zeros follow them in the file.
        clean: the errors in which `read` may refuse.
        name: of the file, where its reader looks at it.
    """

    seeds: Callable[[], list[Any]]
    read: Callable[[Path], Any]
    split: Callable[[bytes], Any] | None = json.loads
    join: Callable[[Any], tuple[bytes, int | None]] = lambda value: (dumped(value), 0)
    clean: type[Exception] | tuple[()] = SettingError
    name: str = "case"


# How files come apart.


def dumped(value: Any) -> bytes:
    """JSON, with what `HOSTILE` cannot say in Python's types."""
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    # A change adds digits, and a case of gigabytes would fill the fuzzer's own memory.
    text = re.sub(rb'"@deep(\d{1,6})"', lambda it: b"[" * int(it[1]) + b"]" * int(it[1]), text)
    return re.sub(rb'"@(1e999|NaN)"', rb"\1", text.replace(b'"@digits"', b"9" * 5000))


def framed(entries: Any) -> tuple[bytes, int]:
    """A safetensors file of {name: {"dtype", "shape"}} or {name: {"text": what its bytes say}}."""
    if not isinstance(entries, dict):
        text = dumped(entries)
        return len(text).to_bytes(8, "little") + text, 0
    body, header, zeros = b"", {}, {}
    for name, entry in entries.items():
        header[name] = entry
        if name == "__metadata__" and isinstance(entry, dict):
            # Its values are texts, of JSON where there is some.
            header[name] = {
                key: it if isinstance(it, str) else dumped(it).decode("utf-8", "replace")
                for key, it in entry.items()
            }
        elif isinstance(entry, dict) and "text" in entry:
            start, body = len(body), body + dumped(entry["text"])
            offsets = {"shape": [len(body) - start], "data_offsets": [start, len(body)]}
            header[name] = {"dtype": "U8", **offsets}
        elif isinstance(entry, dict) and {*entry} == {"dtype", "shape"}:
            zeros[name] = 0
            with contextlib.suppress(TypeError, KeyError):
                zeros[name] = (
                    math.prod(map(index, entry["shape"])) * DTYPE_BITS[entry["dtype"]] // 8
                )
    at = len(body)
    for name, size in zeros.items():
        header[name] = entries[name] | {"data_offsets": [at, at + size]}
        at += size
    text = dumped(header)
    return len(text).to_bytes(8, "little") + text + body, int(min(max(0, at - len(body)), 2**24))


def unframed(data: bytes) -> dict[str, Any]:
    """What `framed` made."""
    start = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:start])
    for name, entry in entries.items():
        if name == "__metadata__":
            for key, text in entry.items():
                with contextlib.suppress(ValueError):
                    entry[key] = json.loads(text)
        elif name.endswith((".comfy_quant", ".config")):
            first, last = entry["data_offsets"]
            entries[name] = {"text": json.loads(data[start + first : start + last])}
        else:
            del entry["data_offsets"]
    return entries


def lines(values: Any) -> tuple[bytes, int]:
    return b"\n".join(map(dumped, values if isinstance(values, list) else [values])) + b"\n", 0


def unlines(data: bytes) -> list[Any]:
    return [json.loads(line) for line in data.splitlines()]


def by_line(data: bytes) -> list[str]:
    return data.decode("utf-8", "surrogatepass").split("\n")


def texts(values: Any) -> tuple[bytes, int]:
    said = (it if isinstance(it, str) else dumped(it).decode() for it in values)
    return "\n".join(said).encode("utf-8", "surrogatepass"), None


def png(values: Any) -> tuple[bytes, int]:
    info, file = PngInfo(), io.BytesIO()
    for number, (key, value) in enumerate(values.items()):
        text = dumped(value).decode("utf-8", "replace")
        with contextlib.suppress(ValueError, UnicodeError):
            (info.add_text, info.add_itxt)[number % 2](key, text, zip=bool(number % 3))
    Image.new("L", (1, 1)).save(file, "PNG", pnginfo=info)
    return file.getvalue(), 0


def unpng(data: bytes) -> dict[str, Any]:
    with Image.open(io.BytesIO(data)) as image:
        return {key: json.loads(text) for key, text in image.info.items()}


def gguf(values: Any) -> tuple[bytes, int]:
    """A file of [{key: [type, number, text or texts]}, {name: [type, shape, offset]}]."""
    about, tensors = values
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(about))]
    for key, (kind, value) in about.items():
        parts += [packed(key), struct.pack("<I", kind % 2**32)]
        if isinstance(value, list):
            parts += [struct.pack("<IQ", 8, len(value)), *map(packed, value)]
        elif isinstance(value, str):
            parts.append(packed(value))
        else:
            parts.append(struct.pack("<" + NUMBERS.get(kind, "I"), value))
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


def read_graph(path: Path) -> None:
    graph = workflow.read_workflow(path)
    for node in graph:
        workflow.called(graph, node)
        settings.find_input(graph, f"{node}.seed", INFO) if "seed" in graph[node]["inputs"] else 0
    workflow.nodes_called(graph, "prompt")
    workflow.loaders_key(graph)
    json.dumps(workflow.with_job_id(graph, INFO, workflow.key_of(graph)))
    Checker(INFO).check(graph)


def read_png(path: Path) -> None:
    results.owned(path, "0" * 16, ["1" * 16])
    read_graph(path)


def read_set(path: Path) -> None:
    texts = text_of(path).split("\n")
    settings.variations(GRAPH, settings.parse_settings(texts), INFO)


def read_lora(path: Path) -> None:
    lora.inspect_lora(path)
    lora.read_lora(path)


def read_checkpoint(path: Path) -> None:
    json.dumps(inspect_checkpoint(path).as_dict()).encode()
    read_sizes(path)


def read_own_cards(path: Path) -> None:
    for name, card in read_cards(path)[1].items():
        card.price()
        find_card(name, {name: card})


def read_own_prices(path: Path) -> None:
    read_prices(text_of(path), CARDS)


def read_journal(path: Path) -> None:
    with journal.Journal(path.parent, "case") as found:
        for key, record in found.records.items():
            found.finished(key), found.attempts(key), found.changed(key)
            found.kept(record.server, record.local)
            f"{record.seconds or 0.0:.1f}", [len(name) + 1 for name in record.files]
            {text.strip() for texts in record.texts.values() for text in texts}
        found.ended("done", "k", "p", files=["k_1.png"], sizes=[1])


def read_cache(path: Path) -> None:
    for name in (store.CALIBRATION, store.ATTENTION):
        (path.parent / name).unlink(missing_ok=True)
        os.link(path, path.parent / name)
    store.read_calibrations(path.parent)
    use_settings(Settings(cache=str(path.parent)))
    for key in ("a", "b"):
        store.load_attention(key)


# Valid files.

INFO = server_nodes.stored()
CARDS = read_cards()[1]
GRAPH = json.loads((ROOT / "workflows" / "api" / "edit_2511.json").read_bytes())
if find_spec("comfy") is None:  # which reads a LoRA with the same library
    comfy = sys.modules["comfy"] = ModuleType("comfy")
    comfy.utils = sys.modules["comfy.utils"] = ModuleType("comfy.utils")
    comfy.utils.load_torch_file = lambda path, **_: (load_file(path), read_header(path).metadata)
from ...hosts.comfyui.lora import file as lora  # noqa: E402

BLOCK = "transformer_blocks.0."
WEIGHT = {"dtype": "BF16", "shape": [4, 8]}


def micro() -> dict[str, Any]:
    """The header of the bundled model."""
    path = bundled_micro_folder() / "transformer" / "diffusion_pytorch_model.safetensors"
    return unframed(path.read_bytes())


def checkpoints() -> list[Any]:
    plain, layer = micro(), "attn.to_q"
    half = {name: entry for name, entry in plain.items() if name.startswith(BLOCK)}
    other = {"model.diffusion_model." + name: entry for name, entry in half.items()}
    vae = {"vae.decoder.conv_in.weight": WEIGHT, "first_stage_model.x": WEIGHT}
    folded = {f"{BLOCK}{layer}.qweight": WEIGHT, f"{BLOCK}{layer}.wscales": WEIGHT, "a.SCB": WEIGHT}
    return [plain, half, {**other, **vae}, {**folded, "__metadata__": {"format": "pt"}}]


def markers() -> list[Any]:
    fp8 = {"dtype": "F8_E4M3", "shape": [4, 8]}
    found = []
    for kind in (*COMFY_FORMATS, "of tomorrow"):
        said = {"format": kind, "convrot": True, "convrot_groupsize": 256, "params": {}}
        layer, other = f"{BLOCK}attn.to_q", f"{BLOCK}attn.to_k"
        entries = {f"{layer}.weight": fp8, f"{layer}.weight_scale": fp8, f"{other}.weight": WEIGHT}
        entries[f"{layer}.comfy_quant"] = {"text": said}
        entries[f"{BLOCK}attn.comfy_attention.config"] = {"text": [{"attention": "sage"}, {}]}
        about = {"_quantization_metadata": {"format_version": "1.0", "layers": {other: said}}}
        found.append({**entries, "__metadata__": about})
    return [*found, {**micro(), **found[0]}]


def loras() -> list[Any]:
    config = {"r": 4, "lora_alpha": 2, "alpha_pattern": {"attn.to_q": 1}, "use_rslora": True}
    config["rank_pattern"] = {r"transformer_blocks.\d.*": 4}
    found = []
    for style in (*PREFIXES, "base_model.model.transformer.", "single_blocks."):
        for kinds in (("lora_A.default.weight", "lora_B.weight", "alpha"), ("lokr_w1", "lokr_w2")):
            made = {}
            for target in QWEN_IMAGE.lora_targets[:4]:
                made |= {f"{style}{BLOCK}{target}.{kind}": WEIGHT for kind in kinds}
                made |= {name: {**it, "shape": []} for name, it in made.items() if "alpha" in name}
            about = {f"transformer.{name}": value for name, value in config.items()}
            found.append({"__metadata__": {"lora_adapter_metadata": about}, **made})
    return found


def ggufs() -> list[Any]:
    about = {"general.architecture": [8, "qwen_image"], "general.alignment": [4, 32]}
    split = {"split.no": [2, 0], "split.count": [2, 1], "split.tensors.count": [5, 2]}
    words = {"tokenizer.ggml.tokens": [9, ["a", "b"]], "n": [10, 2**40], "f": [6, 0.5]}
    tensors = {f"{BLOCK}attn.to_q.weight": [8, [64, 4], 0], "b.weight": [12, [256, 2], 288]}
    return [[{**about, **words}, tensors], [{**about, **split}, tensors]]


def graphs(folder: str) -> Callable[[], list[Any]]:
    return lambda: [json.loads(it.read_bytes()) for it in sorted((ROOT / folder).glob("*.json"))]


def sets() -> list[Any]:
    some = [f"{key}={value}" for key in GRAPH for value in ("7", "1..3", "@@x")]
    plain = ["seed=1..4", "prompt=a cat", "cfg=2.5", "sampler_name=euler", "steps=4", "width=1024"]
    return [[it] for it in (*some, *plain, "prompt=@nowhere.txt", "Prompt.text=x")] + [plain]


def own_cards() -> list[Any]:
    bundled = json.loads(BUNDLED.read_bytes())
    one = dict([next(iter(bundled["cards"].items()))])
    return [{"cards": {"L40S": {"prices": [{"usd_per_hour": 0.9}]}}}, {"notes": {}, "cards": one}]


def journals() -> list[Any]:
    run = {"event": "run", "time": 1.5, "version": 2, "workflow": "w.json", "servers": ["a:1"]}
    posted = {"event": "queued", "key": "k", "prompt_id": "p", "server": "a:1", "boot": "b"}
    done = {"event": "done", "key": "k", "prompt_id": "p", "seconds": 1.5, "files": ["k_1.png"]}
    done |= {"sizes": [10], "texts": {"Report": ["text"]}, "kept": True}
    return [[run, {**posted, "local": {"/m/x": [1, 2]}}, done, {"event": "again", "key": "k"}]] + [
        [run, posted, done, {**done, "event": event}] for event in ("late", "failed", "running")
    ]


def caches() -> list[Any]:
    rates = {"gemm": {"bf16": 1e14, "int8": 2e14}, **dict.fromkeys(store.FIGURES, 1e12)}
    rates |= {"launch_seconds": {"bf16": 1e-4, "graph": 1e-5}, "instructions": {"int8": 1e14}}
    card = {"card": "L40S", "driver": "1", "torch": "2", "date": "2026", "rates": rates}
    timed = {"a": {"tokens": 4096, "ms": {"sdpa": 1.5, "int8": 1}}, "b": {}}
    return [{"version": 1, "measured": it} for it in ([card], timed)]


def server_lists() -> list[Any]:
    one = {"url": "http://127.0.0.1:8188", "boot": "b", "log": "x.log", "state": "ready"}
    return [{"version": 1, "servers": [one, {**one, "url": "https://me:secret@host:1/path"}]}]


def prices() -> list[Any]:
    return [["L40S = 0.79", "4090 = $0.3 # mine", "H100 SXM=2"]]


def pngs() -> list[Any]:
    return [{"prompt": it, "workflow": {"nodes": []}} for it in API()]


def own_settings() -> list[Any]:
    return [{"version": 1, "cache": "~/x", "attention": "fast"}]


CHECKPOINT, API, TEXTS = (unframed, framed), graphs("workflows/api"), (by_line, texts)
TARGETS = {
    "LoRA": Target(loras, read_lora, *CHECKPOINT, CheckpointError),
    "workflow, API form": Target(API, read_graph),
    "workflow, UI form": Target(graphs("workflows"), read_graph),
    "--set": Target(sets, read_set, *TEXTS),
    "cards.json": Target(own_cards, read_own_cards),
    "prices": Target(prices, read_own_prices, *TEXTS),
    "journal": Target(journals, read_journal, unlines, lines, name="case.submit.jsonl"),
    "GGUF": Target(ggufs, read_gguf_set, None, gguf, CheckpointError, "x-00001-of-00001.gguf"),
    "safetensors": Target(checkpoints, read_checkpoint, *CHECKPOINT, CheckpointError),
    "markers": Target(markers, read_checkpoint, *CHECKPOINT, CheckpointError),
    "PNG": Target(pngs, read_png, unpng, png),
    "servers.json": Target(server_lists, lambda path: ServerList(file=path).read()),
    "settings": Target(own_settings, read_settings),
    "measurements": Target(caches, read_cache, clean=()),
}
