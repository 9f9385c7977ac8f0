"""Fixtures shared by the tests in this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from advisor.tuners.act.process_flags import PROCESS_FLAGS

# A busy host must not fail a test.
settings.register_profile("any host", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any host")


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """A process group of one process. DDP uses gradient buckets here too."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def flags_restored() -> Iterator[None]:
    """Restore torch's process-wide flags after the test."""
    cudnn, threads = torch.backends.cudnn, torch.get_num_threads()
    names = ("benchmark", "deterministic", "enabled", "allow_tf32")
    values, precision = [getattr(cudnn, n) for n in names], torch.get_float32_matmul_precision()
    yield
    PROCESS_FLAGS.release()
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision(precision)
    for name, value in zip(names, values, strict=True):
        setattr(cudnn, name, value)
    torch.set_num_threads(threads)
