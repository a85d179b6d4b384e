"""Data: sources, their order, transfer to the devices, and augmentation there."""

from . import augment as augment
from . import datasets as datasets
from .folder import ImageFolder as ImageFolder
from .pack.writer import write_packed as write_packed
from .packed import PackedFolder as PackedFolder
from .sources import Arrays as Arrays
from .sources import Lazy as Lazy
from .sources import Mapped as Mapped
from .sources import check_labels as check_labels
from .sources import materialize as materialize
from .sources import nbytes as nbytes
from .sources import spec_of as spec_of
from .sources import take as take
from .stages import stage as stage
from .synthetic import Synthetic as Synthetic
