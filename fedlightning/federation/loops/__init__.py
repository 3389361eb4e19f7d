"""When clients are visited: synchronous rounds."""
