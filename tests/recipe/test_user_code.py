"""Errors of functions that users write name the line, the columns and the whole reason."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
import tasks
from chipwise.recipe.task import finished
from chipwise.recipe.user_code import line_of
from refusals import refused


def branches(params, state, batch, key, train):
    if batch["x"].sum() > 0:
        return tasks.loss(params, state, batch, key, train)
    return {}, state


def misshapen(params, state, batch, key, train):
    return {"loss": cw.Sum.of(batch["x"].astype(jnp.float32) @ jnp.ones((3, 2)))}, state


def misspelt(example, key):
    return {**example, "x": example["xs"]}


def line(function, offset):
    return f" at test_user_code.py:{function.__code__.co_firstlineno + offset}"


@pytest.mark.parametrize(
    ("changes", "code", "facts"),
    [
        ({"loss": branches}, "task-decides-by-value", {"what": "Task.loss", "where": line(branches, 1)}),
        ({"loss": misshapen}, "task-fails", {"error": "TypeError", "where": line(misshapen, 1)}),
        (
            {"augment": misspelt},
            "task-column",
            {"column": "xs", "columns": ["label", "x"], "near": "x", "where": line(misspelt, 1)},
        ),
    ],
)
def test_a_function_that_fails_names_its_line(changes, code, facts):
    with refused(cw.errors.RecipeError, code, **facts) as caught:
        cw.fit(tasks.recipe(task=tasks.task(**changes)), on=cw.On(devices=1), run=None, progress="none")
    assert caught.value.__cause__ is not None


def test_an_init_and_a_door_that_fail():
    def init(key):
        return {"w": jnp.zeros(3)["v"]}, {}

    with refused(cw.errors.RecipeError, "task-fails", what="Task.init", where=line(init, 1)):
        cw.fit(tasks.recipe(task=tasks.task(init=init)), on=cw.On(devices=1), run=None, progress="none")
    from flax import nnx

    def loss(outputs, target):
        return cw.losses.softmax_cross_entropy(outputs, target) if outputs.sum() > 0 else 0.0

    data = cw.Arrays(x=np.ones((8, 4), np.float32), label=np.zeros(8, np.int32))
    task = cw.nnx.task(lambda rngs: nnx.Linear(4, 3, rngs=rngs), loss, train=data, inputs="x")
    params, state = task.init(jax.random.key(0))
    with refused(
        cw.errors.RecipeError, "task-decides-by-value", what="The loss of Linear", where=line(loss, 1)
    ):
        jax.eval_shape(lambda batch: task.loss(params, state, batch, None, True), data.columns)


def beyond(first, second):
    return first[:, 7:][:, 0] + second


def test_a_finish_that_fails_names_its_line():
    sums = {"third": cw.Sum(np.zeros((2, 2)), np.float32(3), beyond)}
    with refused(cw.errors.RecipeError, "finish-failed", metric="third", where=line(beyond, 1)):
        finished(sums)
    sums = {"third": cw.Sum(np.zeros(2), np.float32(3), lambda total, count: {"a": total})}
    with refused(cw.errors.RecipeError, "finish-failed", where=""):
        finished(sums)


@pytest.mark.parametrize(
    ("part", "code"), [("forward", "adapter-call-fails"), ("loss", "adapter-loss-fails")]
)
def test_a_part_of_pytorch_that_fails_names_its_line(part, code):
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchax")

    class Module(torch.nn.Linear):
        def forward(self, x):
            return beyond(x, x) if part == "forward" else super().forward(x)

    rows = cw.Arrays(x=np.zeros((8, 4), np.float32), label=np.zeros(8, np.int32))
    with refused(cw.errors.RecipeError, code, where=line(beyond, 1)):
        cw.torch.task(Module(4, 3), beyond, train=rows)


def test_a_line_of_nobodys():
    assert line_of(RuntimeError("never raised")) is None
