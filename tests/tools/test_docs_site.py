"""The pages that `tools/docs_site.py` makes of the code: commands and options, JSON and its fields."""

import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from chipwise.cli import app, skill

ROOT = Path(__file__).parents[2]
TOOL = runpy.run_path(str(ROOT / "tools" / "docs_site.py"))
SCHEMAS = {
    schema["$id"]: schema
    for schema in map(json.loads, (f.read_text() for f in (skill.HERE / "schemas").glob("*.json")))
}
HEADER = {"schema", "chipwise", "created"}
"""Fields that every document may have."""


def test_every_command_and_option_is_listed():
    page, group = TOOL["commands"](), typer.main.get_command(app())
    assert sorted(re.findall(r"^### (\S+)$", page, re.MULTILINE)) == sorted(group.commands)
    for name, command in group.commands.items():
        (part,) = re.findall(rf"^### {name}$(.*?)(?=^##|\Z)", page, re.DOTALL | re.MULTILINE)
        for param in command.params:
            for option in param.opts if param.param_type_name == "option" else ():
                assert option in part, f"{name} {option}"


def test_every_field_of_json_is_listed():
    page = TOOL["json_fields"]()
    parts = dict(re.findall(r"^## (\S+)$(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE))
    assert parts.keys() == SCHEMAS.keys()
    for name, schema in SCHEMAS.items():
        assert re.findall(r"^\| `(\w+)`", parts[name], re.MULTILINE) == list(schema["properties"])


DESCRIBED = {
    "bench": "chipwise.record/1",
    "compare": "chipwise.comparison/7",
    "find": "chipwise.find_lr/3",
    "plan": "chipwise.plan/4",
    "report": "chipwise.report/6",
}
"""Pages that tell every field of a document, and which."""


@pytest.mark.parametrize("page", DESCRIBED)
def test_a_page_tells_every_field(page):
    name = DESCRIBED[page]
    text = (ROOT / "docs" / f"{page}.md").read_text().partition(name)[2].partition("\n## ")[0]
    assert SCHEMAS[name]["properties"].keys() - HEADER <= set(re.findall(r"`(\w+)`", text))


@pytest.mark.parametrize("page", sorted(ROOT.rglob("docs/**/*.md")), ids=lambda page: page.stem)
def test_schemas_that_pages_cite_are_todays(page):
    assert set(re.findall(r"\bchipwise\.[a-z_]+/\d+", page.read_text())) <= SCHEMAS.keys()


@pytest.mark.parametrize(
    ("page", "link", "on_the_site"),
    [
        ("after.md", "../examples/own_task.py", "examples/own_task.py.md"),
        ("after.md", "../examples/which_chip.ipynb", "examples/which_chip.ipynb"),
        ("overview.md", "../llms.txt", "llms.txt"),
        ("tutorial/train.md", "../../benchmarks/doors.md", "../benchmarks/doors.md"),
        ("benchmarks/doors.md", "../examples/my_torch.py", "../examples/my_torch.py.md"),
        ("benchmarks/doors.md", "../docs/models.md", "../models.md"),
    ],
)
def test_links_out_of_docs_lead_to_pages_of_the_site(page, link, on_the_site):
    shown = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    assert TOOL["on_page_markdown"](f"[x]({link})", shown) == f"[x]({on_the_site})"
