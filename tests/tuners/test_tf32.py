"""The float32 precision flags stay readable and settable through both interfaces of torch."""

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
    """Runs in a fresh process, with warnings as errors from the first call on."""
    from tests import forks  # not importable in that process

    done = forks.run(Path(__file__))
    assert done.returncode == 0, done.stderr
    assert "deprecat" not in done.stderr


def check_every_sequence() -> None:
    import torch

    from advisor.tuners.tf32 import Float32, describe, set_float32

    cudnn: Any = torch.backends.cudnn
    matmul: Any = torch.backends.cuda.matmul
    backends: Any = torch.backends
    new = hasattr(cudnn, "fp32_precision")

    def read(case: str) -> str:
        try:
            old = (matmul.allow_tf32, cudnn.allow_tf32, torch.get_float32_matmul_precision())
        except RuntimeError as error:
            raise AssertionError(case) from error
        shown = describe()
        assert old[0] == ("matmul=tf32" in shown), case
        assert old[1] == ("conv=tf32" in shown) == ("rnn=tf32" in shown), case
        return str(old[2])

    before: list[tuple[Any, str, Any]] = [
        (None, "", None),
        *((torch.set_float32_matmul_precision, "", p) for p in ("medium", "high", "highest")),
        *((matmul, "allow_tf32", on) for on in (True, False)),
        *((cudnn, "allow_tf32", on) for on in (True, False)),
    ]
    after = list(before)
    if new:
        places = (backends, cudnn, cudnn.conv, cudnn.rnn, matmul)
        before += [(p, "fp32_precision", to) for p in places for to in ("tf32", "ieee", "none")]
        cpu: Any = torch.backends.mkldnn
        before += [(cpu.matmul, "fp32_precision", to) for to in ("bf16", "tf32", "ieee")]
        before += [(backends, "fp32_precision", "bf16")]
        after += [(p, "fp32_precision", to) for p in (backends, cudnn) for to in ("tf32", "ieee")]

    def set_flag(place: Any, name: str, value: Any) -> None:
        if name:
            setattr(place, name, value)
        elif place is not None:
            place(value)

    for first, precision, then in product(before, EXPECTED, after):
        case, expected = f"{first} {precision}", EXPECTED[precision]
        set_flag(*first)
        flags = Float32.now()
        set_float32(precision)
        flags.put_back()
        back = Float32.now()
        # torch cannot read the old flags if they disagree; then only the new ones are compared.
        assert (back.tag, back.new) == (flags.tag, flags.new), case
        assert flags.matmul in (None, back.matmul) and flags.cudnn in (None, back.cudnn), case
        set_float32(precision)
        assert (describe(), read(case), Float32.now().tag) == (*expected, precision), case
        with cudnn.flags(enabled=True):
            read(f"{case} in flags")
        assert (describe(), read(f"{case} flags")) == expected, case
        set_float32(precision)
        assert (describe(), read(f"{case} twice")) == expected, case
        # torch itself refuses this combination, also without advisor.
        if not (first[0] is backends and then[:2] == (cudnn, "allow_tf32") and precision != "fp32"):
            set_flag(*then)
            read(f"{case} {then}")
        if new:  # set_float32 does not reset it
            backends.fp32_precision = "none"


if __name__ == "__main__":
    warnings.simplefilter("error", UserWarning)
    check_every_sequence()
