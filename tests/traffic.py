"""What the program that adds over devices sends, read from its compiled text."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from chipwise.step.reduce import AXIS, reducer


def sent_bytes(hlo: str, devices: int) -> float:
    """Bytes a device sends in the program's collectives, by their usual ring or direct algorithms."""
    total = 0.0
    for line in hlo.splitlines():
        found = re.search(r"= (.*?) (all-to-all|all-gather|all-reduce|collective-permute)(?:-start)?\(", line)
        if not found:
            continue
        sizes = [
            np.prod([int(d) for d in s.split(",") if d], dtype=float)
            for s in re.findall(r"f32\[([\d,]*)\]", found[1])
        ]
        size = 4 * sum(sizes)
        share = (devices - 1) / devices
        total += {"all-reduce": 2 * share, "all-to-all": share, "all-gather": share, "collective-permute": 1}[
            found[2]
        ] * size
    return total


def least(devices: int, n: int, vectors: int, cover: bool) -> int:
    """Bytes that a device sends in an exact sum of vectors of `n` values, each chunk on the shortest way: of
    `vectors` the chunks of all others if they are sums of a cover, otherwise of one; and its own chunk of the
    sum to all others."""
    return 4 * (devices - 1) * ((vectors if cover else 1) + 1) * -(-n // devices)


def compiled(devices, parts, n):
    mesh = Mesh(np.asarray(jax.devices()[:devices]), (AXIS,))
    sharding = NamedSharding(mesh, P(AXIS))
    vectors = [jax.ShapeDtypeStruct((devices * n,), jnp.float32, sharding=sharding)] * parts
    return mesh, reducer(mesh).lower(vectors).compile()
