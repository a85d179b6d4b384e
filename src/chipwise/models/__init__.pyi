import typing

import jax.numpy as jnp

from .attention import attention as attention
from .large import fsdp as fsdp
from .remat import remat as remat

def wide(dtype: typing.Any) -> jnp.dtype: ...
