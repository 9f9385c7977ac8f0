"""Which record a script asks for: what it says, where that is looked for, what is found."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from advisor.cache.arguments import MODES, Shapes, check, mix_of, parse_shapes
from advisor.cache.config import Config, Value
from advisor.cache.match import Match, Query, best
from advisor.cache.record import Record
from advisor.cache.records import Held, Listing, Records, united
from advisor.cache.stores import Remote, Store
from advisor.cache.stores.patience import within
from advisor.errors import NoRecord, StoreError, UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from advisor.tuners.target import Spec

_log = logging.getLogger("advisor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a script asks for, checked."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: str | None
    mode: str
    device: str
    optimizer: str | None
    precisions: tuple[str, ...] | None

    @classmethod
    def of(
        cls,
        target: object,
        shape: Shapes | None,
        batch: int | str | None,
        dtype: str | torch.dtype | None,
        mode: str,
        device: str | torch.device | None,
        optimizer: str | None,
        precisions: Sequence[str] | None,
    ) -> Asked:
        from torch import nn

        from advisor.tuners.environment import default_device
        from advisor.tuners.knobs import PRECISIONS
        from advisor.tuners.measure.workload import DTYPES, OPTIMIZERS

        if not isinstance(target, str | nn.Module | None):
            raise UsageError(f"target {target!r}: expected a target's name or an nn.Module")
        if batch not in (None, "free") and known_batch(None, batch) is None:
            raise UsageError(f"batch {batch!r}: expected a number of at least 1, or 'free'")
        kind = None if dtype is None else str(dtype).removeprefix("torch.")
        check("mode", mode, MODES)
        if kind is not None:
            check("dtype", kind, DTYPES)
        if optimizer is not None:
            check("optimizer", optimizer, tuple(OPTIMIZERS))
        if isinstance(precisions, str):
            precisions = precisions.split(",")
        for precision in precisions or ():
            check("precision", precision, PRECISIONS)
        return cls(
            shapes=() if shape is None else parse_shapes(shape),
            dtype=kind,
            mode=mode,
            device=default_device() if device is None else str(device),
            optimizer=optimizer,
            precisions=None if precisions is None else tuple(precisions),
        )

    def query(self, model: str | None, deterministic: bool | None, batch: int | None) -> Query:
        from advisor.tuners.environment import detect

        world_size = os.environ.get("WORLD_SIZE", "")
        return Query(
            environment=detect(self.device),
            model=model,
            shape=self.shapes[0][1:] if self.shapes else None,
            mix=mix_of(self.shapes) if self.shapes else None,
            dtype=self.dtype,
            mode=self.mode,
            optimizer=self.optimizer,
            world_size=int(world_size) if world_size.isdigit() else 1,
            deterministic=True if deterministic is None and _is_deterministic() else deterministic,
            precisions=self.precisions,
            batch=batch,
        )


def known_batch(shape: Shapes | None, batch: int | str | None) -> int | None:
    """The batch size that the script itself names, None where it leaves it open or is wrong."""
    if batch is None and shape is not None:
        with contextlib.suppress(UsageError):
            return parse_shapes(shape)[0][0]
    return batch if isinstance(batch, int) and batch >= 1 else None


def model_of(target: str | nn.Module | None) -> str | None:
    if target is None or isinstance(target, str):
        return None
    from advisor.tuners import fingerprint

    return fingerprint.of_model(target)


def _is_deterministic() -> bool:
    """The user has already asked PyTorch for determinism: that is not for advice to undo."""
    import torch

    return bool(torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic)


@dataclass(slots=True)
class Found:
    """What a lookup saw.

    Attributes:
        match: the best, or a miss.
        held: the records of this target, each where it is.
        stores: each store asked, in order, with what it said.
        damaged: one line for each record that may not be used.
        failed: the faults of stores that could not be read.
    """

    match: Match
    held: list[Held]
    stores: list[tuple[str, str]]
    damaged: list[str]
    failed: list[StoreError]


def find(
    records: Records, target: object, query: Query, arguments: Mapping[str, Value] | None
) -> Found:
    """Look into one store after another until a record fits exactly.

    What is found behind the first store is copied into those before it. A remote store is waited
    for no longer than its patience; what it then says too late is kept locally for the next run.

    Raises:
        UsageError: the target is wrong.
    """
    read, fits = _how(records, target, query)
    found = Found(Match(kind="miss", record=None, differs=()), [], [], [], [])
    behind: list[Store] = []
    for store in records.stores:
        began = time.perf_counter()
        try:
            listing = _ask(records, store, read, lambda late: _keep(records, late, query))
        except StoreError as exc:
            found.failed.append(exc)
            found.stores.append((store.url, str(exc).removeprefix(f"cache {store.url}: ")))
            continue
        found.damaged += listing.damaged
        fitting = [one for one in listing.held if fits(one.record)]
        found.held = united([*found.held, *fitting])
        number = len(fitting)
        took = f"{(time.perf_counter() - began) * 1e3:.1f} ms"
        count = f"{number} record{'s' * (number != 1)} of it" if number else "nothing of it"
        found.stores.append((store.url, f"{count} ({took})"))
        found.match = _best(_meant(found.held, target, arguments), query)
        if found.match.kind == "exact" and found.match.record and not found.match.record.stale:
            break
        behind.append(store)
    for one in found.held:
        if one.record is found.match.record and os.environ.get("RANK", "0") == "0":
            _write_back(records, one, behind)
    return found


def _write_back(records: Records, one: Held, stores: Sequence[Store]) -> None:
    """Copy a record into the stores looked into before its own, where they take it."""
    for store in stores:
        if store is one.store:
            return
        try:
            if isinstance(store, Remote):
                copy = functools.partial(records.copy, one, store)
                within(store.patience_s, copy, store.url, lambda _done: None)
            else:
                records.copy(one, store)
        except StoreError as exc:  # read-only, or away: it stays where it is
            _log.debug("not copied: %s", exc)


def _how(
    records: Records, target: object, query: Query
) -> tuple[Callable[[Store], Listing], Callable[[Record], bool]]:
    """How a store is read for a target, and which of what comes back is of it."""
    if target is None:
        origins = _origins()
        return records.look_into, lambda record: record.target.origin in origins
    if not isinstance(target, str):
        return (
            lambda store: records.look_into(store, model=query.model),
            lambda record: record.key.model == query.model,
        )
    spec = _spec(target)
    if spec.attribute:
        return (
            lambda store: records.look_into(store, target=spec.name),
            lambda record: record.target.name == spec.name,
        )
    return records.look_into, lambda record: record.target.name.split(":")[0] == spec.name


def _spec(text: str) -> Spec:
    """Of a file looked for here, else beside the script, wherever that was started from."""
    from advisor.tuners.target import parse

    try:
        return parse(text)
    except UsageError:
        with contextlib.suppress(UsageError):
            return parse(text, base=_script().parent)
        raise


def _ask(
    records: Records,
    store: Store,
    read: Callable[[Store], Listing],
    late: Callable[[Listing], None],
) -> Listing:
    """What a store has. Of a remote one's patience, importing its client is no part."""
    if not isinstance(store, Remote):
        return read(store)
    began = time.monotonic()
    within(store.patience_s, store.reach, store.url, lambda _done: None)
    left = store.patience_s - (time.monotonic() - began)
    store.load()
    return within(max(left, store.patience_s / 4), lambda: read(store), store.url, late)


def _keep(records: Records, listing: Listing, query: Query) -> None:
    """Put what came too late into the first local store that takes it."""
    match = best(query, [one.record for one in listing.held])
    for one in listing.held:
        if one.record is match.record and os.environ.get("RANK", "0") == "0":
            try:
                records.keep(one)
            except StoreError as exc:
                _log.debug("not kept: %s", exc)


def _meant(
    held: Sequence[Held], target: object, arguments: Mapping[str, Value] | None
) -> list[Record]:
    found = [one.record for one in held]
    if isinstance(target, str):
        # The very file first; another of the same name where it has moved (a mount, a copy).
        origin = _spec(target).origin
        found = [record for record in found if record.target.origin == origin] or found
    if arguments is not None:
        found = [record for record in found if record.target.arguments == Config(arguments)]
    return found


def _best(found: Sequence[Record], query: Query) -> Match:
    """As asked; else a record of more precisions, whose trials in these are the answer. Where
    determinism is not asked for, a record without it comes first."""
    loose = dataclasses.replace(query, precisions=None)
    if query.deterministic is None:
        query = dataclasses.replace(query, deterministic=False)
    return next(
        (m for q in (query, loose) if (m := best(q, found)).record is not None), best(loose, found)
    )


def decided(
    found: Found, target: object, query: Query, arguments: Mapping[str, Value] | None
) -> Match:
    """The match, where it is plain which record is meant.

    Raises:
        NoRecord: records of several targets or samples fit.
    """
    match = found.match
    if match.record is None or not isinstance(target, str | None):
        return match
    loose = dataclasses.replace(query, precisions=None)
    fitting = [
        record
        for record in _meant(found.held, target, arguments)
        if best(loose, [record]).record is not None
    ]
    rivals: dict[object, Record] = {(r.target, r.key.sample): r for r in fitting}
    if len(rivals) < 2:
        return match
    if arguments is None and not all(len(record.target.arguments) for record in rivals.values()):
        # Without model_args, the model that is built without them is meant.
        plain = dataclasses.replace(found, match=_best(_meant(found.held, target, {}), query))
        return decided(plain, target, query, {})
    listed = "; ".join(map(_named, rivals.values()))
    raise NoRecord(
        f"several records fit: {listed}. Name one: apply(target, shape=..., dtype=..., "
        "model_args=...)"
    )


def _named(record: Record) -> str:
    given = ", ".join(f"{name}={value}" for name, value in record.target.arguments.items())
    return f"{record.target.name}{f'({given})' if given else ''} {record.key.sample}"


def _script() -> Path:
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file).resolve() if file else Path.cwd() / "(no script)"


def _origins() -> set[str]:
    """Of the running script and the modules beside it."""
    from advisor.tuners.target import origin_of

    script = _script()
    mine = {origin_of(script)}
    if script.parent.is_dir():
        mine |= {origin_of(path) for path in script.parent.glob("*.py")}
    return mine


def why_missed(
    target: object, shapes: Sequence[tuple[int, ...]], match: Match, query: Query
) -> str:
    name = target if isinstance(target, str) else "TARGET"
    if target is None:
        what = f"nothing was tuned for {_script().name} or a module beside it"
    elif isinstance(target, str):
        what = f"{target} was not tuned for this"
    else:
        what = f"this {type(target).__name__} was not tuned for this"
    what += f" on {query.environment.device.name}"
    if match.differs:
        what += f" (the nearest record differs in {', '.join(map(str, match.differs))})"
    sizes = ["x".join(map(str, shape)) for shape in shapes] or ["BATCHxSAMPLE"]
    return f"{what}; run: advisor tune {name} --shape {' --shape '.join(sizes)}"
