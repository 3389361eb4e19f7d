"""What the models of the clock share: descriptions, checks of their arguments, draws."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

from fedlightning.errors import ConfigurationError
from fedlightning.ranges import is_finite, shown
from fedlightning.seeding import address

NORMAL = NormalDist()


class Described:
    """Base of an object that is its arguments: each lies in the attribute of its name."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments by name."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def __repr__(self) -> str:
        """Return the class with its arguments."""
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.arguments().items())})"

    def __eq__(self, other: object) -> bool:
        """Return True for an object of the same class with equal arguments."""
        return type(self) is type(other) and self.arguments() == other.arguments()

    def __hash__(self) -> int:
        """Return a hash of the description."""
        return hash(repr(self))


def uniform(*parts: object) -> float:
    """Return a number in (0, 1) that depends on the address alone.

    A hash and no generator: a thousand clients are asked in every round, and making a generator takes ten times longer.
    """
    return (address(*parts) + 0.5) / 2**63


def normal(*parts: object) -> float:
    """Return a draw of the standard normal distribution that depends on the address alone."""
    return NORMAL.inv_cdf(min(max(uniform(*parts), 1e-15), 1 - 1e-15))


def number(where: str, name: str, value: Any, *, least: float = 0.0, above: bool = False, most: float = 1e15) -> float:
    """Return an argument as a number, checked."""
    if not is_finite(value) or value < least or (above and value == least) or value > most:
        rule = f"above {least:g}" if above else f"of at least {least:g}"
        upper = f" and at most {most:g}" if most < 1e15 else ""
        raise ConfigurationError(f"{where} got {name}={shown(value)}. Give a number {rule}{upper}.")
    return float(value)


def table(where: str, name: str, value: Any, *, above: bool = False) -> dict[str, float]:
    """Return a table of numbers by client, checked. Clients may be numbers in a file."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            f"{where} got {name}={value!r}. Give a table of numbers by client, such as {{'3': 10}}."
        )
    return {str(client): number(where, f"{name}['{client}']", entry, above=above) for client, entry in value.items()}


def shares_of(
    where: str, classes: Any, needed: tuple[str, ...], optional: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
    """Return device classes, checked: each has a share and the numbers of the model."""
    example = (needed or optional)[0]
    if not isinstance(classes, Mapping) or not classes:
        raise ConfigurationError(
            f"{where} got classes={classes!r}. Give a table such as {{'phone': {{'share': 0.8, '{example}': 0.1}}}}."
        )
    checked: dict[str, dict[str, Any]] = {}
    for kind, entries in classes.items():
        if not isinstance(entries, Mapping):
            raise ConfigurationError(f"{where} got classes['{kind}']={entries!r}. Give its numbers by name: share, ...")
        fields = ("share", *needed, *optional)
        unknown = [name for name in entries if name not in fields]
        missing = [name for name in needed if name not in entries]
        if unknown or missing:
            fault = f"has an unknown '{unknown[0]}'" if unknown else f"lacks '{missing[0]}'"
            raise ConfigurationError(f"{where}: the class '{kind}' {fault}. It may have {', '.join(fields)}.")
        share = number(where, f"the share of '{kind}'", entries.get("share", 1.0))
        checked[str(kind)] = {**entries, "share": share}
    if sum(entry["share"] for entry in checked.values()) == 0:
        raise ConfigurationError(f"{where}: the shares of all classes are 0, so no client has one. Give one a share.")
    return checked


def table_of_classes(where: str, clients: Any, classes: Mapping[str, Any]) -> dict[str, str]:
    """Return a table of clients' device classes, checked."""
    if clients is not None and not isinstance(clients, Mapping):
        raise ConfigurationError(f"{where} got clients={clients!r}. Give a table of classes by client.")
    kinds = {str(client): str(kind) for client, kind in (clients or {}).items()}
    unknown = next((client for client, kind in kinds.items() if kind not in classes), None)
    if unknown is not None:
        raise ConfigurationError(
            f"{where}: client '{unknown}' has the class '{kinds[unknown]}', which is not among {list(classes)}."
        )
    return kinds


def class_of(seed: int, client: str, classes: Mapping[str, Mapping[str, Any]], listed: Mapping[str, str]) -> str:
    """Return a client's device class: the given one, or one drawn by the shares. Speed and link draw the same one."""
    if client in listed:
        return listed[client]
    place = uniform(seed, "device", client) * sum(entry["share"] for entry in classes.values())
    chosen = ""
    for kind, entry in classes.items():
        if entry["share"] > 0:
            chosen = kind
            place -= entry["share"]
            if place < 0:
                break
    return chosen
