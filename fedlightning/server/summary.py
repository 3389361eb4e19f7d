"""What a run says in the end: the contents of `summary.json`.

The terms on which a run was trained: what a comparison with another run must know beside the scores.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from fedlightning.client.data_summary import DataSummary
from fedlightning.client.fit import have_memory
from fedlightning.compat.system import peak_memory_mb
from fedlightning.contract import CallbackList, FederatedCallback
from fedlightning.datamodules.federated_data import SPLITS
from fedlightning.engines.contract import Engine
from fedlightning.run.folder import versions
from fedlightning.server.costs import SPENT
from fedlightning.server.model_store import describe
from fedlightning.server.server import Server
from fedlightning.storage.files import config_hash


def weighting_of(callbacks: CallbackList) -> str:
    """Return by what clients are weighted: `"samples"`, `"uniform"`, `"log"`, or the callback that does it its own way.

    Example:
        >>> from fedlightning.callbacks import FedAvg, FedBABU
        >>> weighting_of(CallbackList([])), weighting_of(CallbackList([FedAvg()])), weighting_of(CallbackList([FedBABU()]))
        ('samples', 'samples', 'uniform')
    """
    reducer = callbacks.role("reduce")
    if reducer is not None:
        return f"{reducer.key}'s own"
    for callback in callbacks:
        if callback.weighting is not None:
            return callback.weighting if isinstance(callback.weighting, str) else f"{callback.key}'s own"
    return "samples"


def optimizer_state_of(
    callbacks: Sequence[Any], wish_of_user: Literal["reset", "keep"] | None = None
) -> Literal["reset", "keep"]:
    """Return what becomes of optimizers between visits: as the user says, else as an algorithm wishes, else `"reset"`."""
    wishes: list[Literal["reset", "keep"]] = [
        wish
        for callback in callbacks
        if isinstance(callback, FederatedCallback) and (wish := callback.facts.optimizer_state) is not None
    ]
    return wish_of_user or (wishes[0] if wishes else "reset")


def _any_memory(memories: Iterable[bool | None]) -> bool | None:
    """Return True if one of them is, `None` if none is and one cannot be told."""
    answers = set(memories)
    return True if True in answers else None if None in answers else False


def summarise_terms(server: Server, kept: Sequence[str], validations: int) -> dict[str, Any]:
    """Return the terms of a run, for `summary.json`."""
    return {
        "optimizer_state": server.blueprint.settings.optimizer_state,
        "optimizer_memory": _any_memory(
            have_memory(architecture.module) for architecture in server.models.architectures.values()
        ),
        "weighting": weighting_of(server.callbacks) if server.returned_names() else None,
        "local_steps": server.costs.steps,
        **{name: server.costs.extra_work.get(name, 0) for name in SPENT},
        "selection": dict.fromkeys(kept, validations),
    }


def summary_of(
    server: Server,
    engine: Engine,
    results: Sequence[Mapping[str, Any]],
    rounds: int,
    seconds: float,
    arguments: Mapping[str, Any],
    history: Sequence[Mapping[str, float]] = (),
) -> dict[str, Any]:
    """Return the contents of `summary.json`."""
    config = {key: value for key, value in arguments.items() if key not in ("default_root_dir", "version")}
    callbacks = {callback.key: callback.hyperparameters() for callback in server.callbacks}
    listed = listed_clients(server, engine)
    return {
        "results": results,
        "rounds": rounds,
        "num_clients": len(server.clients),
        "num_samples": {client: server.population.sizes[client][0] for client in listed},
        "data": describe_data(
            engine.describe(details=("classes", "splits", "public")),
            None if listed is server.clients else listed,
            server.callbacks.withheld_splits,
        ),
        **({"sites": by_site(server.sites, [*server.clients, *server.held_out])} if server.sites else {}),
        "callbacks": callbacks,
        "model": type(server.blueprint.template).__name__,
        **({"architectures": describe(server)} if server.is_mixed else {}),
        "seed": arguments["seed"].run,
        **({"seeds": asdict(arguments["seed"])} if arguments["seed"].others() else {}),
        "bytes_up": server.costs.bytes_up,
        "bytes_down": server.costs.bytes_down,
        "local_loop": engine.runner.loop.used,
        "local_steps_total": server.costs.steps,
        "seconds": round(seconds, 3),
        "per_round": [dict(entry) for entry in history],
        "peak_memory_mb": peak_memory_mb(),
        "versions": versions(),
        "config_hash": config_hash({**config, "callbacks": callbacks}),
    }


def by_site(sites: Mapping[str, str], clients: Sequence[str]) -> dict[str, list[str]]:
    """Return the clients of each site, both in the order of the clients.

    Example:
        >>> by_site({"b": "x", "a": "y", "c": "y"}, ["a", "b", "c"])
        {'y': ['a', 'c'], 'x': ['b']}
    """
    clients_by_site: dict[str, list[str]] = {}
    for client in clients:
        if client in sites:
            clients_by_site.setdefault(sites[client], []).append(client)
    return clients_by_site


LISTED = 10_000
"""Clients up to which a summary tells of each what it holds. Of more, it tells of those that took part or were scored."""


def summarise_evaluation(server: Server, in_training: Sequence[str] | None = None) -> dict[str, Any]:
    """Return how many clients are scored, of how many; if not all, with a short hash of who."""
    scored = _scored(server.population.scored, server.clients)
    if in_training is None or list(in_training) == server.population.scored:
        return scored
    return scored | {"in_training": _scored(in_training, server.clients)}


def _scored(some: Sequence[str], clients: Sequence[str]) -> dict[str, Any]:
    counts: dict[str, Any] = {"clients": len(some), "of": len(clients)}
    if len(some) == len(clients):
        return counts
    return counts | {"who": hashlib.sha256(json.dumps(list(some)).encode()).hexdigest()[:12]}


def listed_clients(server: Server, engine: Engine) -> list[str]:
    """Return the clients of which a summary tells what they hold: all, or of very many those that were visited."""
    if len(server.clients) <= LISTED:
        return server.clients
    scored = set() if server.population.scored is server.clients else set(server.population.scored)
    return [client for client in server.clients if client in engine.store or client in scored]


def describe_data(
    data: DataSummary, clients: Sequence[str] | None = None, withheld: Collection[str] = ()
) -> dict[str, Any]:
    """Describe who holds what; two runs are on the same split where `splits` agree.

    Args:
        data: What is known of the data.
        clients: The clients to describe; `None`: all.
        withheld: Splits of which to leave out what would tell of single samples: their classes, and who holds which.
    """
    private = "train" in withheld
    return {
        "module": data.module,
        "partition": data.partition_name,
        "splits": {split: data.splits[split] for split in SPLITS if split in data.splits and split not in withheld},
        **({"class_names": data.class_names} if data.class_names and not private else {}),
        "clients": describe_clients(data, data.client_ids if clients is None else clients, private),
        **({} if data.planted_groups is None else {"groups": data.planted_groups}),
        **({} if data.public is None else {"public": data.public}),
    }


def describe_clients(data: DataSummary, clients: Sequence[str], withheld: bool) -> dict[str, Any]:
    """Describe what each of some clients holds: samples in each split, and training samples by class unless `withheld`."""
    return {
        client: {split: data.num_samples(client, split) for split in SPLITS}
        | {"classes": None if withheld else data.classes[client]}
        for client in clients
    }
