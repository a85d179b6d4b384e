"""Verdicts on changes: what a change to a recipe or to its code really did."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
