"""Where clients work, and with what: values of the trainer's argument `engine`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from fedlightning.errors import ConfigurationError
from fedlightning.options.base import describe_changed
from fedlightning.ranges import Count, NonNegativeFloat, Range, check_on_creation

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
