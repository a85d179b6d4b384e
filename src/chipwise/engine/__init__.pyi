from .checkpoint import restore_run as restore_run
from .moment import Moment as Moment
from .result import Result as Result
