"""What all ranks of a job do at a step: alike, or their collectives never meet.

NCCL holds whether an operation is captured for a property of all ranks that take part in it, the
launch of a graph included (its user guide, 'Using NCCL with CUDA Graphs'). So each rank says what
it would do, and the greatest that any says holds for all: whether a graph is kept, through the
process group's store; what is done at a step, where all ranks are on one host, through memory that
they share: by the store it would take as long as a short step.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from advisor.errors import RanksDiffer
from advisor.tuners.act.ranks import Group

AGREE_S = 50.0
"""For the other ranks to say what they found, when all have just taken the same step."""
STEP_S = 600.0
"""For the other ranks to come to a step: as long as NCCL waits for them."""
SPINS, NAP_S = 2000, 5e-5
"""Looks at what the others say before this rank sleeps between two, and for how long."""
SHARED = Path("/dev/shm")
"""Where a file is memory."""

_made = itertools.count()


class Unison:
    """The ranks of a process group; alone it agrees with itself."""

    def __init__(self, group: Group | None) -> None:
        self._group = group
        self._key = f"advisor/unison/{next(_made)}"
        self._rounds = itertools.count()
        self._most: Callable[[int], int] = self._most_by_store if group else int

    @property
    def alone(self) -> bool:
        """Whether there are no other ranks."""
        return self._group is None

    def most(self, what: int) -> int:
        """The greatest that any rank says of this step, from 0 to 3; all of them say it once.

        Raises:
            RanksDiffer: a rank does not come to this step.
        """
        return self._most(what)

    def agree(self, why: str) -> str:
        """'' where all ranks say so, in time; else why not: what this one says, or another.

        Raises:
            RanksDiffer: the store is gone.
        """
        if self._group is None:
            return why
        said = self._gathered(why, AGREE_S)
        if said is None:
            return why or f"not all ranks said within {AGREE_S:.0f} s whether they can"
        others = (f"on rank {rank} {other}" for rank, other in said.items() if other)
        return why or next(others, "")

    def any(self, doubt: bool) -> bool:
        """Whether any rank has a doubt. Raises as `agree`."""
        return bool(self.agree("doubt" if doubt else ""))

    @contextlib.contextmanager
    def ending(self, within_s: float) -> Iterator[None]:
        """End this process if it is still in here then: what it waits for is a rank that is gone,
        and nothing in Python wakes it."""
        if self._group is None:
            yield
            return
        timer = threading.Timer(within_s, _end, (self._group.rank, within_s))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _gathered(self, said: str, within_s: float) -> dict[int, str] | None:
        """What each rank says; None, on all alike, where one does not come in time."""
        group = self._group
        assert group is not None
        store, number = group.store, next(self._rounds)
        key = f"{self._key}/{number}"
        try:
            store.append(f"{key}/said", f"{group.rank}={' '.join(said.split())}\n")
            if store.add(f"{key}/count", 1) == group.size:
                # Who comes last decides, unless one that waited for it has given up.
                store.compare_set(f"{key}/all", "", "yes")
                for part in ("said", "count", "all"):
                    store.delete_key(f"{self._key}/{number - 1}/{part}")
            elif group.get(f"{key}/all", within_s) is None:
                store.compare_set(f"{key}/all", "", "no")
            whole, told = store.get(f"{key}/all"), store.get(f"{key}/said").decode()
        except RuntimeError as exc:  # DistNetworkError
            raise RanksDiffer(
                f"rank {group.rank} of {group.size} cannot tell what the others do: the process "
                "group's store is gone, most likely with rank 0, whose own message says why"
            ) from exc
        if whole != b"yes":
            return None
        lines = (line.partition("=") for line in told.splitlines())
        return dict(sorted((int(rank), words) for rank, _, words in lines))

    def _most_by_store(self, what: int) -> int:
        said = self._gathered(str(what), STEP_S)
        if said is None:
            raise _late(self._group)
        return max(map(int, said.values()))

    def share(self) -> None:
        """Say what is done at steps through memory, where all ranks are on one host. Raises as
        `agree`."""
        group = self._group
        if group is None:
            return
        token = secrets.token_hex(16)
        made = _file(token, group.size) if group.rank == 0 else ""
        try:
            told = self._gathered(f"{made}:{token}", AGREE_S)
            path, _, token = (told or {}).get(0, "").rpartition(":")
            board = _Board.opened(path, token, group)
            apart = self.agree("" if board else "it shares no memory with rank 0")
        finally:
            if made:  # whoever has opened it keeps it
                Path(made).unlink(missing_ok=True)
        if board is not None and not apart:
            self._most = board.most


class _Board:
    """Two cells for each rank, for steps in turn: who writes the next has read the last."""

    def __init__(self, memory: mmap.mmap, group: Group) -> None:
        self._cells = memoryview(memory).cast("q")
        self._group = group
        self._step = 0

    @classmethod
    def opened(cls, path: str, token: str, group: Group) -> _Board | None:
        """None where there is no such memory here, or it is another's."""
        try:
            with Path(path).open("r+b") as file:
                memory = mmap.mmap(file.fileno(), 0)
        except (OSError, ValueError):
            return None
        at = _BYTES * group.size
        if not token or memory[at : at + len(token)] != token.encode():
            return None
        return cls(memory, group)

    def most(self, what: int) -> int:
        """As `Unison.most`."""
        self._step += 1
        mine, cells = self._cell(self._group.rank), self._cells
        cells[mine] = 4 * self._step + what  # one aligned word: it is seen whole, or not yet
        for rank in range(self._group.size):
            at = self._cell(rank)
            if cells[at] < 4 * self._step:
                self._wait(at)
            what = max(what, cells[at] - 4 * self._step)
        return what

    def _cell(self, rank: int) -> int:
        return rank * _BYTES // 8 + self._step % 2

    def _wait(self, at: int) -> None:
        until = time.monotonic() + STEP_S
        for look in itertools.count():
            if self._cells[at] >= 4 * self._step:
                return
            if look > SPINS:
                time.sleep(NAP_S)
                if time.monotonic() > until:
                    raise _late(self._group)


_BYTES = 128
"""Of a rank's cells: no cache line is two ranks'."""


def _file(token: str, size: int) -> str:
    """A file in memory for so many ranks; '' where it cannot be made."""
    try:
        handle, path = tempfile.mkstemp(prefix="advisor-", dir=SHARED)
        with os.fdopen(handle, "wb") as file:
            file.write(bytes(_BYTES * size) + token.encode())
    except OSError:
        return ""
    return path


def _late(group: Group | None) -> RanksDiffer:
    rank = group.rank if group else 0
    return RanksDiffer(
        f"rank {rank}: the others did not come to its step within {STEP_S:.0f} s; their own "
        "messages say why"
    )


def _end(rank: int, within_s: float) -> None:
    sys.stderr.write(
        f"advisor: rank {rank} has waited {within_s:.0f} s for the others while its step was "
        "captured, and ends; their own messages say why\n"
    )
    sys.stderr.flush()
    os._exit(1)
