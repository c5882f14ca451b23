"""What the micro model paints: one or two flat objects on a flat background, in 3 x 3 places.

Lengths are fractions of the image side, colours are sRGB bytes. Standard library only.
"""

from __future__ import annotations

import random
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
    """One object; each field is a key of the table of that name."""

    shape: str
    colour: str
    position: str = "center"
    size: str = "medium"


@dataclass(frozen=True)
class Scene:
    """One or two objects on a background; the order of the objects carries no meaning."""

    objects: tuple[SceneObject, ...]
    background: str = "white"

    def problem(self) -> str | None:
        """Why no painter could show this scene clearly, or None."""
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
    """Whether training never shows this shape in this colour: (i + j) mod 5 = 0 in table order."""
    i, j = SHAPES.index(thing.shape), list(COLOURS).index(thing.colour)
    return (i + j) % HELD_OUT_MODULUS == 0


def far_apart(a: str, b: str) -> bool:
    """Whether two places are two grid steps apart in x or y: objects of any size do not touch."""
    return any(abs(p - q) > 0.5 for p, q in zip(POSITIONS[a], POSITIONS[b], strict=True))


PAIRS = [(shape, colour) for shape in SHAPES for colour in COLOURS]
SEEN_PAIRS = [pair for pair in PAIRS if not held_out(SceneObject(*pair))]
HELD_OUT_PAIRS = [pair for pair in PAIRS if held_out(SceneObject(*pair))]
TWO_OBJECT_SHARE = 0.4


def random_scene(
    rng: random.Random, pairs: Sequence[tuple[str, str]], objects: int | None = None
) -> Scene:
    """Draws a scene whose objects come from `pairs`.

    Args:
        objects: how many; without it, 40 % of the scenes have two and the others one.
    """
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
