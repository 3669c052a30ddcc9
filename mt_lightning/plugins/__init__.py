"""Lightning's plugins for paged training: precision and checkpoint files."""
