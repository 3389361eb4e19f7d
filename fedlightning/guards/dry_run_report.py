"""The report of a dry run: its fields and its text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fedlightning.datamodules.public import public_in_words
from fedlightning.errors import listed


@dataclass
class ClientSize:
    """One client of a dry run.

    Attributes:
        id: The client's id.
        train: Training samples.
        val: Validation samples.
        test: Test samples.
        batches: Training batches of an epoch.
        tried: Whether it took part in its rounds.
    """

    id: str
    train: int
    val: int
    test: int
    batches: int
    tried: bool = False


@dataclass
class CallbackRole:
    """What one callback will do.

    Attributes:
        name: Its class.
        options: Its arguments.
        key: Key of its state and of its extras.
        weighting: Weight of clients in the mean, if it asks for one.
        hooks: Hooks of the federation and of Lightning that it implements.
        down: Extras that it may send to clients.
        up: Extras that clients may send to the server.
    """

    name: str
    options: dict[str, str]
    key: str = ""
    weighting: str = ""
    hooks: list[str] = field(default_factory=list)
    down: list[str] = field(default_factory=list)
    up: list[str] = field(default_factory=list)


@dataclass
class DryRun:
    """What a run would do, found by rounds of one batch on copies; `print` it.

    Attributes:
        model: Class of the module.
        parameters: Its parameters.
        trainable: Those that train.
        shared: Entries that travel, in numbers (parameters and buffers).
        batch: Shapes of a training batch.
        clients: The clients and their samples.
        participants: Clients that take part in a round.
        rounds: Rounds.
        work: Work of a visit.
        engine: Where clients work.
        local_loop: What trains inside a visit.
        device: Device of a visit.
        bytes_down: Bytes sent to clients in a round.
        bytes_up: Bytes sent to the server in a round.
        seconds: Estimated seconds of a round, evaluation included.
        training_bytes: Memory of one client that trains: model, gradients, optimizer; without activations.
        peak_bytes: Memory of the device at most during the dry run; 0 on a CPU.
        kept_bytes: Memory of the server's state and all clients' records.
        callbacks: What every callback will do, in order.
        problems: Clients that failed in the dry run, and why.
        warnings: What the run would warn of.
        metrics: Scores on test data, by name without the split.
        held_out: Clients that take no part in training and are scored as unseen clients.
        public: What is known of the public data; empty without any.
        leaves: What leaves clients and how it is covered, where a callback protects them.
        architectures: By name, class, parameters and clients of the clients' models, where they differ.
    """

    model: str
    parameters: int
    trainable: int
    shared: int
    batch: str
    clients: list[ClientSize]
    participants: int
    rounds: int
    work: str
    engine: str
    local_loop: str
    device: str
    bytes_down: int = 0
    bytes_up: int = 0
    seconds: float = 0.0
    training_bytes: int = 0
    peak_bytes: int = 0
    kept_bytes: int = 0
    callbacks: list[CallbackRole] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)
    held_out: list[ClientSize] = field(default_factory=list)
    public: dict[str, Any] = field(default_factory=dict)
    architectures: dict[str, dict[str, Any]] = field(default_factory=dict)
    leaves: list[tuple[str, str]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(run: DryRun, most: int = 12) -> Iterator[str]:
    tried = sum(client.tried for client in run.clients)
    good = "every step ran" if not run.problems else f"{len(run.problems)} clients failed"
    yield f"Dry run: {good} on one batch for {tried} of {len(run.clients)} clients. Nothing was written.\n"
    width = max([6, *(len(client.id) for client in run.clients[:most])])
    yield f"  {'client':<{width}} {'train':>8} {'batches':>8} {'val':>8} {'test':>8}"
    for client in run.clients[:most]:
        mark = " *" if client.tried and tried < len(run.clients) else ""
        yield f"  {client.id:<{width}} {client.train:>8} {client.batches:>8} {client.val:>8} {client.test:>8}{mark}"
    if len(run.clients) > most:
        yield f"  {f'... {len(run.clients) - most} more':<{width}}"
    totals = [sum(getattr(client, name) for client in run.clients) for name in ("train", "batches", "val", "test")]
    yield f"  {'all':<{width}} " + " ".join(f"{total:>8}" for total in totals)
    if 0 < tried < len(run.clients):
        yield "  * tried"
    if run.held_out:
        names = listed((client.id for client in run.held_out), most)
        val, test = (sum(getattr(client, name) for client in run.held_out) for name in ("val", "test"))
        yield f"  held out, never trained: {len(run.held_out)} clients ({names}), scored on {val} val and {test} test samples"
    if run.public:
        yield f"  public: {public_in_words(run.public)}"
    yield ""
    frozen = "" if run.trainable == run.parameters else f", {run.trainable:,} of them train"
    if not run.architectures:
        yield f"  model      {run.model}: {run.parameters:,} parameters{frozen}; {run.shared:,} numbers travel"
    for name, about in run.architectures.items():
        clients = f"{len(about['clients'])} clients" if about["clients"] else "the server"
        yield f"  model      {name} ({about['class']}): {about['parameters']:,} parameters, {clients}"
    if run.architectures:
        yield f"  shared     {run.shared:,} numbers of the model travel"
    yield f"  batch      {run.batch}"
    takes = (
        "all clients" if run.participants == len(run.clients) else f"{run.participants} of {len(run.clients)} clients"
    )
    yield f"  rounds     {run.rounds}, each {run.work} of {takes}"
    yield f"  where      engine {run.engine} on {run.device}, local loop {run.local_loop}"
    yield f"  a round    {_size(run.bytes_down)} down, {_size(run.bytes_up)} up, about {_duration(run.seconds)}"
    yield f"  the run    about {_duration(run.seconds * run.rounds)}"
    memory = f"{_size(run.training_bytes)} for a client that trains (without activations)"
    peak = f", {_size(run.peak_bytes)} at most on {run.device}" if run.peak_bytes else ""
    yield f"  memory     {memory}{peak}, {_size(run.kept_bytes)} kept for server and clients"
    yield (
        "\n  callbacks, in order" if run.callbacks else "\n  callbacks  none: the weighted mean of all clients (FedAvg)"
    )
    for role in run.callbacks:
        yield f"    {role.name}({', '.join(f'{name}={value}' for name, value in role.options.items())})"
        saved = [f"saved as {role.key}"] if role.key not in ("", role.name) else []
        saved += [f"weighting {role.weighting}"] if role.weighting else []
        yield from _wrapped([*saved, f"hooks {', '.join(role.hooks) or 'none'}"])
        sent = [f"{way} {', '.join(names)}" for way, names in (("down", role.down), ("up", role.up)) if names]
        if sent:
            yield from _wrapped([f"sends {'; '.join(sent)} beside the model"])
    if run.leaves:
        yield "\n  what leaves clients"
        width = max(len(cover) for _, cover in run.leaves)
        yield from (f"    {cover:<{width}}  {item}" for item, cover in run.leaves)
    for title, texts in (("problems", run.problems), ("warnings", run.warnings)):
        if texts:
            yield f"\n  {title}"
            yield from (f"    {text}" for text in texts)


def _wrapped(parts: Sequence[str]) -> Iterator[str]:
    yield from textwrap.wrap("; ".join(parts), 100, initial_indent="      ", subsequent_indent="      ")


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return ""


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{max(seconds, 0.001):.1g} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
