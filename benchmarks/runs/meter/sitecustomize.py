"""Measures any training command: prints the steps/s of its last optimizer steps, then ends it.

    METER_STEPS=600 PYTHONPATH=benchmarks/runs/meter python main.py

A hook of PyTorch counts the optimizer steps. Only the second half of them is timed.
"""

import importlib.abc
import importlib.util
import os
import sys


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_count(module):
            load(module)
            _count(int(os.environ["METER_STEPS"]))

        spec.loader.exec_module = load_and_count
        return spec


def _count(steps):
    import time

    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    done, started = 0, 0.0

    def now():
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_step(_optimizer, _args, _kwargs):
        nonlocal done, started
        done += 1
        if done == steps // 2:
            started = now()
        elif done == steps:
            rate = (steps - steps // 2) / (now() - started)
            if os.environ.get("RANK", "0") == "0":
                sys.stdout.write(f"\n{rate:.2f} steps/s over the last {steps - steps // 2}\n")
                sys.stdout.flush()
            os._exit(0)

    register_optimizer_step_post_hook(on_step)


if os.environ.get("METER_STEPS"):
    sys.meta_path.insert(0, _Finder())
