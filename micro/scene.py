"""Describes what the micro model generates: one or two flat objects, in 3 x 3 places.

Lengths are fractions of the image side, colours are sRGB bytes. Standard library only.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

SHAPES = ("circle", "square", "triangle", "star", "cross", "diamond", "ring", "heart")

COLOURS = {
    "red": (214, 30, 38),
    "orange": (245, 135, 20),
    "yellow": (250, 222, 40),
    "green": (34, 146, 62),
    "cyan": (64, 206, 222),
    "blue": (30, 68, 206),
    "purple": (124, 44, 170),
    "pink": (250, 138, 192),
    "white": (248, 248, 248),
    "black": (16, 16, 18),
}

BACKGROUNDS = {
    "white": COLOURS["white"],
    "black": COLOURS["black"],
    "gray": (132, 132, 132),
    "blue": COLOURS["blue"],
    "green": COLOURS["green"],
    "yellow": COLOURS["yellow"],
    "pink": COLOURS["pink"],
    "purple": COLOURS["purple"],
}

# Centre (x, y) of each place. 0.23 keeps a large object inside the image but for 2 pixels of a tip.
POSITIONS = {
    "top left": (0.23, 0.23),
    "top": (0.5, 0.23),
    "top right": (0.77, 0.23),
    "left": (0.23, 0.5),
    "center": (0.5, 0.5),
    "right": (0.77, 0.5),
    "bottom left": (0.23, 0.77),
    "bottom": (0.5, 0.77),
    "bottom right": (0.77, 0.77),
}

# Half the side of the square that the object fills.
SIZES = {"small": 0.12, "medium": 0.15, "large": 0.19}

HELD_OUT_MODULUS = 5


@dataclass(frozen=True)
class SceneObject:
    """Describes one object; each field is a key of the table of that name."""

    shape: str
    colour: str
    position: str = "center"
    size: str = "medium"


@dataclass(frozen=True)
class Scene:
    """Holds one or two objects on a background; their order carries no meaning."""

    objects: tuple[SceneObject, ...]
    background: str = "white"

    def problem(self) -> str | None:
        """Says why no painter could show this scene clearly; None where one could."""
        if not 1 <= len(self.objects) <= 2:
            return f"a scene has one or two objects, not {len(self.objects)}"
        for thing in self.objects:
            if thing.colour == self.background:
                what = f"{thing.colour} {thing.shape}"
                return f"a {what} cannot be seen on a {self.background} background"
        if len(self.objects) == 2 and not far_apart(*(thing.position for thing in self.objects)):
            return "two objects need places that are two grid steps apart, such as left and right"
        return None


def held_out(thing: SceneObject) -> bool:
    """Returns whether training never shows this pair: (i + j) mod 5 = 0 in table order."""
    i, j = SHAPES.index(thing.shape), list(COLOURS).index(thing.colour)
    return (i + j) % HELD_OUT_MODULUS == 0


def far_apart(a: str, b: str) -> bool:
    """Returns whether places are two grid steps apart, so that objects do not touch."""
    return any(abs(p - q) > 0.5 for p, q in zip(POSITIONS[a], POSITIONS[b], strict=True))


PAIRS = [(shape, colour) for shape in SHAPES for colour in COLOURS]
SEEN_PAIRS = [pair for pair in PAIRS if not held_out(SceneObject(*pair))]
HELD_OUT_PAIRS = [pair for pair in PAIRS if held_out(SceneObject(*pair))]
TWO_OBJECT_SHARE = 0.4


def random_scene(
    rng: random.Random, pairs: Sequence[tuple[str, str]], objects: int | None = None
) -> Scene:
    """Draws a scene of so many objects from `pairs`; without it, 40 % of the scenes have two."""
    count = objects or (2 if rng.random() < TWO_OBJECT_SHARE else 1)
    while True:
        places = rng.sample(list(POSITIONS), count)
        things = tuple(
            SceneObject(*rng.choice(pairs), position=place, size=rng.choice(list(SIZES)))
            for place in places
        )
        scene = Scene(things, rng.choice(list(BACKGROUNDS)))
        # The same object twice would make "which one" meaningless.
        if scene.problem() is None and len({(t.shape, t.colour) for t in things}) == count:
            return scene


# English prompts for scenes, and back.
#
# `describe` words a scene in one of many ways, `parse_prompt` reads any of them (and some freer
# ones) back. Left out in a prompt, a size means medium, a place means the center, a background
# means white.

SIZE_WORDS = {
    "small": ("small", "tiny", "little"),
    "medium": ("medium", "medium-sized"),
    "large": ("large", "big", "huge"),
}
COLOUR_WORDS = {"gray": ("gray", "grey")}
BACKGROUND_NOUNS = ("background", "backdrop")
LEADS = ("",) * 3 + (
    *("an image of ", "a picture of ", "a drawing of "),
    *("draw ", "paint ", "show ", "there is "),
)

_SYNONYMS = {word: size for size, words in SIZE_WORDS.items() for word in words}
_SYNONYMS |= {
    "grey": "gray",
    "upper": "top",
    "lower": "bottom",
    "middle": "center",
    "centre": "center",
}
_SYNONYMS |= {"violet": "purple", "disc": "circle", "disk": "circle", "backdrop": "background"}
_FILLERS = {
    *("a", "an", "the", "of", "with", "and", "at", "in", "on", "to", "is", "are", "there"),
    *("image", "picture", "drawing", "illustration", "photo", "draw", "paint", "show"),
    *("corner", "side", "edge", "it", "its", "placed", "located", "sitting"),
    *("please", "plain", "solid", "colored", "coloured"),
}
_PLACE_WORDS = {"top", "bottom", "left", "right", "center"}


def place_phrases(position: str) -> tuple[str, ...]:
    if position == "center":
        return ("in the center", "at the center", "in the middle", "in the centre")
    if " " in position:
        other = position.replace("top", "upper").replace("bottom", "lower")
        return (
            f"at the {position}",
            f"in the {position}",
            f"in the {position} corner",
            f"at the {other}",
            f"in the {other} corner",
        )
    if position in ("left", "right"):
        return (f"at the {position}", f"on the {position}", f"on the {position} side")
    return (
        f"at the {position}",
        f"on the {position}" if position == "bottom" else f"near the {position}",
    )


def describe(scene: Scene, rng: random.Random) -> str:
    order = list(scene.objects)
    rng.shuffle(order)
    things = " and ".join(_describe_object(thing, rng) for thing in order)
    noun = rng.choice(BACKGROUND_NOUNS) if rng.random() < 0.2 else BACKGROUND_NOUNS[0]
    background = f"{rng.choice(COLOUR_WORDS.get(scene.background, (scene.background,)))} {noun}"
    style = rng.random()
    if scene.background == "white" and style < 0.1:
        text = rng.choice(LEADS) + things
    elif style < 0.65:
        text = f"{rng.choice(LEADS)}{things} on a {background}"
    elif style < 0.85:
        text = f"a {background} with {things}"
    else:
        text = f"{things}, {background}"
    if rng.random() < 0.25:
        text = text[0].upper() + text[1:]
    return text + ("." if rng.random() < 0.15 else "")


def _describe_object(thing: SceneObject, rng: random.Random) -> str:
    words = [thing.colour, thing.shape]
    if not (thing.size == "medium" and rng.random() < 0.7):
        words.insert(0, rng.choice(SIZE_WORDS[thing.size]))
    article = "an" if words[0][0] in "aeiou" else "a"
    text = f"{article} {' '.join(words)}"
    if thing.position == "center" and rng.random() < 0.3:
        return text
    return f"{text} {rng.choice(place_phrases(thing.position))}"


def parse_prompt(prompt: str) -> Scene | None:
    """Reads a prompt; returns None when a word is not of the grammar or the scene has a problem."""
    if not re.fullmatch(r"[a-z\s.,-]+", prompt.lower()):
        return None
    words = [
        _SYNONYMS.get(word, word) for word in re.findall(r"[a-z]+(?:-[a-z]+)?", prompt.lower())
    ]
    background, words = _take_background(words)
    objects: list[dict[str, str]] = []
    pending: dict[str, str] = {}
    places: list[set[str]] = []
    for word in words:
        if word in SIZES or word in COLOURS:
            kind = "size" if word in SIZES else "colour"
            if kind in pending:  # a red blue star
                return None
            pending[kind] = word
        elif word in SHAPES:
            if "colour" not in pending:
                return None
            objects.append({"shape": word, **pending})
            places.append(set())
            pending = {}
        elif word in _PLACE_WORDS:
            if not objects or pending:
                return None
            places[-1].add(word)
        elif word not in _FILLERS and word != "near":
            return None
    positions = [_position(words) for words in places]
    known = [place for place in positions if place is not None]
    if pending or background is None or not objects or len(known) < len(positions):
        return None
    placed = zip(objects, known, strict=True)
    scene = Scene(
        tuple(SceneObject(**thing, position=place) for thing, place in placed), background
    )
    return scene if scene.problem() is None else None


def _take_background(words: list[str]) -> tuple[str | None, list[str]]:
    """Separates the background's colour, None when it is not one of ours, from the other words."""
    if "background" not in words:
        return "white", words
    at = words.index("background")
    if at == 0 or words[at - 1] not in BACKGROUNDS or "background" in words[at + 1 :]:
        return None, words
    return words[at - 1], words[: at - 1] + words[at + 1 :]


def _position(words: set[str]) -> str | None:
    """Finds the place that a set of place words names; "top center" is the top."""
    if len(words) > 1:
        words = words - {"center"}
    if not words:
        return "center"
    return next((name for name in POSITIONS if set(name.split()) == words), None)


def sample_prompts(
    count: int, seed: int, pairs: Sequence[tuple[str, str]] = tuple(HELD_OUT_PAIRS)
) -> list[tuple[str, Scene]]:
    """Draws prompts and their scenes, by default of the pairs that training never showed."""
    rng = random.Random(seed)
    scenes = [random_scene(rng, pairs) for _ in range(count)]
    return [(describe(scene, rng), scene) for scene in scenes]


def gallery_prompts(count: int, seed: int = 0) -> list[str]:
    return [prompt for prompt, _ in sample_prompts(count, seed)]
