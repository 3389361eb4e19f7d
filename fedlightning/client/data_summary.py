"""A summary of the clients' data in plain values, without a sample.

It is found where the data are (:func:`describe`), and it is all that the server ever gets to know of them. Where every client
is a site of its own, the sites' descriptions are put together by :meth:`DataSummary.merged`.

The batches of a client side are looked at here, too: how many samples they have, their addressed order, the first for checks.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from torch.utils.data import DataLoader, IterableDataset

from fedlightning.contract.messages import Message
from fedlightning.datamodules.federated_data import SPLITS, FederatedDataModule, sort_clients
from fedlightning.datamodules.groups import hash_samples
from fedlightning.datamodules.held_out import exclude_clients
from fedlightning.datamodules.partition_report import class_names_of
from fedlightning.datamodules.public_only import public_content
from fedlightning.datamodules.sampling import (
    AddressedSampler,
    preserve_generators,
    reseed_loader,
    samples_in,
    seed_in_workers,
)
from fedlightning.datamodules.views import samples_at
from fedlightning.seeding import address, isolated

if TYPE_CHECKING:
    from fedlightning.client.runtime import ClientRuntime


EPOCHS_OF_A_VISIT = 2**31
"""More than any visit has, so that its epochs never get the address of another round's."""


def count_used_samples(runner: ClientRuntime, loader: DataLoader[Any] | None) -> int:
    """Return the samples that one epoch uses, after `drop_last` and `limit_train_batches`."""
    length = 0 if loader is None else len(loader)
    if loader is None or length == 0:
        return 0
    samples = samples_in(loader)
    size = loader.batch_size or math.ceil(samples / length)
    return min(samples, runner.settings.train_batches(length) * size)


def start_sampler(
    runner: ClientRuntime,
    loader: Any,
    message: Message,
    purpose: str = "",
    epoch_offset: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> None:
    """Address the order of the batches: a function of (seed, client, visit, epoch), wherever the visit runs."""
    seed_in_workers(loader)
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, AddressedSampler):
        seed = runner.settings.seed
        sampler.start(
            seed=address(seed, purpose) if purpose else seed,
            round=message.visit,
            epochs_per_round=EPOCHS_OF_A_VISIT,
            epoch_offset=epoch_offset,
            rank=rank,
            world_size=world_size,
        )
    else:
        reseed_loader(loader, runner.settings.seed, purpose, "samplers", message.client, message.visit)


def knows_groups(runner: ClientRuntime) -> bool:
    """Return whether the group (a patient) of every training sample is known."""
    return all(runner.data.sample_groups(client) is not None for client in runner.data.client_ids)


def train_loaders(runner: ClientRuntime) -> Iterator[DataLoader[Any]]:
    """Yield the training loaders of the clients that have a batch, for checks at the start."""
    for client in runner.data.client_ids:
        loader = runner.data.at_round(0).client_dataloader(client, "train")
        if loader is not None and len(loader) > 0:
            yield loader


def take_first_batch(runner: ClientRuntime) -> Any:
    """Return a training batch of the first client that has one, for checks at the start; else `None`."""
    for loader in train_loaders(runner):
        dataset, size = loader.dataset, loader.batch_size or 1
        if isinstance(dataset, IterableDataset) or loader.batch_sampler is None:
            with isolated(runner.settings.seed, "first batch"), preserve_generators(dataset):
                return runner.blueprint.precision.convert_input(next(iter(loader)))
        chosen = range(min(size, len(dataset)))  # type: ignore[arg-type]
        with preserve_generators(dataset):
            return runner.blueprint.precision.convert_input(loader.collate_fn(samples_at(dataset, chosen)))
    return None


def limited(batches: int, limit: int | float | None) -> int:
    """Return the number of batches that a limit leaves, as in Lightning's `limit_*_batches`.

    Example:
        >>> limited(10, 3), limited(10, 0.25), limited(10, None)
        (3, 2, 10)
    """
    if limit is None:
        return batches
    return min(batches, limit) if isinstance(limit, int) else int(batches * limit)


MEANING = {
    "inputs": "columns, categories, scale, statistics and vocabulary",
    "targets": "target, classes (or ClassLabel) and target_statistics",
}
"""What one network takes at all sites -> what says what it means."""
Detail = Literal["classes", "splits", "loaders", "batches", "pooled", "public", "public content"]
"""What is looked up only where it is asked for: it may take time where clients or samples are many."""


@dataclass(frozen=True)
class DataSummary:
    """What is known of the data of a federation; all values are plain. It reads like a data module that has no samples.

    Attributes:
        module: Class of the data module, or of the user's that it divides among clients.
        client_ids: The clients that take part in training, in the order of the data module.
        sizes: Samples in `"train"`, `"val"` and `"test"` of each client, of those left out of training too.
        partition_name: The way the data were divided, in a few words.
        planted_groups: The group of each client, where the clients were made so.
        seed: Seed of the data, 0 if they have none: it draws who is held out.
        together: Whether all clients' data are in one place. Else nothing can be trained or scored on their union, and no
            client's model on another client's data.
        classes: Training samples of each class by client, `None` for a client whose data have no labels.
        class_names: Names of the classes, where the data have names for them.
        splits: A short hash of who holds which samples, by split: equal for two runs on the same split.
        loaders: `batch_size`, `drop_last` and `shuffle` of each client's training loader; clients without one are missing.
        batches: Training batches in an epoch of each client, as far as they are used.
        pooled: Splits whose union over the clients can be had in one place.
        public: What is known of public data, for reports; `None`: there are none.
        public_print: Number and batch size of the public samples, and which they are where they are held by index.
        public_content: A hash of what the public data hold; `None` if nothing of it stays the same.
        content: A hash of a few training samples of some clients, where these are in memory; else `None`.
        over_rounds: Training samples of a client in rounds 0, 1, ..., the last number from then on, where the training
            data change from round to round. `sizes` are then of all rounds.
        meaning: A hash of what the network's `"inputs"` and `"targets"` are, in order, where they have names, and of each
            option by which they mean something else.
        statistics: What the clients are to agree on before round 1: columns and words, no values; `None`: nothing.
    """

    module: str
    client_ids: list[str]
    sizes: Mapping[str, tuple[int, int, int]]
    partition_name: str = "natural"
    planted_groups: dict[str, int] | None = None
    seed: int = 0
    together: bool = True
    classes: Mapping[str, list[int] | None] = field(default_factory=dict)
    class_names: list[str] = field(default_factory=list)
    splits: Mapping[str, str] = field(default_factory=dict)
    loaders: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    batches: Mapping[str, int] = field(default_factory=dict)
    pooled: tuple[str, ...] = ()
    public: dict[str, Any] | None = None
    public_print: str | None = None
    public_content: str | None = None
    content: str | None = None
    statistics: dict[str, Any] | None = None
    over_rounds: Mapping[str, list[int]] = field(default_factory=dict)
    meaning: Mapping[str, str] = field(default_factory=dict)

    def num_samples(self, client: str, split: str = "train", round: int | None = None) -> int:
        """Return the number of samples that a client holds in a split; for training in a round, if one is given."""
        if round is not None and split == "train" and client in self.over_rounds:
            counts = self.over_rounds[client]
            return counts[min(round, len(counts) - 1)]
        return self.sizes[client][SPLITS.index(split)]

    def exclude(self, clients: Collection[str]) -> DataSummary:
        """Return the description in which some clients do not take part in training; they keep their sizes.

        Example:
            >>> few = DataSummary("Mine", ["a", "b"], {"a": (3, 1, 1), "b": (5, 1, 1)}).exclude(["b"])
            >>> few.client_ids, few.num_samples("b")
            (['a'], 5)
        """
        out = set(clients)
        return replace(self, client_ids=[client for client in self.client_ids if client not in out])

    @classmethod
    def merged(cls, sites: Sequence[DataSummary]) -> DataSummary:
        """Put together what sites tell of their own clients, in the order of the sites. Their data are not in one place.

        Example:
            >>> a, b = (DataSummary("Mine", [name], {name: (3, 1, 0)}, splits={"train": name}) for name in "ab")
            >>> both = DataSummary.merged([a, b])
            >>> both.client_ids, both.together, both.splits["train"]
            (['a', 'b'], False, '3554d2b8a1e3')
        """
        ids = [client for site in sites for client in site.client_ids]
        twice = next((client for client, count in Counter(ids).items() if count > 1), None)
        if twice is not None:
            raise ValueError(f"Two sites have a client '{twice}'. Give every client a name of its own.")
        first = sites[0]
        for site in sites[1:]:
            if (site.public_print, site.public_content) != (first.public_print, first.public_content):
                raise ValueError(
                    f"The sites of '{first.client_ids[0]}' and '{site.client_ids[0]}' have different public data "
                    f"({first.public_print or 'none'}; {site.public_print or 'none'}). Give every site the same."
                )
            for kind in (*MEANING, *sorted({*first.meaning, *site.meaning} - {*MEANING})):
                if site.meaning.get(kind) != first.meaning.get(kind):
                    raise ValueError(
                        f"The sites of '{first.client_ids[0]}' and '{site.client_ids[0]}' have different {kind}, or in "
                        f"another order, and one network is to take both. Give every site the same {MEANING.get(kind, kind)}."
                    )
            if site.statistics != first.statistics:
                raise ValueError(
                    f"The sites of '{first.client_ids[0]}' and '{site.client_ids[0]}' are to agree on different statistics "
                    f"({first.statistics or 'none'}; {site.statistics or 'none'}). Give every site the same scale, columns, "
                    "categories, ranges and least."
                )
        groups = [site.planted_groups for site in sites]
        grouped = all(group is not None for group in groups)
        return replace(
            first,
            client_ids=ids,
            sizes=_joined(site.sizes for site in sites),
            planted_groups=_joined(group or {} for group in groups) if grouped else None,
            together=False,
            content=None if None in (looks := [site.content for site in sites]) else _hash(looks),
            classes=_joined(site.classes for site in sites),
            splits={split: _hash([site.splits[split] for site in sites if site.client_ids]) for split in first.splits},
            loaders=_joined(site.loaders for site in sites),
            batches=_joined(site.batches for site in sites),
            over_rounds=_joined(site.over_rounds for site in sites),
            pooled=(),
        )


def describe(
    data: FederatedDataModule,
    leave_out: Collection[str] = (),
    details: Collection[Detail] = (),
    *,
    left_out: Iterable[str] = (),
    limit: int | float | None = None,
    together: bool = True,
) -> DataSummary:
    """Describe data that are here and set up. No sample is read, except for the hash of public data if that is asked for."""
    few = exclude_clients(data, leave_out) if leave_out else data
    ids = list(few.client_ids)
    everybody = [*ids, *left_out, *leave_out]
    details_of_data: dict[str, Any] = {}
    if "classes" in details:
        details_of_data["classes"] = {client: few.class_counts(client, "train") for client in everybody}
        details_of_data["class_names"] = class_names_of(few)
    if "splits" in details:
        details_of_data["splits"] = {split: few.fingerprint(split) for split in SPLITS}
    if "loaders" in details:
        details_of_data["loaders"], details_of_data["content"] = _loaders(few)
    if "batches" in details:
        details_of_data["batches"] = {
            client: limited(count, limit) if count else 0 for client, count in _batches(few, ids)
        }
    if "pooled" in details and together:
        details_of_data["pooled"] = tuple(split for split in SPLITS if few.pooled_dataloader(split) is not None)
    if "public" in details:
        details_of_data["public"] = few.public_report()
    if "public content" in details:
        public = few.public_dataloader()
        if public is not None:
            details_of_data["public_print"], details_of_data["public_content"] = (
                _public_print(public),
                public_content(public),
            )
    seed = getattr(data, "seed", 0)
    return DataSummary(
        type(data.original).__name__,
        ids,
        few.sizes_of(everybody),
        few.partition_name,
        few.planted_groups,
        seed if isinstance(seed, int) else 0,
        together,
        statistics=few.wanted_statistics,
        meaning={kind: _hash(names) for kind, names in few.meaning.items()},
        over_rounds={client: few.sizes_by_round(client) for client in everybody} if few.drifts else {},
        **details_of_data,
    )


def _batches(data: FederatedDataModule, clients: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield the training batches of clients; their loaders are made only where it takes that to know."""
    alike = data.common_batches
    if alike is None:
        for client in clients:
            loader = data.client_dataloader(client, "train")
            yield client, 0 if loader is None else len(loader)
        return
    size, whole = alike["batch_size"], bool(alike["drop_last"])
    for client, (count, _, _) in data.sizes_of(clients).items():
        yield client, count // size if whole else -(-count // size)


LOOKED_AT = 16
"""Clients of whose training data some samples are looked at."""


def _loaders(data: FederatedDataModule) -> tuple[dict[str, Mapping[str, Any]], str | None]:
    """Return what is known of the training loaders, and a hash of a few samples that they give."""
    if data.common_batches is not None:
        alike: Mapping[str, Any] = dict(data.common_batches)
        return dict(zip(data.client_ids, itertools.repeat(alike), strict=False)), None
    loaders: dict[str, Mapping[str, Any]] = {}
    ordered = sort_clients(data.client_ids)
    looks: dict[str, str | None] = dict.fromkeys(ordered[:: -(-len(ordered) // LOOKED_AT) or 1])
    for client in data.client_ids:
        loader = data.client_dataloader(client, "train")
        if loader is not None:
            batches = getattr(loader, "batch_sampler", None)
            options: dict[str, Any] = {}
            for name, has in (("batch_size", batches), ("drop_last", batches), ("shuffle", loader.sampler)):
                value = getattr(loader, name, None)
                options[name] = value if value is not None else getattr(has, name, None)
            loaders[client] = options
            if client in looks:
                looks[client] = hash_samples(getattr(loader, "dataset", None))
    return loaders, _hash(looks) if any(looks.values()) else None


def _public_print(loader: Any) -> str:
    dataset: Any = getattr(loader, "dataset", loader)
    size = len(dataset) if hasattr(dataset, "__len__") else "unknown number of"
    indices = getattr(dataset, "indices", None)
    which = "" if indices is None else f" ({_hash([int(index) for index in indices])})"
    return f"{size} samples{which} in batches of {getattr(loader, 'batch_size', None)}"


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def _joined(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {client: value for part in parts for client, value in part.items()}
