"""A script's request as one object."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from advisor.arguments import Model, Permit
from advisor.errors import UsageError
from advisor.resolve.request import Request
from advisor.tuners import environment
from advisor.tuners.search.plan import Plan
from tests.cache import examples

DEFAULTS: dict[str, Any] = dict.fromkeys(
    ("batch", "capture", "store", "length", "shape", "device", "mode")
)


def request_of(target: object = None, **arguments: Any) -> Request:
    return Request.of(target, {**DEFAULTS, "device": "cpu", **arguments})


OPTION = "KNOB=OPTION, e.g. batch=--batch-size; KNOB is one of batch, num_workers"
ADAMW = {"mode": "train", "optimizer": "adamw"}
ASKED: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({}, {"given": {"mode": "train"}}),
    ({"mode": "infer", "optimizer": "adamw"}, {"given": {"mode": "infer"}}),
    (
        {"shape": "8x3x4x4", "optimizer": "adamw", "compile": False},
        {"given": {"shapes": ((8, 3, 4, 4),), **ADAMW, "compile": False}, "batch": 8},
    ),
    ({"target": "model.py", "capture": True}, {"target": "model.py", "use": "capture"}),
    ({"device": "cuda:1", "length": 900}, {"device": "cuda:1", "plan": Plan(steps=900)}),
    ({"length": "2h", "store": "dir:/a"}, {"plan": Plan(duration_s=7200.0), "cache": "dir:/a"}),
    ({"shape": "8x3", "batch": 4}, {"batch": 4, "free": False}),
    ({"batch": 1}, {"batch": 1, "free": False}),
    ({"shape": "8x3", "batch": "free"}, {"batch": None, "free": True}),
)


@pytest.mark.parametrize(("asked", "expected"), ASKED)
def test_arguments_become_request_fields(asked: dict[str, Any], expected: dict[str, Any]) -> None:
    request = request_of(**asked)
    assert {name: getattr(request, name) for name in expected} == expected


def test_a_query_for_a_gpu_has_no_host_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "detect", lambda _device: examples.ENVIRONMENT)
    threads = [request_of(device=device).query().threads for device in ("cuda:0", "cpu")]
    assert threads == [0, environment.own_threads()]


def test_deterministic_flags_of_the_process_are_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "deterministic" not in request_of().given
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    assert request_of().given["deterministic"] is True
    assert request_of(deterministic=False).given["deterministic"] is False
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert request_of().given["deterministic"] is True


@pytest.mark.parametrize(
    ("target", "asked", "message"),
    [
        (3, {}, "target 3: expected a target's name or an nn.Module"),
        *(
            (None, {"batch": odd}, f"batch {odd!r}: expected a number of at least 1, or 'free'")
            for odd in (0, "all", True)
        ),
        (None, {"mode": "test"}, "mode 'test': expected one of train, infer"),
        (None, {"capture": "yes"}, "capture 'yes': expected True or False"),
        (Model(data=3), {}, "data 3: expected text on one line"),
        (Model(any_order="x"), {}, "any order 'x': expected True or False"),
        (None, {"permit": Permit(map={"batch": 3})}, f"map {{'batch': 3}}: expected {OPTION}"),
    ],
)
def test_wrong_arguments_are_refused(target: object, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        request_of(target, **asked)
