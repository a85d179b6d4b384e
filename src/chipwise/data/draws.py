"""Random draws of the user's own code in `[i]`, keyed by seed, epoch and example.

A data set with a random flip in `__getitem__` draws from the global generators of Python, NumPy or
torch. They are seeded before each example and restored afterwards. So an example is a function of
its key: the same in a thread, in any process, and after a stop, whatever was read before.
"""

from __future__ import annotations

import hashlib
import importlib
import random
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..base import DataError
from ..recipe.source import Spec, check_source, kind_of, number_of_classes, read_example, spec_of
from .order import spread

# The generators are the process's, so its threads draw one example after another
_LOCK = threading.RLock()
_TRIED = 8  # examples that are read twice; a flip of half of them escapes once in 256


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """A context in which Python's `random`, NumPy's global generator and torch's, if it is
    imported, are seeded by `key`. Restores their states at its end."""
    words = np.frombuffer(hashlib.blake2b(repr(key).encode(), digest_size=16).digest(), "<u4")
    with _LOCK:
        torch = _torch_generators()
        kept = (
            random.getstate(),
            np.random.get_state(),
            [generator.get_state() for generator in torch],
        )
        try:
            random.seed(words.tobytes())
            np.random.seed(words)
            for generator in torch:
                generator.manual_seed(int(words[0]))  # torch's own uses 32 bits of a seed
            yield
        finally:
            random.setstate(kept[0])
            np.random.set_state(kept[1])
            for generator, state in zip(torch, kept[2], strict=True):
                generator.set_state(state)


def _torch_generators() -> list[Any]:
    if "torch" not in sys.modules:
        return []
    torch = importlib.import_module("torch")  # or waits for the thread that is importing it
    return [
        torch.default_generator,
        *(torch.cuda.default_generators if torch.cuda.is_initialized() else ()),
    ]


class Wrapped:
    """A source over another one."""

    def __init__(self, source: Any):
        check_source(source)
        self.source = source
        self.classes = number_of_classes(source)

    @property
    def spec(self) -> Spec:
        return spec_of(self.source)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        return self.source[index]


class Drawn(Wrapped):
    """A source whose examples differ from epoch to epoch.

    It is read by position: `epoch * len(self) + place`, where each place occurs once in an epoch.
    The random draws of a position are a function of `seed`, epoch and place.

    *Arguments:* `source`: a source with the user's code in `[i]`. `seed`: the recipe's seed.
    """

    def __init__(self, source: Any, seed: int):
        super().__init__(source)
        self.seed = seed

    def __getitem__(self, position: int) -> Any:
        ((_, example),) = self.examples([position])
        return example

    def indices(self, positions: np.ndarray) -> np.ndarray:
        """The examples of `source` at `positions` `(n,)`."""
        return positions % len(self)

    def examples(self, positions: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """Yields the number of each example in `source`, and the example."""
        for position in positions:
            epoch, place = divmod(int(position), len(self))
            index = int(self.indices(np.asarray([position]))[0])
            with seeded(self.seed, epoch, place):
                example = self.source[index]
            yield index, example

    def check(self) -> None:
        """Raises `DataError` with the column if a second reading under the same keys gives other
        values.

        `_TRIED` examples, spread over the source, are read twice.
        """
        places = spread(len(self), _TRIED).tolist()
        first = [(index, read_example(example, index)) for index, example in self.examples(places)]
        again = [read_example(example, index) for index, example in self.examples(places)]
        for (index, one), other in zip(first, again, strict=True):
            for name, values in one.items():
                if name not in other or values.tobytes() != other[name].tobytes():
                    kind = kind_of(self.source).__name__
                    raise DataError("draws-unkeyed", source=kind, example=index, column=name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_torch": "torch" in sys.modules}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Or the first example in a new process might be the one that imports it
        if state.pop("_torch"):
            importlib.import_module("torch")
        self.__dict__.update(state)
