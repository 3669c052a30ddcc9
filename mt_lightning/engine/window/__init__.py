"""The micro-batches of one step, run unit by unit instead of one after the other."""
