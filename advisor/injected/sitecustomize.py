"""Attach advisor's pilot in a command that advisor starts. Python imports this file at its start.

A process that does not import torch runs nothing else of advisor. The user's own sitecustomize
still runs.
"""

import os
import sys
from importlib.machinery import PathFinder

# No pathlib or importlib.abc: they would slow down every Python that the command starts. No
# abspath: it fails if the current folder was removed, and PYTHONPATH has the absolute path anyway.
_HERE = os.path.dirname(__file__)  # noqa: PTH120


def _own() -> None:
    """Run the user's own sitecustomize, which this file hides, if there is one."""
    others = [path for path in sys.path if os.path.normpath(path) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        import importlib.util

        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


class _Finder:
    """An import finder that attaches the pilot once torch is loaded.

    Afterwards it stays in sys.meta_path and does nothing. If one thread removed it while another
    thread imports, that import might skip a finder.
    """

    def __init__(self) -> None:
        self._waits = [True]

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "torch" or not self._waits:
            return None
        spec = None
        for finder in [one for one in sys.meta_path if one is not self]:
            if (find := getattr(finder, "find_spec", None)) and (spec := find(name, path, target)):
                break
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def loaded(module):  # type: ignore[no-untyped-def]
            load(module)
            try:
                self._waits.pop()
            except IndexError:  # another thread was first
                return
            _attach()

        spec.loader.exec_module = loaded
        return spec


def _attach() -> None:
    try:
        from advisor.bootstrap import attach
    except ImportError as exc:
        said = f"not in this Python environment ({exc})"
        if address := os.environ.get("ADVISOR_PILOT"):  # `advisor tune` waits for this process
            from pathlib import Path

            Path(address).with_name("torch").write_text(f"advisor is {said}; install it there")
            sys.exit(f"advisor: {said}")
        sys.stderr.write(f"advisor: {said}; the script runs unmodified\n")
        return
    attach()


sys.meta_path.insert(0, _Finder())
_own()
