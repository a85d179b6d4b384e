"""Proof: `audit.py` computes parts of a run again, and `diff.py` follows two runs to the first step
at which they differ, and to the operation of `equations.py`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
