"""bench/memory.py: its dry run in a real ComfyUI server."""

import json

from comfyui_host import comfyui_folder

from qwen_l40s.bench.memory import main


def test_the_dry_run_measures_a_case_in_a_real_server(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "out.json"
    arguments = ["--dry", "--cases", "ours-bf16,stock", "--sizes", "256", "--steps", "2"]
    arguments += ["--json", out, "--work", tmp_path / "work", "--comfyui", comfyui_folder()]
    assert main(list(map(str, arguments))) == 0
    printed = capsys.readouterr().out
    assert "stock: left out" in printed
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
    assert printed.rstrip().splitlines()[-3].split()[:5] == [
        "cpu",
        "ours-bf16",
        "256",
        "first",
        "success",
    ]
