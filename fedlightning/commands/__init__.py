"""The commands behind ``fedlightning``; each is imported when it is run. The entry point is ``fedlightning.cli``."""
