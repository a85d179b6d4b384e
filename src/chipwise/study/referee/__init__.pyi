from .ruling import Ruling as Ruling
from .ruling import referee as referee
