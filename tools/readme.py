"""Makes the tables and the figure of README.md, README.zh-CN.md and docs/.

    python -m qwen_l40s.tools.readme            names what is out of date
    python -m qwen_l40s.tools.readme --write    writes tables and docs/images/speed.png

Predicted figures are the estimator's, settings are those of workflows/api/, and measured figures
are those of bench/results/. A table stands between `<!-- made: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..charts.figures import between, duration, tenths, usd
from ..charts.picture import COLOURS, GOOD, LINE, SIDE, WIDTH, Page, text_width
from ..machine.store import known_cards
from ..planning.card_list import BUNDLED
from ..planning.cards import Card, find_card
from ..planning.estimate import Estimate, estimate
from ..planning.phases import Range
from ..planning.step_cache import CHOICES
from ..spec.formats import GIB
from .workflows.notes import run_request

if TYPE_CHECKING:
    from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
PICTURE = ROOT / "docs" / "images" / "speed.png"
BLOCK = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

# {model: (default template, {GB of VRAM from which a few-step template is named: its name})}
MODELS = {
    "2.1": ("qwen_image_21", {0: "start_here_12gb"}),
    "2512": ("text_to_image", {0: "start_here_24gb", 48: "start_here_48gb"}),
}
# {GPU: (GB, its models, the recommended one first)}.
GPUS = {
    "RTX 4060": (8, ("2.1", "2512")),
    "RTX 4070": (12, ("2.1", "2512")),
    "RTX 4080": (16, ("2.1", "2512")),
    "RTX 3090": (24, ("2512", "2.1")),
    "RTX 4090": (24, ("2512", "2.1")),
    "RTX 5090": (32, ("2512",)),
    "L40S": (48, ("2512",)),
    "H100 SXM": (80, ("2512",)),
}
# Of docs/settings.md.
MORE_GPUS = {
    "RTX 3080 10GB": (10, ("2.1", "2512")),
    "RTX 3060 12GB": (12, ("2.1", "2512")),
    "RTX 5090": (32, ("2.1",)),
    "L40S": (48, ("2.1",)),
    "H100 SXM": (80, ("2.1",)),
    "A100 80GB SXM": (80, ("2512", "2.1")),
    "H200": (141, ("2512", "2.1")),
}
CHECKPOINTS = {
    "Qwen-Image-2512": "text_to_image",
    "2512, Lightning 4 or 8": "start_here_24gb",
    "Edit-2511": "edit_2511",
    "Edit-2511, Lightning": "edit_2511_lightning",
    "Layered": "layered",
    "2.1": "qwen_image_21",
    "2.1-Turbo": "start_here_12gb",
    "2.1, Viggle's LoRA": "qwen_image_21_viggle_6",
}
# Columns of the tables of GPUs, in English and in Chinese.
HEADS = {
    "en": "GPU | model | few-step template | format | VRAM | system RAM | default steps | "
    "few steps | step against stock",
    "zh": "显卡 | 模型 | 少步数模板 | 格式 | 显存 | 内存 | 默认步数 | 少步数 | 每步与原版相比",
}
WORDS = {
    "en": {},
    "zh": {
        r"all (\S+) GiB, (\S+) streamed a step": r"全部 \1 GiB，每步传输 \2",
        r"tight": "偏紧",
        r" to ": " 到 ",
        r" min\b": " 分钟",
        r" s\b": " 秒",
        r", ": "，",
        r"x\b(?= \|)": " 倍",
    },
}
# Bars of the figure: {name in the results: words}.
BARS = {
    "comfyui bf16": "stock, bf16",
    "comfyui fp8": "stock, fp8",
    "comfyui int8": "stock, int8",
    "diffusers bf16": "diffusers compiled, bf16",
    "ours bf16": "this pack, bf16",
    "ours int8": "this pack, int8 (default)",
}
GROUPS = {("1.x", "1328x1328"): "Qwen-Image", ("2.1", "1024x1024"): "Qwen-Image-2.1"}
CAPTION = {
    "en": "{model}, {size}: {ours:.0f} ms a step in int8, {speed:.1f}x faster than the fastest "
    "stock format ({name}, {fastest:.0f} ms) and {bf16:.1f}x faster than stock bf16 "
    "({stock:.0f} ms). Optimize alone, on a bf16 model: {alone:.0f} ms, {gain:.1f}x faster than "
    "stock bf16.",
    "zh": "{model}，{size}：int8 每步 {ours:.0f} ms，速度是原版最快的格式（{name}，"
    "{fastest:.0f} ms）的 {speed:.1f} 倍，是原版 bf16（{stock:.0f} ms）的 {bf16:.1f} 倍。"
    "bf16 模型只加“Qwen-Image 优化”：{alone:.0f} ms，是原版 bf16 的 {gain:.1f} 倍。",
}
CONDITIONS = {
    "en": " Measured on one {card}: random full-size weights, batch 1, CFG 1, ComfyUI {comfyui}, "
    "torch {torch}, {date}.",
    "zh": "在一张 {card} 上测得：完整尺寸的随机权重，batch 1，CFG 1，ComfyUI {comfyui}，"
    "torch {torch}，{date}。",
}


def template(name: str) -> dict[str, Any]:
    file = ROOT / "workflows" / "api" / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8"))


def linked(name: str, folder: str) -> str:
    return f"[{name}]({folder}workflows/{name}.json)"


def predicted(name: str, card: Card) -> Estimate:
    return estimate(run_request(template(name)), card)


def gpu_row(name: str, gb: int, model: str, folder: str, *, recommended: bool) -> str:
    """Writes a GPU's row of one model; a step is that of the default template."""
    card = find_card(name, known_cards(BUNDLED))
    default, few_steps = MODELS[model]
    quick = few_steps[max(least for least in few_steps if gb >= least)]
    few, many = predicted(quick, card), predicted(default, card)
    exact = [speed for stock, speed in many.faster.items() if "attention" not in stock]
    slowest = min(exact, key=lambda speed: speed.middle)
    title = name if "GB" in name else f"{name}, {gb} GB"
    cells = [
        f"**{title}**" if recommended else title,
        model,
        linked(quick, folder),
        few.option.setting.precision,
        memory(few),
        f"{few.host_ram_bytes / GIB:.0f} GiB",
        duration(many.image_seconds),
        duration(few.image_seconds),
        f"{between(slowest, '{:.1f}'.format)}x",
    ]
    return f"| {' | '.join(cells)} |"


def memory(found: Estimate) -> str:
    option = found.option
    moved = tenths(option.moved_bytes * found.request.passes)
    if float(moved):
        return f"all {tenths(option.usable_bytes)} GiB, {moved} streamed a step"
    text = f"{tenths(option.peak_bytes)} GiB"
    return f"{text}, tight" if found.tight else text


def gpus(language: str, folder: str, names: Mapping[str, tuple[int, Sequence[str]]]) -> list[str]:
    rows = [
        gpu_row(name, gb, model, folder, recommended=names is GPUS and model == models[0])
        for name, (gb, models) in names.items()
        for model in models
    ]
    lines = table(HEADS[language], rows)
    for word, other in WORDS[language].items():
        lines = [re.sub(word, other, line) for line in lines]
    return lines


def costs(folder: str) -> list[str]:
    """Writes USD an image and images an hour of three templates, on GPUs that people rent."""
    templates = [*(default for default, _ in MODELS.values()), "start_here_24gb"]
    lines = []
    for name in ("L40S", "RTX 4090", "A100 80GB SXM", "H100 SXM"):
        card = find_card(name, known_cards(BUNDLED))
        cells = [name]
        for found in (predicted(each, card) for each in templates):
            seconds = found.image_seconds
            an_hour = Range(3600 / seconds.high, 3600 / seconds.low)
            cells.append(f"{usd(found.usd_per_image)}; {between(an_hour, two_digits)}")
        lines.append(f"| {' | '.join(cells)} |")
    return table(" | ".join(("GPU", *(linked(each, folder) for each in templates))), lines)


def two_digits(value: float) -> str:
    return f"{float(f'{value:.2g}'):,.0f}"


def settings(folder: str) -> list[str]:
    """Writes what each checkpoint is run with, as its template has it."""
    lines = []
    for checkpoint, name in CHECKPOINTS.items():
        nodes = template(name)
        sample = nodes["sample"]["inputs"]
        if "sigmas" in nodes:
            steps, sampler = nodes["sigmas"]["inputs"]["steps"], nodes["sampler"]["inputs"]
            schedule = f"**Qwen-Image Scheduler** `{nodes['sigmas']['inputs']['preset']}`"
        else:
            steps, sampler = sample["steps"], sample
            schedule = f"{sample['scheduler']}, shift {nodes['shift']['inputs']['shift']:g}"
        steps = "4 or 8" if "4 or 8" in checkpoint else steps
        kinds = {node["class_type"] for node in nodes.values()}
        rescale = ", **Qwen-Image CFG Rescale**" if "QwenL40S_CFGNorm" in kinds else ""
        lines.append(
            f"| {checkpoint} | {steps} | {sample['cfg']:g} | {sampler['sampler_name']}, {schedule}"
            f"{rescale} | {linked(name, folder)} |"
        )
    return table("checkpoint | steps | CFG | sampler and schedule | template", lines)


def loops() -> list[str]:
    """Writes the seconds of sampling loops with a step cache, as measured."""
    found = json.loads((RESULTS / "step-cache-h200.json").read_text(encoding="utf-8"))
    seconds = {
        (row["model"], row["size"], row["cache"]): row["loop_seconds"] for row in found["rows"]
    }
    lines = []
    for size, model in product((1024, 1328), ("bf16", "int8")):
        stock = seconds["stock", size, "off"]
        ours = [seconds.get((model, size, cache)) for cache in CHOICES]
        cells = [f"{took:.1f} ({stock / took:.1f}x)" if took else "" for took in ours]
        lines.append(f"| {size}x{size}, {model} | {stock:.1f} | {' | '.join(cells)} |")
    return table("loop | stock, bf16 | Optimize | with quality | balanced | speed", lines)


def table(head: str, rows: Sequence[str]) -> list[str]:
    return [f"| {head} |", "|" + "---|" * (head.count("|") + 1), *rows]


def measured() -> tuple[dict[str, Any], dict[tuple[str, str], dict[str, float]]]:
    """Reads conditions and {(model, size): {name: ms}} of a file of `bench forward --json`."""
    found = json.loads((RESULTS / "readme-h200.json").read_text(encoding="utf-8"))
    groups: dict[tuple[str, str], dict[str, float]] = {}
    for row in found["rows"]:
        groups.setdefault((row.get("model", "1.x"), row["size"]), {})[row["name"]] = row["ms"]
    return found["conditions"], {key: groups[key] for key in GROUPS if key in groups}


def caption(language: str) -> list[str]:
    conditions, groups = measured()
    lines = []
    for key, rows in groups.items():
        ours, stock = rows["ours int8"], rows["comfyui bf16"]
        fastest, name = min((ms, name) for name, ms in rows.items() if name.startswith("comfyui"))
        about = {"model": GROUPS[key], "size": key[1], "ours": ours, "stock": stock}
        about |= {"fastest": fastest, "speed": fastest / ours, "bf16": stock / ours}
        about |= {"alone": rows["ours bf16"], "gain": stock / rows["ours bf16"]}
        about["name"] = name.removeprefix("comfyui ")
        lines.append(CAPTION[language].format(**about))
    software = conditions["software"]
    about = {"card": conditions["card"], "date": conditions["date"]}
    about |= {"comfyui": software["ComfyUI"], "torch": software["torch"].partition("+")[0]}
    return [*lines[:-1], lines[-1] + CONDITIONS[language].format(**about)]


def picture() -> Image.Image:
    """Draws a bar for each way to compute a step; shorter is faster."""
    page = Page()
    _, groups = measured()
    left = SIDE + max(text_width(words, 34) for words in BARS.values()) + 24
    right = WIDTH - SIDE - 160
    for key, rows in groups.items():
        page.text((SIDE, page.y + LINE / 2), f"{GROUPS[key]} {key[1]}: ms a step, one GPU", size=40)
        page.y += LINE + 14
        longest = max(rows.values())
        for name, words in ((name, BARS[name]) for name in BARS if name in rows):
            middle, end = page.y + LINE / 2, left + (right - left) * rows[name] / longest
            fill = GOOD if name.startswith("ours") else COLOURS["other"]
            page.text((SIDE, middle), words)
            page.draw.rectangle((left, middle - 16, end, middle + 16), fill=fill)
            page.text((end + 14, middle), f"{rows[name]:.0f}")
            page.y += LINE
        page.y += 20
    page.y -= 20
    return page.finish().quantize(16)


def made() -> dict[Path, str]:
    blocks = {
        "README.md": {"speed": caption("en"), "gpus": gpus("en", "", GPUS)},
        "README.zh-CN.md": {"speed": caption("zh"), "gpus": gpus("zh", "", GPUS)},
        "docs/settings.md": {
            "gpus": gpus("en", "../", MORE_GPUS),
            "costs": costs("../"),
        },
        "docs/models.md": {"settings": settings("../")},
        "docs/few_steps.md": {"loops": loops()},
    }
    pages = {}
    for name, known in blocks.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        found = [block[2] for block in BLOCK.finditer(text)]
        if sorted(found) != sorted(known):
            raise ValueError(f"{name} has the blocks {found}, and {list(known)} are made")
        pages[ROOT / name] = BLOCK.sub(
            lambda block, known=known: block[1] + "\n".join(known[block[2]]) + "\n" + block[3],  # type: ignore[misc]
            text,
        )
    return pages


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m qwen_l40s.tools.readme",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--write", action="store_true", help="write the tables and the figure")
    write = parser.parse_args(arguments).write
    stale = {
        path: text for path, text in made().items() if text != path.read_text(encoding="utf-8")
    }
    for path, text in stale.items():
        if write:
            path.write_text(text, encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {'written' if write else 'out of date'}")
    if write:
        picture().save(PICTURE, optimize=True)
    return 0 if write else int(bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
