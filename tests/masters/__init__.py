"""Training on bfloat16 weights with fp32 masters."""
