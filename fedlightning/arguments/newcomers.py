"""What `onboard` is given (new clients, their data), checked as they are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedlightning.arguments.inputs import check_clients, federated_data
from fedlightning.client.data_summary import DataSummary, describe
from fedlightning.compat.lightning_runs import quiet
from fedlightning.datamodules.federated_data import FederatedDataModule, sort_clients
from fedlightning.errors import ConfigurationError, listed
from fedlightning.models.client_models import ClientModels

if TYPE_CHECKING:
    from fedlightning.client.blueprint import Blueprint
    from fedlightning.server.server import Server


def assigned_newcomers(server: Server, run_data: DataSummary, data: DataSummary, new: list[str]) -> Blueprint:
    """Return the blueprint of a federation with new clients: the rule gives each its architecture, others keep theirs.

    The new clients come after the others; one whose planted group has trained gets what that group has.
    """
    blueprint = server.blueprint
    template, assigned = blueprint.template, dict(blueprint.assigned)
    if not isinstance(template, ClientModels) or data is run_data:
        return blueprint
    if not isinstance(template.assign, str):
        raise ConfigurationError(
            f"ClientModels assigns models by name, and the run that was trained names none for new client '{new[0]}'. Use "
            "a rule (assign='cycle'), or let the run's data have the client from the start, kept out of training by held_out."
        )
    sizes = {**server.num_samples, **{client: data.num_samples(client) for client in new}}
    old_groups, new_groups = run_data.planted_groups, data.planted_groups
    groups = None
    if old_groups is not None and new_groups is not None:
        groups = old_groups | {client: new_groups[client] for client in new}
    try:
        new_models = template.assignment(sizes, groups)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    if template.assign == "group" and old_groups is not None and groups is not None:
        model_by_group = {old_groups[client]: assigned[client] for client in server.clients}
        new_models |= {client: model_by_group[groups[client]] for client in new if groups[client] in model_by_group}
    return replace(blueprint, assigned=assigned | {client: new_models[client] for client in new})


def new_clients_data(newcomers: Any) -> FederatedDataModule:
    """Return the data of new clients, set up."""
    data = federated_data(newcomers, None, None, None)
    with quiet():
        data.prepare_data()
        data.setup("fit")
    check_clients(describe(data))
    return data


def new_clients(data: DataSummary, from_run: bool, server: Server, requested: Sequence[str | int] | None) -> list[str]:
    """Return the clients that join a fitted federation."""
    candidates = list(server.held_out) if from_run else sort_clients(data.client_ids)
    new = [client for client in candidates if client not in server.clients]
    if requested is None:
        if not new:
            raise ConfigurationError(
                "There is no new client: "
                + (
                    "this run held none out. Give their data: onboard(newcomers=...)."
                    if from_run
                    else f"{listed(candidates)} have names of clients that trained. Give the new ones other names."
                )
            )
        return new
    if isinstance(requested, str) or not isinstance(requested, Sequence):
        raise ConfigurationError(f"clients={requested!r} must be a list of clients' ids.")
    chosen = sort_clients({str(client) for client in requested})
    for client in chosen:
        if client in server.clients:
            raise ConfigurationError(
                f"Client '{client}' has trained in this federation, so it cannot join it. Name clients that are new: "
                f"{listed(new)}."
            )
        if client not in new:
            raise ConfigurationError(f"There is no new client '{client}'. New clients: {listed(new)}.")
    if not chosen:
        raise ConfigurationError("clients=[] names no client to onboard. Leave it out for all new ones.")
    return chosen


def check_new_clients(data: DataSummary, clients: Sequence[str], epochs: int) -> None:
    """Refuse new clients with whose data there is nothing to do."""
    has_samples = {
        split: any(data.num_samples(client, split) for client in clients) for split in ("train", "val", "test")
    }
    if has_samples["val"] or has_samples["test"] or (epochs and has_samples["train"]):
        return
    if has_samples["train"]:
        raise ConfigurationError(
            f"epochs=0 scores the new clients only, and none of {listed(clients)} has validation or test data. Let them "
            "train (epochs=1), or give them some."
        )
    raise ConfigurationError(f"None of the new clients ({listed(clients)}) has a sample. Check the data of newcomers.")
