"""What computes is compared: between hosts, and between the processes of a run."""

import json

import jax
import pytest

import chipwise as cw
import processes
import tasks
from chipwise.run.session import Session
from refusals import refused

QUIET = {"progress": "none"}


def digest(recipe, **on):
    with Session(recipe, cw.On(**on)) as session:
        return session.programs.digest


def loss(rate):
    def loss(params, state, batch, key, train):  # the same name, whatever it computes
        made, state = tasks.plain_loss(params, state, batch, key, train)
        keep = jax.random.bernoulli(key, 1 - rate).astype("float32")
        return {**made, "loss": cw.Sum(made["loss"].total * keep, made["loss"].count)}, state

    return loss


def recipe(rate=0.5, **changes):
    return tasks.quick(**{"task": tasks.quick_task(loss=loss(rate)), "duration": "6st", **changes})


def test_the_digest_is_of_what_a_recipe_computes_wherever_it_runs():
    one = digest(recipe(), devices=1)
    assert one == digest(recipe(), devices=4) == digest(recipe(seed=9), devices=2, feed="host")
    assert digest(recipe(0.25), devices=1) != one
    assert digest(recipe(optimizer=cw.recipe.sgd(lr=0.1, momentum=0.5)), devices=1) != one


def test_code_that_nobody_reads_is_no_part_of_the_digest():
    def loss(params, state, batch, key, train):
        jax.numpy.square(jax.random.normal(key, (3,))).sum()
        return tasks.plain_loss(params, state, batch, key, train)

    dead, plain = (tasks.quick(task=tasks.quick_task(loss=one)) for one in (loss, tasks.plain_loss))
    assert digest(dead, devices=1) == digest(plain, devices=1)


def test_the_digest_does_not_depend_on_who_holds_the_optimizer():
    made = recipe(optimizer=cw.recipe.adam(lr=0.1))
    assert digest(made, devices=4, shard_optimizer=True) == digest(made, devices=1)


@pytest.mark.slow
def test_the_step_is_traced_once():
    traces = []

    def counted(params, state, batch, key, train):
        traces.append(train)
        return tasks.plain_loss(params, state, batch, key, train)

    def trained(digest):
        traces.clear()
        with Session(tasks.quick(task=tasks.quick_task(loss=counted)), cw.On(devices=2)) as session:
            if digest:
                session.computed()
            session.begin()
            session.compile()
        return len(traces)

    assert trained(True) == trained(False)


@pytest.mark.slow
def test_a_run_goes_on_with_other_programs_only_when_told(tmp_path):
    cw.fit(recipe(), tmp_path, on=cw.On(devices=1), stop_after="2st", **QUIET)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with refused(cw.errors.RunError, "run-of-other-programs") as caught:
        cw.fit(recipe(0.25), tmp_path, on=cw.On(devices=2), **QUIET)
    # A loss is computed by the step and by evaluation.
    assert [name for name, _, _ in caught.value.facts["changes"]] == ["code", "evaluation"]
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    cw.fit(recipe(), tmp_path, on=cw.On(devices=4), stop_after="4st", **QUIET)
    assert cw.fit(recipe(0.25), tmp_path, on=cw.On(devices=1), changed_code=True, **QUIET).steps == 6
    starts = [json.loads(line) for line in (tmp_path / "processes.jsonl").read_text().splitlines()]
    changed = [
        event.get("changed") and event["changed"][0][0] for event in starts if event["event"] == "start"
    ]
    assert changed == [None, None, "code"]


@pytest.mark.slow
def test_a_run_of_another_compiler_says_which(tmp_path):
    cw.fit(recipe(), tmp_path, on=cw.On(devices=1), stop_after="2st", **QUIET)
    file = tmp_path / "processes.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[0]["computed"]["versions"]["jaxlib"] = "0.1"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with refused(cw.errors.RunError, "run-of-other-programs") as caught:
        cw.fit(recipe(), tmp_path, on=cw.On(devices=1), **QUIET)
    assert [(name, old) for name, old, _ in caught.value.facts["changes"]] == [("versions.jaxlib", "0.1")]


@pytest.mark.slow
def test_hosts_whose_losses_differ_behind_one_name_do_not_train():
    program = """
import os, jax
import chipwise as cw, tasks
jax.config.update("jax_cpu_collectives_implementation", "gloo")
rate = 0.5 if os.environ["CHIPWISE_HOST"] == "0" else 0.25
from test_program_digest import recipe
try:
    cw.fit(recipe(rate), progress="none")
except cw.errors.ChipwiseError as error:
    print(error.code, error.facts["host"])
    raise SystemExit(0)
raise SystemExit(9)
"""
    search = processes.os.pathsep.join([processes.search(), str(processes.HERE / "step")])
    ended = processes.ends(processes.start(program, 2, 1, PYTHONPATH=search))
    # Each meets the error and ends as it likes, unless the end of the other one comes first
    assert {code for code, _, _ in ended} <= {0, 4} and "host-differs 1" in ended[0][1], ended
