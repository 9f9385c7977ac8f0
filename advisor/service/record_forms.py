"""The form of a record's page: measure it again."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import RedirectResponse, Response

from advisor.service import jobs
from advisor.service.access import Here
from advisor.service.pages import OwnForm, Submitter
from advisor.service.routes.parsing import RecordId

record_forms = APIRouter(include_in_schema=False)


@record_forms.post("/records/{record}/measure")
def measure_again(here: Here, caller: Submitter, _form: OwnForm, record: RecordId) -> Response:
    """Leads to the page of the job; an unusable record is answered as a page with the reason."""
    with here.database.writing() as session:
        job = jobs.measure_again(session, record, caller).job.id
    return RedirectResponse(f"/jobs/{job}", 303)
