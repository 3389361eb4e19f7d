"""Going on from where a run stopped: saved states, locks, signals, loggers."""
