"""What `chipwise plan` shows: the verdict, a row a target, and where the figures come from."""

import dataclasses
import io
import json

import pytest

import tasks
from chipwise.base.facts import fact
from chipwise.explain.plan_parts import document, first, page, parts, scatter, table
from chipwise.explain.terminal import console, printed
from planner import documents


def said(plans, what=parts):
    to = console(io.StringIO(), width=200)
    printed(to, what(documents.wrap(plans)))
    return to.file.getvalue()


def test_the_document_is_json_and_the_table_has_a_row_each():
    made = document(tasks.recipe(), documents.plans())
    assert json.loads(json.dumps(made)) == made
    assert made["schema"] == documents.SCHEMA and made["plans"][0]["memory"]["fits"] is True
    assert table(made["plans"]).row_count == 7
    assert [told["code"] for told in made["verdict"]["cheapest"]] == ["plan-cheapest"]


def test_the_verdict_and_problems_come_first_and_notes_last():
    made = documents.document()
    lines = [str(line) for line in first(made)]
    assert lines[0] == made["verdict"]["fastest"][0]["text"]
    assert [line.partition(":")[0] for line in lines[-2:]] == ["t4", "v2-8"]
    out = said(documents.plans())
    assert out.index(lines[-1]) < out.index("ms a step") < out.index(str(documents.COMPILED))
    assert f"v5e-8, v6e-8, v3-8: {documents.COMPILED}" in out


def test_what_decides_stands_above_the_table():
    told = fact("bf16-emulated", chip="T4")
    plans = [dataclasses.replace(p, decisive=(told,)) for p in documents.plans()]
    out = said(plans)
    assert out.count(str(told)) == 1 and out.index(str(told)) < out.index("ms a step")


def test_the_cloud_stands_beside_each_price():
    """A spot price of one cloud may be above another's on demand."""
    plan = documents.plans()[0]
    demand, spot = plan.costs
    out = said([dataclasses.replace(plan, costs=(demand, dataclasses.replace(spot, cloud="[red]x[/red]")))])
    assert "gcp" in out and "[red]x[/red]" in out


def test_what_is_said_of_several_targets_is_said_once():
    told = fact("advice-interconnect")
    plans = [dataclasses.replace(p, advice=(told,)) for p in documents.plans()]
    targets = ", ".join(p.target for p in plans)
    assert f"{targets}: {told}" in said(plans).replace("\n", " ")


def test_a_page_has_every_price_with_its_source_and_the_recipe():
    made = documents.document()
    out = " ".join(said(documents.plans(), page).split())
    for plan in made["plans"]:
        for cost in plan["costs"]:
            assert cost["source"] in out and cost["date"] in out and cost["instance"] in out
    for setting, value in made["recipe"]["rows"]:
        assert setting.strip() in out and value in out
    assert out.count("without its host") == 2


@pytest.mark.parametrize("count", [1, 2, 7])
def test_any_number_of_plans(count):
    assert said(documents.plans()[:count], page)


def test_memory_and_prices_may_be_unknown():
    plans = [
        dataclasses.replace(plan, memory=None, costs=(), share_of_peak=None) for plan in documents.plans()
    ]
    out = said(plans, page)
    assert "None" not in out and "nan" not in out and str(fact("plan-no-price")) in out
    assert scatter(documents.wrap(plans)["plans"], []) is None


# ---- the picture


def test_a_dot_a_price_its_interval_and_the_best_joined():
    made = documents.document()
    drawn = scatter(made["plans"], made["verdict"]["pareto"])
    dots = {curve.name: curve for curve in drawn.curves if "dots" in curve.style}
    assert list(dots["on demand"].labels) == ["v5e-8", "v6e-8", "v3-8", "v100:8", "h100:8"]
    assert len(dots["on demand"].points) == len(dots["spot"].points) == 5
    assert sum("faint" in curve.style for curve in drawn.curves) == 10
    (front,) = [curve for curve in drawn.curves if curve.name == "best of both"]
    assert len(front.points) == len(made["verdict"]["pareto"]) == 2
    assert "best of both" not in {curve.name for curve in scatter(made["plans"], []).curves}


def test_labels_cover_neither_each_other_nor_the_edge():
    plans = documents.document()["plans"]
    near = [{**plans[0], "target": f"{'target' * k}{k}"} for k in range(1, 5)]
    plot = scatter(near, []).plot(370, 260)
    assert len(plot.labels) == 4
    for k, one in enumerate(plot.labels):
        assert plot.left <= one.x <= plot.right
        assert all(abs(one.y - other.y) >= 13 for other in plot.labels[:k])
