"""What is said of cards, drivers and tensor cores, on machines that this test is not on."""

import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest

from qwen_l40s.caches import forget
from qwen_l40s.machine import card as hardware
from qwen_l40s.machine.card import InstalledCard, InstalledCards, State
from qwen_l40s.spec.formats import GIB, MIB

L40S = InstalledCard("NVIDIA L40S", (8, 9), 46068 * MIB, "aa-bb", True, 350)


@pytest.fixture
def driver(monkeypatch):
    """Stands in for NVML's library; gives the function that sets the cards it knows."""

    def knows(*cards, fails=()):
        def into(answer, value):
            answer[: len(value)] = value
            return 0

        def tell(name, values):
            def asked(handle, *answers):
                if f"nvmlDeviceGet{name}" in fails:
                    return 3  # NVML_ERROR_NOT_SUPPORTED
                values_of = values(cards[handle.value - 1])
                return sum(map(into, answers, values_of))

            return asked

        told = {
            "Name": lambda card: [card.name.encode()],
            "CudaComputeCapability": lambda card: [[number] for number in card.sm],
            "MemoryInfo": lambda card: [[card.memory_bytes]],
            "UUID": lambda card: [f"GPU-{card.uuid}".encode()],
            "EccMode": lambda card: [[card.ecc], [True]],
            "PowerManagementLimit": lambda card: [[1000 * card.limit_watts]],
        }
        library = SimpleNamespace(
            nvmlInit_v2=lambda: 0 if cards else 9,  # NVML_ERROR_DRIVER_NOT_LOADED
            nvmlSystemGetDriverVersion=lambda answer, length: into(answer, b"550.54.15"),
            nvmlDeviceGetCount_v2=lambda answer: into(answer, [len(cards)]),
            nvmlDeviceGetHandleByIndex_v2=lambda index, answer: into(answer, [index + 1]),
            **{f"nvmlDeviceGet{name}": tell(name, values) for name, values in told.items()},
        )
        monkeypatch.setattr(hardware.ctypes, "CDLL", lambda name: library)

    return knows


def cuda_torch(cards=(L40S,), *, version="2.11.0+cu130", cuda="13.0", warn=None, fail=None):
    """What the checks ask of a torch built for CUDA, on a machine that this test is not on."""

    def is_available():
        if warn:
            warnings.warn(warn, UserWarning, stacklevel=1)
        return bool(cards)

    def properties(index):
        if fail:
            raise RuntimeError(fail)
        card = cards[index]
        major, minor = card.sm
        return SimpleNamespace(
            name=card.name, major=major, minor=minor, total_memory=card.memory_bytes, uuid=card.uuid
        )

    return SimpleNamespace(
        __version__=version,
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(
            is_available=is_available,
            device_count=lambda: len(cards),
            get_device_properties=properties,
        ),
    )


@pytest.mark.parametrize(
    ("sm", "usable"),
    [
        ((7, 5), []),
        ((8, 0), ["int8", "bf16"]),
        ((8, 6), ["int8", "bf16"]),
        ((8, 9), ["fp8", "int8", "bf16"]),
        ((12, 0), ["fp8", "int8", "bf16"]),
    ],
)
def test_tensor_cores_follow_the_compute_capability(sm, usable):
    found = hardware.tensor_cores(InstalledCard("card", sm, 48 * GIB))
    assert [check.name.split()[0] for check in found if check.usable] == usable
    assert all(f"sm_{sm[0]}{sm[1]}" in check.why.fact for check in found)
    assert not any(check.usable for check in hardware.tensor_cores(None))


def test_cards_come_from_torch_and_their_ecc_from_the_driver(driver):
    driver(L40S)
    cards = hardware.read_cards(cuda_torch())
    assert cards == InstalledCards(usable=(L40S,), driver="550.54.15")
    assert str(cards.usable[0]) == "NVIDIA L40S, sm_89, 46068 MiB (45.0 GiB) visible, ECC on"


def test_a_card_is_named_even_when_torch_is_missing_or_a_cpu_build(driver):
    driver(L40S)
    missing = hardware.read_cards(None)
    assert (missing.usable, missing.driver) == ((), "550.54.15")
    assert "NVIDIA L40S" in missing.why.fact
    assert "torch is missing" in missing.why.fact
    cpu = hardware.read_cards(cuda_torch(version="2.13.0+cpu", cuda=None))
    assert cpu.usable == ()
    assert "2.13.0+cpu is built without CUDA" in cpu.why.fact
    assert cpu.why.remedy


def test_what_torch_says_of_the_driver_or_the_card_is_the_reason(driver):
    driver(L40S)
    old = hardware.read_cards(cuda_torch((), warn="CUDA initialization: driver too old\nmore"))
    assert old.usable == ()
    assert old.why.fact.endswith("CUDA initialization: driver too old")
    held = hardware.read_cards(cuda_torch(fail="CUDA error: out of memory\nmore"))
    assert held.usable == ()
    assert held.why.fact.endswith("CUDA error: out of memory")
    unsupported = hardware.read_cards(cuda_torch(warn="no kernels for this card"))
    assert unsupported.usable == (L40S,)
    assert unsupported.why.fact == "no kernels for this card"


@pytest.mark.parametrize("fails", [(), ("nvmlDeviceGetPowerManagementLimit",)])
def test_the_power_limit_of_a_card_is_the_drivers(driver, fails):
    driver(L40S, fails=fails)
    forget()
    assert hardware.power_limit("NVIDIA L40S") == (0 if fails else 350)
    assert hardware.power_limit("NVIDIA L4") == 0
    forget()


def test_a_card_that_tells_little_is_listed_with_that(driver):
    driver(L40S, fails=("nvmlDeviceGetEccMode", "nvmlDeviceGetMemoryInfo"))
    assert hardware.ask_driver()[1] == (replace(L40S, ecc=None, memory_bytes=0),)


def test_a_driver_that_fails_and_a_machine_without_one_list_no_card(driver, monkeypatch):
    driver()
    assert hardware.ask_driver() == ("", ())

    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(hardware.ctypes, "CDLL", missing)
    cards = hardware.read_cards(None)
    assert cards.usable == ()
    assert cards.why.fact == "no NVIDIA driver answers"


@pytest.mark.parametrize(
    ("cards", "cuda", "state"),
    [
        (InstalledCards(), "13.0", State.NOT_USABLE),
        (InstalledCards(usable=(L40S,), driver="550.54"), "13.0", State.USABLE),
        (InstalledCards(driver="550.54"), "13.0", State.NOT_USABLE),
        (InstalledCards(driver="550.54"), "12.8", State.USABLE),
        (InstalledCards(driver="550.54"), None, State.USABLE),
        (InstalledCards(usable=(L40S,)), "12.8", State.USABLE),
    ],
)
def test_the_driver_must_serve_the_cuda_of_torch(cards, cuda, state):
    check = hardware.driver_capability(cards, cuda)
    assert check.state is state
    assert check.why.fact
    assert bool(check.why.remedy) is (state is State.NOT_USABLE)


@pytest.mark.cuda
def test_the_real_card_is_read():
    torch = pytest.importorskip("torch")
    cards = hardware.read_cards(torch)
    assert cards.usable[0].name == torch.cuda.get_device_name(0)
    assert cards.usable[0].sm == torch.cuda.get_device_capability(0)
    assert cards.usable[0].memory_bytes > GIB
    assert cards.driver
