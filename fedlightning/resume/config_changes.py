"""What may have changed when a run is resumed: its configuration, if that is allowed, and clients that join.

What a run must not change when it is resumed: with another value its rounds would be those of two different runs.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy

from fedlightning.client.blueprint import Blueprint
from fedlightning.client.data_summary import DataSummary, Detail
from fedlightning.client.fit import configured, schedulers_in
from fedlightning.contract import FederatedCallback
from fedlightning.datamodules.held_out import draw_clients
from fedlightning.errors import ConfigurationError, listed, warn
from fedlightning.models.client_models import ClientModels
from fedlightning.options import Evaluation, Vectorized
from fedlightning.server.server import Server
from fedlightning.storage.files import plain
from fedlightning.tensors.entries import optimizers_in

ARGUMENTS = (
    "local_epochs",
    "local_steps",
    "participation",
    "seed",
    "optimizer_state",
    "lr_decay",
    "float_buffers",
    "precision",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "limit_train_batches",
    "limit_val_batches",
    "overfit_batches",
)
"""Arguments of the trainer that change its rounds."""
INSIDE_VISITS = ("val_check_interval", "check_val_every_n_epoch")
"""Those that change them where they are set: what ends a visit or lowers a rate may go by validation inside it."""
PUBLIC = "data (public)"
"""Entry of the public data."""
PUBLIC_CONTENT = "data (public content)"
"""Entry of what the public data hold."""
CONTENT = "data (train samples)"
"""Entry of a few samples of the clients' training data, where these are in memory."""
DETAILS: tuple[Detail, ...] = ("splits", "loaders", "public content")
"""What of the data's description a fingerprint is made of."""
PLAIN = (int, float, str, bool, type(None))
SHAPES = ("training", "in_features", "out_features", "in_channels", "out_channels", "num_features")
"""Attributes that are not an option: a mode, and shapes, which the saved state tells."""


def fingerprint(
    arguments: Mapping[str, Any],
    callbacks: Sequence[FederatedCallback],
    ordinary: Sequence[Callback],
    model: LightningModule,
    data: DataSummary,
    held_out: Sequence[str] = (),
) -> dict[str, Any]:
    """Return everything that a resumed run must not change, by a name that a person can read, as JSON can hold it.

    It covers the trainer's arguments, the callbacks and their options, the module's class, hyper-parameters, plain
    attributes (dropout rates, label smoothing) and frozen parameters, its optimizers and schedulers and their options, who
    trains on what, and every client's batches. It cannot see code: the body of a loss or of a step.
    """
    facts: dict[str, Any] = {name: arguments[name] for name in ARGUMENTS}
    facts["seed"] = arguments["seed"].run
    facts |= {f"seed.{source}": seed for source, seed in arguments["seed"].others().items()}
    facts |= {name: arguments[name] for name in INSIDE_VISITS if arguments.get(name) is not None}
    facts |= _of_devices(arguments)
    evaluation: Evaluation = arguments["evaluation"]
    if evaluation.clients is not None:
        facts["evaluation.clients"] = evaluation.clients
    facts["failures.update_limit"] = arguments[
        "failures"
    ].update_limit  # which updates count; the rest is only about losses
    facts["engine"] = "vectorized" if isinstance(arguments["engine"], Vectorized) else "one client at a time"
    loop = arguments.get("loop", "synchronous")
    if not isinstance(loop, str):
        facts["loop"] = type(loop).__name__
        facts |= {f"{facts['loop']}.{name}": value for name, value in loop.hyperparameters().items()}
    callbacks = [callback for callback in callbacks if callback.facts.takes_part]
    facts["callbacks"] = [callback.key for callback in callbacks] + [type(callback).__name__ for callback in ordinary]
    for callback in callbacks:
        facts |= {f"{callback.key}.{name}": value for name, value in callback.hyperparameters().items()}
    if any(callback.is_of("ModelSelection") for callback in callbacks):
        facts["evaluation.every"], facts["evaluation.stages"] = evaluation.every, ", ".join(sorted(evaluation.stages))
        if evaluation.seconds is not None:
            facts["evaluation.seconds"] = float(evaluation.seconds)
    for other in ordinary:
        facts |= {f"{type(other).__name__}.{name}": value for name, value in _options(other).items()}
    facts |= {f"data ({split} split)": data.splits[split] for split in ("train", "val")}
    if "code" in data.splits:  # of data at sites: that of their data modules
        facts["data (code)"] = data.splits["code"]
    if not data.together:  # else the hashes of the splits are our own
        facts["data (train sizes)"] = _hash({client: data.num_samples(client) for client in data.client_ids})
    if held_out:
        sizes = {client: [data.num_samples(client, split) for split in ("train", "val")] for client in held_out}
        facts["held_out"] = f"{len(held_out)} clients ({', '.join(held_out)[:200]}; {_hash(sizes)})"
    if data.content is not None:
        facts[CONTENT] = data.content
    facts[PUBLIC], facts[PUBLIC_CONTENT] = data.public_print, data.public_content
    return plain(facts | _of_loader(data) | _of_model(model))


def _of_devices(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the precision of a plugin or a strategy, which stands for `precision`, and the devices that share batches."""
    plugins, devices = arguments.get("plugins") or [], arguments.get("devices") or 1
    plugins = plugins if isinstance(plugins, list | tuple) else [plugins]
    precisions = [plugin.precision for plugin in plugins if isinstance(plugin, Precision)]
    strategy = arguments.get("strategy")
    if isinstance(strategy, Strategy) and strategy.precision_plugin.precision != Precision().precision:
        precisions.append(strategy.precision_plugin.precision)
    count = len(devices) if isinstance(devices, list) else devices
    shared = count not in (1, "1", "auto") or (arguments.get("num_nodes") or 1) > 1
    facts: dict[str, Any] = {"precision": precisions[-1]} if precisions else {}
    return facts | ({"devices": count, "num_nodes": arguments.get("num_nodes") or 1} if shared else {})


def of_blueprint(blueprint: Blueprint) -> dict[str, Any]:
    """Return what of a blueprint changes what its clients do: callbacks and their options, the module and its optimizers."""
    callbacks, ordinary = list(blueprint.callbacks), blueprint.settings.callbacks
    facts: dict[str, Any] = {
        "callbacks": [callback.key for callback in callbacks] + [type(callback).__name__ for callback in ordinary]
    }
    for callback in callbacks:
        facts |= {f"{callback.key}.{name}": value for name, value in callback.hyperparameters().items()}
    for other in ordinary:
        facts |= {f"{type(other).__name__}.{name}": value for name, value in _options(other).items()}
    return facts | _of_model(blueprint.template)


def _options(callback: Callback) -> dict[str, Any]:
    """Return the plain arguments that a Lightning callback was made with, as far as it keeps them by their names."""
    attributes = vars(callback)
    names = [name for name in inspect.signature(type(callback).__init__).parameters if name != "self"]
    options = {name: attributes.get(name, attributes.get(f"_{name}", inspect)) for name in names}
    return {name: value for name, value in options.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(type(key) in PLAIN and _is_plain(item) for key, item in value.items())
    return all(map(_is_plain, value)) if isinstance(value, list | tuple) else type(value) in PLAIN


def _of_loader(data: DataSummary) -> dict[str, Any]:
    names = ("batch_size", "drop_last", "shuffle")
    options = {name: {client: loader[name] for client, loader in data.loaders.items()} for name in names}
    return {f"data.{name}": _common(values) for name, values in options.items()}


def _common(values: Mapping[str, Any]) -> Any:
    """Return what all clients have; where they differ, the values and a short hash of who has which."""
    distinct = sorted({str(value) for value in values.values()})
    if len(distinct) > 1:
        some = ", ".join(distinct[:5]) + (", ..." if len(distinct) > 5 else "")
        return f"{some} ({_hash({client: str(value) for client, value in values.items()})})"
    return next(iter(values.values()), None)


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def _of_model(model: LightningModule) -> dict[str, Any]:
    facts: dict[str, Any] = {"model": f"{type(model).__module__}.{type(model).__qualname__}"}
    if isinstance(model, ClientModels):
        facts |= {"models": ", ".join(model.models), "model.server": model.server}
        facts["model.assign"] = model.assign if isinstance(model.assign, str) else "by name"
        for name in model.models:
            facts |= {f"{name}: {key}": value for key, value in _of_model(model.model(name)).items()}
        return facts
    facts |= {f"model.{name}": value for name, value in model.hparams.items()}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if type(value) in PLAIN and not name.startswith("_") and name not in SHAPES:
                facts[f"model.{path}.{name}" if path else f"model.{name}"] = value
    configured = _configured(model)
    for index, optimizer in enumerate(optimizers_in(configured)):
        place = f"optimizer {index + 1}" if index else "optimizer"
        facts[place] = type(optimizer).__name__
        for number, group in enumerate(optimizer.param_groups):
            owner = f"{place} (group {number + 1})" if number else place
            facts |= {f"{owner}.{name}": value for name, value in group.items() if name != "params"}
    for index, scheduler in enumerate(schedulers_in(configured)):
        facts |= _of_scheduler(scheduler, f"scheduler {index + 1}" if index else "scheduler")
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    facts["model's frozen parameters"] = f"{len(frozen)} ({_hash(frozen)})"
    return facts


def _of_scheduler(scheduler: Any, place: str) -> dict[str, Any]:
    facts: dict[str, Any] = {place: type(scheduler).__name__}
    # the milestones of a chain lie under a private name, and so do its parts; what is not found there is not compared
    options = {name: value for name, value in vars(scheduler).items() if not name.startswith("_")}
    options["milestones"] = options.get("milestones", vars(scheduler).get("_milestones"))
    facts |= {f"{place}.{name}": value for name, value in options.items() if _is_plain(value)}
    for index, part in enumerate(vars(scheduler).get("_schedulers", ())):
        facts |= _of_scheduler(part, f"{place} (part {index + 1})")
    return facts


def _configured(model: LightningModule) -> Any:
    try:
        return configured(model)
    except Exception:  # it needs more than a module alone: what cannot be seen cannot be compared
        return None


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what differs between two fingerprints in plain form, a sentence each.

    Example:
        >>> differences({"optimizer.lr": 0.1}, {"optimizer.lr": 0.2, "model.p": 0.5})
        ['optimizer.lr was 0.1 and is 0.2', 'model.p was not there and is 0.5']
    """
    sentences = []
    for name in [*now, *(name for name in before if name not in now)]:
        if name in before and name in now:
            if json.dumps(before[name], sort_keys=True) != json.dumps(now[name], sort_keys=True):  # NaN is NaN
                sentences += _between(name, before[name], now[name])
        elif name in now:
            sentences.append(f"{name} was not there and is {_text(now[name])}")
        else:
            sentences.append(f"{name} was {_text(before[name])} and is not there")
    return sentences


def _between(name: str, old: Any, new: Any) -> list[str]:
    """Return what differs between two values: of two mappings of one class, the entries that do."""
    inner = []
    if isinstance(old, dict) and isinstance(new, dict) and old.get("class_path") == new.get("class_path"):
        inner = differences(_below(name, old), _below(name, new))
    return inner or [f"{name} was {_text(old)} and is {_text(new)}"]


def _below(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping's entries under names that say where they are; of a class, its arguments stand for themselves."""
    inner = values.get("init_args", {}) if "class_path" in values else None
    if isinstance(inner, dict):
        values = {key: value for key, value in values.items() if key not in ("class_path", "init_args")} | inner
    return {f"{name}.{key}": value for key, value in values.items()}


def _text(value: Any) -> str:
    return repr(value) if isinstance(value, str) else str(value)


# -- plain values -------------------------------------------------------------------------------------------------------


Fingerprint = Callable[[Sequence[str], Sequence[str]], dict[str, Any]]
"""Returns a run's fingerprint as it would be without the clients that joined, from their ids and the held-out ones'."""
MAX_LISTED = 5
"""Changes and clients that a sentence names."""


@dataclass(frozen=True)
class ConfigChanges:
    """What a resumed run has that it was not started with.

    Attributes:
        configuration: Changes of the configuration, a sentence each.
        joined: Clients that it did not train before.
    """

    configuration: list[str] = field(default_factory=list)
    joined: list[str] = field(default_factory=list)

    def told(self, next_round: int) -> list[str]:
        """Return the lines for the summary, and warn of each kind."""
        lines = [f"from round {next_round}: {text}" for text in self.configuration]
        if self.configuration:
            warn(f"The run goes on with another configuration: {_some(self.configuration)}.")
        if self.joined:
            lines.append(f"from round {next_round}: {_named(self.joined, len(self.joined))} take part")
            warn(f"From round {next_round} on {_named(self.joined)} take part, which the run did not train before.")
        return lines


def changes_since(
    saved: Mapping[str, Any],
    server: Server,
    fingerprint: Fingerprint,
    place: object,
    *,
    rounds_done: int = 0,
    allow_changes: bool = False,
    allow_new_clients: bool = False,
) -> ConfigChanges:
    """Compare a run with its saved state."""
    joined = list_joined_clients(saved, server)
    if joined and not allow_new_clients:
        raise ValueError(
            f"The data have {_named(joined)}, which the run in {place} did not train. Resume with the run's own data and "
            "held_out, or let new clients take part from the next round on with allow_new_clients (then summary.json lists "
            "them)."
        )
    if joined and rounds_done >= server.rounds:  # else they would be among the scores of those that have trained
        raise ValueError(
            f"All {rounds_done} rounds of the run in {place} are done, so {_named(joined)} cannot train with the others. "
            f"Raise max_rounds above {rounds_done}, or serve new clients by trainer.onboard or `fedlightning onboard`."
        )
    now = fingerprint(joined, saved["held_out"] if joined else server.held_out)
    before = dict(saved["lasting"])
    if not (CONTENT in before and CONTENT in now):  # compared where the data are in memory both times
        before.pop(CONTENT, None)
        now.pop(CONTENT, None)
    changed = differences(before, now)
    others = [text for text in changed if text.startswith("held_out ")]
    if others:
        raise ValueError(
            f"The run in {place} cannot go on with other held-out clients: {others[0]}. Resume with the held_out of its "
            "config.yaml, let held-out clients take part with allow_new_clients, serve new clients by trainer.onboard or "
            "`fedlightning onboard`, or start a new run."
        )
    if changed and not allow_changes:
        raise ValueError(
            f"The run in {place} cannot go on with another configuration: {_some(changed)}. Resume it as it was "
            "started (its config.yaml says how), start a new run without resume, or allow the change with "
            "allow_config_change (then summary.json lists it)."
        )
    return ConfigChanges(changed, joined)


def keep_architectures(saved: Mapping[str, Any], blueprint: Blueprint, place: object) -> None:
    """Let clients that have trained keep the architecture that they had; a rule may give it to others now."""
    had, now = saved.get("assigned", {}), blueprint.assigned
    by_name = isinstance(blueprint.template, ClientModels) and not isinstance(blueprint.template.assign, str)
    for client in had if by_name else ():
        if client in now and now[client] != had[client]:
            raise ValueError(
                f"Client '{client}' of the run in {place} has a model '{had[client]}', and ClientModels assigns it "
                f"'{now[client]}' now. Assign it the model that it has trained."
            )
    blueprint.assigned = {client: had.get(client, name) for client, name in now.items()}


def check_scored(saved: Mapping[str, Any], server: Server, place: object) -> None:
    """Refuse to score a run with clients that never trained among those that did, or the other way round."""
    trained = set(saved["clients"])
    strangers = [client for client in server.clients if client not in trained]
    if strangers:
        raise ValueError(
            f"The run in {place} did not train {_named(strangers)}, whose scores would be among those of clients that did. "
            "Score it with its own data and held_out (its config.yaml says which), or name them in held_out."
        )
    outside = [client for client in server.held_out if client in trained]
    if outside:
        raise ValueError(
            f"The run in {place} trained {_named(outside)}, so held_out cannot have them scored as unseen clients. Score it "
            "with its own held_out (its config.yaml says which)."
        )


def scored_before(saved: Mapping[str, Any], server: Server, seed: int) -> list[str]:
    """Return the clients that a run has scored up to its saved state."""
    clients: list[str] = list(saved["clients"])
    fraction = saved["lasting"].get("evaluation.clients")
    return clients if fraction is None else draw_clients(clients, fraction, seed, "evaluated")


def check_rescored(before: Sequence[str], server: Server, place: object, go_on: bool) -> None:
    """Refuse to compare scores of different clients across rounds, and warn where a run gets scores of others."""
    if list(before) == server.population.scored:
        return
    counts = f"{len(before)} of {len(server.clients)} clients", f"{len(server.population.scored)}"
    for callback in server.callbacks if go_on else ():
        if callback.is_of("ModelSelection"):
            raise ConfigurationError(
                f"{callback.key} compares the scores of all rounds, and the run in {place} has scored {counts[0]} and would "
                f"score {counts[1]} now. Resume it with its own evaluation.clients (its config.yaml says which), or start a "
                "new run."
            )
    if not go_on:
        warn(
            f"The run in {place} scored {counts[0]} in training, and {counts[1]} are scored now (evaluation.clients): its "
            "results on validation data and at stage L2 are of the former. summary.json says so (evaluation, in_training)."
        )


def check_validation_clients(before: Sequence[str], server: Server) -> None:
    """Refuse validation of a run at clients that it has not scored in training: its curve would mix two sets of clients."""
    if not set(server.population.scored) <= set(before):
        raise ConfigurationError(
            f"The run has validation scores of {len(before)} of {len(server.clients)} clients for every round, and validate "
            f"would add those of others to its last one: {len(server.population.scored)} are scored now. Validate it with "
            "its own evaluation.clients (its config.yaml says which), or score other clients by test."
        )


def join_clients(server: Server, clients: Sequence[str]) -> None:
    """Let every callback make room for clients that take part from now on."""
    for callback in server.callbacks:
        join = callback.facts.newcomers.join
        if callable(join):
            join(server, clients)
        elif not join and server.state.get(callback.key):
            raise ConfigurationError(
                f"{callback.key} keeps state at the server and does not say what becomes of it when clients join "
                f"({listed(clients)}): its facts have no Newcomers(join=...). Start a new run with them, or serve them by "
                "trainer.onboard or `fedlightning onboard`."
            )


def list_joined_clients(saved: Mapping[str, Any], server: Server) -> list[str]:
    """Return the clients that take part now and did not when the state was saved."""
    clients: Sequence[str] = saved["clients"]
    had = set(clients)
    joined = [client for client in server.clients if client not in had]
    if joined:
        now = {*server.clients, *server.held_out}
        gone = [client for client in clients if client not in server.num_samples]
        lost = [client for client in {*clients, *saved["held_out"]} if client not in now]
        if gone or lost:
            raise ValueError(
                f"The data have clients that the run did not train, {_named(joined)}, but not {_named(gone or sorted(lost))} "
                "of its own. Clients may join a run; nobody may leave it. Start a new run."
            )
    return joined


def _named(clients: Sequence[str], most: int = MAX_LISTED) -> str:
    noun = "client" if len(clients) == 1 else "clients"
    return f"{noun} {listed(map(repr, clients), most)}"


def _some(texts: Sequence[str]) -> str:
    more = f"; and {len(texts) - MAX_LISTED} more" if len(texts) > MAX_LISTED else ""
    return "; ".join(texts[:MAX_LISTED]) + more
