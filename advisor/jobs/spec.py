"""The request for a job, which the client sends to the server and the server to a worker."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, get_args

import msgspec

from advisor.cache.domain import is_line
from advisor.cache.kinds import Words
from advisor.cache.task import Task, option_words, permissions, rows, shell
from advisor.errors import AdvisorError, UsageError, printable
from advisor.tuners.search.plan import Plan

State = Literal["queued", "preempted", "running", "done", "failed", "cancelled"]
STATES: tuple[State, ...] = get_args(State)
WAITING: tuple[State, ...] = ("queued", "preempted")
LIVE: tuple[State, ...] = (*WAITING, "running")
MAX_STUDY = 8 * 2**20  # bytes of one search file, at most
MAX_REPORTED_TRIALS = 200  # trials in one heartbeat of a worker, at most
MAX_GPUS = 64
MAX_SPEC_BYTES = 2**16  # bytes of a spec as JSON, at most
_MAX_SHOWN = 300
_GPU = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._+/-]{0,63}")
_OF_PLAN = {row.keyword for row in rows(Plan).values()}
_OF_TASK = {row.keyword for row in rows(Task).values() if row.option or row.switches} - {"target"}


class AttemptOver(AdvisorError):
    """An attempt is over: the server takes nothing from its worker, and the worker ends."""


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command or a target, its options, the device and the code.

    Attributes:
        command: the command of a run, as typed; else `target`: as for `advisor tune`.
        options: those of `advisor tune` except `force`, by keyword, with JSON values.
        gpu: a part of the device's name, 'H100'; '' for any. See `gpu_matches`.
        gpus: the number of GPUs; 0 for the CPU.
        env: Ray's runtime environment: `pip`, requirements separated by blanks, and `container`, an
            image; empty for the worker's own environment.
        archive: SHA-256 of the code archive, or ''; `folder`: the command's folder in the archive.
        force: measure again even if a record exists.

    Raises:
        UsageError: a value is outside its domain, or two do not go together.
    """

    command: tuple[str, ...] = ()
    target: str = ""
    options: dict[str, str | int | float | bool | list[Any] | dict[str, Any] | None] = {}
    gpu: str = ""
    gpus: int = 1
    env: dict[Literal["pip", "container"], Annotated[str, msgspec.Meta(min_length=1)]] = {}
    archive: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$")] = ""
    folder: str = ""
    force: bool = False

    def __post_init__(self) -> None:
        if self.gpu and not self.gpus:
            raise UsageError(f"gpu {self.gpu[:80]!r}: the job is for the CPU; leave gpu out")
        if self.gpu and not _GPU.fullmatch(self.gpu):
            raise UsageError(f"gpu {self.gpu[:80]!r}: expected a part of a GPU's name, e.g. H100")
        if not 0 <= self.gpus <= MAX_GPUS:
            raise UsageError(f"gpus {self.gpus}: expected 0 for the CPU, or 1 to {MAX_GPUS}")
        device = str(self.options.get("device") or "")
        if device and (device == "cpu") != (self.gpus == 0):
            count = f"device {device[:20]!r} with gpus {self.gpus}"
            raise UsageError(f"{count}: expected gpus 0 for device cpu, and 1 or more otherwise")
        if bool(self.command) == bool(self.target):
            raise UsageError("command, target: give one of the two")
        if self.command and not Words().checked("command", self.command)[0]:
            raise UsageError("command: its first word, the program, is empty")
        if self.target.startswith("-"):
            raise UsageError(f"target {self.target[:80]!r}: expected a target such as model.py:Net")
        if "force" in self.options:
            raise UsageError("options: 'force' is no option; give it as a field of the job")
        if not all(map(is_line, (self.target, self.folder, *self.env.values(), *self.words()))):
            raise UsageError("job: expected texts of one line each, without control characters")
        if len(json.dumps(self.plain)) > MAX_SPEC_BYTES:
            raise UsageError(f"job: expected at most {MAX_SPEC_BYTES} bytes as JSON")
        path = PurePosixPath(self.folder)
        outside = path.is_absolute() or ".." in path.parts or "\\" in self.folder
        if outside or (self.folder and not self.archive):
            raise UsageError(f"folder {self.folder[:80]!r}: expected a folder in the archive")

    @classmethod
    def given(
        cls, command: Sequence[str], options: Mapping[str, Any], gpus: int | None, **rest: Any
    ) -> JobSpec:
        """A job from a user's arguments; None means not given. Device 'cpu' implies gpus 0."""
        if isinstance(command, str):
            raise UsageError(f"command {command[:80]!r}: expected a list of words")
        options = {name: value for name, value in options.items() if value is not None}
        cpu = options.get("device") == "cpu"
        gpus = (0 if cpu else 1) if gpus is None else gpus
        if command and cpu and not gpus:
            del options["device"]  # the run itself chooses the CPU
        return cls.of({"command": command, "options": options, "gpus": gpus, **rest})

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> JobSpec:
        """A job from decoded JSON. Raises UsageError if the JSON describes no job."""
        try:
            return msgspec.convert(plain, cls)
        except msgspec.ValidationError as exc:
            if isinstance(exc.__cause__, UsageError):
                raise exc.__cause__ from None
            raise UsageError(f"job: {printable(str(exc))[:200]}") from exc
        except RecursionError as exc:
            raise UsageError("job: lists or maps are nested too deeply") from exc

    @property
    def plain(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found | {"command": list(self.command)}

    @property
    def plan(self) -> Plan:
        given = {name: value for name, value in self.options.items() if name in _OF_PLAN}
        return Plan.of(given | {"force": self.force})

    @property
    def key(self) -> str:
        """A digest of the request. Equal requests have the same key and are one job."""
        of = {**self.plain, "options": self.words()}
        del of["force"]
        return hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()

    @property
    def what(self) -> str:
        """The command, or the target with its options, as a line for people."""
        text = shlex.join(self.command or (self.target, *self._task_words()))
        return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]}…"

    def words(self) -> list[str]:
        """The options as words of `advisor tune`'s command line."""
        plan = dataclasses.replace(self.plan, force=False)
        return self._task_words() + _words(Plan, dataclasses.asdict(plan))

    def _task_words(self) -> list[str]:
        given = {name: value for name, value in self.options.items() if name not in _OF_PLAN}
        if more := sorted(given.keys() - _OF_TASK):
            known = ", ".join(sorted(_OF_TASK | _OF_PLAN - {"force"}))
            raise UsageError(f"{more[0][:80]}: not an option; expected one of {known}")
        if self.command:
            return _words(Task, permissions(given))
        return shell(Task.of(self.target, given))


msgspec.json.Decoder(JobSpec)  # described before threads use it; see `cache.codec`


def _words(cls: type, values: Mapping[str, Any]) -> list[str]:
    """The options for the fields whose values differ from their default, in the table's order."""
    held = [(row, values.get(name, row.default)) for name, row in rows(cls).items()]
    return option_words((row, value) for row, value in held if value != row.default)


def where(gpu: str, gpus: int) -> str:
    """The device that a job needs, for people: '4 x H100', 'any GPU', 'the CPU'."""
    named = gpu or "any GPU"
    return "the CPU" if not gpus else named if gpus == 1 else f"{gpus} x {named}"


def gpu_matches(wanted: str, name: str) -> bool:
    """Whether a GPU's name contains the wanted text. A cluster may know only the kind, 'H100': that
    matches if it is a word of the wanted text, 'NVIDIA H100 80GB HBM3'."""
    if wanted.casefold() in name.casefold():
        return True
    asked, kind = (text.casefold().replace("-", " ") for text in (wanted, name))
    return bool(kind) and re.search(rf"(?<!\w){re.escape(kind)}(?!\w)", asked) is not None
