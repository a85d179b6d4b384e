from .document import Study as Study
from .find_batch import BatchSearch as BatchSearch
from .find_lr import LrSearch as LrSearch
from .transfer import Transfer as Transfer
