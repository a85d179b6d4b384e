"""The head of pretrained weights is joined to the classes of a task by name, from wherever it comes."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
from chipwise.base.errors import RecipeError
from chipwise.data import Renamed
from chipwise.deploy.huggingface import classes_in
from chipwise.deploy.model import Trained
from named_classes import ONE, THINGS, every_pair, parts, recipe, source
from refusals import refused

os.environ.setdefault("KERAS_BACKEND", "jax")
KNOWN = ("ant", "bee", "cat")
OWN = ("cat", "ant", "bee")


def perfect(known):
    """A model that is right about the classes `known`."""
    made = recipe(source(known))
    return Trained(made, *made.task.init(None))


def of_arrays(known, tmp_path):
    return cw.pretrained({"w": perfect(known).params["w"]}, classes=known)


def of_a_run(known, tmp_path):
    cw.fit(perfect(known).recipe, tmp_path / "run", on=ONE, progress="none")
    return cw.pretrained(tmp_path / "run")


def of_a_file(known, tmp_path):
    pytest.importorskip("safetensors")
    return cw.pretrained(cw.export(perfect(known), "safetensors", tmp_path / "w.safetensors").file)


def as_read(task):
    return [fact.code for fact in task.weights_read]


@every_pair
@pytest.mark.parametrize("door", [of_arrays, of_a_run, of_a_file])
def test_a_head_of_other_weights(door, known, own, missing, tmp_path):
    known, own, missing = parts(known, own, missing)
    weights, mine = door(known, tmp_path), recipe(source(own))
    if len(known or KNOWN) != len(own or KNOWN):
        with refused(RecipeError, "weights-of-another-model", other=1):
            weights.start(mine.task)
        return
    if missing:
        with refused(RecipeError, "head-of-other-classes", classes=missing, fresh=("w",)):
            weights.start(mine.task)
        return
    task = weights.start(mine.task)
    begun = Trained(dataclasses.replace(mine, task=task), *task.init(jax.random.key(0)))
    assert cw.evaluate(begun, source(own), on=ONE)["accuracy"] == 1
    told = ["head-by-number"] if not (known and own) else ["head-joined"] if known != own else []
    assert as_read(task) == told


def plain(axis, apply=lambda y: y, bias=True, width=3):
    """A net of three layers, `width` as there are classes, with the classes of the last one on `axis`."""

    def init(key):
        a, b, c = jax.random.split(key, 3)
        made = {"first": jax.random.normal(a, (5, width)), "second": jax.random.normal(b, (width, width))}
        head = {"w": jax.random.normal(c, (width, 3) if axis else (3, width))}
        head |= {"b": jnp.arange(3.0)} if bias else {}
        return {**made, "head": head}, {}

    def predict(params, state, batch):
        h = jnp.tanh(batch["x"] @ params["first"]) @ params["second"]
        w = params["head"]["w"] if axis else params["head"]["w"].T
        y = h @ w
        return apply(y + params["head"]["b"][None] if bias else y)

    return cw.Task(
        init=init, predict=predict, loss=lambda *given: None, classes=3,
        train=cw.Arrays(x=np.zeros((3, 5), np.float32), label=np.arange(3)),
    )  # fmt: skip


def of_torch():
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchax")
    layers = torch.nn.Linear(5, 3), torch.nn.Tanh(), torch.nn.Linear(3, 3)
    data = cw.Arrays(x=np.zeros((3, 5), np.float32), label=np.arange(3))
    return cw.torch.task(torch.nn.Sequential(*layers), torch.nn.CrossEntropyLoss(), train=data, classes=3)


def of_nnx():
    from flax import nnx

    def net(rngs):
        return nnx.Sequential(nnx.Linear(5, 3, rngs=rngs), jnp.tanh, nnx.Linear(3, 3, rngs=rngs))

    data = cw.Arrays(x=np.zeros((3, 5), np.float32), label=np.arange(3))
    return cw.nnx.task(net, cw.losses.softmax_cross_entropy, train=data, classes=3)


def of_equinox():
    eqx = pytest.importorskip("equinox")
    data = cw.Arrays(x=np.zeros((3, 5), np.float32), label=np.arange(3))
    net = eqx.nn.MLP(5, 3, 3, 2, key=jax.random.key(0))
    return cw.equinox.task(net, cw.losses.softmax_cross_entropy, train=data, classes=3)


def of_keras():
    keras = pytest.importorskip("keras")
    layers = [keras.Input((5,)), keras.layers.Dense(4), keras.layers.Dense(3, name="head")]
    data = cw.Arrays(x=np.zeros((3, 5), np.float32), label=np.arange(3))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return cw.keras.task(keras.Sequential(layers), loss, train=data, classes=3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: plain(1),
        lambda: plain(0),
        lambda: plain(1, bias=False),
        lambda: plain(1, jax.nn.softmax),
        lambda: plain(0, jax.nn.log_softmax),
        lambda: plain(1, jax.nn.sigmoid),
        of_torch,
        of_nnx,
        of_equinox,
        of_keras,
    ],
    ids=["rows", "columns", "alone", "softmax", "log_softmax", "sigmoid", "torch", "nnx", "equinox", "keras"],
)
def test_the_head_among_layers_of_one_width(make):
    """The outputs of the task are those of the weights, each under the name that it has there."""
    task = make()
    given = jax.tree.map(np.asarray, task.init(jax.random.key(1)))
    mine = dataclasses.replace(task, train=Renamed(task.train, OWN))
    weights = cw.pretrained(dict(zip(("params", "state"), given, strict=True)), classes=KNOWN)
    batch = {
        name: np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32) for name in task.train.spec
    }
    batch.pop("label")
    begun = weights.start(mine)
    there, here = (task.predict(*values, batch) for values in (given, begun.init(jax.random.key(2))))
    order = [KNOWN.index(name) for name in OWN]
    np.testing.assert_allclose(here, np.asarray(there)[:, order], rtol=1e-5, atol=1e-6)
    assert not np.allclose(here, there) and as_read(begun) == ["head-joined"]


def unpredicting():
    return dataclasses.replace(plain(1, width=4), predict=None)


def with_an_order():
    """Outputs that depend on the numbers of classes."""
    task = plain(1, width=4)

    def predict(params, state, batch):
        return jnp.cumsum(task.predict(params, state, batch), axis=1)

    return dataclasses.replace(task, predict=predict)


@pytest.mark.parametrize("make", [with_an_order, unpredicting])
def test_a_head_that_cannot_be_found_is_refused_in_another_order(make):
    task = make()
    given = dict(
        zip(("params", "state"), jax.tree.map(np.asarray, task.init(jax.random.key(1))), strict=True)
    )
    mine = dataclasses.replace(task, train=Renamed(task.train, OWN))
    with refused(RecipeError, "head-in-another-order", classes=OWN, theirs=KNOWN) as caught:
        cw.pretrained(given, classes=KNOWN).start(mine)
    fresh = caught.value.facts["fresh"]
    assert cw.pretrained(given, classes=KNOWN).start(mine, fresh=fresh).weights_read == ()
    assert as_read(cw.pretrained(given).start(mine)) == ["head-by-number"]
    assert as_read(cw.pretrained(given, classes=OWN).start(mine)) == []


@pytest.mark.parametrize("named", ["weights", "task"])
def test_no_model_is_made_where_one_side_states_no_names(named):
    task, made = plain(1), []

    def init(key):
        made.append(isinstance(key, jax.core.Tracer))
        return task.init(key)

    given = dict(
        zip(("params", "state"), jax.tree.map(np.asarray, task.init(jax.random.key(1))), strict=True)
    )
    mine = dataclasses.replace(task, init=init)
    if named == "task":
        mine = dataclasses.replace(mine, train=Renamed(task.train, OWN))
    begun = cw.pretrained(given, classes=KNOWN if named == "weights" else ()).start(mine)
    assert as_read(begun) == ["head-by-number"] and made and all(made)


def test_what_is_no_head_of_classes_is_left_alone():
    """A new head, outputs of another number, and arrays that happen to be as wide."""
    task = dataclasses.replace(plain(1), train=Renamed(plain(1).train, OWN))
    given = dict(
        zip(("params", "state"), jax.tree.map(np.asarray, task.init(jax.random.key(1))), strict=True)
    )
    for classes in (KNOWN, ()):
        weights = cw.pretrained(given, classes=classes)
        assert weights.start(task, fresh=("head/*",)).weights_read == ()
        wide = dataclasses.replace(
            task, classes=None, predict=lambda p, s, b: jnp.tile(task.predict(p, s, b), (1, 2))
        )
        assert weights.start(wide).weights_read == ()


def test_the_optimizer_is_not_joined(tmp_path):
    made = perfect(KNOWN)
    cw.fit(made.recipe, tmp_path / "run", on=ONE, progress="none")
    weights = cw.pretrained(tmp_path / "run", optimizer=True)
    assert weights.start(recipe(source(KNOWN)).task).start_state
    with refused(RecipeError, "weights-optimizer-of-some"):
        weights.start(recipe(source(OWN)).task)


ODD = [{"1": "ant", "2": "bee"}, ["ant", "bee"], {"0": "ant", "2": "bee"}, {"a": "ant"}, "ant", 2]


@pytest.mark.parametrize(
    ("stated", "names"),
    [
        ({"0": "cat", "1": "ant"}, ("cat", "ant")),
        ({"1": "ant", "0": "cat"}, ("cat", "ant")),
        ({"0": "LABEL_0", "1": "LABEL_1"}, ()),
        ({}, ()),
        (None, ()),
        *((odd, ()) for odd in ODD),
    ],
)
def test_classes_of_a_config(stated, names):
    assert classes_in({} if stated is None else {"id2label": stated}) == names


@pytest.mark.parametrize("classes", [(), ("ant", "bee")])
@pytest.mark.parametrize("stated", ODD, ids=str)
def test_weights_whose_config_numbers_its_classes_otherwise(stated, classes, tmp_path):
    """These arrays are whole."""
    numpy = pytest.importorskip("safetensors.numpy")
    numpy.save_file({"x.weight": np.zeros((2, 2), np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "id2label": stated}))
    assert cw.pretrained(tmp_path, classes=classes).classes == classes


def test_a_run_says_and_stores_how_its_head_was_read(tmp_path, capfd):
    for known, code in ((KNOWN, "head-joined"), ((), "head-by-number")):
        mine = recipe(source(OWN))
        task = of_arrays(known, tmp_path).start(mine.task)
        run = tmp_path / code
        cw.fit(dataclasses.replace(mine, task=task), run, progress="lines", on=ONE)
        said = "".join(capfd.readouterr())
        assert 0 < said.index(str(task.weights_read[0])) < said.index("step 1/1")
        stored = json.loads((run / "recipe.json").read_text())["readings"]
        assert [one["code"] for one in stored] == [code]
        # Resumed, and read again
        assert cw.result(run, dataclasses.replace(mine, task=task)).steps == 1


@every_pair
def test_a_result_read_with_the_recipe_of_other_data(known, own, missing):
    """The model knows the classes of its training, whatever data the given recipe has."""
    known, own, _ = parts(known, own, missing)
    if not known or len(known) != len(own or known):
        return
    result = cw.fit(perfect(known).recipe, on=ONE, progress="none")
    other = recipe(source(own or known))
    for data in (source(known), source(known[::-1])):
        assert cw.predict(result, data, recipe=other, on=ONE).accuracy == 1
        assert cw.evaluate(result, data, recipe=other, on=ONE)["accuracy"] == 1


def test_predicting_says_that_labels_count_by_number():
    said = []
    cw.predict(perfect(KNOWN), source(()), on=ONE, say=said.append)
    assert "labels-by-number" in [fact.code for fact in said]
    assert THINGS[:3] == KNOWN
