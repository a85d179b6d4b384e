"""Studies: runs of a recipe with several seeds and settings. Finders of rates and batches, and transfer."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
