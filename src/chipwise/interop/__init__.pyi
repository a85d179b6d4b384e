from . import equinox as equinox
from . import keras as keras
from . import linen as linen
from . import nnx as nnx
from . import torch as torch
