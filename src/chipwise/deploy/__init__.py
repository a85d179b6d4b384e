"""Uses of a trained model: `predictions.py`, `evaluation.py`, `generation.py`, exports to other
formats (`export.py`, `huggingface.py`, `onnx.py`), and weights from elsewhere (`pretrained.py`).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
