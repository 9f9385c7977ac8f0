"""The float32 switches: set, and then readable and settable through either interface."""

from __future__ import annotations

import warnings
from itertools import product
from pathlib import Path
from typing import Any

EXPECTED = {
    "default": ("matmul=ieee conv=tf32 rnn=tf32", "highest"),
    "tf32": ("matmul=tf32 conv=tf32 rnn=tf32", "high"),
    "bf16": ("matmul=tf32 conv=tf32 rnn=tf32", "high"),
    "fp32": ("matmul=ieee conv=ieee rnn=ieee", "highest"),
}


def test_both_interfaces_stay_readable_and_settable_after_any_earlier_setting() -> None:
    """In a fresh process, with warnings as errors from the first call on."""
    from tests import forks  # where the tests are found, which is not where the function runs

    done = forks.run(Path(__file__))
    assert done.returncode == 0, done.stderr
    assert "deprecat" not in done.stderr


def every_sequence() -> None:
    import torch

    from advisor.tuners.tf32 import Float32, describe, set_float32

    cudnn: Any = torch.backends.cudnn
    matmul: Any = torch.backends.cuda.matmul
    wide: Any = torch.backends
    new = hasattr(cudnn, "fp32_precision")

    def read(then: str) -> str:
        try:
            old = (matmul.allow_tf32, cudnn.allow_tf32, torch.get_float32_matmul_precision())
        except RuntimeError as error:
            raise AssertionError(then) from error
        shown = describe()
        assert old[0] == ("matmul=tf32" in shown), then
        assert old[1] == ("conv=tf32" in shown) == ("rnn=tf32" in shown), then
        return str(old[2])

    before: list[tuple[Any, str, Any]] = [
        (None, "", None),
        *((torch.set_float32_matmul_precision, "", p) for p in ("medium", "high", "highest")),
        *((matmul, "allow_tf32", on) for on in (True, False)),
        *((cudnn, "allow_tf32", on) for on in (True, False)),
    ]
    after = list(before)
    if new:
        places = (wide, cudnn, cudnn.conv, cudnn.rnn, matmul)
        before += [(p, "fp32_precision", to) for p in places for to in ("tf32", "ieee", "none")]
        cpu: Any = torch.backends.mkldnn
        before += [(cpu.matmul, "fp32_precision", to) for to in ("bf16", "tf32", "ieee")]
        before += [(wide, "fp32_precision", "bf16")]
        after += [(p, "fp32_precision", to) for p in (wide, cudnn) for to in ("tf32", "ieee")]

    def act(place: Any, name: str, value: Any) -> None:
        if name:
            setattr(place, name, value)
        elif place is not None:
            place(value)

    for first, precision, then in product(before, EXPECTED, after):
        told, expected = f"{first} {precision}", EXPECTED[precision]
        act(*first)
        held = Float32.now()
        set_float32(precision)
        held.put_back()
        back = Float32.now()
        # What torch refused to say, as the switches disagreed, is said by the new ones.
        assert (back.tag, back.new) == (held.tag, held.new), told
        assert held.matmul in (None, back.matmul) and held.cudnn in (None, back.cudnn), told
        set_float32(precision)
        assert (describe(), read(told), Float32.now().tag) == (*expected, precision), told
        with cudnn.flags(enabled=True):
            read(f"{told} in flags")
        assert (describe(), read(f"{told} flags")) == expected, told
        set_float32(precision)
        assert (describe(), read(f"{told} twice")) == expected, told
        # torch refuses this mix of the user's own, with or without us.
        if not (first[0] is wide and then[:2] == (cudnn, "allow_tf32") and precision != "fp32"):
            act(*then)
            read(f"{told} {then}")
        if new:  # what set_float32 leaves to the user
            wide.fp32_precision = "none"


if __name__ == "__main__":
    warnings.simplefilter("error", UserWarning)
    every_sequence()
