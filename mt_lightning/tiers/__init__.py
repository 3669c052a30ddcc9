"""Where bytes live and how they move: frames, files, commits, I/O, the device link. No policy."""
