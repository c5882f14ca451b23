"""`qwen-l40s doctor`: every line carries its reason, the exit code whether anything runs."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from qwen_l40s.cli import doctor, main
from qwen_l40s.machine import packages as software
from qwen_l40s.machine.card import State

ROOT = Path(__file__).resolve().parents[2]


def test_json_gives_a_state_and_a_reason_for_every_check(capsys):
    pytest.importorskip("diffusers")
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["can_generate"] is True
    assert found["device"] in ("cuda", "cpu")
    assert found["remedy"] == ""
    names = [check["name"] for check in found["checks"]]
    for name in (
        "Python",
        "driver",
        "fp8 tensor cores",
        "torch",
        "triton",
        "precision auto",
        "attention sdpa_flash",
        "attention kitchen_int8",
        "attention math",
        "comfy-kitchen",
        "ComfyUI",
    ):
        assert name in names
    for check in found["checks"]:
        assert check["state"] in ("usable", "limited", "not usable")
        assert check["reason"]


def test_without_any_package_it_says_what_to_install_and_exits_1():
    # -S leaves site-packages out, where torch and all the others are.
    command = [sys.executable, "-S", str(ROOT), "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["can_generate"] is False
    assert found["device"] is None
    assert found["remedy"].startswith('pip install "torch>=2.4" "diffusers>=0.36" "transformers>=')
    (attention,) = (check for check in found["checks"] if check["name"].startswith("attention"))
    assert (attention["state"], attention["reason"]) == ("not usable", "it needs torch")


def test_a_models_folder_that_is_not_there_is_refused(tmp_path, capsys):
    assert main(["doctor", "--models", str(tmp_path / "none")]) == 2
    message = capsys.readouterr().err
    assert str(tmp_path / "none") in message
    assert "Traceback" not in message


# --- the verdict on ComfyUI's nodes


@pytest.fixture
def machine(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    present = {software.KITCHEN.module}
    find_spec = doctor.find_spec

    def found(module):
        return present if module in present else None if "kitchen" in module else find_spec(module)

    def version(text):
        (tmp_path / "comfyui_version.py").write_text(f'__version__ = "{text}"\n')

    missing = software.Package("qwen-nowhere", "qwen_nowhere", "1.0", "")
    monkeypatch.setattr(software, "STANDALONE", (missing,))
    monkeypatch.setattr(doctor, "find_spec", found)
    monkeypatch.setattr(software, "find_comfyui", lambda: tmp_path)
    version("0.33.0")
    return SimpleNamespace(present=present, version=version, folder=tmp_path)


def verdict(capsys):
    code = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert main(["doctor"]) == code
    table = capsys.readouterr().out
    return code, found, table.rpartition("\n\n")[2].splitlines()


def test_the_nodes_alone_can_run(machine, capsys):
    code, found, lines = verdict(capsys)
    assert code == 0
    assert (found["can_run_nodes"], found["can_generate"], found["device"]) == (True, False, None)
    assert "qwen-nowhere" in found["remedy"]
    assert lines[0] == "The ComfyUI nodes can run here."
    assert lines[1].startswith("`generate` and `demo` cannot run here: pip install ")
    assert "qwen-nowhere" in lines[1]


@pytest.mark.parametrize(
    ("name", "limited"),
    [("comfyui-qwen-image-l40s", False), ("qwen image", True), ("包", True), ("v2.0", True)],
)
def test_a_folder_that_comfyuis_page_cannot_reach_is_told(monkeypatch, name, limited):
    monkeypatch.setattr(software, "_package", lambda: Path("/base/custom_nodes") / name)
    found = software.check_folder()
    assert bool(found) is limited
    assert all(name in it.why.fact and "rename" in it.why.remedy for it in found)
    monkeypatch.setattr(software, "_package", lambda: Path("/home") / name)
    assert software.check_folder() == ()


def test_neither_can_run(machine, capsys, monkeypatch):
    def without_kitchen():
        machine.present.clear()

    def old():
        machine.version("0.32.9")

    def gone():
        monkeypatch.setattr(software, "find_comfyui", lambda: Path("/nowhere"))

    def without_torch():
        missing = State.NOT_USABLE.of("torch", "not installed", 'pip install "torch"')
        monkeypatch.setattr(software, "check_torch", lambda: (missing, None))

    for change in (without_kitchen, old, gone, without_torch):
        machine.present.add(software.KITCHEN.module)
        machine.version("0.33.0")
        monkeypatch.setattr(software, "find_comfyui", lambda: machine.folder)
        change()
        code, found, lines = verdict(capsys)
        assert (code, found["can_run_nodes"], found["can_generate"]) == (1, False, False), change
        assert lines[0].startswith("The ComfyUI nodes cannot run here: "), change
        assert lines[1].startswith("`generate` and `demo` cannot run here: "), change


@pytest.mark.parametrize("nodes", [True, False])
def test_generation_can_run_with_and_without_the_nodes(machine, capsys, monkeypatch, nodes):
    monkeypatch.setattr(software, "STANDALONE", ())
    if not nodes:
        machine.present.clear()
    code, found, lines = verdict(capsys)
    assert (code, found["can_run_nodes"], found["can_generate"]) == (0, nodes, True)
    assert found["remedy"] == ""
    cannot = "cannot run here: run this with ComfyUI's Python."
    assert lines[0] == f"The ComfyUI nodes {'can run here.' if nodes else cannot}"
    assert lines[1].startswith("`generate` and `demo` can run here, on the ")


# --- the files of models


MICRO = ROOT / "models" / "micro"


@pytest.fixture
def models(tmp_path):
    def put(name, part, file="diffusion_pytorch_model.safetensors", size=None):
        path = tmp_path / "模型 models" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((MICRO / part / file).read_bytes()[:size])
        return path

    (tmp_path / "模型 models").mkdir()
    put.folder = tmp_path / "模型 models"
    return put


def parts_of(capsys, folder):
    main(["doctor", "--json", "--models", str(folder)])
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    names = ("Qwen-Image transformer", "Qwen2.5-VL text encoder", "Qwen-Image VAE")
    return [checks[name] for name in names]


def test_missing_files_are_told_with_what_to_do(models, capsys):
    for check, place in zip(
        parts_of(capsys, models.folder), ("diffusion_models", "text_encoders", "vae"), strict=True
    ):
        assert check["state"] == "not usable"
        assert check["reason"] == f"no file in {models.folder / place}"
        assert check["remedy"].startswith(f"download one to models/{place}: ")


def test_a_transformer_in_gguf_is_one_and_of_several_parts_the_first_stands_for_all(models, capsys):
    gguf_files = pytest.importorskip("gguf_files")
    whole = models("diffusion_models/a.safetensors", "transformer")
    gguf_files.gguf_of(whole, whole.with_name("любое Q8_0.gguf"))
    whole.unlink()
    whole.with_name("b-00002-of-00002.gguf").touch()
    transformer, encoder, _ = parts_of(capsys, models.folder)
    assert (transformer["state"], encoder["state"]) == ("usable", "not usable")
    assert transformer["reason"].startswith("любое Q8_0.gguf (") and "b-" not in str(transformer)


def test_files_are_known_by_what_they_hold(models, capsys):
    models("unet/deep/любое имя.safetensors", "transformer")
    for number in range(5):
        models(f"vae/{number}{'x' * 200}.safetensors", "vae")
    models("diffusion_models/a VAE.safetensors", "vae")
    models("text_encoders/qwen.safetensors", "text_encoder", "model.safetensors")
    half = models("text_encoders/qwen half.safetensors", "text_encoder", "model.safetensors", 9999)
    transformer, encoder, vae = parts_of(capsys, models.folder)
    assert (transformer["state"], transformer["remedy"]) == ("usable", "")
    assert transformer["reason"].startswith("любое имя.safetensors (")
    assert vae["reason"].endswith(" MiB), 2 more")
    assert encoder["state"] == "limited"
    assert encoder["reason"].endswith("; refused: qwen half.safetensors")
    assert encoder["remedy"] == f"`qwen-l40s inspect '{half}'` shows the reason"


def test_a_diffusers_folder_holds_every_part(models, capsys):
    (models.folder / "diffusers").mkdir()
    (models.folder / "diffusers" / "micro").symlink_to(MICRO, target_is_directory=True)
    for check in parts_of(capsys, models.folder):
        assert check["reason"].startswith("micro (")
