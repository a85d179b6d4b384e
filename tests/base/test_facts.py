"""Codes, their sentences, and the files that hold them."""

import ast
import pickle
import re
import string
from pathlib import Path

import pytest

from chipwise.base.errors import ChipwiseError, RecipeError
from chipwise.base.facts import FORMATS, catalogue, fact, say, texts
from chipwise.cli import COMMANDS

SOURCE = Path(__file__).parents[2] / "src" / "chipwise"


def uses():
    """Every `fact("code", ...)`, `SomeError("code", ...)` and `SomeError.of_system("code", ...)`: where,
    code, sentence or None, numbers' names."""
    kinds = {kind.__name__ for kind in _subclasses(ChipwiseError)} | {"fact"}
    for file in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(file.read_text())
        named = {}  # name and line to the text that a sentence of more than a line was given there
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                named[getattr(node.targets[0], "id", ""), node.lineno] = node.value.value
        for node in ast.walk(tree):
            of_system = getattr(getattr(node, "func", None), "attr", "") == "of_system"
            called = node.func.value if of_system else getattr(node, "func", None)
            if getattr(called, "id", "") in kinds and node.args:
                first = node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    names = {keyword.arg for keyword in node.keywords} | ({"reason"} if of_system else set())
                    second = node.args[1] if len(node.args) > 1 else None
                    sentence = second.value if isinstance(second, ast.Constant) else None
                    if isinstance(second, ast.Name):
                        lines = [at for name, at in named if name == second.id and at < node.lineno]
                        sentence = named[second.id, max(lines)]
                    yield f"{file.relative_to(SOURCE)}:{node.lineno}", first.value, sentence, names


def _subclasses(kind):
    return {kind}.union(*(_subclasses(child) for child in kind.__subclasses__()))


def test_every_code_that_is_used_has_words_and_every_number_that_they_name():
    for where, code, sentence, names in uses():
        if " " in code:
            continue
        assert (code in catalogue()) is (sentence is None), f"{where}: {code} needs one sentence"
        if None in names:  # **numbers, which only a run can tell
            continue
        for text in texts(code).values() if sentence is None else [sentence]:
            named = {
                name.split(".")[0].split("[")[0] for _, name, _, _ in string.Formatter().parse(text) if name
            }
            assert named <= names, f"{where}: {code} needs {sorted(named - names)}"


def test_no_sentence_is_left_over():
    """Every code of `messages/` is named in the package, whole or by the parts of an f-string."""
    named, composed = set(COMMANDS), set()  # the titles of commands stand in a file beside the code
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [re.escape(p.value) if isinstance(p, ast.Constant) else ".+" for p in node.values]
                if re.fullmatch(r"[a-z0-9\-\\.+]+", "".join(parts)) and re.search("[a-z]{4}", "".join(parts)):
                    composed.add("".join(parts))
    left = [code for code in catalogue() if code not in named]
    assert not [code for code in left if not any(re.fullmatch(pattern, code) for pattern in composed)]


def test_an_error_is_its_code_and_its_facts_also_across_processes():
    error = RecipeError("odd", "batch={batch}: try {near:or}.", batch=100, near=[96, 104])
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert (one.code, one.facts["near"]) == ("odd", [96, 104])
        assert str(one) == "batch=100: try 96 or 104."


def test_an_error_takes_the_place_of_one_of_the_system():
    with pytest.raises(RecipeError) as caught, RecipeError.of_system("odd", "{path}: {reason}", path="x"):
        Path("/none/at/all").read_text()
    assert caught.value.facts == {"path": "x", "reason": "No such file or directory"}
    with pytest.raises(ValueError), RecipeError.of_system("odd"):
        raise ValueError


def test_a_fact_is_text_only_where_it_is_shown():
    told = fact("odd", "batch={batch:whole}", batch=1000)
    assert told["batch"] == 1000 and told.json()["code"] == "odd" and told == fact("odd", batch=1000)
    assert say(told) == str(told) == told.json()["text"] == "batch=1,000"


def test_a_code_without_words_is_an_error_of_ours():
    with pytest.raises(KeyError):
        say(fact("no-such-code"))


def test_what_a_sentence_goes_on_with():
    for form, said in (("tails", "; x; b"), ("brackets", " (x, b)"), ("sentences", "x b")):
        assert FORMATS[form](["x", "b"]) == said and FORMATS[form]([]) == ""
    assert FORMATS["each"](["x", "b"]) == "x; b"
    assert FORMATS["sections"]({"start": 5.0, "train": 90.0}) == "start 5 s, train 1.5 min"
