from .export import Export as Export
from .predictions import Predictions as Predictions
from .pretrained import Weights as Weights
