"""What a lookup serves after a change and from several stores, and `advisor why`."""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

import advisor as package
from advisor.cache.config import Config
from advisor.cache.record import Record
from advisor.cache.records import Records
from advisor.cache.stores import open_store, open_stores
from advisor.cache.task import Task
from advisor.open_store import open_records
from advisor.resolve.failures import Failures
from advisor.tuners import environment
from advisor.tuners.environment import own_threads
from tests.builders import lookup_arguments, record_here, verified
from tests.cache.examples import choice, winners
from tests.face.commands import MODEL, advisor, run_example

BASE = Config(batch_size=4, precision="default", channels_last=False, cudnn_deterministic=False)
FAST = BASE.replace(channels_last=True)


def made(loop: Config = FAST, **changes: object) -> Record:
    """A record of model.py:Net on this machine's CPU, with fields of its key changed."""
    won = choice(loop, 3000.0, 1.5)
    found = record_here(choice(BASE), winners(choice(BASE), won, pilot=won), **changes)
    return replace(found, trials=(verified(loop),))


def store_record(one: Record, cache: str | None = None) -> None:
    open_records(cache).put(one)


def look_up(**given: object) -> tuple[package.Advice, str]:
    """The advice and the text of its warning, if any."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        arguments = {"shape": (4, 3, 8, 8), "device": "cpu"} | given
        advice = package.lookup(**lookup_arguments("model.py:Net", **arguments))  # type: ignore[arg-type]
    assert len(caught) <= 1, [str(one.message) for one in caught]
    return advice, "".join(str(one.message) for one in caught)


@pytest.mark.parametrize(
    ("field", "value", "status", "difference"),
    [
        ("software__driver", "1.2", "stale", "driver 1.2 -> none"),
        ("software__torch", "2.0.1", "stale", "torch 2.0.1 -> "),
        ("software__power_limit_w", 300, "stale", "power limit w 300 -> 0"),
        ("software__clock_cap_mhz", 900, "stale", "clock cap mhz 900 -> 0"),
        ("threads", own_threads() + 1, "stale", f"threads {own_threads() + 1} -> {own_threads()}"),
        ("libraries", ("torchvision==0.0.1",), "stale", "libraries torchvision==0.0.1 -> "),
        ("device__name", "Another CPU", "miss", "device name Another CPU -> "),
        ("device__memory_gib", 1, "miss", "device memory_gib 1 -> "),
    ],
)
def test_a_lookup_names_what_has_changed(
    here: Path, field: str, value: object, status: str, difference: str
) -> None:
    store_record(made(**{field: value}))
    advice, warning = look_up()
    assert advice.status == status
    assert difference in warning and "advisor tune" in warning
    assert (advice.config == FAST) == (status == "stale")
    assert difference in str(advice.explanation)


def test_a_stale_record_that_advises_nothing_gives_no_warning(here: Path) -> None:
    store_record(made(BASE, software__driver="1.2"))
    advice, warning = look_up()
    assert (advice.status, advice.config, warning) == ("stale", BASE, "")


def test_a_planted_record_is_refused_with_its_reason(here: Path) -> None:
    store_record(made(FAST.replace(compile="../../x")))
    advice, warning = look_up()
    assert advice.status == "miss"
    assert "compile '../../x': expected none, cudagraphs" in warning
    assert advice.explanation is not None and "../../x" in advice.explanation.refused[0]


def test_signed_only_refuses_unsigned_records(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Records(open_stores()).put(made())
    monkeypatch.setenv("ADVISOR_SECRET", "what openssl printed")
    monkeypatch.setenv("ADVISOR_SIGNED_ONLY", "1")
    advice, warning = look_up()
    assert advice.status == "miss" and "not signed" in warning
    store_record(made())
    assert look_up()[0].status == "exact"


def stores_asked(advice: package.Advice) -> list[str]:
    assert advice.explanation is not None
    return [url for url, _said in advice.explanation.stores]


class TestSeveralStores:
    def test_a_hit_in_a_later_store_is_copied_to_the_first(self, here: Path) -> None:
        store_record(made(), f"dir:{here}/team")
        urls = [f"disk:{here}/mine", f"dir:{here}/team"]
        advice, warning = look_up(cache=urls)
        assert (advice.status, warning) == ("exact", "")
        assert advice.explanation is not None and advice.explanation.near_misses == ()
        assert open_store(urls[0]).keys() == open_store(urls[1]).keys()
        assert stores_asked(look_up(cache=urls)[0]) == urls[:1]  # the second store is not read

    @pytest.mark.parametrize("other", [{}, {"tolerance": 0.5}])
    def test_a_strangers_record_does_not_hide_the_users_own(
        self, here: Path, other: dict[str, object]
    ) -> None:
        """Not even if its task is as similar to the request."""
        urls = [f"dir:{here}/theirs", f"dir:{here}/mine", f"dir:{here}/behind"]
        store_record(made(**{"tolerance": 0.25} if other else {}), urls[1])
        theirs = made(FAST.replace(threads=1), **other)
        date = replace(theirs.provenance, created=1.74e9, effort="exhaustive")
        Records(open_store(urls[0])).put(replace(theirs, provenance=date))
        advice, warning = look_up(cache=urls)
        assert (advice.status, warning, advice.config) == ("exact", "", FAST)
        assert "unsigned" not in advice.reason and stores_asked(advice) == urls[:2]
        advice, _warning = look_up(cache=urls)
        assert advice.config == FAST  # now copied to the first store, where the lookup ends
        assert stores_asked(advice) == urls[:1]

    def test_a_strangers_record_is_served_and_marked_if_no_other_matches(self, here: Path) -> None:
        urls = [f"dir:{here}/theirs", f"dir:{here}/behind"]
        theirs, mine = made(FAST.replace(threads=1)), made(mode="infer")
        Records(open_store(urls[0])).put(theirs)
        assert stores_asked(look_up(cache=urls)[0]) == urls[:1]  # there is no signing key yet
        store_record(mine, urls[1])
        advice, text = look_up(cache=urls)
        assert (advice.status, text, advice.record) == ("exact", "", theirs)
        assert advice.reason.startswith("not in force yet; ")
        assert advice.reason.endswith("; unsigned") and stores_asked(advice) == urls
        assert advice.served.reason.endswith("; unsigned")
        stores = ("--cache", ",".join(urls))
        model = ("model.py:Net", "--shape", "4x3x8x8")
        assert "; unsigned" in advisor(here, "why", *model, *stores).stdout
        text = advisor(here, "why", *model, "--mode", "infer", *stores).stdout
        assert f"not served  {theirs.id} model.py:Net (unsigned): mode" in text
        shown = json.loads(advisor(here, "show", "--json", *stores).stdout)["records"]
        assert {one["id"]: one["signed"] for one in shown} == {theirs.id: False, mine.id: True}
        for which, times in (((), 1), ((theirs.id,), 1), ((mine.id,), 0)):
            assert advisor(here, "show", *which, *stores).stdout.count("unsigned") == times

    def test_a_strangers_record_answers_if_the_users_own_cannot(self, here: Path) -> None:
        """The user's own record was measured at another batch."""
        store_record(made(shapes=((2, 3, 8, 8),)))
        Records(open_stores()).put(made(FAST.replace(threads=1)))
        advice, _warning = look_up()
        assert advice.config["threads"] == 1 and advice.served.reason.endswith("; unsigned")

    def test_a_hit_in_a_read_only_pack_gives_no_warning(self, here: Path) -> None:
        store_record(made(), f"dir:{here}/team")
        done = advisor(here, "export", "some.pack", "--cache", f"dir:{here}/team")
        assert done.returncode == 0, done.stderr
        advice, warning = look_up(cache=[f"pack:{here}/some.pack", f"dir:{here}/none"])
        assert (advice.status, warning) == ("exact", "")

    @pytest.mark.parametrize(
        ("url", "why"),
        [
            ("redis://127.0.0.1:1", "127.0.0.1"),
            ("redis://host.invalid:1", "host.invalid"),
            ("pack:none.pack", "No such file"),
        ],
    )
    def test_an_unreachable_store_is_skipped_with_one_warning(
        self, here: Path, url: str, why: str
    ) -> None:
        store_record(made(), f"dir:{here}/mine")
        advice, warning = look_up(cache=[url, f"dir:{here}/mine"])
        assert advice.status == "exact" and why in warning
        assert "went on without this store" in warning


def test_why_prints_the_differences_and_the_stores(here: Path, own_surroundings: Path) -> None:
    store_record(made(optimizer="adamw"))
    command = ("why", "model.py:Net", "--shape", "4x3x8x8", "--optimizer", "sgd")
    done = advisor(here, *command)
    assert done.returncode == 0, done.stderr
    assert "optimizer adamw -> sgd" in done.stdout and str(own_surroundings) in done.stdout
    data = json.loads(advisor(here, *command, "--json").stdout)
    (near,) = data["near_misses"]
    assert data["status"] == "miss"
    assert near["differs"] == [{"field": "optimizer", "wanted": "sgd", "found": "adamw"}]
    (here / "other.py").write_text(MODEL)
    done = advisor(here, "why", "other.py", "--shape", "4x3x8x8")
    assert "records of  model.py:Net" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("import", "missing.pack"), 2, "there is no such file"),
        (("import", "model.py"), 1, "no pack of advisor's"),
        (("export", "x.pack", "--device", "H100"), 1, "no record fits"),
        (("sync", "dir:a", "dir:a"), 2, "both stores are dir:"),
        (("sync", "dir:a", "dir:b"), 2, "there is nothing in dir:"),
        (("sync", "pack:missing", "dir:b"), 1, "No such file"),
        (("why", "nope.py"), 2, "there is no file"),
        (("why", "model.py", "--strict"), 1, ""),
        (("gc", "--cache", "redis://127.0.0.1:1"), 1, "127.0.0.1:1"),
        (("import", "model.py", "--cache", "redis://127.0.0.1:1"), 1, "127.0.0.1:1"),
        (("forget", "--all", "--cache", "redis://127.0.0.1:1"), 1, "127.0.0.1:1"),
        (("show", "--cache", "pack:missing"), 1, "No such file"),
        (("gc", "--only", "everything"), 2, "'everything' is not one of"),
    ],
)
def test_wrong_input_gives_one_line(
    here: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    done = advisor(here, *arguments)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert done.stderr.count("\n") <= 1


def test_tune_stores_locally_if_the_remote_is_down(
    here: Path, searched: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "cpu_has_bf16", lambda: True)
    remote, local = "redis://127.0.0.1:1", f"dir:{here}/mine"
    tune = ("tune", "model.py", "--device", "cpu", "--shape")
    done = advisor(here, *tune, "4x3x8x8", "--cache", f"{remote},{local}")
    assert done.returncode == 0, done.stderr
    assert f"advisor sync {local} {remote}" in done.stderr
    assert len(open_store(local).keys()) == 1
    # The advice for another shape is tried first.
    advice = look_up(cache=local)[0]
    assert advice.record is not None and advice.config != advice.record.baseline.config
    done = advisor(here, *tune, "4x3x9x9", "--cache", local)
    message = f"tried first: the advice of record {advice.record.id} (the same model, shapes 3x8x8"
    assert message in done.stderr and len(searched) == 2


COMMAND = ("python", "train.py", "--lr", "0.1 0.2")


def store_run_record(*command: str, **changes: object) -> Record:
    """Store a record of a command on this machine's CPU, with fields of its key changed."""
    one = made(**changes)
    one = replace(one, key=replace(one.key, task=replace(one.key.task, command=command)))
    store_record(one)
    return one


def test_why_of_a_command_shows_its_records(here: Path) -> None:
    """The command is not started: its script does not exist."""
    store_run_record(*COMMAND, device__name="Xeon of another")
    one = store_run_record(*COMMAND[:2])
    lines = advisor(here, "why", "--", *COMMAND).stdout.splitlines()
    assert lines[0] == "looked for  python train.py --lr '0.1 0.2'"
    assert "of another device: Xeon of another: channels_last, 1.50x (1.47-1.53)" in lines[2]
    data = json.loads(advisor(here, "why", "--strict", "--json", "--", *COMMAND[:2]).stdout)
    assert [one["state"] for one in data["records"]] == ["exact"]
    assert (data["served"]["record"], data["served"]["config"]) == (one.id, dict(FAST))
    for words in (("model.py", "--", *COMMAND), (), ("--shape", "4x3", "--", *COMMAND)):
        refused = advisor(here, "why", *words)
        assert refused.returncode == 2 and refused.stderr.count("\n") == 1


def test_why_of_a_command_says_what_its_run_would_be_served(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def served_line(*words: str, missed: bool = True) -> str:
        done = advisor(here, "why", "--strict", "--", *words)
        assert done.returncode == missed
        return done.stdout.splitlines()[-1].removeprefix("served      ")

    assert served_line("python", "other.py") == (
        "nothing; no record has exactly this command; `advisor run` also finds one of the same "
        "model and inputs. To tune: advisor tune -- python other.py"
    )
    store_run_record(*COMMAND, device__name="Xeon of another")
    assert served_line(*COMMAND).startswith("nothing; this run was not tuned on")
    one = store_run_record(*COMMAND[:2], software__torch="2.0.1")
    speedup = f"{one.id}: channels_last; 1.50x your unmodified script at batch 4"
    stale = served_line(*COMMAND[:2], missed=False)
    assert stale.startswith(f"{speedup}; measured elsewhere: torch 2")
    one = store_run_record(*COMMAND[:2])
    speedup = f"{one.id}: channels_last; 1.50x your unmodified script at batch 4"
    assert served_line(*COMMAND[:2], missed=False) == speedup
    assert served_line("python", "-I", "train.py") == "nothing; python -I keeps advisor out"
    Failures(None, one.key.model, one.key.task).keep(FAST, "RuntimeError: view")
    line = served_line(*COMMAND[:2])
    assert line.endswith("; this run failed with the advice (RuntimeError: view)")
    monkeypatch.setenv("ADVISOR_DISABLE", "1")
    assert served_line(*COMMAND[:2]) == "nothing; ADVISOR_DISABLE is set"


def test_compare_run_compares_a_command_with_and_without_advice(here: Path) -> None:
    script = here / "speed.py"
    script.write_text(
        "import os\nfor _ in 'abc': print(24 if 'ADVISOR_RUN' in os.environ else 12, 'samples/s')"
    )
    call = [sys.executable, str(script)]
    turn = ["unmodified:    12 samples/s", "advisor run:   24 samples/s"]
    assert run_example("compare_run.py", *call)[0].startswith("No advice for this machine (no reco")
    store_run_record(*call)
    assert run_example("compare_run.py", *call) == [*turn, *turn, "2.00x as fast (2.00-2.00)"]
