"""PyTorch for tests that load torchvision, timm or transformers beside its CPU build."""

import contextlib

import pytest


@pytest.fixture(scope="module")
def torch():
    """PyTorch, with names that its CPU build lacks, which torchvision looks up when it is imported."""
    torch = pytest.importorskip("torch")
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    yield torch
    del library  # and with it what it defined
