"""`examples/demo.py`, which `make demo` runs: its commands are commands, and it writes what it says."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from chipwise.cli import app
from pages import Reader

DEMO = Path(__file__).parents[1] / "examples" / "demo.py"


def test_the_command_line_takes_its_commands():
    demo = runpy.run_path(str(DEMO))
    commands = [*demo["TRAIN"].values(), *(demo[name] for name in ("PLAN", "LAUNCH", "COMPARE", "REPORT"))]
    group = typer.main.get_command(app())
    for command in commands:
        name, *words = command.split()
        group.commands[name].make_context(name, words, parent=typer.Context(group))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_shows_the_whole_way(tmp_path):
    done = subprocess.run([sys.executable, DEMO], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    results = [json.loads((tmp_path / f"demo/devices{n}/result.json").read_text()) for n in (1, 8)]
    one, eight = (result["fingerprint"] for result in results)
    assert one == eight and done.stdout.count(one) >= 2
    written = re.findall(r"`(\w+\.html|launch)/?`", DEMO.read_text())
    assert sorted(written) == ["compare.html", "launch", "plan.html", "report.html"]
    for name in written:
        if name.endswith(".html"):
            page = Reader((tmp_path / "demo" / name).read_text())
            assert {"main", "h1", "svg", "table"} <= {tag for tag, _ in page.elements}, name
    (notebook,) = (tmp_path / "demo" / "launch").glob("*.ipynb")
    assert json.loads(notebook.read_text())["cells"]
