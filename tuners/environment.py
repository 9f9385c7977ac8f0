"""Detects device and software through NVML, without creating a CUDA context."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from advisor.cache.artifacts import Tools
from advisor.cache.key import Device, Environment, Software
from advisor.errors import AdvisorError, UsageError, printable
from advisor.tuners import host
from advisor.tuners.torch_facts import fact, torch

_Gpus = list[tuple[Any, Any]]
"""NVML's handles: (device, its card). Both are the same, unless the device is a MIG slice."""


def env_int(variable: str, default: int) -> int:
    """The number in an environment variable; `default` if it is not one to nine digits."""
    text = os.environ.get(variable, "")
    return int(text) if re.fullmatch(r"\d{1,9}", text) else default


def default_device() -> str:
    """This rank's CUDA device, or 'cpu' if this process sees no CUDA device."""
    index = env_int("LOCAL_RANK", 0)
    count = _cuda_count()
    # If a launcher shows each rank only its own GPU, every rank has cuda:0.
    return f"cuda:{index if index < count else 0}" if count else "cpu"


@functools.cache
def detect(device: str) -> Environment:
    """The environment of 'cuda', 'cuda:N' or 'cpu'. NVML counts devices by PCI address; with
    different GPUs, CUDA does so only under CUDA_DEVICE_ORDER=PCI_BUS_ID. Raises UsageError if there
    is no such device, AdvisorError if NVML does not answer."""
    if device == "cpu":
        return Environment(
            device=Device(
                kind="cpu",
                name=host_cpu(),
                capability=str(fact("capability", lambda: torch.backends.cpu.get_cpu_capability())),
                multiprocessors=host.affinity(),
                memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            ),
            software=Software(driver="", cuda="", cudnn="", torch=_torch_version()),
        )
    index, count = cuda_index(device), _cuda_count()
    if index >= count:
        raise UsageError(f"device {device!r}: {_what_there_is(count)}")
    nvml = _nvml()
    if nvml is None:
        raise AdvisorError(
            f"device {device!r}: the NVIDIA management library (NVML), which advisor needs, does "
            "not answer; check that nvidia-smi works; AMD GPUs are not supported"
        )
    try:
        return _ask(nvml, *_visible(nvml)[index])
    except nvml.NVMLError as exc:
        raise AdvisorError(
            f"device {device!r}: the NVIDIA management library (NVML) says {exc}; see nvidia-smi"
        ) from exc


def cuda_index(device: str) -> int:
    """N of 'cuda:N'; 'cuda' is cuda:0. Raises UsageError if `device` is no CUDA device."""
    found = re.fullmatch(r"cuda(?::([0-9]+))?", device)
    if found is None:
        raise UsageError(f"device {device!r}: expected cpu, cuda or cuda:N, e.g. cuda:0")
    return int(found.group(1) or 0)


def device_uuid(device: str) -> str:
    """The UUID as in torch.cuda.get_device_properties(...); '' for a CPU, a MIG slice, or if it is
    unknown. Raises UsageError if `device` is malformed."""
    if device == "cpu":
        return ""
    index = cuda_index(device)
    kind, _, uuid = "".join(one.uuid for one in gpus()[index : index + 1]).partition("-")
    return uuid if kind == "GPU" else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU that this process could use."""

    uuid: str  # as in CUDA_VISIBLE_DEVICES: 'GPU-...', or 'MIG-...' of a slice
    name: str
    users: tuple[int, ...]  # processes on it that the driver reports; in a container the host's

    @property
    def used_by(self) -> str:
        """The processes on it, for people: '812 (python)'; '' for none."""
        names = ((one, host.name(one)) for one in self.users)
        return ", ".join(f"{one} ({printable(name)})" if name else f"{one}" for one, name in names)


def gpus() -> list[Gpu]:
    """The GPUs that CUDA gives this process, in CUDA's order; [] if NVML does not answer."""
    nvml = _nvml()
    if nvml is None or not _built():
        return []
    try:
        return [
            Gpu(
                uuid=nvml.nvmlDeviceGetUUID(handle),
                name=nvml.nvmlDeviceGetName(handle),
                users=_users(nvml, handle),
            )
            for handle, _card in _visible(nvml)
        ]
    except nvml.NVMLError:
        return []


def _users(nvml: Any, handle: Any) -> tuple[int, ...]:
    try:
        return tuple(int(one.pid) for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    except nvml.NVMLError:  # a slice, or a driver that does not tell
        return ()


def interconnect(device: str, processes: int) -> str:
    """How the ranks of this job reach each other, as '8 per host, NVLink', or '4 per host, PCIe,
    network'; '' for one process. Only as far as NVML and NCCL's variables tell."""
    if processes < 2:
        return ""
    local = env_int("LOCAL_WORLD_SIZE", processes)
    parts = [f"{local} per host", _links(local) if device.startswith("cuda") and local > 1 else ""]
    return ", ".join(filter(None, [*parts, "network" * (local < processes)]))


def _links(ranks: int) -> str:
    """What connects the GPUs of this host's ranks; '' if NVML does not tell."""
    if env_int("NCCL_P2P_DISABLE", 0):
        return "host memory"
    if (nvml := _nvml()) is None:
        return ""
    try:
        cards = [card for _, card in _visible(nvml)][:ranks]
        if len(cards) < ranks:  # a launcher shows each rank only its own GPU
            cards = [nvml.nvmlDeviceGetHandleByIndex(n) for n in range(nvml.nvmlDeviceGetCount())]
        index = nvml.NVML_P2P_CAPS_INDEX_NVLINK
        found = {
            nvml.nvmlDeviceGetP2PStatus(one, other, index) == nvml.NVML_P2P_STATUS_OK
            for one, other in itertools.combinations(cards, 2)
        }
    except nvml.NVMLError:  # of MIG slices, or in a container that hides this
        return ""
    return " and ".join(["NVLink"] * (True in found) + ["PCIe"] * (False in found))


def allocated(device: torch.device) -> int:
    """Bytes that this process has allocated on a GPU; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def synchronize(device: torch.device) -> None:
    """Wait for a GPU's work; on a CPU nothing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_bytes(device: torch.device) -> int:
    """Bytes of a GPU that this process may still allocate, within its limit."""
    free, total = torch.cuda.mem_get_info(device)
    # Older versions of PyTorch lack this function.
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _device: 1.0)
    limit = int(fraction(device) * total)
    reserved = torch.cuda.memory_reserved(device)
    return min(free, limit - reserved) + reserved - allocated(device)


def unused_bytes(device: torch.device) -> int:
    """Bytes of a GPU that the steps do not need: free at the moment of their peak."""
    peak = torch.cuda.max_memory_allocated(device)
    return max(0, free_bytes(device) - peak + allocated(device))


def energy_j(device: str) -> float:
    """Joules that all processes have used on a GPU; 0 without a counter: on a CPU or MIG slice."""
    if device != "cpu" and (nvml := _nvml()) is not None:
        with contextlib.suppress(nvml.NVMLError, IndexError):
            handle, card = _visible(nvml)[cuda_index(device)]
            if handle is card:
                return float(nvml.nvmlDeviceGetTotalEnergyConsumption(card)) / 1000
    return 0.0


def expand_segments(device: torch.device) -> None:
    """Have PyTorch's allocator grow its segments, which fragments a GPU's memory less, unless the
    user has set the allocator."""
    own = any(os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    if device.type == "cuda" and not own:
        # Public under neither name (torch 2.11 to 2.14).
        settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        settings = settings or torch.cuda.memory._set_allocator_settings
        settings("expandable_segments:True")


def limit_memory(device: torch.device, most_bytes: int) -> None:
    """Have PyTorch raise if this process uses more of a GPU's memory; 0: no limit."""
    if most_bytes and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, most_bytes / total), device)


@functools.cache
def host_cpu() -> str:
    named = re.search(r"^model name\s*:\s*(.+)$", host.cpu(), re.MULTILINE)
    return named.group(1).strip() if named else platform.processor() or platform.machine()


@functools.cache
def tools() -> Tools:
    """Versions of the software that compiles code in this process."""
    from importlib.metadata import distributions  # importing Triton takes a second

    triton = [one for name in ("triton", "pytorch-triton") for one in distributions(name=name)]
    return Tools(
        torch=str(torch.__version__),
        triton=triton[0].version if triton else "",
        python=platform.python_version(),
    )


def cpu_has_bf16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware, and PyTorch's kernels may use it: where
    ONEDNN_MAX_CPU_ISA forbids it, recurrent layers raise under bf16 autocast."""

    def kernels_use_it() -> bool:
        mkldnn: Any = torch.ops.mkldnn
        return not torch.backends.mkldnn.is_available() or mkldnn._is_mkldnn_bf16_supported()

    in_hardware = re.search(r"\b(avx512_bf16|amx_bf16|bf16|svebf16)\b", host.cpu()) is not None
    return in_hardware and bool(fact("bf16", kernels_use_it))


def bf16_notice(device: str, precisions: tuple[str, ...]) -> str:
    """A notice for the user if bf16 is permitted but this CPU has no bf16 kernels; else ''."""
    lacks = device == "cpu" and "bf16" in precisions and not cpu_has_bf16()
    return "bf16 is not tried: this CPU has no bf16 kernels" if lacks else ""


@functools.cache
def own_threads() -> int:
    """CPU threads that torch used inside one operation before any advice was followed."""
    return int(fact("threads", lambda: torch.get_num_threads()))


def threads_set() -> bool:
    """Whether the user, or a launcher such as torchrun, has set the number of CPU threads."""
    return any(os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))


def _ask(nvml: Any, handle: Any, card: Any) -> Environment:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(card)
    if handle is not card:
        multiprocessors = int(nvml.nvmlDeviceGetAttributes(handle).multiprocessorCount)
    else:
        # CUDA samples, Common/helper_cuda.h, _ConvertSMVer2Cores: cores per multiprocessor.
        cores = 64 if major == 7 or (major, minor) in ((6, 0), (8, 0)) else 128
        multiprocessors = _number(nvml, nvml.nvmlDeviceGetNumGpuCores, card) // cores
    milliwatts = _number(nvml, nvml.nvmlDeviceGetEnforcedPowerLimit, card)
    return Environment(
        device=Device(
            kind="cuda",
            name=nvml.nvmlDeviceGetName(card),
            capability=f"{major}.{minor}",
            multiprocessors=multiprocessors,
            memory_gib=round(nvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30),
            mig=nvml.nvmlDeviceGetName(handle).partition(" MIG ")[2] if handle is not card else "",
        ),
        software=Software(
            driver=nvml.nvmlSystemGetDriverVersion(),
            cuda=str(fact("cuda", lambda: torch.version.cuda or "")),
            cudnn=str(fact("cudnn", _cudnn_version)),
            torch=_torch_version(),
            power_limit_w=round(milliwatts / 1000),
            clock_cap_mhz=_clock_cap(nvml, card),
        ),
    )


def _clock_cap(nvml: Any, card: Any) -> int:
    """MHz of the application clock, if someone set it below the default and the top; else 0."""
    sm = nvml.NVML_CLOCK_SM
    now = _number(nvml, nvml.nvmlDeviceGetApplicationsClock, card, sm)
    own = _number(nvml, nvml.nvmlDeviceGetDefaultApplicationsClock, card, sm)
    top = _number(nvml, nvml.nvmlDeviceGetMaxClockInfo, card, sm)
    # Some cards' own default is below the top, and does not cap them.
    return now if now != own and now < top else 0


def _number(nvml: Any, ask: Callable[..., Any], *given: Any) -> int:
    """The number that an NVML call returns; 0 if a card or container does not support it."""
    try:
        return int(ask(*given))
    except nvml.NVMLError:
        return 0


def _what_there_is(count: int) -> str:
    if not _built():
        return f"this torch ({_torch_version()}) is built without CUDA; use cpu"
    there = ", ".join(f"cuda:{n}" for n in range(count))
    few = f"{count} CUDA device{'s' * (count > 1)} ({there}); use one of them or cpu"
    seen = few if count else "no CUDA device; use cpu"
    return f"this process sees {seen}, or check nvidia-smi and CUDA_VISIBLE_DEVICES"


def _torch_version() -> str:
    return str(fact("torch", lambda: str(torch.__version__)))


def _cudnn_version() -> str:
    # Not torch.backends.cudnn.version(): newer torch creates a CUDA context in it.
    library: Any = getattr(torch._C, "_cudnn", None)
    return str(library.getVersionInt()) if library is not None else ""


@functools.cache
def _nvml() -> Any:
    """The started library, or None where there is no NVIDIA driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _cuda_count() -> int:
    if not _built():
        return 0
    nvml = _nvml()
    if nvml is not None:
        with contextlib.suppress(nvml.NVMLError):
            return len(_visible(nvml))
    with contextlib.suppress(ValueError):  # torch calls int() on parts of CUDA_VISIBLE_DEVICES
        # torch may see more than NVML: ROCm devices, or GPUs in a container without NVML.
        return int(fact("devices", lambda: torch.cuda.device_count()))
    return 0


def _built() -> bool:
    return bool(fact("built", lambda: torch.backends.cuda.is_built()))


def _visible(nvml: Any) -> _Gpus:
    """The devices that CUDA gives this process, in its order: either whole cards or a single MIG
    slice, the first (NVIDIA's MIG user guide, 'CUDA Device Enumeration')."""
    cards = [nvml.nvmlDeviceGetHandleByIndex(n) for n in range(nvml.nvmlDeviceGetCount())]
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        found = [gpu for card in cards for gpu in _on_card(nvml, card)]
    else:
        found = list(_named(nvml, asked, cards))
    return next(([gpu] for gpu in found if gpu[0] is not gpu[1]), found)


def _named(nvml: Any, asked: str, cards: list[Any]) -> Iterator[tuple[Any, Any]]:
    """The devices in CUDA_VISIBLE_DEVICES; as in CUDA, the first invalid entry ends the list."""
    entries = [entry.strip() for entry in asked.split(",")]
    if len(set(entries)) < len(entries):
        return  # CUDA shows nothing when an entry is repeated
    for entry in entries:
        found: list[Any] = []
        if entry.startswith("MIG-"):
            with contextlib.suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByUUID(entry)
                found = [(handle, nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle))]
        elif entry.startswith("GPU-"):
            found = [c for c in cards if nvml.nvmlDeviceGetUUID(c).startswith(entry)]
        elif number := re.match(r"\+?[0-9]+", entry):  # CUDA reads '1gpu' as 1
            found = cards[int(number[0]) :][:1]
        if len(found) != 1:
            return
        yield from found if entry.startswith("MIG-") else _on_card(nvml, found[0])


def _on_card(nvml: Any, card: Any) -> _Gpus:
    """The card, or the first of its MIG slices."""
    # Returns (current, pending); a card without MIG raises.
    if not _number(nvml, lambda: nvml.nvmlDeviceGetMigMode(card)[0]):
        return [(card, card)]
    for n in range(_number(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, card)):
        with contextlib.suppress(nvml.NVMLError):  # numbers of slices may have gaps
            return [(nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, n), card)]
    return []
