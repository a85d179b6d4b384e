"""Eight simulated CPU devices, strict dtypes and ranks: what hides on one device shows here.

Programs are compiled once a device, so a test that is not about devices uses one: `On(devices=1)`.
"""

import gc
import os
import runpy
import sys
import tempfile
from pathlib import Path

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests start many processes, which would all compile the package's modules where none may be written.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Many tests train the same small task: compile its programs once a session, also for processes that tests
# start and for pytest's workers side by side. Never kept from one session to the next, which may have other
# code.
if not {"PYTEST_XDIST_WORKER", "JAX_COMPILATION_CACHE_DIR"} <= os.environ.keys():
    _CACHE = tempfile.TemporaryDirectory(prefix="chipwise-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE.name
# LLVM's optimizations would be a third of the suite's processor time: see `OPTIMIZED` for who needs them.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

_QUICK = str(Path(__file__).with_name("quick_compiles"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_QUICK, os.environ.get("PYTHONPATH")]))
runpy.run_path(f"{_QUICK}/sitecustomize.py")

import hypothesis
import jax  # the settings above must be there before JAX starts
import pytest

from chipwise.machine.compilation_cache import portable_entries

_ENTRIES = portable_entries()  # eight simulated devices share an entry
_ENTRIES.__enter__()

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

_NAMES = "blocks compile evaluate groups predict reduce step."
OPTIMIZED = (
    *(f"tests/engine/test_{name}" for name in _NAMES.split()),
    "tests/data/augment/test_every.py",
    "tests/machine/test_arithmetic",
    "tests/machine/test_compile_on",
)
"""Tests of whether results depend on devices, layouts and batches. Their programs are compiled as a user's,
also in processes that they start; so are those of slow tests, which run for long, and repeat what the fast
ones of hosts, leaves and shared state compare."""
_LONG = "fit arithmetic export ask guest standard_output frameworks program_digest datasets readme torch"
LONG = tuple(f"test_{name}.py" for name in _LONG.split())
"""Files that take long: begun early, so that the workers end together."""


def pytest_collection_modifyitems(items):
    """First the files whose programs are optimized, since a worker forgets its programs where that changes;
    then the long ones. (`make test` keeps this order: `--no-loadscope-reorder`.)"""

    def turn(item):
        file = item.nodeid.partition("::")[0]
        return (not file.startswith(OPTIMIZED), not file.endswith(LONG))

    items.sort(key=turn)


def pytest_collection_finish(session):
    """The libraries' million objects are not looked through again with every collection of garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def optimizations(request):
    module = request.path.relative_to(request.config.rootpath).as_posix()
    plain = not module.startswith(OPTIMIZED) and request.config.option.markexpr != "slow"
    if plain != jax.config.read("jax_disable_most_optimizations"):
        jax.clear_caches()  # of programs compiled the other way
        jax.config.update("jax_disable_most_optimizations", plain)
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(plain))


# The same examples every time: a failure that nobody can repeat helps nobody. A busy machine is no failure.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")

sys.path.insert(0, str(Path(__file__).parent))  # for `import tasks`: the small tasks that tests share
