from .find_lr import LrSearch as LrSearch
from .largest_batch import BatchSearch as BatchSearch
from .largest_batch import find_batch as find_batch
from .study_file import Study as Study
from .transfer import Transfer as Transfer
