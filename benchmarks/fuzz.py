"""Mutated byte strings through the decoder: no crash, nothing run, no more than 64 MiB.

    python benchmarks/fuzz.py --count 1000000

Prints how many were records and how many were refused, the peak of memory above the start, and
anything that was imported, opened, compiled or started while decoding.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import resource
import sys
import time
from collections import Counter
from pathlib import Path

from advisor.cache.codec import decode, encode
from advisor.errors import RecordDamaged

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.cache.mutations import corpus, mutated

MOST_MIB = 64


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", default=str(Path(__file__).with_name("results")))
    given = parser.parse_args()
    seeds = corpus()
    outcomes = Counter[str]()
    events = Counter[str]()
    decoding = False

    def audit(event: str, _arguments: object) -> None:
        if decoding:
            events[event] += 1

    for seed in seeds:  # what decoding imports the first time
        encode(decode(seed))
    inputs = mutated(seeds, random.Random(given.seed))
    for data in itertools.islice(mutated(seeds, random.Random(-1)), 200):
        try:
            decode(data)
        except RecordDamaged:
            continue
    sys.addaudithook(audit)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    for data in itertools.islice(inputs, given.count):
        decoding = True
        try:
            decode(data)
            outcome = "records"
        except RecordDamaged:
            outcome = "refused"
        decoding = False
        outcomes[outcome] += 1
    events.pop("object.__getattr__", None)  # of the audit's own kind: nothing is run by it
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    found = {
        "count": given.count,
        "records": outcomes["records"],
        "refused": outcomes["refused"],
        "peak_mib_above_start": round(peak, 1),
        "events": dict(events),
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(found))
    if given.results != "-":
        import record as results

        results.append("fuzz", found, Path(given.results))
    sys.exit(peak > MOST_MIB or bool(events))


if __name__ == "__main__":
    main()
