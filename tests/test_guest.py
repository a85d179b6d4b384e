"""chipwise is a guest in its host's process: what it changes there, it puts back."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LOOK = '''
import atexit, json, logging, os, signal, sys, threading, types, warnings

register, exits = atexit.register, []


def recorded(function, *args, **kwargs):
    caller = sys._getframe(1).f_globals["__name__"]
    if caller.startswith("chipwise"):  # libraries do it when they are imported
        exits.append((caller, str(function)))
    return register(function, *args, **kwargs)


atexit.register = recorded


def loggers():
    known = {"": logging.root, **logging.root.manager.loggerDict}
    return {n: (l.level, list(l.handlers), list(l.filters), l.disabled, l.propagate)
            for n, l in known.items() if isinstance(l, logging.Logger)}


def functions(module):
    """Its functions, and those of its classes."""
    found = {}
    for name, value in list(vars(module).items()):
        if isinstance(value, type) and value.__module__ == module.__name__:
            found |= {(name, n): v for n, v in vars(value).items() if isinstance(v, types.FunctionType)}
        if callable(value):
            found[name] = value
    return found


def state():
    jax = {n: functions(m) for n, m in list(sys.modules.items()) if n.partition(".")[0] == "jax" and m}
    config = dict(sys.modules["jax"].config.values) if "jax" in sys.modules else {}
    return {
        "modules": dict(sys.modules),
        "hooks": (sys.excepthook, sys.unraisablehook, sys.displayhook, threading.excepthook, sys.gettrace()),
        "exits": list(exits),
        "warnings": (list(warnings.filters), warnings.showwarning, warnings.formatwarning),
        "imports": (list(sys.meta_path), list(sys.path_hooks), list(sys.path)),
        "streams": (sys.stdout, sys.stderr, sys.stdin),
        "loggers": loggers(),
        "logging": (logging.lastResort, logging.getLoggerClass(), logging.root.manager.disable),
        "signals": {s: signal.getsignal(s) for s in signal.valid_signals()},
        "environment": dict(os.environ),
        "jax": jax,
        "config": config,
        "directory": os.getcwd(),
    }


def changed(before, after):
    found = []
    for key in before:
        old, new = before[key], after[key]
        if isinstance(old, dict):  # what is new there is no change, unless it hides a module
            gone = [n for n in old if n not in new]
            if key == "jax":
                there = {m: old[m] for m in old if m in new}
                gone += [(m, n) for m, f in there.items() for n in f if new[m].get(n) is not f[n]]
            elif key == "modules":
                gone += [n for n in old if n in new and new[n] is not old[n]]
                gone += [n for n, m in new.items() if m is None or n.startswith(("jax_plugins.", "libtpu"))]
            else:
                gone += [n for n in old if n in new and new[n] != old[n]]
            found += [f"{key}: {n}" for n in gone]
        elif old != new:
            found.append(f"{key}: {old} -> {new}")
    return found


def report(before, **more):
    print(json.dumps({"changed": changed(before, state()), **more}))
'''
# The libraries that chipwise needs change things of their own when they are imported.
LIBRARIES = (
    "import jax, jax._src.compiler, jax._src.lru_cache, jax.experimental.compilation_cache, flax.nnx, optax\n"
    "import jax.experimental.multihost_utils, jax.experimental.serialize_executable, orbax.checkpoint\n"
    "import tensorboardX\n"
)


def child(program, **variables):
    environment = {k: v for k, v in os.environ.items() if k != "NPROC"} | variables
    ran = subprocess.run(
        [sys.executable, "-c", LOOK + program], env=environment, capture_output=True, text=True,
        cwd=Path(__file__).parent,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_importing_chipwise_loads_nothing_and_changes_nothing_but_unset_variables():
    told = child(
        "before = state()\nimport chipwise\n"
        "loaded = {n.partition('.')[0] for n in sys.modules.keys() - before['modules']}\n"
        "report(before, loaded=sorted(loaded - sys.stdlib_module_names), nproc=os.environ['NPROC'])"
    )
    assert told["changed"] == [] and told["loaded"] == ["chipwise", "lazy_loader"] and int(told["nproc"]) >= 8


def test_a_variable_that_is_set_stays():
    assert child("before = state()\nimport chipwise\nreport(before)", NPROC="3")["changed"] == []


@pytest.fixture(scope="module")
def called(tmp_path_factory):
    """What everything public, then a run, then a study changed in one process."""
    return child(
        f"{LIBRARIES}before, found = state(), {{}}\nimport chipwise as cw\n"
        "homes = [cw, *(getattr(cw, package) for package in cw._PACKAGES.split())]\n"
        "for home in homes:\n    for name in getattr(home, '__all__', ()):\n        getattr(home, name)\n"
        "found['public'] = changed(before, state())\n"
        "import tasks\nrecipe = tasks.quick(duration='2st', replicas=1)\n"
        f"os.chdir({str(tmp_path_factory.mktemp('runs'))!r})\n"
        "before = state()\n"
        "cw.fit(recipe, run='run', on=cw.On(devices=1), progress='none', checkpoint_every='1st')\n"
        "found['fit'], before = changed(before, state()), state()\n"
        "cw.sweep(recipe, seeds=[0, 1], run='study', on=cw.On(devices=1))\n"
        "found['sweep'] = changed(before, state())\n"
        "print(json.dumps(found))"
    )


@pytest.mark.slow
@pytest.mark.parametrize("what", ["public", "fit", "sweep"])
def test_what_is_called_puts_back_what_it_changed(called, what):
    assert called[what] == []
