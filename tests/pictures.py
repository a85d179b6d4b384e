"""Small folders of images for tests."""

import io

import numpy as np
from PIL import Image


def smooth(seed=0, size=(16, 24)):
    """An image that JPEG keeps to a few levels."""
    y, x = np.mgrid[: size[0], : size[1]]
    return np.stack([x * 2 + 2 * (seed % 30), y * 2 + 50, np.full(size, 100 + seed % 150)], -1).astype(
        np.uint8
    )


def encoded(pixels, kind="JPEG", mode="RGB", **options):
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, kind, **options)
    return buffer.getvalue()


def write(root, per_class=3, size=(16, 24), kind="JPEG", classes=("cat", "ant", "bee")):
    """`root/<class>/<number>.<kind>`; returns `root`."""
    for c, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(per_class):
            (root / name / f"{i:03}.{kind.lower()}").write_bytes(encoded(smooth(c * 10 + i, size), kind))
    return root


def files(root):
    """Every file below `root`: its name to its bytes."""
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
