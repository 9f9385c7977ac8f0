"""The process that searches while a script trains: started by `advisor.resolve.online`.

    python -m advisor.online_search < pipe

The first line on stdin is the task, as JSON. When stdin closes, the script has ended: exit.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from advisor.arguments import progress_of
from advisor.cache.record import PILOT
from advisor.errors import AdvisorError
from advisor.open_store import open_records
from advisor.resolve.answer import gain
from advisor.tuners.measure.run.run import AttachedRun
from advisor.tuners.measure.run.session import AttachedScript
from advisor.tuners.search.plan import Plan
from advisor.tuning import measured
from advisor.workload import RunWorkload


def _log(event: Mapping[str, Any]) -> None:
    sys.stderr.write(f"{event['text']}\n" if "text" in event else "")


def tune_online(message: Mapping[str, Any]) -> None:
    """Search, store the record, and switch the script to the best config."""
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in message["given"].items()}
    script = AttachedScript(socket.socket(fileno=message["socket"]))
    run = AttachedRun(script, message["command"], log=Path(message["folder"], "log"))
    workload = RunWorkload(message["command"], given, attached=run)
    records = open_records(message["cache"], fallback=True)
    plan = Plan.of({"budget": message["tune_s"]})
    record = measured(workload, plan, records, progress_of(_log)).record
    run.leave(record.winner(PILOT).config, gain(record, PILOT))


def _end_with_script(folder: str) -> None:
    """Wait until the script ends; remove the folder and exit. A search that fails keeps its log."""
    sys.stdin.read()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def main() -> int:
    message = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_script, args=[message["folder"]], daemon=True).start()
    try:
        tune_online(message)
    except AdvisorError as exc:
        sys.stderr.write(f"advisor: {exc}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
