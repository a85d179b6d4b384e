from .find_batch import BatchSearch as BatchSearch
from .find_batch import find_batch as find_batch
from .find_lr import LrSearch as LrSearch
from .study_file import Study as Study
from .transfer import Transfer as Transfer
