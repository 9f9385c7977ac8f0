"""What device and software this is: against a fake NVML, and this machine's own CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from advisor.errors import AdvisorError, UsageError
from advisor.tuners import environment, host
from advisor.tuners.environment import default_device, detect, device_uuid


class NVMLError(Exception):
    pass


class FakeNvml:
    """The pynvml functions that are used, over plain dicts; a card without a key answers NVMLError.

    Args:
        cards: per card what it answers; 'slices' is a list with None for a gap.
        fails: the functions that no card supports.
    """

    NVMLError = NVMLError
    NVML_CLOCK_SM = 1
    NVML_COMPUTEMODE_DEFAULT = 0

    def __init__(self, *cards: dict[str, Any], fails: tuple[str, ...] = ()) -> None:
        self.cards = cards
        self.fails = fails

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in self.fails:
            return self._refuse
        return super().__getattribute__(name)

    def _refuse(self, *_: object) -> None:
        raise NVMLError("Not Supported")

    def nvmlInit(self) -> None:
        pass

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.95.05"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, n: int) -> dict[str, Any]:
        return self.cards[n]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> dict[str, Any]:
        for card in self.cards:
            parts: list[dict[str, Any]] = [card, *filter(None, card.get("slices", []))]
            for one in parts:
                if one["uuid"] == uuid:
                    return one
        raise NVMLError("Not Found")

    def nvmlDeviceGetMigMode(self, card: dict[str, Any]) -> list[int]:
        if "slices" not in card:
            raise NVMLError("Not Supported")
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, card: dict[str, Any]) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: dict[str, Any], n: int) -> dict[str, Any]:
        found: dict[str, Any] | None = dict(enumerate(card["slices"])).get(n)
        if found is None:
            raise NVMLError("Not Found")
        return found

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, part: dict[str, Any]) -> dict[str, Any]:
        return next(card for card in self.cards if part in card.get("slices", []))

    def nvmlDeviceGetAttributes(self, part: dict[str, Any]) -> SimpleNamespace:
        return SimpleNamespace(multiprocessorCount=part["multiprocessors"])

    def nvmlDeviceGetComputeMode(self, card: dict[str, Any]) -> int:
        return int(card.get("mode", 0))

    def nvmlDeviceGetMemoryInfo(self, card: dict[str, Any]) -> SimpleNamespace:
        return SimpleNamespace(total=card["memory"])

    def nvmlDeviceGetName(self, card: dict[str, Any]) -> str:
        return str(card["name"])

    def nvmlDeviceGetUUID(self, card: dict[str, Any]) -> str:
        return str(card["uuid"])

    def nvmlDeviceGetComputeRunningProcesses(self, card: dict[str, Any]) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid) for pid in card.get("users", [])]

    def nvmlDeviceGetCudaComputeCapability(self, card: dict[str, Any]) -> tuple[int, int]:
        return card["capability"]  # type: ignore[no-any-return]

    def nvmlDeviceGetNumGpuCores(self, card: dict[str, Any]) -> int:
        return int(card["cores"])

    def nvmlDeviceGetEnforcedPowerLimit(self, card: dict[str, Any]) -> int:
        return 700_000

    def nvmlDeviceGetApplicationsClock(self, card: dict[str, Any], clock: int) -> int:
        return int(card["clocks"][0])

    def nvmlDeviceGetDefaultApplicationsClock(self, card: dict[str, Any], clock: int) -> int:
        return int(card["clocks"][1])

    def nvmlDeviceGetMaxClockInfo(self, card: dict[str, Any], clock: int) -> int:
        return int(card["clocks"][2])


def h200(uuid: str = "GPU-aaaa-0", **changed: Any) -> dict[str, Any]:
    return {
        "uuid": uuid,
        "name": "NVIDIA H200",
        "memory": 150_754_820_096,
        "capability": (9, 0),
        "cores": 16896,
        "clocks": (1980, 1980, 1980),
    } | changed


def mig(uuid: str) -> dict[str, Any]:
    name = "NVIDIA H200 MIG 1g.18gb"
    return {"uuid": uuid, "name": name, "memory": 17_179_869_184, "multiprocessors": 16}


Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Makes this machine one with the cards of a FakeNvml and, if given, CUDA_VISIBLE_DEVICES."""

    def forget() -> None:
        detect.cache_clear()
        environment._nvml.cache_clear()

    def make(nvml: FakeNvml, visible: str | None = None) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        forget()

    forget()
    yield make
    forget()


def test_h200_is_described_without_starting_cuda(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(FakeNvml(h200()))

    def context() -> None:
        raise AssertionError("a CUDA context would be created")

    monkeypatch.setattr(torch.cuda, "_lazy_init", context)
    monkeypatch.setattr(torch.cuda, "is_available", context)
    found = detect("cuda:0")
    assert (found.device.kind, found.device.name) == ("cuda", "NVIDIA H200")
    assert (found.device.capability, found.device.multiprocessors) == ("9.0", 132)
    assert (found.device.memory_gib, found.device.mig) == (140, "")
    assert found.software.driver == "580.95.05"
    assert (found.software.power_limit_w, found.software.clock_cap_mhz) == (700, 0)
    assert found.software.cuda == (torch.version.cuda or "")
    assert type(found.software.torch) is str
    assert detect("cuda") == found
    assert device_uuid("cuda:0") == "aaaa-0"


@pytest.mark.skipif(not hasattr(torch._C, "_cudnn"), reason="this torch has no cuDNN")
def test_cudnn_version_is_the_one_that_torch_reports() -> None:
    assert environment._cudnn_version() == str(torch.backends.cudnn.version())


@pytest.mark.parametrize(
    ("capability", "cores", "expected"),
    [((8, 0), 6912, 108), ((7, 0), 5120, 80), ((8, 6), 10752, 84), ((10, 0), 18944, 148)],
)
def test_multiprocessors_of_other_generations(
    machine: Machine, capability: tuple[int, int], cores: int, expected: int
) -> None:
    machine(FakeNvml(h200(capability=capability, cores=cores)))
    assert detect("cuda:0").device.multiprocessors == expected


@pytest.mark.parametrize(
    ("clocks", "cap"),
    [((1980, 1980, 1980), 0), ((1200, 1980, 1980), 1200), ((1095, 1095, 1410), 0)],
)
def test_only_a_clock_that_someone_lowered_is_a_cap(
    machine: Machine, clocks: tuple[int, int, int], cap: int
) -> None:
    machine(FakeNvml(h200(clocks=clocks)))
    assert detect("cuda:0").software.clock_cap_mhz == cap


def test_what_a_card_does_not_tell_is_0(machine: Machine) -> None:
    silent = ("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetApplicationsClock")
    machine(FakeNvml(h200(), fails=silent))
    software = detect("cuda:0").software
    assert (software.power_limit_w, software.clock_cap_mhz) == (0, 0)


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ["aaaa-0", "aabb-1", "cccc-2"]),
        ("2,0", ["cccc-2", "aaaa-0"]),
        ("GPU-cc, GPU-aab", ["cccc-2", "aabb-1"]),
        ("", []),
        ("-1", []),
        ("1,9,0", ["aabb-1"]),
        ("1,x,0", ["aabb-1"]),
        ("GPU-aa", []),
        ("0,0", []),
        ("1gpu", ["aabb-1"]),
        ("MIG-none,0", []),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(
    machine: Machine, visible: str | None, uuids: list[str]
) -> None:
    machine(FakeNvml(*(h200(f"GPU-{u}") for u in ("aaaa-0", "aabb-1", "cccc-2"))), visible)
    assert [device_uuid(f"cuda:{n}") for n in range(len(uuids) + 1)] == [*uuids, ""]
    assert default_device() == ("cuda:0" if uuids else "cpu")


@pytest.mark.parametrize("visible", [None, "0", "1", "GPU-b", "MIG-2", "MIG-2,MIG-3"])
def test_a_process_is_given_one_slice(machine: Machine, visible: str | None) -> None:
    cut = h200("GPU-b", name="NVIDIA H200", slices=[None, mig("MIG-2"), mig("MIG-3")])
    machine(FakeNvml(h200("GPU-a"), cut), visible)
    if visible == "0":
        assert detect("cuda:0").device.multiprocessors == 132
        return
    device = detect("cuda:0").device
    assert (device.name, device.mig) == ("NVIDIA H200", "1g.18gb")
    assert (device.multiprocessors, device.memory_gib) == (16, 16)
    assert device_uuid("cuda:0") == ""
    with pytest.raises(UsageError, match=r"1 CUDA device \(cuda:0\)"):
        detect("cuda:1")


def test_a_card_cut_into_no_slice_is_no_device(machine: Machine) -> None:
    machine(FakeNvml(h200(slices=[])))
    assert default_device() == "cpu"


@pytest.mark.parametrize(("rank", "device"), [("1", "cuda:1"), ("5", "cuda:0"), ("", "cuda:0")])
def test_each_rank_has_its_own_device(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, rank: str, device: str
) -> None:
    monkeypatch.setenv("LOCAL_RANK", rank)
    machine(FakeNvml(h200(), h200("GPU-b")))
    assert default_device() == device


@pytest.mark.parametrize("device", ["tpu", "cuda:-1", "cuda:x", "cuda:", "", "CUDA:0", "cuda:²"])
def test_another_kind_of_device_is_refused(device: str) -> None:
    with pytest.raises(UsageError, match="expected cpu, cuda or cuda:N") as refused:
        detect(device)
    assert repr(device) in str(refused.value)


def test_a_device_that_is_not_there_is_refused_naming_those_that_are(machine: Machine) -> None:
    machine(FakeNvml(h200(), h200("GPU-b")))
    with pytest.raises(UsageError, match=r"'cuda:3'.*2 CUDA devices \(cuda:0, cuda:1\)"):
        detect("cuda:3")
    machine(FakeNvml())
    with pytest.raises(UsageError, match="no CUDA device; use cpu"):
        detect("cuda:0")


def test_torch_without_cuda_says_so(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(FakeNvml(h200()))
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert default_device() == "cpu"
    with pytest.raises(UsageError, match="built without CUDA"):
        detect("cuda:0")


def test_without_nvml_torch_says_whether_there_is_a_device(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(FakeNvml(fails=("nvmlInit",)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert default_device() == "cuda:0"
    assert device_uuid("cuda:0") == ""
    with pytest.raises(AdvisorError, match="does not answer"):
        detect("cuda:0")


def test_an_error_of_nvml_does_not_leak(machine: Machine) -> None:
    machine(FakeNvml(h200(), fails=("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetUUID")))
    with pytest.raises(AdvisorError, match="Not Supported"):
        detect("cuda:0")
    assert device_uuid("cuda:0") == ""


def test_this_cpu() -> None:
    found = detect("cpu")
    assert found.device.kind == "cpu"
    assert found.device.name and found.device.capability
    assert found.device.multiprocessors >= 1
    assert found.device.memory_gib >= 1
    assert (found.software.driver, found.software.cuda, found.software.cudnn) == ("", "", "")
    assert found.software.torch == str(torch.__version__)
    assert detect("cpu") is found
    assert device_uuid("cpu") == ""


@pytest.mark.parametrize(
    ("text", "name", "bf16"),
    [
        ("model name\t: Xeon\nflags\t: avx512_bf16 amx_int8\n", "Xeon", True),
        ("model name\t: Xeon\nflags\t: avx512f avx512_bf16x\n", "Xeon", False),
        ("Features\t: fp asimd bf16\n", None, True),
    ],
)
def test_cpu_model_and_bf16_are_read_from_its_flags(
    monkeypatch: pytest.MonkeyPatch, text: str, name: str | None, bf16: bool
) -> None:
    monkeypatch.setattr(host, "cpu", lambda: text)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    environment.host_cpu.cache_clear()
    assert environment.cpu_has_bf16() is bf16
    assert environment.host_cpu() == name or (name is None and environment.host_cpu())
    environment.host_cpu.cache_clear()


def test_a_cpu_whose_kernels_may_not_use_bf16_has_none() -> None:
    """Recurrent layers raise under bf16 autocast there."""
    code = (
        "from advisor.tuners import environment as e; e.host.cpu = lambda: 'flags: avx512_bf16'; "
        "print(e.bf16_notice('cpu', ('default', 'bf16'))); print(e.bf16_notice('cpu', ('tf32',)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "bf16 is not tried: this CPU has no bf16 kernels\n\n", done.stderr


@pytest.mark.gpu
def test_what_nvml_says_is_what_torch_says() -> None:
    found = detect("cuda:0")
    properties: Any = torch.cuda.get_device_properties(0)
    assert found.device.name == properties.name
    assert found.device.multiprocessors == properties.multi_processor_count
    assert found.device.capability == f"{properties.major}.{properties.minor}"
    assert device_uuid("cuda:0") == str(properties.uuid)


def test_gpus_say_who_computes_on_them(machine: Machine) -> None:
    cut = h200("GPU-c", slices=[mig("MIG-1")])
    machine(FakeNvml(cut, fails=("nvmlDeviceGetComputeRunningProcesses",)))
    name = "NVIDIA H200 MIG 1g.18gb"
    assert environment.gpus() == [environment.Gpu(uuid="MIG-1", name=name, users=())]
    machine(FakeNvml(h200("GPU-a", users=[os.getpid(), 2**22 + 1]), h200("GPU-b", users=[])))
    one, other = environment.gpus()
    assert (one.uuid, one.name, one.users) == ("GPU-a", "NVIDIA H200", (os.getpid(), 2**22 + 1))
    assert one.used_by.startswith(f"{os.getpid()} (") and one.used_by.endswith(f", {2**22 + 1}")
    assert other.used_by == ""
