"""Counts and frees torch.compile's code in this process. PyTorch has no public way to free the
code of one config: code that these functions do not find stays in memory."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

_RECOMPILATIONS = 64
"""Limit per function: each config compiles it again, and torch.compile's own limit is 8."""
_GIVEN_UP = ("Dynamo recompile limit", "recompile_limit", "cache_size_limit", "accumulated_")
"""How torch.compile's counter of reasons names its limits, the last torch's first."""


def graphs_compiled() -> int:
    """The number of graphs that torch.compile has traced in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


def fallbacks() -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")
    given_up = dynamo.counters["unimplemented"] if dynamo is not None else {}
    return sum(n for why, n in given_up.items() if why.startswith(_GIVEN_UP))


def raise_recompile_limit() -> Callable[[], None]:
    """Raise torch.compile's limit of compilations per function, for several configs. Returns a
    function that restores the script's own limit, unless the script has set another since."""
    config = torch._dynamo.config
    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # 2.6
    own = getattr(config, name)
    raised = max(_RECOMPILATIONS, own)
    setattr(config, name, raised)

    def restore() -> None:
        if getattr(config, name) == raised:
            setattr(config, name, own)

    return restore


class CompiledCode:
    """Tracks which code each config has compiled, so that a config's code can be freed."""

    def __init__(self) -> None:
        self._known = _ids()

    def claim(self) -> set[str | int]:
        """The ids of code compiled (texts), and of functions given CUDA graphs (numbers), since the
        last call."""
        new = _ids() - self._known
        self._known |= new
        return new


def free(ids: set[str | int]) -> None:
    """Free the code that `CompiledCode.claim` returned; CUDA graphs' shared memory pool stays."""
    for act in (_free_code, _free_replays):
        with contextlib.suppress(ImportError, AttributeError):
            act(ids)
    gc.collect()


def _ids() -> set[str | int]:
    # Those of the functions for which CUDA graphs are or will be recorded, too.
    replays = {number.id for manager in _managers() for number in manager.ids_to_funcs}
    return {*(str(entry.compile_id) for entry in _entries()), *replays}


def _entries() -> list[Any]:
    """All entries of compiled code. Keep none of them: PyTorch frees the memory they point to."""
    if "torch._dynamo.convert_frame" not in sys.modules:
        return []
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo.convert_frame import input_codes

    codes = (one() for one in tuple(input_codes.seen))
    return [one for code in codes if code is not None for one in _debug_get_cache_entry_list(code)]


def _free_code(ids: set[str | int]) -> None:
    from torch._dynamo.guards import DeletedGuardManagerWrapper
    from torch._dynamo.utils import CleanupManager

    for entry in _entries():
        if str(entry.compile_id) not in ids or entry.guard_manager.extra_state is None:
            continue
        code, manager = entry.code, entry.guard_manager
        manager.extra_state.invalidate(entry, DeletedGuardManagerWrapper("advisor frees it"))
        # An invalid entry stays in the list with its code. The hooks delete the compiled functions
        # of that code from the globals of the script's module.
        for hook in CleanupManager.instance.values.get(id(code), ()):
            hook()
        CleanupManager.instance[code] = []


def _managers() -> Iterator[Any]:
    """Yield PyTorch's CUDA graph manager of each device that has one."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None and torch.cuda.is_available():
        for device in range(torch.cuda.device_count()):
            manager = trees.get_manager(device, create_if_none_exists=False)
            if manager is not None:
                yield manager


def _free_replays(ids: set[str | int]) -> None:
    for manager in _managers():
        node = manager.current_node
        if node is not None and node.wrapped_function.id.id in ids:
            if type(node).__name__ != "CUDAGraphNode":
                continue  # a warm-up run before the recording, which may be needed
            manager.clear_current_path_state_and_set_to_none()
        for held in (manager.roots, manager.ids_to_funcs):
            for number in [one for one in held if one.id in ids]:
                del held[number]
