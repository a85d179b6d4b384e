"""The task to learn and every setting that changes the result. Nothing here concerns a machine.

`task.py` has what is learned, and `recipe.py` all settings. Then follow a file for each kind of
setting: `optimizers.py`, `schedules.py`, `losses.py`, `metrics.py`, `precision.py`, `freezing.py`.
`check.py` finds settings that are probably mistakes.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
