"""What a busy host measured counts in no mean of the server's pages."""

from __future__ import annotations

from advisor.service import catalog
from tests.cache.examples import KEY, changed, record
from tests.face.test_doubtful import BUSY, STEADY, made
from tests.service.serving import Served
from tests.service.test_pages import keep


def test_a_doubtful_record_counts_in_no_mean(served: Served) -> None:
    keep(served, record())
    with served.database.reading() as session:
        before = catalog.median(session)
    keep(served, made(BUSY, 22.9, changed(KEY, "shapes", (3, 8, 8))))
    with served.database.reading() as session:
        assert catalog.median(session) == before
    keep(served, made(STEADY, 2.5, changed(KEY, "shapes", (3, 9, 9))))
    with served.database.reading() as session:
        assert catalog.median(session)[0] == before[0] + 1
