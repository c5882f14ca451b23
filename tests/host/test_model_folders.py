"""`doctor` looks for models where ComfyUI does."""

from pathlib import Path

import folder_paths
import pytest
from utils.extra_config import load_extra_path_config

from qwen_l40s.machine import packages as software

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
