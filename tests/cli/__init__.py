"""The `megatrain` command and the examples."""
