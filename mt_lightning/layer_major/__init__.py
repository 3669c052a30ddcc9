"""Layer-major accumulation under Lightning: a window of ordinary steps, run unit by unit."""
