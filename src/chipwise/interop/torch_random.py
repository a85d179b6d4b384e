"""PyTorch's random operations, made of a few draws of `jax.random`.

torchax draws some with a constant key, some not at all, and leaves those that name no device to
PyTorch's own generator, whose numbers of one trace would be constants of the whole run. Here all
take the step's key. While a step is compared with eager PyTorch, both sides take keys from
PyTorch's generator, so that both draw the same numbers.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..base import library

Draw = Callable[..., Any]
"""`(kind, shape, *limits)`: the numbers of `jax.random`'s function `kind`, as a tensor."""


REPEATED: Any = object()
"""In place of a step's key: draw what `repeating` draws."""


class HostDraw(Exception):
    """A draw that only PyTorch's own generator can make, as its numbers go into a plain tensor."""


class DrawDecides(Exception):
    """A branch on numbers that the step draws."""


_FORCED: list[Callable[[int], bool]] = []


@contextlib.contextmanager
def forcing(least: Callable[[int], bool]) -> Iterator[None]:
    """A context in which a single number that is repeated is 0 or nearly 1, as `least` says of a
    whole number that the draw has by chance."""
    _FORCED.append(least)
    try:
        yield
    finally:
        _FORCED.pop()


def repeated(kind: str, shape: Any, *limits: Any) -> jax.Array:
    """The numbers of a key from PyTorch's own generator, which a checkpoint that computes again
    sets back."""
    torch = library("torch", "adapter-library")
    with torch.utils._mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
        seed = int(torch.randint(2**31 - 1, ()))
    if kind == "permutation" or shape:
        return values(jax.random.key(seed), kind, shape, *limits)
    with jax.ensure_compile_time_eval():  # a single number may say which layers draw
        number = values(jax.random.key(seed), kind, shape, *limits)
        forced = 0.0 if _FORCED and _FORCED[-1](seed) else 1 - 2**-20
        return jnp.full_like(number, forced) if _FORCED else number


def values(key: jax.Array, kind: str, shape: Any, *limits: Any) -> jax.Array:
    """The numbers of `jax.random`'s function `kind`."""
    return getattr(jax.random, kind)(key, shape if kind == "permutation" else tuple(shape), *limits)


@functools.cache
def operations() -> dict[Any, Callable[..., Any]]:
    """PyTorch's operation to `(draw, *arguments) -> tensor`. A name that ends in `_` writes the
    result into its first argument."""
    torch = library("torch", "adapter-library")
    own = {**_created(torch), **_filled(torch), **_chosen(torch)}
    return {getattr(torch.ops.aten, name): function for name, function in own.items()}


def _created(torch: Any) -> dict[str, Callable[..., Any]]:
    """What returns a new tensor of a size, or of the size of another."""

    def made(kind: str, draw: Draw, size: Any, *, dtype: Any = None, **_: Any) -> Any:
        return draw(kind, size).to(dtype or torch.get_default_dtype())

    def like(kind: str, draw: Draw, x: Any, *, dtype: Any = None, **_: Any) -> Any:
        return draw(kind, x.shape).to(dtype or x.dtype)

    def randint(draw: Draw, *given: Any, dtype: Any = None, **_: Any) -> Any:
        *limits, size = given
        return draw("randint", size, *(0, *limits)[-2:]).to(dtype or torch.int64)

    def randint_like(draw: Draw, x: Any, *limits: Any, dtype: Any = None, **_: Any) -> Any:
        return draw("randint", x.shape, *(0, *limits)[-2:]).to(dtype or x.dtype)

    def randperm(draw: Draw, n: int, *, dtype: Any = None, **_: Any) -> Any:
        return draw("permutation", n).to(dtype or torch.int64)

    def normal(
        draw: Draw, mean: Any, std: Any = 1.0, size: Any = None, *, dtype: Any = None, **_: Any
    ) -> Any:
        given = [x for x in (mean, std) if isinstance(x, torch.Tensor)]
        shape = torch.broadcast_shapes(*(x.shape for x in given)) if size is None else size
        mean, std = (x.detach() if isinstance(x, torch.Tensor) else x for x in (mean, std))
        kind = dtype or (given[0].dtype if given else torch.get_default_dtype())
        return (draw("normal", shape) * std + mean).to(kind)

    return {
        "rand": functools.partial(made, "uniform"),
        "rand_like": functools.partial(like, "uniform"),
        "randn": functools.partial(made, "normal"),
        "randn_like": functools.partial(like, "normal"),
    } | {f.__name__: f for f in (randint, randint_like, randperm, normal)}


def _filled(torch: Any) -> dict[str, Callable[..., Any]]:
    """What fills a tensor, or one like it, whatever it holds."""

    def unit(draw: Draw, x: Any) -> Any:
        """Uniform above 0, as logarithms need."""
        u = draw("uniform", x.shape)
        return u.clamp_min(torch.finfo(u.dtype).eps / 4)

    def uniform(draw: Draw, x: Any, low: float = 0.0, high: float = 1.0) -> Any:
        return draw("uniform", x.shape) * (high - low) + low

    def normal(draw: Draw, x: Any, mean: float = 0.0, std: float = 1.0) -> Any:
        return draw("normal", x.shape) * std + mean

    def log_normal(draw: Draw, x: Any, mean: float = 1.0, std: float = 2.0) -> Any:
        return normal(draw, x, mean, std).exp()

    def exponential(draw: Draw, x: Any, rate: float = 1.0) -> Any:
        return -(-unit(draw, x)).log1p() / rate

    def cauchy(draw: Draw, x: Any, median: float = 0.0, sigma: float = 1.0) -> Any:
        return ((unit(draw, x) - 0.5) * math.pi).tan() * sigma + median

    def geometric(draw: Draw, x: Any, p: float) -> Any:
        each = -math.log1p(-p) if p < 1 else math.inf
        return (exponential(draw, x) / each).ceil().clamp_min(1.0)

    def random(draw: Draw, x: Any, *limits: Any) -> Any:
        low, high = (0, *limits)[-2:] if limits else (0, None)
        if high is None:  # what the type counts without gaps
            is_float = x.is_floating_point()
            most = 2 / torch.finfo(x.dtype).eps if is_float else torch.iinfo(x.dtype).max + 1
            high = int(min(most, 2**31 - 1))
        return draw("randint", x.shape, low, high)

    fills = (uniform, log_normal, exponential, cauchy, geometric, random)
    own: dict[str, Callable[..., Any]] = {"normal_functional": normal, "normal_": normal}
    return own | {name: f for f in fills for name in (f.__name__, f"{f.__name__}_")}


def _chosen(torch: Any) -> dict[str, Callable[..., Any]]:
    """What draws by the values of a tensor."""

    def bernoulli(draw: Draw, x: Any, p: Any = None) -> Any:
        return (draw("uniform", x.shape) < (x if p is None else p)).to(x.dtype)

    def bernoulli_(draw: Draw, x: Any, p: Any = 0.5) -> Any:
        return bernoulli(draw, x, p)

    def multinomial(draw: Draw, x: Any, count: int, replacement: bool = False) -> Any:
        if not replacement:
            return (x / _filled(torch)["exponential"](draw, x)).topk(count).indices
        ends = x.cumsum(-1)
        at = draw("uniform", (*x.shape[:-1], count)) * ends[..., -1:]
        beyond = (at[..., None] >= ends[..., None, :]).sum(-1)
        return beyond.clamp_max(x.shape[-1] - 1)

    def rrelu_with_noise(
        draw: Draw, x: Any, noise: Any, lower: float = 0.125, upper: float = 1 / 3, *mode: Any
    ) -> Any:
        if not any(mode):
            return torch.where(x > 0, x, x * ((lower + upper) / 2))
        slope = draw("uniform", x.shape) * (upper - lower) + lower
        noise.copy_(torch.where(x > 0, torch.ones_like(x), slope.to(x.dtype)))
        return x * noise

    return {f.__name__: f for f in (bernoulli, bernoulli_, multinomial, rrelu_with_noise)}


def written_by(func: Any, args: Any, kwargs: Any) -> Any:
    """The tensor that the operation `func` writes its result into, or None."""
    into = kwargs.get("out")
    return args[0] if into is None and func.overloadpacket.__name__.endswith("_") else into


def result(draw: Draw, func: Any, args: Any, kwargs: Any) -> Any:
    """What the random operation `func` of PyTorch returns, with its numbers from `draw`."""
    given = {name: value for name, value in kwargs.items() if name not in ("generator", "out")}
    value = operations()[func.overloadpacket](draw, *args, **given)
    written = written_by(func, args, kwargs)
    return value if written is None else written.copy_(value)


def repeating() -> Any:
    """A mode in which eager PyTorch draws the numbers that the trace of the same code draws."""
    torch = library("torch", "adapter-library")

    def draw(kind: str, shape: Any, *limits: Any) -> Any:
        return torch.from_numpy(np.array(repeated(kind, shape, *limits)))

    mode: Any = torch.utils._python_dispatch.TorchDispatchMode

    class Repeating(mode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            own, kwargs = func.overloadpacket in operations(), kwargs or {}
            if own and isinstance(written_by(func, args, kwargs), torch.nn.Parameter):
                with torch.random.fork_rng(devices=[]):  # of a layer that the call makes
                    return func(*args, **kwargs)
            if own and kwargs.get("generator") is None:
                return result(draw, func, args, kwargs)
            return func(*args, **kwargs)

    return Repeating()
