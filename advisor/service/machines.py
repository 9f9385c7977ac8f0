"""The machines that jobs run on: for the pages, and to say why a job waits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from advisor.jobs.spec import gpu_matches
from advisor.service.executors import Capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """An executor's last answer. `why`: the reason that it is down; '' if it is up."""

    name: str
    capacities: Sequence[Capacity] = ()
    why: str = ""

    @property
    def devices(self) -> Sequence[Capacity]:
        """The capacities, summed for each device name, the CPU last."""
        found = []
        for name in sorted({one.gpu for one in self.capacities} - {""}):
            alike = [one for one in self.capacities if one.gpu == name]
            free, total = sum(one.gpus for one in alike), sum(one.total for one in alike)
            why = "; ".join(dict.fromkeys(one.why for one in alike if one.why))
            found.append(Capacity(gpu=name, gpus=free, total=total, why=why))
        cpus = sum(not one.gpu for one in self.capacities)
        why = "" if cpus else "a job is measured on this executor"
        return [*found, Capacity(gpu="CPU", gpus=cpus, total=max(cpus, 1), why=why)]


def why_waits(gpu: str, gpus: int, machines: Iterable[Machine]) -> tuple[str, bool]:
    """Returns (why a job for these devices waits, or ''; whether any machine has such devices)."""
    up = [one for one in machines if not one.why]
    known = [capacity for one in up for capacity in one.capacities]
    if not gpus and up:
        idle = any(not one.gpu for one in known)
        return "" if idle else "waits for a CPU on which no job is measured", True
    named = [one for one in known if one.gpu and gpu_matches(gpu, one.gpu)]
    if gpus and any(one.gpus >= gpus for one in named):
        return "", True
    wanted = f"{gpus} GPUs" if gpus > 1 else "a GPU" if gpus else "a CPU"
    if named:
        why = "; ".join(dict.fromkeys(one.why for one in named if one.why))
        free = max(one.gpus for one in named)
        return f"waits for {wanted} of {named[0].gpu}: {free} free" + f" ({why})" * bool(why), True
    called = f" named {gpu!r}" if gpu else ""
    there = ", ".join(dict.fromkeys(one.gpu or "the CPU" for one in known)) or "none"
    return f"no known machine has {wanted}{called} (known: {there}); the job waits", False
