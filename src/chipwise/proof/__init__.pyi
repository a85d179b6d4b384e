from .audit import audit as audit
from .diff import Parting as Parting, diff as diff
