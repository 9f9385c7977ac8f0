"""Runs a command unmodified and under `advisor run`, in turn, and prints the speed-up.

python examples/compare_run.py python examples/train_mnist_plain.py --epochs 100

The command must print its speed repeatedly, as '1,234 samples/s'. The first speed does not count,
and the command is stopped 15 s after it. If advisor has no advice for the command, nothing is
compared.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import threading

ADVISOR = [sys.executable, "-m", "advisor"]
SECONDS = 15.0
TURNS = 2


def speed(name: str, command: list[str]) -> float:
    """Runs a command. Returns the median of the samples/s that it prints."""
    speeds = []
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        end = threading.Timer(SECONDS, process.terminate)
        for line in process.stdout:
            printed = re.findall(r"([\d,.]+) samples/s", line)
            if printed and not speeds:
                end.start()
            speeds += [float(one.replace(",", "")) for one in printed]
        end.cancel()
    if len(speeds) < 2:
        sys.exit(f"{' '.join(command)}: expected two or more lines with '1,234 samples/s'")
    median = statistics.median(speeds[1:])
    print(f"{name}  {median:,.0f} samples/s", flush=True)
    return median


def advised_speedup(command: list[str]) -> tuple[float, str]:
    """Returns the measured speed-up of the advice for a command, or 1, and the reason."""
    why = [*ADVISOR, "why", "--json", "--", *command]
    report = json.loads(subprocess.run(why, stdout=subprocess.PIPE, check=True).stdout)
    served = report["served"]
    speedups = [one["speedup"] for one in report["records"] if one["id"] == served["record"]]
    return max(speedups, default=1.0), served["reason"]


def main() -> None:
    command = sys.argv[1:]
    if not command:
        sys.exit("no command: append the command to run, e.g. python train.py")
    speedup, reason = advised_speedup(command)
    if speedup == 1:
        print(f"No advice for this machine ({reason}).")
        print("On an H200, advisor made transformers' run_clm.py 5.1 times as fast: see")
        print("docs/benchmarks.md")
        return
    ratios = []
    for _turn in range(TURNS):
        plain = speed("unmodified:  ", command)
        ratios.append(speed("advisor run: ", [*ADVISOR, "run", "--", *command]) / plain)
    print(f"{statistics.geometric_mean(ratios):.2f}x as fast ({min(ratios):.2f}-{max(ratios):.2f})")


if __name__ == "__main__":
    main()
