"""The end of every optimizer's step, for whatever of advisor's waits for it.

One hook serves all. PyTorch goes through its hooks as they are, and raises where one comes or goes
meanwhile: what acts at a step's end, as a pilot that compiles there, must not add one of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

Stepped = Callable[[torch.optim.Optimizer], None]


class Steps:
    """Holds on to PyTorch while there is somebody to tell."""

    def __init__(self) -> None:
        self._told: list[Stepped] = []
        self._handle: RemovableHandle | None = None
        self._inside = False

    def tell(self, stepped: Stepped) -> Callable[[], None]:
        """Have it called with the optimizer after each step of any; returns what ends that."""
        self._told.append(stepped)
        if self._handle is None:
            self._handle = register_optimizer_step_post_hook(self._stepped)

        def remove() -> None:
            if stepped in self._told:
                self._told.remove(stepped)
                self._let_go()

        return remove

    def _stepped(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        self._inside = True
        try:
            for stepped in tuple(self._told):
                stepped(optimizer)
        finally:
            self._inside = False

    def _let_go(self) -> None:
        if self._told or self._handle is None:
            return
        if not self._inside:
            self._handle.remove()
            self._handle = None
            return

        def later(_module: torch.nn.Module, _args: object) -> None:
            # Through the hooks of a module's call PyTorch goes by a copy.
            handle.remove()
            self._let_go()

        handle = register_module_forward_pre_hook(later)


EVERY_STEP = Steps()
