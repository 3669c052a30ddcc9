"""What a Lightning user expects of the strategy: callbacks, loops, names, the CLI."""
