"""What is learned, and every setting that changes the result; nothing about a machine."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
