"""Compiles programs for chips that are not here, and gives their kernels and exchanges seconds.
`machine/compilation_cache.py` compiles programs for this machine.

`compiled.py` is the way of one function, for everybody: `on`. `exports.py` turns a function into a
module for a compiler's process. `cache.py` asks the compilers if it has no answer: `processes.py`
starts one process for each kind of chip, which runs `worker.py`. `answers.py` has the requests and
answers. `hlo/` reads the compiled programs. `absent_device.py` has the memory of a device, and
takes the file that times its kernels. `time_gpu.py` (with the fitted `efficiencies.json`),
`time_tpu.py` (with `allowances.json`) and `time_links.py` (with constants of its own) compute
seconds.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
