"""The step of training, and everything that drives, feeds, saves and evaluates it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
