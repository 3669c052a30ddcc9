"""fp32 masters whose upper halves are the bfloat16 weights of pages, and where the rest is kept."""
