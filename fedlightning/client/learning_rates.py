"""Learning rates of optimizers, and of what schedules them, times a factor."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fedlightning.errors import ConfigurationError, warn

RATES = ("eta_min", "eta_max", "lr_min", "lr_max", "warmup_lr_init")
"""Attributes of schedulers that are learning rates, besides those whose last word is `lr` or `lrs`."""
LISTS_OF_RATES = ("base_values", "warmup_steps")
"""Those that are rates where they are lists: of timm's schedulers."""
LOOK_AHEAD = 300
"""Steps over which a scheduler that is not torch's is tried."""


def scale_learning_rates(optimizers: Iterable[Optimizer], schedulers: Iterable[Any], factor: float) -> None:
    """Multiply every learning rate of optimizers and of what schedules them by a factor.

    Of a schedule these are where it begins, its peak, its floor: with all of them its rate at every step is multiplied.
    """
    if factor == 1.0:
        return
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.update({name: _times(value, factor) for name, value in group.items() if _is_rate(name)})
    for scheduler in _with_parts(schedulers):
        if getattr(scheduler, "param_group_field", "lr") != "lr":  # timm's can schedule something else
            continue
        for name, value in list(vars(scheduler).items()):
            # a plateau leaves out changes of a rate that are smaller than its eps
            is_smallest_change = name == "eps" and isinstance(scheduler, ReduceLROnPlateau)
            if _is_rate(name) or name in RATES or is_smallest_change or (name in LISTS_OF_RATES and _is_list(value)):
                setattr(scheduler, name, _times(value, factor))


def decaying(lr_decay: float) -> str:
    """Return the name of what multiplies the rates of a fit: the trainer's argument, or a method's factor."""
    return f"lr_decay={lr_decay:g}" if lr_decay != 1.0 else "A method of this run"


def schedulers_of(module: object, optimizers: Iterable[Optimizer]) -> list[Any]:
    """Return the schedulers of optimizers that a module has as attributes."""
    places = {id(optimizer) for optimizer in optimizers}
    return [value for value in vars(module).values() if _is_scheduler(value) and id(value.optimizer) in places]


def check_schedulers(optimizers: Iterable[Optimizer], schedulers: Iterable[Any], who: str, keeps: bool = False) -> None:
    """Refuse a scheduler whose rates are not multiplied by :func:`scale_learning_rates`. torch's own are not tried.

    Args:
        optimizers: Optimizers of a fit.
        schedulers: Their schedulers.
        who: What multiplies the rates, for the sentence.
        keeps: Schedulers are saved, and go on from what was.

    Raises:
        ConfigurationError: Naming it.
    """
    places = {id(optimizer): optimizer for optimizer in optimizers}
    for scheduler in schedulers:
        optimizer, name = places.get(id(vars(scheduler).get("optimizer"))), type(scheduler).__name__
        if optimizer is None or all(
            type(part).__module__.startswith("torch.optim.") for part in _with_parts([scheduler])
        ):
            continue
        try:
            pairs = list(
                zip(*(list(_rates_ahead(optimizer, scheduler, factor, keeps)) for factor in (1.0, 0.5)), strict=True)
            )
        except Exception as error:  # of the user's code
            warn(
                f"{who} multiplies learning rates, and whether those of {name} follow could not be tried: "
                f"{type(error).__name__}: {error}"
            )
            continue
        for step, (rates, halves) in enumerate(pairs):
            for rate, half in zip(rates, halves, strict=True):
                if not math.isclose(0.5 * rate, half, rel_tol=1e-5, abs_tol=1e-15):
                    raise ConfigurationError(
                        f"{who} multiplies every learning rate by a factor, but a rate that {name} keeps does not follow: by "
                        f"a half, {rate:g} at its step {step} becomes {half:g}. Keep its rates in attributes whose names end "
                        "in lr or lrs (self.floor_lr), and with optimizer_state='keep' in its state_dict, or schedule by "
                        "factors, as LambdaLR does."
                    )


def _rates_ahead(optimizer: Optimizer, scheduler: Any, factor: float, keeps: bool) -> Iterator[list[float]]:
    """Yield the rates of the parameter groups before the first steps of a copy of a scheduler, times a factor."""
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    twin = Optimizer([{**copy.deepcopy(group), "params": [torch.zeros(1)]} for group in groups], {})
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        plan = copy.deepcopy(scheduler, {id(optimizer): twin})
        scale_learning_rates([twin], [plan], factor)
        if keeps:
            saved, plan = plan.state_dict(), copy.deepcopy(scheduler, {id(optimizer): twin})
            plan.load_state_dict(saved)
        steps = [_with_arguments(plan.step)]
        steps += [_with_arguments(plan.step_update)] if hasattr(plan, "step_update") else []
        for number in range(1, LOOK_AHEAD + 1):
            yield [float(group["lr"]) for group in twin.param_groups]
            for step in steps:
                step(number)


def _with_arguments(step: Callable[..., Any]) -> Callable[[int], Any]:
    """Return a scheduler's step as a function of its number: what it counts is that, and what it follows stays as it is."""
    needed = [
        parameter.name
        for parameter in inspect.signature(step).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and (parameter.default is parameter.empty or parameter.name == "metric")
    ]
    return lambda number: step(*(1.0 if name in ("metric", "metrics") else number for name in needed))


def _with_parts(schedulers: Iterable[Any]) -> Iterator[Any]:
    """Yield schedulers and those that they are made of (`SequentialLR`, `ChainedScheduler`, timm's plateau), each once."""
    rest, seen = list(schedulers), set()
    while rest:
        scheduler = rest.pop()
        if id(scheduler) not in seen:
            seen.add(id(scheduler))
            yield scheduler
            for value in vars(scheduler).values():
                rest += [part for part in (value if _is_list(value) else [value]) if _is_scheduler(part)]


def _is_scheduler(value: Any) -> bool:
    # a look at what is there: asked for what it has not, a trainer of the fast loop gives up
    return isinstance(getattr(value, "__dict__", {}).get("optimizer"), Optimizer) and hasattr(value, "step")


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _is_rate(name: str) -> bool:
    """Return whether an entry of a parameter group or an attribute of a scheduler is a learning rate, or a list of them.

    Example:
        >>> [name for name in ("lr", "initial_lr", "base_lrs", "lr_scale", "lr_lambdas") if _is_rate(name)]
        ['lr', 'initial_lr', 'base_lrs']
    """
    return name.rpartition("_")[2] in ("lr", "lrs")


def _times(value: Any, factor: float) -> Any:
    """Return a number, or a list of them, times a factor; anything else as it is."""
    if _is_list(value):
        return type(value)(_times(item, factor) for item in value)
    return value * factor if isinstance(value, int | float | Tensor) and not isinstance(value, bool) else value
