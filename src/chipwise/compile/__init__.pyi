from .compiled import Compiled as Compiled, on as on
from .hlo.kernel import Kernel as Kernel
