"""Attack the strategy with bad settings, broken drives and failing user code."""
