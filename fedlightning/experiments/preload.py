"""What a run needs, imported once; every run's process is forked from the one that imported this."""

# ruff: noqa: F401

import fedlightning.config.parsing
import fedlightning.experiments.plan
import fedlightning.study.runs

# isort: split
import sklearn.datasets
import sklearn.model_selection
