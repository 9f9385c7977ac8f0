"""What a run that is tuned saves and loads: in a scratch folder, and the user's files stay."""

# ruff: noqa: PTH103, PTH104, PTH105, PTH107, PTH123

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from advisor.tuners.act.pilot.checkpoints import Redirection

ONE, TWO = {"step": torch.ones(1)}, {"step": torch.full((1,), 2.0)}


@pytest.fixture(autouse=True)
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that a script saves to: it has checkpoints of an earlier run."""
    folder = tmp_path / "out"
    (folder / "checkpoint-1").mkdir(parents=True)
    for name in ("last.pt", "best.pth", "checkpoint-1/model.safetensors"):
        (folder / name).write_text("the user's")
        os.utime(folder / name, (1, 1))
    monkeypatch.chdir(folder)
    redirection = Redirection(tmp_path / "command" / "checkpoints")
    redirection.install()
    yield folder
    redirection.uninstall()


def step(path: str | Path) -> float:
    return float(torch.load(path)["step"])


def users(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in files}


BEFORE = {
    "last.pt": "the user's",
    "best.pth": "the user's",
    "checkpoint-1/model.safetensors": "the user's",
}


def test_what_is_saved_is_loaded_and_replaces_nothing(out: Path) -> None:
    torch.save(ONE, "last.pt")
    torch.save(TWO, f=out / "other.pt")
    assert (step(out / "last.pt"), step("other.pt"), users(out)) == (1.0, 2.0, BEFORE)


def test_it_is_moved_copied_and_removed_where_it_lies(out: Path) -> None:
    """Saved to a temporary name and then replaced; the best one copied; the oldest removed."""
    torch.save(ONE, "last.tmp")
    os.replace("last.tmp", "last.pt")
    torch.save(ONE, "new.tmp")
    Path("new.tmp").rename("new.pt")
    shutil.copyfile("last.pt", "best.pth")
    shutil.copy2("last.pt", "copy.pt")
    assert [step(name) for name in ("last.pt", "new.pt", "best.pth", "copy.pt")] == [1.0] * 4
    os.remove("new.pt")
    Path("last.pt").unlink()
    os.remove("best.pth")
    os.remove("best.pth")  # the user's own
    shutil.rmtree("checkpoint-1")
    with pytest.raises(FileNotFoundError):
        torch.load("new.pt")
    assert users(out) == BEFORE


def test_a_file_written_by_hand_replaces_no_checkpoint(out: Path) -> None:
    with open("by_hand", "wb") as file:
        torch.save(TWO, file)
    os.replace("by_hand", "last.pt")
    assert (step("last.pt"), users(out)) == (2.0, BEFORE)


def test_what_is_no_checkpoint_is_as_ever(out: Path) -> None:
    buffer = io.BytesIO()
    torch.save(ONE, buffer)
    buffer.seek(0)
    assert torch.load(buffer) == ONE
    Path("log.json").write_text("{}")
    os.replace("log.json", "state.json")
    Path("own.pt").write_text("written by this run")
    os.remove("own.pt")
    assert users(out) == BEFORE | {"state.json": "{}"}
    with pytest.raises(RuntimeError, match="Parent directory"):
        torch.save(ONE, "no folder/last.pt")


def test_a_trainers_folder_is_renamed_with_what_is_in_it(out: Path) -> None:
    os.makedirs("tmp-checkpoint-2")
    Path("tmp-checkpoint-2/state.json").write_text(json.dumps({"step": 2}))
    torch.save(TWO, "tmp-checkpoint-2/optimizer.pt")
    os.rename("tmp-checkpoint-2", "checkpoint-2")
    assert step("checkpoint-2/optimizer.pt") == 2.0
    assert users(out) == BEFORE | {"checkpoint-2/state.json": '{"step": 2}'}
    shutil.rmtree("checkpoint-2")
    assert users(out) == BEFORE
    assert not Path("checkpoint-2").exists()


def test_safetensors(out: Path) -> None:
    from safetensors import numpy as arrays
    from safetensors import torch as tensors

    path = "checkpoint-1/model.safetensors"
    tensors.save_file(ONE, path)
    assert tensors.load_file(path)["step"].item() == 1.0
    assert arrays.load_file(path)["step"].item() == 1.0
    tensors.save_model(torch.nn.Linear(1, 1), "model.safetensors")
    tensors.load_model(torch.nn.Linear(1, 1), "model.safetensors")
    assert users(out) == BEFORE


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing")
def test_distributed_checkpoints(out: Path) -> None:
    import torch.distributed.checkpoint as dcp

    for saved in (ONE, TWO):  # the second one over the first
        dcp.save(dict(saved), checkpoint_id=out / "sharded", no_dist=True)
    state = {"step": torch.zeros(1)}
    dcp.load(state, checkpoint_id=out / "sharded", no_dist=True)
    assert (float(state["step"]), users(out)) == (2.0, BEFORE)


def test_lightnings(out: Path) -> None:
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

    saver = TorchCheckpointIO()
    saver.save_checkpoint(ONE, out / "last.pt")
    assert float(saver.load_checkpoint(out / "last.pt")["step"]) == 1.0
    assert users(out) == BEFORE


def test_a_trainers_checkpoints_of_transformers_with_all_their_files(out: Path) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="NOT CHECKED: transformers is not installed"
    )
    folder = out / "trained"
    (folder / "checkpoint-2").mkdir(parents=True)
    kept = [folder / "checkpoint-2" / name for name in ("trainer_state.json", "optimizer.pt")]
    kept += [folder / "config.json", folder / "model.safetensors"]
    for one in kept:
        one.write_text("the user's")
        os.utime(one, (1, 1))
    before = users(out)
    config = transformers.GPT2Config(
        vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0
    )
    how = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        save_steps=2,
        save_total_limit=1,
        per_device_train_batch_size=2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    sample = {"input_ids": torch.arange(8), "labels": torch.arange(8)}
    model = transformers.GPT2LMHeadModel(config)
    trainer = transformers.Trainer(model=model, args=how, train_dataset=[sample] * 8)
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    assert users(out) == before
    assert [one.name for one in folder.iterdir() if one.is_dir()] == ["checkpoint-2"]


def test_it_leaves_what_was_patched_after_it(tmp_path: Path) -> None:
    plain, finders = torch.serialization.save, list(sys.meta_path)
    redirection = Redirection(tmp_path / "other" / "checkpoints")
    redirection.install()
    assert torch.save is torch.serialization.save is not plain
    assert pickle.loads(pickle.dumps(torch.save)) is torch.save
    ours = torch.save
    torch.save = later = lambda *args, **kwargs: ours(*args, **kwargs)
    try:
        redirection.uninstall()
        assert torch.save is later
        assert torch.serialization.save is plain
        assert sys.meta_path == finders
    finally:
        torch.save = plain
