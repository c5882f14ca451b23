"""How many files a person reads to follow a weight from its file, and a latent through a step: no
more than now.
"""

import narrow_transformer as narrow
import pytest
from comfyui_boot import folder
from traced_files import traced

from qwen_l40s.hosts.comfyui.load.transformer import load_model
from qwen_l40s.hosts.comfyui.sample.optimize import OptimizeSettings, optimize

pytestmark = pytest.mark.usefixtures("inference_mode")


@pytest.fixture(scope="module")
def path():
    return narrow.write(folder("short_ways") / "bf16.safetensors", narrow.weights())


def test_a_weight_from_its_file(path):
    load_model(path, "int8")
    with traced() as files:
        load_model(path, "int8")
    assert 10 < len(files) <= 27, sorted(files)


def test_a_latent_through_a_step(path):
    model = optimize(load_model(path, "int8")[0], OptimizeSettings())
    prompt = [[narrow.random(1, 20, narrow.SHAPE.joint_dim), {}]]
    narrow.sample(model, prompt)
    with traced() as files:
        narrow.sample(model, prompt)
    assert 10 < len(files) <= 32, sorted(files)
