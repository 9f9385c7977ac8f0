"""What device and software this is, without creating a CUDA context (NVML answers)."""

from __future__ import annotations

import functools
import os
import platform
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from advisor.cache.key import Device, Environment, Software
from advisor.errors import UsageError

# CUDA samples, Common/helper_cuda.h, _ConvertSMVer2Cores: cores per multiprocessor.
_CORES = {(6, 0): 64, (7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}
_CORES_ELSE = 128


def default_device() -> str:
    """This rank's CUDA device where this process sees one, else 'cpu'."""
    rank = os.environ.get("LOCAL_RANK", "0")
    index = int(rank) if rank.isdigit() else 0
    count = _cuda_count()
    return f"cuda:{index if index < count else 0}" if count else "cpu"


@functools.cache
def detect(device: str) -> Environment:
    """The environment of 'cuda', 'cuda:N' or 'cpu'.

    Raises:
        UsageError: there is no such device.
    """
    if device == "cpu":
        return Environment(
            device=Device(
                kind="cpu",
                name=host_cpu(),
                capability=torch.backends.cpu.get_cpu_capability(),
                multiprocessors=_cores(),
                memory_gib=round(_memory_bytes() / 2**30),
            ),
            software=Software(driver="", cuda="", cudnn="", torch=torch.__version__),
        )
    index = cuda_index(device)
    count = _cuda_count()
    if index >= count:
        there = ", ".join(["cpu", *(f"cuda:{n}" for n in range(count))])
        raise UsageError(f"device {device!r} is not there; this process sees {there}")
    nvml = _nvml()
    if nvml is None:
        raise UsageError(
            f"device {device!r}: the NVIDIA management library (NVML) does not answer here; "
            "advisor reads driver and device from it"
        )
    handle = _handle(nvml, index)
    physical = _physical(nvml, handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(physical)
    name = _text(nvml.nvmlDeviceGetName(handle))
    return Environment(
        device=Device(
            kind="cuda",
            name=_text(nvml.nvmlDeviceGetName(physical)),
            capability=f"{major}.{minor}",
            multiprocessors=_multiprocessors(nvml, handle, (major, minor)),
            memory_gib=round(nvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30),
            mig=name.partition(" MIG ")[2],
        ),
        software=Software(
            driver=_text(nvml.nvmlSystemGetDriverVersion()),
            cuda=torch.version.cuda or "",
            cudnn=str(torch.backends.cudnn.version() or ""),
            torch=torch.__version__,
            power_limit_w=_read(nvml, lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(physical))
            // 1000,
            clock_cap_mhz=_clock_cap(nvml, physical),
        ),
    )


def cuda_index(device: str) -> int:
    """N of 'cuda:N'; 'cuda' is cuda:0.

    Raises:
        UsageError: the device is neither CUDA nor 'cpu'.
    """
    found = re.fullmatch(r"cuda(?::(\d+))?", device)
    if found is None:
        raise UsageError(f"device {device!r}: expected cpu, cuda or cuda:N")
    return int(found.group(1) or 0)


def device_uuid(device: str) -> str:
    """As torch.cuda.get_device_properties(...).uuid has it; '' on a CPU or a MIG slice."""
    nvml = _nvml() if device != "cpu" else None
    if nvml is None:
        return ""
    found = _text(nvml.nvmlDeviceGetUUID(_handle(nvml, cuda_index(device))))
    return found.removeprefix("GPU-") if found.startswith("GPU-") else ""


@functools.cache
def host_cpu() -> str:
    """The CPU's model name."""
    named = re.search(r"^model name\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)
    return named.group(1).strip() if named else platform.processor() or platform.machine()


def cpu_has_bf16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware."""
    return bool(re.search(r"\b(avx512_bf16|amx_bf16|bf16|svebf16)\b", _cpuinfo()))


@functools.cache
def _cpuinfo() -> str:
    try:
        # The first processor's lines: they are alike, and a large host has hundreds.
        return Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return ""


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@functools.cache
def _nvml() -> ModuleType | None:
    """The started library, or None where there is no NVIDIA driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    module: ModuleType = pynvml
    return module


def _cuda_count() -> int:
    if not torch.backends.cuda.is_built():
        return 0
    nvml = _nvml()
    if nvml is None:
        # ROCm, or a container without the library: torch may know better.
        return torch.cuda.device_count()
    return len(_visible(nvml))


def _visible(nvml: Any) -> list[str | int]:
    """What CUDA_VISIBLE_DEVICES lets this process see, by index or UUID, in CUDA's order.

    As CUDA reads it, the first invalid entry ends the list.
    """
    count = int(nvml.nvmlDeviceGetCount())
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return list(range(count))
    uuids = [
        _text(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(n))) for n in range(count)
    ]
    found: list[str | int] = []
    for entry in (part.strip() for part in asked.split(",")):
        if entry.isdigit() and int(entry) < count:
            found.append(int(entry))
        elif entry.startswith("MIG-"):
            found.append(entry)
        elif entry.startswith("GPU-") and sum(u.startswith(entry) for u in uuids) == 1:
            found.append(next(u for u in uuids if u.startswith(entry)))
        else:
            break
    return found


def _handle(nvml: Any, index: int) -> Any:
    name = _visible(nvml)[index]
    if isinstance(name, int):
        return nvml.nvmlDeviceGetHandleByIndex(name)
    return nvml.nvmlDeviceGetHandleByUUID(name)


def _physical(nvml: Any, handle: Any) -> Any:
    """The whole GPU behind a MIG slice; the handle itself otherwise."""
    if " MIG " not in _text(nvml.nvmlDeviceGetName(handle)):
        return handle
    return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)


def _multiprocessors(nvml: Any, handle: Any, capability: tuple[int, int]) -> int:
    if " MIG " in _text(nvml.nvmlDeviceGetName(handle)):
        return int(nvml.nvmlDeviceGetAttributes(handle).multiprocessorCount)
    cores = _read(nvml, lambda: nvml.nvmlDeviceGetNumGpuCores(handle))
    return cores // _CORES.get(capability, _CORES_ELSE)


def _clock_cap(nvml: Any, handle: Any) -> int:
    """The application clock where it is set below the card's own, in MHz; else 0."""
    top = _read(nvml, lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))
    own = _read(
        nvml, lambda: nvml.nvmlDeviceGetDefaultApplicationsClock(handle, nvml.NVML_CLOCK_SM)
    )
    now = _read(nvml, lambda: nvml.nvmlDeviceGetApplicationsClock(handle, nvml.NVML_CLOCK_SM))
    return now if 0 < now < (own or top) else 0


def _read(nvml: Any, ask: Any) -> int:
    """0 where a card or a container does not tell."""
    try:
        return int(ask())
    except nvml.NVMLError:
        return 0


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
