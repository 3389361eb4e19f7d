"""A dry run: two rounds of one batch, on copies, and what they say about the run to come."""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader

from fedlightning.client.data_summary import DataSummary, Detail
from fedlightning.client.fit import optimizers_of
from fedlightning.contract import FederatedCallback
from fedlightning.contract.messages import tree_bytes
from fedlightning.engines.contract import Engine, Task
from fedlightning.fast.eligibility import of_callback
from fedlightning.guards.dry_run_report import CallbackRole, ClientSize, DryRun
from fedlightning.guards.step_trials import spread
from fedlightning.guards.trial_failure import shapes
from fedlightning.options import FailurePolicy
from fedlightning.privacy.outgoing import list_coverage
from fedlightning.scores.metric_names import bare
from fedlightning.server.federation import Federation
from fedlightning.server.model_store import describe
from fedlightning.tensors import module_state

DISTINCT: tuple[Detail, ...] = ("loaders", "classes")
"""What clients may differ in, besides sizes."""
ALL_TRIED_UP_TO = 10
"""Up to so many clients, all are tried."""
QUICK = 5.0
"""Seconds: visits of one batch that take less are followed by visits of several, to tell a step from what is around it."""
SEVERAL = 6
"""Batches of these visits."""
MAX_TRIED_CLIENTS = 24
"""Clients that are tried at most."""
UNSEEN_CLIENTS = 2
"""Held-out clients that are scored at most."""
SMALL_OPTIONS: dict[str, Any] = {
    "participation": 1.0,
    "engine": "sequential",
    "logger": False,
    "enable_progress_bar": False,
    "save_state": 0,
    "strategy": "auto",
    "devices": 1,
    "num_nodes": 1,
    "overfit_batches": 0.0,
    "sanity_check": False,
} | {f"limit_{split}_batches": 1 for split in ("train", "val", "test", "predict")}
"""Arguments of the trainer that are others in a dry run."""
Answer = TypeVar("Answer")


def small_arguments(arguments: Mapping[str, Any], held_out: Sequence[str]) -> dict[str, Any]:
    """Return the arguments that are others in the two rounds of a dry run.

    Args:
        arguments: The trainer's arguments.
        held_out: Clients that are scored as unseen ones.
    """
    return SMALL_OPTIONS | {
        "local_steps" if arguments["local_steps"] is not None else "local_epochs": 1,
        "held_out": held_out,
        "evaluation": replace(arguments["evaluation"], every=1, seconds=None, clients=None),
        "failures": FailurePolicy(update_limit=arguments["failures"].update_limit),
    }


def fresh_loader(loader: DataLoader[Any] | None) -> DataLoader[Any] | None:
    """Return a loader that leaves the state of the user's own (its generator, its sampler) alone, where there can be one."""
    return loader if loader is None else spread(loader) or loader


class TimedEngine(Engine):
    """Carries out tasks one after another and notes how long each takes.

    Attributes:
        seconds: Seconds of each task since the last round began, by the class of the task.
    """

    seconds: dict[str, list[float]]

    def map(self, tasks: Iterable[Task[Answer]]) -> Iterator[Answer]:
        for task in tasks:
            began = time.perf_counter()
            answer = self.ask(task)
            self.seconds.setdefault(type(task).__name__, []).append(time.perf_counter() - began)
            yield self.attempts.accept(task, answer)


def distinct_clients(data: DataSummary, architecture_of: Callable[[str], str] = lambda client: "") -> list[str]:
    """Return clients that differ in model, size of a batch, classes they hold, or in having validation or test data.

    Args:
        data: What is known of the data: `loaders` and `classes` among it.
        architecture_of: Gives the name of a client's architecture.
    """
    ids = [client for client in data.client_ids if data.num_samples(client) > 0]
    if len(ids) <= ALL_TRIED_UP_TO:
        return ids
    client_by_kind: dict[Any, str] = {}
    for client in ids:
        size = data.loaders.get(client, {}).get("batch_size") or 1
        counts = data.classes.get(client)
        classes = None if counts is None else sum(count > 0 for count in counts)
        has = tuple(data.num_samples(client, split) > 0 for split in ("val", "test"))
        client_by_kind.setdefault((architecture_of(client), min(size, data.num_samples(client)), classes, has), client)
    chosen = list(client_by_kind.values())[:MAX_TRIED_CLIENTS]
    return chosen if len(chosen) > 1 else ids[:2]


def dry_run(whole: Federation, small: Federation, rounds: int) -> DryRun:
    """Run two rounds of one batch and describe the run.

    Args:
        whole: The federation of the run, checked; nothing of it changes.
        small: The same with the clients of :func:`distinct_clients` and the arguments of :data:`SMALL_OPTIONS`, on copies.
        rounds: Rounds of the run.

    Raises:
        FederationError: If every client fails.
    """
    attempts = small.engine.attempts
    small.engine = timed = TimedEngine(small.engine.runner, small.store)
    timed.attempts = attempts
    cuda = small.engine.runner.blueprint.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    report = _describe(whole, small, rounds)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        small.server.callbacks.event("on_federation_start", small.server)
        for _ in range(min(2, rounds)):
            timed.seconds = {}
            down, up = small.server.costs.bytes_down, small.server.costs.bytes_up
            small.round()
            down, up = small.server.costs.bytes_down - down, small.server.costs.bytes_up - up
        seconds, steps = timed.seconds, small.server.costs.steps
        if rounds > 2 and sum(seconds.get("Visit", [])) < QUICK:
            timed.seconds = {}
            _allow(small, SEVERAL)
            small.round()
        step = _seconds_of_a_step(seconds, timed.seconds, small.server.costs.steps - steps)
        _measure(report, whole, small, seconds, step, down, up)
        timed.seconds = {}
        if whole.test_data:
            report.metrics = sorted({bare(row.metric) for row in small.evaluate("test", "latest")})
        small.rounds_done = small.server.max_rounds
        small.finish()
    report.peak_bytes = int(torch.cuda.max_memory_allocated()) if cuda else 0
    report.problems = list(dict.fromkeys(f"{failure['reason']}" for failure in small.server.failures))
    texts = [str(item.message) for item in caught if issubclass(item.category, UserWarning)]
    new_texts = [text for text in dict.fromkeys(texts) if not any(problem in text for problem in report.problems)]
    report.warnings = new_texts[:10]
    return report


def _describe(whole: Federation, small: Federation, rounds: int) -> DryRun:
    server, runner = whole.server, whole.engine.runner
    settings, data, module = runner.settings, whole.engine.describe(details=["batches", "public"]), server.module
    tried = {*small.server.clients, *small.server.held_out}
    sizes = {
        client: ClientSize(client, *data.sizes[client], batches=data.batches.get(client, 0), tried=client in tried)
        for client in (*server.clients, *server.held_out)
    }
    loaders = (small.engine.runner.data.client_dataloader(client, "train") for client in small.server.clients)
    first = next(loaders, None)
    shared = set(server.shared_names())
    return DryRun(
        model=type(runner.blueprint.template).__name__,
        architectures=describe(server) if server.is_mixed else {},
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        trainable=sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad),
        shared=sum(value.numel() for name, value in module_state(module).items() if name in shared),
        batch="" if first is None else shapes(first),
        clients=[sizes[client] for client in server.clients],
        public=data.public or {},
        participants=len(server.participants()),
        rounds=rounds,
        work=f"{settings.work} {settings.unit if settings.work != 1 else settings.unit[:-1]}",
        engine=type(whole.engine).__name__.removesuffix("Engine").lower(),
        local_loop="",
        device=str(runner.blueprint.device),
        held_out=[sizes[client] for client in server.held_out],
        leaves=[(str(item), cover) for item, cover in list_coverage(server.callbacks, server.outgoing)],
        callbacks=[_role(callback, module) for callback in (*server.callbacks, *settings.callbacks)],
    )


def _role(callback: Any, module: nn.Module) -> CallbackRole:
    hooks = sorted(of_callback(type(callback)))
    if not isinstance(callback, FederatedCallback):
        names = [name for name in inspect.signature(type(callback)).parameters if name != "kwargs"]
        options = {name: repr(getattr(callback, name)) for name in names if hasattr(callback, name)}
        return CallbackRole(type(callback).__name__, options, hooks=hooks)
    events = [name for name, value in vars(FederatedCallback).items() if inspect.isfunction(value)]
    events_claimed = [name for name in events if not name.startswith("_") and callback.claims(name)]
    wire = callback.wire(module)
    return CallbackRole(
        type(callback).__name__,
        {name: repr(value) for name, value in callback.hyperparameters().items()},
        key=callback.key,
        weighting="its own" if callable(callback.weighting) else callback.weighting or "",
        hooks=[name for name in events_claimed if name not in ("claims", "hyperparameters", "wire", "check")] + hooks,
        down=list(wire.down),
        up=list(wire.up),
    )


def _allow(small: Federation, batches: int) -> None:
    """Let visits train on several batches."""
    runner = small.engine.runner
    runner.settings.trainer_arguments["limit_train_batches"] = batches
    runner.blueprint.trainer.limit_train_batches = batches
    if runner.settings.local_steps is not None:
        runner.settings.local_steps = batches


def _seconds_of_a_step(single: dict[str, list[float]], several: dict[str, list[float]], steps: int) -> float:
    """Return the seconds of a step, from visits of one step and visits of `steps` steps together."""
    before, after = single.get("Visit", []), several.get("Visit", [])
    mean = sum(before) / max(len(before), 1)
    if several is single or len(after) != len(before) or steps <= len(before):
        return mean
    return max((sum(after) - sum(before)) / (steps - len(before)), 0.0)


def _measure(
    report: DryRun, whole: Federation, small: Federation, spent: dict[str, list[float]], step: float, down: int, up: int
) -> None:
    """Add what the last round has cost, scaled to all participants and all their batches."""
    settings = whole.engine.runner.settings
    share = report.participants / max(len(small.server.clients), 1)
    report.bytes_down, report.bytes_up = round(down * share), round(up * share)
    report.local_loop = small.engine.runner.loop.used
    visits, scores = spent.get("Visit", []), spent.get("ScoreClient", [])
    visit = sum(visits) / max(len(visits), 1)
    score = min(scores, default=0.0)
    rest = max(visit - step, 0.0)
    each = max(len(report.clients), 1)
    mean_batches = sum(client.batches for client in report.clients) / each
    steps = mean_batches * settings.work if settings.unit == "epochs" else float(settings.work)
    scored = set(whole.server.population.scored)
    has_validation = sum(client.val > 0 and client.id in scored for client in report.clients)
    evaluated = has_validation * sum(stage in whole.stages for stage in ("G", "L1"))
    workers = getattr(whole.engine, "width", 1)
    trained = report.participants * (rest + steps * step)
    report.seconds = (trained + evaluated * score / max(whole.evaluate_every, 1)) / workers
    module = whole.server.module
    state, gradients = module_state(module), [p for p in module.parameters() if p.requires_grad]
    report.training_bytes = tree_bytes(state) + tree_bytes(gradients) + _optimizer_bytes(module)
    records = [small.store.get(client) for client in small.server.clients]
    kept = sum(tree_bytes([record.personal, record.state, record.checkpoints]) for record in records) / max(
        len(records), 1
    )
    report.kept_bytes = (
        round(kept * len(report.clients)) + tree_bytes(small.server.models) + tree_bytes(small.server.state)
    )


def _optimizer_bytes(module: Any) -> int:
    """Return the bytes of the optimizers' state after a step, taken on a copy with gradients of zero."""
    try:
        optimizers = optimizers_of(module)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
    except Exception:  # an optimizer that needs a closure
        return 0
    return sum(tree_bytes(list(optimizer.state.values())) for optimizer in optimizers)
