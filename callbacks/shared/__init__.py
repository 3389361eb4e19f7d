"""Code that several algorithms share: models kept at the server, representations, prototypes, sub-models and steps."""
