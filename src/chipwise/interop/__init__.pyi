from . import equinox as equinox, keras as keras, linen as linen, nnx as nnx, torch as torch
