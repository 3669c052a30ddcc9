"""Samples: texts, conversations and prompts, tokenised with a mark on what is trained."""

from __future__ import annotations
