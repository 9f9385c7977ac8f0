"""Seconds to make and to fill page-locked memory of the host: PyTorch's, and advisor's.

    python page_locked.py 8

8 is in GiB, in buffers of 256 MiB. The second round uses the first one's memory again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from advisor.tuners.offloading import HostMemory, stream_of

MIB = 2**20
SIZE = 256 * MIB


def measure(name: str, take: Callable[[], Tensor], count: int) -> list[Tensor]:
    filled = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    began = time.perf_counter()
    buffers = [take() for _ in range(count)]
    made_s = time.perf_counter() - began
    for buffer in buffers:
        buffer.copy_(filled, non_blocking=True)
    torch.cuda.synchronize()
    copied_s = time.perf_counter() - began - made_s
    print(f"{name}: {made_s:.2f} s to make, {copied_s:.2f} s to copy", flush=True)
    return buffers


def main() -> None:
    count = int(sys.argv[1]) * 1024 * MIB // SIZE
    device = torch.device("cuda", 0)
    memory, stream = HostMemory(), stream_of(device)

    def ours() -> Tensor:
        found = memory.take(SIZE, device)
        assert found is not None, "the host has too little memory"
        return found

    for turn in range(2):
        measure(
            f"PyTorch, round {turn}",
            lambda: torch.empty(SIZE, dtype=torch.uint8, pin_memory=True),
            count,
        )
    for turn in range(2):
        for buffer in measure(f"advisor, round {turn}", ours, count):
            memory.give_back(buffer, stream)


if __name__ == "__main__":
    main()
