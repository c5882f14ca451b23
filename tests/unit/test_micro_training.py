"""Training on the CPU, tiny: shortcuts equal the stock computation, and it learns."""

import copy
import sys

import pytest
import torch
from diffusers.models.transformers import transformer_qwenimage, transformer_qwenimage21

from qwen_l40s.hosts.diffusers.load import load_pipeline
from qwen_l40s.hosts.diffusers.sample import generate
from qwen_l40s.tools.micro import train
from qwen_l40s.tools.micro.model import (
    FAMILIES,
    TRAINED,
    build,
    half_timesteps,
    rotate,
)
from qwen_l40s.tools.micro.painter import paint

CPU = torch.device("cpu")
# Only who makes another micro model trains one.
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(params=FAMILIES.values(), ids=list(FAMILIES))
def family(request):
    return request.param


@pytest.fixture
def untrained(monkeypatch, family):
    """A new model; diffusers' rotary function, which training replaces, is put back afterwards."""
    for module in (transformer_qwenimage, transformer_qwenimage21):
        monkeypatch.setattr(module, "apply_rotary_emb_qwen", module.apply_rotary_emb_qwen)
    return build(0, family)


@torch.no_grad()
def test_latents_are_those_of_the_stock_vae(untrained):
    model = build(0, untrained.family).vae
    codes, _ = train.make_scenes(2, seed=40)
    found = train.encode_dataset(untrained, codes, generator(41)).float()
    images = paint(codes, generator=generator(41)) / 127.5 - 1
    if model.encoder.conv_in.in_channels == 4:
        images = torch.cat([images, torch.ones_like(images[:, :1])], 1)
    mean, std = (
        torch.tensor(model.config[f"latents_{name}"]).view(1, -1, 1, 1) for name in ("mean", "std")
    )
    known = (model.encode(images[:, :, None]).latent_dist.mean[:, :, 0] - mean) / std
    known = untrained.pipeline._pack_latents(known, *known.shape[:2], *known.shape[2:])
    assert (found - known).norm() < 0.06 * known.norm()  # in bf16
    assert 0.3 < known.std() < 3


# --- transformer


@torch.no_grad()
def test_the_real_rotation_equals_the_complex_one():
    x = torch.randn(2, 10, 4, 32, generator=generator(46))
    freqs = torch.polar(torch.ones(10, 16), torch.randn(10, 16, generator=generator(47)))
    rotated = transformer_qwenimage.apply_rotary_emb_qwen(x, freqs, use_real=False)
    real = rotate(x, torch.view_as_real(freqs))
    torch.testing.assert_close(real, rotated, atol=1e-6, rtol=1e-6)
    assert (real - x).abs().max() > 0.1


@torch.no_grad()
def test_a_batch_has_the_velocities_that_the_pipeline_computes_for_each_prompt(untrained, tmp_path):
    """From the words to the first step's velocity; the prompts differ in length."""
    for weight in untrained.transformer.parameters():  # else text hardly reaches the velocity
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.15, generator=generator(48))
    for name in TRAINED:  # as they are saved
        part = getattr(untrained, name)
        part.load_state_dict({key: it.bfloat16() for key, it in part.state_dict().items()})
    copy.deepcopy(untrained).save(tmp_path)
    outputs = []
    pipeline = load_pipeline(tmp_path, device="cpu", precision="fp32").to_diffusers()
    pipeline.set_progress_bar_config(disable=True)
    prompts = ["a red star", "a small blue ring at the top left on a gray background."]
    noisy, size = torch.randn(2, 256, 64, generator=generator(44)), {"height": 256, "width": 256}
    pipeline.transformer.register_forward_hook(lambda _, args, output: outputs.append(output[0]))
    for prompt, latents in zip(prompts, noisy.split(1), strict=True):
        pipeline(
            prompt, latents=latents, num_inference_steps=2, true_cfg_scale=1.0, **size,
            output_type="latent",
        )  # fmt: skip
    stock = torch.cat([output[:, -256:] for output in outputs[::2]])
    ids, mask = train.padded_prompts(untrained, prompts, CPU)
    features = train.text_features(untrained, ids[:2], mask[:2])
    stream = untrained.family.stream
    stream.real_rotation(untrained.transformer)
    found = stream.velocity(untrained.transformer, noisy, torch.ones(2), *features)
    torch.testing.assert_close(found, stock, atol=3e-5, rtol=1e-5)
    swapped = features[0].flip(0), features[1]
    other = stream.velocity(untrained.transformer, noisy, torch.ones(2), *swapped)
    assert (found - other).abs().mean() > 1e-3


def test_half_of_the_steps_embed_timesteps_as_a_bf16_run_does(untrained):
    time, sigma = untrained.transformer.time_text_embed.time_proj, torch.tensor([0.7123])
    before = time(sigma)
    with half_timesteps(untrained.transformer):
        found = time(sigma)
    half = build(0, untrained.family).transformer.bfloat16().time_text_embed.time_proj
    assert torch.equal(found, half(sigma.bfloat16()).float())
    assert torch.equal(time(sigma), before) and not torch.equal(found, before)


def test_a_tenth_of_the_prompts_is_unconditional():
    """The last two of 8: two scenes with three wordings each."""
    rows = train.draw_prompts(8, torch.tensor([0, 1] * 5000), generator(47))
    share = torch.bincount(rows, minlength=8) / len(rows)
    assert share[6:].sum() == pytest.approx(0.1, abs=0.02) and share[6:].min() > 0.03
    assert set(rows[::2].tolist()) == {0, 1, 2, 6, 7}


@torch.no_grad()
def test_the_loss_is_zero_for_the_velocity_that_the_scheduler_integrates(untrained, monkeypatch):
    clean, seen = torch.randn(64, 256, 64, generator=generator(52)), {}

    def perfect(_, noisy, sigma, *text):
        seen.update(x=noisy, sigma=sigma, velocity=(noisy - clean) / sigma[:, None, None])
        return seen["velocity"]

    monkeypatch.setattr(untrained.family.stream, "velocity", perfect)
    ids, mask = train.padded_prompts(untrained, ["a red star"], CPU)
    prompt = ids[:1].expand(64, -1), mask[:1].expand(64, -1)
    assert train.flow_loss(untrained, clean, prompt, generator(54)) < 1e-4
    # One step of the scheduler along it, from a sigma of its own to 0, ends at the clean image.
    scheduler = untrained.scheduler
    scheduler.set_timesteps(sigmas=[0.5], mu=0.0)
    scheduler.sigmas = torch.tensor([seen["sigma"][5], 0.0])
    end = scheduler.step(seen["velocity"][5], scheduler.timesteps[0], seen["x"][5]).prev_sample
    torch.testing.assert_close(end, clean[5], atol=1e-4, rtol=1e-4)
    # The sigmas are the scheduler's at 256 x 256: spread over 0 to 1, shifted by exp(0.5).
    shift = 1.6487
    assert seen["sigma"].min() > 0 and seen["sigma"].max() < 1
    assert seen["sigma"].median() == pytest.approx(shift / (1 + shift), abs=0.02)


# --- steps and folders


def test_muon_takes_the_steps_of_torchs_own():
    """Tall, wide and square, two of a shape, one without a gradient; the rate changes."""
    draw, shapes = generator(60), [(96, 32), (32, 96), (64, 64), (96, 32), (64, 64)]
    stacked = [0.1 * torch.randn(shape, generator=draw) for shape in shapes]
    single, start = ([weight.clone() for weight in stacked] for _ in range(2))
    ours = train.Muon(stacked, 0.02)
    known = torch.optim.Muon(single, 0.02, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    for rate in (0.02, 0.01, 0.005):
        for one, other in list(zip(stacked, single, strict=True))[:-1]:
            one.grad = torch.randn(one.shape, generator=draw)
            other.grad = one.grad.clone()
        for optimizer in (ours, known):
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
    for one, other, first in zip(stacked[:-1], single, start, strict=False):
        assert (one - other).norm() < 0.01 * (other - first).norm()  # bf16, in another order
        assert (other - first).norm() > 0.02 * first.norm()
    assert torch.equal(stacked[-1], start[-1])


def test_a_stage_ends_by_steps_or_by_time():
    assert list(train.progress(0, 4)) == [0, 0.25, 0.5, 0.75]
    done = list(train.progress(0.05))
    assert done == sorted(done) and done[0] >= 0 and 0.9 < done[-1] < 1
    assert len(list(train.progress(0))) == len(list(train.progress(-1))) == 1


def test_training_learns_and_paints(untrained, family, tmp_path, monkeypatch):
    folder, losses = tmp_path / "new", []

    def fit(loss, *rest, real=train.fit):
        real(lambda: losses.append(it := loss()) or it, *rest)

    monkeypatch.setattr(train, "fit", fit)
    command = ["train", "--folder", str(folder), "--family", family.name, "--device", "cpu"]
    command += ["--steps", "10", "--batch", "2", "--scenes", "8", "--no-compile"]
    monkeypatch.setattr(sys, "argv", command)
    train.main()
    first, last = (torch.stack(part).mean() for part in (losses[:3], losses[-3:]))
    assert last < first
    monkeypatch.undo()  # diffusers' own rotation
    pipeline = load_pipeline(folder, device="cpu", precision="fp32")
    assert all(weight.isfinite().all() for weight in pipeline.transformer.parameters())
    made = generate(pipeline, "a red star", width=64, height=64, steps=2, seed=0, progress=False)
    assert made.images[0].size == (64, 64)


def test_a_saved_model_has_the_same_weights_in_bf16_and_the_bundled_files(family, tmp_path):
    build(0, family).save(tmp_path)
    again, other = load_pipeline(tmp_path, device="cpu", precision="fp32"), build(1, family)
    for name in TRAINED:
        known = getattr(build(0, family), name).state_dict()
        for key, weight in getattr(again, name).state_dict().items():
            assert torch.equal(weight, known[key].bfloat16().float()), (name, key)
        assert any(
            not torch.equal(weight, known[n])
            for n, weight in getattr(other, name).state_dict().items()
        )
    files = {file.relative_to(family.folder) for file in family.folder.rglob("*.*")}
    assert {file.relative_to(tmp_path) for file in tmp_path.rglob("*.*")} == {
        file for file in files if file.suffix != ".md"
    }
    index = "model_index.json"
    assert (tmp_path / index).read_bytes() == (family.folder / index).read_bytes()
