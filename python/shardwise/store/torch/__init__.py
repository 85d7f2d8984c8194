"""The forms that PyTorch writes, read without PyTorch."""
