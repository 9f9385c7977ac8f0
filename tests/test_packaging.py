"""Tests that the built wheel contains every file of the package, all below advisor/."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"advisor": "advisor", "tuners": "advisor/tuners", "cache": "advisor/cache"}
LINKS = ("tuners", "cache")


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The files in a wheel built from a copy, so that no earlier build/ leaks into it."""
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    source.mkdir()
    for folder in FOLDERS:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=ignore)
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy(file, source)

    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(place)]
    built = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = place.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_holds_every_file(wheel_names: set[str]) -> None:
    """Nothing is installed outside advisor/. Links are not followed."""
    modules = {
        f"{inside}/{file.relative_to(ROOT / folder).as_posix()}"
        for folder, inside in FOLDERS.items()
        for file in (ROOT / folder).rglob("*.py")
        if not any(link in file.parents for link in (ROOT / "advisor" / name for name in LINKS))
    }
    assert {name for name in wheel_names if name.endswith(".py")} == modules
    data_files = {"advisor/py.typed", "advisor/service/static/LICENSE-pico"}
    for folder in ("report/templates", "service/templates", "service/static"):
        files = (ROOT / "advisor" / folder).iterdir()
        data_files |= {f"advisor/{folder}/{file.name}" for file in files}
    assert data_files <= wheel_names and len(data_files) > 4
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"advisor"}


@pytest.mark.parametrize("name", LINKS)
def test_links_are_relative(name: str) -> None:
    link = ROOT / "advisor" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name
    assert (link / "__init__.py").is_file()
