from .event import Event as Event
from .folder.checkpoint import restore_run as restore_run
from .folder.result import Result as Result
