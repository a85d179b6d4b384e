"""Sources for processes, which find a class by its module's name."""

import time

import numpy as np

from chipwise.data import workers
from chipwise.data.stages import stage


class Numbers:
    """`n` examples of which one may be bad; each takes `seconds`, `decoding` of them."""

    def __init__(self, n=50, bad=None, seconds=0.0, dies=None):
        self.n, self.bad, self.seconds, self.dies = n, bad, seconds, dies

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        if index == self.bad:
            raise ValueError(f"photo {index} is bad")
        if index == self.dies:
            import os

            os._exit(1)
        with stage("decode"):
            time.sleep(self.seconds)
        x = np.random.default_rng(index).integers(0, 256, (4, 4), dtype=np.uint8)
        return {"x": x, "label": np.int32(index % 5)}


class Maps:
    """100 examples that say of how many buffers this process has the memory."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        return {"index": np.int32(index), "maps": np.int32(len(workers._maps))}
