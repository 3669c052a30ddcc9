"""The inputs of units between forward and backward: in RAM, and on disk where RAM is short."""
