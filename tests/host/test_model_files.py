"""What lies in the model folders beside whole files, and files of a set that are replaced."""

import os
import shutil
import stat
from pathlib import Path

import folder_paths
import narrow_transformer as narrow
import pytest
import torch
from comfyui_boot import refused
from gguf_files import stored, write_gguf
from safetensors.torch import save_file
from utils.extra_config import load_extra_path_config

from qwen_l40s.errors import CheckpointError, QwenL40SError
from qwen_l40s.families.qwen_image import QwenImageShape
from qwen_l40s.hosts.comfyui.load import choose
from qwen_l40s.hosts.comfyui.load.transformer import load_model
from qwen_l40s.loaders.source import bundled_micro_folder
from qwen_l40s.machine import packages as software
from qwen_l40s.nodes import NODES
from qwen_l40s.nodes.loaders import QwenL40SLoadModel, QwenL40SLoadTextEncoder, QwenL40SLoadVAE
from qwen_l40s.nodes.lora import QwenL40SLoadLora

pytestmark = [pytest.mark.usefixtures("inference_mode"), pytest.mark.timeout(120)]
PLACES = {
    "diffusion_models": (QwenL40SLoadModel, "model"),
    "unet": (QwenL40SLoadModel, "model"),
    "checkpoints": (QwenL40SLoadModel, "model"),
    "text_encoders": (QwenL40SLoadTextEncoder, "text_encoder"),
    "vae": (QwenL40SLoadVAE, "vae"),
    "loras": (QwenL40SLoadLora, "lora"),
    "diffusers": (QwenL40SLoadModel, "model"),
}


def with_a_pipe(path, name):
    path.mkdir()
    os.mkfifo(path / name)


UNREADABLE = {
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a loop of links": lambda path: path.symlink_to(path.name),
    "a pipe": os.mkfifo,
    "a link to a pipe": lambda path: (os.mkfifo(path.with_name("pipe")), path.symlink_to("pipe")),
    "a socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": lambda path: path.mkdir(),
    "a folder without rights": lambda path: path.mkdir(mode=0),
    "a file without rights": lambda path: path.touch(mode=0),
    "a folder whose index is a pipe": lambda path: with_a_pipe(path, "model_index.json"),
    "a folder whose index of shards is a pipe": lambda path: with_a_pipe(
        path, "model.safetensors.index.json"
    ),
}


@pytest.fixture
def models(tmp_path, monkeypatch):
    """ComfyUI's model folders, all empty."""
    known = dict(folder_paths.folder_names_and_paths)
    for name in PLACES:
        (tmp_path / name).mkdir()
        key = folder_paths.map_legacy(name)
        paths = [*(known[key][0] if name == "unet" else ()), str(tmp_path / name)]
        known[key] = (paths, known[key][1])
    known.pop(choose.GGUF, None)
    monkeypatch.setattr(folder_paths, "folder_names_and_paths", known)
    monkeypatch.setattr(folder_paths, "filename_list_cache", {})
    return tmp_path


def offered(node, slot):
    schema = node.define_schema()
    return next(it for it in schema.inputs if it.id == slot)


@pytest.mark.parametrize("end", [".safetensors", ".gguf"])
@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.parametrize("place", PLACES)
def test_what_cannot_be_read_is_listed_last_and_refused_in_a_sentence(models, place, kind, end):
    path = models / place / f"qwen{end}"
    UNREADABLE[kind](path)
    for node in NODES:
        node.define_schema()
    node, slot = PLACES[place]
    widget, listed = offered(node, slot), folder_paths.get_filename_list(place)
    assert {*listed} <= {*widget.options} and widget.default not in listed
    for name in (path.name, f"{path.name}/"):
        try:
            sentence = node.validate_inputs(name)
        except QwenL40SError as error:
            sentence = str(error)
        assert path.name in sentence and sentence.endswith(".") and "\n" not in sentence


def test_a_good_file_is_found_among_them(models):
    micro = bundled_micro_folder()
    files = {"vae": "vae", "diffusion_models": "transformer"}
    for folder, part in files.items():
        found = micro / part / "diffusion_pytorch_model.safetensors"
        shutil.copy(found, models / folder / "z.safetensors")
        for index, make in enumerate(UNREADABLE.values()):
            (models / folder / f"{index}").mkdir()
            make(models / folder / f"{index}" / "qwen.safetensors")
    assert offered(QwenL40SLoadVAE, "vae").default == "z.safetensors"
    model = choose.source_of("z.safetensors", "transformer")
    assert choose.find_companion(model, "vae").path == models / "vae" / "z.safetensors"


# --- files of a set

SHAPE = QwenImageShape(1, 256, 2, 128, 256, 64, 64)
WEIGHTS = narrow.weights(SHAPE)
SPLIT = "split-00001-of-00002.gguf"


def write_file(folder):
    save_file(WEIGHTS, folder / "a.safetensors")


def write_parts(folder, numbers=(0, 1), sign=1):
    """Parts of a split set; with a sign of -1 of as many bytes, in another order."""
    for number in numbers:
        names = sorted(WEIGHTS)[number::2][::sign]
        part = {name: stored(sign * WEIGHTS[name].float(), "F32") for name in names}
        split = {"split.no": number, "split.count": 2}
        write_gguf(folder / f"split-{number + 1:05}-of-00002.gguf", part, split)


def write_lora(folder):
    tensors = narrow.lora(WEIGHTS, ["transformer_blocks.0.attn.to_q"])
    found = {f"diffusion_model.{name}": it for name, it in tensors.items()}
    save_file(found, folder / "a.safetensors")


def write_encoder(folder):
    micro = bundled_micro_folder()
    shutil.copytree(micro / "tokenizer", folder.parent / "tokenizer")
    shutil.copy(micro / "text_encoder" / "model.safetensors", folder / "a.safetensors")
    shutil.copy(micro / "tokenizer" / "tokenizer.json", folder)


def write_pipeline(folder):
    unread = shutil.ignore_patterns("*.md", ".*")
    shutil.copytree(bundled_micro_folder(), folder / "whole", ignore=unread)


# {what: (folder, what writes it, the choice, folders of which every file counts)}
SETS = {
    "a file": ("diffusion_models", write_file, "a.safetensors", ["."]),
    "shards": ("unet", lambda it: narrow.sharded(it / "a", WEIGHTS), "a/", ["a"]),
    "a split GGUF": ("diffusion_models", write_parts, SPLIT, ["."]),
    "a transformer": ("diffusers", write_pipeline, "whole/", ["whole", "whole/transformer"]),
    "a text encoder": (
        *("text_encoders", write_pipeline, "whole/"),
        ["whole", "whole/text_encoder", "whole/tokenizer"],
    ),
    "a VAE": ("vae", write_pipeline, "whole/", ["whole", "whole/vae"]),
    "a file and a tokenizer": (
        *("text_encoders", write_encoder, "a.safetensors"),
        [".", "../tokenizer"],
    ),
    "a LoRA": ("loras", write_lora, "a.safetensors", ["."]),
}


@pytest.mark.parametrize("what", SETS)
def test_each_file_of_a_set_is_noticed_when_it_is_replaced(models, what):
    place, write, choice, folders = SETS[what]
    write(models / place)
    look = PLACES[place][0].fingerprint_inputs
    found = [it for folder in folders for it in sorted((models / place / folder).iterdir())]
    for file in (it for it in found if it.is_file()):
        before, time = look(choice), file.stat().st_mtime_ns + 10**9
        assert look(choice) == before
        file.write_bytes(file.read_bytes())
        os.utime(file, ns=(time, time))
        assert look(choice) != before, file


def test_a_part_that_is_replaced_is_read_anew(models):
    folder, name = models / "diffusion_models", sorted(WEIGHTS)[1]
    write_parts(folder)
    first = choose.source_of(SPLIT, "transformer")
    part = folder / "split-00002-of-00002.gguf"
    bytes_before, time = part.stat().st_size, part.stat().st_mtime_ns + 10**9
    write_parts(folder, [1], sign=-1)
    os.utime(part, ns=(time, time))
    assert part.stat().st_size == bytes_before
    refused(CheckpointError, part.parent.name, run=lambda: load_model(first, "bf16"))
    loaded, _ = load_model(choose.source_of(SPLIT, "transformer"), "bf16")
    known = loaded.model.diffusion_model.state_dict()
    for number, (name, sign) in enumerate(zip(sorted(WEIGHTS)[:2], (1, -1), strict=True)):
        assert torch.equal(known[name].float(), sign * WEIGHTS[name].float()), number


# --- `doctor` looks for models where ComfyUI does

KNOWN = folder_paths.folder_names_and_paths
EXTRA = """
# a comment
empty:
one:
  base_path: $SHARED/模型
  is_default: true
  unet: |
    a
    b/../c
  custom_nodes: custom_nodes
two:
  vae: extra
  diffusion_models: /abs
  clip: text
"""


@pytest.fixture
def extra(tmp_path, monkeypatch):
    """Writes an extra_model_paths.yaml; returns ComfyUI's folder."""
    monkeypatch.setenv("SHARED", str(tmp_path))

    def write(text):
        (tmp_path / "extra_model_paths.yaml").write_text(text, encoding="utf-8")
        return tmp_path

    return write


def test_extra_model_paths_are_read_as_comfyui_reads_them(extra, monkeypatch):
    known = {name: ([*paths], ends) for name, (paths, ends) in KNOWN.items()}
    monkeypatch.setattr(folder_paths, "folder_names_and_paths", known)
    code = extra(EXTRA)
    load_extra_path_config(str(code / "extra_model_paths.yaml"))
    ours = software.model_folders(Path(folder_paths.models_dir), code)
    for kind, folders in ours.items():
        assert set(map(str, folders)) == set(known[kind][0]), kind


def test_a_pack_in_a_shared_folder_leaves_the_models_where_they_are(extra, monkeypatch):
    code = extra(EXTRA)
    file = code / "模型" / "custom_nodes" / "pack" / "machine" / "packages.py"
    monkeypatch.setattr(software, "__file__", str(file))
    assert software.models_folder(code) == code / "models"


@pytest.mark.parametrize("text", ["- a list", "{", "one: text", "one:\n  vae: 3", "\0"])
def test_a_damaged_list_adds_nothing(extra, text):
    assert not any(software.extra_folders(extra(text)).values())
