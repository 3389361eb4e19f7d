"""Diagnostics of layers: sensitivity, gradient variance, Hessian trace, similarity between clients."""
