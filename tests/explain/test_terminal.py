"""How answers are given: JSON alone, or for people; the page first, whole or not at all."""

import json

import pytest
from rich.text import Text

from chipwise.errors import DataError
from chipwise.explain.terminal import answer, console, lines, table
from chipwise.words.facts import fact


def test_a_page_is_written_whole_before_anything_is_printed(tmp_path, capsys):
    path = tmp_path / "deep" / "page.html"
    answer({}, ["[red]a[/red]"], lambda: "<html>", path, False)
    assert path.read_text() == "<html>" and [p.name for p in path.parent.iterdir()] == ["page.html"]
    out = capsys.readouterr().out
    assert out.startswith("[red]a[/red]\n") and str(fact("written", path=path)) in out
    (tmp_path / "file").write_text("")
    for closed in (tmp_path / "file" / "page.html", tmp_path / "deep"):
        with pytest.raises(DataError, match="--html"):
            answer({}, ["a"], lambda: "<html>", closed, False)
    assert capsys.readouterr().out == "" and path.read_text() == "<html>"


def test_json_is_one_object_and_nothing_else(tmp_path, capsys):
    answer({"a": 1}, ["a"], lambda: "<html>", tmp_path / "page.html", True)
    assert json.loads(capsys.readouterr().out) == {"a": 1} and (tmp_path / "page.html").exists()


def test_cells_are_no_markup_and_move_no_cursor(capsys):
    answer({}, [table(("a", "b"), [("[red]x[/red]", 3), (Text("y"), "\x1b[31m")])], str, None, False)
    out = capsys.readouterr().out
    assert "[red]x[/red]" in out and "\x1b" not in out and "\\x1b" in out


def test_lines_move_no_cursor(capsys):
    lines(console(), "a\n\x1b[31mb\u2028", fact("written", path="\x1b[2J\u202e"))
    out = capsys.readouterr().out
    assert out.startswith("a\n\\x1b[31mb\\u2028\n") and not {"\x1b", "\u202e", "\u2028"} & set(out)
