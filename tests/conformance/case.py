"""What the tests of an algorithm say of it beside its own tests: `CASES` and `KEPT` in `tests/callbacks/test_<module>.py`.

    CASES = {"FedProx": Case(FedProx(mu=0.1), neutral=FedProx(mu=0.0))}  # what test_conformance.py checks
    KEPT = {"FedProx": Kept("FedProx")}  # what test_keys.py compares

A further variant is called by the algorithm's name and a word (`"APFL logits"`).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlightning.contract import FederatedCallback

TESTS = Path(__file__).parents[1] / "callbacks"
NO_PLAIN_FORM = {"one_client": "its deployed model is another one by definition"}


@dataclass(frozen=True)
class Case:
    """An algorithm as the conformance suite checks it.

    Attributes:
        algorithm: An instance with the options to check.
        neutral: An instance that equals plain training with one client. Default: `algorithm`.
        skip: Checks that cannot hold by the definition of the method, with the reason.
        arguments: What the toy run needs: arguments of the trainer, or `full`.
    """

    algorithm: FederatedCallback
    neutral: FederatedCallback | None = None
    skip: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Kept:
    """What is there after two rounds, by the names under which it is saved.

    Attributes:
        key: The algorithm's key.
        server: Its entries in `server.state`.
        client: Its entries in every `client.state`.
        phases: Phases of which Lightning keeps something at the clients.
        models: Models of the server.
        options: Options of the algorithm.
        arguments: Arguments of the trainer.
        public: Whether the data need public samples.
    """

    key: str
    server: tuple[str, ...] = ()
    client: tuple[str, ...] = ()
    phases: tuple[str, ...] = ("fit",)
    models: tuple[str, ...] = ("global",)
    options: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    public: bool = False


def collect(name: str) -> dict[str, Any]:
    """Return the entries of the dicts called `name` (`"CASES"` or `"KEPT"`) in all modules of `tests/callbacks`."""
    found: dict[str, Any] = {}
    for path in sorted(TESTS.glob("test_*.py")):
        entries = getattr(importlib.import_module(f"tests.callbacks.{path.stem}"), name, {})
        twice = sorted(found.keys() & entries.keys())
        assert not twice, f"{name} has '{twice[0]}' in {path.name} and in a module before it. Give one another name."
        found |= entries
    return found


def missing(names: list[str], entries: dict[str, Any]) -> list[str]:
    """Return those of `names` that have no entry, not even as a variant."""
    there = {name.partition(" ")[0] for name in entries}
    return [name for name in names if name not in there]
