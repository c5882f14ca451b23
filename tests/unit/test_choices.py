"""What the loader nodes offer and find, with a stand-in for ComfyUI's `folder_paths`."""

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
from test_checkpoint import micro_transformer, native_vae, qwen25, write, write_folder

from qwen_l40s.errors import CheckpointError, SettingError
from qwen_l40s.loaders import header, shards

EXTENSIONS = (".safetensors", ".ckpt")


class FolderPaths(ModuleType):
    """The part of `folder_paths` that is used: models/<folder> below one base."""

    def __init__(self, base: Path) -> None:
        super().__init__("folder_paths")
        self.base, self.added = base, {}
        names = ("diffusion_models", "checkpoints", "text_encoders", "vae", "diffusers")
        self.folder_names_and_paths = dict.fromkeys(names)
        for name in names:
            (base / name).mkdir()

    def get_folder_paths(self, name: str) -> list[str]:
        return [str(self.base / "missing"), str(self.base / name)]

    def add_model_folder_path(self, name: str, path: str) -> None:
        self.added.setdefault(name, set()).add(Path(path))

    def get_filename_list(self, name: str) -> list[str]:
        roots, ends = self.added.get(name, {self.base / name}), EXTENSIONS
        files = ((root, file) for root in roots for file in root.rglob("*") if file.is_file())
        names = (file.relative_to(root).as_posix() for root, file in files)
        return sorted(entry for entry in names if name in self.added or entry.endswith(ends))

    def get_full_path(self, name: str, entry: str) -> str | None:
        path = self.base / name / entry
        return str(path) if path.is_file() else None


@pytest.fixture
def models(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "folder_paths", FolderPaths(tmp_path))
    return tmp_path


@pytest.fixture
def choices(models, monkeypatch):
    monkeypatch.delitem(sys.modules, "qwen_l40s.hosts.comfyui.load.choose", raising=False)
    module = importlib.import_module("qwen_l40s.hosts.comfyui.load.choose")
    monkeypatch.delitem(sys.modules, "qwen_l40s.hosts.comfyui.load.choose")
    # That of 2.1 need not be there.
    folders = {"1.x": module.bundled_micro_folder(), "2.1": models / "micro_21"}
    monkeypatch.setattr(module, "bundled_micro_folder", folders.__getitem__)
    return module


def test_the_micro_model_of_21_where_it_is_there(choices, models):
    assert choices.choices("transformer") == [choices.MICRO]
    (models / "micro_21").mkdir()
    found = choices.offered("transformer")
    assert found == {"options": ["micro 2.1 (bundled)", choices.MICRO], "default": choices.MICRO}
    assert choices.resolve("micro 2.1 (bundled)", "vae") == models / "micro_21"


def test_files_come_first_then_folders_then_the_micro_model(choices, models):
    write(models / "diffusion_models" / "sub" / "b.safetensors", micro_transformer())
    write(models / "checkpoints" / "all.safetensors", micro_transformer())
    write_folder(models / "diffusers" / "owner" / "name")
    write_folder(models / "diffusers" / "alone")
    assert choices.choices("transformer") == [
        "sub/b.safetensors",
        "all.safetensors",
        "alone/",
        "owner/name/",
        choices.MICRO,
    ]


def test_a_choice_is_found_again(choices, models):
    file = write(models / "checkpoints" / "all.safetensors", micro_transformer())
    folder = write_folder(models / "diffusers" / "owner" / "name")
    assert choices.resolve("all.safetensors", "vae") == file
    assert choices.resolve("owner/name/", "text_encoder") == folder
    assert (choices.resolve(choices.MICRO, "vae") / "model_index.json").is_file()
    for gone in ("no.safetensors", "no/", "../all.safetensors"):
        with pytest.raises(SettingError, match=r"^model: '.*' is not in .* press R to refresh"):
            choices.resolve(gone, "transformer")


def test_folders_that_cannot_be_read_hide_nothing(choices, models):
    write_folder(models / "diffusers" / "good")
    (models / "diffusers" / "loop").symlink_to("loop")
    locked = models / "diffusers" / "locked"
    locked.mkdir(mode=0o000)
    try:
        assert choices.choices("vae") == ["good/", choices.MICRO]
    finally:
        locked.chmod(0o700)


def test_a_linked_folder_is_a_choice(choices, models, tmp_path_factory):
    elsewhere = write_folder(tmp_path_factory.mktemp("cache") / "snapshot")
    os.symlink(elsewhere, models / "diffusers" / "linked")
    assert "linked/" in choices.choices("transformer")


@pytest.mark.parametrize("owner", ["", "hub"])
def test_a_cache_of_hugging_face_is_its_newest_snapshot(choices, models, owner):
    cache = models / "diffusers" / owner / "models--Qwen--Qwen-Image"
    for age, revision in enumerate(("b", "a")):
        folder = write_folder(cache / "snapshots" / revision)
        os.utime(folder, (age, age))
    (cache / "snapshots" / "gone").symlink_to("nowhere")
    name = f"{cache.relative_to(models / 'diffusers').as_posix()}/"
    assert choices.choices("transformer") == [name, choices.MICRO]
    assert choices.source_of(name, "vae").path == cache / "snapshots" / "a" / "vae"


@pytest.mark.parametrize("end", header.UNFINISHED)
def test_a_download_that_has_not_ended_is_refused_until_it_has(choices, models, end):
    """Its file has the whole size from the start."""
    path = write(models / "diffusion_models" / "qwen.safetensors", micro_transformer())
    linked = models / "checkpoints" / "link.safetensors"
    linked.symlink_to(path)
    beside = path.with_name(path.name + end)
    for _ in range(2):
        for name in (path.name, linked.name):
            assert choices.source_of(name, "transformer").tensors
        beside.write_text("")
        for name in (path.name, linked.name):
            choices._read.cache_clear()  # as where the file has grown
            with pytest.raises(CheckpointError, match=beside.name):
                choices.source_of(name, "transformer")
        beside.unlink()


def source(choices, path, role="transformer"):
    return choices.open_source(path, role)


def transformer_file(models):
    specs = micro_transformer()
    return write(models / "diffusion_models" / "model.safetensors", specs)


def test_the_vae_named_after_qwen_wins_over_wans(choices, models):
    model = source(choices, transformer_file(models))
    wan = write(models / "vae" / "Wan2_1_VAE.safetensors", native_vae(dim=8))
    assert choices.find_companion(model, "vae").path == wan
    own = write(models / "vae" / "qwen_image_vae.safetensors", native_vae(dim=8))
    assert choices.find_companion(model, "vae").path == own


def test_a_text_encoder_of_another_width_is_passed_over(choices, models):
    model = source(choices, transformer_file(models))
    width = model.part.dims["joint_dim"]
    write(models / "text_encoders" / "a_qwen_other.safetensors", qwen25(2 * width, 2))
    (models / "text_encoders" / "broken.safetensors").write_bytes(b"x")
    with pytest.raises(
        CheckpointError, match=r"^text_encoder: models/text_encoders has no file .* download"
    ):
        choices.find_companion(model, "text_encoder")
    fits = write(models / "text_encoders" / "b_qwen.safetensors", qwen25(width, 2))
    assert choices.find_companion(model, "text_encoder").path == fits


def test_a_full_checkpoint_brings_its_own(choices, models):
    parts = {
        f"model.diffusion_model.{name}": spec for name, spec in micro_transformer().items()
    } | {f"vae.{name}": spec for name, spec in native_vae(dim=8).items()}
    write(models / "vae" / "qwen_image_vae.safetensors", native_vae(dim=8))
    path = write(models / "checkpoints" / "all.safetensors", parts)
    assert choices.find_companion(source(choices, path), "vae").path == path


def test_a_diffusers_folder_brings_its_own(choices, models):
    folder = write_folder(models / "diffusers" / "whole")
    model = source(choices, folder)
    assert choices.find_companion(model, "vae").path == folder / "vae"


def test_headers_are_read_once_until_a_file_is_replaced(choices, models):
    path = write(models / "vae" / "vae.safetensors", native_vae(dim=8))
    first = choices.source_of("vae.safetensors", "vae")
    assert choices.source_of("vae.safetensors", "vae") is first
    write(path, native_vae(dim=16))
    assert choices.source_of("vae.safetensors", "vae").part.dims["dim"] == 16
    folder = write_folder(models / "diffusers" / "whole")
    first = choices.source_of("whole/", "transformer")
    assert choices.source_of("whole/", "transformer") is first
    (folder / "transformer" / "config.json").write_text("{}")
    assert choices.source_of("whole/", "transformer").config == {}


def test_what_the_disk_refused_is_tried_again_and_what_a_header_lacks_is_not(
    choices, models, monkeypatch
):
    write(models / "vae" / "vae.safetensors", native_vae(dim=8))
    write(models / "vae" / "other.safetensors", {"x": ("F32", [1])})
    original, read = header.open_regular, []

    def away(path):
        raise CheckpointError("This file cannot be opened.") from OSError(5, "Input/output error")

    monkeypatch.setattr(header, "open_regular", away)
    with pytest.raises(CheckpointError, match="cannot be opened"):
        choices.source_of("vae.safetensors", "vae")
    monkeypatch.setattr(header, "open_regular", lambda path: read.append(path) or original(path))
    assert choices.source_of("vae.safetensors", "vae").part.dims["dim"] == 8
    for role in ("vae", "vae", "transformer"):
        with pytest.raises((CheckpointError, SettingError)):
            choices.source_of("other.safetensors", role)
    assert [path.name for path in read] == ["vae.safetensors", "other.safetensors"]


# --- what a new node starts with


def named(models, folder, names, tensors=None):
    """Files with a header of a micro transformer, unless others are given."""
    return [write(models / folder / name, tensors or micro_transformer()) for name in names]


def test_a_new_node_starts_with_what_its_header_says_is_qwen_image(choices, models):
    named(models, "diffusion_models", ["a_flux.safetensors"], {"double_blocks.0.x": ("F32", [1])})
    assert choices.offered("transformer")["default"] == choices.MICRO
    assert choices.choices("transformer") == ["a_flux.safetensors", choices.MICRO]
    (models / "diffusion_models" / "b_qwen_page.safetensors").write_text("<html>")
    (models / "diffusion_models" / "c.ckpt").write_bytes(b"\x80\x02")
    named(models, "diffusion_models", ["sub/z.safetensors", "z_qwen.safetensors"])
    write_folder(models / "diffusers" / "whole")
    assert choices.choices("transformer") == [
        "z_qwen.safetensors",
        "sub/z.safetensors",
        "whole/",
        "a_flux.safetensors",
        "b_qwen_page.safetensors",
        "c.ckpt",
        choices.MICRO,
    ]
    assert choices.offered("transformer")["default"] == "z_qwen.safetensors"
    assert choices.offered("vae")["default"] == "whole/"


def test_the_published_parts_come_before_those_of_other_models(choices, models):
    named(models, "vae", ["a_wan.safetensors", "qwen_image.safetensors"], native_vae())
    named(models, "vae", ["a_qwen_layered.safetensors"], native_vae(channels=4))
    names = [name for name in choices.choices("vae") if name != choices.MICRO]
    assert names == ["qwen_image.safetensors", "a_qwen_layered.safetensors", "a_wan.safetensors"]
    named(models, "text_encoders", ["a_qwen_3b.safetensors"], qwen25(2048, 1))
    named(models, "text_encoders", ["b_qwen_7b.safetensors"], qwen25(3584, 1))
    assert choices.offered("text_encoder")["default"] == "b_qwen_7b.safetensors"


def test_of_many_files_few_are_looked_at_and_each_once(choices, models, monkeypatch):
    long = "很长的名字" * 12
    many = [f"{number:04}_sdxl.safetensors" for number in range(3000)]
    wanted = [f"{long}_qwen_{number}.safetensors" for number in range(2)]
    folder = models / "diffusion_models"
    for name in many:
        (folder / name).touch()
    named(models, "diffusion_models", wanted)
    read, original = [], shards.read_header
    monkeypatch.setattr(shards, "read_header", lambda path: read.append(path) or original(path))
    offered = choices.choices("transformer")
    assert offered == [*wanted, *many, choices.MICRO]
    assert [choices.offered("transformer")["default"], choices.choices("transformer")] == [
        wanted[0],
        offered,
    ]
    assert [path.name for path in read] == wanted
    write(folder / wanted[0], {"double_blocks.0.x": ("F32", [1])})
    assert choices.offered("transformer")["default"] == wanted[1]


def test_files_of_qwen_image_21_come_after_others(choices, models):
    dit = {
        "txt_in.text_norm.weight": ("BF16", (64,)),
        "transformer_blocks.0.img_mlp.gate_up.weight": ("BF16", (384, 64)),
    }
    write(models / "diffusion_models" / "a_qwen_image_2.1.safetensors", dit)
    write(models / "diffusion_models" / "b_qwen_image.safetensors", micro_transformer())
    vae = {
        "decoder.upsamples.0.upsamples.0.residual.2.weight": ("BF16", (8, 8, 1, 3, 3)),
        "decoder.conv1.weight": ("BF16", (8, 64, 1, 3, 3)),
    }
    write(models / "vae" / "a_qwen_image_2.1.safetensors", vae)
    write(models / "vae" / "b_qwen_image.safetensors", native_vae(dim=8))
    folder = models / "diffusers" / "Qwen-Image-2.1"
    write(folder / "transformer" / "model.safetensors", dit)
    (folder / "model_index.json").write_text('{"_class_name": "QwenImage21Pipeline"}')
    for role in ("transformer", "vae"):
        found = choices.offered(role)
        assert found["default"] == found["options"][0] == "b_qwen_image.safetensors"
        assert "a_qwen_image_2.1.safetensors" in found["options"]
    found = choices.choices("transformer")
    assert found[1:3] == ["a_qwen_image_2.1.safetensors", "Qwen-Image-2.1/"]
    assert choices.source_of("Qwen-Image-2.1/", "transformer").part.family == "Qwen-Image-2.1"
    model = choices.source_of("b_qwen_image.safetensors", "transformer")
    assert choices.find_companion(model, "vae").path.name == "b_qwen_image.safetensors"
    model = choices.source_of("a_qwen_image_2.1.safetensors", "transformer")
    words = "with the Qwen3-VL 8B text encoder for .*huggingface.co/Comfy-Org/Qwen-Image-2.1"
    with pytest.raises(CheckpointError, match=words):
        choices.find_companion(model, "text_encoder")
