import os

import pytest


@pytest.fixture
def clean_environment():
    """This environment without anything that decides JAX's devices."""
    return {
        k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")
    }
