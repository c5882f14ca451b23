"""Save Image (fast PNG) beside ComfyUI's own Save Image: names, pixels, texts, and what fails."""

import errno
import functools
import json
import os
import threading
from pathlib import Path
from unittest import mock

import comfy.model_management
import folder_paths
import numpy as np
import pytest
import torch
from comfy_api.latest import io
from comfyui_boot import refused
from PIL import Image

import nodes as core
from qwen_l40s import files
from qwen_l40s.errors import UnavailableError
from qwen_l40s.hosts import png
from qwen_l40s.nodes import save as host
from qwen_l40s.nodes.save import QwenL40SSaveImage

PROMPT = {"1": {"class_type": "KSampler", "inputs": {"seed": 3, "text": "naïve 画"}}}
EXTRA = {"workflow": {"nodes": [1, 2]}, "other": "x"}
PREFIXES = (
    "plain",
    "a folder/below/name",
    "%width%x%height%_%year%",
    "number%batch_num%",
    "with.dot_00007_",
)


@pytest.fixture(autouse=True)
def output(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path))
    return tmp_path


def without_links(monkeypatch):
    monkeypatch.setattr(files.os, "link", mock.Mock(side_effect=OSError(errno.EPERM, "no")))


@pytest.fixture(params=[True, False])
def links(request, monkeypatch):
    if not request.param:
        without_links(monkeypatch)


def save(images, prefix="ComfyUI", prompt=PROMPT, extra=EXTRA):
    """What the node gives, called as ComfyUI's executor calls it."""
    hidden = {io.Hidden.prompt: prompt, io.Hidden.extra_pnginfo: extra}
    node = QwenL40SSaveImage.PREPARE_CLASS_CLONE({"hidden_inputs": hidden})
    return node.EXECUTE_NORMALIZED(images=images, filename_prefix=prefix)


def save_by_core(images, prefix="ComfyUI", prompt=PROMPT, extra=EXTRA):
    return core.SaveImage().save_images(images, prefix, prompt, extra)


def pictures(count=3, channels=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(count)
    return (torch.rand(count, 40, 56, channels, generator=generator) * 1.2 - 0.1).to(dtype)


def contents(folder):
    """{name: mode, size, texts and pixels} of what is in a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with Image.open(path) as image:
                pixels = np.asarray(image).tobytes()
                found[str(path.relative_to(folder))] = (image.mode, image.size, image.text, pixels)
    return found


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("channels", [3, 4])
def test_files_are_those_of_comfyuis_node(output, monkeypatch, prefix, channels):
    results = {}
    for name, run in (("core", save_by_core), ("ours", save)):
        folder = output / name
        folder.mkdir()
        monkeypatch.setattr(folder_paths, "output_directory", str(folder))
        results[name] = [run(pictures(2, channels), prefix)]
        if prefix != "number%batch_num%":  # of which ComfyUI's node replaces the files
            results[name].append(run(pictures(3, channels), prefix))
    assert contents(output / "ours") == contents(output / "core")
    assert [ours.ui for ours in results["ours"]] == [each["ui"] for each in results["core"]]


def test_images_pass_through_and_halves_are_saved(output):
    images = pictures(dtype=torch.float16)
    assert save(images, "ours").args == (images,)
    save_by_core(images, "core")
    theirs, ours = np.split(np.array([each[3] for each in contents(output).values()]), 2)
    assert (ours == theirs).all()


def test_metadata_can_be_left_out(output, monkeypatch):
    monkeypatch.setattr(host.comfy.cli_args.args, "disable_metadata", True)
    save(pictures(1))
    monkeypatch.setattr(host.comfy.cli_args.args, "disable_metadata", False)
    save(pictures(1), prompt=None, extra=None)
    save(pictures(1))
    texts = [text for _, _, text, _ in contents(output).values()]
    expected = {"prompt": PROMPT} | EXTRA
    assert texts == [{}, {}, {key: json.dumps(value) for key, value in expected.items()}]


@pytest.mark.usefixtures("links")
def test_no_file_is_replaced(output):
    """Also with %batch_num%, whose numbers ComfyUI does not find."""
    for prefix in ("n", "n%batch_num%"):
        for _ in range(3):
            save(pictures(2), prefix)
    first = contents(output)
    assert len(first) == 12
    # A process that looked at the folder before these were written.
    looked = str(output), "n", 2, "", "n"
    with mock.patch.object(folder_paths, "get_save_image_path", return_value=looked):
        ui = save(pictures(2), "n").ui
    assert [image["filename"] for image in ui["images"]] == ["n_00007_.png", "n_00008_.png"]
    assert contents(output).items() > first.items()
    assert not list(output.glob(".*"))


@pytest.mark.usefixtures("links")
def test_two_that_save_at_once_share_no_name(output, monkeypatch):
    both = threading.Barrier(2)

    def meet(*_):
        both.wait()
        return str(output), "n", 1, "", "n"

    monkeypatch.setattr(folder_paths, "get_save_image_path", meet)
    threads = [threading.Thread(target=save, args=(pictures(20), "n")) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(contents(output)) == [f"n_{number:05}_.png" for number in range(1, 41)]


def test_a_read_only_folder_fails_in_one_sentence(output):
    words = "cannot write (Read-only file system)", "choose another", str(output)
    error = OSError(errno.EROFS, os.strerror(errno.EROFS))
    run = functools.partial(save, pictures())
    with mock.patch.object(Path, "open", side_effect=error):
        refused(UnavailableError, *words, run=run)
    with mock.patch.object(os, "makedirs", side_effect=error):
        refused(UnavailableError, *words, run=functools.partial(save, pictures(), "deeper/name"))
    assert list(output.iterdir()) == []


def test_a_full_disk_leaves_whole_images_and_nothing_else(output, file_limit):
    """The second image is cut: its pixels do not fit under the limit of a file."""
    images = torch.rand(2, 64, 64, 3)
    images[0] = 0
    file_limit(4096)
    refused(UnavailableError, "cannot write (", run=functools.partial(save, images))
    assert list(contents(output)) == ["ComfyUI_00001_.png"]
    assert len(list(output.iterdir())) == 1


def test_a_rename_that_fails_leaves_no_empty_file(output, monkeypatch):
    """Where links cannot be, an empty file has the name before."""
    without_links(monkeypatch)
    monkeypatch.setattr(Path, "replace", mock.Mock(side_effect=OSError(errno.EIO, "it broke")))
    refused(UnavailableError, "cannot write (it broke)", run=functools.partial(save, pictures()))
    assert list(output.iterdir()) == []


def test_a_cancel_in_the_middle_leaves_whole_images_and_nothing_else(output, monkeypatch):
    written = 0
    encode = png.encode

    def cancelled(pixels, info):
        nonlocal written
        written += 1
        for piece in encode(pixels, info):
            if written == 2:
                comfy.model_management.interrupt_current_processing()
            yield piece

    monkeypatch.setattr(host, "encode", cancelled)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        save(pictures())
    assert list(contents(output)) == ["ComfyUI_00001_.png"]
    assert len(list(output.iterdir())) == 1
