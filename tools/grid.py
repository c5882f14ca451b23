"""One hash a case of 2,000 plans and 1,300 estimates: which answers does a change change?

Compares with grid.txt, prints the cases that differ, and ends with 1 where one does; `--answer`
prints what a case is, so that two checkouts' answers can be compared by diff. A case is
drawn from its name alone and asks public functions. Its hash is of canonical JSON: bytes, times to
nine digits, settings; no name of a type, no sentence. No card and no cache folder take part.
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .. import errors
from ..families.registry import find_member, members
from ..families.schedules import official_sigmas
from ..hosts.loading import decide_load
from ..loaders.sizes import stored_precision
from ..machine.settings import Settings, use_settings
from ..machine.store import known_cards
from ..options import request_settings
from ..planning import advise, cards, estimate, plan, request, vae
from ..spec.formats import GIB, CardFacts
from ..step_cache import CHOICES, PRESETS, CacheSettings, plan_steps

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import stand_ins

STORED = Path(__file__).with_suffix(".txt")  # a line for each group, with the hashes of its cases
_folder = tempfile.TemporaryDirectory(prefix="qwen-l40s-grid-")

# What is drawn, the usual more often.
BOTH, ANY, PRICES = (True, False), ("auto", "auto", "auto"), (None, None, 0.0, 0.8)
SIDES = (0, 272, 512, 768, 1024, 1024, 1024, 1328, 1328, 1328, 1536, 1664, 2048)
PRECISIONS = (*ANY, "bf16", "int8", "int8", "fp8")
RUN = {
    **{"family": members(), "width": SIDES, "height": SIDES, "batch": (1, 1, 1, 1, 1, 2, 4)},
    **{"steps": (0, 0, 1, 4, 8, 12, 20, 30, 50), "text_tokens": (200, 200, 1, 37, 900, 4000)},
    **{"references": (0, 0, 1, 2, 3, 10), "layers": (0, 1, 3, 8), "tiles": (0, 0, 0, 0, 1, 7)},
    **{"loras": (0, 0, 0, 1, 4), "lora_rank": (8, 32, 128), "controlnet_gib": (0,) * 6 + (3.3,)},
    **{"lora_mode": ("auto", "merge", "bypass"), "cfg": ("auto", "off", "one pass", "two passes")},
    **{"precision": PRECISIONS, "text_encoder_precision": PRECISIONS},
    **{"modulation": (*ANY, "on card", "off card"), "cache": ("off",) * 8 + CHOICES},
    "text_encoder_placement": (*ANY, "on card", "cpu", "drop after encoding"),
    "attention": ("exact",) * 5 + ("fast", "int8", "int8_fp8"),
}
STORES = {"stored": ("bf16", "fp16", "fp32", "int8", "fp8"), "as_stored": BOTH}
LOAD = {"precision": (*PRECISIONS, "as stored"), "modulation": RUN["modulation"]}
TILES = {
    **{"batch": (1, 1, 2, 5), "itemsize": (2, 2, 4), "image_on_card": BOTH},
    "budget": (None, GIB // 64, GIB // 16, GIB // 8, GIB // 4, GIB // 2, GIB, 2 * GIB, 5 * GIB),
    "tiles": (None, 0, 0, 2, 9),
}
OFFER = {"low": (2.0, 7.5, 40.0), "wide": (1, 1.2, 1.9), "usd": (0.4, 0.7, 1.3), "fits": BOTH}
CACHE = {"budget": (0.0, 0.3, 0.6, 1.0), "head": (0.0, 0.16, 0.4), "longest": (1, 2, 5)}


@dataclass(frozen=True)
class Draw:
    """What a case is of; no field depends on which others are drawn."""

    name: str

    def __call__(self, field: str, choices: Iterable[Any]) -> Any:
        listed = list(choices)
        digest = hashlib.sha256(f"{self.name}/{field}".encode()).digest()
        return listed[int.from_bytes(digest[:8], "big") % len(listed)]

    def all(self, choices: Mapping[str, Iterable[Any]]) -> dict[str, Any]:
        return {field: self(field, listed) for field, listed in choices.items()}

    def request(self, **fixed: Any) -> request.RunRequest:
        asked = {**self.all(RUN), **fixed}
        family = find_member(asked["family"])
        for side in ("width", "height"):
            asked[side] -= asked[side] % family.size_step
        asked["references"] = min(asked["references"], family.most_references)
        asked["layers"] *= family.layers
        beside = stand_ins.BESIDE[: self("beside", (0,) * 9 + (1, 2))]
        return replace(request.RunRequest(**request_settings(**asked)), others=beside)

    def card(self, odd: bool | None = None) -> cards.Card:
        """One of the list; an odd one has other memory and generation, and may be in no list."""
        listed = known_cards()
        card = listed[self("card", sorted(listed))]
        if not (self("odd", BOTH) if odd is None else odd):
            return card
        size = self("GiB", range(4, 100)) * GIB + self("more", (0, 1, 123_456_789))
        capability = self("capability", ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)))
        if self("unlisted", BOTH):
            return cards.card_by_driver(CardFacts("NVIDIA Odd 1", size, capability), listed)
        return replace(card, memory_bytes=size, capability=capability)

    def facts(self) -> CardFacts | None:
        return self("processor", (self.card().facts(),) * 7 + (None,))

    def estimate(self, odd: bool | None = None) -> estimate.Estimate:
        how = {"calibration": (None, None, None, stand_ins.MEASURED), "usd_per_hour": PRICES}
        return estimate.estimate(self.request(), self.card(odd), **self.all(how))

    def file(self) -> tuple[Any, Any]:
        return stand_ins.opened(self("file", stand_ins.FILES), Path(_folder.name))


# What counts of an answer.
SETTING = (
    "recommended setting.precision setting.weight_only setting.packed setting.text_encoder "
    "setting.attention setting.modulation setting.text_encoder_place setting.resident"
)
OPTION = "tiles needs peak_phase peak_bytes headroom_bytes weights_bytes moved_bytes least_bytes"
PHASE = "weights activations workspace context resident"
ESTIMATE = (
    "fits tight disk.container_bytes disk.most_bytes basis.kind basis.left_out bound "
    "step_seconds image_seconds first_image_seconds usd_per_image"
)
TIMES = "phases cold_start loads prequantized_loads loras"
TOGETHER = "links prompts gain alone together per_hour first_bytes other_bytes"


def pick(it: Any, names: str) -> Any:
    return it and {name: attrgetter(name)(it) for name in names.split()}


def of_option(it: plan.PlanOption | None) -> Any:
    phases = it and {name: pick(phase, PHASE) for name, phase in it.phases.items()}
    return it and [pick(it, SETTING), pick(it, OPTION), phases]


def of_plan(options: tuple[plan.PlanOption, ...]) -> Any:
    return [of_option(options[0]), *(pick(it, SETTING) for it in options[1:])]


def of_estimate(it: estimate.Estimate) -> Any:
    """Of disk and host memory the sizes alone: phrases name what they are of."""
    held = sorted(it.host_memory.values()), sorted(it.disk.files.values())
    guides = [[each.advised_bytes, each.needed_bytes] for each in it.guides]
    beside = [each.image_seconds for each in it.beside]
    written = pick(it.written_once, "files_bytes most_bytes")
    more = [pick(it.times, TIMES), held, guides, beside, written, pick(it.safer, SETTING)]
    return [pick(it, ESTIMATE), *more, of_plan(it.options)]


def plan_case(draw: Draw, odd: bool | None = None, known: bool = False) -> Any:
    asked, how = draw.request(), draw.all(STORES if known else {})
    if known:
        asked = replace(asked, parts=draw("parts", stand_ins.PARTS))
    return of_plan(plan.plan(draw.card(odd).facts(), asked, **how))


def tiles_case(draw: Draw) -> Any:
    shape, way = find_member(draw("family", members())).vae, draw("way", ("decode", "encode"))
    fused, planner = draw("fused", BOTH) and way == "decode", getattr(vae, f"plan_{way}")
    latent = [draw(side, (8, 33, 64, 96, 128, 171, 280)) for side in ("height", "width")]
    it = vae.checked(planner(replace(shape, fused=fused), *latent, **draw.all(TILES)))
    return pick(it, "tiles middle_rows batch peak_bytes tile")


def load_case(draw: Draw) -> Any:
    """What hosts decide of a file."""
    found = draw.file()[1]
    stored, kept = stored_precision(found.transformer), draw("packed", (None, found.packed))
    known = {stored: found.loaded} if stored in ("int8", "fp8") else {}
    how = {"stored": stored, "shape": found.shape, "card": draw.facts(), "packed": kept}
    it = decide_load(*draw.all(LOAD).values(), sizes=known, **how)
    facts = pick(found, "family steps loaded packed"), pick(it, "precision off_card")
    return [*facts, of_option(it.option)]


def host_case(draw: Draw) -> Any:
    """What the loader in ComfyUI plans, with and without dynamic VRAM."""
    how = {"memory": (10, 24, 40, 64, 200), "dynamic": BOTH, "state": ("normal", "normal", "high")}
    keep = draw("keep", ((), (), ("transformer_blocks.0.*",)))
    asked = draw.file()[0], keep, *draw.all(LOAD).values()
    it, needed = stand_ins.planned_in_comfyui(*asked, card=draw.facts(), **draw.all(how))
    return [pick(it, "precision off_card named modulation_bytes"), bool(it.packed), needed]


def file_case(draw: Draw) -> Any:
    found = draw.file()[1]
    asked = (draw(part, PRECISIONS) for part in ("precision", "encoder"))
    precision, encoder, parts = found.settled(*asked)
    how = {"precision": precision, "text_encoder_precision": encoder}
    run = replace(draw.request(family=found.family_for(None), **how), parts=parts)
    return of_estimate(estimate.estimate(run, draw.card(False)))


def cache_case(draw: Draw, method: str = "schedule") -> Any:
    """Which steps a step cache skips."""
    settings = draw("preset", (CacheSettings(**draw.all(CACHE)), *PRESETS.values()))
    steps = draw("steps", (1, 8, 11, 14, 20, 30, 40, 50, 80))
    sigmas = official_sigmas(steps, draw("tokens", (256, 4096, 9999)))
    it = plan_steps(sigmas, replace(settings, method=method), draw("kept", ((), (5, 9))))
    return pick(it, "skipped")


def together_case(draw: Draw) -> Any:
    """One image on several cards."""
    cards, link = draw("cards", (2, 3, 4, 8)), draw("link", (None, None, 5e9, 45e9))
    it = advise.together(draw.estimate(), cards, link)
    return it and [pick(it, TOGETHER), pick(it.likely, "seconds gain best")]


def advise_case(draw: Draw) -> Any:
    """Three cards at a load, and from which load on one of two is cheaper."""
    offers = []
    for card in list(known_cards().values())[:3]:
        low, wide, usd, fits = Draw(f"{draw.name}/{card.name}").all(OFFER).values()
        seconds = advise.Range(low, low * wide)
        offers.append(
            advise.Offer(SimpleNamespace(card=card, image_seconds=seconds, fits=fits), usd)
        )
    it = advise.Advice(draw("load", (0.5, 10, 300, 4321, 1e6)), offers)
    found = [[rank.name, *map(rank.usd_for, it.loads)] for rank in it.ranked]
    return [*found, pick(advise.compare(*offers[:2]), "break_even certain")]


# {group: (how many cases, what answers one)}
GROUPS = {
    "plan": (650, lambda draw: plan_case(draw, odd=False)),
    "plan-odd": (400, lambda draw: plan_case(draw, odd=True)),
    "plan-known": (250, lambda draw: plan_case(draw, known=True)),
    "tiles": (400, tiles_case),
    "load": (200, load_case),
    "host": (100, host_case),
    "estimate": (350, lambda draw: of_estimate(draw.estimate(odd=False))),
    "estimate-odd": (200, lambda draw: of_estimate(draw.estimate(odd=True))),
    "file": (100, file_case),
    "cache": (150, cache_case),
    "adaptive": (50, lambda draw: cache_case(draw, "adaptive")),
    "together": (200, together_case),
    "advise": (250, advise_case),
}
NAMES = [f"{group}-{number}" for group, (count, _) in GROUPS.items() for number in range(count)]


def answer(name: str) -> Any:
    """What counts of a case, as JSON with numbers as text, or how it is refused."""
    try:
        found = json.dumps(GROUPS[name.rpartition("-")[0]][1](Draw(name)), default=dict)
    except errors.QwenL40SError as error:
        return "does not fit" if isinstance(error, errors.DoesNotFitError) else "refused"
    return json.loads(found, parse_float=lambda it: f"{float(it):.9g}", parse_int=str)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="store today's hashes")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each Nth case alone")
    parser.add_argument("--answer", nargs="+", metavar="CASE", help="print what counts")
    args = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    use_settings(Settings(cache=_folder.name))
    if args.answer:
        print(json.dumps({name: answer(name) for name in args.answer}, indent=1))
        return 0
    found = {}
    for name in NAMES[:: args.every]:
        text = json.dumps(answer(name), sort_keys=True)
        found[name] = hashlib.sha256(text.encode()).hexdigest()[:8]
    if args.write:
        lines = ([it, *(found[f"{it}-{at}"] for at in range(GROUPS[it][0]))] for it in GROUPS)
        STORED.write_text("".join(f"{' '.join(line)}\n" for line in lines), encoding="utf-8")
        return 0
    lines = map(str.split, STORED.read_text(encoding="utf-8").splitlines())
    known = {f"{group}-{at}": it for group, *hashes in lines for at, it in enumerate(hashes)}
    different = [name for name, it in found.items() if known.get(name) != it]
    different += sorted({*known} - {*NAMES})
    for name in different:
        print(name)
    print(f"{len(found)} cases, {len(different)} differ")
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
