"""The Hydra settings."""
