"""Imports that runs, plans and reports need. Their processes are forked from one that has imported this module.

It starts no thread and asks nothing about GPUs: a forked process could use neither thread pools nor a CUDA context. Where
pandas brings pyarrow, its allocator has a thread, which the allocator itself begins anew in a forked process.

The modules live as long as their process does. Frozen, they are out of the garbage collector's sight, so that no child spends
a third of a second on looking through them (and on copying the pages that it writes its marks to).
"""

# ruff: noqa: F401

import fedlightning.config.parsing
import fedlightning.engines.sequential
import fedlightning.experiments.plan
import fedlightning.guards.watchdog
import fedlightning.report.build
import fedlightning.server.progress
import fedlightning.study.finished_runs
import fedlightning.trainer

# isort: split
import gc
from contextlib import suppress

import sklearn.datasets
import sklearn.model_selection
import torch._dynamo  # the first optimizer of a process imports it
import torch.utils.serialization.config
from scipy import stats

with suppress(ImportError):
    import attrs  # jsonargparse's parser does

gc.collect()
gc.freeze()
