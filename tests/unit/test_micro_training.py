"""The training stages on the CPU, tiny: shortcuts equal the stock computation, and they learn."""

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from diffusers import QwenImagePipeline
from diffusers.models.transformers import transformer_qwenimage, transformer_qwenimage21

from qwen_l40s.hosts.diffusers.text_encoder import load_processor
from qwen_l40s.micro.scene import SEEN_PAIRS, random_scene
from qwen_l40s.tools.micro import streams, train_transformer, train_vae
from qwen_l40s.tools.micro.families import FAMILIES, QWEN_IMAGE, QWEN_IMAGE_21
from qwen_l40s.tools.micro.model import WEIGHTED, MicroModel, build, load
from qwen_l40s.tools.micro.painter import paint
from qwen_l40s.tools.micro.train import main

CPU = torch.device("cpu")


# Only who makes another micro model trains one.
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(params=FAMILIES.values(), ids=list(FAMILIES))
def family(request):
    return request.param


def new_vae(family=QWEN_IMAGE):
    """An untrained VAE whose signal survives every layer, in all time taps."""
    torch.manual_seed(0)
    vae = family.vae(**family.vae_dims).eval()
    train_vae.initialize(vae)
    return vae


def painted(count, side=64):
    rng = random.Random(40)
    scenes = [random_scene(rng, SEEN_PAIRS) for _ in range(count)]
    return paint(scenes, generator=generator(41), side=side)


def latents(side=8, channels=16):
    return torch.randn(2, channels, 1, side, side, generator=generator(42))


@pytest.fixture
def untrained(monkeypatch, family):
    """A new model; diffusers' rotary function, which training replaces, is put back afterwards."""
    for module in (transformer_qwenimage, transformer_qwenimage21):
        monkeypatch.setattr(module, "apply_rotary_emb_qwen", module.apply_rotary_emb_qwen)
    return build(0, family)


# --- VAE


@torch.no_grad()
def test_2d_convolutions_give_what_the_3d_ones_give(family):
    vae = new_vae(family)
    images, z = train_vae.to_images(vae, painted(2)), latents(channels=vae.config.z_dim)
    mean, std = train_vae.latent_statistics(vae, CPU)
    stock = vae.encode(images[:, :, None]).latent_dist
    stock_image = vae.decode(z * std + mean).sample[:, :, 0]
    with train_vae.image_convolutions():
        mu, log_variance = train_vae.encode(vae, images)
        image = train_vae.decode(vae, z)
    torch.testing.assert_close(mu, (stock.mean - mean) / std, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(log_variance, stock.logvar - 2 * std.log(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(image.clamp(-1, 1), stock_image, atol=1e-5, rtol=1e-5)
    assert mu.std() > 0.1 and stock_image.std() > 0.1
    assert images.shape[1] == stock_image.shape[1] and (images[:, 3:] == 1).all()


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
def test_initialization_keeps_a_signals_size(family):
    vae = new_vae(family)
    convolutions = [m for m in vae.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Conv3d)]
    assert max(m.bias.abs().max() for m in convolutions) == 0
    mu = vae.encode(train_vae.to_images(vae, painted(4))[:, :, None]).latent_dist.mean
    assert 0.1 < mu.std() < 10


@torch.no_grad()
def test_fitting_the_statistics_moves_latents_and_leaves_images(family):
    vae = new_vae(family)
    images = train_vae.to_images(vae, painted(32))
    mean, std = train_vae.latent_statistics(vae, CPU)
    z = vae.encode(images[:, :, None]).latent_dist
    before, old = vae.decode(z.mean).sample, z
    train_vae._fit_statistics(vae, images)
    z = vae.encode(images[:, :, None]).latent_dist
    torch.testing.assert_close(vae.decode(z.mean).sample, before, atol=1e-4, rtol=1e-4)
    normal, channels = (z.mean - mean) / std, vae.config.z_dim
    torch.testing.assert_close(normal.mean((0, 2, 3, 4)), torch.zeros(channels), atol=1e-4, rtol=0)
    torch.testing.assert_close(normal.std((0, 2, 3, 4)), torch.ones(channels), atol=1e-4, rtol=0)
    # The posterior's width grows by the same factor in each channel as the latents do.
    factor = (z.mean.std((0, 2, 3, 4)) / old.mean.std((0, 2, 3, 4))).view(1, -1, 1, 1, 1)
    torch.testing.assert_close(z.std, old.std * factor, atol=1e-4, rtol=1e-3)
    assert (factor.log().abs() > 0.1).any()


@pytest.fixture
def small_steps(monkeypatch):
    """VAE steps of 8 scenes, the last one of whole images."""
    monkeypatch.setattr(train_vae, "WHOLE_SHARE", 0.1)
    monkeypatch.setattr(train_vae, "_SCENES", 8)


@torch.no_grad()
def reconstruction_error(vae, pixels):
    images = train_vae.to_images(vae, pixels)[:, :, None]
    return (vae.decode(vae.encode(images).latent_dist.mean).sample - images).abs().mean().item()


@pytest.mark.usefixtures("small_steps")
def test_the_vae_learns(family):
    vae, pixels = new_vae(family), painted(8)
    before = reconstruction_error(vae, pixels)
    train_vae.train_vae(vae, steps=10, batch=2, seed=0, device=CPU, crop=32)
    assert all(weight.isfinite().all() for weight in vae.parameters())
    assert reconstruction_error(vae, pixels) < 0.97 * before
    assert not vae.training


@pytest.mark.usefixtures("small_steps")
def test_the_decoder_learns_alone_and_the_latents_stay():
    vae, pixels = new_vae(), painted(8)
    stock = {name: weight.clone() for name, weight in vae.state_dict().items()}
    how = {"decoder_only": True, "crop": 32, "latent_noise": 0.4}
    train_vae.train_vae(vae, steps=2, batch=2, seed=0, device=CPU, **how)
    train_vae._clear_unused_taps(fresh := new_vae())
    with torch.no_grad():
        z, known = (v.encode(pixels[:, :, None] / 127.5 - 1).latent_dist for v in (vae, fresh))
    assert torch.equal(z.parameters, known.parameters)
    assert not torch.equal(vae.decoder.conv_in.bias, stock["decoder.conv_in.bias"])
    assert all(weight.isfinite().all() for weight in vae.parameters())


# --- transformer


def velocity_inputs(family, batch=2):
    """Latents, sigmas, text features and their mask: the second prompt is 5 tokens shorter."""
    config = family.transformer_dims
    width = config.get("joint_attention_dim") or config["context_in_dim"]
    mask = torch.ones(batch, 24, dtype=torch.bool)
    mask[1:, 19:] = False
    return (
        torch.randn(batch, 256, 64, generator=generator(44)),
        torch.linspace(0.3, 0.9, batch),
        torch.randn(batch, 24, width, generator=generator(45)),
        mask,
    )


@torch.no_grad()
def test_the_real_rotation_equals_the_complex_one():
    x = torch.randn(2, 10, 4, 32, generator=generator(46))
    freqs = torch.polar(torch.ones(10, 16), torch.randn(10, 16, generator=generator(47)))
    rotated = transformer_qwenimage.apply_rotary_emb_qwen(x, freqs, use_real=False)
    real = streams.rotate(x, torch.view_as_real(freqs))
    torch.testing.assert_close(real, rotated, atol=1e-6, rtol=1e-6)
    assert (real - x).abs().max() > 0.1


def pipeline_of(model, folder):
    """diffusers' pipeline over the parts of a model."""
    parts = {name: getattr(model, name) for name in (*WEIGHTED, "scheduler")}
    if model.family.words == "processor":
        model.save(folder)
        return model.family.pipeline(**parts, processor=load_processor(folder / "processor"))
    return model.family.pipeline(**parts, tokenizer=model.tokenizer)


@torch.no_grad()
def test_a_batch_has_the_velocities_that_the_pipeline_computes_for_each_prompt(untrained, tmp_path):
    """From the words to the first step's velocity, in fp32; the prompts differ in length."""
    pipeline, transformer, outputs = pipeline_of(untrained, tmp_path), untrained.transformer, []
    pipeline.set_progress_bar_config(disable=True)
    for weight in transformer.parameters():  # with their own, text hardly reaches the velocity
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.15, generator=generator(48))
    prompts = ["a red star", "a small blue ring at the top left on a gray background."]
    noisy, size = torch.randn(2, 256, 64, generator=generator(44)), {"height": 256, "width": 256}
    handle = transformer.register_forward_hook(lambda _, args, output: outputs.append(output[0]))
    for prompt, latents in zip(prompts, noisy.split(1), strict=True):
        pipeline(
            prompt, latents=latents, num_inference_steps=2, true_cfg_scale=1.0, **size,
            output_type="latent",
        )  # fmt: skip
    handle.remove()
    stock = torch.cat([output[:, -256:] for output in outputs[::2]])
    batch = train_transformer.PaddedPrompts(untrained, prompts, CPU)
    features = train_transformer.text_features(untrained, batch.ids[:2], batch.mask[:2])
    stream = untrained.family.stream
    stream.real_rotation(transformer)
    found = stream.velocity(transformer, noisy, torch.ones(2), *features)
    torch.testing.assert_close(found, stock, atol=3e-5, rtol=1e-5)
    other = stream.velocity(transformer, noisy, torch.ones(2), features[0].flip(0), features[1])
    assert (found - other).abs().mean() > 1e-3


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
    velocity = untrained.family.stream.velocity
    assert velocity(untrained.transformer, *velocity_inputs(untrained.family)).abs().max() == 0


@torch.no_grad()
def test_the_loss_is_zero_for_the_velocity_that_the_scheduler_integrates(untrained):
    clean, seen = torch.randn(64, 256, 64, generator=generator(52)), {}

    def perfect(hidden_states, timestep, **_):
        velocity = (hidden_states - clean) / timestep[:, None, None]
        seen.update(x=hidden_states, velocity=velocity, sigma=timestep)
        return (velocity,)

    perfect.pos_embed = SimpleNamespace()

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
    again, family = load(tmp_path / "model"), untrained.family
    found = {name: [getattr(again, name)] for name in WEIGHTED}
    if family is QWEN_IMAGE:
        pipeline = QwenImagePipeline.from_pretrained(tmp_path / "model", local_files_only=True)
        assert dict(again.scheduler.config) == dict(pipeline.scheduler.config)
        for name, parts in found.items():
            parts.append(getattr(pipeline, name))
    for name, parts in found.items():
        known = getattr(untrained, name).state_dict()
        for part in parts:
            state = part.state_dict()
            assert set(state) == set(known)
            for key, weight in state.items():
                assert torch.equal(weight.float(), known[key].bfloat16().float()), (name, key)
    # Saving has not turned what is being trained into bf16.
    assert untrained.transformer.dtype == again.transformer.dtype == torch.float32
    assert isinstance(again, MicroModel) and again.family is FAMILIES[family.name] is family
    assert again.tokenizer.get_vocab() == untrained.tokenizer.get_vocab()


def test_building_is_reproducible(untrained):
    family = untrained.family
    again, other = build(0, family), build(1, family)
    for part in WEIGHTED:
        known = getattr(untrained, part).state_dict()
        assert all(torch.equal(w, known[n]) for n, w in getattr(again, part).state_dict().items())
    weight = "transformer_blocks.0.attn.to_q.weight"
    assert not torch.equal(
        other.transformer.state_dict()[weight], untrained.transformer.state_dict()[weight]
    )


def test_a_folder_of_another_family_is_refused(tmp_path, capsys, monkeypatch):
    build(0, QWEN_IMAGE_21).save(tmp_path)
    monkeypatch.setattr("sys.argv", ["train", "vae", "--folder", str(tmp_path)])
    with pytest.raises(SystemExit):
        main()
    assert f"{tmp_path} holds a 2.1: give --family 2.1." in capsys.readouterr().err
