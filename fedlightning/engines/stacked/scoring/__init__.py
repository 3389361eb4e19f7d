"""The parts of a stacked evaluation: the models, their batches, the step, what it logs, and each client's own end."""
