"""An Equinox module with batch norm and dropout. It takes one example; `cw.equinox.task` maps it over the
batch.

pip install -e '.[equinox]'
chipwise train examples/my_equinox.py:recipe --simulate 8
chipwise plan examples/my_equinox.py:recipe --on v5e-8,t4
"""

import equinox as eqx
import jax

import chipwise as cw


class Net(eqx.Module):
    convs: list
    norms: list
    drop: eqx.nn.Dropout
    head: eqx.nn.Linear

    def __init__(self, key, dropout=0.2):
        keys = jax.random.split(key, 3)
        self.convs = [eqx.nn.Conv2d(i, o, 3, padding=1, key=keys[int(i > 1)]) for i, o in ((1, 16), (16, 32))]
        self.norms = [eqx.nn.BatchNorm(n, "batch", momentum=0.9, mode="batch") for n in (16, 32)]
        self.drop, self.head = eqx.nn.Dropout(dropout), eqx.nn.Linear(512, 10, key=keys[2])

    def __call__(self, x, state, key):
        x, state = self.norms[0](self.convs[0](x), state)
        x = eqx.nn.MaxPool2d(2, 2)(jax.nn.relu(x))
        x, state = self.norms[1](self.convs[1](x), state)
        return self.head(self.drop(jax.nn.relu(x).reshape(-1), key=key)), state


def recipe(dropout: float = 0.2):
    data = cw.datasets.digits()
    task = cw.equinox.task(
        lambda key: Net(key, dropout), cw.losses.softmax_cross_entropy, train=data.train, eval=data.eval,
        inputs=lambda batch: batch["image"].reshape(-1, 1, 8, 8) / 16,
        metrics={"accuracy": cw.losses.correct},
    )  # fmt: skip
    optimizer = cw.sgd(lr=cw.one_cycle(0.1), momentum=0.9, weight_decay=5e-4)
    return cw.Recipe(name="my-equinox", task=task, batch=64, replicas=8, duration="10ep", optimizer=optimizer)


if __name__ == "__main__":
    result = cw.fit(recipe())
    model, state = result.to_equinox(Net)
    print(f"accuracy {result.metrics['eval/accuracy']:.3f}  fingerprint {result.fingerprint[:16]}")
