"""The public functions; the only place where stores and studies meet."""

from advisor.api.again import EXPLAIN_S, VERIFY_S, Explained, Verified, explain, verify
from advisor.api.arguments import parse_duration, parse_shape
from advisor.api.effort import EFFORTS
from advisor.api.horizon import Row
from advisor.api.lines import choices, script_line, staleness, tune_line
from advisor.api.plan import Progress
from advisor.api.serve import apply, break_even, lookup
from advisor.api.tuning import Tuned, forget, tune

__all__ = [
    "EFFORTS",
    "EXPLAIN_S",
    "VERIFY_S",
    "Explained",
    "Progress",
    "Row",
    "Tuned",
    "Verified",
    "apply",
    "break_even",
    "choices",
    "explain",
    "forget",
    "lookup",
    "parse_duration",
    "parse_shape",
    "script_line",
    "staleness",
    "tune",
    "tune_line",
    "verify",
]
