"""What a user gives a public name is held against its annotation before anything happens."""

import collections.abc
import functools
import inspect
import math
import os
import pickle
import types
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
from chipwise.base.annotations import as_annotated
from chipwise.base.errors import ChipwiseError, RecipeError
from refusals import refused

ANSWERS = """
Compiled Event Export Finding Generated Kernel LrSearch Parting Plan Plans Predictions Result Ruling
Study Transfer Weights
""".split()  # noqa: SIM905
"""What chipwise makes and a user reads."""
TRACED = {"Sum", "stage", "materialize", "nbytes", "spec_of", "wide", "Cached", "digits"}
"""What is called for each step or example, or takes anything."""
MODELS = {"BatchNorm", "GPT2", "ResNet50"}
"""Modules of Flax, whose own code takes their arguments."""
WRONG = {
    "flag": True,
    "whole": 3,
    "number": 2.2,
    "nan": math.nan,
    "text": "no",
    "bytes": b"no",
    "none": None,
    "list": [1, "a", None],
    "dict": {3: object()},
    "object": object(),
    "class": dict,
    "path": Path("no"),
    "array": np.zeros((2, 2)),
    "call": len,
}


def public():
    """Every public name with its callable, from the packages' lists of names."""
    found = {}
    packages = {name: getattr(cw, name) for name in cw._PACKAGES.split()}
    modules = {"recipe": ["losses", "metrics", "schedules"], "interop": "equinox keras linen nnx".split()}
    for home, package in {"": cw, **packages}.items():
        for name in package.__all__:
            found[f"{home}.{name}".strip(".")] = getattr(package, name)
    for home, names in modules.items():
        for name in names:
            module = getattr(packages[home], name)
            found |= {f"{name}.{own}": value for own, value in vars(module).items() if own[0] != "_"}
    here = {
        name: value
        for name, value in found.items()
        if callable(value) and getattr(value, "__module__", "").startswith("chipwise.")
    }
    last = {name: name.rpartition(".")[2] for name in here}
    return {n: v for n, v in here.items() if last[n] not in {*ANSWERS, *TRACED, *MODELS}}
