"""`inputs=` and `target=` of what is not there, or that fail, end in one error, in every framework."""

import os

import jax
import numpy as np
import pytest

import chipwise as cw
from chipwise.base.errors import RecipeError
from refusals import refused

os.environ.setdefault("KERAS_BACKEND", "jax")
DATA = cw.Arrays(x=np.zeros((16, 5), np.float32), label=np.arange(16) % 3, classes=3)


def nnx(loss=cw.losses.softmax_cross_entropy, train=DATA, **columns):
    from flax import nnx

    def net(rngs):
        return nnx.Linear(5, 3, rngs=rngs)

    return cw.nnx.task(net, loss, train=train, **columns)


def linen(loss=cw.losses.softmax_cross_entropy, train=DATA, **columns):
    from flax import linen

    return cw.linen.task(linen.Dense(3), loss, train=train, **columns)


def equinox(loss=cw.losses.softmax_cross_entropy, train=DATA, **columns):
    eqx = pytest.importorskip("equinox")
    net = eqx.nn.Linear(5, 3, key=jax.random.key(0))
    return cw.equinox.task(net, loss, train=train, **columns)


def torch(loss=None, train=DATA, **columns):
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchax")
    loss = loss or torch.nn.CrossEntropyLoss()
    return cw.torch.task(torch.nn.Linear(5, 3), loss, train=train, **columns)


def keras(loss=None, train=DATA, **columns):
    keras = pytest.importorskip("keras")
    loss = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
    return cw.keras.task(model, loss, train=train, **columns)


def trained(task, **more):
    recipe = cw.Recipe(task=task, batch=8, replicas=1, duration="1st", optimizer=cw.sgd(lr=0.1), **more)
    return cw.fit(recipe, on=cw.On(devices=1), progress="none")


def own(batch):
    return {}["x"]


CASES = {
    "a name": ({"inputs": "z"}, "adapter-column", {"column": "z"}),
    "one of several names": ({"inputs": ["x", "z"]}, "adapter-column", {"column": "z"}),
    "a name for an argument": ({"inputs": {"x": "z"}}, "adapter-column", {"column": "z"}),
    "names in a list": ({"inputs": [["x"]]}, "adapter-column", {"column": "['x']"}),
    "a list for an argument": ({"inputs": {"x": ["x"]}}, "adapter-column", {"column": "['x']"}),
    "a number": ({"inputs": (0,)}, "adapter-column", {"column": "0"}),
    "no names": ({"inputs": {}}, "adapter-no-inputs", {}),
    "arguments without names": ({"inputs": {0: "x"}}, "adapter-argument-names", {"inputs": [0]}),
    "a key": ({"inputs": lambda batch: batch["z"]}, "adapter-column", {"column": "z"}),
    "a position": ({"inputs": lambda batch: batch[0]}, "adapter-column", {"column": "0"}),
    "an attribute": ({"inputs": lambda batch: batch.x}, "task-fails", {"what": "inputs="}),
    "a key of something else": ({"inputs": own}, "task-fails", {"error": "KeyError", "reason": "'x'"}),
    "another type": ({"inputs": lambda batch: batch["x"] + "a"}, "task-fails", {"error": "TypeError"}),
    "no argument": ({"inputs": lambda: None}, "task-fails", {"what": "inputs="}),
    "numpy": ({"inputs": lambda batch: np.asarray(batch["x"])}, "task-decides-by-value", {}),
    "nothing": ({"inputs": lambda batch: None}, "adapter-returned", {"kind": "NoneType"}),
    "text": ({"inputs": lambda batch: ["x"]}, "adapter-returned", {"kind": "str"}),
    "a set": ({"inputs": lambda batch: {"x"}}, "adapter-returned", {"kind": "set"}),
    "no target": ({"target": "labels"}, "adapter-column", {"column": "labels", "near": "label"}),
    "several targets": ({"target": ("label",)}, "adapter-columns-expected", {"what": "target"}),
    "a target's key": ({"target": lambda batch: batch["z"]}, "adapter-column", {"column": "z"}),
    "a target's attribute": ({"target": lambda batch: batch.label}, "task-fails", {"what": "target="}),
    "a target of nothing": ({"target": lambda batch: None}, "adapter-returned", {"what": "target"}),
    "a target of text": ({"target": lambda batch: "label"}, "adapter-returned", {"kind": "str"}),
}


EVERY = pytest.mark.parametrize(
    "make",
    [
        nnx,
        linen,
        *(
            pytest.param(make, marks=[pytest.mark.slow, pytest.mark.drawn(share=0.25)])
            for make in (equinox, torch, keras)
        ),
    ],
)


@EVERY
@pytest.mark.parametrize(("columns", "code", "facts"), CASES.values(), ids=CASES)
def test_columns_that_are_not_there(make, columns, code, facts):
    with refused(RecipeError, code, **facts) as caught:
        trained(make(**columns))
    if code == "task-fails" and facts.get("error"):
        assert "test_columns.py" in caught.value.facts["where"]


def doubled(example, key):
    return {**example, "twice": example["label"] % 3}


def halved(batch, key):
    return {**batch, "twice": batch["label"] % 3}


@EVERY
@pytest.mark.parametrize("more", [{"augment": doubled}, {"mix": halved}], ids=["augment", "mix"])
@pytest.mark.parametrize("target", ["twice", lambda batch: batch["twice"]], ids=["named", "computed"])
def test_a_target_made_by_augment_or_mix(make, more, target):
    metrics = ["accuracy"] if make is keras else {"accuracy": cw.losses.correct}
    assert trained(make(inputs="x", target=target, metrics=metrics, **more)).steps == 1


def scaled(outputs, target):
    """A loss that reads only how much its target has."""
    return (1 + len(jax.tree.leaves(target))) * (outputs**2).sum(1)


@pytest.mark.parametrize(
    "make", [nnx, linen, *(pytest.param(one, marks=pytest.mark.slow) for one in (equinox, torch))]
)
@pytest.mark.parametrize(
    "target",
    [
        lambda batch: (batch["label"], 0.5),
        lambda batch: {"from": batch["label"], "to": 2},
        lambda batch: 3,
        lambda batch: {},
        lambda batch: (),
        lambda batch: (batch["label"], None),
    ],
    ids=["a number beside", "a number by name", "a number", "a dict", "a tuple", "nothing beside"],
)
def test_a_target_of_numbers_or_of_nothing(make, target):
    assert trained(make(scaled, inputs="x", target=target)).steps == 1
    with refused(RecipeError, "adapter-returned", what="inputs"):
        make(scaled, inputs=lambda batch: (batch["x"], 0.5))


@EVERY
@pytest.mark.parametrize("place", ["augment", "mix"])
def test_an_augment_or_mix_that_fails_is_named(make, place):
    with refused(RecipeError, "task-column", what=f"Task.{place}", near="label"):
        trained(make(**{place: lambda batch, key: {**batch, "label": batch["labels"]}}))


@pytest.mark.parametrize("inputs", [("x", "label"), {"inputs": "x", "kind": "label"}])
def test_a_label_is_no_input_of_a_prediction(inputs):
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(5, 3, rngs=rngs)

        def __call__(self, inputs, kind):
            return self.layer(inputs) + kind[:, None]

    with refused(RecipeError, "adapter-label-input", model="Net"):
        cw.nnx.task(lambda rngs: Net(rngs), cw.losses.softmax_cross_entropy, train=DATA, inputs=inputs)


@pytest.mark.parametrize("columns", [["z"], ["x", "z"], ["label"]])
def test_columns_to_pad_that_are_not_there_or_have_no_length(columns):
    with refused(RecipeError, "padded-column", name=columns[-1]):
        cw.data.Padded(DATA, 8, columns)[0]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["y", lambda batch: batch["y"]], ids=["name", "function"])
@pytest.mark.parametrize("make", [nnx, linen, equinox, torch, keras])
def test_in_half_precision_a_target_keeps_its_digits(make, target):
    columns = {"x": np.ones((16, 5), np.float32), "y": np.full((16, 3), 1234.5, np.float32)}
    data, kinds = cw.Arrays(**columns), set()

    def there(outputs, target):
        kinds.add(str(outputs.dtype))
        return target.mean(axis=1)

    losses = {torch: lambda y, t: (y - t).square().mean(), keras: "mse"}
    loss = losses.get(make, cw.losses.squared_error)
    more = {"train": data, "eval": data, "inputs": "x", "target": target, "metrics": {"there": there}}
    result = trained(make(loss, better={"there": "higher"}, **more), precision="bf16")
    assert result.metrics["train/there"] == result.metrics["eval/there"] == 1234.5
    assert "bfloat16" in kinds or make is keras  # whose layers cast what they are given to float32
