"""A data set as people write it for PyTorch, with random transforms, for processes to find by its module."""

import random

import numpy as np
import torch


class RandomHorizontalFlip:
    """As torchvision's: draws from torch."""

    def __init__(self, p=0.5):
        self.p = p

    def __call__(self, image):
        return image.flip(-1) if torch.rand(1) < self.p else image


class RandomCrop:
    """Draws from Python's random."""

    def __init__(self, size):
        self.size = size

    def __call__(self, image):
        top, left = (random.randint(0, n - self.size) for n in image.shape)
        return image[top : top + self.size, left : left + self.size]


class Noise:
    """Draws from NumPy's global generator."""

    def __call__(self, image):
        return image + torch.from_numpy(np.random.normal(0, 0.1, tuple(image.shape)).astype(np.float32))


class Compose:
    def __init__(self, *transforms):
        self.transforms = transforms

    def __call__(self, image):
        for transform in self.transforms:
            image = transform(image)
        return image


class Images(torch.utils.data.Dataset):
    """`n` images of 6 × 6 pixels, labels 0 and 1; `calls` counts the readings of this process."""

    def __init__(self, n=37, transform=None):
        generator = torch.Generator().manual_seed(0)
        self.pixels = torch.rand((n, 6, 6), generator=generator)
        self.transform, self.calls = transform, 0

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, index):
        self.calls += 1
        image = self.pixels[index]
        return (self.transform(image) if self.transform else image), index % 2
