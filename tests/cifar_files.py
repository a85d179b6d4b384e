"""CIFAR's own files, made small: what they are known by is taken from them."""

import hashlib
import pickle
import tarfile

import numpy as np

from chipwise.data import originals


def batch(n, seed, classes=10):
    """Pixels `(n, 3, 32, 32)` and labels."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, 3, 32, 32), dtype=np.uint8), rng.integers(0, classes, n).tolist()


def pickled(n, seed, protocol=4, classes=10):
    pixels, labels = batch(n, seed, classes)
    key = originals.CIFAR[classes].label.encode()
    return pickle.dumps({b"data": pixels.reshape(n, -1), key: labels, b"filenames": [b"a"] * n}, protocol)


def write(folder, monkeypatch, count=lambda seed: seed + 1, classes=10):
    """Writes the batches, and makes them the published ones."""
    known = originals.CIFAR[classes]
    folder = folder / known.folder
    folder.mkdir(parents=True)
    digests = {}
    for seed, name in enumerate(known.batches):
        data = pickled(count(seed), seed, classes=classes)
        (folder / name).write_bytes(data)
        digests[name] = hashlib.md5(data, usedforsecurity=False).hexdigest()
    monkeypatch.setitem(originals.CIFAR, classes, known._replace(batches=digests))
    return folder


def archived(folder, path, monkeypatch, classes=10):
    """The batches of `folder` in an archive, which becomes the published one."""
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        archive.add(folder, folder.name)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setitem(originals.CIFAR, classes, originals.CIFAR[classes]._replace(sha256=sha256))
    return path
