"""The formats that PyTorch writes, read without PyTorch."""
