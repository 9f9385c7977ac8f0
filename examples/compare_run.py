"""Runs a command unmodified and under `advisor run`, in turn, and says how much faster the one is.

python examples/compare_run.py python examples/train_mnist_plain.py

The command prints its own speed: the last '1,234 samples/s' of what it prints counts.
"""

import re
import statistics
import subprocess
import sys

ADVISED = [sys.executable, "-m", "advisor", "run", "--"]


def speed(name: str, command: list[str]) -> float:
    """The samples/s that a command says it reached."""
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    print(f"{name}  {said.splitlines()[-1]}", flush=True)
    return float(re.findall(r"([\d,.]+) samples/s", said)[-1].replace(",", ""))


def main() -> None:
    command = sys.argv[1:]
    if not command:
        sys.exit("give the command to run, as you would type it")
    ratios = []
    for _turn in range(2):
        plain = speed("unmodified:  ", command)
        ratios.append(speed("advisor run: ", [*ADVISED, *command]) / plain)
    print(f"{statistics.geometric_mean(ratios):.2f}x as fast")


if __name__ == "__main__":
    main()
