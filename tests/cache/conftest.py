"""Hypothesis without time limits, for slow hosts; and a store of files."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from advisor.cache.stores import ByteStore, open_store

settings.register_profile("any host", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any host")


@pytest.fixture
def store(tmp_path: Path) -> ByteStore:
    return open_store(f"dir:{tmp_path}/store")
