"""Batches that Lightning's loops have dropped without a word, because a hook or a step raised StopIteration."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import IterableDataset


def refuse_lost_batches(
    loop: Any, step: str, module: LightningModule, loader: Any, expected: float = math.inf, fitting: bool = True
) -> None:
    """Raise if a loop of a Trainer has ended in the middle of a batch.

    Lightning takes a StopIteration for the end of the data wherever it comes from, so a step that calls `next` on an
    exhausted iterator would train or score a client on a part of its data. A module that ends an epoch by returning -1
    from `on_train_batch_start`, and one whose step takes `dataloader_iter`, are served as before.
    """
    if is_param_in_hook_signature(getattr(module, step), "dataloader_iter", explicit=True):
        return
    progress = loop.batch_progress
    count = progress.total if fitting else progress.current  # the Trainer that scores serves many models
    lost = count.ready > count.processed or count.started > count.completed
    skipped = count.started < count.ready  # the module has returned -1
    if math.isfinite(expected) and not skipped and not isinstance(getattr(loader, "dataset", None), IterableDataset):
        lost |= progress.current.completed < expected
    if lost:
        done = progress.current.completed
        raise RuntimeError(
            f"StopIteration in {step}, or in a hook or the loader before it, ended the epoch after {done} batches. "
            "Lightning takes it for the end of the data, so the rest of the client's data would be left out. It comes from "
            "next() on an iterator that is exhausted: give next() a default, or begin the iterator anew"
        )
