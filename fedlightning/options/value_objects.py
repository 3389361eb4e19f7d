"""What the values of the trainer's arguments have in common.

What addresses the randomness of a run: the trainer's argument `seed`.

What is scored, when and on what: the trainer's argument `evaluation`.

What becomes of clients that fail: the trainer's argument `failures`.

Where clients work, and with what: values of the trainer's argument `engine`.

Ranges of its arguments that are numbers, each with its sentence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from fractions import Fraction
from math import ceil
from typing import Annotated, Any, ClassVar, Literal

from fedlightning.errors import ConfigurationError
from fedlightning.ranges import (
    Count,
    Instance,
    NonNegativeFloat,
    PositiveFloat,
    Range,
    at_most_one,
    check_on_creation,
    needs,
)


def describe_changed(options: Any) -> str:
    """Return the class of options and the values that are not the defaults: their `__repr__`."""
    texts = [
        f"{field.name}={getattr(options, field.name)!r}"
        for field in (fields(options) if is_dataclass(options) else ())
        if repr(getattr(options, field.name)) != repr(field.default)  # 1.0 is a share, and 1 a number
    ]
    return f"{type(options).__name__}({', '.join(texts)})"


Source = Literal["run", "initialisation", "participation"]
"""A source of randomness that has a seed of its own."""


@check_on_creation
@dataclass(frozen=True)
class Seeds:
    """The seeds of a run, one for each source of randomness, so that each can vary while the others stay.

    Args:
        run: Addresses the order of batches, dropout, and all that has no seed of its own.
        initialisation: Addresses first weights: what callbacks add to the module and, where a configuration makes it, its
            own. Default: as `run`.
        participation: Addresses who takes part in a round. Default: as `run`.

    Example:
        >>> Seeds.from_short(3).of("participation"), Seeds(3, participation=5).of("participation")
        (3, 5)
    """

    run: int = 0
    initialisation: int | None = None
    participation: int | None = None

    __repr__ = describe_changed

    @classmethod
    def from_short(cls, seed: Seeds | int) -> Seeds:
        """Return the seeds, given as such or by the one of all sources."""
        return seed if isinstance(seed, cls) else cls(run=seed)  # type: ignore[arg-type]

    def of(self, source: Source) -> int:
        """Return the seed of a source."""
        seed: int | None = getattr(self, source)
        return self.run if seed is None else seed

    def others(self) -> dict[str, int]:
        """Return the seeds that are not that of the run, by their sources."""
        return {field.name: seed for field in fields(self) if (seed := self.of(field.name)) != self.run}  # type: ignore[arg-type]


Share = Annotated[
    float, Range("(0, 1]", "A float is a share of the clients, an int a number of them. every=0 scores nobody.")
]


@check_on_creation
@at_most_one("seconds", "every", why="both say when models are scored. Leave one of them out.")
@dataclass(frozen=True)
class Evaluation:
    """When models are scored, which, of whom and on what.

    Args:
        every: Rounds between evaluations on validation data (the last round is always evaluated); 0: never.
        seconds: Virtual seconds between evaluations, instead, where the loop has a clock: scored is the first round
            that begins at a multiple of them or later, and the last one.
        clients: Clients that are scored, on validation and test data, at every stage: a share (float in (0, 1]) or
            a number (int), drawn once with the data module's seed, so they are the same in every round and for all methods
            of a comparison. They train as the others do. Pooled data and held-out clients are not thinned out. Default:
            all of them.
        stages: Stages to evaluate: "G" the server's model, "L1" the model each client holds after receiving, "L2" after
            local training.
        data: "local": each client's own data; "pooled": the union over clients.
        test_data: Data that `test` and `validate` score on (default local and pooled); "clients" adds every client's model
            on every other client's data, the cross-client matrix. Empty: no test, not even of stage L2.

    Example:
        >>> Evaluation.from_short(5) == Evaluation(every=5)
        True
    """

    every: Annotated[int, Range("[0, inf)", "0 switches it off.", strict=True)] = 1
    seconds: PositiveFloat | None = None
    clients: Count | Share | None = None
    stages: Sequence[Literal["G", "L1", "L2"]] = ("G", "L1", "L2")
    data: Sequence[Literal["local", "pooled"]] = ("local",)
    test_data: Sequence[Literal["local", "pooled", "clients"]] | None = None

    __repr__ = describe_changed

    def __post_init__(self) -> None:
        for name in ("stages", "data", "test_data"):  # equal values are equal, whatever kind of list they came in
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, tuple(dict.fromkeys(map(str, value))))

    @classmethod
    def from_short(cls, evaluation: Evaluation | int) -> Evaluation:
        """Return the evaluation, given as such or by the rounds between two."""
        return evaluation if isinstance(evaluation, cls) else cls(every=evaluation)  # type: ignore[arg-type]

    @property
    def tested(self) -> tuple[str, ...]:
        """Data that `test` and `validate` score on."""
        return ("local", "pooled") if self.test_data is None else tuple(self.test_data)


MinimumShare = Annotated[float, Range("(0, 1]", "A float is a share of a round's clients, an int a number of them.")]


@check_on_creation
@needs("retries", "on_error", why="only 'retry' tries a client again. Use it, or leave retries out.", value="retry")
@dataclass(frozen=True)
class FailurePolicy:
    """What becomes of a client that fails (raises, has a NaN, loses its worker process, takes too long).

    Args:
        on_error: "skip": it is left out of the round, with a warning; "retry": it is tried again first, with the same random
            numbers; "stop": it ends the run.
        retries: Number of further tries under "retry".
        min_clients: Number (int) or share (float in (0, 1]) of a round's clients that must contribute; with fewer the run
            stops, and its state of the round before is intact.
        timeout: Seconds that a client may take for a visit, or for being scored; default: any time. With
            engine="processes" its worker is ended and the client has failed; the other engines cannot end a client alone
            and stop the run.
        update_limit: Multiple of the usual norm of updates beyond which one is refused, and its client has failed; in round 1
            of the norm of the model that was sent. `None`: nothing is refused for its size.

    Example:
        >>> FailurePolicy.from_short("retry").tries
        2
    """

    on_error: Literal["skip", "retry", "stop"] = "skip"
    retries: Count = 1
    min_clients: Count | MinimumShare = 1
    timeout: PositiveFloat | None = None
    update_limit: Annotated[float, Range("(1, inf)", "It says by how much a norm may exceed the usual one.")] | None = (
        1000.0
    )

    __repr__ = describe_changed

    @classmethod
    def from_short(cls, failures: FailurePolicy | str) -> FailurePolicy:
        """Return the policy, given as such or by its `on_error`."""
        return failures if isinstance(failures, cls) else cls(on_error=failures)  # type: ignore[arg-type]

    @property
    def tries(self) -> int:
        """Number of times that a client's work is tried."""
        return 1 + self.retries if self.on_error == "retry" else 1

    def needed(self, visited: int) -> int:
        """Return the number of clients that must contribute where so many are visited: never more than these.

        Example:
            >>> FailurePolicy(min_clients=0.5).needed(5), FailurePolicy(min_clients=3).needed(2)
            (3, 2)
        """
        if isinstance(self.min_clients, int):
            return min(self.min_clients, visited)
        return ceil(Fraction(str(self.min_clients)) * visited)  # of the decimal number: 0.7 of 10 is 7


ELSEWHERE = ("address", "num_cpus", "num_gpus")
"""Arguments of `ray.init` that have another place, or that Ray does not take of a cluster that runs already."""


class EngineOptions:
    """Options of an engine. Each subclass names one engine and has the arguments that mean something to it."""

    name: ClassVar[str]
    """Its short form."""
    __repr__ = describe_changed

    @classmethod
    def from_short(cls, engine: EngineOptions | str) -> EngineOptions:
        """Return the options, given as such or by the engine's name.

        Example:
            >>> EngineOptions.from_short("processes")
            Processes()
        """
        if isinstance(engine, EngineOptions) and isinstance(engine, tuple(ENGINES.values())):
            return engine
        if not isinstance(engine, str) or engine not in ENGINES:
            raise ConfigurationError(f"engine={engine!r} is unknown. Choose one of {list(ENGINES)}.")
        return ENGINES[engine]()


@dataclass(frozen=True, repr=False)
class Sequential(EngineOptions):
    """Clients one after another in this process."""

    name = "sequential"


@check_on_creation
@dataclass(frozen=True, repr=False)
class Processes(EngineOptions):
    """Clients on worker processes of this machine with one torch thread each, the same results bit for bit.

    Put what starts the training of a script under `if __name__ == "__main__":`.

    Args:
        workers: Number of processes; default: one for every core, at most one for every client. All use the first GPU, where
            there is one; devices="auto" distributes them over all GPUs.
    """

    name = "processes"
    workers: Count | None = None


@check_on_creation
@dataclass(frozen=True, repr=False)
class Vectorized(EngineOptions):
    """Many small models as one stack in this process, equal up to rounding, and refused where something cannot be stacked.

    Args:
        clients_per_stack: Number of clients that train together; default: as many as fit into a share of the memory.
            Results do not depend on it beyond rounding.
    """

    name = "vectorized"
    clients_per_stack: Count | None = None


@check_on_creation
@dataclass(frozen=True, repr=False)
class Ray(EngineOptions):
    """Clients on Ray actors of this machine or of a cluster, the same results bit for bit (extra `ray`).

    Args:
        workers: Number of actors; default: as many as Ray has room for, at most one for every client.
        address: The Ray cluster: `"auto"` (the one of this machine, or of `RAY_ADDRESS`), or `"HOST:PORT"`. Default: the
            Ray that the program has started itself (`ray.init`), or else one on this machine that ends with the program
            and is reached from this machine only.
        num_cpus: CPUs that Ray sets aside for each worker; may be a fraction.
        num_gpus: GPUs that Ray sets aside for each worker; a fraction below 1 shares one. It places workers, and does not
            limit their memory. Default: an equal share of all GPUs where clients train on GPUs, else none.
        init: Further arguments of `ray.init`, such as `{"runtime_env": {...}}` or `{"object_store_memory": 10**9}`.

    Raises:
        ConfigurationError: If a value is out of range.
    """

    name = "ray"
    workers: Count | None = None
    address: str | None = None
    num_cpus: Annotated[float, Range("(0, inf)", "Fractions such as 0.5 are allowed.")] = 1.0
    num_gpus: NonNegativeFloat | None = None
    init: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.address == "":
            raise ConfigurationError("Ray got address=''. Use 'auto' or 'HOST:PORT'; leave it out for none.")
        if self.address is not None and self.address.startswith("ray://"):
            raise ConfigurationError(
                f"Ray got address={self.address!r}, that of Ray's client, which cannot pass models on as they are. Start the "
                "run on a machine of the cluster, with address='auto'."
            )
        if self.num_gpus is not None and self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            raise ConfigurationError(
                f"Ray got num_gpus={self.num_gpus!r}: it takes fractions below 1 only. A client trains on one GPU: use 1."
            )
        if self.init is not None and not isinstance(self.init, Mapping):
            raise ConfigurationError(f"Ray got init={self.init!r}. Use a dict of arguments of ray.init.")
        for name in ELSEWHERE:
            if name in (self.init or {}):
                raise ConfigurationError(
                    f"Ray got init={{{name!r}: ...}}, which is not passed on. "
                    + ("Use address=...." if name == "address" else f"Use {name}=... (of a worker), and workers=....")
                )


@dataclass(frozen=True, repr=False)
class Flower(EngineOptions):
    """Clients at sites on other machines: `fedlightning serve` and `fedlightning site`."""

    name = "flower"


@dataclass(frozen=True, repr=False)
class Auto(EngineOptions):
    """`Vectorized` where it is faster, else `Sequential`, and one line says why.

    Stacks are faster for small models, several clients a round, and nothing that cannot be stacked. It goes by the
    configuration alone, so it chooses the same on every machine.
    """

    name = "auto"


ENGINES: dict[str, type[EngineOptions]] = {
    kind.name: kind for kind in (Sequential, Processes, Vectorized, Ray, Flower, Auto)
}
"""The engines by their short forms."""


ClientShare = Annotated[float, Range("(0, 1]", "A float is a share of the clients, an int a number of them.")]
HeldOutShare = Annotated[
    float, Range("[0, 1)", "A float is a share of the clients, an int a number of them, a list their ids.")
]
DecayFactor = Annotated[float, Range("(0, 10]", "A factor per round, such as 0.99.")]
Gigabytes = Annotated[float, Range("[0, inf)", "0 keeps all but one on disk.")]
OF_A_CLASS = Instance()
VISITS = Instance("It says when clients are visited; what trains inside a visit is local_loop.")
