"""Writing a safetensors file tensor by tensor, read back by the reference implementation."""

import pytest
import torch
from safetensors import safe_open

from qwen_l40s.errors import UnavailableError
from qwen_l40s.loaders.header import DTYPE_BITS, read_header
from qwen_l40s.loaders.writer import SAFETENSORS_DTYPES, SafetensorsLayout, write_safetensors

NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
TENSORS = {
    "a": torch.arange(7, dtype=torch.uint8),
    "b": torch.randn(3, 5).bfloat16(),
    "c": torch.tensor([True, False, True]),
    "d": torch.tensor(0.25),
    "e": torch.empty(0),
    "f": torch.randn(4, 3).T,  # not contiguous
    "g": torch.arange(3),
    "ü": torch.randn(9).to(torch.float8_e4m3fn),
}


def layout():
    specs = {name: (NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in TENSORS.items()}
    return SafetensorsLayout(specs, {"title": "Größe"})


def write(path, tensors):
    with write_safetensors(path, layout()) as file:
        for name, tensor in tensors.items():
            file.write(name, tensor)


def test_the_reference_implementation_reads_it_back(tmp_path):
    path = tmp_path / "x.safetensors"
    write(path, dict(reversed(TENSORS.items())))
    assert path.stat().st_size == layout().file_bytes
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(TENSORS)
        assert file.metadata() == {"title": "Größe"}
        for name, tensor in TENSORS.items():
            found = file.get_tensor(name)
            assert found.dtype == tensor.dtype
            assert torch.equal(found.double(), tensor.double())


def test_every_tensor_lies_at_a_multiple_of_its_item_size(tmp_path):
    """Readers map the file."""
    path = tmp_path / "x.safetensors"
    write(path, TENSORS)
    header = read_header(path)
    assert header.data_start % 8 == 0
    assert {info.start % (DTYPE_BITS[info.dtype] // 8) for info in header.tensors.values()} == {0}


@pytest.mark.parametrize("old", [None, "precious"])
@pytest.mark.parametrize(
    ("tensors", "rule"),
    [
        ({name: TENSORS[name] for name in "abcd"}, "was not written"),
        (TENSORS | {"b": TENSORS["b"].float()}, "b is torch.float32"),
        (TENSORS | {"b": TENSORS["b"][:2]}, "b is torch.bfloat16"),
    ],
)
def test_a_file_that_is_not_whole_does_not_appear(tmp_path, tensors, rule, old):
    path = tmp_path / "x.safetensors"
    if old:
        path.write_text(old)
    with pytest.raises(ValueError, match=rule):
        write(path, tensors)
    assert [file.read_text() for file in tmp_path.iterdir()] == ([old] if old else [])


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(UnavailableError, match="create the folder"):
        write(tmp_path / "no" / "x.safetensors", TENSORS)
