from .checkpoint import restore_run as restore_run
from .result import Result as Result
