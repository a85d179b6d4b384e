from .ruling import Ruling as Ruling, referee as referee
