"""Batch order by address: which samples form which batch is a function of (seed, client, round, epoch) alone.

Generators that samplers and datasets keep for themselves would go on from visit to visit; they are found and put back.
Loaders whose datasets give whole batches (`batch_size=None`) are counted by the samples in these.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from lightning.pytorch.utilities import CombinedLoader
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from fedlightning.errors import ConfigurationError
from fedlightning.seeding import address, generator, isolated

KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
NOT_LOOKED_INTO = (Tensor, np.ndarray, nn.Module, ModuleType, type, str, bytes)
MOST_ENTRIES = 64
"""Longer lists are data, which are not looked through."""
DEEPEST = 5


def own_generators(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the random generators that an object keeps in its attributes, each with its place.

    Example:
        >>> from torch.utils.data import RandomSampler
        >>> [place for place, _ in own_generators(RandomSampler(range(3), generator=torch.Generator()))]
        ['RandomSampler.generator']
    """
    yield from _find_generators(value, type(value).__name__, set(), 0)


def _find_generators(value: Any, place: str, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    if id(value) in seen or depth > DEEPEST or isinstance(value, NOT_LOOKED_INTO):
        return
    seen.add(id(value))
    if isinstance(value, KINDS):
        yield place, value
    elif isinstance(value, list | tuple | Mapping):
        if len(value) <= MOST_ENTRIES:
            pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
            for key, entry in pairs:
                yield from _find_generators(entry, f"{place}[{key!r}]", seen, depth + 1)
    elif isinstance(getattr(value, "__dict__", None), dict):
        for name, entry in vars(value).items():
            yield from _find_generators(entry, f"{place}.{name}", seen, depth + 1)


@contextmanager
def preserve_generators(*values: Any) -> Iterator[None]:
    """Within the block, generators of these objects may be drawn from; afterwards they stand where they stood.

    Example:
        >>> import random
        >>> class Noisy:
        ...     rng = None
        >>> data = Noisy()
        >>> data.rng = random.Random(0)
        >>> with preserve_generators(data):
        ...     first = data.rng.random()
        >>> data.rng.random() == first
        True
    """
    generators = [generator for value in values for _, generator in own_generators(value)]
    states = [state_of(generator) for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            set_state(generator, state)


def state_of(generator: Any) -> Any:
    """Return where a generator stands."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    """Let a generator stand where it stood."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


class _Seeding:
    """Seeds, in a worker process, the generators that its copies of a dataset and a collate function keep, each by torch's
    seed of the worker, then does what the loader's own function does.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.owners, self.then = (loader.dataset, loader.collate_fn), loader.worker_init_fn

    def __call__(self, worker: int) -> None:
        for owner in self.owners:
            for place, source in own_generators(owner):
                seed = address(torch.initial_seed(), place)
                if isinstance(source, torch.Generator):
                    source.manual_seed(seed)
                elif isinstance(source, np.random.Generator):
                    source.bit_generator.state = type(source.bit_generator)(seed).state
                else:
                    source.seed(seed % 2**32)
        if self.then is not None:
            self.then(worker)


def seed_in_workers(loader: Any) -> None:
    """Let each worker process of a loader draw from its dataset's own generators what no other one draws.

    Workers get copies, so all of them, in every epoch and visit, would draw the same. Torch's seed of a worker has the
    address of visit and epoch.

    Example:
        >>> data = torch.utils.data.TensorDataset(torch.zeros(3))
        >>> data.noise = random.Random(0)
        >>> loader = DataLoader(data, num_workers=2)
        >>> seed_in_workers(loader)
        >>> loader.worker_init_fn is None
        False
    """
    if isinstance(loader, DataLoader) and loader.num_workers and not isinstance(loader.worker_init_fn, _Seeding):
        if any(True for owner in (loader.dataset, loader.collate_fn) for _ in own_generators(owner)):
            loader.worker_init_fn = _Seeding(loader)


@contextmanager
def read_for_scores(loader: Any) -> Iterator[None]:
    """Within the block, a loader is read for scores: it draws what it would have drawn whoever was scored before.

    Example:
        >>> data = torch.utils.data.TensorDataset(torch.zeros(3))
        >>> data.noise = random.Random(0)
        >>> with read_for_scores(DataLoader(data)):
        ...     first = data.noise.random()
        >>> data.noise.random() == first
        True
    """
    seed_in_workers(loader)
    with preserve_generators(
        *(getattr(loader, name, None) for name in ("dataset", "sampler", "batch_sampler", "collate_fn"))
    ):
        yield


def reseed_loader(loader: Any, *parts: object) -> None:
    """Seed the torch generators of a loader and of its samplers by an address, so that a visit does not go on with another's.

    Example:
        >>> from torch.utils.data import DataLoader, WeightedRandomSampler
        >>> sampler = WeightedRandomSampler([1.0, 2.0, 3.0], 9, generator=torch.Generator())
        >>> loader, orders = DataLoader(range(3), sampler=sampler), []
        >>> for _ in range(2):
        ...     reseed_loader(loader, 0, "client", 1)
        ...     orders.append(list(sampler))
        >>> orders[0] == orders[1]
        True
    """
    if not isinstance(loader, DataLoader):
        return
    owners = (loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    generators: list[torch.Generator] = []
    for owner in owners:
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not other for other in generators):
            generator.manual_seed(address(*parts, len(generators)))
            generators.append(generator)


def going_on(loader: DataLoader[Any]) -> str | None:
    """Return the place of a generator that goes on from visit to visit, whatever address a visit has; else `None`.

    Example:
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> data = TensorDataset(torch.zeros(3))
        >>> going_on(DataLoader(data, shuffle=True)) is None
        True
        >>> data.noise = random.Random(0)
        >>> going_on(DataLoader(data, shuffle=True))
        'TensorDataset.noise'
    """
    samplers = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    addressed = [getattr(sampler, "generator", None) for sampler in (loader, *samplers)]
    for owner in (loader.dataset, loader.batch_sampler, loader.sampler, loader.collate_fn):
        for place, source in own_generators(owner):
            if all(source is not other for other in addressed):
                return place
    return None


class AddressedSampler(Sampler[int]):
    """A sampler of the indices `0 .. size - 1` in an order that depends on its address only.

    The order of epoch *e* of a visit is a permutation drawn from the address `(seed, "batches", client, round + e //
    epochs_per_round, e % epochs_per_round)`. `R` federated rounds of `E` epochs therefore see the very same batches as
    one plain `lightning.Trainer.fit` over `R * E` epochs with `start(epochs_per_round=E)`. Neither the engine nor the
    order in which clients are visited can change them, and the global random state is neither read nor written.

    Give `generator` to the `DataLoader` too: the seeds of worker processes then have an address as well.

    Args:
        size: Number of samples; 0 gives an empty sampler.
        client: Name of the client; `"pooled"` for the union of all clients.
        shuffle: `False` gives the order `0 .. size - 1`.
        seed: Seed until `start` sets another one.

    Raises:
        ValueError: If `size` is negative.

    Example:
        >>> from fedlightning.datamodules import AddressedSampler
        >>> one, other = AddressedSampler(100, client="a"), AddressedSampler(100, client="a")
        >>> one.start(seed=0, round=3)
        >>> other.start(seed=0, round=2, epochs_per_round=5)
        >>> other.set_epoch(5)  # five epochs after the start of round 2 begins round 3
        >>> list(one) == list(other)
        True
    """

    def __init__(self, size: int, client: str, shuffle: bool = True, seed: int = 0) -> None:
        if size < 0:  # by hand: one is made in each visit
            raise ConfigurationError(f"AddressedSampler got size={size}. Use a whole number of at least 0.")
        self.size, self.client, self.shuffle = int(size), str(client), bool(shuffle)
        self.generator = torch.Generator()
        self.start(seed=seed, round=0)

    def start(
        self,
        *,
        seed: int,
        round: int,
        epochs_per_round: int = 1,
        epoch_offset: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Begin a client visit; the next iteration is its epoch 0.

        Args:
            seed: Seed of the run.
            round: Round of the visit's first epoch.
            epochs_per_round: Number of epochs after which the round in the address goes up by one.
            epoch_offset: Number that Lightning gives to the visit's first epoch (not 0 if a Trainer is used again).
            rank: This process among `world_size` that share each batch of the client.
            world_size: With more than one, rank `r` gets `order[r::world_size]`, padded by wrap-around to equal length:
                the ranks' k-th batches together are the k-th batch of one process with `world_size` times the batch
                size.

        Raises:
            ValueError: If `epochs_per_round` or `world_size` is below 1, or `rank` is outside `0 .. world_size - 1`.
        """
        if epochs_per_round < 1:
            raise ValueError(f"AddressedSampler.start got epochs_per_round={epochs_per_round}; use 1 or more.")
        if world_size < 1 or not 0 <= rank < world_size:
            raise ValueError(
                f"AddressedSampler.start got rank={rank}, world_size={world_size}; 0 <= rank < world_size."
            )
        self.seed, self.round = int(seed), int(round)
        self.epochs_per_round, self.epoch_offset = int(epochs_per_round), int(epoch_offset)
        self.rank, self.world_size = int(rank), int(world_size)
        self.set_epoch(self.epoch_offset)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch to iterate, as Lightning counts it (Lightning calls this before every training epoch).

        Raises:
            ValueError: If the epoch is before the visit's first one.
        """
        self.go_to(epoch)
        self.generator.manual_seed(address(self.seed, "workers", *self._address))

    def go_to(self, epoch: int) -> None:
        """Set the epoch for `permutation` only: `generator`, which seeds workers, stays as it is.

        Raises:
            ValueError: If the epoch is before the visit's first one.
        """
        local = int(epoch) - self.epoch_offset
        if local < 0:
            raise ValueError(
                f"AddressedSampler of client {self.client!r} was set to epoch {epoch}, before the visit's first epoch "
                f"{self.epoch_offset}; call start(epoch_offset=...) with the Trainer's current_epoch."
            )
        self.epoch = int(epoch)
        rounds, epoch_in_round = divmod(local, self.epochs_per_round)
        self._address = (self.client, self.round + rounds, epoch_in_round)

    def permutation(self) -> torch.Tensor:
        """Return the whole order of the current epoch, before ranks share it: int64 of shape `(size,)`."""
        if not self.shuffle:
            return torch.arange(self.size)
        return torch.randperm(self.size, generator=generator(self.seed, "batches", *self._address))

    def order(self) -> list[int]:
        """Return `permutation` as a list."""
        order: list[int] = self.permutation().tolist()
        return order

    def __iter__(self) -> Iterator[int]:
        order = self.order()
        if self.world_size > 1 and order:
            padded = len(self) * self.world_size
            order = (order * -(-padded // len(order)))[:padded]
        return iter(order[self.rank :: self.world_size])

    def __len__(self) -> int:
        return -(-self.size // self.world_size)


_COUNTED: WeakKeyDictionary[DataLoader[Any], int] = WeakKeyDictionary()


class CombinedBatches(IterableDataset[Any]):
    """The batches of a Lightning `CombinedLoader`, each a dict or list of its loaders' batches; all samples count.

    Args:
        combined: The loader. Its order is the epoch's, as that of any other: by torch's global generator.

    Example:
        >>> pairs = CombinedLoader({"x": DataLoader(range(4), batch_size=2), "u": DataLoader(range(6), batch_size=2)})
        >>> batches = CombinedBatches(pairs)
        >>> len(batches), [batch["x"].tolist() for batch in batches], batches.num_samples
        (2, [[0, 1], [2, 3]], 10)
    """

    def __init__(self, combined: CombinedLoader) -> None:
        self.iterables, self.loaders = combined.iterables, combined.flattened
        self.mode = combined._mode  # private: nothing public tells how loaders are combined

    @property
    def num_samples(self) -> int:
        """The samples of all loaders."""
        return sum(samples_in(loader) for loader in self.loaders)

    def __len__(self) -> int:
        return (min if self.mode == "min_size" else max)(len(loader) for loader in self.loaders)

    def __iter__(self) -> Iterator[Any]:
        for place, loader in enumerate(self.loaders):
            reseed_loader(loader, int(torch.randint(2**31, ())), place)
        for batch, _, _ in CombinedLoader(self.iterables, self.mode):
            yield batch


def unchanged(batch: Any) -> Any:
    """Return a batch as it is: the `collate_fn` of loaders whose datasets give batches."""
    return batch


def gives_batches(loader: Any) -> bool:
    """Return whether each item of a loader's dataset is a batch: it has neither a batch size nor a sampler of batches.

    Example:
        >>> from torch.utils.data import SequentialSampler
        >>> indices = BatchSampler(SequentialSampler(range(6)), 2, False)
        >>> gives_batches(DataLoader(range(6), batch_size=None)), gives_batches(DataLoader(range(6), batch_size=2))
        (True, False)
        >>> gives_batches(DataLoader(range(6), sampler=indices, batch_size=None))  # its dataset is of samples
        False
    """
    no_batches = isinstance(loader, DataLoader) and loader.batch_sampler is None
    return no_batches and not isinstance(loader.sampler, BatchSampler)


def each_once(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader that gives each sample of a data set once, whatever its sampler leaves out or repeats."""
    workers = {"num_workers": loader.num_workers, "worker_init_fn": loader.worker_init_fn}
    return DataLoader(loader.dataset, loader.batch_size, collate_fn=loader.collate_fn, **workers)  # type: ignore[arg-type]


def samples_in(loader: DataLoader[Any] | None) -> int:
    """Return the samples of a loader: the size of its dataset, or where that gives batches, what one pass counts in them."""
    if loader is None:
        return 0
    if not gives_batches(loader):
        return len(loader.dataset)  # type: ignore[arg-type]
    if isinstance(loader.dataset, CombinedBatches):
        return loader.dataset.num_samples
    if loader not in _COUNTED:
        with isolated(0, "samples"), preserve_generators(loader.dataset, loader.sampler):
            note_samples(loader, sum(samples_of(batch) for batch in islice(loader, len(loader))))
    return _COUNTED[loader]


def note_samples(loader: DataLoader[Any], count: int) -> None:
    """Note how many samples the batches of a loader have, where that is known, so that nobody counts them."""
    _COUNTED[loader] = count


def samples_of(batch: Any) -> int:
    """Return the samples in a batch: what most of its tensors have in their first dimension, or one.

    Example:
        >>> import torch
        >>> samples_of((torch.zeros(8, 3), torch.zeros(8))), samples_of((torch.zeros(3), torch.tensor(1)))
        (8, 1)
    """
    sizes: list[int] = []
    apply_to_collection(batch, Tensor, lambda leaf: sizes.append(len(leaf) if leaf.dim() else 1))
    size, count = Counter(sizes).most_common(1)[0] if sizes else (1, 1)
    return size if 2 * count > len(sizes) else 1
