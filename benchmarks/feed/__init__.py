"""Examples a second from disk to host memory: chipwise beside Grain, PyTorch, WebDataset and a plain copy."""
