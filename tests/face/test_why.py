"""What is served in a changed world, why, and what a remote store may cost."""

from __future__ import annotations

import json
import os
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

import advisor as package
from advisor.cache.config import Config
from advisor.cache.record import FLAGS, LOOP, Measurement, Record, Target, Trial
from advisor.cache.records import Records
from advisor.cache.stores import open_store
from advisor.cache.task import Task
from advisor.errors import NoRecord
from advisor.open_store import open_records
from advisor.resolve.failures import Failures
from advisor.tuners import target
from advisor.tuners.environment import detect, own_threads
from tests.builders import lookup_arguments
from tests.cache.examples import KEY, changed, choice, record
from tests.face.commands import MODEL, advisor

BASE = Config(batch_size=4, precision="default", channels_last=False, cudnn_deterministic=False)
FAST = BASE.replace(channels_last=True)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made(loop: Config = FAST, **changes: object) -> Record:
    """A record of model.py:Net here on this machine's CPU, with fields of its key changed."""
    spec = target.parse("model.py:Net")
    key = replace(
        KEY,
        environment=detect("cpu"),
        task=Task.of(spec.name, {"shape": (4, 3, 8, 8)}),
        threads=own_threads(),
    )
    for name, value in changes.items():
        key = changed(key, name.replace("__", "."), value)
    one = record(key)
    best = choice(loop, 3000.0, 1.5)
    return replace(
        one,
        target=Target(name=spec.name, origin=spec.origin, code=spec.code),
        baseline=choice(BASE),
        winners=tuple(
            replace(w, choice=choice(BASE) if w.use == FLAGS else best) for w in one.winners
        ),
        input=Config(),
        trials=(),
    )


def keep(one: Record, cache: str | None = None) -> None:
    open_records(cache).put(one)


def look_up(**given: object) -> tuple[package.Advice, str]:
    """The advice, and what was said."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        asked = {"shape": (4, 3, 8, 8), "device": "cpu"} | given
        advice = package.lookup(**lookup_arguments("model.py:Net", **asked))  # type: ignore[arg-type]
    assert len(seen) <= 1, [str(one.message) for one in seen]
    return advice, "".join(str(one.message) for one in seen)


def test_exact_is_silent(here: Path) -> None:
    keep(made())
    advice, said = look_up()
    assert (advice.status, said) == ("exact", "")
    assert advice.explanation is not None and advice.explanation.near_misses == ()


@pytest.mark.parametrize(
    ("field", "value", "status", "says"),
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
def test_what_has_changed_is_said(
    here: Path, field: str, value: object, status: str, says: str
) -> None:
    keep(made(**{field: value}))
    advice, said = look_up()
    assert advice.status == status
    assert says in said and "advisor tune" in said
    assert (advice.config == FAST) == (status == "stale")
    assert says in str(advice.explanation)


def test_every_near_miss_is_explained(here: Path) -> None:
    keep(made(optimizer="adamw"))
    keep(made(mode="infer"))
    keep(made(device__name="Another CPU"))
    advice, _said = look_up(optimizer="sgd")
    assert advice.status == "miss" and advice.explanation is not None
    fields = {tuple(d.field for d in near.differs) for near in advice.explanation.near_misses}
    assert fields == {("optimizer",), ("mode",), ("device.name",)}
    text = str(advice.explanation)
    assert "looked for  model.py:Net" in text and "shape         4x3x8x8" in text
    assert text.count("not served") == 3


def sound(one: Record) -> Record:
    """The same, its advice held against strict fp32."""
    held = Trial(
        number=9,
        config=one.winner(LOOP).config,
        measurement=Measurement(outcome="ok", reason="loss within 0.10% of fp32"),
        stage="numerics",
        origin="fp32",
        seconds=1.0,
    )
    return replace(one, trials=(*one.trials, held))


class TestNearest:
    def test_safe_knobs_are_carried(self, here: Path) -> None:
        keep(sound(made(FAST.replace(compile="default", threads=2))))
        advice, said = look_up(shape=(2, 3, 16, 16), on_miss="nearest")
        assert advice.status == "nearest"
        assert advice.config == Config(
            batch_size=2, precision="default", channels_last=True, cudnn_deterministic=False
        )
        assert "3x8x8 -> 3x16x16" in said and "carried over, not measured: channels_last." in said
        assert "advisor tune model.py:Net --shape 2x3x16x16" in said

    def test_never_a_batch_to_less_memory(self, here: Path) -> None:
        memory = detect("cpu").device.memory_gib
        for there, batch in ((memory * 2, None), (max(1, memory // 2), 4)):
            keep(made(device__memory_gib=there))
            advice, _said = look_up(shape=None, on_miss="nearest")
            assert (advice.status, advice.batch_size) == ("nearest", batch)
            records = open_records(None)
            records.remove(records.versions(records.all()[0]))

    def test_what_the_script_permits_holds(
        self, here: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("advisor.tuners.environment.cpu_has_bf16", lambda: True)
        keep(sound(made(FAST.replace(precision="bf16"))))
        near = {"shape": (4, 3, 9, 9), "on_miss": "nearest"}
        advice, _said = look_up(**near)
        assert (advice.config["precision"], advice.config["channels_last"]) == ("bf16", True)
        assert advice.autocast_dtype is not None
        advice, _said = look_up(**near, precisions=["default"], deterministic=True)
        # What is permitted is still carried over, what is not is torch's own.
        assert advice.config == Config(batch_size=4, channels_last=True)
        assert advice.autocast_dtype is None

    def test_what_was_not_compared_is_not_carried(self, here: Path) -> None:
        keep(made(FAST.replace(precision="bf16")))
        advice, _said = look_up(shape=(4, 3, 9, 9), on_miss="nearest")
        assert advice.config.get("precision", "default") == "default"
        assert advice.config["channels_last"] is True

    def test_the_project_may_ask_for_it(self, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        keep(made())
        (here / "pyproject.toml").write_text('[tool.advisor]\non-miss = "nearest"\n')
        assert look_up(shape=(4, 3, 9, 9))[0].status == "nearest"
        monkeypatch.setenv("ADVISOR_ON_MISS", "default")
        assert look_up(shape=(4, 3, 9, 9))[0].status == "miss"
        with pytest.raises(NoRecord):
            look_up(shape=(4, 3, 9, 9), strict=True)
        monkeypatch.setenv("ADVISOR_ON_MISS", "error")
        advice, said = look_up(shape=(4, 3, 9, 9))
        assert advice.status == "miss" and "'error': expected one of default, nearest" in said

    def test_nothing_is_near_to_nothing(self, here: Path) -> None:
        assert look_up(on_miss="nearest")[0].status == "miss"


def test_a_planted_record_is_refused_with_its_reason(here: Path) -> None:
    keep(made(FAST.replace(compile="../../x")))
    advice, said = look_up()
    assert advice.status == "miss"
    assert "compile '../../x': expected none, cudagraphs" in said
    assert advice.explanation is not None and "../../x" in advice.explanation.refused[0]


def test_only_signed_records(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Records(open_store()).put(made())
    monkeypatch.setenv("ADVISOR_SECRET", "what openssl printed")
    monkeypatch.setenv("ADVISOR_SIGNED_ONLY", "1")
    advice, said = look_up()
    assert advice.status == "miss" and "not signed" in said
    keep(made())
    assert look_up()[0].status == "exact"


class TestSeveralStores:
    def test_a_hit_behind_is_written_back(self, here: Path) -> None:
        keep(made(), f"dir:{here}/team")
        urls = [f"disk:{here}/mine", f"dir:{here}/team"]
        advice, said = look_up(cache=urls)
        assert (advice.status, said) == ("exact", "")
        assert open_store(urls[0]).keys() == open_store(urls[1]).keys()
        (first,) = look_up(cache=urls)[0].explanation.stores  # type: ignore[union-attr]
        assert first[0] == urls[0]  # the second is not asked any more

    @pytest.mark.parametrize("other", [{}, {"tolerance": 0.5}])
    def test_a_stranger_s_before_does_not_hide_ones_own(
        self, here: Path, other: dict[str, object]
    ) -> None:
        """Not even one of a task that is as near to what is asked."""
        urls = [f"dir:{here}/theirs", f"dir:{here}/mine", f"dir:{here}/behind"]
        keep(made(**{"tolerance": 0.25} if other else {}), urls[1])
        theirs = made(FAST.replace(threads=1), **other)
        date = replace(theirs.provenance, created=1.74e9, effort="exhaustive")
        Records(open_store(urls[0])).put(replace(theirs, provenance=date))
        advice, said = look_up(cache=urls)
        assert (advice.status, said, advice.config) == ("exact", "", FAST)
        assert "unsigned" not in advice.reason and advice.explanation is not None
        assert [url for url, _said in advice.explanation.stores] == urls[:2]
        advice, _said = look_up(cache=urls)
        assert advice.config == FAST  # copied before, where the search now ends
        assert advice.explanation is not None and len(advice.explanation.stores) == 1

    def test_a_stranger_s_is_served_where_nothing_else_is_and_said_to_be(
        self, here: Path, own_surroundings: Path
    ) -> None:
        urls = [f"dir:{here}/theirs", f"dir:{here}/behind"]
        theirs = made(FAST.replace(threads=1))
        Records(open_store(urls[0])).put(theirs)
        advice, _said = look_up(cache=urls)
        assert advice.explanation is not None and len(advice.explanation.stores) == 1  # no key
        keep(made(mode="infer"), urls[1])
        advice, said = look_up(cache=urls)
        assert (advice.status, said, advice.record) == ("exact", "", theirs)
        assert advice.reason.startswith("not in force yet; ")
        assert advice.reason.endswith("; unsigned")
        assert advice.explanation is not None and len(advice.explanation.stores) == 2
        assert advice.served.reason.endswith("; unsigned")
        asked = ("--cache", ",".join(urls))
        told = advisor(here, "why", "model.py:Net", "--shape", "4x3x8x8", *asked).stdout
        assert "; unsigned" in told
        told = advisor(here, "why", "model.py:Net", "--shape", "4x3x8x8", "--mode", "infer", *asked)
        assert f"not served  {theirs.id} model.py:Net (unsigned): mode" in told.stdout
        shown = json.loads(advisor(here, "show", "--json", *asked).stdout)["records"]
        assert {one["id"]: one["signed"] for one in shown} == {
            theirs.id: False,
            made(mode="infer").id: True,
        }
        assert advisor(here, "show", *asked).stdout.count("unsigned") == 1
        assert "unsigned" in advisor(here, "show", theirs.id, *asked).stdout
        assert "unsigned" not in advisor(here, "show", made(mode="infer").id, *asked).stdout

    def test_one_s_own_that_cannot_answer_does_not_stand_before_a_stranger_s(
        self, here: Path
    ) -> None:
        """Each batch that a record did not measure is another's to answer."""
        keep(made(shapes=((2, 3, 8, 8),)))
        Records(open_store()).put(made(FAST.replace(threads=1)))
        advice, _said = look_up()
        assert advice.config["threads"] == 1 and advice.served.reason.endswith("; unsigned")

    def test_stale_here_and_exact_behind(self, here: Path) -> None:
        urls = [f"disk:{here}/mine", f"dir:{here}/team"]
        keep(made(software__torch="2.0.1"), urls[0])
        keep(made(), urls[1])
        assert look_up(cache=urls)[0].status == "exact"

    def test_a_read_only_pack_before(self, here: Path) -> None:
        keep(made(), f"dir:{here}/team")
        done = advisor(here, "export", "some.pack", "--cache", f"dir:{here}/team")
        assert done.returncode == 0, done.stderr
        urls = [f"pack:{here}/some.pack", f"dir:{here}/none"]
        advice, said = look_up(cache=urls)
        assert (advice.status, said) == ("exact", "")
        advice, said = look_up(cache=[f"pack:{here}/none.pack", f"dir:{here}/team"])
        assert advice.status == "exact" and "No such file" in said

    @pytest.mark.parametrize("url", ["redis://127.0.0.1:1", "redis://host.invalid:1"])
    def test_a_dead_remote_costs_little_and_one_warning(self, here: Path, url: str) -> None:
        keep(made(), f"dir:{here}/mine")
        look_up(cache=[f"dir:{here}/mine"])  # what is paid once
        look_up(cache=[url, f"dir:{here}/mine"])
        spent = []
        for cache in ([f"dir:{here}/mine"], [url, f"dir:{here}/mine"]) * 5:
            began = time.perf_counter()
            advice, said = look_up(cache=cache)
            spent.append(time.perf_counter() - began)
            assert advice.status == "exact"
            assert ("looked on without it" in said) == (len(cache) == 2)
        # Patience is 50 ms; what a busy machine adds is not the store's.
        assert min(spent[1::2]) - min(spent[::2]) < 0.2

    def test_a_late_answer_is_kept_for_the_next_run(
        self, here: Path, redis_port: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from advisor.cache.stores.redis import RedisStore

        remote = f"redis://127.0.0.1:{redis_port}?prefix=late&timeout=30ms"
        keep(made(), remote.replace("30ms", "20s"))
        look_into = RedisStore.keys

        def slow(store: RedisStore) -> list[str]:
            time.sleep(0.3)
            store.patience_s = 5.0
            return look_into(store)

        monkeypatch.setattr(RedisStore, "keys", slow)
        cache = [remote, f"dir:{here}/mine"]
        advice, said = look_up(cache=cache)
        assert advice.status == "miss" and "no answer within" in said
        limit = time.monotonic() + 20
        while not open_store(cache[1]).keys() and time.monotonic() < limit:
            time.sleep(0.05)
        assert look_up(cache=cache[1])[0].status == "exact"


def test_the_command(here: Path, own_surroundings: Path) -> None:
    keep(made(optimizer="adamw"))
    told = advisor(here, "why", "model.py:Net", "--shape", "4x3x8x8", "--optimizer", "sgd")
    assert told.returncode == 0, told.stderr
    assert "optimizer adamw -> sgd" in told.stdout and str(own_surroundings) in told.stdout
    data = json.loads(
        advisor(
            here, "why", "model.py:Net", "--shape", "4x3x8x8", "--optimizer", "sgd", "--json"
        ).stdout
    )
    (near,) = data["near_misses"]
    assert data["status"] == "miss"
    assert near["differs"] == [{"field": "optimizer", "wanted": "sgd", "found": "adamw"}]
    (here / "other.py").write_text(MODEL)
    told = advisor(here, "why", "other.py", "--shape", "4x3x8x8")
    assert "tuned are    model.py:Net" in told.stdout


def test_records_are_carried_by_commands(here: Path) -> None:
    keep(made())
    done = advisor(here, "export", "all.pack", "--target", "model")
    assert (done.returncode, done.stdout) == (0, "1 record in all.pack\n"), done.stderr
    done = advisor(here, "import", "all.pack", "--cache", "dir:team")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, f"1 added to dir:{here}/team")
    done = advisor(here, "sync", os.environ["ADVISOR_CACHE"], "dir:team", "--json")
    assert [row["outcome"] for row in json.loads(done.stdout)["records"]] == ["known"]
    keep(replace(made(), provenance=replace(made().provenance, created=time.time())), "dir:team")
    done = advisor(here, "gc", "--cache", "dir:team")
    assert "would go" in done.stdout and "superseded" in done.stdout and "--yes" in done.stdout
    assert len(open_store("dir:team").keys()) == 2
    done = advisor(here, "gc", "--cache", "dir:team", "--yes")
    assert "removing" in done.stdout
    assert len(open_store("dir:team").keys()) == 1
    assert advisor(here, "gc", "--cache", "dir:team").stdout == "nothing to remove\n"
    told = advisor(here, "why", "model.py", "--cache", "pack:all.pack")
    assert "exact" in told.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("import", "missing.pack"), 2, "there is no such file"),
        (("import", "model.py"), 1, "no pack of advisor's"),
        (("export", "x.pack", "--device", "H100"), 1, "no record fits"),
        (("sync", "dir:a", "dir:a"), 2, "both are dir:"),
        (("sync", "dir:a", "dir:b"), 2, "there is nothing in dir:"),
        (("sync", "pack:missing", "dir:b"), 1, "No such file"),
        (("why", "nope.py"), 2, "there is no file"),
        (("why", "model.py", "--strict"), 1, ""),
        (("why", "model.py", "--on-miss", "error"), 2, "'error' is not one of"),
        (("gc", "--cache", "redis://127.0.0.1:1"), 1, "127.0.0.1:1"),
        (("import", "model.py", "--cache", "redis://127.0.0.1:1"), 1, "127.0.0.1:1"),
        (("forget", "--all", "--cache", "redis://127.0.0.1:1"), 1, "127.0.0.1:1"),
        (("show", "--cache", "pack:missing"), 1, "No such file"),
        (("gc", "--only", "everything"), 2, "'everything' is not one of"),
    ],
)
def test_wrong_input_is_one_line(
    here: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    done = advisor(here, *arguments)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert done.stderr.count("\n") <= 1


def test_tuning_keeps_locally_what_a_remote_cannot_take(here: Path, unmeasured: list[Task]) -> None:
    remote, local = "redis://127.0.0.1:1", f"dir:{here}/mine"
    tune = ("tune", "model.py", "--device", "cpu", "--shape")
    done = advisor(here, *tune, "4x3x8x8", "--cache", f"{remote},{local}")
    assert done.returncode == 0, done.stderr
    assert f"advisor sync {local} {remote}" in done.stderr
    assert len(open_store(local).keys()) == 1
    # What was best at another shape is tried first at the next.
    advice = look_up(cache=local)[0]
    assert advice.record is not None and advice.config != advice.record.baseline.config
    done = advisor(here, *tune, "4x3x9x9", "--cache", local)
    said = f"tried first: the advice of record {advice.record.id} (the same model, shapes 3x8x8"
    assert said in done.stderr and len(unmeasured) == 2


TYPED = ("python", "train.py", "--lr", "0.1 0.2")


def keep_run(*command: str, **changes: object) -> Record:
    """A record of a command, on this machine's CPU but for some of its key."""
    one = made(**changes)
    one = replace(one, key=replace(one.key, task=replace(one.key.task, command=command)))
    keep(one)
    return one


def why(here: Path, *words: str) -> list[str]:
    return advisor(here, "why", *words).stdout.splitlines()


def test_why_of_a_command_is_what_was_tuned_for_its_words(here: Path) -> None:
    """It is not started: there is no such script."""
    keep_run(*TYPED, device__name="Xeon of another")
    one = keep_run(*TYPED[:2])
    said = why(here, "--", *TYPED)
    assert said[0] == "looked for  python train.py --lr '0.1 0.2'"
    assert "of another device: Xeon of another: channels_last, 1.50x (1.47-1.53)" in said[2]
    found = json.loads(advisor(here, "why", "--strict", "--json", "--", *TYPED[:2]).stdout)
    assert [one["state"] for one in found["records"]] == ["exact"]
    assert (found["served"]["record"], found["served"]["config"]) == (one.id, dict(FAST))
    for words in (("model.py", "--", *TYPED), (), ("--shape", "4x3", "--", *TYPED)):
        refused = advisor(here, "why", *words)
        assert refused.returncode == 2 and refused.stderr.count("\n") == 1


def test_why_of_a_command_says_what_its_run_is_served(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--strict", "--", *TYPED[:2])
    missed = advisor(here, "why", "--strict", "--", "python", "other.py")
    assert missed.returncode == 1
    assert missed.stdout.splitlines()[-1] == (
        "served      nothing; no record is of exactly this command; `advisor run` also finds one "
        "of the same model and inputs. To tune: advisor tune -- python other.py"
    )
    one = keep_run(*TYPED[:2], software__torch="2.0.1")
    speedup = f"{one.id}: channels_last; 1.50x your unmodified script at batch 4"
    assert why(here, *words)[-1].startswith(f"served      {speedup}; measured elsewhere: torch 2")
    one = keep_run(*TYPED[:2])
    speedup = f"{one.id}: channels_last; 1.50x your unmodified script at batch 4"
    assert why(here, *words)[-1] == f"served      {speedup}"
    isolated = ("--strict", "--", "python", "-I", "train.py")
    assert why(here, *isolated)[-1] == "served      nothing; python -I keeps advisor out"
    Failures(None, one.key.model, one.key.task).keep(FAST, "RuntimeError: view")
    assert why(here, *words)[-1].endswith("nothing; this run failed with it (RuntimeError: view)")
    monkeypatch.setenv("ADVISOR_DISABLE", "1")
    assert advisor(here, "why", *words).returncode == 1
    assert why(here, *words)[-1] == "served      nothing; ADVISOR_DISABLE is set"


def test_why_of_a_command_of_another_device_is_a_miss(here: Path) -> None:
    keep_run(*TYPED, device__name="Xeon of another")
    assert why(here, "--", *TYPED)[-1].startswith("served      nothing; this run was not tuned on")
    assert advisor(here, "why", "--strict", "--", *TYPED).returncode == 1
