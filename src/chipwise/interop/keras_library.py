"""Imports Keras on JAX."""

from __future__ import annotations

import os
import sys
from typing import Any

from ..base import invalid, library

INSTALL = "pip install 'chipwise[keras]'"


def keras_library() -> Any:
    """Keras on JAX. Raises `RecipeError` if it is missing or runs on another backend."""
    if "keras" not in sys.modules:
        os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = library("keras", "adapter-library", command=INSTALL)
    if (backend := keras.backend.backend()) != "jax":
        expected = "jax: set KERAS_BACKEND=jax before keras is imported"
        raise invalid("keras-backend", "the backend of Keras", backend, expected)
    return keras
