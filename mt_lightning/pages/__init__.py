"""What moves: the identity and layout of pages, and the table of where each stands. Pure data."""
