"""Write the training once, as plain functions. Run it unchanged on any number of devices.

`import chipwise as cw`. The README has the contract in twenty lines. `__init__.pyi` has the public
names. A name is loaded on its first use. Importing the package alone does not even load JAX, and
changes nothing in the process except environment variables that are unset.
"""

import os as _os
import sys as _sys
from typing import Any as _Any

import lazy_loader as _lazy

from .base.displayed import Displayed as _Displayed
from .machine import plugins as _plugins

# On the CPU, XLA cuts a long matrix product among the threads of a pool and adds the parts, so its
# bits depend on the size of the pool: the larger of the cores and the simulated devices. Pools of
# 1, 2, 8 and 16 threads then differ (measured: a product over 2,048 rows). With one size they
# agree, whatever the machine. On 2 cores it costs no speed that could be measured. XLA reads the
# variable once, when its CPU client starts. A value that the user has set stays.
_os.environ.setdefault("NPROC", "8")


__version__ = "0.1.0"

_load, _, _known = _lazy.attach_stub(__name__, __file__)

_PACKAGES = "compile data deploy interop machine models planner recipe referee run study"
"""Packages that only some programs need, so `dir` does not show them among the names for all."""

__all__ = [name for name in _known if name not in _PACKAGES.split()]


def __getattr__(name: str) -> _Any:
    if name not in _known:
        here = _sys.modules[__name__]
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'", name=name, obj=here)
    with _plugins.hidden():  # this may import JAX
        return _load(name)


def _display(answer: _Any) -> _Any:
    from .explain.display import shown  # only a program that shows an answer pays for it

    return shown(answer)


_Displayed.display = _display


def __dir__() -> list[str]:
    return __all__.copy()
