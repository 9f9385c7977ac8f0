"""What a script asks for, as one object."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from advisor.errors import UsageError
from advisor.resolve.find import processes
from advisor.resolve.request import Request, known_batch
from advisor.tuners import environment, fingerprint
from advisor.tuners.environment import own_threads
from advisor.tuners.length import Length

NOTHING: dict[str, Any] = dict.fromkeys(
    ("batch", "capture", "cache", "steps", "duration", "on_miss", "shape", "device", "mode")
)


def of(target: object = None, **asked: Any) -> Request:
    return Request.of(target, {**NOTHING, "device": "cpu", **asked})


def test_nothing_asked() -> None:
    assert of() == Request(
        target=None,
        given={"mode": "train"},
        batch=None,
        use="loop",
        device="cpu",
        folder=Path.cwd(),
    )


def test_what_is_asked() -> None:
    asked = of(
        "model.py:Net",
        shape="8x3x4x4",
        device="cuda:1",
        mode="train",
        optimizer="adamw",
        compile=False,
        capture=True,
        steps=900,
        on_miss="nearest",
        cache="dir:/a",
    )
    assert asked == Request(
        target="model.py:Net",
        given={
            "shapes": ((8, 3, 4, 4),),
            "mode": "train",
            "optimizer": "adamw",
            "compile": False,
        },
        batch=8,
        use="capture",
        device="cuda:1",
        steps=900,
        on_miss="nearest",
        cache="dir:/a",
        folder=Path.cwd(),
    )
    assert of(duration="2h").seconds == 7200.0


def test_the_device_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "default_device", lambda: "cuda:3")
    assert of(device=None).device == "cuda:3"


def test_inference_has_no_optimizer() -> None:
    assert of(mode="infer", optimizer="adamw").given == {"mode": "infer"}


def test_a_step_is_captured_in_several_processes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert (processes(), of(capture=True).use) == (1, "capture")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (processes(), of(capture=True).use) == (2, "capture")
    assert of(capture=False).use == "loop"
    for odd in ("", "0", "-3", "many", "9" * 10, "9" * 6000):
        monkeypatch.setenv("WORLD_SIZE", odd)
        assert processes() == 1


@pytest.mark.parametrize(
    ("asked", "batch", "free"),
    [
        ({}, None, False),
        ({"shape": "8x3"}, 8, False),
        ({"shape": "8x3", "batch": 4}, 4, False),
        ({"batch": 1}, 1, False),
        ({"shape": "8x3", "batch": "free"}, None, True),
    ],
)
def test_batch(asked: dict[str, Any], batch: int | None, free: bool) -> None:
    found = of(**asked)
    assert (found.batch, found.free) == (batch, free)


def test_a_batch_that_is_none_is_not_known() -> None:
    assert known_batch({"shapes": ((8, 3),)}, 0) is None
    assert known_batch({}, True) is None
    assert known_batch({}, None) is None


def test_determinism_that_the_process_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "deterministic" not in of().given
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    assert of().given["deterministic"] is True
    assert of(deterministic=False).given["deterministic"] is False
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert of().given["deterministic"] is True


def test_what_to_do_on_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    assert of().miss_action == "default"
    for configured, asked, action in (
        ("nearest", None, "nearest"),
        ("nearest", "default", "default"),
        ("default", "request", "request"),
        ("panic", "nearest", "nearest"),
    ):
        monkeypatch.setenv("ADVISOR_ON_MISS", configured)
        assert of(on_miss=asked).miss_action == action
    with pytest.raises(
        UsageError, match=r"^on_miss 'panic': expected one of default, nearest, request$"
    ):
        _ = of().miss_action


@pytest.mark.parametrize(
    ("target", "asked", "said"),
    [
        (3, {}, "target 3: expected a target's name or an nn.Module"),
        (None, {"on_miss": "panic"}, "on_miss 'panic': expected one of default, nearest, request"),
        (None, {"batch": 0}, "batch 0: expected a number of at least 1, or 'free'"),
        (None, {"batch": "all"}, "batch 'all': expected a number of at least 1, or 'free'"),
        (None, {"batch": True}, "batch True: expected a number of at least 1, or 'free'"),
        (None, {"mode": "test"}, "mode 'test': expected one of train, infer"),
    ],
)
def test_what_is_refused(target: object, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(said)}$"):
        of(target, **asked)


def test_called() -> None:
    assert (of().called, of("model.py").called, of(nn.Linear(1, 1)).called) == (
        *("", "model.py", "Linear"),
    )


def test_length() -> None:
    assert of().length(64) is None
    assert of(steps=9).length(64) == Length(batch=64, steps=9)
    assert of(steps=9, shape="8x3").length(64) == Length(batch=8, steps=9)
    assert of(duration=60).length(64) == Length(batch=64, seconds=60.0)


def test_query() -> None:
    model = nn.Linear(1, 1)
    asked = of(model, shape="8x1")
    query = asked.query()
    assert query.model == fingerprint.of_model(model)
    assert query.given == asked.given
    assert query.environment.device.kind == "cpu"
    assert query.threads == own_threads() >= 1
    assert of("model.py:Net").query().model is None
