from .export import Export as Export
from .generation import Generated as Generated, generate as generate
from .model import Trained as Trained
from .predictions import Predictions as Predictions
from .pretrained import Weights as Weights
