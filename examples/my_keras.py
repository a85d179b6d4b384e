"""A Keras model with batch norm and dropout; Keras runs on JAX here.

pip install -e '.[keras]'
chipwise train examples/my_keras.py:recipe --simulate 8
chipwise plan examples/my_keras.py:recipe --on v5e-8,t4
python examples/my_keras.py    # trains, and writes the weights into a model
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
from keras import layers

import chipwise as cw


def net(dropout=0.2):
    return keras.Sequential([
        keras.Input((8, 8, 1)),
        layers.Conv2D(16, 3, padding="same"), layers.BatchNormalization(momentum=0.9), layers.ReLU(),
        layers.MaxPooling2D(2),
        layers.Conv2D(32, 3, padding="same"), layers.BatchNormalization(momentum=0.9), layers.ReLU(),
        layers.Flatten(), layers.Dropout(dropout), layers.Dense(10),
    ])  # fmt: skip


def recipe(dropout: float = 0.2):
    data = cw.datasets.digits()
    keras.utils.set_random_seed(0)  # of the initial weights: they are the model's
    task = cw.keras.task(
        net(dropout), keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        train=data.train, eval=data.eval, metrics={"accuracy": cw.losses.correct},
        inputs=lambda batch: batch["image"].reshape(-1, 8, 8, 1) / 16,
    )  # fmt: skip
    optimizer = cw.sgd(lr=cw.one_cycle(0.1), momentum=0.9, weight_decay=5e-4)
    return cw.Recipe(name="my-keras", task=task, batch=64, replicas=8, duration="10ep", optimizer=optimizer)


if __name__ == "__main__":
    result = cw.fit(recipe())
    model = result.to_keras(net())  # ready for model.save
    print(f"accuracy {result.metrics['eval/accuracy']:.3f}  fingerprint {result.fingerprint[:16]}")
