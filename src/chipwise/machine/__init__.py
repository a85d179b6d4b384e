"""The devices a program runs on: found, simulated, explained, and shared out among replicas."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
