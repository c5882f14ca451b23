"""Host memory and disk: what counts, and against which need."""

import mmap
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from qwen_l40s.machine import memory as resources
from qwen_l40s.machine.card import State
from qwen_l40s.spec.formats import GIB


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        ("0::/\n", {"memory.max": "max"}, None),
        ("0::/\n", {"memory.max": "1000"}, 1000),
        ("0::/a/b\n", {"memory.max": "max", "a/memory.max": "500", "a/b/memory.max": "700"}, 500),
        ("0::/not/mounted/here\n", {"memory.max": "900"}, 900),
        ("4:cpu,memory:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": "300"}, 300),
    ],
)
def test_the_smallest_limit_of_the_control_groups_counts(
    tmp_path, monkeypatch, membership, files, limit
):
    for name, text in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    (tmp_path / "membership").write_text(membership)
    monkeypatch.setattr(resources, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(resources, "MEMBERSHIP", tmp_path / "membership")
    assert resources.cgroup_limit() == limit


def test_memory_is_the_containers_where_that_is_less(monkeypatch):
    monkeypatch.setattr(resources, "physical_memory", lambda: 256 * GIB)
    monkeypatch.setattr(resources, "cgroup_limit", lambda: 16 * GIB)
    check = resources.check_memory()
    assert check.state is State.LIMITED
    assert check.why.fact.startswith("16.0 GiB, the container's limit")
    monkeypatch.setattr(resources, "cgroup_limit", lambda: None)
    assert resources.check_memory().state is State.USABLE


@pytest.mark.parametrize(
    ("free", "there", "state"),
    [
        (100, 0, State.USABLE),
        (20, 60, State.USABLE),
        (50, 0, State.LIMITED),
        (10, 0, State.NOT_USABLE),
    ],
)
def test_model_disk_counts_what_is_free_and_what_is_there(
    tmp_path, monkeypatch, free, there, state
):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free * 10**9))
    folder = tmp_path / "models"
    if there:
        weights = folder / "diffusion_models" / "Qwen_image_bf16.safetensors"
        weights.parent.mkdir(parents=True)
        with weights.open("wb") as file:
            file.truncate(there * 10**9)  # sparse: takes no disk
        (folder / "link-to-qwen").symlink_to(weights)
        with (folder / "other.safetensors").open("wb") as file:
            file.truncate(90 * 10**9)
    check = resources.check_model_disk(tmp_path / "none", [folder])
    assert check.state is state
    check = resources.check_model_disk(folder)
    assert check.state is state
    assert f"{there * 10**9 / GIB:.0f} GiB of Qwen files" in check.why.fact
    assert check.why.fact.endswith(f"at {folder}")


def test_the_hugging_face_cache_is_where_its_package_says(monkeypatch, tmp_path):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "/data/hub")
    assert resources.hugging_face_cache() == Path("/data/hub")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(resources, "find_spec", lambda name: None)
    assert resources.hugging_face_cache() == tmp_path / ".cache" / "huggingface" / "hub"


def test_container_limit_counts_page_cache_as_available(tmp_path, monkeypatch):
    monkeypatch.setattr(resources, "CGROUPS", tmp_path)
    (tmp_path / "memory.max").write_text("8000\n")
    (tmp_path / "memory.current").write_text("5000\n")
    stat = "anon 3000\ninactive_file 1500\nactive_file 400\n"
    (tmp_path / "memory.stat").write_text(stat)
    assert resources.cgroup_available() == 4900
    (tmp_path / "memory.max").write_text("max\n")
    assert resources.cgroup_available() is None
    (tmp_path / "memory.max").unlink()
    assert resources.cgroup_available() is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists its mappings")
def test_pages_of_a_mapped_file_are_given_back_and_read_again(tmp_path):
    path, size = tmp_path / "weights", 8 * 2**20
    path.write_bytes(os.urandom(size))
    other = np.ones(size, np.uint8)
    with path.open("rb") as file:
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE), np.uint8)
    read = mapped.tobytes()

    def resident():
        blocks = Path("/proc/self/smaps").read_text().split(f"{path}\n")[1:]
        return sum(int(re.search(r"^Rss: +(\d+) kB", it, re.M)[1]) * 1024 for it in blocks)

    assert resident() == size
    pages = resources.MappedPages([path])
    pages.give_back(other.ctypes.data, size)  # not of the file: it would become zeros
    assert other.all() and resident() == size
    pages.give_back(mapped.ctypes.data + 1, size - 1)  # its first page is not whole
    assert resident() <= mmap.PAGESIZE
    assert mapped.tobytes() == read
