"""What a run needs, imported once; every run's process is forked from the one that imported this."""

# ruff: noqa: F401

import fedlightning.commands.run
import fedlightning.evaluation.runs
import fedlightning.experiments.plan

# isort: split
import sklearn.datasets
import sklearn.model_selection
