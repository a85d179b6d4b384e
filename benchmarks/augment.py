"""Measures the cost of augmentation, compiled and in Pillow: microseconds of one core for an image.

python benchmarks/augment.py

Both use one core (one XLA thread, and the process pinned). Processor time is measured, so other work on the
machine has little effect. Compiled: batches of a replica's size on the CPU back end, with random numbers,
without transfer and decoding. Pillow: single images, with random numbers from `random` and the conversion to
an array that a loader needs; the fastest way found, or NumPy's if Pillow has none (mirrored edges). If Pillow
has no equivalent (hue by HSV, lighting), the closest one is measured.
"""

from __future__ import annotations

import math
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ["JAX_PLATFORMS"] = "cpu"
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import jax
import numpy as np
import PIL
from PIL import Image, ImageEnhance, ImageOps
from sklearn.datasets import load_sample_images

import chipwise as cw

A, RUNS = cw.augment, 7
MEAN = (125.31, 122.95, 113.87)
TRACKS = {size: np.pad(np.arange(size), 4, mode="reflect") for size in (32, 224)}
BILINEAR, AFFINE = Image.Resampling.BILINEAR, Image.Transform.AFFINE


def crop(image: Image.Image) -> Image.Image:
    size = image.width
    track = TRACKS[size]
    y, x = random.randrange(9), random.randrange(9)
    return Image.fromarray(np.asarray(image)[track[y : y + size]][:, track[x : x + size]])


def flip(image: Image.Image) -> Image.Image:
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else image


def cutout(image: Image.Image) -> Image.Image:
    x, y = random.randrange(image.width - 7), random.randrange(image.height - 7)
    image.paste((125, 123, 114), (x, y, x + 8, y + 8))
    return image


def erase(image: Image.Image) -> Image.Image:
    if random.random() < 0.5:
        return image
    area = random.uniform(0.02, 0.33) * image.width * image.height
    ratio = math.exp(random.uniform(math.log(0.3), math.log(3.3)))
    h, w = min(image.height, round((area * ratio) ** 0.5)), min(image.width, round((area / ratio) ** 0.5))
    x, y = random.randint(0, image.width - w), random.randint(0, image.height - h)
    image.paste((0, 0, 0), (x, y, x + w, y + h))
    return image


def resized(size: int) -> Callable[[Image.Image], Image.Image]:
    def change(image: Image.Image) -> Image.Image:
        area = random.uniform(0.08, 1) * image.width * image.height
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = min(image.width, (area * ratio) ** 0.5), min(image.height, (area / ratio) ** 0.5)
        x, y = random.uniform(0, image.width - w), random.uniform(0, image.height - h)
        return image.resize((size, size), BILINEAR, box=(x, y, x + w, y + h))

    return change


def affine(image: Image.Image) -> Image.Image:
    angle, zoom = math.radians(random.uniform(-10, 10)), random.uniform(1, 1.1)
    a, b, c = math.cos(angle) / zoom, math.sin(angle) / zoom, image.width / 2
    return image.transform(image.size, AFFINE, (a, b, c - a * c - b * c, -b, a, c + b * c - a * c), BILINEAR)


def enhance(kind: type, amount: float) -> Callable[[Image.Image], Image.Image]:
    return lambda image: kind(image).enhance(random.uniform(1 - amount, 1 + amount))


def hue(image: Image.Image) -> Image.Image:
    h, s, v = image.convert("HSV").split()
    turn = random.randrange(-25, 26)
    return Image.merge("HSV", (h.point(lambda x: (x + turn) % 256), s, v)).convert("RGB")


def lighting(image: Image.Image) -> Image.Image:
    c, s = random.uniform(0.4, 0.6), math.exp(random.uniform(-0.22, 0.22))
    odds = [(x / (255.001 - x) * c / (1 - c)) ** s for x in range(256)]
    return image.point([round(255 * o / (1 + o)) for o in odds] * 3)


def policy(count: int, low: int, high: int) -> Callable[[Image.Image], Image.Image]:
    """torchvision's 14 changes of RandAugment, or with `low < high` roughly TrivialAugment's strengths."""

    def change(image: Image.Image) -> Image.Image:
        for _ in range(count):
            kind, m = random.randrange(14), random.randint(low, high) / 30 * random.choice((-1, 1))
            if kind < 5:
                c = image.width / 2
                b, d = (0.3 * m * (kind == 0), 0.3 * m * (kind == 1))
                x, y = (0.45 * m * image.width * (kind == 2), 0.45 * m * image.width * (kind == 3))
                turn = math.radians(30 * m) if kind == 4 else 0.0
                a, b, d = math.cos(turn), b + math.sin(turn), d - math.sin(turn)
                data = (a, b, x + c - a * c - b * c, d, a, y + c - d * c - a * c)
                image = image.transform(image.size, AFFINE, data, BILINEAR, fillcolor=(128,) * 3)
            elif kind < 9:
                image = ENHANCE[kind - 5](image).enhance(1 + 0.9 * m)
            elif kind == 9:
                image = ImageOps.posterize(image, 8 - round(4 * abs(m)))
            elif kind == 10:
                image = ImageOps.solarize(image, round(255 * (1 - abs(m))))
            elif kind == 11:
                image = ImageOps.autocontrast(image)
            elif kind == 12:
                image = ImageOps.equalize(image)
        return image

    return change


ENHANCE = (ImageEnhance.Brightness, ImageEnhance.Color, ImageEnhance.Contrast, ImageEnhance.Sharpness)


def chain(*changes: Callable[[Image.Image], Image.Image]) -> Callable[[Image.Image], Image.Image]:
    def change(image: Image.Image) -> Image.Image:
        for one in changes:
            image = one(image)
        return image

    return change


def pairs(size: int) -> dict[str, tuple[cw.augment.Augment, Callable]]:
    """Each augmentation in chipwise and in Pillow."""
    b, s, c, sharp = ENHANCE
    jitter = chain(enhance(b, 0.4), enhance(c, 0.4), enhance(s, 0.4))
    inception = chain(enhance(b, 32 / 255), enhance(c, 0.5), enhance(s, 0.5), hue)
    return {
        "set `cifar`": (A.cifar(MEAN), chain(crop, flip, cutout)),
        f"set `imagenet({size})`": (A.imagenet(size), chain(resized(size), flip)),
        f"set `inception({size})`": (A.inception(size), chain(resized(size), flip, inception)),
        "set `fastai`": (A.fastai(), chain(flip, affine, lighting)),
        "`rand_augment`": (A.rand_augment(), policy(2, 9, 9)),
        "`trivial_augment`": (A.trivial_augment(), policy(1, 0, 30)),
        "`flip`": (A.flip(), flip),
        "`reflect_crop`": (A.reflect_crop(), crop),
        f"`resized_crop({size})`": (A.resized_crop(size), resized(size)),
        "`cutout`": (A.cutout(8, MEAN), cutout),
        "`random_erasing`": (A.random_erasing(), erase),
        "`affine` (rotate, zoom)": (A.affine(10, (1, 1.1)), affine),
        "`brightness`": (A.brightness(0.4), enhance(b, 0.4)),
        "`contrast`": (A.contrast(0.4), enhance(c, 0.4)),
        "`saturation`": (A.saturation(0.4), enhance(s, 0.4)),
        "`color_jitter` (those three)": (A.color_jitter(0.4, 0.4, 0.4), jitter),
        "`hue`": (A.hue(0.1), hue),
        "`sharpness`": (A.sharpness(0.5), enhance(sharp, 0.5)),
        "`lighting`": (A.lighting(p=1.0), lighting),
        "`posterize`": (A.posterize(), lambda image: ImageOps.posterize(image, 4)),
        "`solarize`": (A.solarize(), lambda image: ImageOps.solarize(image, 128)),
        "`invert`": (A.invert(), ImageOps.invert),
        "`autocontrast`": (A.autocontrast(), ImageOps.autocontrast),
        "`equalize`": (A.equalize(), ImageOps.equalize),
    }


def pictures(count: int, size: int) -> np.ndarray:
    """Parts of two photographs."""
    random.seed(0)
    photos = [Image.fromarray(x) for x in load_sample_images().images]
    made = []
    for i in range(count):
        x, y = random.randrange(640 - 300), random.randrange(427 - 300)
        made.append(np.asarray(photos[i % 2].resize((size, size), BILINEAR, box=(x, y, x + 300, y + 300))))
    return np.stack(made)


def compiled(stage: cw.augment.Augment, images: np.ndarray) -> list[float]:
    """Microseconds per image, by run."""
    on_device = jax.device_put(images)
    keys = jax.random.split(jax.random.key(0), len(images))
    run = jax.jit(jax.vmap(lambda image, key: stage({"image": image}, key)["image"]))
    return timed(lambda: jax.block_until_ready(run(on_device, keys)), len(images))


def pillow(change: Callable, images: np.ndarray) -> list[float]:
    opened = [Image.fromarray(image) for image in images]
    return timed(lambda: [np.asarray(change(image)) for image in opened], len(images))


def timed(work: Callable, count: int) -> list[float]:
    made = []
    for _ in range(RUNS + 1):
        before = time.process_time()
        work()
        made.append((time.process_time() - before) / count * 1e6)
    return made[1:]  # the first compiles and warms up


def told(values: list[float]) -> str:
    digits = 0 if statistics.median(values) >= 100 else 1
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def main() -> None:
    lines = [
        "# Augmentation: one core, compiled and in Pillow",
        "",
        f"`python benchmarks/augment.py`; {platform.machine()} CPU (shared), one core, JAX",
        f"{jax.__version__}, Pillow {PIL.__version__}; uint8, three channels; microseconds of processor time",
        f"an image, median of {RUNS} runs (min to max). Images/s is 1,000,000 divided by it.",
    ]
    for count, size in ((512, 32), (64, 224)):
        stored = size if size == 32 else 256
        lines += [
            "",
            f"## {size}×{size}, batches of {count}"
            + (f" (crops from {stored}×{stored})" if stored > size else ""),
            "",
            "| | compiled, µs | Pillow, µs | times as fast | compiled, images/s |",
            "|---|---|---|---|---|",
        ]
        large, small = pictures(count, stored), pictures(count, size)
        for name, (stage, change) in pairs(size).items():
            images = large if "(224)" in name else small
            ours, theirs = compiled(stage, images), pillow(change, images)
            ratio = statistics.median(theirs) / statistics.median(ours)
            rate = 1e6 / statistics.median(ours)
            lines.append(f"| {name} | {told(ours)} | {told(theirs)} | {ratio:.2g} | {rate:,.0f} |")
            print(lines[-1], flush=True)
    (Path(__file__).parent / "augment.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
