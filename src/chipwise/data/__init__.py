"""Data from its sources to the host's memory: reading, order, feeding.

`sources.py` says what a source is. `order.py` fixes which example is at which position. `stream.py`
reads ahead by the workers of `workers.py`. `packed.py` reads what `pack/` writes. `compared.py`
compares the data of two processes of a run.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
