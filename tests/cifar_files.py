"""CIFAR's own files, made small: what they are known by is taken from them."""

import hashlib
import pickle
import tarfile

import numpy as np

from chipwise.data import originals


def batch(n, seed):
    """Pixels `(n, 3, 32, 32)` and labels."""
    rng = np.random.default_rng(seed)
    some = rng.integers(0, 256, (min(n, 8), 3, 32, 32), dtype=np.uint8)  # again and again: quickly compressed
    return np.resize(some, (n, *some.shape[1:])), rng.integers(0, 10, n).tolist()


def pickled(n, seed, protocol=4):
    pixels, labels = batch(n, seed)
    columns = {b"data": pixels.reshape(n, -1), b"labels": labels, b"filenames": [b"a"] * n}
    return pickle.dumps(columns, protocol)


def write(folder, monkeypatch, count=lambda seed: seed + 1):
    """Writes the batches, and makes them the published ones."""
    folder = folder / originals.CIFAR_FOLDER
    folder.mkdir(parents=True)
    for seed, name in enumerate(originals.CIFAR_BATCHES):
        data = pickled(count(seed), seed)
        (folder / name).write_bytes(data)
        digest = hashlib.md5(data, usedforsecurity=False).hexdigest()
        monkeypatch.setitem(originals.CIFAR_BATCHES, name, digest)
    return folder


def archived(folder, path, monkeypatch):
    """The batches of `folder` in an archive, which becomes the published one."""
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        archive.add(folder, folder.name)
    monkeypatch.setattr(originals, "CIFAR_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path
