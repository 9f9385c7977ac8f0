"""The knob table: offered values, required uses, costs, flags and checks of records."""

from __future__ import annotations

import dataclasses
import os
import shutil
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from advisor.cache.config import BATCH, Config, Value
from advisor.cache.record import Choice, Part, Winner
from advisor.cache.task import PERMITTED, PRECISIONS, Task
from advisor.tuners import compiling, fp8, knobs
from advisor.tuners.act.advice import Advice
from advisor.tuners.act.compiled import graphs_compiled
from advisor.tuners.knobs import BY_NAME, KNOBS, TORCH, SearchContext
from tests.cache import examples

MODES = ("cudagraphs", "reduce-overhead", "default")
WITH_BLOCKS = ("cudagraphs", "blocks", "reduce-overhead", "default")
FULL_MODES = ("max-autotune-no-cudagraphs", "max-autotune")
STRICT = (*PERMITTED, "fp32")
SHARING = ("file_descriptor", "file_system")
OFF_ON = (False, True)


def on_cuda(**more: Any) -> SearchContext:
    return SearchContext(**{"device": "cuda", "capability": (9, 0), "compiles": True, **more})


def on_cpu(**more: Any) -> SearchContext:
    return SearchContext(**{"device": "cpu", "cpu_bf16": True, "cores": 8, "threads": 4, **more})


OFF, FIXED_ON = (False,), (True,)
SAVING = Config({knobs.OFFLOAD: True})  # the script runs out of memory otherwise


@pytest.mark.parametrize(
    ("name", "context", "values"),
    [
        ("precision", on_cuda(capability=(7, 5), precisions=STRICT), ("default", "fp16", "fp32")),
        # The A100 is the first GPU with TF32 and bf16.
        ("precision", on_cuda(capability=(8, 0)), ("default", "tf32", "bf16", "fp16")),
        ("precision", on_cuda(capability=(8, 9), precisions=PRECISIONS, fp8=True), PRECISIONS),
        ("precision", on_cuda(capability=(8, 6), precisions=PRECISIONS, fp8=True), STRICT),
        ("precision", on_cuda(precisions=PRECISIONS, fp8=True, training=False), STRICT),
        ("precision", on_cuda(precisions=("bf16",)), ("default", "bf16")),
        ("precision", on_cuda(precisions=()), ("default",)),
        ("precision", on_cpu(), ("default", "bf16")),
        ("precision", on_cpu(precisions=("default", "fp16")), ("default",)),
        # The GPU's capability does not count on the CPU.
        ("precision", on_cpu(cpu_bf16=False, capability=(9, 0)), ("default",)),
        ("channels_last", on_cuda(dimensions=3), ()),
        ("channels_last", on_cuda(convolves=False), ()),
        ("cudnn_benchmark", on_cuda(full=True), OFF_ON),
        ("cudnn_benchmark", on_cuda(deterministic=True), OFF),
        ("cudnn_deterministic", on_cuda(), OFF),
        ("cudnn_deterministic", on_cuda(deterministic=True), FIXED_ON),
        (BATCH, on_cuda(batches=(32, 16, 64)), (32, 16, 64)),
        ("fused_optimizer", on_cuda(), OFF_ON),
        ("fused_optimizer", on_cuda(training=False), ()),
        ("fused_optimizer", on_cpu(), OFF_ON),
        ("compile", on_cuda(full=True), ("none", *MODES, *FULL_MODES)),
        ("compile", on_cuda(repeats=True), ("none", *WITH_BLOCKS)),
        ("compile", on_cuda(repeats=True, deterministic=True), ()),
        ("compile", on_cuda(compiles=False), ()),
        ("compile", on_cuda(quick=True), ("none", "cudagraphs")),
        ("compile", on_cpu(quick=True), ()),
        ("compile", on_cuda(repeats=True, sharded=True), ("none", "blocks")),
        ("compile", on_cuda(sharded=True), ()),
        ("compile", on_cuda(repeats=True, own=SAVING), ("none", "blocks", "default")),
        ("compile", on_cuda(quick=True, own=SAVING), ()),
        ("reshard_after_forward", on_cuda(wrapped=("reshard_after_forward",)), (True, False)),
        ("reshard_after_forward", on_cuda(), ()),
        ("dynamic_shapes", on_cuda(varies=True), OFF_ON),
        ("dynamic_shapes", on_cuda(varies=True, compiles=False), ()),
        ("step_graph", on_cuda(), OFF_ON),
        ("step_graph", on_cuda(training=False), ()),
        ("step_graph", on_cpu(), ()),
        ("threads", on_cuda(threads=4, cores=8), ()),
        ("threads", on_cpu(), (4, 8, 2, 1)),
        ("threads", on_cpu(threads_set=True), (4,)),
        ("num_workers", on_cpu(use="pilot", workers=1), (0, 1)),
        ("num_workers", on_cpu(use="pilot", workers=15), (0, 3, 7, 15)),
        ("num_workers", on_cpu(loaded=True, workers=16), (0, 1, 2, 3, 4, 6, 8, 12, 16)),
        ("prefetch_factor", on_cpu(workers=1), (2, 4, 8)),
        ("in_order", on_cpu(loaded=True, workers=5), ()),
        ("in_order", on_cpu(loaded=True, workers=1, any_order=True), ()),
        ("in_order", on_cpu(loaded=True, workers=5, any_order=True), (True, False)),
        ("sharing", on_cpu(loaded=True, workers=5, by_name=True), SHARING),
        ("persistent_workers", on_cpu(use="pilot", workers=1), ()),
        ("persistent_workers", on_cpu(loaded=True, workers=1), OFF_ON),
        ("pin_memory", on_cuda(loaded=True, workers=2), OFF_ON),
    ],
)
def test_values_are_offered(name: str, context: SearchContext, values: tuple[Value, ...]) -> None:
    assert BY_NAME[name].values(context) == values


def test_compile_on_the_cpu_needs_a_cpp_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[str] = []

    def which(name: str) -> str | None:
        looked_up.append(name)
        return f"/bin/{name}" if name != "nothing" else None

    monkeypatch.setattr(shutil, "which", which)
    monkeypatch.delenv("CXX", raising=False)
    assert BY_NAME["compile"].values(on_cpu(compiles=True, full=True)) == ("none", "default")
    repeating = on_cpu(compiles=True, repeats=True)
    assert BY_NAME["compile"].values(repeating) == ("none", "blocks", "default")
    monkeypatch.setenv("CXX", "nothing")
    assert BY_NAME["compile"].values(on_cpu(compiles=True)) == ()
    assert looked_up == ["g++", "g++", "nothing"]


@pytest.mark.parametrize(
    ("use", "compared", "values"),
    [
        ("flags", False, {"precision": ("default", "fp32"), "cudnn_benchmark": (True,)}),
        ("flags", False, {"cudnn_deterministic": (True,), "threads": (2,)}),
        ("flags", False, {"sharing": ("file_system",)}),
        ("flags", True, {"precision": ("tf32",)}),
        ("pilot", False, {"num_workers": (4,), "prefetch_factor": (4,), "pin_memory": (True,)}),
        ("pilot", True, {"precision": ("bf16",), "fused_optimizer": (True,)}),
        ("pilot", True, {"channels_last": (True,)}),
        ("pilot", True, {"compile": (*WITH_BLOCKS, *FULL_MODES), "dynamic_shapes": (True,)}),
        ("loop", False, {BATCH: (32,), "in_order": (False,), "persistent_workers": (True,)}),
        ("loop", True, {"precision": ("fp16", "fp8")}),
        ("capture", True, {"step_graph": (True,)}),
    ],
)
def test_each_value_needs_this_use_and_comparison(
    use: str, compared: bool, values: dict[str, tuple[Value, ...]]
) -> None:
    for config in [Config({name: value}) for name, those in values.items() for value in those]:
        ((name, value),) = config.items()
        needs = BY_NAME[name].needs(value), knobs.needs_comparison(config)
        assert needs == (use, compared), config
        scaled = value in ("fp16", "fp8")
        assert (knobs.adoption_cost(config, Config()) > len(config.knobs)) is scaled


@pytest.mark.parametrize(
    ("given", "config", "permitted"),
    [
        ({}, {"precision": "fp16", "compile": "default", "step_graph": True}, True),
        ({"precisions": ("tf32",)}, {"precision": "bf16"}, False),
        ({"precisions": ("tf32",)}, {"precision": "tf32"}, True),
        ({"precisions": ("tf32",)}, {"precision": "default"}, True),
        ({"precisions": PRECISIONS}, {"precision": "fp8"}, fp8.installed()),
        ({"compile": False}, {"compile": "default"}, False),
        ({"compile": False}, {"compile": "none"}, True),
        ({"step_graph": False}, {"step_graph": True}, False),
        ({"step_graph": False}, {"step_graph": False}, True),
        # One forbidden value forbids the config. A Task does not forbid unknown knobs.
        ({"compile": False}, {"precision": "bf16", "compile": "default"}, False),
        ({"compile": False}, {"a_new_one": True}, True),
    ],
)
def test_task_options_forbid_values(
    given: dict[str, Any], config: dict[str, Value], permitted: bool
) -> None:
    assert knobs.permits(given, Config(config)) is permitted


def test_users_cublas_workspace_is_kept(
    flags_restored: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's deterministic algorithms raise if it is not set."""
    flag = BY_NAME["cudnn_deterministic"].flag
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    for user_value, expected in (("", ":4096:8"), (":16:8", ":16:8")):
        if user_value:
            monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", user_value)
        flag.set(True)
        assert torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == expected


FLAGGED = [
    (knob.name, value)
    for knob in KNOBS
    for value in ((1, 2) if isinstance(knob.domain, range) else knob.domain)
    if knob.flag is not None
]


@pytest.mark.parametrize(("name", "value"), FLAGGED)
@pytest.mark.parametrize("initial", ["torch's defaults", "unusual"])
def test_flags_are_read_and_restored(
    name: str, value: Value, initial: str, flags_restored: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the user's flags match no value of the knob."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if initial == "unusual":
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_float32_matmul_precision("medium")
        torch.backends.cudnn.allow_tf32 = False
        torch.set_num_threads(3)
        torch.backends.cudnn.enabled = False
        torch.backends.cudnn.benchmark = True
    flag = BY_NAME[name].flag
    flags = [knob.flag for knob in KNOBS if knob.flag is not None]
    before = [one.now() for one in flags]
    flag.set(value)
    after = flag.now()
    flag.set(value)
    assert flag.now() == after
    (flag.back or flag.set)(before[flags.index(flag)])
    assert [one.now() for one in flags] == before


def test_channels_last_converts_only_tensors_of_four_or_five_dimensions() -> None:
    flat, deep = nn.Conv2d(1, 3, 3), nn.Conv3d(2, 3, 3)
    row, before = BY_NAME["channels_last"], deep.weight.stride()
    for on in (False, True):
        row.model(nn.Sequential(flat, deep, nn.LazyConv2d(4, 3), nn.Linear(3, 2)), on)
        assert (deep.weight.stride() == before) is not on
    # With one channel, contiguous() would keep the strides.
    laid_out = torch.empty(3, 1, 3, 3).to(memory_format=torch.channels_last)
    assert flat.weight.stride() == laid_out.stride()
    assert deep.weight.is_contiguous(memory_format=torch.channels_last_3d)

    images, clips = torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 4, 4, 4)
    layouts = [row.layout(one, True) for one in (images, clips, images.int(), images[0])]
    assert layouts == [torch.channels_last, torch.channels_last_3d, None, None]
    assert row.layout(images, False) is torch.contiguous_format
    assert row.layout(images[0], False) is None


FIXED_IN = {"2.9.1": True, "2.10.0a0+41361538": False, "2.10.0": False, "2.11.0+cu130": False} | {
    "2.14.1": False, "2.15.0.dev20260801": False, "2.15.0+cu132": True, "3.0.0": True,
    "2.15.0a0+1a2b": False, "2.15.0rc1": False, "2.16.0a0": True, "": True, "of my own": True,
}  # fmt: skip


@pytest.mark.parametrize("version", FIXED_IN)
def test_known_miscompilation_is_avoided(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch._inductor, "list_options", lambda: ["triton.mix_order_reduction"])
    monkeypatch.setattr(torch, "compile", lambda _call, **given: called.append(given))
    for name, value in (("compile", "max-autotune"), ("dynamic_shapes", True)):
        BY_NAME[name].model(nn.Linear(2, 2), value)
    static, dynamic = called
    mode, expected = torch._inductor.list_mode_options("max-autotune"), {"fallback_random": True}
    if not FIXED_IN[version]:
        expected["triton.mix_order_reduction"] = False
    assert static == {"options": mode | expected}
    assert dynamic == {"options": expected, "dynamic": True}


def test_a_model_is_compiled_whole_under_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split into DDP's buckets, it has wrong gradients with CUDA graphs."""
    compile_, backend = torch.compile, Mock(side_effect=lambda graph, _inputs: graph.forward)
    monkeypatch.setattr(torch, "compile", lambda call, **_: compile_(call, backend=backend))
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))  # a bucket each
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        BY_NAME["compile"].model(model, "default")
        nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)(torch.ones(2, 512))
    finally:
        dist.destroy_process_group()
    assert backend.call_count == 1


NEEDS_OPTION = pytest.mark.skipif(torch.__version__ < (2, 10), reason="has no such option")


@NEEDS_OPTION
def test_torch_compile_accepts_every_option(monkeypatch: pytest.MonkeyPatch) -> None:
    row = BY_NAME["compile"]
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    for value in row.domain:
        net = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(4)))
        row.model(net, value)
        assert (net._compiled_call_impl is None) == (value in ("none", "blocks"))
        assert all((one._compiled_call_impl is None) == (value != "blocks") for one in net)
    assert compiling.avoided() == compiling.avoiding("2.11.0") != {}
    monkeypatch.setattr(torch._inductor, "list_options", lambda: ["max_autotune"])
    assert compiling.avoided() == {}


@NEEDS_OPTION
def test_hand_over_avoids_the_miscompilation_process_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    with torch._inductor.config.patch({"triton.mix_order_reduction": True}):
        Advice(Config(), device="cpu").hand_over()
        assert torch._inductor.config.triton.mix_order_reduction
        Advice(Config(compile="default"), device="cpu").hand_over()
        assert not torch._inductor.config.triton.mix_order_reduction


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # raised by Inductor
def test_compiled_norms_with_a_shared_table_have_right_gradients() -> None:
    """The reproducer of https://github.com/pytorch/pytorch/issues/193061, at full size."""

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
    compile_as, grads = BY_NAME["compile"].model, []
    for value in ("none", "default"):
        compile_as(net, value)
        grads += torch.autograd.grad((net(x) * weight).sum(), [net.table])
    assert float((grads[1] - grads[0]).norm() / grads[0].norm()) < 1e-3


def test_models_without_a_forward_of_the_user_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_by_inductor", lambda _mode: {"backend": "eager"})
    layers, before = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), graphs_compiled()
    for net in (layers, torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 2)))):
        BY_NAME["compile"].model(net, "default")
        net(torch.rand(2, 4))
    assert graphs_compiled() == before + 2


def test_plain_config_follows_the_task() -> None:
    task = Task.of("model.py", {"shape": "16x3x8x8"})
    off = ("channels_last", "cudnn_deterministic", "fused_optimizer")
    plain = {BATCH: 16, "precision": "default", **dict.fromkeys(off, False)}
    assert dict(knobs.plain(task, "cpu")) == plain
    fixed = knobs.plain(dataclasses.replace(task, deterministic=True), "cpu")
    assert fixed["cudnn_deterministic"] is True


BASE = Config(TORCH | {BATCH: 64})


def test_described_names_the_changed_values() -> None:
    text = knobs.described(BASE | {"precision": "bf16", "channels_last": True, "in_order": False})
    assert {*text.split(", ")} == {"batches in any order", "channels_last", "bf16"}
    assert knobs.described(TORCH | {"x": False}) == "no x"


def winner(
    config: Config, use: str = "loop", *, free: bool = False, choice: Choice | None = None
) -> dict[str, Any]:
    new = Winner(use=use, free=free, choice=choice or examples.choice(config))
    others = [one for one in examples.record().winners if free or one.use != use]
    return {"winners": (new, *others)}


INVALID, LARGE = examples.DEFAULT.replace(precision="int8"), examples.DEFAULT.at(128)
OLD_KNOB = examples.DEFAULT.replace(gone=1.0)
TWO_BATCHES = dataclasses.replace(examples.choice(), batch=32)
INT8 = "precision 'int8': expected default, tf32, bf16, fp16, fp8, fp32"
UNKNOWN = "knob 'gone' is not known to this version of advisor"
OTHER_BATCH = "its batch is 64, but its choices have another"
BATCHES_DIFFER = "a config has batch 64, its measurement 32"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        (winner(LARGE.replace(precision="bf16"), free=True), ""),
        ({"raced": (examples.choice(LARGE),)}, ""),
        ({"baseline": examples.choice(INVALID)}, INT8),
        (winner(INVALID), INT8),
        ({"raced": (examples.choice(INVALID),)}, INT8),
        ({"input": Config(precision="int8")}, INT8),
        ({"parts": (Part(knob=Config(precision="int8"), ratio=1.1, low=1.0, high=1.2),)}, INT8),
        ({"trials": (examples.trial(0, INVALID),)}, INT8),
        ({"input": Config({"n" * 60: True})}, UNKNOWN.replace("gone", "n" * 40)),
        # An unknown knob is accepted if it has the baseline's value.
        ({"baseline": examples.choice(OLD_KNOB)}, ""),
        ({"baseline": examples.choice(OLD_KNOB)} | winner(OLD_KNOB.replace(precision="bf16")), ""),
        ({"baseline": examples.choice(OLD_KNOB)} | winner(OLD_KNOB.replace(gone=0.5)), UNKNOWN),
        ({"baseline": examples.choice(OLD_KNOB)} | winner(OLD_KNOB.replace(gone=1)), UNKNOWN),
        ({"baseline": examples.choice(OLD_KNOB), "input": Config(gone=1.0)}, UNKNOWN),
        ({"input": Config(precision="p" * 200)}, INT8.replace("int8'", "p" * 59)),
        ({"input": Config(pin_memory=1)}, "pin_memory 1: expected False, True"),
        ({"input": Config(threads=2**12 + 1)}, "threads 4097: expected 1 to 4096"),
        ({"input": Config(threads=True)}, "threads True: expected 1 to 4096"),
        ({"input": Config(num_workers=-1)}, "num_workers -1: expected 0 to 1024"),
        ({"input": Config(batch_size=2.0)}, "batch_size 2.0: expected 1 to 16777216"),
        ({"baseline": TWO_BATCHES}, BATCHES_DIFFER),
        ({"raced": (TWO_BATCHES,)}, BATCHES_DIFFER),
        (winner(examples.DEFAULT, free=True, choice=TWO_BATCHES), BATCHES_DIFFER),
        (winner(LARGE, "flags"), OTHER_BATCH),
        ({"baseline": examples.choice(LARGE)}, OTHER_BATCH),
        (
            winner(examples.DEFAULT.replace(precision="bf16"), "flags"),
            "the winner for use 'flags' has knobs that this use cannot follow",
        ),
    ],
)
def test_unusable_record_is_refused(changes: dict[str, Any], message: str) -> None:
    record = dataclasses.replace(examples.record(trials=2), **changes)
    assert knobs.refusal(record) == message


needs_torchao = pytest.mark.skipif(not fp8.installed(), reason="needs torchao")


class WideNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(2048, 2064), nn.Linear(2064, 8)
        self.attention = nn.MultiheadAttention(2048, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.wide(x))


def test_fp8_gains_only_for_large_linear_layers() -> None:
    layers = [nn.Linear(2048, 2048), nn.Linear(2048, 2064, bias=False)]
    others = [nn.Linear(*sizes) for sizes in ((2048, 2050), (2050, 2048), (4096, 1024))]
    assert all(map(fp8.gains, layers)) and not any(map(fp8.gains, (*others, nn.Conv2d(8, 8, 3))))


@needs_torchao
def test_fp8_keeps_parameters_and_their_names() -> None:
    torch.manual_seed(0)
    model = WideNet()
    names = dict(model.named_parameters())
    x = torch.randn(5, 2048)  # 5: not a multiple of 16
    exact = model(x)
    advice = Advice(Config(precision="fp8"), device="cpu")
    assert advice.prepare(model) is model and fp8.CAVEAT in advice.report()
    assert dict(model.named_parameters()) == names
    large = {name for name, one in model.named_modules() if type(one).__name__ == "Float8Linear"}
    assert large == {"wide"}  # attention uses the weight directly
    fp8_output = model(x)
    assert not torch.equal(fp8_output, exact)
    torch.testing.assert_close(fp8_output, exact, rtol=0.1, atol=0.1)
    fp8_output.sum().backward()
    assert model.wide.weight.grad is not None and bool(model.wide.weight.grad.isfinite().all())


def test_lacking_names_what_fp8_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "installed", lambda: True)
    assert fp8.lacking((8, 9), 3) == ""
    assert "compute capability 8.9" in fp8.lacking((8, 6), 3)
    assert "no linear layer has 2048 features" in fp8.lacking((9, 0), 0)
    monkeypatch.setattr(fp8, "installed", lambda: False)
    assert "pip install 'torch-advisor[torchao]'" in fp8.lacking((9, 0), 3)
