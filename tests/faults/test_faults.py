"""Nothing is lost, no bit changes and nobody waits, whatever operation on files a command was struck in.

`python tests/faults/campaign.py` strikes as often as it is told; here each pair of a command and a kind of
fault is struck a few times.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from faults.campaign import CAMPAIGN, KINDS, SHARES, cases, compiled, table

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PAIRS = sorted({case[:2] for case in cases(1000, list(SHARES), list(KINDS))})
FAULTS = 4


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    if shutil.which("cc") is None:
        pytest.skip("no C compiler: the shim that strikes cannot be made")
    return compiled(tmp_path_factory.mktemp("shim"))


@pytest.mark.drawn
@pytest.mark.parametrize(("scene", "kind"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_what_was_struck_is_finished_by_the_same_command(shim, tmp_path, scene, kind, draw):
    command = [sys.executable, CAMPAIGN, "--scenes", scene, "--kinds", kind, "--faults", str(FAULTS)]
    command += ["--seed", draw or "0", "--rows", str(tmp_path / "rows.jsonl"), "--shim", str(shim)]
    path = os.pathsep.join(sys.path)
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    expected = len(list(cases(FAULTS, [scene], [kind])))  # a scene may have fewer places to strike
    assert [row["wrong"] for row in rows] == [[]] * expected, done.stdout
    assert done.returncode == 0
    assert any(row["struck"] for row in rows)  # or nothing was tried


def test_a_table_tells_what_was_lost():
    row = {"scene": "train", "kind": "kill", "waited": 4.0, "load": 2.0, "wrong": ["other bits"]}
    rows = [row, {**row, "kind": "power", "wrong": []}]
    assert list(table(rows))[2:] == ["| kill | 1 | 1 | 2.0 s | 1 |", "| power | 1 | 1 | 2.0 s | 0 |"]
    assert Path(CAMPAIGN).is_file()
