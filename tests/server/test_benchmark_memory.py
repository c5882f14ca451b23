"""benchmarks/memory.py: its dry run in a real ComfyUI server, and its random weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from comfyui_host import comfyui_folder, comfyui_python

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


def in_comfyui(code: str) -> str:
    """What a line of code prints in the Python that runs ComfyUI."""
    python = comfyui_python(comfyui_folder())
    done = subprocess.run(
        [python, "-c", f"import sys; sys.path.append({str(BENCHMARKS)!r})\n{code}"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def header_only(path: Path, shapes: dict) -> Path:
    """A sparse file of the right size: nothing but its header is written."""
    pytest.importorskip("torch")
    from qwen_l40s.loaders.writer import SafetensorsLayout

    layout = SafetensorsLayout({name: ("BF16", tuple(s)) for name, s in shapes.items()}, {})
    path.write_bytes(layout.header)
    os.truncate(path, layout.file_bytes)
    return path


@pytest.fixture(scope="module")
def shapes() -> list[dict]:
    """Of the transformer, the text encoder and the VAE."""
    code = (
        "import json, memory_weights as weights\n"
        "from pathlib import Path\n"
        f"others = weights.comfyui_shapes(Path({str(comfyui_folder())!r}))\n"
        "print(json.dumps([weights.transformer_shapes(), *others]))\n"
    )
    return json.loads(in_comfyui(code).splitlines()[-1])


def test_the_random_weights_are_those_of_the_published_files(shapes, tmp_path):
    from qwen_l40s.loaders.convert import check_complete
    from qwen_l40s.loaders.source import open_source

    roles = ("transformer", "text_encoder", "vae")
    files = [
        header_only(tmp_path / f"{role}.safetensors", found)
        for role, found in zip(roles, shapes, strict=True)
    ]
    sizes = [round(file.stat().st_size / 1e9, 2) for file in files]
    assert sizes == [40.86, 16.58, 0.25]
    assert check_complete(open_source(files[0], "transformer")).blocks == 60
    variant = open_source(files[1], "text_encoder").part.variant
    assert "7B, with its vision tower, with lm_head, flat names" in variant
    assert open_source(files[2], "vae").part.dims["dim"] == 96


def test_the_dry_run_measures_a_case_in_a_real_server(tmp_path):
    out = tmp_path / "out.json"
    command = [sys.executable, BENCHMARKS / "memory.py", "--dry", "--cases", "ours-bf16,stock"]
    command += ["--sizes", "256", "--steps", "2", "--json", out, "--work", tmp_path / "work"]
    done = subprocess.run(
        [*map(str, command), "--comfyui", str(comfyui_folder())],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stock: left out" in done.stdout
    found = json.loads(out.read_text())
    assert found["conditions"]["comfyui"] and found["conditions"]["torch"]
    records = found["records"]
    assert [record["status"] for record in records] == ["success"] * 3
    assert [record["image"] for record in records] == ["first", "other seed", "other prompt"]
    for record in records:
        assert {"sample", "decode", "save"} <= set(record["phases"])
        assert record["reports"]["check"].startswith("finite: True")
        assert record["answers_after"] and record["findings"] == []
        assert "QwenImage" in {model["model"] for model in record["models"]}
        assert 0 < record["phases"]["sample"]["seconds"] < record["seconds"]
    # Nothing is loaded again, and a prompt is encoded when it is new.
    assert [("load" in r["phases"], "encode" in r["phases"]) for r in records] == [
        (True, True),
        (False, False),
        (False, True),
    ]
    assert "transformer" in records[0]["reports"]["model"]
    assert done.stdout.rstrip().splitlines()[-3].split()[:5] == [
        "cpu",
        "ours-bf16",
        "256",
        "first",
        "success",
    ]
