"""What results show in a notebook: nothing that a notebook strips, and nothing of a name that would run."""

import math
import xml.etree.ElementTree as ET

import pytest

import chipwise as cw
import tasks
from chipwise.explain import display
from chipwise.explain.charts import metric_panels
from chipwise.explain.page import fragment
from chipwise.planner.plans import Plans
from chipwise.run.folder.result import Result
from planner import documents


def parsed(text):
    """As XML, which knows of no unclosed tag; no script, link or style sheet in it."""
    tree = ET.fromstring(f"<div>{text}</div>")
    tags = {element.tag.rpartition("}")[2] for element in tree.iter()}
    assert not tags & {"script", "style", "link", "iframe", "img"}
    assert not any(name.startswith("on") for element in tree.iter() for name in element.attrib)
    return tree, tags


@pytest.mark.slow
def test_a_result_shows_its_curves_and_what_it_came_to(tmp_path):
    result = cw.fit(tasks.quick(), on=cw.On(devices=1), progress="none", run=tmp_path / "run")
    tree, tags = parsed(result._repr_html_())
    text = "".join(tree.itertext())
    assert {"svg", "path", "table"} <= tags and result.fingerprint in text
    assert f"{result.metrics['train/loss']:.4g}" in text
    told = cw.report(tmp_path / "run")
    assert told["kind"] == "run" and "svg" in parsed(told._repr_html_())[1]


def test_curves_are_the_floats_of_the_history(monkeypatch):
    """Also those that are not finite, where a curve breaks, and no counts."""
    drawn = {}
    monkeypatch.setattr(display, "metric_panels", lambda curves: drawn.update(curves) or [])
    history = [
        {"step": 1, "train/loss": 0.5, "train/count": 3},
        {"step": 2, "train/loss": math.inf, "seconds": 1.0},
    ]
    result = object.__new__(Result)
    given = {"history": history, "metrics": {}, "recipe": "r", "steps": 2, "fingerprint": "f", "kept": None}
    for name, value in (given | {"examples_per_second": None}).items():
        object.__setattr__(result, name, value)
    display.shown(result)
    assert drawn == {"train/loss": [(1, 0.5), (2, math.inf)]}


def test_plans_show_their_table():
    plans = Plans(documents.plans())
    tree, _ = parsed(plans._repr_html_())
    text = "".join(tree.itertext())
    assert all(plan.target in text for plan in plans) and display.shown(Plans([])).text == ""
    assert plans[0].target in plans[0]._repr_html_()


@pytest.mark.slow
def test_answers_show_tables_and_pictures_and_not_reprs(tmp_path):
    """Of `find_lr`, `transfer`, `check` and `sweep`, printed and in a notebook."""
    recipe, one = tasks.quick(duration="4st"), cw.On(devices=1)
    rates = cw.find_lr(recipe, steps=12, on=one, progress="none")
    study = cw.sweep(
        recipe, {"batch": ["24", "48"]}, seeds=(0, 1), run=tmp_path / "study", on=one, progress="none"
    )
    answers = {
        "suggestion": rates,
        "why": cw.transfer(recipe, batch=48),
        "given": cw.check(tasks.quick(optimizer=cw.sgd(lr=30.0))),
        "baseline": study,
    }
    for heading, answer in answers.items():
        tree, tags = parsed(answer._repr_html_())
        text = "".join(tree.itertext())
        assert "table" in tags and heading in text and heading in str(answer)
        assert type(answer).__name__ not in text and type(answer).__name__ not in str(answer)
    for answer in (rates, study):
        assert "svg" in parsed(answer._repr_html_())[1]
    assert "No doubts" in str(cw.check(tasks.quick(eval_block=1, optimizer=cw.sgd(lr=0.1), replicas=1)))


def test_names_of_others_are_text():
    hostile = "<script>alert(1)</script>"
    drawn = metric_panels({f"train/{hostile}": [(1, 2.0), (2, 1.0)]})
    tree, _ = parsed(fragment([hostile, *drawn]))
    assert hostile in "".join(tree.itertext())
