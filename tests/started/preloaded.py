"""Imports torch in the server of tests/forks.py, and hides it until a fork imports it."""

import gc
import importlib.util
import multiprocessing
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # building an optimizer imports it
import torch.utils.data  # noqa: F401

PROCESS = multiprocessing.current_process()
PATH = [one for one in sys.path if one not in ("", str(Path(__file__).parent))]
"""The initial sys.path without PYTHONPATH."""


class HiddenTorch:
    """Import hook that restores torch and all its modules at the first import of torch."""

    def __init__(self) -> None:
        names = [name for name in sys.modules if name == "torch" or name.startswith("torch.")]
        self._modules = {name: sys.modules.pop(name) for name in names}
        self._spec: Any = self._modules["torch"].__spec__

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        if name != "torch" or not self._modules:
            return None
        at = self._spec.origin
        return importlib.util.spec_from_loader(name, self, origin=at)  # type: ignore[arg-type]

    def create_module(self, _spec: Any) -> types.ModuleType:
        return self._modules["torch"]

    def exec_module(self, module: types.ModuleType) -> None:
        sys.modules.update(self._modules)
        module.__spec__, self._modules = self._spec, {}


sys.meta_path.insert(0, HiddenTorch())
gc.freeze()  # garbage collection in the forks skips what is frozen
