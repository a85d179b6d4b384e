"""Eight simulated CPU devices, strict dtypes and ranks: what hides on one device shows here."""

import os
import sys
import tempfile
from pathlib import Path

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")
# Many tests train the same small task: compile its programs once a session, also for processes
# that tests start. Never kept from one session to the next, which may have other code.
_CACHE = tempfile.TemporaryDirectory(prefix="chipwise-tests-")
os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax  # the settings above must be there before JAX starts

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

sys.path.insert(0, str(Path(__file__).parent))  # for `import tasks`: the small tasks that tests share


def pytest_collection_modifyitems(items):
    """The file with the longest test first, so that side by side no worker is left alone with it."""
    items.sort(key=lambda item: item.path.name != "test_readme.py")
