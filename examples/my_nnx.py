"""A Flax NNX module with batch norm and dropout. Flax is installed with chipwise.

chipwise train examples/my_nnx.py:recipe --simulate 8
chipwise plan examples/my_nnx.py:recipe --on v5e-8,t4
"""

from flax import nnx

import chipwise as cw


class Net(nnx.Module):
    def __init__(self, rngs, dropout=0.2):
        self.conv1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.drop, self.head = nnx.Dropout(dropout, rngs=rngs), nnx.Linear(512, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.max_pool(nnx.relu(self.norm1(self.conv1(x))), (2, 2), (2, 2))
        x = nnx.relu(self.norm2(self.conv2(x)))
        return self.head(self.drop(x.reshape(len(x), -1)))


def recipe(dropout: float = 0.2):
    data = cw.datasets.digits()
    task = cw.nnx.task(
        lambda rngs: Net(rngs, dropout), cw.losses.softmax_cross_entropy, train=data.train, eval=data.eval,
        inputs=lambda batch: batch["image"].reshape(-1, 8, 8, 1) / 16,
        metrics={"accuracy": cw.losses.correct},
    )  # fmt: skip
    optimizer = cw.sgd(lr=cw.one_cycle(0.1), momentum=0.9, weight_decay=5e-4)
    return cw.Recipe(name="my-nnx", task=task, batch=64, replicas=8, duration="10ep", optimizer=optimizer)


if __name__ == "__main__":
    result = cw.fit(recipe())
    print(f"accuracy {result.metrics['eval/accuracy']:.3f}  fingerprint {result.fingerprint[:16]}")
