"""What tests ask a compiler."""

import dataclasses

import jax
import jax.numpy as jnp

from chipwise.compile.answers import CompileRequest
from chipwise.compile.cache import compile_each
from chipwise.compile.exports import export_program

V5E = {"topology_name": "v5e:2x4", "chips_per_host_bounds": [2, 4, 1]}
SPEC = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)

ALL = "for r in requests: begin(r); done(r)"
"""A child that answers."""


def product(a, b):
    return {"out": a["x"] @ b}


def request_for(function=product, name="replica", **more):
    return CompileRequest(name, V5E, export_program(function, ({"x": SPEC}, SPEC)), **more)


def three():
    return [request_for(lambda a, b, n=n: product(a, b)["out"] + n, name=f"p{n}") for n in range(3)]


def on_gpu(request):
    return dataclasses.replace(request, platform="cuda", topology={"target_config": "an A100"})


def compile_all(requests, **how):
    """The answers to `requests` in their order, when all are ready."""
    answers = dict(compile_each(requests, **how))
    return [answers[i] for i in range(len(requests))]
