"""Where a process is in its random numbers."""

from __future__ import annotations

import random

import torch


class Drawn:
    """The state of Python's random numbers and PyTorch's, of all devices, as it is now."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._host = torch.get_rng_state()
        self._devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def put(self) -> None:
        """Have them go on from there."""
        random.setstate(self._python)
        torch.set_rng_state(self._host)
        if self._devices:
            torch.cuda.set_rng_state_all(self._devices)

    def passed(self) -> bool:
        """Whether something was drawn since."""
        now = Drawn()
        ours, theirs = [self._host, *self._devices], [now._host, *now._devices]
        return self._python != now._python or not all(map(torch.equal, ours, theirs))
