from .compiled import Compiled as Compiled
from .compiled import on as on
from .hlo.kernel import Kernel as Kernel
