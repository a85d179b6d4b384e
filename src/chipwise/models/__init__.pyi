import typing

import jax.numpy as jnp

from .attention import attention as attention
from .conv_layers import (
    BatchNorm as BatchNorm,
    conv_layer as conv_layer,
    global_mean as global_mean,
)
from .large import fsdp as fsdp
from .pool import max_pool_2x2 as max_pool_2x2
from .remat import remat as remat
from .resnet50 import ResNet50 as ResNet50
from .tied import embed as embed
from .transformer import GPT2 as GPT2

def wide(dtype: typing.Any) -> jnp.dtype: ...
