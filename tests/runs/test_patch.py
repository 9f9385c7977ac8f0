"""Tests `advisor patch`: what the patched script trains, and where the edits go."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import advisor as api
from advisor.cache.config import Config
from advisor.cache.record import Record
from advisor.frameworks.patching import ScriptPatch
from advisor.open_store import open_records
from advisor.tuners.act.process_flags import PROCESS_FLAGS
from advisor.tuners.knobs import TORCH
from tests.cache import examples
from tests.face.commands import advisor
from tests.runs.test_apply import facts_of, record_of

SCRIPT = """
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


def train(net, batches, optimizer, losses):
    net.train()
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


def evaluate(net, batches):
    net.eval()
    with torch.no_grad():
        return [net(x).dtype for x, _y in batches]


torch.manual_seed(0)
data = TensorDataset(torch.randn(72, 3, 8, 8), torch.randint(4, (72,)))
loader = DataLoader(data, batch_size=16, shuffle=True)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 4)
)
model = model.to("cpu")
# The weights stay for some epochs: `advisor run` begins with unmodified steps.
optimizer = optim.SGD(model.parameters(), lr=0.0)
losses, dtypes = [], []
for epoch in range(12):
    if epoch == 6:
        losses.clear()
        for group in optimizer.param_groups:
            group["lr"] = 0.5
    train(model, loader, optimizer, losses)
    dtypes += evaluate(model, loader)
"""


def recorded(config: dict[str, Any], optimizer: str = "sgd", **of_task: Any) -> Record:
    """A record for `advisor run`, of a GPU, that advises these values."""
    base = Config(TORCH).at(64)
    task = replace(examples.TASK, command=("python", "train.py"), optimizer=optimizer, **of_task)
    won, own = examples.choice(base.replace(**config), 3000.0, 1.5), examples.choice(base)
    made = examples.record(replace(examples.KEY, task=task), input=Config())
    return replace(made, baseline=own, winners=examples.winners(own, won, pilot=won))


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    api.release()
    PROCESS_FLAGS.release()


def applied(diff: str) -> str:
    """The script after git has applied the diff to it."""
    subprocess.run(["git", "apply"], input=diff.encode(), check=True)
    return Path("train.py").read_bytes().decode()


def patched(source: str, config: dict[str, Any], **of_task: Any) -> tuple[str, list[str]]:
    """(The patched script, the edits that are left)."""
    Path("train.py").write_bytes(source.encode())
    made = ScriptPatch(recorded(config, **of_task), Path("train.py"))
    return applied(made.diff) if made.diff else source, made.left


@pytest.mark.parametrize(
    "config",
    [
        {"precision": "bf16"},
        {"channels_last": True, "fused_optimizer": True},
        {"precision": "bf16", "channels_last": True, "fused_optimizer": True, "num_workers": 1},
        pytest.param({"precision": "bf16", "compile": "default"}, marks=pytest.mark.long),
    ],
    ids=lambda config: "+".join(config),
)
def test_the_patched_script_trains_as_advisor_run(config: dict[str, Any]) -> None:
    """All losses are equal in every bit, and evaluation stays in float32."""
    Path("train.py").write_text(SCRIPT)
    plain = dict[str, Any]()
    seen = facts_of(lambda: plain.update(runpy.run_path("train.py")))
    open_records(None).put(record := record_of(seen, Config(config)))
    advice = api.apply()
    advised = runpy.run_path("train.py")
    assert advice.status == "exact"
    api.release()
    done = advisor(Path.cwd(), "patch", record.id)
    assert (done.returncode, done.stderr) == (0, "")
    source = applied(done.stdout)
    assert "import advisor" not in source
    alone = runpy.run_path("train.py")
    assert len(alone["losses"]) == 30 and alone["losses"] == advised["losses"]
    assert "precision" not in config or alone["losses"] != plain["losses"]
    assert set(alone["dtypes"]) == {torch.float32}


@pytest.mark.parametrize(
    ("config", "how"),
    [
        ({"compile": "default"}, {"mode": "default", "dynamic": False}),
        ({"compile": "cudagraphs"}, {"backend": "cudagraphs", "dynamic": False}),
        ({"compile": "default", "dynamic_shapes": True}, {"mode": "default", "dynamic": True}),
    ],
    ids=["default", "cudagraphs", "dynamic"],
)
def test_only_training_at_frequent_sizes_is_compiled(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], how: dict[str, Any]
) -> None:
    """An epoch has six batches of 16 and a short one; a second model has code of its own."""
    left = patched(SCRIPT.replace("(72,", "(100,").replace("4, (72", "4, (100"), config)[1]
    sizes, given = list[int](), dict[str, Any]()

    def compiled(model: Any, **how: Any) -> Any:
        given.update(how)
        return lambda x: sizes.append(len(x)) or model(x)

    monkeypatch.setattr(torch, "compile", compiled)
    ran = runpy.run_path("train.py")
    assert left == [] and given == how
    first = not how["dynamic"]  # its size is not yet frequent
    assert Counter(sizes) == Counter({16: 72 - first} | ({} if first else {4: 12}))
    assert set(ran["dtypes"]) == {torch.float32}
    other = torch.nn.Linear(3, 2)
    for _ in range(3):
        ran["advised_call"](other, torch.ones(5, 3))
    assert sizes[-2:] == [5, 5]


def test_gradients_of_a_cuda_graph_are_copied_before_the_next_replay() -> None:
    """Only where they accumulate: the record says how many calls make a step."""
    config = {"compile": "reduce-overhead"}
    for others, source in (("2 micro-batches", SCRIPT), ("", SCRIPT + "# set_to_none=False\n")):
        assert "weight.grad.clone()" in patched(source, config, others=others)[0]
    assert "weight.grad" not in patched(SCRIPT, config)[0]


PLAIN = {"precision": "bf16", "channels_last": True, "fused_optimizer": True, "num_workers": 4}
IN_A_CLASS = """
import torch
from torch.optim import SGD
from torch.utils import data


class Trainer:
    def __init__(self, model, batches):
        self.model = model
        self.batches = batches

    def fit(self, optimizer):
        self.model.train()
        bar = iter(self.batches)
        for x in bar:
            self.model(
                x,
            ).sum().backward()
            optimizer.step()


def main():
    net = build().cuda()
    rows = data.DataLoader(
        range(3),
        shuffle=True,  # every epoch
    )
    Trainer(batches=rows, model=net).fit(SGD(net.parameters(), lr=(0.1)))
    other = data.DataLoader(range(3))
"""
BARE = """
import torch
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x = torch.ones(1)
loss = model(x)
loss.backward()
optimizer.step()
"""


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        (
            IN_A_CLASS,
            [
                "            advised_call(self.model,\n                x,\n",
                "    net = build().cuda()\n    net = net.to(memory_format=torch.channels_last)\n",
                "        shuffle=True,\n        num_workers=4,  # every epoch\n",
            ],
        ),
        (IN_A_CLASS.replace("(0.1)", "0.1"), ["lr=0.1, fused=True))\n"]),
        (
            BARE,
            [
                "import torch\n\n# advisor: channels_last, fused_optimizer, 4 loader workers,",
                "model = Net()\nmodel = model.to(memory_format=torch.channels_last)\n",
                "loss = advised_call(model, x)\n",
                "0.1, fused=True)\n",
            ],
        ),
        (
            BARE.replace("model = Net()", "model, loss = Net(), 0"),
            ["model, loss = Net(), 0\nmodel = model.to(memory_format=torch.channels_last)\n"],
        ),
    ],
    ids=["class", "plain", "file", "tuple"],
)
def test_each_edit_has_its_place(source: str, lines: list[str]) -> None:
    text, _left = patched(source, PLAIN)
    for line in lines:
        assert line in text, text
    assert text.count("advised_call(") == 2


@pytest.mark.parametrize(
    ("old", "new", "left"),
    [
        (
            "loss = model(x)",
            "loss = model(x) + model(x)",
            "forward: which call .* is not certain .perhaps line 6.;",
        ),
        ("loss = model(x)", "loss = model(one for one in x)", "forward: which call .*line 6."),
        ("loss = model(x)", "loss = (model)(x)", "forward: which call .* .perhaps line 6."),
        ("model = Net()", "model = Net(); 1", "model: .* add: model = model.to"),
        (
            "model = Net()",
            "model = Net().to(0)\nmodel.to(1)",
            "model: where .* .perhaps line 3 or 4.; once",
        ),
        (
            "0.1)",
            "0.1)\nother = torch.optim.SGD([x])\nother.step()",
            "optimizer sgd: .* line 4 or 5",
        ),
        ("0.1)", "0.1)\nother = torch.optim.SGD([x])", ""),
        (
            "optimizer.step()",
            "other.step()",
            "optimizer sgd: where .* is not certain .perhaps line 4.",
        ),
        ("0.1)", "0.1, **more)", r"optimizer sgd: line 4 has \*\*; its arguments: fused=True"),
        ("0.1)", "0.1, foreach=True)", "optimizer sgd: line 4 has foreach"),
        ("model.parameters(), 0.1", "p for p in model.parameters()", "optimizer sgd: where it is"),
        ("torch.optim.SGD", "mine.SGD", "optimizer sgd: where it is made is not certain; its"),
        ("x =", "torch.backends.cudnn.allow_tf32 = False\nx =", "flags: the script has torch.ba.*"),
        ("x =", "torch.backends.cudnn.allow_tf32 = True\nx =", ""),
        ("import torch", "pass", "flags: add at the top of the script, and train through adv"),
    ],
)
def test_an_edit_without_one_place_is_left(old: str, new: str, left: str) -> None:
    """All others are made."""
    config = {name: value for name, value in PLAIN.items() if name != "num_workers"}
    found = patched(BARE.replace(old, new), config)[1]
    assert [bool(left)] * bool(left) == [bool(re.match(left, one)) for one in found], found


def test_a_model_without_a_training_call_stays() -> None:
    text, left = patched(BARE.replace("loss = m", "with torch.no_grad(): loss = m"), PLAIN)
    names = ["forward", "model", "training DataLoader"]
    assert [one.partition(":")[0] for one in left] == names and "channels_last)" not in text


MADE = """
import torch
from torch.utils.data import DataLoader
from helper import made

def loaders():
    train = DataLoader(range(8))
    return train, DataLoader(range(2))

class Trainer:
    def __init__(self, rows, valid):
        self.rows, self.valid = rows, valid
        self.own = DataLoader(range(3))

    def step(self, x):
        model(x).backward()

    def fit(self):
        for x in FROM:
            self.step(x)

rows, valid = loaders()
other = made()
Trainer(rows, valid).fit()
"""


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("self.rows", "    train = DataLoader(range(8), num_workers=4)\n"),
        ("enumerate(self.own)", "        self.own = DataLoader(range(3), num_workers=4)\n"),
        ("self.valid", "    return train, DataLoader(range(2), num_workers=4)\n"),
        ("other", ""),
        ("made()", ""),
    ],
)
def test_only_the_loader_of_the_training_gets_workers(source: str, line: str) -> None:
    text, left = patched(MADE.replace("FROM", source), {"num_workers": 4})
    assert text.count("num_workers") == bool(line) and line in text
    assert bool(line) or "is not certain (perhaps line 7 or 8 or 13);" in left[0]


@pytest.mark.parametrize(
    ("reads", "place"),
    [("net.fc.parameters()", "net"), ("student.parameters()", ""), ("nets[0].parameters()", "")],
)
def test_only_the_model_that_the_optimizer_gets_is_edited(reads: str, place: str) -> None:
    source = (
        "import torch\n\nnet.train()\nstudent.train()\n"
        f"optimizer = torch.optim.SGD({reads}, lr=0.1)\n"
        "for x in batches:\n    loss = loss_of(student, net(x))\n    loss.backward()\n"
    )
    text, left = patched(source, {"precision": "bf16"})
    assert ("advised_call(net, x)" in text, not left) == (bool(place), bool(place))


def test_what_no_edit_expresses_is_left() -> None:
    config = {"compile": "blocks", "checkpoint_blocks": 2, "prefetch_factor": 2}
    text, left = patched(SCRIPT, config)
    names = ["prefetch_factor", "checkpoint_blocks", "compile"]
    assert text == SCRIPT and [one.partition(":")[0] for one in left] == names
    left = patched(SCRIPT, {"compile": "default"}, processes=2)[1]
    assert left == ["compile: no known edit sets compile=default in a PyTorch script"]


HF = "from transformers import {0}\n{0}({1})\n"


def test_frameworks_get_their_own_settings() -> None:
    arguments = HF.format("TrainingArguments", "output_dir='out'")
    text, left = patched(arguments, {"precision": "bf16", "num_workers": 4})
    assert "output_dir='out', dataloader_num_workers=4, bf16=True, tf32=True)\n" in text
    assert not left and "advised_call" not in text
    source = "import lightning as L\nL.Trainer(max_epochs=1)\n"
    text, left = patched(source, {"precision": "bf16", "compile": "default"})
    assert 'L.Trainer(max_epochs=1, precision="bf16-mixed")\n' in text
    assert left[0].endswith('add: model.compile(mode="default")')
    Path("train.py").write_text(HF.format("HfArgumentParser", "TrainingArguments"))
    made = ScriptPatch(recorded({"precision": "bf16", "num_workers": 4}), Path("train.py"))
    assert made.arguments == ["--dataloader_num_workers=4", "--bf16=True", "--tf32=True"]


def test_a_call_of_a_function_that_has_no_place_is_left() -> None:
    text, left = patched("import json; import torch" + BARE.replace("import torch\n", ""), PLAIN)
    assert "advised_call" not in text and "def advised_call" in "".join(left)


@pytest.mark.parametrize("around", ["try", "async def main()"])
def test_the_function_stands_before_the_training(around: str) -> None:
    """Scripts that were notebooks import modules between their cells."""
    cell = BARE.replace("import torch\n", "").replace("loss = ", "for _ in '1':\n  loss = ")
    cell = cell.replace("loss.back", "  loss.back").replace("\n", "\n    ").rstrip()
    ends = "\nfinally:\n    pass" if around == "try" else ""
    text, left = patched(f"import torch\n{around}:{cell}{ends}\nimport json\n", PLAIN)
    assert [one.partition(":")[0] for one in left] == ["training DataLoader"]
    assert text.index("def advised_call") < text.index("advised_call(model, x)"), text


@pytest.mark.parametrize("program", ["git apply", "patch -p1 --binary"])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_the_diff_applies_to_any_text(program: str, ending: str) -> None:
    """Without a last newline, with other alphabets, a byte order mark and a lone carriage return,
    and in a folder below a repository."""
    text = BARE.replace("\nimport", "\ufeff# Net\rimport").rstrip("\n")
    text = text.replace("x = torch", "é, x = 'ü€\u2028', torch")
    Path("sub dir").mkdir()
    subprocess.run(["git", "init", "-q"], check=True)
    file = Path("sub dir") / "train.py"
    file.write_bytes(text.replace("\n", ending).encode())
    diff = ScriptPatch(recorded({"precision": "bf16", "fused_optimizer": True}), file).diff
    if shutil.which(program.partition(" ")[0]) is None:
        pytest.skip("not installed")
    subprocess.run(program.split(), input=diff.encode(), check=True)
    lines = file.read_bytes().decode().split(ending)
    assert lines[-2] == "loss.backward()" and "loss = advised_call(model, x)" in lines
    assert not any("\n" in line for line in lines)


def test_the_command_says_what_is_left_and_what_is_wrong() -> None:
    store = open_records(None)
    store.put(record := recorded({"precision": "bf16"}))
    Path("train.py").write_text(BARE.replace("model(x)", "f(x)"))
    done = advisor(Path.cwd(), "patch", record.id)
    assert done.returncode == 3 and done.stdout.startswith("--- a/train.py\n+++ b/train.py\n")
    assert "advisor: left to you: forward: which call" in done.stderr
    assert "of another device: NVIDIA H200" in done.stderr
    found = json.loads(advisor(Path.cwd(), "patch", "--json", record.id).stdout)
    assert found["diff"] == done.stdout and len(found["left"]) == 1
    Path("train.py").write_text(patched(BARE, {"precision": "bf16"})[0])
    Path("bad.py").write_bytes(b"x = (")
    Path("latin.py").write_bytes(b"x = '\xe9'")
    for file, why in (
        ("train.py", "has advice: # advisor: bf16, 1.50x; .* undo that edit first"),
        ("bad.py", "bad.py: expected Python: '.' was never closed"),
        ("latin.py", "script 'latin.py': 'utf-8' codec can't decode"),
        ("none.py", "script 'none.py': No such file"),
    ):
        done = advisor(Path.cwd(), "patch", record.id, file)
        assert (done.returncode, done.stdout) == (2, "") and re.search(why, done.stderr), done
    store.put(other := examples.record(examples.SMALL))
    done = advisor(Path.cwd(), "patch", other.id)
    assert done.returncode == 2 and f"give it: advisor patch {other.id} train.py" in done.stderr
    store.put(infer := replace(record, key=examples.INFER))
    assert "was tuned for mode infer" in advisor(Path.cwd(), "patch", infer.id, "bad.py").stderr
    store.put(same := recorded({}, optimizer="adam"))
    Path("train.py").write_text(BARE)
    done = advisor(Path.cwd(), "patch", same.id)
    assert (done.returncode, done.stdout) == (0, "") and "your unmodified script" in done.stderr
