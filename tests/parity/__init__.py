"""Parity: a paged run equals plain Lightning, bit for bit."""
