"""PyTorch forms of operators that need more than a few lines: dense calls, and how they are put together."""
