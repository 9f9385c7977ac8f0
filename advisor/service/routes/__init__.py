"""The API. Each route parses, asks for a role and calls one function that knows no HTTP."""

from __future__ import annotations

from fastapi import APIRouter

from advisor.service.routes import admin, artifacts, attempts, health, jobs, records
from advisor.service.routes.parsing import ANY, TOKENED

api = APIRouter()
api.include_router(health.api, responses=ANY)
for subject in (records, artifacts, jobs, attempts, admin):
    api.include_router(subject.api, responses=TOKENED)
