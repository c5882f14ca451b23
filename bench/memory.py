"""How much of a card a whole image takes in the real ComfyUI server, and what leaves the card.

    python -m qwen_l40s.bench.memory --models DIR --free-gib 44.4 --json OUT.json
    python -m qwen_l40s.bench.memory --dry          the same flow on a CPU, in half a minute

Runs in the Python that runs ComfyUI. DIR gets a Qwen-Image of the published sizes with random
weights, 58 GB, unless it is there. This process holds all but --free-gib of the card. Each case has
a server of its own; the driver tells every 5 ms how much of the card is in use. Peaks are above
what was in use before the server began, so they count its CUDA context too. "aimdo" is what dynamic
VRAM counts as in use, "GB in" what the card received over PCIe, "on card" how much of the largest
loaded model is on the card in the end. The JSON is written after each image.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
import urllib.error
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..spec.formats import GIB
from .memory_record import CardMeter, ImageRun, MemoryResults, record_of, summary
from .server import ComfyUIServer, ComfyUIServerError

ApiGraph = dict[str, dict[str, Any]]

# What ComfyUI is started with.
MODES = {"dynamic": (), "legacy": ("--disable-dynamic-vram",)}
DRY = {"cpu": ("--cpu",)}
PROBE = "memory_probe"
MICRO = "micro (bundled)"
# What `comfyui.write_models` writes.
TRANSFORMER = "qwen_image_random_bf16.safetensors"
TEXT_ENCODER = "qwen_2.5_vl_7b_random_bf16.safetensors"
VAE = "qwen_image_vae_random_bf16.safetensors"
TEXT_WIDTH = 3584
# Weights that do not fit come over PCIe in each step.
PRESSURE_STEPS = 4
# What cudaMalloc rounds up to.
CUDA_STEP = 2**21
BACK_SECONDS, BACK_BYTES = 20, 2**28
POLL_SECONDS = 0.02
BEGIN = time.monotonic()
PROMPTS = (
    "A lighthouse keeper in a yellow raincoat stands on wet rocks at dusk and holds a brass lamp "
    "while waves break behind him; far out a three-masted ship leans into the wind, gulls circle "
    "above the tower, and the beam of light cuts through low clouds. On the wall a painted sign "
    'reads "NORTH POINT 1871" in white letters. Oil painting, thick strokes, warm lamp light '
    "against cold blue water, fine detail in rope, stone and cloth.",
    "A watchmaker's bench from above: tiny gears in rows on green felt, a half-open pocket watch, "
    "tweezers, a loupe and a cup of black tea whose steam curls over a handwritten ledger. Morning "
    "light falls from the left through a window with small panes and throws long shadows. "
    "Photograph, shallow depth of field, natural colours, sharp metal edges, visible dust.",
)


class MemoryCase(NamedTuple):
    """What one server runs.

    Args:
        loader: "ours" or "stock".
        precision: of our loader.
        kind: "images" (three of each size), "alone" (two of the smallest, without text encoder and
            VAE) or "pressure" (one while more of the card is taken, one after).
        leaves: under pressure, of the bytes that are free, those that stay so.
    """

    loader: str
    precision: str
    kind: str
    leaves: Any = None


CASES = {
    "ours-bf16": MemoryCase("ours", "bf16", "images"),
    "ours-fp8": MemoryCase("ours", "fp8", "images"),
    "ours-int8": MemoryCase("ours", "int8", "images"),
    "stock": MemoryCase("stock", "bf16", "images"),
    "alone-bf16": MemoryCase("ours", "bf16", "alone"),
    "alone-fp8": MemoryCase("ours", "fp8", "alone"),
    "alone-int8": MemoryCase("ours", "int8", "alone"),
    "alone-stock": MemoryCase("stock", "bf16", "alone"),
    "pressure-half": MemoryCase("ours", "bf16", "pressure", lambda free: free // 2),
    "pressure-4gib": MemoryCase("ours", "bf16", "pressure", lambda free: 4 * GIB),
}
DEFAULT_CASES = tuple(name for name in CASES if name not in ("ours-fp8", "ours-int8", "alone-int8"))


@dataclass(frozen=True)
class GraphSettings:
    """What all graphs share.

    Args:
        transformer, text_encoder, vae: as the loaders list them.
        width: the text encoder's.
        modulation: our loader's widget.
    """

    transformer: str = MICRO
    text_encoder: str = MICRO
    vae: str = MICRO
    width: int = 512
    steps: int = 20
    cfg: float = 4.0
    modulation: str = "off card"


class Image(NamedTuple):
    """One prompt of a case."""

    name: str
    size: int
    seed: int = 1
    text: str = PROMPTS[0]


def images_of(case: MemoryCase, sizes: Sequence[int], pressure_size: int) -> list[Image]:
    """The prompts of a case, in order."""
    if case.kind == "images":
        return [
            image
            for size in sizes
            for image in (
                Image("first", size),
                Image("other seed", size, 2),
                Image("other prompt", size, 2, PROMPTS[1]),
            )
        ]
    if case.kind == "alone":
        return [Image("first", min(sizes)), Image("other seed", min(sizes), 2)]
    return [Image("under pressure", pressure_size), Image("after", pressure_size, 2)]


def graph_of(case: MemoryCase, settings: GraphSettings, image: Image) -> ApiGraph:
    """The graph of one prompt, as /prompt takes it."""
    nodes: ApiGraph = {}

    def add(name: str, kind: str, **inputs: object) -> list[Any]:
        nodes[name] = {"class_type": kind, "inputs": inputs}
        return [name, 0]

    ours, alone = case.loader == "ours", case.kind == "alone"
    if ours:
        model = add(
            "model",
            "QwenL40S_LoadModel",
            model=settings.transformer,
            precision=case.precision,
            modulation=settings.modulation,
        )
        model = add("optimize", "QwenL40S_Optimize", model=model)
    else:
        model = add("model", "UNETLoader", unet_name=settings.transformer, weight_dtype="default")
    if alone:
        # Of different lengths, as prompts are: ComfyUI would run equal ones as one batch.
        positive, negative = (
            add(
                name,
                "L40SProbe_RandomConditioning",
                tokens=tokens,
                width=settings.width,
                seed=tokens,
            )
            for name, tokens in (("positive", 200), ("negative", 20))
        )
    else:
        if ours:
            clip = add(
                "text_encoder",
                "QwenL40S_LoadTextEncoder",
                text_encoder=settings.text_encoder,
                precision="bf16",
            )
            vae = add("vae", "QwenL40S_LoadVAE", vae=settings.vae, precision="auto")
        else:
            clip = add(
                "text_encoder", "CLIPLoader", clip_name=settings.text_encoder, type="qwen_image"
            )
            vae = add("vae", "VAELoader", vae_name=settings.vae)
        positive = add("positive", "CLIPTextEncode", text=image.text, clip=clip)
        negative = add("negative", "CLIPTextEncode", text=" ", clip=clip)
    size = image.size
    sampled = add(
        "sample",
        "KSampler",
        model=model,
        positive=positive,
        negative=negative,
        latent_image=add("latent", "EmptySD3LatentImage", width=size, height=size, batch_size=1),
        seed=image.seed,
        steps=min(settings.steps, PRESSURE_STEPS) if case.leaves else settings.steps,
        cfg=settings.cfg,
        sampler_name="euler",
        scheduler="simple",
        denoise=1.0,
    )
    add("check", "L40SProbe_LatentEnd", samples=sampled)
    if not alone:
        decoder = "QwenL40S_VAEDecode" if ours else "VAEDecode"
        add("save", "PreviewImage", images=add("decode", decoder, samples=sampled, vae=vae))
    return nodes


def fill(graph: ApiGraph, known: Mapping[str, Any]) -> ApiGraph:
    """Adds the required inputs that a graph leaves at their defaults.

    Args:
        known: what the server answers to /object_info.
    """
    for node in graph.values():
        for name, entry in known[node["class_type"]]["input"].get("required", {}).items():
            kind, options = entry[0], entry[1] if len(entry) > 1 else {}
            if name not in node["inputs"]:
                choices = kind if isinstance(kind, list) else options.get("options", [None])
                node["inputs"][name] = options.get("default", choices[0])
    return graph


class Ballast:
    """Memory of the card that this process holds, so that a large card has little free."""

    def __init__(self) -> None:
        import torch

        torch.cuda.init()
        self._cuda, self._empty, self._uint8 = torch.cuda, torch.empty, torch.uint8
        self._chunks: list[list[Any]] = []

    @property
    def free(self) -> int:
        """Bytes that the driver says are free."""
        return self._cuda.mem_get_info()[0]

    def hold(self, leave: int) -> None:
        """Allocates until `leave` bytes are free, or up to `CUDA_STEP` more.

        Raises:
            RuntimeError: fewer are free.
        """
        if leave > self.free:
            raise RuntimeError(
                f"{leave / GIB:.1f} GiB are to stay free and the card has {self.free / GIB:.1f} "
                "GiB free: end what else runs on it, or ask for less"
            )
        self._chunks.append([])
        while (excess := self.free - leave) >= CUDA_STEP:
            size = min(GIB, excess // CUDA_STEP * CUDA_STEP)
            self._chunks[-1].append(self._empty(size, dtype=self._uint8, device="cuda"))

    def release(self) -> None:
        """Gives back what the last `hold` took."""
        self._chunks.pop()
        self._cuda.empty_cache()


@dataclass
class MemoryBenchmark:
    """Runs cases in servers and keeps what they gave.

    Args:
        ballast, meter: None where there is no card.
    """

    options: argparse.Namespace
    settings: GraphSettings
    ballast: Ballast | None = None
    meter: CardMeter | None = None
    results: MemoryResults = field(init=False)

    def __post_init__(self) -> None:
        self.results = MemoryResults(self.options.json)
        self.baseline = self.meter.used() if self.meter else 0
        self.results.conditions = {
            "free_gib": self.options.free_gib if self.ballast else None,
            "meter": self.meter.about if self.meter else None,
            "python": platform.python_version(),
            "settings": asdict(self.settings),
            "servers": [],
        }

    def run(self, mode: str, name: str) -> None:
        """One case; what goes wrong is a record too."""
        case, label, options = CASES[name], {"mode": mode, "case": name}, self.options
        if options.dry and case.loader == "stock":
            say(f"{name}: left out, stock ComfyUI cannot load the bundled model")
            return
        self._wait_for_baseline()
        base = options.work / f"{mode}-{name}"
        nodes = base / "custom_nodes"
        nodes.mkdir(parents=True, exist_ok=True)
        if not (nodes / PROBE).exists():
            (nodes / PROBE).symlink_to(Path(__file__).with_name(PROBE), target_is_directory=True)
        arguments = [*{**MODES, **DRY}[mode], *options.server_args.split()]
        # What leaves the card as a whole is logged at this level only.
        arguments += ["--verbose", "DEBUG", str(base / "detail.log")]
        if not options.dry:
            (base / "models").symlink_to(options.models, target_is_directory=True)
        try:
            begin = time.monotonic()
            with ComfyUIServer(options.comfyui, options.python, base, *arguments) as server:
                self._note_server(server, label, time.monotonic() - begin)
                self._run_images(server, case, label)
        except (ComfyUIServerError, OSError, LookupError, RuntimeError) as error:
            self._add({**label, "size": 0, "image": "-", "status": "failed", "error": str(error)})

    def _wait_for_baseline(self) -> None:
        """Waits until the server before has given its memory back."""
        deadline = time.monotonic() + BACK_SECONDS
        while self.meter and self.meter.used() > self.baseline + BACK_BYTES:
            if time.monotonic() > deadline:
                say(f"{(self.meter.used() - self.baseline) / GIB:.2f} GiB were not given back")
                return
            time.sleep(0.1)

    def _note_server(self, server: ComfyUIServer, label: dict, seconds: float) -> None:
        stats = server.get_json("/system_stats")
        self.results.conditions["comfyui"] = stats["system"]["comfyui_version"]
        self.results.conditions["torch"] = stats["system"]["pytorch_version"]
        idle = (self.meter.used() - self.baseline) / GIB if self.meter else None
        about = {"device": stats["devices"][0]["name"], "start_s": seconds, "idle_gib": idle}
        self.results.conditions["servers"].append({**label, **about})
        say(f"{' '.join(label.values())}: server up in {seconds:.1f} s")

    def _run_images(self, server: ComfyUIServer, case: MemoryCase, label: dict) -> None:
        known = server.get_json("/object_info")
        for image in images_of(case, self.options.sizes, self.options.pressure_size):
            record = {**label, "size": image.size, "image": image.name}
            graph = fill(graph_of(case, self.settings, image), known)
            pressed = image.name == "under pressure" and self.ballast is not None
            baseline = self.baseline
            if pressed:
                before = self.meter.used()
                self.ballast.hold(case.leaves(self.ballast.free))
                self.meter.settle()
                baseline += self.meter.used() - before
                say(f"{self.ballast.free / GIB:.1f} GiB are left free")
            try:
                record |= self._run_image(server, graph, baseline)
            except (ComfyUIServerError, OSError) as error:
                failed = {"status": "failed", "error": str(error), "log_tail": server.tail()}
                self._add({**record, **failed})
                return
            finally:
                if pressed:
                    self.ballast.release()
            self._add(record)

    def _run_image(self, server: ComfyUIServer, graph: ApiGraph, baseline: int) -> dict:
        server.post_json("/l40s_probe/reset", {})
        log = server.base / "detail.log"
        size = log.stat().st_size
        run = run_graph(server, graph, self.options.timeout)
        if self.meter:
            self.meter.settle()
        with log.open("rb") as file:
            file.seek(size)
            lines = file.read().decode(errors="replace").splitlines()
        kinds = {name: node["class_type"] for name, node in graph.items()}
        record = record_of(server, run, kinds, self.meter, baseline, lines)
        # Whatever became of the prompt, the server has to be there for the next one.
        return record | {"answers_after": bool(server.get_json("/system_stats"))}

    def _add(self, record: dict) -> None:
        if self.meter:
            self.results.conditions["readings"] = self.meter.health()
        self.results.add(record)
        peak = record.get("peak_gib")
        say(
            f"{record['mode']} {record['case']} {record['size']} {record['image']}: "
            f"{record['status']} in {record.get('seconds', 0):.1f} s"
            f"{'' if peak is None else f', peak {peak:.2f} GiB'}; "
            f"log: {summary(record.get('findings', []))}"
        )
        if record["error"]:
            say(f"  {record['error'][:600]}")


def run_graph(server: ComfyUIServer, graph: ApiGraph, seconds: float) -> ImageRun:
    """Posts a graph and waits for its end.

    Raises:
        ComfyUIServerError: the graph is refused, the server ends, or it takes too long.
    """
    start = time.monotonic()
    try:
        # The server names the node that runs to clients only, and so the probe.
        posted = server.post_json("/prompt", {"prompt": graph, "client_id": "memory"})
    except urllib.error.HTTPError as error:
        raise ComfyUIServerError(
            f"ComfyUI refuses the graph: {error.read().decode()[:2000]}"
        ) from None
    prompt = posted["prompt_id"]
    while time.monotonic() < start + seconds:
        try:
            entry = server.get_json(f"/history/{prompt}").get(prompt)
        except OSError:
            server.check_alive()
            entry = None
        if entry:
            return ImageRun(start, time.monotonic(), entry)
        time.sleep(POLL_SECONDS)
    raise ComfyUIServerError(f"no answer in {seconds:.0f} s:\n{server.tail()}")


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGIN:7.1f} s] {text}", flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line; ends the program with a sentence on what is wrong with it."""

    def listed(text: str) -> list[str]:
        return [part.strip() for part in text.split(",") if part.strip()]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", type=Path, default=Path("/dev/shm/qwen_l40s_models"), help="for the weights")
    add("--free-gib", type=float, default=44.4, help="of the card, as on an L40S (default 44.4)")
    add("--json", type=Path, help="where the results go")
    add("--modes", type=listed, default=["dynamic"], help=f"of {', '.join(MODES)}")
    add("--cases", type=listed, default=list(DEFAULT_CASES), help=f"of {', '.join(CASES)}")
    add("--sizes", type=lambda text: [int(one) for one in listed(text)], default=[1024, 1328, 2048])
    add("--pressure-size", type=int, default=512, help="of the images under pressure")
    add("--steps", type=int, default=20)
    add("--cfg", type=float, default=4.0)
    add("--modulation", default="off card", help="our loader's widget")
    add("--timeout", type=float, default=300, help="seconds for one image")
    add("--comfyui", type=Path, default=os.environ.get("COMFYUI_PATH", "~/ComfyUI"))
    add("--server-args", default="", help="further arguments of ComfyUI")
    add("--work", type=Path, help="for base folders and logs (default: a temporary one)")
    add("--dry", action="store_true", help="on a CPU with the bundled model: small, no card")
    options = parser.parse_args(arguments)
    for name, allowed in (("modes", MODES), ("cases", CASES)):
        unknown = [value for value in getattr(options, name) if value not in allowed]
        if unknown:
            parser.error(f"--{name}: {', '.join(unknown)}: choose from {', '.join(allowed)}")
    options.comfyui = Path(options.comfyui).expanduser().resolve()
    if not (options.comfyui / "main.py").is_file():
        parser.error(f"no ComfyUI in {options.comfyui}: name one with --comfyui or COMFYUI_PATH")
    own = options.comfyui / ".venv" / "bin" / "python"
    options.python = own if own.exists() else sys.executable
    options.work = (options.work or Path(tempfile.mkdtemp(prefix="qwen_l40s_memory_"))).resolve()
    options.models = options.models.resolve()
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    say(f"servers' folders and logs: {options.work}")
    shared = {"steps": options.steps, "cfg": options.cfg, "modulation": options.modulation}
    if options.dry:
        benchmark = MemoryBenchmark(options, GraphSettings(**shared))
    else:
        from .command import import_comfyui

        import_comfyui(cpu=False)
        from .comfyui import write_models

        write_models(options.models)
        say("weights are there")
        ballast = Ballast()
        ballast.hold(int(options.free_gib * GIB))
        benchmark = MemoryBenchmark(
            options,
            GraphSettings(TRANSFORMER, TEXT_ENCODER, VAE, TEXT_WIDTH, **shared),
            ballast,
            CardMeter(),
        )
    for mode in DRY if options.dry else options.modes:
        for name in options.cases:
            benchmark.run(mode, name)
    print(benchmark.results.table())
    failed = [each for each in benchmark.results.records if each["status"] == "failed"]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
