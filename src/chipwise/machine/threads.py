"""One size of the CPU's thread pool for any number of simulated devices.

On the CPU a long matrix product is cut among the threads of a pool and the parts are added, so its bits
depend on the size of the pool, which XLA takes as the larger of the cores and the simulated devices. Two
processes with 1 and with 8 simulated devices would then differ (measured: a product over 2,048 rows, on 2
cores). With a fixed size they do not, and a machine of 2 cores agrees with one of 8. It costs no speed that
could be measured.
"""

from __future__ import annotations

import os

LEAST = 8


def fix_pool() -> None:
    """Sets `NPROC`, which XLA reads when its CPU client starts, to 8 or the cores if there are more.

    A value that the user has set stays.
    """
    os.environ.setdefault("NPROC", str(max(LEAST, os.cpu_count() or 1)))
