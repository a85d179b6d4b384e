"""Drives a step: devices and hosts, data, state, compilation, evaluation, and the loop of `fit`.

`session.py` is the only driver. It calls the compiled programs of `programs.py`, and
`state_layout.py` places the state on devices, and has it added and updated there. `placement.py`
decides which device has which data. `training_loop.py` is the program that `fit` runs to its end.
`folder/` writes and reads the files of a run.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
