"""Corners of torch, Lightning, rich and our own past that the rest of the code need not know, each in a file of its own."""

from fedlightning.compat.pytorch_lightning import use_lightning_for_pytorch_lightning

__all__ = ["use_lightning_for_pytorch_lightning"]
