"""The parts of a stacked evaluation: models, batches, steps, logged values, and what each client's own module does."""
