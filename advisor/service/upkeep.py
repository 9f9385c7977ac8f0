"""Removes what is old and nobody needs."""

from __future__ import annotations

from advisor.jobs.states import LIVE
from advisor.service import archives, artifacts, jobs, lookups, tokens
from advisor.service.access import Service

EVERY_S = 3600.0


def tidy(service: Service) -> None:
    with service.database.writing() as session:
        tokens.tidy(session)
        jobs.tidy(session)
        archives.tidy(session, LIVE)
        artifacts.tidy(session)
        lookups.tidy(session)
