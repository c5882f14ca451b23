"""`qwen-l40s inspect` as a command."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from qwen_l40s.cli import main

ROOT = Path(__file__).resolve().parents[2]


def test_the_table(checkpoint, capsys):
    assert main(["inspect", str(checkpoint)]) == 0
    lines = dict(
        line.strip().split("  ", 1) for line in capsys.readouterr().out.splitlines() if line
    )
    rows = {name: text.strip() for name, text in lines.items()}
    assert rows["path"] == str(checkpoint)
    assert rows["weights"] == "Qwen-Image"
    assert rows["blocks"] == "2"
    assert rows["quantized"] == "no"
    assert rows["belongs in"] == "ComfyUI/models/diffusion_models/"
    assert rows["hint"].startswith("the file name says 2512")


def test_json_is_one_object(checkpoint, capsys):
    assert main(["inspect", str(checkpoint), "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["kind"] == "file"
    assert output["file_bytes"] == checkpoint.stat().st_size
    assert output["parts"][0]["family"] == "Qwen-Image"
    assert output["parts"][0]["quantization"]["formats"] == {}


def test_a_contradiction_is_shown_and_is_exit_code_1(tmp_path, checkpoint, capsys):
    (tmp_path / "model.safetensors").write_bytes(checkpoint.read_bytes())
    (tmp_path / "config.json").write_text('{"num_layers": 60}')
    assert main(["inspect", str(tmp_path)]) == 1
    assert "config.json gives num_layers as 60, but the tensors give 2" in capsys.readouterr().out


def test_bad_input_is_one_line_and_exit_code_2(tmp_path, capsys):
    path = tmp_path / "model.ckpt"
    path.write_bytes(b"")
    assert main(["inspect", str(path)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("qwen-l40s: error: This is a pickle") and str(path) in output.err
    assert len(output.err.splitlines()) == 1


def test_a_name_that_would_steer_the_terminal_is_escaped(tmp_path, capsys):
    path = tmp_path / "全角\u3000空格.safetensors"
    name = "lora_unet_transformer_blocks_0_\x1b[2J_img_mlp.lora_down.weight"
    save_file({name: torch.zeros(4, 8)}, path)
    assert main(["inspect", str(path)]) == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert "\\x1b[2J" in output and "全角\\u3000空格.safetensors" in output


def test_names_that_the_terminal_cannot_show(tmp_path, checkpoint):
    path = tmp_path / "qwen-图像.safetensors"
    path.write_bytes(checkpoint.read_bytes())
    command = [sys.executable, str(ROOT), "inspect", str(path)]
    result = subprocess.run(
        command, capture_output=True, env={"PYTHONIOENCODING": "ascii"}, check=False
    )
    assert result.returncode == 0, result.stderr
    assert rb"qwen-\u56fe\u50cf.safetensors" in result.stdout


def test_ctrl_c_in_a_finalizer_stops_the_command(monkeypatch, capsys):
    class Finalized:
        def __del__(self):
            raise KeyboardInterrupt  # which Python drops here

    def run(args):
        Finalized()
        for _ in range(1000):
            time.sleep(0.01)
        return 0

    monkeypatch.setattr("qwen_l40s.cli.inspect.run", run)
    hook = sys.unraisablehook
    # A shell that runs this behind itself has it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["inspect", "a.safetensors"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "qwen-l40s: stopped\n"
    assert sys.unraisablehook is hook


def test_from_a_clone_and_without_importing_torch(checkpoint):
    code = (
        "import runpy, sys\n"
        "for name in ('torch', 'numpy', 'safetensors', 'diffusers', 'transformers'): "
        "sys.modules[name] = None\n"
        f"sys.argv = ['qwen-l40s', 'inspect', {str(checkpoint)!r}, '--json']\n"
        f"runpy.run_path({str(ROOT)!r}, run_name='__main__')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["parts"][0]["blocks"] == 2
