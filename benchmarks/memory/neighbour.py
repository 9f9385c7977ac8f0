"""Another process on the GPU, which leaves so much of its memory:

    python neighbour.py 40 READY

40 is in GiB. Makes the file READY once it holds the rest, and ends when it is killed.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import torch

GIB = 2**30


def main() -> None:
    left, ready = float(sys.argv[1]), Path(sys.argv[2])
    torch.zeros(1, device="cuda")
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(int(free - left * GIB), dtype=torch.uint8, device="cuda")
    print(
        f"holds {held.numel() / GIB:.2f} GiB; {torch.cuda.mem_get_info()[0] / GIB:.2f} GiB are free"
    )
    ready.touch()
    signal.pause()


if __name__ == "__main__":
    main()
