"""Losses that never hold the logits of all tokens at once."""
