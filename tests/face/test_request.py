"""What a script asks for, as one object."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from advisor.errors import UsageError
from advisor.resolve.request import Request
from advisor.tuners import environment
from advisor.tuners.search.plan import Plan
from tests.cache import examples

NOTHING: dict[str, Any] = dict.fromkeys(
    ("batch", "capture", "store", "steps", "duration", "on_miss", "shape", "device", "mode")
)


PANIC = "on_miss 'panic': expected one of default, nearest, request"


def of(target: object = None, **asked: Any) -> Request:
    return Request.of(target, {**NOTHING, "device": "cpu", **asked})


ADAMW = {"mode": "train", "optimizer": "adamw"}
ASKED: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({}, {"given": {"mode": "train"}}),
    ({"mode": "infer", "optimizer": "adamw"}, {"given": {"mode": "infer"}}),
    (
        {"shape": "8x3x4x4", "optimizer": "adamw", "compile": False},
        {"given": {"shapes": ((8, 3, 4, 4),), **ADAMW, "compile": False}, "batch": 8},
    ),
    ({"target": "model.py", "capture": True}, {"target": "model.py", "use": "capture"}),
    ({"device": "cuda:1", "steps": 900}, {"device": "cuda:1", "plan": Plan(steps=900)}),
    ({"duration": "2h", "store": "dir:/a"}, {"plan": Plan(duration_s=7200.0), "cache": "dir:/a"}),
    ({"shape": "8x3", "batch": 4}, {"batch": 4, "free": False}),
    ({"batch": 1}, {"batch": 1, "free": False}),
    ({"shape": "8x3", "batch": "free"}, {"batch": None, "free": True}),
)


@pytest.mark.parametrize(("asked", "found"), ASKED)
def test_what_is_asked(asked: dict[str, Any], found: dict[str, Any]) -> None:
    request = of(**asked)
    assert {name: getattr(request, name) for name in found} == found


def test_on_a_gpu_the_threads_of_the_host_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "detect", lambda _device: examples.ENVIRONMENT)
    found = [of(device=device).query().threads for device in ("cuda:0", "cpu")]
    assert found == [0, environment.own_threads()]


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
        *(("nearest", asked, "nearest") for asked in (None, "")),
        *(("nearest", "default", "default"), ("default", "request", "request")),
        ("panic", "nearest", "nearest"),
    ):
        monkeypatch.setenv("ADVISOR_ON_MISS", configured)
        assert of(on_miss=asked).miss_action == action
    with pytest.raises(UsageError, match=f"^{PANIC}$"):
        _ = of().miss_action


@pytest.mark.parametrize(
    ("target", "asked", "said"),
    [
        (3, {}, "target 3: expected a target's name or an nn.Module"),
        (None, {"on_miss": "panic"}, PANIC),
        *(
            (None, {"batch": odd}, f"batch {odd!r}: expected a number of at least 1, or 'free'")
            for odd in (0, "all", True)
        ),
        (None, {"mode": "test"}, "mode 'test': expected one of train, infer"),
    ],
)
def test_what_is_refused(target: object, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(said)}$"):
        of(target, **asked)
