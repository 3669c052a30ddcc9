"""The bytes that training moves, predicted by a simulator that shares no code with the package."""
