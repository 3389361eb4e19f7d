"""What a client reads beside the batches of its training: :class:`ReadsData`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from fedlightning.datamodules.public import addressable, is_iterable, public_loader, size_of
from fedlightning.datamodules.views import samples_at
from fedlightning.visit import probes
from fedlightning.visit.client_base import ClientBase
from fedlightning.visit.outputs import outputs


class ReadsData(ClientBase):
    """Public data, numbered samples and streams of a client; see :class:`~fedlightning.visit.client.Client`."""

    def next_batch(self, stream: str = "extra", module: LightningModule | None = None) -> Any:
        """Return the next training batch of an endless stream of the client's own.

        Args:
            stream: Name of the stream; each name is an independent one.
            module: The batch is moved to the device of this module. `None`: the client's own, which is on the device in
                a fit.
        """
        if stream not in self._streams:
            self._streams[stream] = self._endless(stream)
        batch = self.precision.convert_input(next(self._streams[stream]))
        return probes.move_batch(self.module if module is None else module, batch)

    def public_batches(self, ratio: float = 1.0, stream: str = "public") -> Iterator[Any]:
        """Yield batches of public data without end, from a random subset that is drawn once for this visit.

        Batches are on the CPU, as the loader makes them; :func:`~fedlightning.visit.probes.move_batch` moves them.

        Args:
            ratio: Size of the subset over the client's own training samples, at least one batch and at most all samples.
            stream: Name of the draws; each name is an independent one.

        Raises:
            ValueError: If the data module has no public data, or they are iterable.
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
        """Return a loader of public samples, for a :class:`Phase` or :meth:`outputs`.

        Args:
            ids: Positions of the samples in the public data, int64; batches come in their order. `None`: all.
            targets: A row for each of `ids`. A batch is then the pair `(batch, target_rows)`.
            batch_size: Samples of a batch. `None`: that of the public data.
            shuffle: Draw an order by address; every epoch of a fit draws its own.

        Raises:
            ValueError: If there are no public data, they are iterable, or `ids` and `targets` do not fit them.
        """
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

        Args:
            targets: A row for each sample. A batch is then the pair `(batch, target_rows)`.
            ids: Numbers of the samples, int64. `None`: all.
            training: Give batches as those of training: their size, an addressed order if that is shuffled, no smaller last
                batch with `drop_last`. Else all samples come in the order of their numbers (or of `ids`). `None`: if there
                are `targets`.
            split: Split to read.

        Raises:
            ValueError: If the split has no samples with numbers, or `targets` another number of rows.
        """
        loader = self.loader(split)
        if loader is None or is_iterable(loader):
            what = (
                "no samples"
                if loader is None
                else f"samples without a number ({type(getattr(loader, 'dataset', loader)).__name__})"
            )
            raise ValueError(
                f"client.samples(split='{split}'): client '{self.id}' has {what}. Use a map-style dataset."
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

    def outputs(
        self,
        loader: Iterable[Any],
        forward: Callable[[LightningModule, Any], Tensor],
        module: LightningModule | None = None,
    ) -> Tensor:
        """Return what a function of module and batch gives over a loader, in eval mode, without gradients or a trace.

        Args:
            loader: Batches, such as :meth:`public` gives. Each is moved to the run's device.
            forward: Returns rows for a batch, on the device and in the precision of the run.
            module: A module other than the client's own.

        Returns:
            All rows, in fp32 at least, on the CPU.
        """
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
                yield loader.collate_fn(samples_at(loader.dataset, picked))
            lap += 1
