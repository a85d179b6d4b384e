import json
import re
import shlex

import jsonschema
import pytest
import typer

from chipwise.cli import app, skill
from chipwise.cli.exit_codes import exit_codes
from chipwise.cli.referee import EXITS

SCHEMAS = sorted(skill.HERE.joinpath("schemas").glob("*.json"))


def test_the_page_has_the_exit_codes_and_only_lines_that_the_command_line_takes(chipwise):
    said = chipwise("skill")
    assert said.code == 0 and said.out.endswith(exit_codes().removeprefix("\b") + "\n")
    group = typer.main.get_command(app())
    lines = [
        line.strip().partition("#")[0] for line in said.out.splitlines() if line.startswith("    chipwise")
    ]
    assert len(lines) > 8
    for line in lines:
        name, *words = shlex.split(line.replace("...", ""))[1:]
        command = group.commands[name]
        command.make_context(name, words, parent=typer.Context(group))  # raises if an option is unknown
    told = {
        int(number)
        for number in re.findall(r"exit code (\d+)|\b(1\d):", said.out)
        for number in number
        if number
    }
    assert told == set(EXITS.values())


@pytest.mark.parametrize("file", SCHEMAS, ids=lambda file: file.stem)
def test_a_schema_is_one_and_has_its_name_and_number(chipwise, file):
    document = f"chipwise.{file.stem.replace('-', '/')}"
    said = chipwise("skill", document)
    schema = json.loads(said.out)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$id"] == schema["properties"]["schema"]["const"] == document
    assert set(schema["required"]) <= set(schema["properties"])
    assert all("description" in one for one in schema["properties"].values())


def test_every_command_that_has_json_has_a_schema():
    group = typer.main.get_command(app())
    with_json = {name for name, one in group.commands.items() if any("--json" in p.opts for p in one.params)}
    titles = " ".join(json.loads(file.read_text())["title"] for file in SCHEMAS)
    assert {name for name in with_json if not re.search(rf"\b{name} ", titles)} == set()


def test_no_such_schema(chipwise):
    assert chipwise("skill", "chipwise.plan/0").refused(2, "skill-schema", name="chipwise.plan/0")
