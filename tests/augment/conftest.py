"""Real pictures, small."""

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images


@pytest.fixture(scope="session")
def pictures():
    """Two photographs of 48 × 64 pixels, `(2, 48, 64, 3)` uint8."""
    return np.stack([np.asarray(Image.fromarray(x).resize((64, 48))) for x in load_sample_images().images])
