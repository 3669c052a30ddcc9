"""Weights out of runs, checkpoints and modules, as safetensors, one piece in RAM at a time."""
