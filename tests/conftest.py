"""What every test stands on: a store of its own, and no leftovers of the caller's shell."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.util import get_temp_dir
from pathlib import Path

import pytest

# Before torch is imported: two processes of several OpenMP threads each starve one another on few
# cores, and a record is of as many threads as the process that asks for it has.
os.environ["OMP_NUM_THREADS"] = "1"
# None of a config's two threads spins for a core that others need: that took six times as long.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
# What every Python that a test starts reads first.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).with_name("started")), *filter(None, [os.environ.get("PYTHONPATH")])]
)

from advisor.tuners import host
from advisor.tuners.measure.run import guarded_process
from tests import forks
from tests.cache import servers

_MEMORY = Path("/dev/shm")
_ENOUGH = 2 * 2**30
"""Bytes; a session whose tests pass leaves nothing, and has a third of it at most."""


def pytest_configure() -> None:
    """What is imported is no garbage: a collection that looks through it takes 0.3 s each time.

    Folders of tests are in memory, where there is enough of it: tests end processes, not machines,
    and those of a search waited half their time until a disk had their journals.
    """
    gc.disable()
    if "PYTEST_DEBUG_TEMPROOT" not in os.environ and _in_memory():
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(_MEMORY)


def _in_memory() -> bool:
    """Whether there is room in it, and what was compiled may be loaded from there."""
    if not os.access(_MEMORY, os.W_OK):
        return False
    there = os.statvfs(_MEMORY)
    return there.f_bavail * there.f_frsize >= _ENOUGH and not there.f_flag & os.ST_NOEXEC


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Folders come in reverse: short files are last then, and processes that share the files end
    together. On a GPU, warnings of PyTorch's own are no errors: torch 2.11 gives several."""
    items.sort(key=lambda item: item.path.parent.name, reverse=True)
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings("default"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch  # here, because it takes seconds and most selections do not need it

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


def pytest_collection_finish() -> None:
    """From here on there is garbage, beside what was imported."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    gc.enable()


def pytest_sessionfinish() -> None:
    """Put back, because nanobind tells of all that is still there at the end."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def nothing_of_the_users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For what is set up before a test has surroundings of its own. Workers and commands that this
    process starts are forks: see tests/forks.py."""
    # Python takes a file for unchanged if only its content is another, as of an edit in a test.
    sys.dont_write_bytecode = True
    get_temp_dir()  # of the server of forks: not in the folder of the first test that forks
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        patch.setattr(guarded_process, "subprocess", forks.FORKING)
        cpu = host.cpu().replace("bf16", "")  # on any host, as on one without kernels for it
        patch.setattr(host, "cpu", lambda: cpu)
        folder = tmp_path_factory.mktemp("nobody")
        patch.setenv("ADVISOR_CACHE", str(folder / "cache"))
        patch.setenv("XDG_DATA_HOME", str(folder / "data"))
        patch.setenv("XDG_CACHE_HOME", str(folder / "user"))  # the store to fall back on
        yield


@pytest.fixture(autouse=True)
def own_surroundings(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """Points ADVISOR_CACHE to a fresh folder, which is returned and does not exist yet."""
    if request.node.get_closest_marker("e2e"):
        monkeypatch.setattr(guarded_process, "subprocess", subprocess)
    folder = tmp_path_factory.mktemp("advisor") / "cache"
    monkeypatch.setenv("XDG_DATA_HOME", str(folder.parent / "data"))  # the user's own key
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in [*os.environ]:
        if name.startswith("ADVISOR_") or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ADVISOR_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def redis_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Of a real Redis server on loopback."""
    server = servers.redis_server(tmp_path_factory.mktemp("redis"))
    if server is None:
        pytest.skip("redis-server is not installed")
    with servers.running(server):
        yield server.port


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    """Of moto's S3 server on loopback."""
    patch = pytest.MonkeyPatch()
    for name, value in servers.AWS.items():
        patch.setenv(name, value)
    with servers.running(servers.s3_server()) as server:
        servers.make_bucket(server.port)
        yield server.port
    patch.undo()
