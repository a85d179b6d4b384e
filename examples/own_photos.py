"""Trains a ResNet on your own photographs, packed once and augmented on the device.

    chipwise pack PHOTOS photos-224 --size 224 --split 0.1    # PHOTOS/<class>/<file>
    chipwise train examples/own_photos.py:recipe --data photos-224
    chipwise plan examples/own_photos.py:recipe --data photos-224 --on t4,v3-8

The pack provides the classes, their number, and the pixels' mean and deviation.
"""

import jax.numpy as jnp

import chipwise as cw
from chipwise.models import ResNet50


def recipe(data: str, width: int = 16, blocks: tuple = (1, 1, 1, 1)):
    """`data`: a pack with the splits train and eval; `width=64` and `blocks=3,4,6,3` give ResNet-50."""
    train, held_out = (cw.PackedFolder(data, split) for split in ("train", "eval"))
    size = min(train.spec["image"].shape[:2]) * 7 // 8
    mean, std = (jnp.asarray(values, jnp.float32).reshape(1, 1, 1, -1) for values in (train.mean, train.std))
    init, apply = cw.nnx.functional(
        lambda rngs: ResNet50(blocks=blocks, width=width, classes=train.classes, rngs=rngs)
    )

    def loss(params, state, batch, key, train):
        images = batch["image"] if train else cw.augment.centre(batch["image"], size)
        logits, state = apply(params, state, (images.astype(jnp.float32) - mean) / std, key, train)
        values = cw.losses.softmax_cross_entropy(logits, batch["label"], smoothing=0.1 if train else 0.0)
        return {"loss": cw.Sum.of(values), "accuracy": cw.metrics.accuracy(logits, batch["label"])}, state

    task = cw.Task(
        init=init,
        loss=loss,
        train=train,
        eval=held_out,
        augment=cw.augment.imagenet(size),
        classes=train.classes,
    )
    optimizer = cw.sgd(lr=cw.one_cycle(0.1, warmup="20%"), momentum=0.9, nesterov=True, weight_decay=5e-4)
    return cw.Recipe(name="own-photos", task=task, batch=64, replicas=8, duration="30ep", optimizer=optimizer)
