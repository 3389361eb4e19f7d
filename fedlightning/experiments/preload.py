"""Imports that every run needs. The processes of runs are forked from one that has imported this module."""

# ruff: noqa: F401

import fedlightning.config.parsing
import fedlightning.experiments.plan
import fedlightning.study.runs

# isort: split
import sklearn.datasets
import sklearn.model_selection
