from .export import Export as Export
from .features import features as features
from .predictions import Predictions as Predictions
from .pretrained import Weights as Weights
