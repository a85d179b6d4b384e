"""What `chipwise plan` prints: a row a target, the verdict, and where the figures come from."""

import dataclasses
import io
import json

from rich.console import Console

import tasks
from chipwise.explain.plan_table import document, first, parts, statements, table
from chipwise.words.facts import fact
from planner import documents


def printed(plans):
    console = Console(width=200, file=io.StringIO())
    for part in parts(plans):
        console.print(part, markup=False)
    return console.file.getvalue()


def test_the_document_is_json_and_the_table_has_a_row_each():
    plans = documents.plans()
    made = document(tasks.recipe(), plans)
    assert json.loads(json.dumps(made)) == made
    assert made["schema"] == documents.SCHEMA and made["plans"][0]["memory"]["fits"] is True
    assert table(plans).row_count == len(plans) == 7
    assert [told["code"] for told in made["verdict"]["cheapest"]] == ["plan-cheapest"]


def test_problems_come_first_and_notes_reach_the_terminal():
    plans = documents.plans()
    assert [told["target"] for told in first(plans) if told.code == "plan-cannot"] == ["t4", "v2-8"]
    out = printed(plans)
    assert out.index(str(first(plans)[-1])) < out.index("ms a step")
    for plan in plans:
        for note in plan.notes:
            assert str(note) in out
    shared = f"v5e-8, v6e-8, v3-8: {documents.COMPILED}"
    assert shared in out


def test_the_cloud_stands_beside_each_price():
    plan = documents.plans()[0]
    demand, spot = plan.costs
    out = printed(
        [dataclasses.replace(plan, costs=(demand, dataclasses.replace(spot, cloud="[red]x[/red]")))]
    )
    assert "gcp" in out and "[red]x[/red]" in out


def test_what_is_said_of_several_targets_is_said_once():
    plans = [dataclasses.replace(p, advice=(fact("advice-interconnect"),)) for p in documents.plans()]
    (told,) = [told for told in statements(plans) if told.code == "plan-says"]
    assert told["targets"] == [p.target for p in plans]
