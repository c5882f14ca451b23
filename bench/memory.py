"""The command line of benchmarks/memory.py."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .ballast import GIB, Ballast
from .memory_cases import (
    CASES,
    DEFAULT_CASES,
    TEXT_ENCODER,
    TEXT_WIDTH,
    TRANSFORMER,
    VAE,
    Case,
    Image,
    Settings,
    fit,
    graph_of,
    images_of,
)
from .memory_record import Meter, Results, record_of, summary
from .memory_server import Server, ServerError

# What ComfyUI is started with.
MODES = {"dynamic": (), "legacy": ("--disable-dynamic-vram",)}
DRY = {"cpu": ("--cpu",)}


def parse(description: str) -> argparse.Namespace:
    """Reads the command line; ends the program with a sentence on what is wrong with it."""

    def listed(text: str) -> list[str]:
        return [part.strip() for part in text.split(",") if part.strip()]

    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
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
    add("--modulation", default="off card", help="our loader's widget; empty leaves it as it is")
    add("--placement", default="", help="the text encoder's widget; empty leaves it as it is")
    add("--timeout", type=float, default=300, help="seconds for one image")
    add("--comfyui", type=Path, default=os.environ.get("COMFYUI_PATH", "~/ComfyUI"))
    add("--python", help="that runs ComfyUI (default: its .venv, else this one)")
    add("--front-end-root", help="ComfyUI's argument, where its front end is not installed")
    add("--server-args", default="", help="further arguments of ComfyUI")
    add("--work", type=Path, help="for base folders and logs (default: a temporary one)")
    add("--dry", action="store_true", help="on a CPU with the bundled model: small, no card")
    options = parser.parse_args()
    for name, allowed in (("modes", MODES), ("cases", CASES)):
        unknown = [value for value in getattr(options, name) if value not in allowed]
        if unknown:
            parser.error(f"--{name}: {', '.join(unknown)}: choose from {', '.join(allowed)}")
    options.comfyui = Path(options.comfyui).expanduser().resolve()
    if not (options.comfyui / "main.py").is_file():
        parser.error(f"no ComfyUI in {options.comfyui}: name one with --comfyui or COMFYUI_PATH")
    own = options.comfyui / ".venv" / "bin" / "python"
    options.python = options.python or str(own if own.exists() else sys.executable)
    options.work = options.work or Path(tempfile.mkdtemp(prefix="qwen_l40s_memory_"))
    options.work = options.work.resolve()
    options.models = options.models.resolve()
    return options


# How much of a card a whole image takes in the real ComfyUI server, and what leaves the card.
#
#     python benchmarks/memory.py --models DIR --free-gib 44.4 --json OUT.json
#     python benchmarks/memory.py --dry                       the same flow on a CPU, in half a
# minute
#
# DIR gets a Qwen-Image of the published sizes with random weights, 58 GB, unless it is there. A
# process of its own holds all but --free-gib of the card. Each case has a server of its own; the
# driver tells every 5 ms how much of the card is in use. Peaks are above what was in use before the
# server began, so they count its CUDA context too. "aimdo" is what dynamic VRAM counts as in use,
# "GB in" what the card received over PCIe, "on card" how much of the largest loaded model is on the
# card in the end.
#
# The server's packages come from PYTHONPATH or from ComfyUI's own .venv. The JSON is written after
# each image.

FULL_SIZE = {
    "transformer": TRANSFORMER,
    "text_encoder": TEXT_ENCODER,
    "vae": VAE,
    "width": TEXT_WIDTH,
}
BACK_SECONDS = 20
BACK_BYTES = 2**28
BEGIN = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGIN:7.1f} s] {text}", flush=True)


class Benchmark:
    """Runs cases in servers and keeps what they gave.

    Args:
        options: of the command line.
        ballast, meter: None where there is no card.
    """

    def __init__(
        self, options: argparse.Namespace, ballast: Ballast | None, meter: Meter | None
    ) -> None:
        self.options, self.meter = options, meter
        self.results = Results(options.json)
        self.baseline = meter.used() if meter else 0
        self.settings = Settings(
            steps=options.steps,
            cfg=options.cfg,
            modulation=options.modulation or None,
            placement=options.placement or None,
            **({} if options.dry else FULL_SIZE),
        )
        self.results.conditions = {
            "card": ballast.facts if ballast else None,
            "free_gib": options.free_gib if ballast else None,
            "meter": meter.about if meter else None,
            "python": platform.python_version(),
            "settings": self.settings.__dict__,
            "servers": [],
            "notes": [],
        }

    def run(self, mode: str, name: str) -> None:
        """One case; what goes wrong is a record too."""
        case = CASES[name]
        label = {"mode": mode, "case": name}
        if self.options.dry and case.loader == "stock":
            say(f"{name}: left out, stock ComfyUI cannot load the bundled model")
            return
        self._wait_for_baseline()
        base = self.options.work / f"{mode}-{name}"
        models = None if self.options.dry else self.options.models
        mode_arguments = {**MODES, **DRY}[mode]
        arguments = [*mode_arguments, *self.options.server_args.split()]
        if self.options.front_end_root:
            arguments += ["--front-end-root", self.options.front_end_root]
        try:
            with Server(
                self.options.comfyui, self.options.python, base, models, *arguments
            ) as server:
                self._note_server(server, label)
                self._images(server, case, label)
        except (ServerError, OSError, LookupError, RuntimeError) as error:
            failed = {"size": 0, "image": "-", "status": "failed", "error": str(error)}
            self._add({**label, **failed})

    def _wait_for_baseline(self) -> None:
        """Waits until the server before has given its memory back."""
        deadline = time.monotonic() + BACK_SECONDS
        while self.meter and self.meter.used() > self.baseline + BACK_BYTES:
            if time.monotonic() > deadline:
                say(f"{(self.meter.used() - self.baseline) / GIB:.2f} GiB were not given back")
                return
            time.sleep(0.1)

    def _note_server(self, server: Server, label: dict) -> None:
        system, device = server.stats["system"], server.stats["devices"][0]
        self.results.conditions["comfyui"] = system["comfyui_version"]
        self.results.conditions["torch"] = system["pytorch_version"]
        idle = (self.meter.used() - self.baseline) / GIB if self.meter else None
        about = {"device": device["name"], "start_s": server.start_seconds, "idle_gib": idle}
        self.results.conditions["servers"].append({**label, **about})
        say(f"{' '.join(label.values())}: server up in {server.start_seconds:.1f} s")

    def _images(self, server: Server, case: Case, label: dict) -> None:
        with contextlib.ExitStack() as held:
            baseline = self.baseline
            if case.ballast and not self.options.dry:
                before = self.meter.used()
                second = held.enter_context(Ballast(self.options.python, *case.ballast))
                self.meter.settle()
                baseline += self.meter.used() - before
                say(f"a second ballast leaves {second.facts['free_gib']:.1f} GiB")
            for image in images_of(case, self.options.sizes, self.options.pressure_size):
                if image.name == "after":
                    held.close()
                    baseline = self.baseline
                record = {**label, "size": image.size, "image": image.name}
                try:
                    record |= self._image(server, case, image, baseline)
                except (ServerError, OSError) as error:
                    failed = {"status": "failed", "error": str(error), "log_tail": server.tail()}
                    self._add({**record, **failed})
                    return
                self._add(record)

    def _image(self, server: Server, case: Case, image: Image, baseline: int) -> dict:
        fitted = fit(graph_of(case, self.settings, image), server.known)
        server.post("/l40s_probe/reset", {})
        size = server.log_size()
        answer = server.run(fitted.graph, self.options.timeout)
        if self.meter:
            self.meter.settle()
        kinds = {name: node["class_type"] for name, node in fitted.graph.items()}
        record = record_of(server, answer, kinds, self.meter, baseline, server.log_since(size))
        # Whatever became of the prompt, the server has to be there for the next one.
        return record | {"answers_after": bool(server.get("/system_stats")), "notes": fitted.notes}

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
        for note in record.get("notes", []):
            if note not in self.results.conditions["notes"]:
                self.results.conditions["notes"].append(note)
                self.results.save()
                say(f"  note: {note}")
        if record["error"]:
            say(f"  {record['error'][:600]}")


def main() -> int:
    options = parse(__doc__)
    # So that the servers and the ballast end when this does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    say(f"servers' folders and logs: {options.work}")
    with contextlib.ExitStack() as held:
        ballast = meter = None
        if not options.dry:
            maker = Path(__file__).with_name("memory_weights.py")
            subprocess.run([options.python, maker, options.comfyui, options.models], check=True)
            say("weights are there")
            free = ("--free-gib", str(options.free_gib))
            ballast = held.enter_context(Ballast(options.python, *free))
            meter = Meter(ballast.used, ballast.facts["uuid"])
            held.callback(meter.stop)
            say(f"{ballast.facts} {meter.about}")
        benchmark = Benchmark(options, ballast, meter)
        for mode in DRY if options.dry else options.modes:
            for name in options.cases:
                benchmark.run(mode, name)
    print(benchmark.results.table())
    failed = [record for record in benchmark.results.records if record["status"] == "failed"]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
