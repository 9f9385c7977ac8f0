"""The client of a server: `Client`, and the commands submit, jobs, logs and cancel."""

from __future__ import annotations

import functools
import io
import json
import shlex
import subprocess
import tarfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from advisor.client import Client, prepare
from advisor.errors import StoreError, UsageError
from advisor.jobs.spec import JobSpec
from tests.cache.examples import record
from tests.face.commands import Done
from tests.face.commands import advisor as command
from tests.forks import until
from tests.service.serving import LiveServer
from tests.service.test_jobs import RECORD, beat, claim_job, end
from tests.service.test_records import packed, put
from tests.service.test_store import fake_store


@pytest.fixture
def client(remote: LiveServer) -> Client:
    return Client(remote.url)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    (folder / "nets").mkdir(parents=True)
    (folder / "nets" / "net.py").write_text("class Net: ...\n")
    (folder / "train.py").write_text("print(1)\n")
    monkeypatch.chdir(folder)
    return folder


def test_the_client_submits_and_follows(remote: LiveServer, client: Client, project: Path) -> None:
    job = client.submit("nets/net.py:Net", shape=(64, 8), gpu="H100", budget="1m")
    assert job.new and job.state == "queued" and not job.over
    assert (job.by, job.where) == ("a submit", "H100") and job.created > 0
    again = client.submit("nets/net.py:Net", shape="64x8", gpu="H100", budget=60, seed=None)
    assert (again.id, again.new) == (job.id, False)
    one = claim_job(remote)
    assert one is not None and one.job == job.id
    archive = remote.ask("GET", f"/api/archives/{one.asked.archive}", one.external).data
    with tarfile.open(fileobj=io.BytesIO(archive)) as found:
        assert {"nets/net.py", "train.py"} <= set(found.getnames())
    beat(remote, one, log="trial 1\n", device="GPU 0")
    with ThreadPoolExecutor() as reader:
        seen = reader.submit(lambda: [*client.log(job.id, follow=True, poll_s=0.01)])
        beat(remote, one, log="trial 2\n", device="GPU 0")
        end(remote, one, state="failed", reason="out of memory")
        assert "".join(seen.result(30)) == "trial 1\ntrial 2\n"
    result = client.job(job.id)
    assert (result.state, result.reason, result.over) == ("failed", "out of memory", True)
    assert (result.where, result.by, result.attempt) == ("H100", "a submit", 1)
    assert result.attempts[0]["device"] == "GPU 0"
    assert client.jobs(["failed"])[0].id == job.id and client.jobs(["done"]) == []
    run = client.submit(command=["python", "train.py"], device="cpu")
    assert client.submit(command=["python", "train.py"], gpus=0).id == run.id != job.id
    assert run.where == "the CPU"


def test_jobs_are_listed_newest_first(client: Client, project: Path, requests: list[str]) -> None:
    """Code that the server already has is not uploaded again."""
    for refused, says in (
        (lambda: client.submit(command="python train.py"), "expected a list of words"),
        (lambda: client.job(0), "number '0': expected at least 1"),
        (lambda: client.jobs(["none"]), "state 'none': expected 'queued', 'preempted',"),
    ):
        with pytest.raises(UsageError, match=says):
            refused()
    assert client.jobs() == []
    requests.clear()
    made = [client.submit(command=["python", "train.py"], gpu=gpu).id for gpu in "ABC"]
    assert [one.split()[0] for one in requests] == ["POST", "PUT", "POST", "POST", "POST"]
    assert [job.id for job in client.jobs()] == made[::-1]
    assert [job.id for job in client.jobs(most=2)] == made[:0:-1]
    assert client.cancel(made[0]) == client.cancel(made[0]) == "cancelled"
    assert client.job(made[0]).state == "cancelled"


def spec_of(folder: Path, *command: str, target: str = "", **more: Any) -> JobSpec:
    return prepare(JobSpec(command=command, target=target, **more), folder)[0]


def test_commands_use_paths_that_work_on_another_machine(project: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    (project / ".venv" / "bin").mkdir(parents=True)
    for name in ("python", "torchrun"):
        (project / ".venv" / "bin" / name).touch()
    here = project / "nets"
    assert spec_of(here, "python", "net.py").folder == "nets"
    assert spec_of(project, "python", "train.py").folder == ""
    assert spec_of(project, ".venv/bin/torchrun", "train.py").command == ("torchrun", "train.py")
    python = str(project / ".venv" / "bin" / "python")
    found = spec_of(here, python, f"{project}/train.py", "--data", "/data", "--out=/x", f"{here}/o")
    assert found.command == ("python", "../train.py", "--data", "/data", "--out=/x", "o")
    for line in ("torchrun train.py", "accelerate launch train.py", "/opt/x", "nets/net.py"):
        assert spec_of(project, *line.split()).command == tuple(line.split())
    assert spec_of(project, "colossal", env={"pip": "colossal"}).command == ("colossal",)
    shape = {"options": {"shape": "1x8"}}
    assert spec_of(here, target=f"{here}/net.py:Net", **shape).target == "net.py:Net"
    assert spec_of(here, target="torchvision:resnet18", **shape).archive == ""


def test_an_unusable_server_or_token_raises_an_error(remote: LiveServer) -> None:
    here = f"http://127.0.0.1:{remote.port}"
    for url, role, says in (
        (remote.url, "read", "this needs role 'submit'"),
        (remote.url, "with blanks", "token: malformed token"),
        ("dir:/data", "submit", "expected http"),
        (f"{here}/below", "submit", "has no jobs; its advisor is too old"),
        ("http://127.0.0.1:1", "submit", "^server http://127.0.0.1:1: .*refused"),
    ):
        with pytest.raises((StoreError, UsageError), match=says):
            Client(url, remote.tokens.get(role, role)).submit("torchvision:resnet18", shape=(1, 8))
    assert Client(remote.url, remote.tokens["read"]).jobs() == []


@pytest.mark.parametrize(
    "body",
    [
        *(b"<html>", b"[]", b'{"jobs": 5}', b'{"jobs": [5]}', b'{"id": 7}'),
        b'{"jobs": [{"id": "7", "state": "done", "what": "x"}]}',
        b'{"jobs": [{"id": 7, "state": ["done"], "what": "x"}]}',
        b'{"text": 5, "next": 1, "ended": true}',
        b'{"text": "", "next": -1, "ended": true}',
    ],
)
def test_malformed_responses_raise_store_errors(body: bytes) -> None:
    with fake_store(lambda _path: (200, {}, body)) as store:
        client = Client(store.url)
        reads = (client.jobs, lambda: client.job(7), lambda: [*client.log(7)])
        for act in (*reads, lambda: client.cancel(7)):
            with pytest.raises(StoreError, match="this is no advisor server"):
                act()


def test_control_characters_in_responses_are_replaced() -> None:
    line = b'{"id": 7, "state": "done", "what": "\\u001b[2J", "attempts": [{"device": "\\u001b"}]}'
    log = b'{"text": "a\\u001b[2J\\n", "next": 1, "ended": true}'
    with fake_store(lambda path: (200, {}, log if "/log" in path else line)) as store:
        job = Client(store.url).job(7)
        assert (job.what, job.attempts[0]["device"]) == ("?[2J", "?")
        assert [*Client(store.url).log(7)] == ["a?[2J\n"]


def test_following_a_log_survives_a_server_outage() -> None:
    """It ends with an error once the token is revoked."""
    responses = [
        (200, {}, b'{"text": "a", "next": 1, "ended": false}'),
        (503, {}, b"{}"),
        (200, {}, b'{"text": "b", "next": 2, "ended": false}'),
        (401, {}, b"{}"),
    ]
    with fake_store(lambda _path: responses.pop(0)) as store:
        log = Client(store.url).log(7, follow=True, poll_s=0.01)
        assert [next(log), next(log)] == ["a", "b"]
        with pytest.raises(StoreError, match="set ADVISOR_TOKEN"):
            next(log)


Run = Callable[..., Done]


@pytest.fixture
def advisor(project: Path) -> Run:
    """Runs an advisor command in the project's folder, with extra environment variables."""
    return functools.partial(command, project)


SUBMIT = ("submit", "--gpu", "H100", "--gpus", "2")
RUN = ("--", "python", "train.py")


def json_of(done: Done) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_submit_prints_the_job(remote: LiveServer, project: Path, advisor: Run) -> None:
    (project / ".env").write_text("KEY=1")
    code, stays, last, watch, waits = advisor(*SUBMIT, *RUN).stdout.splitlines()
    assert code.startswith("code    2 files, 24 B (") and code.endswith(f"packed) of {project}")
    assert stays == "stays   .env: ignored"
    assert last == "job 1 queued; to follow it: advisor logs -f 1"
    assert watch == f"watch   http://127.0.0.1:{remote.port}/jobs/1"
    why = "no known machine has 2 GPUs named 'H100' (known: none); the job waits"
    assert waits == f"waits   {why}"
    again = json_of(advisor(*SUBMIT, "--json", *RUN))
    assert (again["id"], again["new"], again["code"]["files"]) == (1, False, 2)
    assert again["code"]["left_out"] == [".env: ignored"] and watch.endswith(again["page"])
    same = ["job 1: already submitted; queued", watch, waits]
    assert advisor(*SUBMIT, *RUN).stdout.splitlines()[2:] == same
    own = ("submit", "--device", "cpu", "--map", "batch=--batch-size", "--no-compile")
    assert json_of(advisor(*own, "--budget", "1m", "--json", *RUN))["id"] == 2
    assert json_of(advisor("jobs", "2", "--json"))["gpus"] == 0
    one = claim_job(remote, gpus=0)
    assert one is not None and "--map batch=--batch-size" in " ".join(one.asked.words())
    target = advisor("submit", "torchvision:resnet18", "--shape", "4x3x8x8")
    assert target.stdout.splitlines() == [
        "job 3 queued; to follow it: advisor logs -f 3",
        watch.replace("jobs/1", "jobs/3"),
        "waits   no known machine has a GPU (known: none); the job waits",
    ]


def test_where_the_server_url_comes_from(remote: LiveServer, project: Path, advisor: Run) -> None:
    plain = remote.url.partition("?")[0]
    for cache in ("dir:store", ""):
        alone = advisor(*SUBMIT, *RUN, ADVISOR_CACHE=cache)
        assert alone.returncode == 2 and "no server: give --server" in alone.stderr
    found = advisor(*SUBMIT, "--server", plain, *RUN, ADVISOR_CACHE="dir:store")
    assert f"advisor logs -f 1 --server {plain}\n" in found.stdout
    assert advisor("jobs", ADVISOR_CACHE=f"dir:store,{remote.url}").returncode == 0
    (project / "pyproject.toml").write_text(f'[tool.advisor]\ncache = "{remote.url}"\n')
    refused = advisor("jobs", "--json", ADVISOR_CACHE="")
    assert refused.returncode == 1 and "add 'http://127.0.0.1:" in refused.stderr
    tokens = project / "tokens"
    tokens.touch(0o600)
    tokens.write_text(f"{plain} {remote.tokens['submit']}\n")
    named = {"ADVISOR_CACHE": "", "ADVISOR_TOKEN_FILE": str(tokens)}
    assert json_of(advisor("jobs", "--json", **named))["jobs"][0]["id"] == 1


REFUSED = (
    ("submit", "give either a TARGET and --shape, or your command after --"),
    ("submit model.py -- python train.py", "give either"),
    ("submit model.py", "shape: give your batch"),
    ("submit nets/none.py --shape 1x8", "there is no file nets/none.py"),
    ("submit --budget 1s -- python train.py", "budget 1s"),
    ("submit --shape 1x8 -- python train.py", "--shape: read from the run"),
    ("submit --gpus 99 -- python train.py", "99"),
    (
        "submit --device cpu --gpu H100 -- python train.py",
        "gpu 'H100': the job is for the CPU; leave gpu out",
    ),
    ("submit --pip 'a b' -- python train.py", "--pip 'a b': expected one requirement"),
    ("submit -- python none.py", "there is no file none.py"),
    ("submit -- nosuchprog train.py", "command 'nosuchprog': no such program; give"),
    ("submit -- ./nosuchprog", "command './nosuchprog': no such program; give"),
    ("submit -- train.py", "command 'train.py': this file is no program; put python before it"),
    ("submit -- python -I train.py", "keeps advisor out"),
    ("submit -- python ../outside.py", "lies outside"),
    ("submit --server dir:x -- python train.py", "server 'dir:x': expected http"),
    ("jobs --state none", "none"),
    ("jobs seven", "seven"),
    ("jobs 7", "there is no job 7"),
    ("logs 7", "there is no job 7"),
    ("cancel 7", "there is no job 7"),
)


def test_wrong_arguments_give_one_error_line(remote: LiveServer, advisor: Run) -> None:
    Path("../outside.py").touch()
    for words, says in REFUSED:
        result = advisor(*shlex.split(words))
        assert result.returncode == 2 and says in result.stderr, words
        assert result.stderr.count("\n") == 1 and not result.stdout
    assert Client(remote.url).jobs() == []


def test_jobs_logs_and_cancel_commands(remote: LiveServer, project: Path, advisor: Run) -> None:
    assert advisor("jobs").stdout.startswith("No jobs; to submit one: advisor submit")
    for _ in range(2):
        advisor(*SUBMIT, *RUN)
        one = claim_job(remote)
        assert one is not None
        beat(remote, one, log="trial 1\n", device="GPU 0")
        end(remote, one, state="failed", reason="no loss")
    listed = advisor("jobs")
    heads, first, second = listed.stdout.splitlines()
    assert heads.split() == ["ID", "state", "what", "where", "since", "by", "reason"]
    wanted = ["failed", "python", "train.py", "2", "x", "H100", "now", "a", "submit", "no", "loss"]
    assert (first.split(), second.split()) == (["2", *wanted], ["1", *wanted])
    assert "2 x H100, submitted by a submit just now" in advisor("jobs", "1").stdout
    assert "attempt 1 failed on local:here GPU 0" in advisor("jobs", "1").stdout
    assert advisor("logs", "1").stdout == "trial 1\n"
    assert json_of(advisor("logs", "1", "--json")) == {"version": 1, "id": 1, "log": "trial 1\n"}
    followed = advisor("logs", "-f", "1")
    assert (followed.returncode, followed.stdout) == (1, "trial 1\n")
    assert followed.stderr == "job 1 failed: no loss\n"
    advisor(*SUBMIT, *RUN)
    assert advisor("cancel", "3").stdout == "job 3 cancelled\n"
    late = advisor("cancel", "1")
    assert (late.returncode, late.stdout) == (1, "job 1: already failed\n")
    again = advisor("cancel", "3")
    assert (again.returncode, again.stdout) == (1, "job 3: already cancelled\n")
    states = json_of(advisor("jobs", "--state", "cancelled", "--json"))["jobs"]
    assert [job["id"] for job in states] == [3]
    refused = advisor("jobs", ADVISOR_TOKEN="x" * 12)
    assert refused.returncode == 1 and "set ADVISOR_TOKEN to one of" in refused.stderr


def test_submit_follow_prints_the_log(remote: LiveServer, project: Path, advisor: Run) -> None:
    def work() -> None:
        one = until(lambda: claim_job(remote))
        beat(remote, one, log="trial 1\n", device="GPU 0")
        put(remote, *packed(record()), one.external)
        end(remote, one, state="done", record=RECORD)

    worker = threading.Thread(target=work)
    worker.start()
    result = advisor("submit", "-f", *RUN)
    worker.join(30)
    assert result.returncode == 0 and result.stdout.splitlines()[-1] == "trial 1"
    assert result.stderr == f"job 1 done; to see its record: advisor show {RECORD}\n"
    assert json_of(advisor("logs", "-f", "1", "--json"))["log"] == "trial 1\n"
    again = advisor("submit", *RUN)
    assert again.stdout.splitlines()[-2] == "job 1: already done; --force measures again"
    assert json_of(advisor("submit", "--force", "--json", *RUN))["id"] == 2
