"""Our training step against PyTorch's own stack; see `__main__.py`."""
