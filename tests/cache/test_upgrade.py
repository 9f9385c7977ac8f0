"""Records of an older version in one that has a field more in a task, which decides a key."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from advisor.cache import codec
from advisor.cache.codec import decode, encode, to_plain
from advisor.cache.key import fields, terms_of
from advisor.cache.records import Records
from advisor.cache.stores import open_store
from tests.cache.examples import KEY, record

ROOT = Path(__file__).parents[2]
FIELD = """
    flavour: str = row(kinds.Choice(("plain", "sour")), "A made-up field.", "plain")
"""
NEWER = """
import json, sys
from click.testing import CliRunner
from advisor.cache.key import completed, as_fields, fields, terms_of
from advisor.cache.match import compared
from advisor.cache.records import Records
from advisor.cache.stores import open_store
from advisor.cli import cli
from tests.cache.examples import KEY, changed, record

url, stored = sys.argv[1:]
older = completed(as_fields(json.loads(stored)))
records = Records(open_store(url))
(found,) = records.all()
sour = changed(KEY, "flavour", "sour")
records.put(record(sour))
print(json.dumps({
    "damaged": records.damaged,
    "flavour": found.key.task.flavour,
    "id": found.id,
    "terms": [terms_of(json.loads(stored)), terms_of(fields(KEY))],
    "same": compared(fields(KEY), older)[0],
    "differs": [str(one) for one in compared(fields(sour), older)[1]],
    "both": sorted(one.key.task.flavour for one in records.all()),
    "show": CliRunner().invoke(cli, ["show", "--cache", url]).output,
}))
"""


def test_a_field_more(tmp_path: Path) -> None:
    sources, url = tmp_path / "src", f"dir:{tmp_path}/store"
    for name in ("advisor", "cache"):
        shutil.copytree(ROOT / name, sources / name, symlinks=True)
    (sources / "tuners").symlink_to(ROOT / "tuners")
    task = sources / "cache" / "task.py"
    before = "\n    @classmethod\n    def of("
    assert before in task.read_text()
    task.write_text(task.read_text().replace(before, FIELD + before))
    Records(open_store(url)).put(record())

    env = os.environ | {"PYTHONPATH": f"{sources}{os.pathsep}{ROOT}"}
    stored = json.dumps(to_plain(fields(KEY)))
    words = [sys.executable, "-c", NEWER, url, stored]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    shown = found.pop("show")
    assert record().id in shown and "refused" not in shown
    assert found == {
        "damaged": [],
        "flavour": "plain",
        "id": record().id,
        "terms": [terms_of(fields(KEY))] * 2,
        "same": "exact",
        "differs": ["flavour plain -> sour"],
        "both": ["plain", "sour"],
    }
    # An older version does not know the new field, and says so of no other record.
    records = Records(open_store(url))
    assert records.all() == [record()] and len(records.damaged) == 1


def test_a_newer_format_reads_the_older_one(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(record())
    monkeypatch.setattr(codec, "FORMAT", codec.FORMAT + 1)
    assert decode(data) == record()
