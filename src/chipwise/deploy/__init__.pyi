from .export import Export as Export
from .model import Trained as Trained
from .predictions import Predictions as Predictions
from .pretrained import Weights as Weights
