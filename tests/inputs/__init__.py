"""The inputs of units: counted, moved to disk and back, with the bits of plain PyTorch."""
