"""apply() and lookup(): what was found, served to a training script."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from advisor.cache import settings
from advisor.cache.arguments import Shapes, check, check_length, parse_bytes, parse_duration
from advisor.cache.config import Config, Value
from advisor.cache.explanation import Explanation
from advisor.cache.match import Match, Query
from advisor.cache.record import Record
from advisor.errors import AdvisorError, AdvisorWarning, NoRecord
from advisor.finding.agree import decided_by_first
from advisor.finding.answer import Limits, akin, answer, carried, over
from advisor.finding.find import Asked, Found, decided, find, known_batch, model_of, why_missed
from advisor.opening import Cache, open_records
from advisor.printed import shapes_of, tune_line
from advisor.tuners.length import Length

if TYPE_CHECKING:
    import torch
    from torch import nn

    from advisor.tuners.act.advice import Advice

_log = logging.getLogger("advisor")

ON_MISS = ("default", "nearest", "error")


def apply(
    target: str | nn.Module | None = None,
    *,
    shape: Shapes | None = None,
    batch: int | str | None = None,
    dtype: str | torch.dtype | None = None,
    mode: str = "train",
    device: str | torch.device | None = None,
    optimizer: str | None = None,
    model_args: Mapping[str, Value] | None = None,
    deterministic: bool | None = None,
    precisions: Sequence[str] | None = None,
    max_memory: int | str | None = None,
    steps: int | None = None,
    duration: float | str | None = None,
    cache: Cache = None,
    on_miss: str | None = None,
    strict: bool = False,
) -> Advice:
    """Set the process-wide flags that were found best, and return the advice for the rest.

    Never breaks a run: without a fitting record the advice changes nothing, and one
    AdvisorWarning says why. Creates no CUDA context and starts no process.

    Args:
        target: as given to `advisor tune`, or the model itself; None for what was tuned for the
            running script or a module beside it.
        shape: of one batch, (64, 3, 256, 256) or '64x3x256x256'; its first number is the batch.
            A list of shapes for a job that was tuned for a mix of them.
        batch: another batch size than shape's, or 'free' for the best one that was found
            (`advice.batch_size` says which).
        dtype: of the input, e.g. 'int64'; default: whatever was tuned.
        mode: 'train' or 'infer'.
        device: 'cuda:0', 'cpu', ...; default: this rank's CUDA device, else the CPU.
        optimizer: 'sgd' or 'adamw'; default: whatever was tuned.
        model_args: what `--model-arg` gave; default: whatever was tuned.
        deterministic: only deterministic configs; implied where the process already asks
            PyTorch for deterministic algorithms.
        precisions: only these precisions.
        max_memory: bytes, or '20GiB': only configs whose measured peak is at most this.
        steps: how many steps this job has, at its batch: the best over that job, with what is
            paid before the first step counted in. `duration` is how long it runs instead:
            seconds, or '2h'. Default: what the record was tuned for.
        cache: store URL, or several, looked up in order; default: $ADVISOR_CACHE, else
            [tool.advisor] cache in pyproject.toml, else the user's cache folder.
        on_miss: 'default' (torch's defaults), 'nearest' (what is safe to carry over from the
            nearest record: same target, other shape or device) or 'error', which is strict=True.
            Default: $ADVISOR_ON_MISS, else [tool.advisor] on-miss.
        strict: raise instead of warning.

    In an initialised torch.distributed process group, rank 0 looks up for all ranks; every rank
    must call this then.

    Raises:
        AdvisorError: with strict=True, why there is no advice.
    """
    advice = lookup(
        target,
        shape=shape,
        batch=batch,
        dtype=dtype,
        mode=mode,
        device=device,
        optimizer=optimizer,
        model_args=model_args,
        deterministic=deterministic,
        precisions=precisions,
        max_memory=max_memory,
        steps=steps,
        duration=duration,
        cache=cache,
        on_miss=on_miss,
        strict=strict,
    )
    advice.set_flags()
    return advice


def lookup(
    target: str | nn.Module | None = None,
    *,
    shape: Shapes | None = None,
    batch: int | str | None = None,
    dtype: str | torch.dtype | None = None,
    mode: str = "train",
    device: str | torch.device | None = None,
    optimizer: str | None = None,
    model_args: Mapping[str, Value] | None = None,
    deterministic: bool | None = None,
    precisions: Sequence[str] | None = None,
    max_memory: int | str | None = None,
    steps: int | None = None,
    duration: float | str | None = None,
    cache: Cache = None,
    on_miss: str | None = None,
    strict: bool = False,
) -> Advice:
    """As `apply`, without touching any flag of the process.

    `lookup(...).explanation` says what was looked for, what was found, and in which fields every
    other record of the target differs.
    """
    from advisor.tuners.act.advice import Advice

    set_up_logging()
    known = known_batch(shape, batch)
    if os.environ.get("ADVISOR_DISABLE", "") not in ("", "0"):
        return Advice(
            Config(),
            device=_device(device),
            batch_size=known,
            status="disabled",
            reason="ADVISOR_DISABLE is set",
        )

    lookup_here = _Lookup(
        target=target,
        shape=shape,
        batch=batch,
        dtype=dtype,
        mode=mode,
        device=device,
        optimizer=optimizer,
        model_args=model_args,
        deterministic=deterministic,
        precisions=precisions,
        max_memory=max_memory,
        steps=steps,
        duration=duration,
        cache=cache,
        on_miss=on_miss,
        strict=strict,
    )
    # In a process group one rank decides for all: ranks that train differently wait for each other.
    return decided_by_first(lookup_here.advice, device=_device(device), batch=known)


@dataclass(slots=True, kw_only=True)
class _Lookup:
    """One lookup: the arguments as given, then what they mean and what was found."""

    target: str | nn.Module | None
    shape: Shapes | None
    batch: int | str | None
    dtype: str | torch.dtype | None
    mode: str
    device: str | torch.device | None
    optimizer: str | None
    model_args: Mapping[str, Value] | None
    deterministic: bool | None
    precisions: Sequence[str] | None
    max_memory: int | str | None
    steps: int | None
    duration: float | str | None
    cache: Cache
    on_miss: str | None
    strict: bool
    query: Query | None = None
    found: Found | None = None

    def advice(self) -> Advice:
        try:
            return self._served()
        except AdvisorError as exc:
            if self.strict or self.on_miss == "error":
                raise
            return self._nothing(str(exc))

    def _served(self) -> Advice:
        self.on_miss = self.on_miss or settings.on_miss() or "default"
        check("on_miss", self.on_miss, ON_MISS)
        asked = Asked.of(
            self.target,
            self.shape,
            self.batch,
            self.dtype,
            self.mode,
            self.device,
            self.optimizer,
            self.precisions,
        )
        known = known_batch(self.shape, self.batch)
        limits = Limits(
            batch=known, max_memory=parse_bytes(self.max_memory), precisions=asked.precisions
        )
        seconds = None if self.duration is None else parse_duration(self.duration)
        check_length(self.steps, seconds)
        query = self.query = asked.query(model_of(self.target), self.deterministic, known)
        found = self.found = find(
            open_records(self.cache, patient=False, fallback=True),
            self.target,
            query,
            self.model_args,
        )
        match = decided(found, self.target, query, self.model_args)
        record = match.record
        if record is None:
            if self.on_miss == "nearest" and akin(query, match.nearest):
                return self._near(asked, query, match)
            if len(found.failed) == len(found.stores):
                raise found.failed[0]
            raise NoRecord(why_missed(self.target, asked.shapes, match, query))
        if self.steps or seconds:
            length = Length(
                batch=known or record.batch, steps=self.steps or 0, seconds=seconds or 0.0
            )
            config, reason = over(record, limits, length, free=self.batch == "free")
        else:
            config, reason = answer(record, limits, free=self.batch == "free")
        return self._of_record(asked, query, match, record, config, reason)

    def _of_record(
        self,
        asked: Asked,
        query: Query,
        match: Match,
        record: Record,
        config: Config,
        reason: str,
    ) -> Advice:
        said = []
        # Every record is of one process: that a job has more is no reason to measure again.
        changed = [d for d in match.differs if d.field != "world_size"]
        if len(changed) < len(match.differs):
            reason += f"; measured in one process, this job has {query.world_size}"
        if changed:
            listed = ", ".join(map(str, changed))
            reason += f"; measured elsewhere: {listed}"
            said.append(
                f"{record.target.name} was tuned under other conditions ({listed}); its advice is "
                f"used and may be out of date. To measure again: {tune_line(record)}"
            )
        if record.stale:
            reason += f"; marked stale by advisor verify: {record.stale}"
            said.append(
                f"the advice for {record.target.name} no longer holds ({record.stale}); it is used "
                f"all the same. To measure again: {tune_line(record)}"
            )
        return self._made(
            config,
            device=asked.device,
            status="stale" if changed or record.stale else "exact",
            reason=reason,
            record=record,
            said=said,
        )

    def _near(self, asked: Asked, query: Query, match: Match) -> Advice:
        near = match.nearest
        assert near is not None
        config, carries = carried(near, query, known_batch(self.shape, self.batch))
        differs = ", ".join(map(str, match.differs))
        reason = f"the nearest record, {near.id}, differs in {differs}; {carries}"
        name = self.target if isinstance(self.target, str) else near.target.name
        sizes = ["x".join(map(str, shape)) for shape in asked.shapes] or shapes_of(near)
        return self._made(
            config,
            device=asked.device,
            status="nearest",
            reason=reason,
            record=near,
            said=[
                f"{name} was not tuned for this; {reason}. To measure: advisor tune {name} "
                f"--shape {' --shape '.join(sizes)}"
            ],
        )

    def _made(
        self,
        config: Config,
        *,
        device: str,
        status: str,
        reason: str,
        record: Record,
        said: Sequence[str],
    ) -> Advice:
        """The advice, and one warning for all there is to say."""
        from advisor.tuners.act.advice import Advice

        faults = self.found.failed if self.found else []
        lines = [*said, *(f"{fault}; looked on without it" for fault in faults)]
        if lines:
            _warn(". ".join(lines))
        _log.info("record %s (%s): %s", record.id, status, reason)
        size = config.get("batch_size")
        return Advice(
            config,
            device=device,
            batch_size=size if isinstance(size, int) else None,
            status=status,
            reason=reason,
            record=record,
            explanation=self._explained(status, reason, record.id),
        )

    def _nothing(self, why: str) -> Advice:
        from advisor.tuners.act.advice import Advice

        if self.found is not None:
            others = map(str, [*self.found.failed, *self.found.damaged])
            why = "; ".join([why, *(other for other in others if other != why)])
        _warn(f"{why}. Training goes on with torch's defaults")
        return Advice(
            Config(),
            device=_device(self.device),
            batch_size=known_batch(self.shape, self.batch),
            status="miss",
            reason=why,
            explanation=self._explained("miss", why, ""),
        )

    def _explained(self, status: str, reason: str, served: str) -> Explanation | None:
        """None where it did not come as far as looking."""
        if self.query is None or self.found is None:
            return None
        target = self.target if isinstance(self.target, str) else type(self.target).__name__
        return Explanation(
            target="" if self.target is None else target,
            query=self.query,
            stores=tuple(self.found.stores),
            served=served,
            status=status,
            reason=reason,
            refused=tuple(self.found.damaged),
            seen=tuple((one.store.url, one.record) for one in self.found.held),
        )


def _device(asked: str | torch.device | None) -> str:
    """Where training goes on without advice: the device asked for, if PyTorch knows it."""
    import torch

    from advisor.tuners.environment import default_device

    if asked is not None:
        with contextlib.suppress(RuntimeError):
            return str(torch.device(asked))
    return default_device()


def _warn(message: str) -> None:
    """One warning for a whole job: rank 0 speaks for all. It names the user's own line."""
    if os.environ.get("RANK", "0") != "0":
        _log.debug(message)
        return
    level, frame = 1, sys._getframe()
    while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] == "advisor":
        level, frame = level + 1, frame.f_back
    warnings.warn(f"advisor: {message}", AdvisorWarning, stacklevel=level)


def set_up_logging() -> None:
    level = os.environ.get("ADVISOR_LOG", "")
    if level and not _log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("advisor %(levelname)s %(message)s"))
        _log.addHandler(handler)
        named = logging.getLevelNamesMapping().get(level.upper())
        _log.setLevel(named if named is not None else logging.INFO)
