"""The machine: devices, hosts, settings and versions.

`detect.py` finds or simulates devices. `hosts.py` lets several processes agree, over the messages
of `channel.py`. `arithmetic.py` fixes JAX's settings, refuses XLA's flags and lists what else of a
process can change a bit. `compiler.py` has XLA's options. If it is asked for, `portable_cpu.py`
compiles for x86-64 CPUs in general, and `products.py` rewrites programs for it.
`fingerprint.py` says on which machine something was measured.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
