"""Layer-major accumulation gives what the usual order gives, with two reads of the weights."""
