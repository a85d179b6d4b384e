"""Eight simulated CPU devices, strict dtypes and ranks: what hides on one device shows here.

Programs are compiled once a device, so a test that is not about devices uses one: `On(devices=1)`.
"""

import collections
import gc
import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests start many processes, which would all compile the package's modules where none may be written.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Compiling takes most of the suite's time, so what one session compiled is read by the next, by its workers
# side by side, and by the processes that tests start. JAX's key holds the program, the versions, the options
# and the processor, so other code has other entries.
if "PYTEST_XDIST_WORKER" not in os.environ:
    CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chipwise-tests"
    CACHE.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)
# LLVM's optimizations take a fifth of a small training: `as_users_compile` marks the tests that need them.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

sys.path.insert(0, str(Path(__file__).parent))  # for `import tasks`: the small tasks that tests share
pytest_plugins = ["plugins.clock", "plugins.draw", "plugins.skips"]  # the first one is read by the others

import hypothesis
import jax  # the settings above must be there before JAX starts
import pytest

from chipwise.machine.compilation_cache import portable_entries, shorten

_ENTRIES = portable_entries()  # eight simulated devices share an entry
_ENTRIES.__enter__()
if "PYTEST_XDIST_WORKER" not in os.environ:
    shorten(CACHE)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

_LONG = "fit arithmetic export ask guest standard_output frameworks program_digest datasets readme torch"
LONG = tuple(f"test_{name}.py" for name in _LONG.split())
"""Files that take long: begun early, so that the workers end together."""


@pytest.fixture(autouse=True)
def memory_is_a_place(monkeypatch):
    """`memory://` stands for a bucket in tests of remote data. A user's is refused."""
    from chipwise.data import remote

    monkeypatch.setattr(remote, "PROTOCOLS", (*remote.PROTOCOLS, "memory"))


def compiles_as_users(item):
    """Whether a test's programs are compiled with the optimizations that users have.

    Bits that are equal under other passes prove nothing for a user, so each test that compares bits of a
    training is marked `as_users_compile`. Slow tests repeat for long what those prove.
    A file whose tests share a fixture that trains is marked whole: or they would compare bits of both ways.
    """
    return any(item.get_closest_marker(name) for name in ("as_users_compile", "slow"))


@pytest.hookimpl(trylast=True)  # after `-m` has left tests out
def pytest_collection_modifyitems(items):
    """Order the tests: a worker forgets its programs wherever the way of compiling changes, so files that are
    compiled in one way come first, then mixed ones, then the others; within a file the marked tests, whose
    fixtures the others may share. Long files come first among equals. (`make test` keeps this order:
    `--no-loadscope-reorder`.)"""
    if unlike := [item.nodeid for item in items if " at 0x" in item.nodeid]:  # in each worker another
        raise pytest.UsageError(f"name the cases of {unlike[0]}: an address is another one in each process")
    ways = collections.defaultdict(set)
    for item in items:
        ways[item.path].add(compiles_as_users(item))

    def turn(item):
        of_file = ways[item.path]
        place = 1 if len(of_file) > 1 else 0 if True in of_file else 2
        return (place, not item.path.name.endswith(LONG))

    items.sort(key=turn)
    place_of = {path: place for place, path in enumerate(dict.fromkeys(item.path for item in items))}
    items.sort(key=lambda item: (place_of[item.path], not compiles_as_users(item)))


def pytest_collection_finish(session):
    """The libraries' million objects are not looked through again with every collection of garbage."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Before the test's fixtures, also those of its file, which compile too."""
    plain = not compiles_as_users(item)
    if plain != jax.config.read("jax_disable_most_optimizations"):
        jax.clear_caches()  # of programs compiled the other way
        jax.config.update("jax_disable_most_optimizations", plain)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(plain))  # of processes that the test starts


# The same examples every time: a failure that nobody can repeat helps nobody. A busy machine is no failure.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")
