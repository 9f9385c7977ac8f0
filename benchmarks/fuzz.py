"""Decodes mutated byte strings: no crash, no code that runs, at most 64 MiB.

    python benchmarks/fuzz.py --count 1000000

Prints how many were decoded and how many refused, the peak memory above that of the start, and
all imports, opened files, compilations and processes that decoding caused.
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

MAX_MIB = 64


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", default=str(Path(__file__).with_name("results")))
    args = parser.parse_args()
    seeds = corpus()
    outcomes = Counter[str]()
    events = Counter[str]()
    decoding = False

    def audit(event: str, _arguments: object) -> None:
        if decoding:
            events[event] += 1

    for seed in seeds:  # the first decoding imports modules
        encode(decode(seed))
    inputs = mutated(seeds, random.Random(args.seed))
    for data in itertools.islice(mutated(seeds, random.Random(-1)), 200):
        try:
            decode(data)
        except RecordDamaged:
            continue
    sys.addaudithook(audit)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    for data in itertools.islice(inputs, args.count):
        decoding = True
        try:
            decode(data)
            outcome = "records"
        except RecordDamaged:
            outcome = "refused"
        decoding = False
        outcomes[outcome] += 1
    events.pop("object.__getattr__", None)  # attribute access: runs nothing
    peak_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    result = {
        "count": args.count,
        "records": outcomes["records"],
        "refused": outcomes["refused"],
        "peak_mib_above_start": round(peak_mib, 1),
        "events": dict(events),
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(result))
    if args.results != "-":
        import record as results

        results.append("fuzz", result, Path(args.results))
    sys.exit(peak_mib > MAX_MIB or bool(events))


if __name__ == "__main__":
    main()
