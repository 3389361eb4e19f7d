"""What several algorithms need: models kept at the server, representations, prototypes, sub-models."""
