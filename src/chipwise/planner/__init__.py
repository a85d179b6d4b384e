"""Predictions for chips that are not here: memory, seconds and dollars.

`ask.py` is the way from a recipe to its plans. `tracing.py` traces the step, `compile_step.py` asks
the compilers, `device_memory.py` says whether it fits, `time_step.py` and `time_run.py` add up
seconds, and `ranking.py` compares the plans.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
