"""Random changes to images on the device: `cw.augment.flip()` and so on.

Each factory returns a traced function `(example, key) -> example` of one unbatched example, whose
column `image` is `(height, width)` or `(height, width, channels)`, uint8 or float. The step maps it
over the batch with a key for each example, so the result does not depend on how the batch is cut. A
change that selects nothing returns the same bits. `mixup` is for `Task.mix`.
"""

from .crop import (
    centre as centre,
    cutout as cutout,
    flip as flip,
    reflect_crop as reflect_crop,
    resized_crop as resized_crop,
)
from .image import Augment as Augment, Example as Example
from .mix import Mix as Mix, mixup as mixup
from .policies import (
    cifar as cifar,
    compose as compose,
    imagenet as imagenet,
    rand_augment as rand_augment,
)
