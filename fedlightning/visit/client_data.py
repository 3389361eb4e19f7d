"""What a client reads beside the batches of its training: :class:`ReadsData`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from fedlightning.datamodules.public import addressable, has_positions, public_loader, size_of
from fedlightning.datamodules.ready_batches import gives_batches
from fedlightning.datamodules.views import samples_at
from fedlightning.visit import probes
from fedlightning.visit.client_base import ClientBase
from fedlightning.visit.outputs import outputs


class ReadsData(ClientBase):
    """Public data, numbered samples and streams of a client; see :class:`~fedlightning.visit.client.Client`."""

    def next_batch(self, stream: str = "extra", module: LightningModule | None = None) -> Any:
        """Return the next training batch of an endless stream of the client's own."""
        if stream not in self._streams:
            self._streams[stream] = self._endless(stream)
        batch = self.precision.convert_input(next(self._streams[stream]))
        return probes.move_batch(self.module if module is None else module, batch)

    def public_batches(self, ratio: float = 1.0, stream: str = "public") -> Iterator[Any]:
        """Yield batches of public data without end, from a random subset that is drawn once for this visit.

        Batches are on the CPU, as the loader makes them; :func:`~fedlightning.visit.probes.move_batch` moves them.
        """
        return self._public_draws(addressable(*self._public()), ratio, stream)

    def _public_draws(self, loader: DataLoader[Any], ratio: float, stream: str) -> Iterator[Any]:
        dataset: Any = loader.dataset
        size = min(loader.batch_size or 1, len(dataset))
        count = min(max(size, round(ratio * self.num_samples)), len(dataset))
        subset = torch.randperm(len(dataset), generator=self.rng(stream))[:count]
        for lap in itertools.count():
            order = subset[torch.randperm(count, generator=self.rng(f"{stream}-{lap}"))].tolist()
            for start in range(0, count - size + 1, size):
                yield loader.collate_fn(samples_at(dataset, order[start : start + size]))

    def _public(self) -> tuple[Any, str]:
        """Return the data module's loader of public data, or `None`, and the data module's name."""
        data = self._runner.data
        return data.public_dataloader(), type(data).__name__

    @property
    def public_size(self) -> int:
        """Number of public samples; 0 without any."""
        return size_of(*self._public())

    def public(
        self,
        ids: Tensor | None = None,
        *,
        targets: Tensor | None = None,
        batch_size: int | None = None,
        shuffle: bool = False,
    ) -> DataLoader[Any]:
        """Return a loader of public samples, for a :class:`Phase` or :meth:`outputs`."""
        loader = public_loader(
            *self._public(), ids, targets=targets, batch_size=batch_size, shuffle=shuffle, reader=f"public of {self.id}"
        )
        self._runner.start_sampler(loader, self.message, purpose="public")
        return loader

    def samples(
        self,
        targets: Tensor | None = None,
        *,
        ids: Tensor | None = None,
        training: bool | None = None,
        split: str = "train",
    ) -> DataLoader[Any]:
        """Return a loader of the client's own samples, each with its number, for a :class:`Phase` or :meth:`outputs`.

        Sample `i` is the `i`-th of the split's dataset, in every round: what is found out about it can be kept by its number.
        """
        loader = self.loader(split)
        if loader is None or not has_positions(loader):
            what = (
                "no samples"
                if loader is None
                else f"samples without a number ({type(getattr(loader, 'dataset', loader)).__name__})"
            )
            raise ValueError(
                f"client.samples(split='{split}'): client '{self.id}' has {what}. Use a map-style dataset of samples, "
                "and a batch_size."
            )
        training = targets is not None if training is None else training
        found = public_loader(
            loader,
            f"client '{self.id}'",
            ids,
            targets=targets,
            shuffle=training and bool(getattr(loader.sampler, "shuffle", True)),
            reader=f"samples of {self.id}",
            drop_last=training and bool(loader.drop_last),
        )
        self._runner.start_sampler(found, self.message, purpose=f"samples-{split}")
        return found

    def one_pass(self, split: str = "train") -> Iterable[Any]:
        """Return batches with every sample of a split, for :meth:`outputs`; a tail that training leaves out too."""
        loader = self.loader(split)
        return self.samples(training=False, split=split) if has_positions(loader) else loader or ()

    def outputs(
        self,
        loader: Iterable[Any],
        forward: Callable[[LightningModule, Any], Tensor],
        module: LightningModule | None = None,
    ) -> Tensor:
        """Return what a function of module and batch gives over a loader, in eval mode, without gradients or a trace."""
        module = self.module if module is None else module
        return outputs(module, loader, forward, self.device, self.precision, *self.next_probe())

    def _batches(self, split: str) -> Iterator[Any]:
        loader = self.loader(split)
        self.selections += split == "val"
        self._runner.start_sampler(loader, self.message, purpose=f"probe-{split}")
        yield from loader if loader is not None else ()

    def _endless(self, stream: str) -> Iterator[Any]:
        loader = self.loader("train")
        assert loader is not None
        lap = 0
        while True:
            count, size = len(loader.dataset), loader.batch_size or 1  # type: ignore[arg-type]
            order = torch.randperm(count, generator=self.rng(f"{stream}-{lap}"))
            if not getattr(loader.sampler, "shuffle", True):
                order = torch.arange(count)
            for start in range(0, count - size + 1 if loader.drop_last else count, size):
                picked = order[start : start + size].tolist()
                samples = loader.dataset[picked[0]] if gives_batches(loader) else samples_at(loader.dataset, picked)
                yield loader.collate_fn(samples)
            lap += 1
