"""The training stages on the CPU, tiny: shortcuts equal the stock computation, and they learn."""

import math
import random
from dataclasses import fields, replace

import pytest
import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline, QwenImageTransformer2DModel
from diffusers.models.transformers import transformer_qwenimage

from qwen_l40s.micro.scene import SEEN_PAIRS, random_scene
from qwen_l40s.tools.micro import train_transformer, train_vae
from qwen_l40s.tools.micro.model import TRANSFORMER, VAE, MicroModel, build, load
from qwen_l40s.tools.micro.painter import paint

CPU = torch.device("cpu")
WEIGHTED = ("transformer", "vae", "text_encoder")


# Only who makes another micro model trains one.
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def new_vae():
    """An untrained VAE whose signal survives every layer, in all time taps."""
    torch.manual_seed(0)
    vae = AutoencoderKLQwenImage(**VAE).eval()
    train_vae.initialize(vae)
    return vae


def painted(count, side=64):
    rng = random.Random(40)
    scenes = [random_scene(rng, SEEN_PAIRS) for _ in range(count)]
    return paint(scenes, generator=generator(41), side=side)


def latents(side=8):
    return torch.randn(2, 16, 1, side, side, generator=generator(42))


@pytest.fixture
def untrained(monkeypatch):
    """A new model; diffusers' rotary function, which training replaces, is put back afterwards."""
    stock = transformer_qwenimage.apply_rotary_emb_qwen
    monkeypatch.setattr(transformer_qwenimage, "apply_rotary_emb_qwen", stock)
    return build()


# --- VAE


@torch.no_grad()
def test_2d_convolutions_give_what_the_3d_ones_give():
    vae, pixels, z = new_vae(), painted(2), latents()
    mean, std = train_vae.latent_statistics(vae, CPU)
    stock = vae.encode(pixels[:, :, None] / 127.5 - 1).latent_dist
    stock_image = vae.decode(z * std + mean).sample[:, :, 0]
    with train_vae.image_convolutions():
        mu, log_variance = train_vae.encode(vae, pixels)
        image = train_vae.decode(vae, z)
    torch.testing.assert_close(mu, (stock.mean - mean) / std, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(log_variance, stock.logvar - 2 * std.log(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(image.clamp(-1, 1), stock_image, atol=1e-5, rtol=1e-5)
    assert mu.std() > 0.1 and stock_image.std() > 0.1


def test_2d_convolutions_last_as_long_as_the_block_even_when_it_fails():
    stock = train_vae.QwenImageCausalConv3d.forward
    with pytest.raises(KeyError), train_vae.image_convolutions():
        assert train_vae.QwenImageCausalConv3d.forward is not stock
        raise KeyError
    assert train_vae.QwenImageCausalConv3d.forward is stock


@torch.no_grad()
def test_videos_still_take_the_3d_path():
    convolution = train_vae.QwenImageCausalConv3d(3, 4, 3, padding=1)
    video = torch.randn(1, 3, 3, 8, 8, generator=generator(43))
    expected = convolution(video)
    with train_vae.image_convolutions():
        assert torch.equal(convolution(video), expected)


@torch.no_grad()
def test_time_taps_that_no_image_reaches_can_be_cleared():
    vae, z = new_vae(), latents()
    before, pixels = vae.decode(z).sample, painted(1)[:, :, None] / 127.5 - 1
    encoded = vae.encode(pixels).latent_dist.mean
    train_vae._clear_unused_taps(vae)
    assert torch.equal(vae.decode(z).sample, before)
    assert torch.equal(vae.encode(pixels).latent_dist.mean, encoded)
    assert vae.decoder.conv_in.weight[:, :, :2].abs().max() == 0


@torch.no_grad()
def test_initialization_keeps_a_signals_size():
    vae = new_vae()
    convolutions = [m for m in vae.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Conv3d)]
    assert max(m.bias.abs().max() for m in convolutions) == 0
    mu = vae.encode(painted(4)[:, :, None] / 127.5 - 1).latent_dist.mean
    assert 0.1 < mu.std() < 10


@torch.no_grad()
def test_fitting_the_statistics_moves_latents_and_leaves_images():
    vae, pixels = new_vae(), painted(32)
    mean, std = train_vae.latent_statistics(vae, CPU)
    z = vae.encode(pixels[:, :, None] / 127.5 - 1).latent_dist
    before, old = vae.decode(z.mean).sample, z
    train_vae._fit_statistics(vae, pixels)
    z = vae.encode(pixels[:, :, None] / 127.5 - 1).latent_dist
    torch.testing.assert_close(vae.decode(z.mean).sample, before, atol=1e-4, rtol=1e-4)
    normal = (z.mean - mean) / std
    torch.testing.assert_close(normal.mean((0, 2, 3, 4)), torch.zeros(16), atol=1e-4, rtol=0)
    torch.testing.assert_close(normal.std((0, 2, 3, 4)), torch.ones(16), atol=1e-4, rtol=0)
    # The posterior's width grows by the same factor in each channel as the latents do.
    factor = (z.mean.std((0, 2, 3, 4)) / old.mean.std((0, 2, 3, 4))).view(1, 16, 1, 1, 1)
    torch.testing.assert_close(z.std, old.std * factor, atol=1e-4, rtol=1e-3)
    assert (factor.log().abs() > 0.1).any()


@pytest.fixture
def small_steps(monkeypatch):
    """VAE steps of 32 x 32 crops, the last one of whole images, of 8 scenes."""
    monkeypatch.setattr(train_vae, "CROP", 32)
    monkeypatch.setattr(train_vae, "WHOLE_SHARE", 0.1)
    monkeypatch.setattr(train_vae, "_SCENES", 8)


@torch.no_grad()
def reconstruction_error(vae, pixels):
    image = vae.decode(vae.encode(pixels[:, :, None] / 127.5 - 1).latent_dist.mean).sample
    return (image[:, :, 0] - (pixels / 127.5 - 1)).abs().mean().item()


@pytest.mark.usefixtures("small_steps")
def test_the_vae_learns():
    vae, pixels = new_vae(), painted(8)
    before = reconstruction_error(vae, pixels)
    train_vae.train_vae(vae, steps=10, batch=2, seed=0, device=CPU)
    assert all(weight.isfinite().all() for weight in vae.parameters())
    assert reconstruction_error(vae, pixels) < 0.97 * before
    assert not vae.training


@pytest.mark.usefixtures("small_steps")
def test_the_decoder_learns_alone_and_the_latents_stay():
    vae, pixels = new_vae(), painted(8)
    stock = {name: weight.clone() for name, weight in vae.state_dict().items()}
    train_vae.train_vae(vae, steps=2, batch=2, seed=0, device=CPU, decoder_only=True)
    train_vae._clear_unused_taps(fresh := new_vae())
    with torch.no_grad():
        z, known = (v.encode(pixels[:, :, None] / 127.5 - 1).latent_dist for v in (vae, fresh))
    assert torch.equal(z.parameters, known.parameters)
    assert not torch.equal(vae.decoder.conv_in.bias, stock["decoder.conv_in.bias"])
    assert all(weight.isfinite().all() for weight in vae.parameters())


# --- transformer


def transformer_inputs(batch=2):
    return {
        "hidden_states": torch.randn(batch, 256, 64, generator=generator(44)),
        "encoder_hidden_states": torch.randn(batch, 24, 512, generator=generator(45)),
        "encoder_hidden_states_mask": torch.ones(batch, 24, dtype=torch.bool),
        "timestep": torch.tensor([0.3, 0.9]),
        "img_shapes": [[(1, 16, 16)]] * batch,
        "return_dict": False,
    }


@torch.no_grad()
def test_the_real_rotation_equals_the_complex_one(untrained):
    transformer = untrained.transformer
    (stock,) = transformer(**transformer_inputs())
    x = torch.randn(2, 10, 4, 32, generator=generator(46))
    freqs = transformer.pos_embed([(1, 5, 2)], device=CPU, max_txt_seq_len=4)[0]
    rotated = transformer_qwenimage.apply_rotary_emb_qwen(x, freqs, use_real=False)
    train_transformer._real_rotary_embedding(transformer)
    real = transformer_qwenimage.apply_rotary_emb_qwen(x, torch.view_as_real(freqs))
    torch.testing.assert_close(real, rotated, atol=1e-6, rtol=1e-6)
    assert (real - x).abs().max() > 0.1
    torch.testing.assert_close(transformer(**transformer_inputs())[0], stock, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_text_features_are_what_the_pipeline_computes(untrained):
    prompts = ["a red star", "a small blue ring at the top left on a gray background."]
    parts = {field.name: getattr(untrained, field.name) for field in fields(untrained)}
    embeddings, mask = QwenImagePipeline(**parts).encode_prompt(prompts, device=CPU)
    batch = train_transformer.PaddedPrompts(untrained, prompts, CPU)
    found, found_mask = train_transformer.text_features(untrained, batch.ids[:2], batch.mask[:2])
    for row, known in enumerate(mask.bool()):
        assert found_mask[row].sum() == known.sum()
        torch.testing.assert_close(
            found[row][found_mask[row]], embeddings[row][known], atol=1e-5, rtol=1e-5
        )


def test_a_tenth_of_the_prompts_is_unconditional(untrained):
    wordings = train_transformer.WORDINGS
    texts = [f"a {colour} star" for colour in ("red", "blue") for _ in range(wordings)]
    prompts = train_transformer.PaddedPrompts(untrained, texts, CPU)
    ids, mask = prompts.draw(torch.tensor([0, 1] * 5000), generator(47))
    unconditional = torch.stack([(ids == known).all(1) for known in prompts.ids[-2:]])
    assert unconditional.any(0).float().mean() == pytest.approx(0.1, abs=0.02)
    assert unconditional.float().mean(1).min() > 0.03
    (red,) = {tuple(row) for row in ids[::2][~unconditional.any(0)[::2]].tolist()}
    assert " red star" in untrained.tokenizer.decode(red)
    assert mask.sum(1).max() <= ids.shape[1]


@torch.no_grad()
def test_a_fresh_transformer_starts_at_zero(untrained):
    train_transformer.prepare_for_training(untrained, fresh=True, compile_blocks=False)
    assert untrained.transformer(**transformer_inputs())[0].abs().max() == 0


@torch.no_grad()
def test_the_loss_is_zero_for_the_velocity_that_the_scheduler_integrates(untrained):
    clean, seen = torch.randn(64, 256, 64, generator=generator(52)), {}

    def perfect(hidden_states, timestep, **_):
        velocity = (hidden_states - clean) / timestep[:, None, None]
        seen.update(x=hidden_states, velocity=velocity, sigma=timestep)
        return (velocity,)

    model = replace(untrained, transformer=perfect)
    prompts = train_transformer.PaddedPrompts(
        model, ["a red star"] * train_transformer.WORDINGS, CPU
    )
    prompt = prompts.draw(torch.zeros(64, dtype=torch.int64), generator(53))
    shift = math.exp(model.scheduler.config.base_shift)
    assert train_transformer._loss(model, clean, prompt, shift, generator(54)) < 1e-4
    # One step of the scheduler along it, from a sigma of its own to 0, ends at the clean image.
    scheduler = model.scheduler
    scheduler.set_timesteps(sigmas=[0.5], mu=0.0)
    scheduler.sigmas = torch.tensor([seen["sigma"][5], 0.0])
    end = scheduler.step(seen["velocity"][5], scheduler.timesteps[0], seen["x"][5]).prev_sample
    torch.testing.assert_close(end, clean[5], atol=1e-4, rtol=1e-4)
    # The sigmas are the scheduler's at 256 x 256: spread over 0 to 1, shifted by exp(0.5).
    assert seen["sigma"].min() > 0 and seen["sigma"].max() < 1
    assert seen["sigma"].median() == pytest.approx(shift / (1 + shift), abs=0.02)


def test_the_transformer_learns(untrained):
    saved = []
    train_vae.initialize(untrained.vae)
    train_transformer.prepare_for_training(untrained, fresh=True, compile_blocks=False)
    codes, texts = train_transformer.make_scenes(4, seed=0)
    clean = train_transformer.encode_dataset(untrained, codes, generator(49)).float()
    assert clean.shape == (4, 256, 64)
    prompts = train_transformer.PaddedPrompts(untrained, texts, CPU)
    prompt = prompts.draw(torch.arange(4), generator(50))

    @torch.no_grad()
    def loss():
        return train_transformer._loss(untrained, clean, prompt, 1.65, generator(51)).item()

    before = loss()
    train_transformer.train_transformer(
        untrained,
        steps=5,
        batch=4,
        scenes=4,
        seed=0,
        device=CPU,
        learning_rate=0.5,  # of which warm-up leaves a 300th at the first step
        save=lambda model: saved.append(model.transformer.proj_out.weight.clone()),
        save_every=3,
    )
    assert loss() < 0.98 * before
    # Saved at step 3 and at the end: averages, neither zero as at the start nor equal.
    assert len(saved) == 2 and saved[0].abs().max() > 0
    assert not torch.equal(*saved)
    for part in (untrained.transformer, untrained.text_encoder):
        assert all(weight.isfinite().all() for weight in part.parameters())


# --- the folder


@pytest.mark.filterwarnings("ignore:`torch_dtype` is deprecated:FutureWarning")
def test_a_saved_model_loads_with_the_same_weights(untrained, tmp_path):
    untrained.save(tmp_path / "model")
    again = load(tmp_path / "model")
    pipeline = QwenImagePipeline.from_pretrained(tmp_path / "model", local_files_only=True)
    for part in WEIGHTED:
        known = getattr(untrained, part).state_dict()
        for found in (getattr(again, part), getattr(pipeline, part)):
            state = found.state_dict()
            assert set(state) == set(known)
            for name, weight in state.items():
                assert torch.equal(weight.float(), known[name].bfloat16().float()), (part, name)
    # Saving has not turned what is being trained into bf16.
    assert untrained.transformer.dtype == again.transformer.dtype == torch.float32
    assert isinstance(again, MicroModel)
    assert again.tokenizer.get_vocab() == untrained.tokenizer.get_vocab()
    assert dict(again.scheduler.config) == dict(pipeline.scheduler.config)


def test_building_is_reproducible(untrained):
    again, other = build(0), build(1)
    for part in WEIGHTED:
        known = getattr(untrained, part).state_dict()
        assert all(torch.equal(w, known[n]) for n, w in getattr(again, part).state_dict().items())
    weight = "transformer_blocks.0.attn.to_q.weight"
    assert not torch.equal(
        other.transformer.state_dict()[weight], untrained.transformer.state_dict()[weight]
    )
    assert isinstance(again.transformer, QwenImageTransformer2DModel)
    assert again.transformer.config.num_layers == TRANSFORMER["num_layers"] >= 6
