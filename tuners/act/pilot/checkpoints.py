"""Checkpoints of a run that is being tuned: written to a scratch folder, and read from there.

A tuning starts the user's script, and ends it somewhere in the middle: what it saves is worth
nothing, and must not replace what the user has saved before. So the writers of PyTorch,
safetensors, torch.distributed.checkpoint and Lightning write a path's file to the same path below
a scratch folder, and their readers look there first. What the script then does with such a file by
`os` and `shutil` is done there as well. All else is as it was: `open`, folders, file objects.

Processes of one job share the folder, so that what is in it decides, and no table in memory.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".tar", ".distcp")
"""Of files that are taken for checkpoints where a script removes them."""

Wrap = Callable[[Any], Any]


class Checkpoints:
    """Where the files of checkpoints are.

    Args:
        folder: the scratch folder; whoever made it removes it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own = str(folder.parent.resolve())
        self._began = time.time()

    def scratch(self, path: Any) -> Path | None:
        """Where what is saved under a path lies; None for what is no path of the user's."""
        if not isinstance(path, str | os.PathLike):
            return None
        with contextlib.suppress(OSError, ValueError, TypeError):
            real = os.path.realpath(os.fspath(path))
            if isinstance(real, str) and not f"{real}/".startswith(f"{self._own}/"):
                return self._folder / real.lstrip("/")
        return None

    def there(self, path: Any) -> Path | None:
        """Its scratch copy, if there is one."""
        found = self.scratch(path)
        return found if found is not None and found.exists() else None

    def to_write(self, path: Any) -> Any:
        """Where to save; what cannot be written there is left to fail, or to be no file."""
        found = self.scratch(path)
        user = Path(path) if found is not None else Path()
        if found is None or (user.exists() and not user.is_file()):
            return path
        if not user.resolve().parent.is_dir():
            return path  # as PyTorch says of a folder that is not there
        found.parent.mkdir(parents=True, exist_ok=True)
        return str(found)

    def to_read(self, path: Any) -> Any:
        """Where to load from."""
        found = self.there(path)
        return path if found is None or found.is_dir() else str(found)

    def move(self, source: Any, target: Any) -> bool:
        """Move a scratch copy, or a file over a checkpoint of the user's own, which stays.

        Returns:
            Whether that was all there is to move.
        """
        found, to = self.there(source), self.scratch(target)
        if to is None or (found is None and not self._users(target)):
            return False
        to.parent.mkdir(parents=True, exist_ok=True)
        if to.is_dir():
            shutil.rmtree(to)
        shutil.move(found or source, to)
        return found is None or not Path(source).is_dir()

    def remove(self, path: Any) -> bool:
        """Remove a scratch copy; a checkpoint of the user's own stays.

        Returns:
            Whether that was all there is to remove.
        """
        found = self.there(path)
        if found is not None and found.is_dir():
            shutil.rmtree(found)
        elif found is not None:
            found.unlink()
            return True
        return self.scratch(path) is not None and self._users(path)

    def _users(self, path: Any) -> bool:
        """Whether a file, or one below a folder, is a checkpoint from before this process."""
        below = ((folder, name) for folder, _, names in os.walk(path) for name in names)
        files = [Path(path), *(Path(folder) / name for folder, name in below)]
        with contextlib.suppress(OSError):
            return any(
                one.name.endswith(SUFFIXES) and one.stat().st_mtime < self._began
                for one in files
                if one.is_file()
            )
        return False


class Redirection:
    """What is patched so that checkpoints go to the scratch folder."""

    def __init__(self, folder: Path) -> None:
        self._at = Checkpoints(folder)
        self._patched: list[tuple[Any, str, Any, Any]] = []
        self._finder = _AfterImport(
            {
                "safetensors": self._safetensors,
                "torch.distributed.checkpoint.filesystem": self._distributed,
                "lightning.fabric.utilities.cloud_io": self._lightning,
                "lightning_fabric.utilities.cloud_io": self._lightning,
            }
        )

    def install(self) -> None:
        """Patch what is imported, and the rest once it is."""
        for owner in (torch, torch.serialization):
            self._patch(owner, "save", self._writes(1))
            self._patch(owner, "load", self._reads(0))
        self._patch(os, "replace", self._moves)
        self._patch(os, "rename", self._moves)
        for owner, name in ((os, "remove"), (os, "unlink"), (shutil, "rmtree")):
            self._patch(owner, name, self._removes)
        self._patch(shutil, "copyfile", self._copies)
        for name in ("copymode", "copystat"):
            self._patch(shutil, name, self._skips)
        self._finder.install()

    def uninstall(self) -> None:
        """Put back what nobody has patched since."""
        self._finder.uninstall()
        for owner, name, ours, plain in reversed(self._patched):
            if vars(owner).get(name) is ours:
                setattr(owner, name, plain)
        self._patched.clear()

    def _patch(self, owner: Any, name: str, wrap: Wrap) -> None:
        plain = vars(owner).get(name)
        if plain is not None:
            # One function under several names stays one.
            same = (ours for _, _, ours, other in self._patched if other is plain)
            ours = next(same, None) or wrap(plain)
            setattr(owner, name, ours)
            self._patched.append((owner, name, ours, plain))

    def _safetensors(self, _module: ModuleType) -> None:
        """Its own modules import these two by name."""
        names = ("safetensors", "safetensors.torch", "safetensors.numpy")
        for there in (sys.modules[name] for name in names if name in sys.modules):
            self._patch(there, "serialize_file", self._writes(1))
            self._patch(there, "safe_open", self._reads(0))

    def _lightning(self, module: ModuleType) -> None:
        """It writes and reads through file objects of fsspec's."""
        self._patch(module, "_atomic_save", self._saved_by_torch)
        self._patch(module, "_load", self._reads(0))

    def _distributed(self, module: ModuleType) -> None:
        """All that it does with files goes through one class."""
        files = module.FileSystem
        self._patch(files, "create_stream", self._streams)
        self._patch(files, "exists", self._reads(1))
        self._patch(files, "mkdir", self._makes)
        self._patch(files, "rename", self._renames)
        self._patch(files, "rm_file", self._unlinks)

    def _writes(self, position: int) -> Wrap:
        return _rerouted(position, self._at.to_write)

    def _reads(self, position: int) -> Wrap:
        return _rerouted(position, self._at.to_read)

    def _moves(self, plain: Any) -> Any:
        @functools.wraps(plain)
        def move(src: Any, dst: Any, **kwargs: Any) -> Any:
            if kwargs or not self._at.move(src, dst):
                return plain(src, dst, **kwargs)
            return None

        return move

    def _removes(self, plain: Any) -> Any:
        @functools.wraps(plain)
        def remove(path: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dir_fd") is not None or not self._at.remove(path):
                return plain(path, *args, **kwargs)
            return None

        return remove

    def _copies(self, plain: Any) -> Any:
        @functools.wraps(plain)
        def copy(src: Any, dst: Any, **kwargs: Any) -> Any:
            found = self._at.there(src)
            if found is None:
                return plain(src, dst, **kwargs)
            plain(str(found), self._at.to_write(dst), **kwargs)
            return dst

        return copy

    def _skips(self, plain: Any) -> Any:
        @functools.wraps(plain)
        def skip(src: Any, dst: Any, **kwargs: Any) -> Any:
            return None if self._at.there(src) else plain(src, dst, **kwargs)

        return skip

    def _saved_by_torch(self, plain: Any) -> Any:
        @functools.wraps(plain)
        def save(checkpoint: Any, filepath: Any) -> Any:
            to = self._at.scratch(filepath)
            if to is None or "://" in str(filepath):
                return plain(checkpoint, filepath)
            to.parent.mkdir(parents=True, exist_ok=True)
            return torch.save(checkpoint, str(to))

        return save

    def _streams(self, plain: Any) -> Any:
        def create_stream(files: Any, path: Any, mode: str) -> Any:
            to = self._at.scratch(path)
            if mode != "wb" or to is None:
                return plain(files, Path(self._at.to_read(path)), mode)
            to.parent.mkdir(parents=True, exist_ok=True)
            return plain(files, to, mode)

        return create_stream

    def _makes(self, plain: Any) -> Any:
        return lambda files, path: plain(files, self._at.scratch(path) or path)

    def _renames(self, plain: Any) -> Any:
        return lambda files, path, new: plain(
            files, self._at.scratch(path) or path, self._at.scratch(new) or new
        )

    def _unlinks(self, plain: Any) -> Any:
        def rm_file(files: Any, path: Any) -> None:
            if self._at.scratch(path) is None or self._at.there(path):
                plain(files, self._at.there(path) or path)

        return rm_file


def _rerouted(position: int, to: Callable[[Any], Any]) -> Wrap:
    """Has a function get another path at this position, or as the keyword of that position."""

    def wrap(plain: Any) -> Any:
        @functools.wraps(plain)
        def rerouted(*args: Any, **kwargs: Any) -> Any:
            if len(args) > position:
                args = (*args[:position], to(args[position]), *args[position + 1 :])
            for name in ("f", "filename", "path_or_url"):
                if name in kwargs:
                    kwargs[name] = to(kwargs[name])
            return plain(*args, **kwargs)

        return rerouted

    return wrap


class _AfterImport:
    """Does something with modules: now where they are imported, else once they are."""

    def __init__(self, todo: dict[str, Callable[[ModuleType], None]]) -> None:
        self._todo = todo

    def install(self) -> None:
        """Begin."""
        for name, do in self._todo.items():
            if (module := sys.modules.get(name)) is not None:
                do(module)
        sys.meta_path.insert(0, self)

    def uninstall(self) -> None:
        """End."""
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As of a finder: what the others find, with more to do once it is executed."""
        if name not in self._todo:
            return None
        others = (one for one in sys.meta_path if one is not self)
        found = (one.find_spec(name, path, target) for one in others)
        spec = next((one for one in found if one is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def executed(module: ModuleType) -> None:
                execute(module)
                self._todo[name](module)

            spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec
