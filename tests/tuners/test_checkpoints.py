"""Checkpoints of a tuned run go to a scratch folder; the user's files do not change."""

# ruff: noqa: PTH103, PTH104, PTH105, PTH107, PTH123, PTH202, PTH208

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from advisor.tuners.act.pilot.checkpoints import MADE, Redirection, remove_empty

ONE, TWO = {"step": torch.ones(1)}, {"step": torch.full((1,), 2.0)}


@pytest.fixture(autouse=True)
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The output folder of a script, with checkpoints of an earlier run."""
    folder = tmp_path / "out"
    (folder / "checkpoint-1").mkdir(parents=True)
    for name in NAMES:
        (folder / name).write_text("the user's")
        os.utime(folder / name, (1, 1))
    monkeypatch.chdir(folder)
    (command := tmp_path / "command").mkdir()
    redirection = Redirection(command / "checkpoints")
    redirection.install()
    yield folder
    redirection.uninstall()


def saved_step(path: str | Path) -> float:
    return float(torch.load(path)["step"])


def on_disk(folder: Path) -> dict[str, str]:
    """Return the files on disk, read without patched functions."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): _text(path) for path in files}


def _text(path: Path) -> str:
    with os.fdopen(os.open(path, os.O_RDONLY)) as file:
        return file.read()


NAMES = ("last.pt", "best.pth", "checkpoint-1/model.safetensors")
BEFORE = dict.fromkeys(NAMES, "the user's")


def test_saved_checkpoint_can_be_loaded_and_replaces_no_file(out: Path) -> None:
    torch.save(ONE, "last.pt")
    torch.save(TWO, f=out / "other.pt")
    assert (saved_step(out / "last.pt"), saved_step("other.pt"), on_disk(out)) == (1.0, 2.0, BEFORE)
    with open("by_hand", "wb") as file:
        torch.save(TWO, file)
    os.replace("by_hand", "last.pt")
    assert (saved_step("last.pt"), on_disk(out)) == (2.0, BEFORE)


@pytest.mark.filterwarnings("ignore")  # TorchScript is deprecated
def test_script_can_open_and_load_what_it_saved(out: Path) -> None:
    torch.save(TWO, "new.ckpt")
    torch.jit.save(torch.jit.script(torch.nn.ReLU()), "best.pth")
    torch.jit.script(torch.nn.Linear(1, 1)).save("last.pt")
    assert Path("new.ckpt").exists() and os.path.getsize("new.ckpt") > 100
    with open("new.ckpt", "rb") as file:
        assert torch.load(file)["step"] == 2.0
    torch.jit.load("last.pt")(torch.ones(1))
    with open("last.pt", "rb") as file:
        assert file.read(2) == b"PK"
    # open() would truncate the user's file, and leave a new one for the next start to resume from.
    for number, name in enumerate((*NAMES[:2], "fresh.pt", "fresh.pt")):
        with open(name, "wb") if number else Path(name).open("wb") as file:
            torch.save(TWO, file)
        assert saved_step(name) == 2.0
    assert on_disk(out) == BEFORE


def test_checkpoints_are_renamed_copied_and_removed_in_the_scratch_folder(out: Path) -> None:
    torch.save(ONE, "last.tmp")
    os.replace("last.tmp", "last.pt")
    torch.save(ONE, "new.tmp")
    Path("new.tmp").rename("new.pt")
    shutil.copyfile("last.pt", "best.pth")
    shutil.copy2("last.pt", "copy.pt")
    assert [saved_step(name) for name in ("last.pt", "new.pt", "best.pth", "copy.pt")] == [1.0] * 4
    os.remove("new.pt")
    Path("last.pt").unlink()
    os.remove("best.pth")
    os.remove("best.pth")  # the user's file
    shutil.rmtree("checkpoint-1")
    with pytest.raises(FileNotFoundError):
        torch.load("new.pt")
    assert on_disk(out) == BEFORE


@pytest.mark.parametrize(
    "how", ["os.replace", "os.rename", "os.renames", "shutil.move", "Path.replace", "Path.rename"]
)
def test_the_users_checkpoints_are_rotated_in_the_scratch_folder(out: Path, how: str) -> None:
    move = attrgetter(how)(SimpleNamespace(os=os, shutil=shutil, Path=Path))
    for number in range(3):
        move(Path("last.pt"), Path("best.pth"))
        move(Path("best.pth"), Path("previous.pt"))
        torch.save({"step": torch.tensor(number)}, "last.pt")
    assert (saved_step("last.pt"), saved_step("previous.pt")) == (2.0, 1.0)
    assert on_disk(out) == BEFORE


def test_checkpoints_of_any_name_links_and_temporary_files(out: Path) -> None:
    with os.fdopen(os.open("model.last", os.O_CREAT | os.O_WRONLY), "wb") as file:
        torch.save(ONE, file)  # the user's
    os.utime("model.last", (1, 1))
    os.remove("model.last")
    os.rename("model.last", "model.previous")
    for _ in range(2):
        with tempfile.NamedTemporaryFile(dir=".", delete=False) as temporary:
            torch.save(TWO, temporary.name)
        os.replace(temporary.name, "new")
        assert Path("new").exists() and saved_step("new") == 2.0
        Path("latest.pth").symlink_to("new")
        assert saved_step("latest.pth") == saved_step("new") == 2.0
        os.remove("latest.pth")
    assert {*os.listdir(out)} == {"last.pt", "best.pth", "checkpoint-1", "model.last"}


def test_a_folder_of_the_users_can_be_cleaned_and_stays(out: Path) -> None:
    for clean in (shutil.rmtree, lambda folder: os.rename(folder, "old")):
        clean("checkpoint-1")
        os.makedirs("checkpoint-1")
        torch.save(TWO, "checkpoint-1/model.pt")
        assert (saved_step("checkpoint-1/model.pt"), on_disk(out)) == (2.0, BEFORE)
    assert saved_step("old/model.pt") == 2.0


def test_only_folders_that_the_script_has_made_and_left_empty_are_removed(out: Path) -> None:
    subprocess.run(["mkdir", "mine"], check=True)
    os.makedirs("new/epoch_1/best")
    torch.save(TWO, "new/epoch_1/best/model.pt")
    Path("new/loss.txt").touch()
    remove_empty(out.parent / "command" / MADE)
    assert Path("mine").exists() and os.listdir("new") == ["loss.txt"]


def test_other_files_are_not_redirected(out: Path) -> None:
    buffer = io.BytesIO()
    torch.save(ONE, buffer)
    buffer.seek(0)
    assert torch.load(buffer) == ONE
    Path("log.json").write_text("{}")
    os.replace("log.json", "state.json")
    Path("own.pt").write_text("written by this run")
    os.remove("own.pt")
    assert on_disk(out) == BEFORE | {"state.json": "{}"}
    with pytest.raises(RuntimeError, match="Parent directory"):
        torch.save(ONE, "no folder/last.pt")


def test_renaming_a_folder_renames_its_redirected_checkpoints(out: Path) -> None:
    os.makedirs("tmp-checkpoint-2")
    Path("tmp-checkpoint-2/state.json").write_text(json.dumps({"step": 2}))
    torch.save(TWO, "tmp-checkpoint-2/optimizer.pt")
    os.rename("tmp-checkpoint-2", "checkpoint-2")
    assert saved_step("checkpoint-2/optimizer.pt") == 2.0
    assert on_disk(out) == BEFORE | {"checkpoint-2/state.json": '{"step": 2}'}
    shutil.rmtree("checkpoint-2")
    assert on_disk(out) == BEFORE
    assert not Path("checkpoint-2").exists()


@pytest.mark.filterwarnings(
    "ignore:torch.distributed is ",
    "ignore:Detected an existing",
    "ignore:TypedStorage is deprecated",
)
def test_checkpoints_of_safetensors_dcp_and_lightning_are_redirected(out: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
    from safetensors import numpy as arrays
    from safetensors import torch as tensors

    path = "checkpoint-1/model.safetensors"
    tensors.save_file(ONE, path)
    assert tensors.load_file(path)["step"].item() == arrays.load_file(path)["step"].item() == 1.0
    tensors.save_model(torch.nn.Linear(1, 1), "model.safetensors")
    tensors.load_model(torch.nn.Linear(1, 1), "model.safetensors")
    for saved in (ONE, TWO):  # the second one overwrites the first
        dcp.save(dict(saved), checkpoint_id=out / "sharded")
    state = {"step": torch.zeros(1)}
    dcp.load(state, checkpoint_id=out / "sharded")
    saver = TorchCheckpointIO()
    saver.save_checkpoint(ONE, out / "last.pt")
    assert float(saver.load_checkpoint(out / "last.pt")["step"]) == 1.0
    assert (float(state["step"]), on_disk(out)) == (2.0, BEFORE)


class Trainer:
    """The part of transformers' Trainer that is patched. It keeps the newest checkpoint only."""

    args = SimpleNamespace(output_dir="trained")

    def _get_output_dir(self) -> str:
        return self.args.output_dir

    def save_model(self, output_dir: str | None = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("{}")
        torch.save(ONE, folder / "optimizer.pt")

    def train(self) -> None:
        folder = Path(self._get_output_dir())
        for number in (3, 4):
            self.save_model(str(folder / f"checkpoint-{number}"))
            for old in sorted(folder.glob("checkpoint-*"))[:-1]:
                shutil.rmtree(old)


def test_transformers_trainer_does_not_touch_the_users_checkpoints(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (out / "trained" / "checkpoint-2").mkdir(parents=True)
    for name in ("checkpoint-2/trainer_state.json", "checkpoint-2/optimizer.pt", "config.json"):
        with os.fdopen(os.open(out / "trained" / name, os.O_CREAT | os.O_WRONLY), "w") as file:
            file.write("the user's")  # `out` redirects other ways to write
    module = ModuleType("transformers.trainer")
    module.__dict__["Trainer"] = Trainer
    monkeypatch.setitem(sys.modules, module.__name__, module)
    before, scratch = on_disk(out), tmp_path / "command" / "checkpoints"
    redirection = Redirection(scratch)
    redirection.install()
    try:
        Trainer().train()
        Trainer().save_model()
    finally:
        redirection.uninstall()
    assert on_disk(out) == before
    assert {one.parent.name for one in scratch.rglob("*.pt")} == {"trained", "checkpoint-4"}


def test_uninstall_keeps_later_patches(tmp_path: Path) -> None:
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
