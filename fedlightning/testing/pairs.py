"""Two algorithms in one list: they give one result in both orders and both do something, or a sentence says why not."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlightning.compat.lightning_runs import quiet
from fedlightning.contract import FederatedCallback
from fedlightning.tensors import module_state, widen
from fedlightning.testing.runs import deployed, server_of
from fedlightning.testing.toys import ToyData, federate

TOLERANCE = 1e-5
"""Largest difference between the two orders: sums of two corrections are rounded in another order."""


def check_pair(first: FederatedCallback, second: FederatedCallback, **arguments: Any) -> str | None:
    """Check that two algorithms in one list give one result in both orders, or are refused in both.

    Example:
        >>> from fedlightning.callbacks import FedProx, FedPer, FLIU, FedALA
        >>> check_pair(FedProx(), FedPer())
        >>> check_pair(FLIU(), FedALA()).split(",")[0]
        'FLIU and FedALA both merge the model that arrives with what the client has kept'
    """
    names = f"{first.key} and {second.key}"
    results = [_run(pair, names, **arguments) for pair in ((first, second), (second, first))]
    (first_models, sentence), (second_models, _) = results
    assert (first_models is None) == (second_models is None), (
        f"{names} are refused in one order only: {sentence or results[1][1]}"
    )
    if first_models is None or second_models is None:
        return sentence
    for what, value in first_models.items():
        apart = difference(value, second_models[what])
        assert apart <= TOLERANCE, (
            f"The order of {names} in the list changes {what} by {apart:.2g}. Give one of them a rank, let each act where "
            "the order does not matter, or refuse the pair."
        )
    return None


def check_both_act(
    first: FederatedCallback, second: FederatedCallback, runs: dict[Any, Any] | None = None, **arguments: Any
) -> None:
    """Check that neither of two algorithms does nothing beside the other while nobody says so.

    One does nothing if all models are those of the other alone, although alone it is not FedAvg. A refusal of the pair or a
    warning that names it says so.

    Example:
        >>> from fedlightning.callbacks import FedProx, FedPer
        >>> check_both_act(FedProx(mu=1.0), FedPer())
    """
    outcomes: dict[Any, Any] = {} if runs is None else runs
    idle, plain = [(first, second), (second, first)], FederatedCallback()
    plain.weighting = weighting = next((it.weighting for it in (first, second) if isinstance(it.weighting, str)), None)
    lengths: tuple[dict[str, Any], ...] = ({}, {"sizes": (12, 7, 10, 15), "max_rounds": 5})
    for length in lengths:  # what works on several clients or in late rounds may do nothing in a short run

        def alone(*callbacks: FederatedCallback, length: dict[str, Any] = length) -> dict[str, Any] | None:
            place = (str(weighting), str(length), *map(type, callbacks))
            if place not in outcomes:
                outcomes[place] = _run(
                    (*callbacks, plain), callbacks[0].key if callbacks else "", **arguments, **length
                )[0]
            return outcomes[place]

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            both, _ = _run((first, second), f"{first.key} and {second.key}", **arguments, **length)
        warnings_text = " ".join(str(warning.message) for warning in caught)
        idle = [
            (callback, other)
            for callback, other in idle
            if callback.key not in warnings_text and _alike(both, alone(other)) and not _alike(alone(callback), alone())
        ]
        if not idle:
            return
    raise AssertionError(
        f"{idle[0][0].key} changes nothing beside {idle[0][1].key}, and nobody says so. Refuse the pair, or warn of it."
    )


def _alike(models: dict[str, Any] | None, other: dict[str, Any] | None) -> bool:
    """Return whether two runs leave the same models, bit for bit; a run that was refused leaves none."""
    places = ("the server's models", "the deployed models")
    return models is not None and other is not None and all(difference(models[at], other[at]) == 0.0 for at in places)


def _run(
    pair: Sequence[FederatedCallback], names: str, sizes: Sequence[int] = (12, 7), **arguments: Any
) -> tuple[dict[str, Any] | None, str | None]:
    """Return what a small federation of some algorithms leaves, or the sentence that refuses it."""
    settings = {"max_rounds": 2, "local_steps": 2, **arguments}
    with tempfile.TemporaryDirectory() as folder, quiet():
        try:
            trainer = federate(None, ToyData(sizes), Path(folder), others=copy.deepcopy(list(pair)), **settings)
        except Exception as error:
            text = str(error)
            named = any(word in text for callback in pair for word in (callback.key, type(callback).__name__))
            assert isinstance(error, ValueError) and named, (
                f"{names} end in an error that is not a sentence about them: {type(error).__name__}: {text}"
            )
            return None, text
        server = server_of(trainer)
        assert not server.failures, f"{names} break clients: {server.failures[0]['reason']}"
        records = {client: trainer.store.get(client) for client in server.clients}
        return {
            "the server's models": server.models,
            "the server's state": server.state,
            "the clients' entries": {client: record.personal for client, record in records.items()},
            "the clients' state": {client: record.state for client, record in records.items()},
            "the deployed models": {label: dict(module_state(module)) for label, module in deployed(trainer)},
        }, None


def difference(a: Any, b: Any) -> float:
    """Return the largest difference between the numbers of two nested values; infinity if they are not alike.

    Example:
        >>> difference({"w": torch.ones(2), "n": 3}, {"w": torch.tensor([1.0, 1.5]), "n": 3})
        0.5
        >>> difference({"w": 1.0}, {"v": 1.0})
        inf
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape:
            return torch.inf
        apart = (widen(a) - widen(b)).abs()[~(a.isnan() & b.isnan())]
        return float(apart.nan_to_num(nan=torch.inf).max()) if apart.numel() else 0.0
    if isinstance(a, dict) and isinstance(b, dict):
        return max((difference(a[key], b[key]) for key in a), default=0.0) if a.keys() == b.keys() else torch.inf
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return max(map(difference, a, b), default=0.0) if len(a) == len(b) else torch.inf
    if isinstance(a, int | float) and isinstance(b, int | float):
        return 0.0 if a == b or (a != a and b != b) else abs(a - b)
    return 0.0 if a == b else torch.inf
