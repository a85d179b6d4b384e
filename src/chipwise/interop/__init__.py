"""Models of other frameworks as the plain functions of a `Task`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
