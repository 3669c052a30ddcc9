"""Adam state in a few bits per value: the formats, their kernels, and the slow reference beside."""
