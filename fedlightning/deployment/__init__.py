"""Models of a finished run: exported, loaded, uploaded."""
