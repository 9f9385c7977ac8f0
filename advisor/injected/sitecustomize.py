"""Brings advisor's pilot into a command that advisor starts: Python imports this by its name.

Nothing happens in a process that loads no torch, beyond this file. The user's own sitecustomize
is run as if this one was not there.
"""

import os
import sys
from importlib.machinery import PathFinder

# Neither pathlib nor importlib.abc: every Python that the command starts would import them.
_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120


def _own() -> None:
    """Run the sitecustomize that this one hides, if there is one."""
    others = [path for path in sys.path if os.path.abspath(path) != _HERE]  # noqa: PTH100
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        import importlib.util

        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


class _Finder:
    """Waits for torch, and attaches the pilot once it is loaded.

    It stays in sys.meta_path, and does nothing from then on: while one thread changes that list,
    another one's import may skip a finder.
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
        if address := os.environ.get("ADVISOR_PILOT"):  # it is tuned, and would be waited for
            from pathlib import Path

            Path(address).with_name("torch").write_text(f"advisor is {said}; install it there")
            sys.exit(f"advisor: {said}")
        sys.stderr.write(f"advisor: {said}; it runs unmodified\n")
        return
    attach()


sys.meta_path.insert(0, _Finder())
_own()
