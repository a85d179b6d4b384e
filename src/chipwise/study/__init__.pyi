from . import referee as referee
from .find_lr import LrSearch as LrSearch
from .study_file import Study as Study
from .transfer import Transfer as Transfer
