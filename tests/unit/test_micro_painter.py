"""The painter: what the tables say is what stands in the image."""

import numpy as np
import pytest
import torch
from micro_painter import IMAGE_SIDE, SHIFT, STRETCH, TINT, encode_scenes, paint

from qwen_l40s.micro.judge import OUTLINES
from qwen_l40s.micro.scene import BACKGROUNDS, COLOURS, POSITIONS, SHAPES, SIZES, Scene, SceneObject

# A point inside each outline and one in a hole or notch of it, in units of the radius; y down.
INSIDE = dict.fromkeys(SHAPES, (0.0, 0.0)) | {"ring": (0.78, 0.0)}
OUTSIDE = {
    "circle": (0.75, 0.75),
    "square": (0.95, 0.0),
    "triangle": (0.5, -0.5),
    "star": (0.0, 0.75),
    "cross": (0.5, 0.5),
    "diamond": (0.6, 0.6),
    "ring": (0.0, 0.0),
    "heart": (0.0, -0.9),
}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def scene(shape="circle", colour="black", position="center", size="medium", background="white"):
    return Scene((SceneObject(shape, colour, position, size),), background)


def grid(side=521, reach=1.3):
    axis = torch.linspace(-reach, reach, side)
    return torch.meshgrid(axis, axis, indexing="xy")


# --- outlines


@pytest.mark.parametrize("shape", SHAPES)
def test_an_outline_is_negative_inside_and_positive_outside(shape):
    outline = OUTLINES[shape]
    inside, outside = torch.tensor(INSIDE[shape]), torch.tensor(OUTSIDE[shape])
    assert outline(*inside) < -0.02
    assert outline(*outside) > 0.02
    x, y = grid()
    values = outline(x, y)
    assert values[[0, -1]].min() > 0 and values[:, [0, -1]].min() > 0
    # No shape fills less than a star or more than a square.
    assert 0.2 < (values < 0).float().mean() * 2.6**2 / 4 < 0.8


@pytest.mark.parametrize("shape", SHAPES)
def test_an_outline_is_nowhere_steeper_than_a_distance(shape):
    outline = OUTLINES[shape]
    points = (torch.rand(2, 200_000, generator=generator(8)) * 2 - 1) * 1.3
    step = torch.randn(points.shape, generator=generator(9))
    step *= 0.02 / step.norm(dim=0)
    slope = (outline(*(points + step)) - outline(*points)).abs() / 0.02
    assert slope.max() <= 1.05
    # Along the axes at the edge it is a distance: one pixel of blending is one pixel wide.
    points.requires_grad_()
    values = outline(*points)
    (gradient,) = torch.autograd.grad(values.sum(), points)
    assert gradient.norm(dim=0)[values.abs() < 0.01].median() == pytest.approx(1, abs=0.01)


# --- images


def test_the_generator_decides_everything():
    scenes = [scene(), scene("star", "red", "top left", "small", "blue")]
    first = paint(scenes, generator=generator(1))
    assert (first.shape, first.dtype) == ((2, 3, IMAGE_SIDE, IMAGE_SIDE), torch.float32)
    assert torch.equal(first, paint(scenes, generator=generator(1)))
    assert torch.equal(first, paint(encode_scenes(scenes), generator=generator(1)))
    assert not torch.equal(first, paint(scenes, generator=generator(2)))


@pytest.mark.parametrize("shape", SHAPES)
def test_edges_are_anti_aliased_over_about_one_pixel(shape):
    (image,) = paint([scene(shape, size="large")], generator=generator())
    dark, light = image[0].min(), image[0].max()
    between = (image[0] > dark + 20) & (image[0] < light - 20)
    inside = (image[0] <= dark + 20).sum()
    assert between.sum() > 40
    # An outline of this shape is a few hundred pixels long; a blurred one would take more.
    assert between.sum() < 0.2 * inside


def test_colours_are_the_palettes_within_the_tint():
    scenes = [
        scene("square", colour, background=background)
        for background in BACKGROUNDS
        for colour in COLOURS
        if colour != background
    ]
    images = paint(scenes, generator=generator(3))
    assert images.min() >= 0 and images.max() <= 255
    middle = IMAGE_SIDE // 2
    for image, asked in zip(images, scenes, strict=True):
        for pixel, rgb in (
            (image[:, middle, middle], COLOURS[asked.objects[0].colour]),
            (image[:, 0, 0], BACKGROUNDS[asked.background]),
        ):
            assert (pixel - torch.tensor(rgb)).abs().max() <= TINT + 1e-3


def box(image):
    """Centre x, centre y and half side of the black blob on white, as fractions of the side."""
    rows, columns = np.nonzero(image[0].numpy() < 128)
    side = image.shape[-1]
    centre = ((columns.min() + columns.max() + 1) / 2, (rows.min() + rows.max() + 1) / 2)
    half = (np.ptp(columns) + np.ptp(rows) + 2) / 4
    return np.array([*centre, half]) / side


def test_places_and_sizes_are_the_tables_within_the_jitter():
    cases = [(position, size) for position in POSITIONS for size in SIZES]
    images = paint([scene("circle", "black", *case) for case in cases], generator=generator(4))
    found = np.array([box(image) for image in images])
    places = np.array([POSITIONS[position] for position, _ in cases])
    sizes = np.array([SIZES[size] for _, size in cases])
    pixel = 1 / IMAGE_SIDE
    assert abs(found[:, :2] - places).max() <= SHIFT + pixel
    assert abs(found[:, 2] / sizes - 1).max() <= STRETCH + pixel / min(SIZES.values())
    # It does shift and stretch.
    assert abs(found[:, :2] - places).max() > SHIFT / 2
    assert abs(found[:, 2] / sizes - 1).max() > STRETCH / 2


def test_a_scene_with_one_object_gets_no_second_one():
    two = Scene((SceneObject("circle", "black", "left"), SceneObject("star", "red", "right")))
    codes = encode_scenes([scene("circle", "black", "left"), two])
    assert codes[0, 5:].tolist() == [-1] * 4 and (codes[1] >= 0).all()
    single, double = paint(codes, generator=generator(6))
    right = slice(IMAGE_SIDE // 2, None)
    assert single[:, :, right].std() < TINT
    assert double[:, :, right].std() > 20
