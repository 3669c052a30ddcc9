"""Memory: peak memory of whole processes, measured from outside."""
