"""The public functions; the only place where stores and studies meet."""

from advisor.api.arguments import parse_shape
from advisor.api.lines import choices, script_line, staleness, tune_line
from advisor.api.serve import apply, lookup
from advisor.api.tuning import BUDGET_S, Progress, Tuned, forget, tune

__all__ = [
    "BUDGET_S",
    "Progress",
    "Tuned",
    "apply",
    "choices",
    "forget",
    "lookup",
    "parse_shape",
    "script_line",
    "staleness",
    "tune",
    "tune_line",
]
