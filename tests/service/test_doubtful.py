"""What a busy host measured counts in no mean of the server's pages."""

from __future__ import annotations

from advisor.service import records
from tests.cache.examples import KEY, changed, record
from tests.face.test_doubtful import BUSY, STEADY, made
from tests.service.serving import Served
from tests.service.test_pages import keep


def test_a_doubtful_record_counts_in_no_mean(served: Served) -> None:
    keep(served, record())
    keep(served, made(BUSY, 22.9, changed(KEY, "shapes", (3, 8, 8))))
    with served.database.reading() as session:
        (fleet,) = records.fleet(session)
    assert (fleet.records, fleet.mean, fleet.most) == (2, 1.5, 1.5)
    keep(served, made(STEADY, 2.5, changed(KEY, "shapes", (3, 9, 9))))
    with served.database.reading() as session:
        (fleet,) = records.fleet(session)
    assert fleet.records == 3 and 1.9 < fleet.mean < 2.1
