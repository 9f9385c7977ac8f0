"""apply() never breaks a run and never waits: it warns and continues with torch's defaults."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import advisor
from advisor.cache import asking
from advisor.cache.records import Records
from advisor.cache.stores import open_stores
from advisor.cache.stores.dir import DirStore
from advisor.tuners.knobs import TORCH
from tests.builders import lookup_arguments
from tests.face.commands import run_script
from tests.face.test_apply import NET, record, store_record

__all__ = ["record"]


def flag_state() -> tuple[object, ...]:
    """State of the process that flags of knobs set."""
    return (
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.enabled,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )


def check_apply(target: object = "model.py:Net", **arguments: Any) -> str:
    """Call apply() as a script does, check that it serves the defaults, and return its warning."""
    before = flag_state()
    arguments = {"device": "cpu", **arguments}
    with warnings.catch_warnings(record=True, action="always") as seen:
        advice = advisor.apply(**lookup_arguments(target, **arguments))  # type: ignore[arg-type]
    assert (advice.status, advice.config) == ("miss", TORCH)
    assert flag_state() == before
    model = advice.prepare(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **advice.optimizer)
    with advice.autocast():
        loss = model(torch.ones(1, 2)).sum()
    advice.step(loss, optimizer)
    text, *others = [str(w.message) for w in seen if w.category is advisor.AdvisorWarning] or [""]
    assert text and not others, (advice.reason, seen)
    assert "Training goes on unmodified" in text and "\n" not in text
    return text


def check_strict(target: object = "model.py:Net", **arguments: Any) -> None:
    with pytest.raises(advisor.AdvisorError):
        advisor.lookup(**lookup_arguments(target, **{"device": "cpu", "strict": True, **arguments}))


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home folder or an account, as in many containers."""

    def unknown(*_args: object) -> object:
        raise KeyError("getpwuid(): uid not found: 4711")

    for name in ("HOME", "ADVISOR_CACHE", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)


def test_apply_works_without_a_home_folder(here: Path, no_home: None) -> None:
    message = check_apply()
    assert "ADVISOR_CACHE" in message
    check_strict()
    for cache in ("~/.cache/x", "disk:~/x", "~nobody_of_that_name/x", "a" * 5000):
        check_apply(cache=cache)
        check_strict(cache=cache)


@pytest.mark.skipif(sys.platform == "win32", reason="a folder in use cannot be removed there")
def test_apply_works_in_a_deleted_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_apply()  # torch's first optimizer reads the current folder
    gone = here / "gone"
    gone.mkdir()
    with contextlib.chdir(gone):
        gone.rmdir()
        check_apply()
        check_strict()
        for script in (None, "<stdin>", __file__):
            monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=script))
            with pytest.warns(advisor.AdvisorWarning, match="model.py:Net': cannot be found"):
                advisor.lookup(NET)


@pytest.mark.parametrize("given", [Path("store"), ["store"], (Path("store"),)])
def test_a_store_may_be_given_as_a_path(record: Any, own_surroundings: Path, given: Any) -> None:
    Path("store").symlink_to(own_surroundings)
    assert advisor.apply(NET, store=given).status == "exact"


VARIABLES: dict[str, tuple[str, ...]] = {
    "ADVISOR_CACHE": ("floppy:x", "disk:/dev/null/x", "\x01\x02", "dir:" + "x" * 5000),
    "ADVISOR_SECRET": ("²", "\udcff" * 40),
    "ADVISOR_SECRET_FILE": ("/nowhere", "/"),
    "WORLD_SIZE": ("²", "-3", "9" * 6000),
    "LOCAL_RANK": ("²", "-1", "9" * 6000),
    **dict.fromkeys(("ADVISOR_SIGNED_ONLY", "RANK"), ("²",)),
    **dict.fromkeys(("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"), ("²",)),
}


@pytest.mark.parametrize(
    ("variable", "value"), [(name, value) for name, many in VARIABLES.items() for value in many]
)
def test_apply_survives_invalid_environment_variables(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variable: str,
    value: str,
) -> None:
    log = logging.getLogger("advisor")
    monkeypatch.setattr(log, "handlers", list(log.handlers))
    monkeypatch.setenv(variable, value)
    before = flag_state()
    with warnings.catch_warnings(record=True, action="always") as caught:
        advice = advisor.apply(NET)
        advisor.apply("model.py:Net", capture=True)
    # Only rank 0 warns.
    assert advice.status == "miss" and len(caught) == (0 if variable == "RANK" else 2)
    assert "please report" not in caplog.text
    assert flag_state() == before
    check_strict()


@pytest.mark.parametrize("value", ["2", "yes please", "\udcff"])
@pytest.mark.parametrize(
    ("variable", "counts"),
    [
        ("ADVISOR_LOG", "expected debug, info, warning or error; it counts as info"),
        ("ADVISOR_DISABLE", "expected 1 or 0; it counts as 1"),
        ("ADVISOR_KEEP_LOADER", "expected 1 or 0; it counts as 1"),
    ],
)
def test_an_invalid_variable_gives_one_line(
    record: Any, here: Path, variable: str, counts: str, value: str
) -> None:
    source = (
        "import advisor\n"
        "for _ in 'ab': advisor.apply(advisor.Model('model.py:Net', device='cpu'))\n"
        "from advisor.cache import settings\nfor _ in 'ab': settings.is_on('ADVISOR_KEEP_LOADER')\n"
    )
    output = run_script(here, source, **{variable: value}).stderr
    line = f"{variable}={value}: {counts}".replace("\udcff", "?")
    assert output.count(line) == 1, output


@pytest.mark.parametrize(
    "text",
    [
        "[tool.advisor\n",
        "tool = 3\nadvisor = 1\n",
        "[tool.advisor]\ncache = ['']\n",
        "[tool.advisor]\ncache = 'floppy:x'\n",
        "[tool.advisor]\nx = " + "[" * 5000,
        "advisor \udc80",
        None,
    ],
)
def test_apply_survives_an_invalid_pyproject(
    here: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    """`text` None: pyproject.toml is a named pipe, which must not block."""
    monkeypatch.delenv("ADVISOR_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "home"))
    if text is None:
        os.mkfifo(here / "pyproject.toml")
    else:
        (here / "pyproject.toml").write_text(text, errors="surrogateescape")
    message = check_apply()
    assert text is not None or "not a regular file" in message
    check_strict()


class Raising(nn.Linear):
    def extra_repr(self) -> str:
        raise RuntimeError("no repr")


class NoModule(nn.Module):
    def named_modules(self, *_args: Any, **_more: Any) -> Iterator[Any]:
        raise ValueError("no modules")


@pytest.mark.parametrize(
    "make", [lambda: nn.LazyLinear(3), lambda: Raising(2, 2), NoModule], ids=["lazy", "repr", "odd"]
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_apply_survives_unusual_models(record: Any, make: Callable[[], nn.Module]) -> None:
    check_apply(make(), shape=(4, 2))
    if make is not NoModule:
        with pytest.warns(advisor.AdvisorWarning, match=r"not the one tuned|cannot be compared"):
            advisor.lookup(NET).prepare(make())


NAN, INF = float("nan"), float("inf")
INVALID: dict[str, tuple[Any, ...]] = {
    "target": (3, b"x", "\0", "a" * 5000, "~nobody_of_that_name/x.py"),
    "shape": ("4by3", object(), [[]], NAN, [None]),
    "batch": (INF, True, "big"),
    "model_args": (3, {"a": object()}, {3: 3}),
    "precisions": (3,),
    "max_memory": (NAN, 10**400),
    "tolerance": ("x",),
    "steps": (1.5, 10**400),
    "duration": ("soon", INF),
    "device": (3, "tpu"),
    "permit": ({"a": 1}, None),
    "cache": (3, 3.5, b"store", [3], [None], object(), "", "\0", "dir:\0"),
    "tune": ("soon", "0s", 0, []),
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, many in INVALID.items() for v in many])
@pytest.mark.parametrize("target", ["model.py:Net", None])
def test_apply_survives_invalid_arguments(
    record: Any,
    target: str | None,
    name: str,
    value: Any,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Without a script and a target, apply() reads no store.
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(here / "train.py"), raising=False)
    message = check_apply(**{"target": target, name: value})
    assert name != "tune" or "expected a time above zero, as 90s, 5m or 1h30m" in message
    with pytest.raises(advisor.AdvisorError):
        arguments = {"target": target, "device": "cpu", "strict": True, name: value}
        advisor.apply(**lookup_arguments(**arguments))


def test_a_time_to_tune_is_refused_if_a_target_is_given(record: Any) -> None:
    message = "advisor: tune='10m' tunes the running script, and takes no target; leave one of them"
    assert check_apply(tune="10m").startswith(message)


def test_apply_gives_up_on_hanging_stores(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup has one deadline for all stores."""
    released = threading.Event()
    monkeypatch.setattr(DirStore, "keys", lambda _self: released.wait(60) and [])
    try:
        began = time.monotonic()
        message = check_apply(cache=[f"dir:{here}/one", f"dir:{here}/two", f"dir:{here}/three"])
        # Up to 10x the deadline on a busy host. Without a deadline it takes a minute.
        assert time.monotonic() - began < 10 * asking.DEADLINE_S
        assert "no answer within" in message
    finally:
        released.set()


def test_an_internal_error_is_logged_with_its_traceback(
    here: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_args: object, **_more: object) -> None:
        raise ZeroDivisionError("internal")

    monkeypatch.setattr("advisor.resolve.lookups.look_up", broken)
    with caplog.at_level(logging.ERROR, logger="advisor"):
        message = check_apply()
    assert "ZeroDivisionError: internal" in message
    (logged,) = (one for one in caplog.records if one.exc_info)
    assert logged.name == "advisor" and logged.levelno == logging.ERROR
    assert logged.exc_info is not None and logged.exc_info[0] is ZeroDivisionError
    assert "broken" in caplog.text  # the traceback
    with pytest.raises(ZeroDivisionError):
        advisor.apply(NET, strict=True)


@pytest.mark.parametrize("changed", [False, True])
def test_advice_equal_to_the_default_changes_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    """Also if the user has set the flags to other values."""
    made = store_record()
    same = tuple(replace(one, choice=made.baseline) for one in made.winners)
    Records(open_stores()).put(replace(made, winners=same, revised=time.time()))
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    try:
        if changed:
            torch.set_num_threads(3)
            torch.set_float32_matmul_precision("medium")
            for name, value in (("benchmark", True), ("enabled", False), ("allow_tf32", False)):
                monkeypatch.setattr(torch.backends.cudnn, name, value)
        before = flag_state()
        advice = advisor.apply(NET, shape=(4, 3, 8, 8))
        assert (advice.status, flag_state()) == ("exact", before)
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        advisor.release()
