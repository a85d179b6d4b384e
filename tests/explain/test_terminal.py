"""How answers are given: JSON alone, or for people; the page first, whole or not at all."""

import json

import pytest
from rich.text import Text

from chipwise.base.errors import DataError
from chipwise.base.facts import fact
from chipwise.explain.terminal import Title, answer, console, lines, table

MADE = {"chipwise": "1.0", "created": "today"}


def test_a_page_is_written_whole_before_anything_is_printed(tmp_path, capsys):
    path = tmp_path / "deep" / "page.html"
    answer(MADE, [Title("b", 1), "[red]a[/red]"], path, False)
    assert "[red]a[/red]" in path.read_text() and [p.name for p in path.parent.iterdir()] == ["page.html"]
    out = capsys.readouterr().out
    assert out.startswith("b\n[red]a[/red]\n") and str(fact("written", path=path)) in out
    (tmp_path / "file").write_text("")
    for closed in (tmp_path / "file" / "page.html", tmp_path / "deep"):
        with pytest.raises(DataError, match="--html"):
            answer(MADE, [Title("b", 1)], closed, False)
    assert capsys.readouterr().out == ""


def test_json_is_one_object_and_nothing_else(tmp_path, capsys):
    answer(MADE, ["a"], tmp_path / "page.html", True, [Title("of the page", 1)])
    assert json.loads(capsys.readouterr().out) == MADE
    assert "of the page" in (tmp_path / "page.html").read_text()


def test_cells_are_no_markup_and_move_no_cursor(capsys):
    answer({}, [table(("a", "b"), [("[red]x[/red]", 3), (Text("y"), "\x1b[31m")])], None, False)
    out = capsys.readouterr().out
    assert "[red]x[/red]" in out and "\x1b" not in out and "\\x1b" in out


def test_lines_move_no_cursor(capsys):
    lines(console(), "a\n\x1b[31mb\u2028", fact("written", path="\x1b[2J\u202e"))
    out = capsys.readouterr().out
    assert out.startswith("a\n\\x1b[31mb\\u2028\n") and not {"\x1b", "\u202e", "\u2028"} & set(out)
