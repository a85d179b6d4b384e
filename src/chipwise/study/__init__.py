"""Many runs of a recipe: seeds and settings (`sweep.py`), rates (`find_lr.py`), another batch
(`transfer.py`, `critical_batch.py`), timing (`bench.py`), and verdicts on changes (`referee/`).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
