"""The API. Each route parses, asks for a role and calls one function that knows no HTTP."""

from __future__ import annotations

from fastapi import APIRouter

from advisor.service.routes import admin, attempts, health, jobs, records

api = APIRouter()
for subject in (health, records, jobs, attempts, admin):
    api.include_router(subject.api)
