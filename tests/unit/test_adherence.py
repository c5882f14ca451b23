"""The judge: right on what the painter paints, wrong in exactly the field that was changed."""

import random
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
from micro_painter import paint
from scipy import ndimage

from qwen_l40s.micro.judge import Adherence, adherence
from qwen_l40s.micro.scene import (
    BACKGROUNDS,
    COLOURS,
    PAIRS,
    POSITIONS,
    SHAPES,
    SIZES,
    Scene,
    SceneObject,
    random_scene,
)

SEEDS = (1, 2)
STAR_AND_CIRCLE = Scene(
    (SceneObject("star", "red", "left"), SceneObject("circle", "blue", "right")), "white"
)


# The judge changes with the micro model, which is seldom.
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


def painted(scenes, seed=0, side=256):
    """Images (N, side, side, 3), float32 in 0..255."""
    images = paint(scenes, generator=torch.Generator().manual_seed(seed), side=side)
    return images.permute(0, 2, 3, 1).numpy()


def one(thing=None, background="white", **changes):
    return Scene((replace(thing or SceneObject("star", "red"), **changes),), background)


@pytest.fixture(scope="module")
def scenes():
    rng = random.Random(20)
    return [random_scene(rng, PAIRS) for _ in range(400)]


@pytest.fixture(scope="module")
def images(scenes):
    return painted(scenes, seed=21)


# --- right images


def right(images, scenes):
    """How many images are fully right, and how many of all sizes too."""
    results = [adherence(image, scene) for image, scene in zip(images, scenes, strict=True)]
    full = sum(result.score == 1 for result in results)
    return full, sum(result.score == 1 and result.size for result in results)


def test_painted_images_are_right_in_everything(images, scenes):
    assert min(right(images, scenes)) >= 0.99 * len(scenes)


def test_mild_blur_and_noise_change_nothing(images, scenes):
    noise = np.random.default_rng(22)
    for rows, sigma, level in (
        (slice(0, 100), 1.5, 0.0),
        (slice(100, 200), 0.0, 6.0),
        (slice(200, 400), 1.5, 6.0),
    ):
        worse = ndimage.gaussian_filter(images[rows], (0, sigma, sigma, 0))
        worse += level * noise.standard_normal(worse.shape, dtype=np.float32)
        full, with_size = right(worse.clip(0, 255), scenes[rows])
        assert full >= 0.99 * len(worse), (sigma, level)
        # Blur eats the points of the stars.
        assert with_size >= 0.95 * len(worse), (sigma, level)


@pytest.mark.parametrize(("side", "count"), [(64, 100), (128, 100), (512, 20)])
def test_other_image_sizes(scenes, side, count):
    images = painted(scenes[:count], seed=23, side=side)
    assert min(right(images, scenes[:count])) >= 0.99 * count


# --- single changes


CHANGES = {
    "shape": [
        (one(shape=shown, size=size), one(shape=asked, size=size))
        for size in SIZES
        for shown, asked in permutations(SHAPES, 2)
    ],
    "colour": [
        (one(colour=shown, background=background), one(colour=asked, background=background))
        for background in ("gray", "white", "purple")
        for shown, asked in permutations([c for c in COLOURS if c != background], 2)
    ],
    "background": [
        (one(background=shown), one(background=asked))
        for shown, asked in permutations(BACKGROUNDS, 2)
    ],
    "position": [
        (one(position=shown, size=size), one(position=asked, size=size))
        for size in SIZES
        for shown, asked in permutations(POSITIONS, 2)
    ],
    "size": [
        (one(shape=shape, size=shown), one(shape=shape, size=asked))
        for shape in SHAPES
        for shown, asked in permutations(SIZES, 2)
    ],
}


@pytest.mark.parametrize("changed", CHANGES)
def test_a_change_fails_in_its_field_alone(changed):
    failing = "colours" if changed in ("colour", "background") else changed
    for seed in SEEDS:
        images = painted([shown for shown, _ in CHANGES[changed]], seed)
        for image, (shown, asked) in zip(images, CHANGES[changed], strict=True):
            found = adherence(image, asked)
            wrong = [it for it in ("shape", "colours", "position") if not getattr(found, it)]
            wrong += ["size"] if changed == "size" and not found.size else []
            assert wrong == [failing], (shown, asked, seed)


def test_a_missing_or_an_extra_object_fails_in_everything():
    alone = replace(STAR_AND_CIRCLE, objects=STAR_AND_CIRCLE.objects[:1])
    both, single = painted([STAR_AND_CIRCLE, alone])
    nothing = Adherence(shape=False, colours=False, position=False, size=False)
    assert adherence(both, alone) == adherence(single, STAR_AND_CIRCLE) == nothing


# --- wrong images


def mask_on_white(mask):
    return np.where(mask[..., None], COLOURS["red"], BACKGROUNDS["white"]).astype(np.uint8)


def plane():
    """Centred coordinates of a 256 x 256 image, in units of 50 pixels."""
    axis = (np.arange(256) - 127.5) / 50
    return np.meshgrid(axis, axis)


def none_of_the_shapes():
    x, y = plane()
    r, box = np.hypot(x, y), np.maximum(abs(x), abs(y))
    return {
        "half circle": (r < 1) & (y > 0),
        "crescent": (r < 1) & (np.hypot(x - 0.45, y) > 0.9),
        "half ring": (r < 1) & (r > 0.55) & (y < 0.2),
        "T": ((abs(x) < 0.8) & (abs(y + 0.6) < 0.2)) | ((abs(x) < 0.2) & (abs(y) < 0.8)),
        "hexagon": np.maximum(abs(y), abs(y) / 2 + abs(x) * 0.866) < 0.85,
        "X": ((abs(x - y) < 0.35) | (abs(x + y) < 0.35)) & (box < 0.8),
        "frame": (box < 0.9) & (box > 0.5),
    }


@pytest.mark.parametrize("name", none_of_the_shapes())
def test_a_figure_that_is_none_of_the_shapes_is_no_shape(name):
    image = mask_on_white(none_of_the_shapes()[name])
    for shape in SHAPES:
        result = adherence(image, one(shape=shape))
        assert (result.shape, result.colours) == (False, True), shape
