"""Engines decide where clients work. One file each; `choice.py` makes the one of a name."""
