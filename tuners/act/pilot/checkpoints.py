"""Checkpoints of a run that is being tuned: written to a scratch folder, and read from there.

A tuned script's checkpoints are worthless, and must not replace the user's earlier ones. So
PyTorch, safetensors, torch.distributed.checkpoint, Lightning and transformers' Trainer write a file
to the same path below a scratch folder, and read it from that folder if it is in it; so do `os`,
`shutil` and `open` with such files. `open` knows a checkpoint that it writes by its suffix. All
else is untouched: lists of a folder, file objects. Processes of one job share the folder, so the
files in it decide; each process remembers by itself only names without a known suffix, and what of
the user's it has removed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

# A file with such a suffix counts as a checkpoint if a script creates, removes or replaces it. A
# new file with another of SUFFIXES may be data, such as an archive that the script downloads.
_SURE = (".pt", ".pth", ".ckpt", ".safetensors")
SUFFIXES = (*_SURE, ".bin", ".tar", ".distcp", ".metadata")
# How a file of `torch.save` begins: a zip archive, and before torch 1.6 a pickle.
_SAVED = (b"PK\3\4", b"\x80\x02\x8a\nl\xfc\x9cF\xf9")
MADE = "made"  # beside the scratch folder: the user's folders that the script has made, with 0s
Act = Callable[..., Any]  # replaces a function, which is its first argument


class Redirection:
    """Patches functions that write, read, move and remove checkpoints. The caller removes the
    scratch folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own = str(folder.parent.resolve())
        self._began, self._stat = time.time(), os.stat
        self._gone = set[str]()  # what the script has removed or renamed, and what stayed
        self._written = set[str]()  # names of files in the scratch folder
        self._patched: list[tuple[Any, str, Any, Any]] = []
        writes, reads = _rerouting(1, self._to_write), _rerouting(0, self._to_read)
        moves, removes = self._moves, self._removes
        pytorch = {"save": writes, "load": reads}
        safetensors = {"serialize_file": writes, "safe_open": reads}
        # Lightning writes and reads through fsspec's file objects.
        lightning = {"_atomic_save": writes, "_load": reads}
        self._table: dict[str, dict[str, Act]] = {
            "torch": pytorch,
            "torch.serialization": pytorch,
            "torch.jit": pytorch,
            "torch.jit._serialization": pytorch,
            "torch.jit._script": {"RecursiveScriptModule.save": writes},
            "builtins": {"open": self._opens},
            "io": {"open": self._opens},
            "os": {
                **dict.fromkeys(("replace", "rename"), moves),
                **dict.fromkeys(("remove", "unlink"), removes),
                **{"stat": self._looks, "mkdir": self._makes, "symlink": self._links},
            },
            "shutil": dict[str, Act](
                rmtree=removes, copyfile=self._copies, copymode=self._skips, copystat=self._skips
            ),
            # safetensors.torch and safetensors.numpy import these functions by name.
            **{f"safetensors{name}": safetensors for name in ("", ".torch", ".numpy")},
            # This module renames and removes through pathlib, which calls os.
            "torch.distributed.checkpoint.filesystem": {
                "FileSystem.create_stream": self._streams,
                "FileSystem.exists": _rerouting(1, lambda path: Path(self._to_read(path))),
                "FileSystem.mkdir": _rerouting(1, lambda path: self._scratch(path) or path),
            },
            **{f"lightning{dot}fabric.utilities.cloud_io": lightning for dot in "._"},
            # A Trainer's checkpoints are folders, with files that it opens itself.
            "transformers.trainer": {
                "Trainer._get_output_dir": lambda plain, *a, **kw: self._to_folder(plain(*a, **kw)),
                "Trainer.save_model": self._saves_model,
            },
            "transformers.trainer_callback": {"TrainerState.save_to_json": writes},
        }

    def install(self) -> None:
        """Patch the modules that are imported, and the others once they are imported."""
        for module in filter(None, map(sys.modules.get, self._table)):
            self._patch(module)
        sys.meta_path.insert(0, self)

    def uninstall(self) -> None:
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)
        for owner, name, ours, plain in reversed(self._patched):
            if vars(owner).get(name) is ours:
                setattr(owner, name, plain)
        self._patched.clear()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As a finder in sys.meta_path: return the others' spec; patch the module once executed."""
        if name not in self._table:
            return None
        others = (one for one in sys.meta_path if one is not self)
        found = (one.find_spec(name, path, target) for one in others)
        spec = next((one for one in found if one is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def executed(module: ModuleType) -> None:
                execute(module)
                self._patch(module)

            spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec

    def _patch(self, module: ModuleType) -> None:
        for path, act in self._table[module.__name__].items():
            *within, name = path.split(".")
            owner = functools.reduce(getattr, within, module)
            plain = vars(owner).get(name)
            if plain is None or any(plain is ours for _, _, ours, _ in self._patched):
                continue
            # A function with several names gets one patch: pickle looks it up by its own name.
            same = (ours for _, _, ours, other in self._patched if other is plain)
            ours = next(same, None) or _wrapped(act, plain)
            setattr(owner, name, ours)
            self._patched.append((owner, name, ours, plain))

    def _scratch(self, path: Any, *, link: bool = False) -> Path | None:
        """The scratch path for a path of the user's; None for anything else. `link`: of a symbolic
        link itself."""
        if not isinstance(path, str | os.PathLike):
            return None
        with contextlib.suppress(OSError, ValueError, TypeError):
            real = os.path.realpath(os.fspath(path))
            if link and isinstance(real, str):
                real = str(Path(path).parent.resolve() / Path(path).name)
            if isinstance(real, str) and not f"{real}/".startswith(f"{self._own}/"):
                return self._folder / real.lstrip("/")
        return None

    def _there(self, path: Any, *, link: bool = False) -> Path | None:
        found = self._scratch(path, link=link)
        return found if found is not None and found.exists() else None

    def _to_write(self, path: Any) -> Any:
        """The path to save to: the user's own path if that is no file, or its folder is missing."""
        found = self._scratch(path)
        if found is None:
            return path
        user = Path(path)
        if (user.exists() and not user.is_file()) or not user.resolve().parent.is_dir():
            return path
        found.parent.mkdir(parents=True, exist_ok=True)
        self._written.add(Path(path).name)
        return str(found)

    def _to_read(self, path: Any) -> Any:
        found = self._there(path)
        return path if found is None or found.is_dir() else str(found)

    def _to_folder(self, path: Any) -> Any:
        if (found := self._scratch(path)) is None:
            return path
        found.mkdir(parents=True, exist_ok=True)
        return str(found)

    def _saves_model(
        self, plain: Any, trainer: Any, output_dir: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Save a model; if it would overwrite a checkpoint of the user's, in a scratch folder."""
        output_dir = trainer.args.output_dir if output_dir is None else output_dir
        to = self._to_folder(output_dir) if self._is_users(output_dir) else output_dir
        return plain(trainer, to, *args, **kwargs)

    def _is_users(self, place: Any) -> bool:
        """Whether a file is a checkpoint older than this process, or a folder holds one."""
        path = Path(place)
        below = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
        every = (one for one in itertools.chain([path], below) if self._is_older(one))
        return any(one.name.endswith(SUFFIXES) or _is_saved(one) for one in every)

    def _is_older(self, file: Path) -> bool:
        with contextlib.suppress(OSError):
            found = self._stat(file)  # not of a scratch copy
            return stat.S_ISREG(found.st_mode) and found.st_mtime < self._began
        return False

    def _is_contained(self, file: Any) -> bool:
        """Whether a file that is opened to write is the user's checkpoint, or a new one."""
        try:
            self._stat(file)  # not of a scratch copy
        except OSError:
            return str(file).endswith(_SURE)
        return self._is_users(file)

    def _moves(self, plain: Any, src: Any, dst: Any, **kwargs: Any) -> Any:
        """Move a scratch copy to a scratch path. A checkpoint of the user's is copied there and not
        overwritten; a folder that holds one stays."""
        found, to = self._there(src, link=True), self._scratch(dst, link=True)
        users = self._scratch(src) is not None and self._is_users(src)
        if kwargs or not (found or users or (to is not None and self._is_users(dst))):
            return plain(src, dst, **kwargs)
        to, folder = to or Path(dst), Path(src).is_dir()
        if found or not (folder and users):
            to.parent.mkdir(parents=True, exist_ok=True)
            self._written.add(to.name)
            if to.is_dir():
                shutil.rmtree(to)
            (shutil.copyfile if users and not found else shutil.move)(found or src, to)
        # A folder has two parts: the scratch copy of its checkpoints, and the user's other files. A
        # file has two if the script has made it empty before, as a temporary file.
        if found and folder and not users:
            return plain(src, dst)
        if folder and users:
            self._gone.add(os.path.realpath(src))
        elif not users and os.path.lexists(src):
            Path(src).unlink()
        return None

    def _links(self, plain: Any, src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
        """Link to a scratch copy in the scratch folder."""
        to = self._scratch(dst, link=True) if isinstance(src, str | os.PathLike) else None
        there = self._there(Path(dst).parent / src) if to is not None else None
        if to is None or there is None or kwargs.get("dir_fd") is not None:
            return plain(src, dst, *args, **kwargs)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.unlink(missing_ok=True)
        return plain(str(there), str(to))

    def _removes(self, plain: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Remove a scratch copy; a checkpoint of the user's stays."""
        if kwargs.get("dir_fd") is not None:
            return plain(path, *args, **kwargs)
        found = self._there(path, link=True)
        if found is not None and found.is_dir():
            shutil.rmtree(found)
        elif found is not None:
            found.unlink()
            if not os.path.lexists(path):
                return None
        if self._scratch(path) is None or not self._is_users(path):
            return plain(path, *args, **kwargs)
        self._gone.add(os.path.realpath(path))
        return None

    def _makes(self, plain: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a folder, unless the script has removed or renamed it and it stayed."""
        if self._gone and (real := os.path.realpath(path)) in self._gone:
            return self._gone.discard(real)
        plain(path, *args, **kwargs)
        if kwargs.get("dir_fd") is None and self._scratch(path) is not None:
            with self._folder.with_name(MADE).open("ab") as file:
                file.write(os.fsencode(os.path.realpath(path)) + b"\0")
        return None

    def _looks(self, plain: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        there = self._checkpoint(path) if kwargs.get("dir_fd") is None else path
        return plain(there, *args, **kwargs)

    def _opens(self, plain: Any, file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
        how = set(mode) if isinstance(mode, str) else set("a")
        if not how & set("wax+"):
            file = self._checkpoint(file)
        elif "w" in how and self._is_named(file) and self._is_contained(file):
            file = self._to_write(file)
        return plain(file, mode, *args, **kwargs)

    def _checkpoint(self, path: Any) -> Any:
        """As `_to_read`, but quick for files that are no checkpoints, such as a dataset's."""
        return self._to_read(path) if self._is_named(path) else path

    def _is_named(self, path: Any) -> bool:
        """Whether a path has a checkpoint's suffix, or the name of one in the scratch folder."""
        name = str(path) if isinstance(path, str | os.PathLike) else ""
        return name.endswith(SUFFIXES) or name.rpartition("/")[2] in self._written

    def _copies(self, plain: Any, src: Any, dst: Any, **kwargs: Any) -> Any:
        found = self._there(src)
        if found is None:
            return plain(src, dst, **kwargs)
        plain(str(found), self._to_write(dst), **kwargs)
        return dst

    def _skips(self, plain: Any, src: Any, dst: Any, **kwargs: Any) -> Any:
        return None if self._there(src) else plain(src, dst, **kwargs)

    def _streams(self, plain: Any, files: Any, path: Any, mode: str) -> Any:
        to = self._scratch(path) if mode == "wb" else None
        if to is not None:
            to.parent.mkdir(parents=True, exist_ok=True)
        return plain(files, to or Path(self._to_read(path)), mode)


def remove_empty(listed: Path) -> None:
    """Remove the folders in a file like MADE that are empty, so that no resume finds them."""
    with contextlib.suppress(OSError):
        for made in reversed(listed.read_bytes().split(b"\0")):
            with contextlib.suppress(OSError):  # it is not empty
                Path(os.fsdecode(made)).rmdir()


def _is_saved(file: Path) -> bool:
    """Whether a file begins as those of `torch.save` do."""
    with contextlib.suppress(OSError), file.open("rb") as opened:
        begins = opened.read(200)
        return begins.startswith(_SAVED[1]) or (begins.startswith(_SAVED[0]) and b"pkl" in begins)
    return False


def _rerouting(at: int, to: Callable[[Any], Any]) -> Act:
    """Return an Act that replaces a path by `to(path)`: the argument number `at`, or a keyword."""

    def act(plain: Any, /, *args: Any, **kwargs: Any) -> Any:
        if len(args) > at:
            args = (*args[:at], to(args[at]), *args[at + 1 :])
        for name in ("f", "filename", "path", "path_or_url", "json_path"):
            if name in kwargs:
                kwargs[name] = to(kwargs[name])
        return plain(*args, **kwargs)

    return act


def _wrapped(act: Act, plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        return act(plain, *args, **kwargs)

    return call
