"""Describes the cards of this machine and what their tensor cores can do, each with the reason: by
torch, which decides which cards a run can see, and by NVIDIA's driver.
"""

from __future__ import annotations

import ctypes
import enum
import logging
import sys
import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ..caches import cached
from ..spec.formats import FORMATS, GIB, MIB, OLDEST_BF16, CardFacts
from ..verdict import Verdict, first_line

logger = logging.getLogger(__name__)

# The oldest driver that runs a CUDA major version: NVIDIA, "CUDA Compatibility", minor versions.
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}

# name, oldest compute capability, what holds below it
TENSOR_CORES = (
    ("fp8 tensor cores", FORMATS["fp8"].oldest, "fp8 weights save memory there, not time"),
    ("int8 tensor cores", FORMATS["int8"].oldest, "int8 weights save memory there, not time"),
    ("bf16 tensor cores", OLDEST_BF16, "ComfyUI computes in fp32 there, which is slow"),
)


class State(str, enum.Enum):
    USABLE = "usable"
    LIMITED = "limited"
    NOT_USABLE = "not usable"

    def of(self, name: str, fact: str, remedy: str = "") -> Capability:
        return Capability(name, self, Verdict(fact, remedy=remedy))


@dataclass(frozen=True)
class Capability:
    """One thing that the machine or its software can or cannot do."""

    name: str  # a table's row label
    state: State
    why: Verdict  # the restriction of `State.LIMITED`; of `State.USABLE` what it is

    @property
    def usable(self) -> bool:
        return self.state is not State.NOT_USABLE


@dataclass(frozen=True)
class InstalledCard:
    name: str  # as the driver calls it, such as "NVIDIA L40S"
    sm: tuple[int, int]  # compute capability, (8, 9) on an L40S
    # What programs can allocate together. ECC has taken its share already: of an L40S's 48 GiB,
    # 45,373 MiB.
    memory_bytes: int
    uuid: str = ""  # the driver's, without "GPU-"; empty when torch is too old to tell
    ecc: bool | None = None  # whether error correction is on; None when unknown or absent
    limit_watts: int = 0  # the power limit that is set; 0 when unknown

    def facts(self, no_int8: str = "") -> CardFacts:
        return CardFacts(self.name, self.memory_bytes, self.sm, self.limit_watts, no_int8)

    def __str__(self) -> str:
        ecc = {True: ", ECC on", False: ", ECC off", None: ""}[self.ecc]
        memory = f"{self.memory_bytes // MIB} MiB ({self.memory_bytes / GIB:.1f} GiB) visible"
        return f"{self.name}, sm_{self.sm[0]}{self.sm[1]}, {memory}{ecc}"


NOTHING = Verdict("")


@dataclass(frozen=True)
class InstalledCards:
    """The cards a run can use and, when there are none, the reason."""

    usable: tuple[InstalledCard, ...] = ()  # in torch's order
    driver: str = ""  # the NVIDIA driver's version; empty when no driver answers
    why: Verdict = NOTHING  # why `usable` is empty; else torch's warnings, such as of kernels


def read_cards(torch: ModuleType | None) -> InstalledCards:
    """Asks the driver for the cards, then torch, which is None when not installed or broken."""
    driver, listed = ask_driver()
    if torch is None:
        reason = "torch is missing" if listed else "no NVIDIA driver answers"
        remedy = "install torch" if listed else ""
        return InstalledCards(driver=driver, why=_none(listed, reason, remedy))
    if torch.version.cuda is None:
        if not listed:
            return InstalledCards(why=Verdict("no NVIDIA driver answers and torch is a CPU build"))
        remedy = "install a torch built for CUDA (https://pytorch.org/get-started/locally)"
        reason = f"torch {torch.__version__} is built without CUDA"
        return InstalledCards(driver=driver, why=_none(listed, reason, remedy))
    return _ask_torch(torch, driver, listed)


def tensor_cores(card: InstalledCard | None) -> tuple[Capability, ...]:
    """Says what the card's tensor cores multiply; everything is NOT_USABLE without a card."""
    found = []
    for name, (major, minor), loss in TENSOR_CORES:
        state, reason = State.NOT_USABLE, "there is no usable GPU"
        if card is not None:
            reason = f"sm_{card.sm[0]}{card.sm[1]}, needs sm_{major}{minor} or newer"
            if card.sm >= (major, minor):
                state = State.USABLE
            else:
                reason += f": {loss}"
        found.append(state.of(name, reason))
    return tuple(found)


def driver_capability(cards: InstalledCards, cuda: str | None) -> Capability:
    """Checks whether the driver serves `torch.version.cuda`; None for a CPU build or no torch."""
    if not cards.driver and cards.usable:
        reason = "torch reaches the GPU; pynvml, which reads the driver's version, is not installed"
        return State.USABLE.of("driver", reason)
    if not cards.driver:
        remedy = "on a machine with an NVIDIA GPU, install its driver"
        return State.NOT_USABLE.of("driver", "no NVIDIA driver answers", remedy)
    oldest = OLDEST_DRIVER.get(int(cuda.split(".")[0])) if cuda else None
    if oldest is None or cards.usable or int(cards.driver.split(".")[0]) >= oldest:
        # torch's word counts: NVIDIA's cuda-compat package runs newer CUDA on an older driver.
        return State.USABLE.of("driver", cards.driver)
    reason = f"{cards.driver}: CUDA {cuda} of this torch needs {oldest} or newer"
    remedy = "update the driver or install a torch built for an older CUDA"
    return State.NOT_USABLE.of("driver", reason, remedy)


def _ask_torch(torch: Any, driver: str, listed: tuple[InstalledCard, ...]) -> InstalledCards:
    told = {card.uuid: (card.ecc, card.limit_watts) for card in listed}
    cards = []
    # torch tells in a warning what is wrong with a driver, such as its age, and counts no cards.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if torch.cuda.is_available():
                for index in range(torch.cuda.device_count()):
                    properties = torch.cuda.get_device_properties(index)
                    uuid = str(getattr(properties, "uuid", ""))
                    sm = (properties.major, properties.minor)
                    cards.append(
                        InstalledCard(
                            properties.name,
                            sm,
                            properties.total_memory,
                            uuid,
                            *told.get(uuid, (None, 0)),
                        )
                    )
        except RuntimeError as error:  # the card is out of memory, or has failed
            reason, remedy = first_line(error), "free the GPU or restart the machine"
            return InstalledCards(driver=driver, why=_none(listed, reason, remedy))
    warned = [first_line(entry.message) for entry in caught if entry.category is UserWarning]
    if cards:
        remedy = "install a torch that supports the GPU" if warned else ""
        return InstalledCards(tuple(cards), driver, Verdict("; ".join(warned), remedy=remedy))
    if not listed and not warned:
        return InstalledCards(driver=driver, why=Verdict("no NVIDIA driver answers"))
    reason = warned[0] if warned else "torch does not see the GPU"
    remedy = "check CUDA_VISIBLE_DEVICES and the driver"
    return InstalledCards(driver=driver, why=_none(listed, reason, remedy))


def ask_driver() -> tuple[str, tuple[InstalledCard, ...]]:
    """Asks NVIDIA's driver, by NVML, for its version and its cards, also those that this process
    may not see; ("", ()) without a driver. What a card does not tell is left out.
    """
    try:
        nvml = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
    except OSError:
        return "", ()
    version, count = _text(), _number()
    failed = nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(version, len(version))
    failed = failed or nvml.nvmlDeviceGetCount_v2(count)
    if failed:
        logger.info("NVIDIA's driver does not answer: NVML's error %d", failed)
        return "", ()
    return version.value.decode(), tuple(_told_card(nvml, index) for index in range(count[0]))


def _told_card(nvml: Any, index: int) -> InstalledCard:
    # NVML answers in arrays, with 0 where it could; a lost card has no handle, which it refuses.
    handle = (ctypes.c_void_p * 1)()
    nvml.nvmlDeviceGetHandleByIndex_v2(index, handle)

    def asked(name: str, *into: Any) -> bool:
        return getattr(nvml, f"nvmlDeviceGet{name}")(ctypes.c_void_p(handle[0]), *into) == 0

    name, uuid, memory = _text(), _text(), (ctypes.c_ulonglong * 3)()  # total, free, used
    major, minor, ecc, after_restart, milliwatts = (_number() for _ in range(5))
    asked("Name", name, len(name))
    asked("CudaComputeCapability", major, minor)
    asked("MemoryInfo", memory)
    asked("UUID", uuid, len(uuid))
    asked("PowerManagementLimit", milliwatts)
    return InstalledCard(
        name.value.decode() or "NVIDIA card",
        (major[0], minor[0]),
        memory[0],
        uuid.value.decode().removeprefix("GPU-"),
        bool(ecc[0]) if asked("EccMode", ecc, after_restart) else None,
        milliwatts[0] // 1000,
    )


def _text() -> Any:
    return ctypes.create_string_buffer(96)  # NVML's longest name, version and UUID


def _number() -> Any:
    return (ctypes.c_uint * 1)()


@cached
def power_limit(name: str) -> int:
    """Asks the driver, once, for the watts that a card of that name may take; 0 when unknown."""
    return next((card.limit_watts for card in ask_driver()[1] if card.name == name), 0)


def _none(listed: tuple[InstalledCard, ...], reason: str, remedy: str) -> Verdict:
    return Verdict(f"{'; '.join(map(str, listed))}: {reason}" if listed else reason, remedy=remedy)
