"""Random changes to images on the device: `cw.augment.flip()` and so on.

Each factory returns a traced function `(example, key) -> example` of one unbatched example, whose
column `image` is `(height, width)` or `(height, width, channels)`, uint8 or float. The step maps it
over the batch with a key for each example, so the result does not depend on how the batch is cut. A
change that selects nothing returns the same bits. `mixup` is for `Task.mix`.
"""

from .crop import centre as centre
from .crop import cutout as cutout
from .crop import flip as flip
from .crop import reflect_crop as reflect_crop
from .crop import resized_crop as resized_crop
from .image import Augment as Augment
from .image import Example as Example
from .mix import Mix as Mix
from .mix import mixup as mixup
from .policies import cifar as cifar
from .policies import compose as compose
from .policies import imagenet as imagenet
from .policies import rand_augment as rand_augment
