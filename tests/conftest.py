"""Gives every test a store of its own, and hides the environment of the caller's shell."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.util import get_temp_dir
from pathlib import Path

import pytest

# Set before torch is imported. On few cores, processes with several OpenMP threads slow each other
# down. The number of threads is also a part of each record's key.
os.environ["OMP_NUM_THREADS"] = "1"
# A waiting thread must not spin on a core that others need: that took six times as long.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
# Every Python that a test starts imports sitecustomize.py from this folder.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).with_name("started")), *filter(None, [os.environ.get("PYTHONPATH")])]
)

from advisor.tuners import host
from advisor.tuners.measure.run import guarded_process
from tests import forks
from tests.cache import servers

_loaded_without = host.loaded_without
_MEMORY = Path("/dev/shm")
_ENOUGH_BYTES = 2 * 2**30
"""Bytes. A session needs a third of it at most, and leaves nothing if its tests pass."""


def pytest_configure() -> None:
    """Disables garbage collection during imports, where each collection takes 0.3 s.

    Puts temporary folders in memory if there is room. On a disk, tests of the search spent half
    their time waiting for their journals.
    """
    gc.disable()
    if "PYTEST_DEBUG_TEMPROOT" not in os.environ and _fits_in_memory():
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(_MEMORY)


def _fits_in_memory() -> bool:
    """Whether /dev/shm has enough room and permits to load compiled code from it."""
    if not os.access(_MEMORY, os.W_OK):
        return False
    status = os.statvfs(_MEMORY)
    return status.f_bavail * status.f_frsize >= _ENOUGH_BYTES and not status.f_flag & os.ST_NOEXEC


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Reverses the folders. Short files then come last, and parallel processes end together.
    Tolerates warnings in GPU tests: torch 2.11 itself gives several."""
    items.sort(key=lambda item: item.path.parent.name, reverse=True)
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings("default"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch  # imported late, because it takes seconds and few selections need it

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


def pytest_collection_finish() -> None:
    """Enables garbage collection, which from now on skips all imported objects."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    gc.enable()


def pytest_sessionfinish() -> None:
    """Unfreezes the objects, because nanobind reports all that exist at exit."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def isolated_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Isolates fixtures that are set up before `own_surroundings`. Workers and commands that this
    process starts are forks: see tests/forks.py."""
    # With bytecode, Python may miss that a test has edited a file.
    sys.dont_write_bytecode = True
    get_temp_dir()  # for the fork server, which must not use the first test's folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        patch.setattr(guarded_process, "subprocess", forks.FORKING)
        # A fork began with the variables of its server.
        patch.setattr(host, "loaded_without", lambda *_: False)
        cpu = host.cpu().replace("bf16", "")  # every host acts as one without bf16 kernels
        patch.setattr(host, "cpu", lambda: cpu)
        folder = tmp_path_factory.mktemp("nobody")
        patch.setenv("ADVISOR_CACHE", str(folder / "cache"))
        patch.setenv("XDG_DATA_HOME", str(folder / "data"))
        patch.setenv("XDG_CACHE_HOME", str(folder / "user"))  # the fallback store
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
        monkeypatch.setattr(host, "loaded_without", _loaded_without)
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
    """Returns the port of a real Redis server on loopback."""
    server = servers.redis_server(tmp_path_factory.mktemp("redis"))
    if server is None:
        pytest.skip("redis-server is not installed")
    with servers.running(server):
        yield server.port


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    """Returns the port of moto's S3 server on loopback."""
    patch = pytest.MonkeyPatch()
    for name, value in servers.AWS.items():
        patch.setenv(name, value)
    with servers.running(servers.s3_server()) as server:
        servers.make_bucket(server.port)
        yield server.port
    patch.undo()
