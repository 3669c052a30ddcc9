"""What a run will need and how fast it can be: read before anything is opened."""
