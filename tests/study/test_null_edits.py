"""A loop that tries edits and keeps the better ones: the program of docs/agents.md and null edits."""

import runpy
import subprocess
from pathlib import Path

import pytest

import doc_pages

ROOT = Path(__file__).parents[2]
NULLS = runpy.run_path(str(ROOT / "benchmarks" / "null_edits.py"), run_name="null_edits")
CHUNK = 10


def git(*words):
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout


def test_the_edits_are_the_same_every_time_and_compile():
    edits = [list(NULLS["null_edits"]()) for _ in range(2)]
    assert edits[0] == edits[1] and len(edits[0]) == 200 and len(list(NULLS["real_edits"]())) == 20
    for edit in [*edits[0], *NULLS["real_edits"]()]:
        compile(edit(NULLS["MINE"]), "mine.py", "exec")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_program_of_the_page_keeps_what_is_better_and_puts_back_the_rest(tmp_path, monkeypatch):
    page = ROOT / "docs" / "agents.md"
    ((_, program),) = doc_pages.blocks(page, "python")
    lines = [line for line in program.splitlines() if line and not line.startswith(("import", "from"))]
    assert len(lines) <= 10
    monkeypatch.chdir(tmp_path)
    text = NULLS["MINE"].replace("RATE = 0.05", "RATE = 0.001")
    Path("my_task.py").write_text(text)
    git("init", "-q")
    for name, value in (("name", "a"), ("email", "a@b")):
        git("config", f"user.{name}", value)
    git("add", "my_task.py")
    git("commit", "-qm", "The recipe")
    edits = [
        ("hidden", "renamed"),
        ("seed: int = 0", "seed: int = 7"),
        ("RATE = 0.001", "RATE = 0.1"),
    ]
    program = compile(program, page.name, "exec")
    exec(program, {"edits": edits})
    better = text.replace("0.001", "0.1")
    assert git("log", "--format=%s").splitlines() == ["RATE = 0.001 -> RATE = 0.1", "The recipe"]
    assert Path("my_task.py").read_text() == better and not git("diff")
    for old, new in (("seed=seed)", "seed=seed + 7)"), ("def loss(", "def loss[(")):
        with pytest.raises(SystemExit, match=r"^error: "):
            exec(program, {"edits": [(old, new), ("RATE = 0.1", "RATE = 0.2")]})
        assert Path("my_task.py").read_text() == better.replace(old, new)
        git("checkout", "-q", "my_task.py")


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, 200, CHUNK))
def test_no_null_edit_is_better(first, tmp_path):
    """All 200 are in `benchmarks/null_edits.md`. Here each ten have a book of their own."""
    edits = list(NULLS["null_edits"]())[first : first + CHUNK]
    with NULLS["repository"](tmp_path / "loop"):
        rows = [NULLS["judged"](edit, "runs/book", 10.0) for edit in edits]
    assert [row for row in rows if row["verdict"] == "better"] == []
    told = {"same", "open", "faster", "slower", "worse", "refused: seed-dropped"}
    assert {row["verdict"] for row in rows} <= told
    assert all(
        row["verdict"] == "refused: seed-dropped" for row in rows if row["kind"] == "a seed of its own"
    )
    quick = ("a comment", "a renamed value", "another default seed", "dead code")
    assert all(row["verdict"] == "same" and not row["values"] for row in rows if row["kind"] in quick)
