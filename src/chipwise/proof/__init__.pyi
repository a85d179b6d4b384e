from .audit import audit as audit
from .diff import Parting as Parting
from .diff import diff as diff
