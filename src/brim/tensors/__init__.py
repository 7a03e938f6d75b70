"""Tensors written batch by batch into the file that they end in, and read back without being loaded."""
