"""Keys, records and parts of records for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from advisor.cache.codec import to_plain
from advisor.cache.config import Config
from advisor.cache.key import Device, Environment, Key, Software
from advisor.cache.record import Choice, Measurement, Provenance, Record, Target, Trial, Winner
from advisor.cache.signing import KeyRing
from advisor.cache.task import Task

DEVICE = Device(
    kind="cuda", name="NVIDIA H200", capability="9.0", multiprocessors=132, memory_gib=139
)
SOFTWARE = Software(driver="580.1", cuda="13.0", cudnn="91900", torch="2.11.0", power_limit_w=700)
ENVIRONMENT = Environment(device=DEVICE, software=SOFTWARE)
TASK = Task(
    target="model.py:Net",
    shapes=((64, 3, 256, 256),),
    model_args=Config(num_classes=10),
    precisions=("default", "tf32", "bf16"),
)
KEY = Key(environment=ENVIRONMENT, model="ab" * 32, task=TASK)
DEFAULT = Config(batch_size=64, precision="default", channels_last=False, cudnn_benchmark=False)


def changed(key: Key, name: str, value: object) -> Key:
    """A copy of the key with one field set; `name` is as in `cache.key.fields`."""
    part, dot, field = name.partition(".")
    if dot:
        owner = replace(getattr(key.environment, part), **{field: value})
        return replace(key, environment=replace(key.environment, **{part: owner}))
    if name == "shapes":
        assert isinstance(value, tuple)
        shapes = value if value and isinstance(value[0], tuple) else ((key.task.batch, *value),)
        return replace(key, task=replace(key.task, shapes=shapes))
    if hasattr(key.task, name):
        return replace(key, task=replace(key.task, **{name: value}))
    return replace(key, **{name: value})  # type: ignore[arg-type]


def choice(config: Config = DEFAULT, rate: float = 2000.0, speedup: float = 1.0) -> Choice:
    return Choice(
        config=config,
        batch=config.batch,
        samples_per_s=rate,
        low=0.99 * rate,
        high=1.01 * rate,
        speedup=speedup,
        speedup_low=0.98 * speedup,
        speedup_high=1.02 * speedup,
        peak_bytes=2**30,
        rounds=(0.99 * rate, rate, 1.01 * rate),
    )


def trial(number: int = 0, config: Config = DEFAULT, outcome: str = "ok") -> Trial:
    ok = outcome == "ok"
    return Trial(
        number=number,
        config=config,
        measurement=Measurement(
            outcome=outcome,
            reason="" if ok else "said so",
            samples_per_s=2000.0 if ok else 0.0,
            steps=40,
            blocks=(0.03, 0.031, 0.0305, 0.0302),
        ),
        stage="compute",
        origin="guess",
        seconds=1.5,
    )


def winners(flags: Choice, loop: Choice, **of: Choice) -> tuple[Winner, ...]:
    """One winner per use. `pilot` defaults to `flags` and `capture` to `loop`; names such as
    `free_loop` mean a winner with a free batch size."""
    chosen = {"flags": flags, "pilot": flags, "loop": loop, "capture": loop, **of}
    return tuple(
        Winner(use=use.removeprefix("free_"), free=use.startswith("free_"), choice=one)
        for use, one in chosen.items()
    )


def record(
    key: Key = KEY,
    name: str = "model.py:Net",
    created: float = 1.7e9,
    trials: int = 3,
    effort: str = "normal",
    **changes: Any,
) -> Record:
    default = DEFAULT.at(key.task.batch)
    fast = choice(default.replace(precision="bf16"), 3000.0, 1.5)
    flags = choice(default)
    made = Record(
        key=key,
        target=Target(name=name, origin="0123456789abcdef"),
        baseline=choice(default),
        winners=winners(flags, loop=fast),
        input=Config(pin_memory=True),
        trials=tuple(trial(n, default.replace(threads=n + 1)) for n in range(trials)),
        provenance=Provenance(
            created=created,
            seconds=180.0,
            trials=trials,
            advisor="0.1.0",
            device_uuid="GPU-1",
            host_cpu="Xeon",
            seed=0,
            study="0a1b2c",
            budget_s=300.0,
            modules=2,
            parameters=1728,
            effort=effort,
        ),
    )
    return replace(made, **changes)


MINE = KeyRing(own=b"m" * 32)
THEIRS = KeyRing(own=b"t" * 32)
TEAM = KeyRing(b"a secret of a team", own=b"m" * 32)
INFER = changed(KEY, "mode", "infer")
SMALL = changed(KEY, "shapes", ((8, 3, 256, 256),))


def planted(one: Record, path: str, value: object) -> dict[str, Any]:
    """The record as plain data, with the value at `path` replaced, valid or not."""
    content: dict[str, Any] = to_plain(one)
    *owners, last = path.split(".")
    here: Any = content
    for owner in owners:
        here = here[int(owner) if isinstance(here, list) else owner]
    here[int(last) if isinstance(here, list) else last] = value
    return content
