"""What a pack will weigh, before a byte of it is written."""

import numpy as np
import pytest

from chipwise.data.pack.packing import Packing
from pictures import encoded, files, smooth, write


def test_18632_images_at_224_are_2_8_gigabytes(tmp_path):
    """A cache of float32 took 11.2 GB for these."""
    pixels = 18_632 * 224 * 224 * 3
    assert (f"{pixels / 1e9:.2f}", f"{pixels * 4 / 1e9:.1f}") == ("2.80", "11.2")

    class Photographs:
        def __len__(self):
            return 18_632

        def __getitem__(self, index):
            return {"image": encoded(smooth(index, (240, 320))), "label": 0}

    job = Packing(Photographs(), tmp_path / "out", size=224)
    assert pixels < job.prediction.bytes < pixels + 18_632 * 64  # labels, names and checksums
    assert job.prediction.shape == (224, 224, 3) and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("n", [63, 64, 65])
def test_raw_is_exact_but_for_headers_and_manifest(tmp_path, n):
    rows = [{"image": np.full((9, 7, 3), i, np.uint8), "label": i % 3} for i in range(n)]
    job = Packing(rows, tmp_path / "out")
    assert job.prediction.exact and job.prediction.shape == (9, 7, 3)
    found = sum(len(data) for name, data in files(job.run().path).items() if name.endswith(".npy"))
    # A label that came as 64 bits is stored as 32
    assert job.prediction.bytes - 4 * n + 3 * 128 == found


def test_jpeg_is_estimated_from_a_sample(tmp_path):
    job = Packing(write(tmp_path / "src", 40), tmp_path / "out", store="jpeg", size=20)
    assert not job.prediction.exact and job.prediction.enlarged == 1.0
    assert job.prediction.splits["train"].examples == 120 and job.prediction.seconds > 0
    report = job.run()
    assert report.enlarged == 120 == report.images
    assert report.splits["train"]["bytes"] == pytest.approx(job.prediction.bytes, rel=0.1)
    assert report.splits["train"]["files"] == 4
