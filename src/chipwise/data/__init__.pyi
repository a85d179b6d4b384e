from . import datasets as datasets
from .cached import Cached as Cached
from .class_names import Renamed as Renamed
from .image_folder import ImageFolder as ImageFolder
from .pack.writer import write_packed as write_packed
from .packed import PackedFolder as PackedFolder
from .padded import Padded as Padded
from .sources import (
    Arrays as Arrays,
    Lazy as Lazy,
    check_labels as check_labels,
    materialize as materialize,
    nbytes as nbytes,
    spec_of as spec_of,
    take as take,
)
from .stages import stage as stage
from .synthetic import Synthetic as Synthetic
from .weighted import Weighted as Weighted
from .windows import Windows as Windows
