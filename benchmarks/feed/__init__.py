"""Examples a second from disk to host memory: chipwise, Grain, PyTorch, WebDataset and a plain copy."""
