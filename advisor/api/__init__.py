"""The public functions; the only place where stores and studies meet."""

from advisor.api.again import EXPLAIN_S, VERIFY_S, Explained, Verified, explain, verify
from advisor.api.answering import break_even
from advisor.api.arguments import parse_duration, parse_shape
from advisor.api.effort import EFFORTS
from advisor.api.horizon import Row
from advisor.api.lines import choices, script_line, staleness, tune_line
from advisor.api.moving import GC_KINDS, Only, export, gc, import_, sync
from advisor.api.plan import Progress
from advisor.api.serve import ON_MISS, apply, lookup
from advisor.api.stored import open_records
from advisor.api.tuning import Tuned, forget, tune

__all__ = [
    "EFFORTS",
    "EXPLAIN_S",
    "GC_KINDS",
    "ON_MISS",
    "VERIFY_S",
    "Explained",
    "Only",
    "Progress",
    "Row",
    "Tuned",
    "Verified",
    "apply",
    "break_even",
    "choices",
    "explain",
    "export",
    "forget",
    "gc",
    "import_",
    "lookup",
    "open_records",
    "parse_duration",
    "parse_shape",
    "script_line",
    "staleness",
    "sync",
    "tune",
    "tune_line",
    "verify",
]
