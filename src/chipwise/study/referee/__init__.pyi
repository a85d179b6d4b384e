from .evidence import rows as rows
from .ruling import Ruling as Ruling, referee as referee
from .techniques import drop as drop
