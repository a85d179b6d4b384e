"""A Flax Linen module with batch norm and dropout. Flax is installed with chipwise.

chipwise train examples/my_linen.py:recipe --simulate 8
chipwise plan examples/my_linen.py:recipe --on v5e-8,t4
"""

from flax import linen

import chipwise as cw


class Net(linen.Module):
    dropout: float = 0.2

    @linen.compact
    def __call__(self, x, train):
        x = linen.relu(linen.BatchNorm(not train, momentum=0.9)(linen.Conv(16, (3, 3))(x)))
        x = linen.max_pool(x, (2, 2), (2, 2))
        x = linen.relu(linen.BatchNorm(not train, momentum=0.9)(linen.Conv(32, (3, 3))(x)))
        return linen.Dense(10)(linen.Dropout(self.dropout, deterministic=not train)(x.reshape(len(x), -1)))


def recipe(dropout: float = 0.2):
    data = cw.datasets.digits()
    task = cw.linen.task(
        Net(dropout), cw.losses.softmax_cross_entropy, train=data.train, eval=data.eval,
        inputs=lambda batch: batch["image"].reshape(-1, 8, 8, 1) / 16,
        metrics={"accuracy": cw.losses.correct},
    )  # fmt: skip
    optimizer = cw.sgd(lr=cw.one_cycle(0.1), momentum=0.9, weight_decay=5e-4)
    return cw.Recipe(name="my-linen", task=task, batch=64, replicas=8, duration="10ep", optimizer=optimizer)


if __name__ == "__main__":
    result = cw.fit(recipe())  # Net().apply({"params": result.params, **result.state}, images, train=False)
    print(f"accuracy {result.metrics['eval/accuracy']:.3f}  fingerprint {result.fingerprint[:16]}")
