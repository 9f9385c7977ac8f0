"""The API. Each route parses, asks for a role and calls one function that knows no HTTP."""

from __future__ import annotations

from fastapi import APIRouter

from advisor.cache.codec import MAX_BYTES
from advisor.service.routes import admin, attempts, jobs, records
from advisor.service.routes.parsing import REFUSALS

api = APIRouter(responses=REFUSALS, max_body_size=MAX_BYTES)
for subject in (records, jobs, attempts, admin):
    api.include_router(subject.api)
