"""The knob table, row by row: what each value is, needs, asks and may follow."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from advisor.cache.config import BATCH, Config, Value
from advisor.cache.record import Part, Record, Winner
from advisor.cache.task import PERMITTED, PRECISIONS, Task
from advisor.tuners import compiling, fp8, knobs
from advisor.tuners.act.advice import Advice
from advisor.tuners.act.applied import AppliedConfig
from advisor.tuners.environment import threads_set
from advisor.tuners.knobs import BY_NAME, KNOBS, TORCH, SearchContext
from tests.cache import examples

MODES = ("cudagraphs", "reduce-overhead", "default")
REPEATING = ("cudagraphs", "blocks", "reduce-overhead", "default")
OF_FULL = ("max-autotune-no-cudagraphs", "max-autotune")
STRICT = (*PERMITTED, "fp32")
"""All of them permitted."""
SHARING = ("file_descriptor", "file_system")
OFF_ON = (False, True)


def on_cuda(**more: Any) -> SearchContext:
    return SearchContext(**{"device": "cuda", "capability": (9, 0), "compiles": True, **more})


def on_cpu(**more: Any) -> SearchContext:
    return SearchContext(**{"device": "cpu", "cpu_bf16": True, "cores": 8, "threads": 4, **more})


SITUATIONS = [
    *(on_cuda(full=full, deterministic=fixed) for full in OFF_ON for fixed in OFF_ON),
    on_cuda(varies=True),
    on_cuda(repeats=True),
    on_cpu(),
    on_cpu(cpu_bf16=False, convolves=False, training=False, dimensions=2),
    on_cuda(use="pilot", workers=15),
    on_cuda(loaded=True, workers=15),
    on_cuda(batches=(32, 64), precisions=PRECISIONS, fp8=True),
    on_cuda(loaded=True, workers=15, any_order=True, by_name=True),
]


def test_the_rows() -> None:
    """The order is that of the guesses, and every name stands once."""
    assert [knob.name for knob in KNOBS] == [
        *("precision", "channels_last", "cudnn_benchmark", "cudnn_deterministic"),
        *("batch_size", "fused_optimizer", "compile", "dynamic_shapes"),
        *("step_graph", "threads", "num_workers", "prefetch_factor", "in_order", "sharing"),
        *("persistent_workers", "pin_memory"),
    ]
    assert list(BY_NAME.values()) == list(KNOBS)


def test_what_torch_does_by_itself() -> None:
    assert dict(TORCH) == {
        "precision": "default",
        "channels_last": False,
        "cudnn_benchmark": False,
        "cudnn_deterministic": False,
        "fused_optimizer": False,
        "compile": "none",
        "dynamic_shapes": False,
        "step_graph": False,
        "in_order": True,
        "sharing": "file_descriptor",
        "persistent_workers": False,
        "pin_memory": False,
    }


@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: knob.name)
def test_every_value_offered_is_in_the_domain_and_torchs_own_is_first(knob: knobs.Knob) -> None:
    offered = [knob.values(here) for here in SITUATIONS]

    assert any(offered)
    for values in filter(None, offered):
        assert all(knob.holds(value) for value in values), values
        assert len(set(values)) == len(values)
    if knob.default is not None:
        assert knob.holds(knob.default)
        plain = [values for here, values in zip(SITUATIONS, offered, strict=True) if values]
        free = [v for v in plain if knob.name != "cudnn_deterministic" or v == (False,)]
        assert all(values[0] == knob.default for values in free)
    if knob.strict is not None:
        assert knob.holds(knob.strict)


@pytest.mark.parametrize(
    ("here", "offered"),
    [
        (on_cuda(capability=(7, 5), precisions=STRICT), ("default", "fp16", "fp32")),
        # An A100 is the first with TF32 and bf16.
        (on_cuda(capability=(8, 0)), ("default", "tf32", "bf16", "fp16")),
        (on_cuda(capability=(8, 0), precisions=STRICT), (*PERMITTED, "fp32")),
        (on_cuda(capability=(8, 9), precisions=PRECISIONS, fp8=True), PRECISIONS),
        (on_cuda(capability=(8, 6), precisions=PRECISIONS, fp8=True), STRICT),
        (on_cuda(precisions=PRECISIONS), STRICT),
        (on_cuda(precisions=PRECISIONS, fp8=True, training=False), STRICT),
        (on_cuda(fp8=True), PERMITTED),
        (on_cuda(capability=(9, 0)), ("default", "tf32", "bf16", "fp16")),
        (on_cuda(precisions=("bf16",)), ("default", "bf16")),
        (on_cuda(precisions=()), ("default",)),
        (on_cpu(), ("default", "bf16")),
        (on_cpu(precisions=("default", "fp16")), ("default",)),
        (on_cpu(cpu_bf16=False), ("default",)),
        # What a GPU could do is nothing to the CPU.
        (on_cpu(cpu_bf16=False, capability=(9, 0)), ("default",)),
    ],
)
def test_precisions(here: SearchContext, offered: tuple[str, ...]) -> None:
    assert BY_NAME["precision"].values(here) == offered


OFF, FIXED_ON = (False,), (True,)


@pytest.mark.parametrize(
    ("name", "here", "offered"),
    [
        ("channels_last", on_cuda(), OFF_ON),
        ("channels_last", on_cuda(dimensions=5), OFF_ON),
        ("channels_last", on_cuda(dimensions=3), ()),
        ("channels_last", on_cuda(dimensions=6), ()),
        ("channels_last", on_cuda(convolves=False), ()),
        ("channels_last", on_cpu(), OFF_ON),
        ("cudnn_benchmark", on_cuda(full=True), OFF_ON),
        ("cudnn_benchmark", on_cuda(), OFF),
        ("cudnn_benchmark", on_cuda(deterministic=True), OFF),
        ("cudnn_benchmark", on_cuda(use="pilot"), OFF),
        ("cudnn_benchmark", on_cuda(convolves=False), ()),
        ("cudnn_benchmark", on_cpu(), ()),
        ("cudnn_deterministic", on_cuda(), OFF),
        ("cudnn_deterministic", on_cuda(deterministic=True), FIXED_ON),
        ("cudnn_deterministic", on_cpu(deterministic=True), FIXED_ON),
        (BATCH, on_cuda(batches=(32, 16, 64)), (32, 16, 64)),
        ("fused_optimizer", on_cuda(), OFF_ON),
        ("fused_optimizer", on_cuda(training=False), ()),
        ("fused_optimizer", on_cpu(), ()),
        ("compile", on_cuda(), ("none", *MODES)),
        ("compile", on_cuda(full=True), ("none", *MODES, *OF_FULL)),
        ("compile", on_cuda(repeats=True), ("none", *REPEATING)),
        ("compile", on_cuda(repeats=True, full=True), ("none", *REPEATING, *OF_FULL)),
        ("compile", on_cuda(repeats=True, deterministic=True), ()),
        ("compile", on_cuda(deterministic=True), ()),
        ("compile", on_cuda(compiles=False), ()),
        ("compile", on_cpu(compiles=False), ()),
        ("compile", on_cuda(quick=True), ("none", "cudagraphs")),
        ("compile", on_cuda(quick=True, compiles=False), ()),
        ("compile", on_cpu(quick=True), ()),
        ("dynamic_shapes", on_cuda(), ()),
        ("dynamic_shapes", on_cuda(varies=True), OFF_ON),
        ("dynamic_shapes", on_cuda(varies=True, compiles=False), ()),
        ("dynamic_shapes", on_cuda(varies=True, quick=True), ()),
        ("step_graph", on_cuda(), OFF_ON),
        ("step_graph", on_cuda(training=False), ()),
        ("step_graph", on_cuda(step_graph=False), ()),
        ("step_graph", on_cpu(), ()),
        ("threads", on_cuda(threads=4, cores=8), ()),
        ("threads", on_cpu(), (4, 8, 2, 1)),
        ("threads", on_cpu(threads=8), (8, 4, 2, 1)),
        ("threads", on_cpu(threads=3), (3, 8, 4, 2, 1)),
        ("threads", on_cpu(cores=1, threads=1), (1,)),
        ("threads", on_cpu(threads_set=True), (4,)),
        ("num_workers", on_cpu(), ()),
        ("num_workers", on_cpu(use="pilot"), ()),
        ("num_workers", on_cpu(use="pilot", workers=1), (0, 1)),
        ("num_workers", on_cpu(use="pilot", workers=15), (0, 3, 7, 15)),
        ("num_workers", on_cpu(loaded=True), (0,)),
        ("num_workers", on_cpu(loaded=True, workers=5), (0, 1, 2, 3, 4, 5)),
        ("num_workers", on_cpu(loaded=True, workers=16), (0, 1, 2, 3, 4, 6, 8, 12, 16)),
        ("prefetch_factor", on_cpu(), ()),
        ("prefetch_factor", on_cpu(workers=1), (2, 4, 8)),
        ("in_order", on_cpu(loaded=True, workers=5), ()),
        ("in_order", on_cpu(loaded=True, workers=1, any_order=True), ()),
        ("in_order", on_cpu(loaded=True, workers=5, any_order=True), (True, False)),
        ("sharing", on_cpu(loaded=True, workers=5), ()),
        ("sharing", on_cpu(loaded=True, workers=5, by_name=True), SHARING),
        ("persistent_workers", on_cpu(), ()),
        ("persistent_workers", on_cpu(use="pilot", workers=1), ()),
        ("persistent_workers", on_cpu(loaded=True, workers=1), OFF_ON),
        ("pin_memory", on_cuda(), ()),
        ("pin_memory", on_cuda(loaded=True, workers=2), OFF_ON),
        ("pin_memory", on_cuda(use="pilot"), ()),
        ("pin_memory", on_cuda(use="pilot", workers=1), OFF_ON),
        ("pin_memory", on_cpu(), ()),
    ],
)
def test_what_is_offered(name: str, here: SearchContext, offered: tuple[Value, ...]) -> None:
    assert BY_NAME[name].values(here) == offered


def test_compiling_on_the_cpu_takes_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def which(name: str) -> str | None:
        asked.append(name)
        return f"/bin/{name}" if name != "nothing" else None

    monkeypatch.setattr(shutil, "which", which)
    monkeypatch.delenv("CXX", raising=False)
    assert BY_NAME["compile"].values(on_cpu(compiles=True, full=True)) == ("none", "default")
    here = on_cpu(compiles=True, repeats=True)
    assert BY_NAME["compile"].values(here) == ("none", "blocks", "default")
    monkeypatch.setenv("CXX", "nothing")
    assert BY_NAME["compile"].values(on_cpu(compiles=True)) == ()
    assert asked == ["g++", "g++", "nothing"]


# By knob and value: the use that can follow it, whether it is compared with fp32, and heavy.
FOLLOWING = {
    ("precision", "default"): ("flags", False, False),
    ("precision", "tf32"): ("flags", True, False),
    ("precision", "fp32"): ("flags", False, False),
    ("precision", "bf16"): ("pilot", True, False),
    ("precision", "fp16"): ("loop", True, True),
    ("precision", "fp8"): ("loop", True, True),
    ("channels_last", True): ("pilot", False, False),
    ("cudnn_benchmark", True): ("flags", False, False),
    ("cudnn_deterministic", True): ("flags", False, False),
    (BATCH, 32): ("loop", False, False),
    ("fused_optimizer", True): ("pilot", True, False),
    **{("compile", mode): ("pilot", True, False) for mode in (*MODES, *OF_FULL)},
    ("dynamic_shapes", True): ("pilot", True, False),
    ("step_graph", True): ("capture", True, False),
    ("threads", 2): ("flags", False, False),
    ("num_workers", 4): ("pilot", False, False),
    ("prefetch_factor", 4): ("pilot", False, False),
    ("in_order", False): ("loop", False, False),
    ("sharing", "file_system"): ("flags", False, False),
    ("persistent_workers", True): ("loop", False, False),
    ("pin_memory", True): ("pilot", False, False),
}


@pytest.mark.parametrize(("name", "value"), FOLLOWING)
def test_what_a_value_needs(name: str, value: Value) -> None:
    config = Config({name: value})
    heavy = knobs.adoption_cost(config, Config()) > len(config.knobs)
    assert (BY_NAME[name].needs(value), knobs.needs_comparison(config), heavy) == FOLLOWING[
        name, value
    ]


def test_what_holds_of_a_row() -> None:
    """Those not named here are the other way."""

    def names(holds: Callable[[knobs.Knob], object]) -> set[str]:
        return {knob.name for knob in KNOBS if holds(knob)}

    paying = {"cudnn_benchmark", "compile", "dynamic_shapes", "threads"}
    assert set(knobs.FIRST_STEP_COSTS) == paying
    assert names(lambda knob: knob.compile_s) == {"compile"}
    assert names(lambda knob: knob.needs_fresh_process) == {"cudnn_benchmark"}
    assert set(TORCH) - set(knobs.code(TORCH)) == {
        *("cudnn_benchmark", "fused_optimizer", "step_graph", "pin_memory")
    }
    assert names(lambda knob: knob.transferable) == {
        *("precision", "channels_last", "cudnn_deterministic"),
        *("fused_optimizer", "pin_memory"),
    }
    loading = {"num_workers", "prefetch_factor", "persistent_workers", "pin_memory"}
    loading |= {"in_order", "sharing"}
    assert names(lambda knob: knob.stage == "input") == loading
    assert names(lambda knob: knob.stage == "compute") == set(BY_NAME) - loading
    assert names(lambda knob: knob.guess == "leader") == {"cudnn_benchmark", "fused_optimizer"}
    assert names(lambda knob: knob.guess == "") == {
        *(BATCH, "compile", "dynamic_shapes"),
        *("num_workers", "prefetch_factor", "persistent_workers", "in_order", "sharing"),
        "cudnn_deterministic",
    }
    assert names(lambda knob: knob.by_rule) == {"persistent_workers", "sharing"}
    assert (
        names(lambda knob: knob.input_pipeline)
        == set(knobs.INPUT_PIPELINE)
        == {*("num_workers", "prefetch_factor", "pin_memory")}
    )
    assert names(lambda knob: knob.mapped) == {BATCH, "num_workers"}
    assert names(lambda knob: knob.strict is not None) == {"precision", "cudnn_benchmark"}
    assert names(lambda knob: knob.layout) == {"channels_last"}
    assert names(lambda knob: knob.chosen) == {"threads"}
    assert BY_NAME["threads"].chosen is threads_set


def test_what_does_not_go_together() -> None:
    set_apart = tuple(mode for mode in (*REPEATING, *OF_FULL) if mode != "default")
    assert {knob.name: dict(knob.conflicts) for knob in KNOBS if knob.conflicts} == {
        "fused_optimizer": {"precision": ("fp16",)},
        "dynamic_shapes": {"compile": ("none", *set_apart)},
        "step_graph": {
            "compile": ("cudagraphs", "reduce-overhead", "max-autotune"),
            "fused_optimizer": (True,),
        },
        "prefetch_factor": {"num_workers": (0,)},
        "persistent_workers": {"num_workers": (0,)},
        "in_order": {"num_workers": (0, 1)},
        "sharing": {"num_workers": (0,)},
        "pin_memory": {"num_workers": (0,)},
    }


@pytest.mark.parametrize(
    ("given", "config", "permitted"),
    [
        ({}, {"precision": "fp16", "compile": "default", "step_graph": True}, True),
        ({"precisions": ("tf32",)}, {"precision": "bf16"}, False),
        ({"precisions": ("tf32",)}, {"precision": "tf32"}, True),
        ({"precisions": ("tf32",)}, {"precision": "default"}, True),
        ({"precisions": PERMITTED}, {"precision": "fp8"}, False),
        ({"precisions": PRECISIONS}, {"precision": "fp8"}, fp8.installed()),
        ({"compile": False}, {"compile": "default"}, False),
        ({"compile": False}, {"compile": "none"}, True),
        ({"compile": True}, {"compile": "default"}, True),
        ({"step_graph": False}, {"step_graph": True}, False),
        ({"step_graph": False}, {"step_graph": False}, True),
        ({"step_graph": True}, {"step_graph": True}, True),
        # One that is not permitted is enough; what is not known here is not for a Task to permit.
        ({"compile": False}, {"precision": "bf16", "compile": "default"}, False),
        ({"compile": False}, {"a_new_one": True}, True),
    ],
)
def test_what_is_permitted(
    given: dict[str, Any], config: dict[str, Value], permitted: bool
) -> None:
    assert knobs.permits(given, Config(config)) is permitted


def test_fp8_is_for_who_has_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    for there in OFF_ON:
        monkeypatch.setattr(fp8, "installed", lambda there=there: there)
        assert knobs.permits({}, Config(precision="fp8")) is there
        assert knobs.permits({}, Config(precision="bf16"))


def test_what_a_value_gives_to_the_script() -> None:
    def acting(**config: Value) -> AppliedConfig:
        given = Config(config)
        return AppliedConfig(given, given.replace(**dict.fromkeys(given)), torch.device("cpu"))

    assert BY_NAME["pin_memory"].non_blocking == (True,)
    for pinned in OFF_ON:
        assert acting(pin_memory=pinned, precision="bf16").loader() == {"pin_memory": pinned}
    assert acting(**{BATCH: 48}, in_order=False).loader() == {"batch_size": 48, "in_order": False}
    for name in ("fused_optimizer", "step_graph"):
        assert acting(**{name: True}).optimizer() == {"fused": True}
        assert acting(**{name: False}).optimizer() == {}
    assert BY_NAME["step_graph"].captured == (True,)
    assert {*BY_NAME["compile"].graphs} == {"cudagraphs", "reduce-overhead", "max-autotune"}


@pytest.mark.parametrize(
    ("value", "dtype", "scaled"),
    [
        ("default", None, False),
        ("tf32", None, False),
        ("fp32", None, False),
        ("bf16", "bfloat16", False),
        ("fp16", "float16", True),
    ],
)
def test_what_a_precision_casts_to(value: str, dtype: str | None, scaled: bool) -> None:
    row = BY_NAME["precision"]
    assert row.autocast.get(value) == dtype
    assert (value in row.scaled) is scaled


@pytest.fixture
def flags_restored() -> Iterator[None]:
    backend = torch.backends.cudnn
    held = backend.benchmark, backend.deterministic, backend.enabled
    threads = torch.get_num_threads()
    yield
    backend.benchmark, backend.deterministic, backend.enabled = held
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def _set(name: str, value: Value) -> None:
    flag = BY_NAME[name].flag
    assert flag is not None
    flag.set(value)


def test_flags_set_the_process_and_set_it_back(
    flags_restored: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    backend = torch.backends.cudnn
    for value in (True, False):
        _set("cudnn_benchmark", value)
        assert backend.benchmark is value

    _set("cudnn_deterministic", False)
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    _set("cudnn_deterministic", True)
    assert backend.deterministic and torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    _set("cudnn_deterministic", False)
    assert not backend.deterministic and not torch.are_deterministic_algorithms_enabled()

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    _set("cudnn_deterministic", True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"

    _set("threads", 2)
    assert torch.get_num_threads() == 2
    _set("threads", None)
    assert torch.get_num_threads() == 1


FLAGGED = [
    (knob.name, value)
    for knob in KNOBS
    for value in ((1, 2) if isinstance(knob.domain, range) else knob.domain)
    if knob.flag is not None
]


@pytest.mark.parametrize(("name", "value"), FLAGGED)
@pytest.mark.parametrize("other", ["as torch has it", "as nobody would"])
def test_a_flag_is_read_and_set_back(
    name: str, value: Value, other: str, flags_restored: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what no value of the knob comes to, as the user's own mix of switches."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    held = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    if other == "as nobody would":
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_float32_matmul_precision("medium")
        torch.backends.cudnn.allow_tf32 = False
        torch.set_num_threads(3)
        torch.backends.cudnn.enabled = False
        torch.backends.cudnn.benchmark = True
    flag = BY_NAME[name].flag
    assert flag is not None
    every = [knob.flag for knob in KNOBS if knob.flag is not None]
    before = [one.now() for one in every]
    flag.set(value)
    left = flag.now()
    flag.set(value)
    assert flag.now() == left
    (flag.back or flag.set)(before[every.index(flag)])
    assert [one.now() for one in every] == before
    torch.set_float32_matmul_precision(held[0])
    torch.backends.cudnn.allow_tf32 = held[1]


@pytest.mark.parametrize("name", sorted({name for name, _value in FLAGGED}))
def test_what_is_read_of_a_flag_tells_its_values_apart(name: str, flags_restored: None) -> None:
    flag = BY_NAME[name].flag
    assert flag is not None
    before, found = flag.now(), {}
    for _name, value in (one for one in FLAGGED if one[0] == name):
        flag.set(value)
        found[value] = flag.now()
    (flag.back or flag.set)(before)
    # bf16 and fp16 run over TF32: what differs is the autocast.
    distinct = {"precision": 3}.get(name, len(found))
    assert len(set(found.values())) == distinct


@pytest.mark.parametrize(
    ("value", "setting"),
    [("default", "default"), ("fp32", "fp32"), *((v, "tf32") for v in ("tf32", "bf16", "fp16"))],
)
def test_autocast_runs_over_tf32(value: str, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    monkeypatch.setattr(knobs, "set_float32", found.append)
    _set("precision", value)
    assert found == [setting]


def test_only_what_has_four_or_five_dimensions_is_laid_out() -> None:
    flat, deep = nn.Conv2d(1, 3, 3), nn.Conv3d(2, 3, 3)
    net = nn.Sequential(flat, deep, nn.LazyConv2d(4, 3), nn.Linear(3, 2))
    row = BY_NAME["channels_last"]
    assert row.model is not None and row.layout is not None

    before = deep.weight.stride()
    row.model(net, False)
    assert deep.weight.stride() == before
    row.model(net, True)
    # Of one channel contiguous() would leave the strides as they are.
    assert (
        flat.weight.stride()
        == torch.empty(3, 1, 3, 3).to(memory_format=torch.channels_last).stride()
    )
    assert deep.weight.is_contiguous(memory_format=torch.channels_last_3d)

    images, clips = torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 4, 4, 4)
    assert row.layout(images, True) is torch.channels_last
    assert row.layout(clips, True) is torch.channels_last_3d
    assert row.layout(images, False) is None
    assert row.layout(images.int(), True) is None
    assert row.layout(images[0], True) is None


MENDED = {"2.9.1": True, "2.10.0a0+41361538": False, "2.10.0": False, "2.11.0+cu130": False} | {
    "2.14.1": False, "2.15.0.dev20260801": False, "2.15.0+cu132": True, "3.0.0": True,
    "2.15.0a0+1a2b": False, "2.15.0rc1": False, "2.16.0a0": True, "": True, "of my own": True,
}  # fmt: skip
"""Whether mixed orders of reduction are right in a build of torch."""


@pytest.mark.parametrize("version", MENDED)
def test_what_is_known_to_be_wrong_is_not_compiled(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(nn.Module, "compile", lambda _self, **given: called.append(given))
    for name, value in (("compile", "max-autotune"), ("dynamic_shapes", True)):
        row = BY_NAME[name].model
        assert row is not None
        row(nn.Linear(2, 2), value)
    static, dynamic = called
    right = {"triton.mix_order_reduction": False}
    assert dynamic.pop("dynamic") is True
    if MENDED[version]:
        assert static == {"mode": "max-autotune"} and dynamic == {"mode": "default"}
    else:
        own = torch._inductor.list_mode_options("max-autotune")
        assert static == {"options": own | right} and dynamic == {"options": right}


def test_torch_compile_knows_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises at once of one that it does not know; what it does not know is left out."""
    row = BY_NAME["compile"]
    assert row.model is not None
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    for value in row.domain:
        assert isinstance(value, str)
        net = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(4)))
        row.model(net, value)
        assert (net._compiled_call_impl is None) == (value in ("none", "blocks"))
        assert all((one._compiled_call_impl is None) == (value != "blocks") for one in net)
    assert compiling.avoided() == compiling.avoiding("2.11.0") != {}
    monkeypatch.setattr(torch._inductor, "list_options", lambda: ["max_autotune"])
    assert compiling.avoided() == {}


def test_where_a_framework_compiles_the_process_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    with torch._inductor.config.patch({"triton.mix_order_reduction": True}):
        Advice(Config(), device="cpu").hand_over()
        assert torch._inductor.config.triton.mix_order_reduction
        Advice(Config(compile="default"), device="cpu").hand_over()
        assert not torch._inductor.config.triton.mix_order_reduction


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # inductor's own
def test_gradients_of_norms_with_a_shared_table() -> None:
    """As in https://github.com/pytorch/pytorch/issues/193061, at its size."""

    class Modulated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(1, 4, 1024) / 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shift, scale, moved, factor = self.table.chunk(4, dim=1)
            x = torch.layer_norm(x, (1024,)) * (1 + scale) + shift
            return torch.layer_norm(x, (1024,)) * (1 + factor) + moved

    torch.manual_seed(0)
    net = Modulated().cuda()
    x, weight = (torch.randn(1, 2**15, 1024, device="cuda") for _ in range(2))
    row = BY_NAME["compile"].model
    assert row is not None
    found = []
    for value in ("none", "default"):
        net.table.grad = None
        row(net, value)
        (net(x) * weight).sum().backward()
        assert net.table.grad is not None
        found.append(net.table.grad)
    assert float((found[1] - found[0]).norm() / found[0].norm()) < 1e-3


def test_compiling_is_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "__version__", "2.15.0")
    monkeypatch.setattr(nn.Module, "compile", lambda _self, **given: called.append(given))
    net, row = nn.Linear(2, 2), BY_NAME["compile"]
    assert row.model is not None

    for value in ("none", "cudagraphs", "reduce-overhead"):
        row.model(net, value)
    assert called == [{"backend": "cudagraphs"}, {"mode": "reduce-overhead"}]


@pytest.mark.parametrize(
    ("name", "held", "refused"),
    [
        ("channels_last", [False, True], [0, 1, None, "True"]),
        ("compile", ["none", "default"], ["c", "", None]),
        ("threads", [1, 2**12], [0, 2**12 + 1, -1, True, 2.0, "2"]),
        ("num_workers", [0, 2**10], [-1, 2**10 + 1]),
        (BATCH, [1, 2**24], [0, 2**24 + 1]),
    ],
)
def test_domains(name: str, held: list[Value], refused: list[Value]) -> None:
    assert all(map(BY_NAME[name].holds, held))
    assert not any(map(BY_NAME[name].holds, refused))


FIRST = (*knobs.RECIPE, *knobs.COMPILED, *knobs.CAPTURED, *knobs.GRAPHS, *knobs.FORMATS_TRIED)


@pytest.mark.parametrize("changes", FIRST)
def test_what_is_tried_first_can_be_run(changes: dict[str, Value]) -> None:
    here = on_cuda(varies=True, precisions=PRECISIONS, fp8=True, batches=(32, 64))
    for name, value in changes.items():
        assert value in (*BY_NAME[name].values(here), knobs.BLOCKS)
        if value != BY_NAME[name].default:
            for other, values in BY_NAME[name].conflicts.items():
                assert changes.get(other) not in values


def test_what_torch_does_for_a_task() -> None:
    task = Task.of("model.py", {"shape": "16x3x8x8"})
    held = {name: TORCH[name] for name in TORCH}
    gpu = knobs.plain(task, "cuda:1")
    compiling = ("compile", "dynamic_shapes")
    loading = ("in_order", "sharing", "persistent_workers", "pin_memory")
    assert gpu == Config({**held, BATCH: 16}).without(*compiling, *loading)
    cpu = knobs.plain(task, "cpu")
    assert dict(cpu) == {
        BATCH: 16,
        "channels_last": False,
        "cudnn_deterministic": False,
        "precision": "default",
    }
    fixed = knobs.plain(dataclasses.replace(task, deterministic=True), "cpu")
    assert fixed["cudnn_deterministic"] is True


BASE = Config(TORCH | {BATCH: 64})


@pytest.mark.parametrize(
    ("changes", "use"),
    [
        ({}, "flags"),
        ({BATCH: 128}, "flags"),
        ({"precision": "tf32", "cudnn_benchmark": True}, "flags"),
        ({"precision": "bf16"}, "pilot"),
        ({"precision": "bf16", "cudnn_benchmark": True}, "pilot"),
        ({"precision": "fp16", "channels_last": True}, "loop"),
        ({"step_graph": True, "precision": "tf32"}, "capture"),
    ],
)
def test_the_least_use(changes: dict[str, Value], use: str) -> None:
    default = BASE | {"a_new_one": False}
    config = default | changes
    assert knobs.use_of(config, default) == use
    uses = ("flags", "pilot", "loop", "capture")
    follow = [one for one in uses if knobs.follows(one, config, default)]
    assert follow == list(uses[uses.index(use) :])


@pytest.mark.parametrize(
    ("config", "doubts"),
    [
        ({}, False),
        (dict(TORCH), False),
        ({"precision": "tf32", "channels_last": True}, True),
        ({"fused_optimizer": True}, True),
        ({"precision": "bf16"}, True),
        ({"precision": "fp16"}, True),
        ({"compile": "none"}, False),
        ({"compile": "default"}, True),
        ({"step_graph": False}, False),
        ({"step_graph": True}, True),
        ({"a_new_one": True, "precision": "default"}, False),
        ({"a_new_one": True, "precision": "bf16"}, True),
    ],
)
def test_doubtful(config: dict[str, Value], doubts: bool) -> None:
    assert knobs.needs_comparison(Config(config)) is doubts


def test_the_reference_is_strict() -> None:
    searching = BASE.replace(cudnn_benchmark=True)
    assert knobs.strict(searching) == knobs.strict(BASE) == BASE.replace(precision="fp32")
    assert knobs.strict(Config(channels_last=False)) == Config(channels_last=False)


def test_burden() -> None:
    default = BASE | {"a_new_one": False}
    assert knobs.adoption_cost(default, default) == 0
    assert knobs.adoption_cost(default | {"precision": "bf16", "channels_last": True}, default) == 2
    assert knobs.adoption_cost(default | {"precision": "fp16"}, default) == 2
    assert knobs.adoption_cost(default | {"a_new_one": True, "precision": "fp16"}, default) == 3


def test_described() -> None:
    assert knobs.described(Config(TORCH)) == "torch default"
    assert knobs.described(BASE | {"precision": "bf16", "channels_last": True}) == (
        "channels_last, bf16"
    )
    assert knobs.described(TORCH | {"in_order": False, "x": False}) == (
        "batches in any order, no x"
    )
    assert knobs.described(TORCH | {"compile": "default"}) == "compile=default"
    base = Config(threads=1, a_new_one=1)
    assert knobs.described(Config(threads=4, a_new_one=2), base) == "a_new_one=2, threads=4"


def _sound() -> Record:
    """A record whose winner for flags is torch's default and for the rest a pilot's."""
    return examples.record(trials=2)


def _winner(record: Record, use: str, config: Config, *, free: bool = False) -> Record:
    winners = [one for one in record.winners if (one.use, one.free) != (use, free)]
    made = Winner(use=use, free=free, choice=examples.choice(config))
    return dataclasses.replace(record, winners=(*winners, made))


def test_a_sound_record_is_not_refused() -> None:
    record = _sound()
    assert knobs.refusal(record) == ""
    other = examples.DEFAULT.replace(batch_size=128, precision="bf16")
    assert knobs.refusal(_winner(record, "loop", other, free=True)) == ""
    assert knobs.refusal(dataclasses.replace(record, raced=(examples.choice(other),))) == ""


def _replaced(record: Record, field: str) -> Record:
    """One whose `field` holds a precision that there is not."""
    odd = examples.DEFAULT.replace(precision="int8")
    match field:
        case "baseline":
            return dataclasses.replace(record, baseline=examples.choice(odd))
        case "winner":
            return _winner(record, "loop", odd)
        case "raced":
            return dataclasses.replace(record, raced=(examples.choice(odd),))
        case "input":
            return dataclasses.replace(record, input=Config(precision="int8"))
        case "parts":
            part = Part(knob=Config(precision="int8"), ratio=1.1, low=1.0, high=1.2)
            return dataclasses.replace(record, parts=(part,))
        case _:
            return dataclasses.replace(record, trials=(examples.trial(0, odd),))


@pytest.mark.parametrize("field", ["baseline", "winner", "raced", "input", "parts", "trials"])
def test_a_value_out_of_its_domain_is_refused_wherever_it_stands(field: str) -> None:
    said = knobs.refusal(_replaced(_sound(), field))
    assert said == "precision 'int8': expected default, tf32, bf16, fp16, fp8, fp32"


def test_a_knob_that_is_not_known_is_refused() -> None:
    record = dataclasses.replace(_sound(), input=Config({"n" * 60: True}))
    assert knobs.refusal(record) == (f"knob '{'n' * 40}' is not known to this version of advisor")


def test_an_unknown_knob_does_not_matter_where_it_is_as_in_the_baseline() -> None:
    known = examples.DEFAULT.replace(gone=1.0)
    record = dataclasses.replace(_sound(), baseline=examples.choice(known))
    assert knobs.refusal(record) == ""
    assert knobs.refusal(_winner(record, "pilot", known.replace(precision="bf16"))) == ""
    told = "knob 'gone' is not known to this version of advisor"
    assert knobs.refusal(_winner(record, "pilot", known.replace(gone=0.5))) == told
    assert knobs.refusal(_winner(record, "pilot", known.replace(gone=1))) == told
    trials = (examples.trial(0, known.replace(gone=0.5)),)
    assert knobs.refusal(dataclasses.replace(record, trials=trials)) == told
    assert knobs.refusal(dataclasses.replace(record, input=Config(gone=1.0))) == told


def test_a_refused_value_is_said_shortly() -> None:
    record = dataclasses.replace(_sound(), input=Config(precision="p" * 200))
    assert knobs.refusal(record) == (
        f"precision '{'p' * 59}: expected default, tf32, bf16, fp16, fp8, fp32"
    )
    assert knobs.refusal(dataclasses.replace(_sound(), input=Config(pin_memory=1))) == (
        "pin_memory 1: expected False, True"
    )


@pytest.mark.parametrize("where", ["baseline", "winner", "raced"])
def test_a_choice_of_two_batches_is_refused(where: str) -> None:
    record = _sound()
    odd = dataclasses.replace(record.baseline, batch=32)
    if where == "baseline":
        record = dataclasses.replace(record, baseline=odd)
    elif where == "raced":
        record = dataclasses.replace(record, raced=(odd,))
    else:
        winners = (Winner(use="flags", free=False, choice=odd), *record.winners[1:])
        record = dataclasses.replace(record, winners=winners)
    assert knobs.refusal(record) == "batch 64 in a config, 32 of its measurement"


def test_a_fixed_choice_of_another_batch_is_refused() -> None:
    other = examples.DEFAULT.at(32)
    said = "batch 64, and its choices are of another"
    assert knobs.refusal(_winner(_sound(), "flags", other)) == said
    assert knobs.refusal(dataclasses.replace(_sound(), baseline=examples.choice(other))) == said


def test_a_winner_that_needs_more_than_its_use_is_refused() -> None:
    record = _winner(_sound(), "flags", examples.DEFAULT.replace(precision="bf16"))
    assert knobs.refusal(record) == "the winner for flags needs more than that"


def test_what_compiles_the_same_code_is_built_once() -> None:
    eager = Config(precision="bf16", compile="none", step_graph=False, num_workers=0, batch_size=8)
    compiled = eager.replace(compile="default")
    assert not knobs.compiles(eager) and knobs.compiles(compiled)
    assert not knobs.compiles(eager.replace(compile="cudagraphs"))
    same = compiled.replace(step_graph=True, cudnn_benchmark=True, num_workers=4)
    assert knobs.code(compiled) == knobs.code(same)
    for other in ({"precision": "fp16"}, {"compile": "reduce-overhead"}, {BATCH: 16}):
        assert knobs.code(compiled) != knobs.code(compiled.replace(**other))
