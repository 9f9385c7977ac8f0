"""Facts about the device, the software and the host's limits for loader workers, from a fake NVML
and from this machine; and cached facts about torch that save its import."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from advisor.errors import AdvisorError, UsageError
from advisor.tuners import environment, host, torch_facts, worker_limits
from advisor.tuners.environment import default_device, detect, device_uuid
from tests import forks


class NVMLError(Exception):
    pass


def refuse(*_: object) -> Any:
    raise NVMLError("Not Supported")


Card = dict[str, Any]
GETTERS: dict[str, Callable[..., Any]] = {
    "MigMode": lambda card: [1, 1] if "slices" in card else refuse(),
    "MaxMigDeviceCount": lambda card: 7,
    "MigDeviceHandleByIndex": lambda card, n: dict(enumerate(card["slices"])).get(n) or refuse(),
    "Attributes": lambda part: SimpleNamespace(multiprocessorCount=part["multiprocessors"]),
    "MemoryInfo": lambda card: SimpleNamespace(total=card["memory"]),
    "Name": lambda card: card["name"],
    "UUID": lambda card: card["uuid"],
    "ComputeRunningProcesses": lambda card: [SimpleNamespace(pid=p) for p in card.get("users", ())],
    "CudaComputeCapability": lambda card: card["capability"],
    "NumGpuCores": lambda card: card["cores"],
    "EnforcedPowerLimit": lambda card: 700_000,
    "ApplicationsClock": lambda card, _clock: card["clocks"][0],
    "DefaultApplicationsClock": lambda card, _clock: card["clocks"][1],
    "MaxClockInfo": lambda card, _clock: card["clocks"][2],
    "TotalEnergyConsumption": lambda card: card["millijoules"],
}
"""The nvmlDeviceGet... functions, by the rest of their names, for a card or a MIG slice."""


class FakeNvml:
    """The pynvml functions that advisor uses, for cards given as dicts.

    Args:
        cards: the values of each card; 'slices' is a list with None for a gap.
        fails: names of functions that no card supports.
    """

    __spec__ = None  # Python 3.13 reads it on import
    NVMLError = NVMLError
    NVML_CLOCK_SM = 1
    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0

    def __init__(self, *cards: Card, fails: tuple[str, ...] = ()) -> None:
        self.cards, self.fails = cards, fails

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in self.fails:
            return refuse
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        return GETTERS[name.removeprefix("nvmlDeviceGet")]

    def nvmlInit(self) -> None:
        pass

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.95.05"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetP2PStatus(self, one: Card, other: Card, index: int) -> int:
        assert index == self.NVML_P2P_CAPS_INDEX_NVLINK
        return 0 if one["bridge"] == other["bridge"] else 5

    def nvmlDeviceGetHandleByIndex(self, n: int) -> Card:
        return self.cards[n]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Card:
        parts = [p for card in self.cards for p in (card, *card.get("slices", ())) if p]
        return next((part for part in parts if part["uuid"] == uuid), None) or refuse()

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, part: Card) -> Card:
        return next(card for card in self.cards if part in card.get("slices", []))


def h200(uuid: str = "GPU-aaaa-0", **changed: Any) -> Card:
    card = {"uuid": uuid, "name": "NVIDIA H200", "memory": 150_754_820_096}
    return card | {"capability": (9, 0), "cores": 16896, "clocks": (1980, 1980, 1980)} | changed


def mig(uuid: str) -> Card:
    name = "NVIDIA H200 MIG 1g.18gb"
    return {"uuid": uuid, "name": name, "memory": 17_179_869_184, "multiprocessors": 16}


Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Return a function that installs a FakeNvml and sets CUDA_VISIBLE_DEVICES, if given."""

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


@pytest.mark.parametrize(
    ("changed", "multiprocessors", "cap"),
    [
        ({}, 132, 0),
        ({"capability": (8, 0), "cores": 6912}, 108, 0),
        ({"capability": (8, 6), "cores": 10752}, 84, 0),
        ({"capability": (10, 0), "cores": 18944}, 148, 0),
        ({"clocks": (1200, 1980, 1980)}, 132, 1200),
        ({"clocks": (1095, 1095, 1410)}, 132, 0),
    ],
)
def test_detect_reads_card_facts_without_initializing_cuda(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, changed: Card, multiprocessors: int, cap: int
) -> None:
    machine(FakeNvml(h200(**changed)))
    for name in ("_lazy_init", "is_available"):  # calling None raises
        monkeypatch.setattr(torch.cuda, name, None)
    detected = detect("cuda:0")
    card, software = detected.device, detected.software
    assert (card.kind, card.name, card.memory_gib, card.mig) == ("cuda", "NVIDIA H200", 140, "")
    assert card.capability == ".".join(map(str, changed.get("capability", (9, 0))))
    assert (card.multiprocessors, software.clock_cap_mhz) == (multiprocessors, cap)
    assert (software.driver, software.power_limit_w) == ("580.95.05", 700)
    assert software.cuda == (torch.version.cuda or "") and type(software.torch) is str
    assert detect("cuda") == detected and device_uuid("cuda:0") == "aaaa-0"


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ["aaaa-0", "aabb-1", "cccc-2"]),
        ("2,0", ["cccc-2", "aaaa-0"]),
        ("GPU-cc, GPU-aab", ["cccc-2", "aabb-1"]),
        ("-1", []),
        ("1,9,0", ["aabb-1"]),
        ("GPU-aa", []),
        ("0,0", []),
        ("1gpu", ["aabb-1"]),
        ("MIG-none,0", []),
    ],
)
def test_visible_gpus_are_detected(machine: Machine, visible: str | None, uuids: list[str]) -> None:
    machine(FakeNvml(*(h200(f"GPU-{u}") for u in ("aaaa-0", "aabb-1", "cccc-2"))), visible)
    assert [device_uuid(f"cuda:{n}") for n in range(len(uuids) + 1)] == [*uuids, ""]
    assert default_device() == ("cuda:0" if uuids else "cpu")


@pytest.mark.parametrize("visible", [None, "0", "1", "GPU-b", "MIG-2", "MIG-2,MIG-3"])
def test_process_sees_one_mig_slice(machine: Machine, visible: str | None) -> None:
    sliced = h200("GPU-b", name="NVIDIA H200", slices=[None, mig("MIG-2"), mig("MIG-3")])
    machine(FakeNvml(h200("GPU-a"), sliced), visible)
    if visible == "0":
        assert detect("cuda:0").device.multiprocessors == 132
        return
    device = detect("cuda:0").device
    assert (device.name, device.mig) == ("NVIDIA H200", "1g.18gb")
    assert (device.multiprocessors, device.memory_gib) == (16, 16)
    assert device_uuid("cuda:0") == ""
    with pytest.raises(UsageError, match=r"1 CUDA device \(cuda:0\)"):
        detect("cuda:1")


def test_each_rank_has_its_own_device(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(FakeNvml(h200(), h200("GPU-b")))
    for rank, device in (("1", "cuda:1"), ("5", "cuda:0"), ("", "cuda:0")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert default_device() == device


KINDS = "expected cpu, cuda or cuda:N"


@pytest.mark.parametrize(
    ("cards", "device", "message"),
    [
        *((0, one, KINDS) for one in ("tpu", "cuda:-1", "cuda:x", "cuda:", "", "CUDA:0", "cuda:²")),
        (2, "cuda:3", r"2 CUDA devices \(cuda:0, cuda:1\)"),
        (0, "cuda:0", "no CUDA device; use cpu"),
    ],
)
def test_invalid_device_is_refused(machine: Machine, cards: int, device: str, message: str) -> None:
    machine(FakeNvml(*(h200(f"GPU-{n}") for n in range(cards))))
    with pytest.raises(UsageError, match=message) as refused:
        detect(device)
    assert repr(device) in str(refused.value)


def test_only_required_nvml_values_raise(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(FakeNvml(h200(slices=[])))  # MIG mode without slices
    assert default_device() == "cpu"
    unsupported = ("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetApplicationsClock")
    machine(FakeNvml(h200(), fails=unsupported))
    software = detect("cuda:0").software
    assert (software.power_limit_w, software.clock_cap_mhz) == (0, 0)
    machine(FakeNvml(h200(), fails=("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetUUID")))
    with pytest.raises(AdvisorError, match="Not Supported"):
        detect("cuda:0")
    assert device_uuid("cuda:0") == ""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert default_device() == "cpu"
    detect.cache_clear()
    with pytest.raises(UsageError, match="built without CUDA"):
        detect("cuda:0")


def test_energy_is_that_of_a_whole_card(machine: Machine) -> None:
    machine(FakeNvml(h200(millijoules=2500)))
    assert environment.energy_j("cuda:0") == 2.5
    assert environment.energy_j("cuda:1") == environment.energy_j("cpu") == 0.0
    machine(FakeNvml(h200(millijoules=2500), fails=("nvmlDeviceGetTotalEnergyConsumption",)))
    assert environment.energy_j("cuda:0") == 0.0


def test_torch_counts_gpus_without_nvml(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(FakeNvml(fails=("nvmlInit",)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert default_device() == "cuda:0"
    assert device_uuid("cuda:0") == ""
    with pytest.raises(AdvisorError, match="does not answer"):
        detect("cuda:0")


def test_detect_describes_this_cpu() -> None:
    facts = detect("cpu")
    assert facts.device.kind == "cpu" and facts.device.name and facts.device.capability
    assert facts.device.multiprocessors >= 1 and facts.device.memory_gib >= 1
    assert (facts.software.driver, facts.software.cuda, facts.software.cudnn) == ("", "", "")
    assert detect("cpu") is facts and device_uuid("cpu") == ""


@pytest.mark.parametrize(
    ("text", "name", "bf16"),
    [
        ("model name\t: Xeon\nflags\t: avx512_bf16 amx_int8\n", "Xeon", True),
        ("model name\t: Xeon\nflags\t: avx512f avx512_bf16x\n", "Xeon", False),
        ("Features\t: fp asimd bf16\n", None, True),
    ],
)
def test_cpu_model_and_bf16_are_read_from_cpuinfo(
    monkeypatch: pytest.MonkeyPatch, text: str, name: str | None, bf16: bool
) -> None:
    monkeypatch.setattr(host, "cpu", lambda: text)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    environment.host_cpu.cache_clear()
    assert environment.cpu_has_bf16() is bf16
    assert environment.host_cpu() == name or (name is None and environment.host_cpu())
    environment.host_cpu.cache_clear()
    # Without bf16 kernels, bf16 is not tried: recurrent layers raise under bf16 autocast.
    monkeypatch.setattr(environment, "fact", lambda name, _ask: name != "bf16")
    notices = [environment.bf16_notice("cpu", ("default", name)) for name in ("bf16", "tf32")]
    assert notices == ["bf16 is not tried: this CPU has no bf16 kernels", ""]


@pytest.mark.gpu
def test_nvml_and_torch_agree() -> None:
    device = detect("cuda:0").device
    properties: Any = torch.cuda.get_device_properties(0)
    assert device.name == properties.name
    assert device.multiprocessors == properties.multi_processor_count
    assert device.capability == f"{properties.major}.{properties.minor}"
    assert device_uuid("cuda:0") == str(properties.uuid)


def test_gpus_list_their_processes(machine: Machine) -> None:
    sliced = h200("GPU-c", slices=[mig("MIG-1")])
    machine(FakeNvml(sliced, fails=("nvmlDeviceGetComputeRunningProcesses",)))
    name = "NVIDIA H200 MIG 1g.18gb"
    assert environment.gpus() == [environment.Gpu(uuid="MIG-1", name=name, users=())]
    machine(FakeNvml(h200("GPU-a", users=[os.getpid(), 2**22 + 1]), h200("GPU-b", users=[])))
    one, other = environment.gpus()
    assert (one.uuid, one.name, one.users) == ("GPU-a", "NVIDIA H200", (os.getpid(), 2**22 + 1))
    assert one.used_by.startswith(f"{os.getpid()} (") and one.used_by.endswith(f", {2**22 + 1}")
    assert other.used_by == ""


@pytest.mark.parametrize(
    ("bridges", "visible", "variables", "said"),
    [
        ("aa", None, {}, "2 per host, NVLink"),
        ("ab", None, {}, "2 per host, PCIe"),
        ("aabb", None, {"LOCAL_WORLD_SIZE": "2"}, "2 per host, NVLink, network"),
        ("aabb", None, {}, "4 per host, NVLink and PCIe"),
        ("abab", "0,2,1,3", {"LOCAL_WORLD_SIZE": "2"}, "2 per host, NVLink, network"),
        ("aaaa", "0", {}, "4 per host, NVLink"),  # each rank sees one GPU
        ("aaaa", None, {"LOCAL_WORLD_SIZE": "1"}, "1 per host, network"),
        ("aa", None, {"NCCL_P2P_DISABLE": "1"}, "2 per host, host memory"),
    ],
)
def test_interconnect_of_a_job(
    bridges: str,
    visible: str | None,
    variables: dict[str, str],
    said: str,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(FakeNvml(*(h200(f"GPU-{n}", bridge=one) for n, one in enumerate(bridges))), visible)
    for name in ("LOCAL_WORLD_SIZE", "NCCL_P2P_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ranks = 2 if len(bridges) == 2 else 4
    assert environment.interconnect("cuda:0", ranks) == said
    assert environment.interconnect("cuda:0", 1) == ""
    assert environment.interconnect("cpu", ranks).split(", ")[0] == said.split(", ")[0]


def test_an_interconnect_that_nvml_hides_is_left_out(machine: Machine) -> None:
    machine(FakeNvml(h200(), h200("GPU-b"), fails=("nvmlDeviceGetP2PStatus",)))
    assert environment.interconnect("cuda:0", 2) == "2 per host"


def test_workers_are_limited_by_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 2**20 < host.own_bytes() < 2**40
    monkeypatch.setattr(host, "free_bytes", lambda: 2**50)
    for cores in (1, 2, 9):
        monkeypatch.setattr(host, "cores", lambda cores=cores: cores)
        assert worker_limits.workers(0) == cores
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert (worker_limits.workers(0), worker_limits.cores()) == (4, 4)
    monkeypatch.setattr(host, "shared_bytes", lambda: (12 * 2**20, 0))
    assert [worker_limits.workers(size) for size in (2**18, 2**19, 2**20, 2**24)] == [4, 2, 1, 0]
    monkeypatch.setattr(host, "own_bytes", lambda: 2**30)
    for free, expected in ((2**40, 4), (16 * 2**30, 4), (15 * 2**30, 2), (2**30, 0)):
        monkeypatch.setattr(host, "free_bytes", lambda free=free: free)
        assert worker_limits.workers(0) == expected


INACTIVE = "inactive_file 3000"
V1_MEMORY = {"/a/memory.limit_in_bytes": 2**63 - 4096, "/a/memory.usage_in_bytes": 5000}
V1_USED = {"/a/b/memory.limit_in_bytes": 9000, "/a/b/memory.usage_in_bytes": 8000}
V2_USED = {"/a/b/memory.max": 9000, "/a/b/memory.current": 8000}
QUOTA = "cpu.cfs_quota_us"
PERIOD = dict.fromkeys(["/a/cpu.cfs_period_us", "/a/b/cpu.cfs_period_us"], 100000)


@pytest.mark.parametrize(
    ("read", "group", "files", "limit"),
    [
        (host.cores, "0:", {"/a/b/cpu.max": "max 100000"}, None),
        (host.cores, "0:", {"/a/cpu.max": "150000 100000"}, 1),
        (host.cores, "3:cpu,cpuacct", {f"/a/b/{QUOTA}": -1, **PERIOD}, None),
        (host.cores, "3:cpu,cpuacct", {f"/a/{QUOTA}": 150000, **PERIOD}, 1),
        (host.memory_limit, "0:", {"/a/memory.max": 1000000, "/a/b/memory.max": "max"}, 950000),
        (host.memory_limit, "0:", {"/a/b/memory.max": "max"}, None),
        (host.memory_limit, "0:", {"/memory.max": 2000000}, 1900000),
        (host.memory_limit, "4:memory", {"/a/b/memory.limit_in_bytes": 3000000}, 2850000),
        (host.memory_limit, "4:cpu,memory", {"/memory.limit_in_bytes": 3000000}, 2850000),
        (host.memory_limit, "4:memory", {"/a/b/memory.limit_in_bytes": 2**63 - 4096}, None),
        (host.free_bytes, "0:", {"/a/memory.max": "max", "/a/memory.current": 5000}, None),
        (host.free_bytes, "0:", V2_USED, 1000),
        (host.free_bytes, "0:", V2_USED | {"/a/b/memory.stat": INACTIVE}, 4000),
        (host.free_bytes, "5:memory", V1_MEMORY, None),
        (host.free_bytes, "5:memory", V1_USED, 1000),
        (host.free_bytes, "5:memory", V1_USED | {"/a/b/memory.stat": f"total_{INACTIVE}"}, 4000),
    ],
)
def test_cgroup_limits_apply_at_any_level(
    tmp_path: Path,
    read: Callable[[Path, Path], int],
    group: str,
    files: dict[str, object],
    limit: int | None,
) -> None:
    """`limit`: None if there is no limit."""
    groups, process = tmp_path / "groups", tmp_path / "self"
    process.mkdir()
    (process / "cgroup").write_text(f"9:name=systemd:/\n{group}:/a/b\n")
    unlimited = read(groups, process)
    assert unlimited >= 1
    controller = next((one for one in ("memory", "cpu") if one in group.split(":")[1]), "")
    for name, text in files.items():
        path = groups / controller / name[1:]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert read(groups, process) == (pytest.approx(unlimited, rel=0.2) if limit is None else limit)


def test_shortage_names_shared_memory_or_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker gives a container 64 MiB of shared memory."""
    monkeypatch.setattr(host, "shared_bytes", lambda: (2**30, 64 * 2**20))
    assert worker_limits.shortage(9 * 2**20, 2, workers=2) == ""
    assert "docker's --shm-size" in worker_limits.shortage(9 * 2**20, 2, workers=4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert worker_limits.shortage(9 * 2**20, 2, workers=2).startswith("5 batches of 9 MiB")
    monkeypatch.setattr(host, "files_left", lambda: 1000)
    assert "ulimit -n" in worker_limits.shortage(2**10, 300, workers=2)


READ_FACTS = """
import json, sys
from advisor.tuners import environment as e, torch_facts as f
facts = [str(e.detect("cpu")), e.own_threads(), e.default_device()]
print(json.dumps([*facts, "torch" in sys.modules]))
f.keep()
"""


def read_facts(folder: Path, **env: str) -> list[object]:
    (folder / "read.py").write_text(READ_FACTS)
    done = forks.run(folder / "read.py", env=os.environ | env)
    return json.loads(done.stdout)


def test_facts_about_torch_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, second = read_facts(tmp_path), read_facts(tmp_path)
    assert (first[:3], first[3], second[3]) == (second[:3], True, False)
    assert str(torch.__version__) in str(second[0])
    other = read_facts(tmp_path, OMP_NUM_THREADS="2")  # changes the facts
    assert other[3] is True


def test_damaged_cache_file_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "advisor").mkdir()
    (tmp_path / "advisor" / "torch.json").write_text("[1")
    assert torch_facts._kept.__wrapped__() == {}


def test_reading_commands_do_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("from torch import nn\nclass Net(nn.Linear): pass\n")
    (tmp_path / "command.py").write_text(
        "import sys; from advisor.cli import main; code = main(); "
        "assert 'torch' not in sys.modules and code == 0, code"
    )
    # The first command caches the facts about torch.
    forks.run(tmp_path / "command.py", "why", "model.py", cwd=tmp_path)
    for arguments in (("why", "model.py"), ("show",)):
        done = forks.run(tmp_path / "command.py", *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
