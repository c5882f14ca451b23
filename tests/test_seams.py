"""The measure of seams: it sees a tile without a margin, and nothing where tiles are exact."""

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from qwen_l40s.hosts.diffusers.decode import decoder_stages, encoder_stages
from qwen_l40s.loaders.source import bundled_micro_folder
from qwen_l40s.optimizations.seams import seam_excess
from qwen_l40s.optimizations.vae import decode, encode
from qwen_l40s.planning.vae import plan_decode, plan_encode

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS, COLUMNS = 40, 32  # latent pixels
SEAMS = [4 * ROWS], [4 * COLUMNS]


@pytest.fixture(scope="module")
def images():
    """A smooth image, decoded whole, in exact tiles, and in tiles without a margin."""
    folder = bundled_micro_folder() / "vae"
    vae = diffusers.AutoencoderKLQwenImage.from_pretrained(folder).eval()
    stages = decoder_stages(vae)
    y, x = torch.meshgrid(
        torch.arange(8 * ROWS) / 60, torch.arange(8 * COLUMNS) / 60, indexing="ij"
    )
    image = torch.stack([(x + y).sin(), (1.3 * x - y).cos(), (0.7 * y).sin()])[None, :, None]
    plan = plan_encode(stages.shape, ROWS, COLUMNS, budget=None)
    latents = encode(encoder_stages(vae), 0.8 * image, plan)

    def of(part, tiles=None):
        plan = plan_decode(stages.shape, *part.shape[-2:], budget=None, tiles=tiles)
        return decode(stages, part.contiguous(), plan)

    halves = [half.split(COLUMNS // 2, -1) for half in latents.split(ROWS // 2, -2)]
    hard = torch.cat([torch.cat([of(part) for part in half], -1) for half in halves], -2)
    return {"whole": of(latents), "tiled": of(latents, 4), "hard": hard}


def test_exact_tiles_show_no_seam(images):
    whole, tiled = seam_excess(images["whole"], *SEAMS), seam_excess(images["tiled"], *SEAMS)
    assert 0.3 < whole < 2.5
    assert tiled == pytest.approx(whole, rel=1e-3)


def test_a_tile_without_a_margin_shows(images):
    assert seam_excess(images["hard"], *SEAMS) > 6
    assert seam_excess(images["hard"], SEAMS[0], []) > 6
    assert seam_excess(images["hard"], [], SEAMS[1]) > 6
    # Elsewhere it shows none.
    assert seam_excess(images["hard"], [2 * ROWS], [2 * COLUMNS]) < 3


def test_what_it_measures():
    ramp = torch.arange(64.0).expand(3, 48, 64).clone()
    assert seam_excess(ramp, [], [32]) == pytest.approx(1)
    assert seam_excess(ramp, [24], []) == 0  # no change along rows at all
    assert seam_excess(ramp, [], []) == 0
    ramp[..., 32:] += 4
    assert seam_excess(ramp, [], [32]) == pytest.approx(5)
    assert seam_excess(ramp, [], [32, 40]) == pytest.approx(5)
    assert seam_excess(ramp.to(torch.bfloat16), [], [32]) == pytest.approx(5)
    flat = torch.zeros(3, 48, 64)
    flat[..., 24:, :] = 1
    assert seam_excess(flat, [24], []) == float("inf")
    # An edge of the image beside a seam hides nothing.
    ramp[..., 40:] += 100
    assert seam_excess(ramp, [], [32]) == pytest.approx(5)
