"""Corners of torch, Lightning and our own past that the rest of the code need not know, each in a file of its own."""
