"""The trainer's numbers, words and folders, checked as they are given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

from lightning.pytorch.loggers import Logger

from fedlightning.arguments.local import check_callbacks
from fedlightning.blueprint.ray_options import RayOptions
from fedlightning.blueprint.trainer_arguments import check_forwarded
from fedlightning.compat.pytorch_lightning import adapt
from fedlightning.errors import ConfigurationError, warn
from fedlightning.federation.loops import Loop, Synchronous
from fedlightning.hooks import POOLED
from fedlightning.ranges import NonNegativeFloat, PositiveFloat, PositiveShare, Range, ShareBelowOne, allows, shown
from fedlightning.run.manifest import is_file_name
from fedlightning.scoring.tasks import LOCAL

CHOICES = {
    "optimizer_state": (None, "reset", "keep"),
    "float_buffers": ("average", "local", "server"),
    "local_loop": ("auto", "trainer", "fast"),
    "engine": ("sequential", "processes", "vectorized", "ray", "flower", "auto"),
    "on_client_error": ("skip", "retry", "stop"),
}
STAGES = ("G", "L1", "L2")
NOT_NEGATIVE = Range("[0, inf)", strict=True)
Count = Annotated[int, Range("[1, inf)", strict=True)]
NUMBERS: dict[str, tuple[Any, str]] = {
    "seed": (Annotated[int, Range("(-inf, inf)", strict=True)], "a whole number"),
    "max_rounds": (Count, "a whole number of at least 1"),
    "local_epochs": (Count | None, "a whole number of at least 1"),
    "local_steps": (Count | None, "a whole number of at least 1"),
    "lr_decay": (Annotated[float, Range("(0, 10]")], "a positive factor per round, such as 0.99"),
    "participation": (
        Count | PositiveShare,
        "a share in (0, 1] (a float) or a number of clients (an int of at least 1)",
    ),
    "evaluate_every": (Annotated[int, NOT_NEGATIVE], "a whole number; 0 switches it off"),
    "evaluate_seconds": (PositiveFloat | None, "a positive number of virtual seconds, or None"),
    "evaluate_clients": (
        Count | PositiveShare | None,
        "a share in (0, 1] (a float) or a number of clients (an int of at least 1); None scores all. evaluate_every=0 scores "
        "nobody",
    ),
    "save_state": (Annotated[int, NOT_NEGATIVE], "a whole number; 0 switches it off"),
    "client_memory_gb": (NonNegativeFloat | None, "a number of gigabytes; 0 keeps all but one on disk"),
    "clients_per_stack": (Count | None, "a whole number of at least 1, or None"),
    "workers": (Count | None, "a whole number of at least 1, or None for every core"),
    "client_retries": (Count | None, "a whole number of at least 1, or None"),
    "min_clients": (
        Count | PositiveShare,
        "a number of clients (an int of at least 1) or a share in (0, 1] (a float)",
    ),
    "client_timeout": (PositiveFloat | None, "a positive number of seconds, or None"),
    "update_limit": (
        Annotated[float, Range("(1, inf)")] | None,
        "a number above 1, by how much the norm of an update may exceed the usual one; None refuses nothing for its size",
    ),
}
"""What the trainer's numbers may be, and that in words."""


def check(given: Mapping[str, Any]) -> None:
    """Refuse arguments that contradict each other or are out of range."""
    adapt(given["callbacks"], given["logger"])
    check_place(given["name"], given["version"], given["default_root_dir"])
    if given["local_epochs"] is not None and given["local_steps"] is not None:
        raise ConfigurationError(
            f"local_epochs={given['local_epochs']} and local_steps={given['local_steps']} are both set. "
            "A visit is counted in epochs or in steps: remove one of them."
        )
    for name, (kind, rule) in NUMBERS.items():
        if not isinstance(given[name], int | float | None) or not allows(kind, given[name]):
            raise ConfigurationError(f"{name}={shown(given[name])} must be {rule}.")
    seconds = given["evaluate_seconds"]
    if seconds is not None and given["evaluate_every"] != 1:
        raise ConfigurationError(
            f"evaluate_seconds={seconds} and evaluate_every={given['evaluate_every']} both say when models are scored. Leave "
            "one of them out."
        )
    _check_kinds(given)
    check_held_out(given["held_out"])
    if given["participation"] == 1 and isinstance(given["participation"], int):
        warn("participation=1 is one client a round. All clients are participation=1.0.")
    for name, allowed in CHOICES.items():
        if not isinstance(given[name], str | None) or given[name] not in allowed:
            raise ConfigurationError(f"{name}={given[name]!r} is unknown. Choose one of {list(allowed)}.")
    check_engine(given)
    check_failures(given)
    for name, known in (
        ("stages", STAGES),
        ("evaluate_data", (LOCAL, POOLED)),
        ("test_data", (LOCAL, POOLED, "clients")),
    ):
        if isinstance(given[name], str) or not isinstance(given[name], Iterable | None):
            raise ConfigurationError(
                f"{name}={given[name]!r} must be a list, as in {name}=[{known[0]!r}]. Known: {list(known)}."
            )
        unknown = [value for value in given[name] or () if value not in known]
        if unknown:
            raise ConfigurationError(f"{name} holds {unknown[0]!r}. Known: {list(known)}.")
    check_forwarded(given)
    check_callbacks(given)


def check_held_out(held_out: Any) -> None:
    """Refuse what names no clients."""
    if held_out is None:
        return
    if isinstance(held_out, list | tuple):
        wrong = [one for one in held_out if isinstance(one, bool) or not isinstance(one, str | int)]
        if wrong:
            raise ConfigurationError(f"held_out holds {wrong[0]!r}, which is no id of a client.")
        twice = [one for one in held_out if [str(other) for other in held_out].count(str(one)) > 1]
        if twice:
            raise ConfigurationError(f"held_out names client '{twice[0]}' twice. Name it once.")
        return
    if not isinstance(held_out, int | float) or not allows(Annotated[int, NOT_NEGATIVE] | ShareBelowOne, held_out):
        raise ConfigurationError(
            f"held_out={held_out!r} must be a share in [0, 1) (a float), a number of clients (an int), or a list of clients' "
            "ids."
        )


def _check_kinds(given: Mapping[str, Any]) -> None:
    """Refuse names, folders and switches that are of another kind."""
    for name in ("enable_progress_bar", "fast_dev_run", "sanity_check"):
        if not isinstance(given[name], bool | None):
            raise ConfigurationError(f"{name}={given[name]!r} must be True or False.")
    if not isinstance(given["logger"], bool | None | Logger | Iterable) or isinstance(given["logger"], str | Mapping):
        raise ConfigurationError(
            f"logger={given['logger']!r} is no logger. Pass True, False or instances such as CSVLogger('logs')."
        )


LONGEST = 255
"""Bytes of a folder's name that file systems take."""


def check_place(name: Any, version: Any, root: Any) -> None:
    """Refuse what no folder is called, and a name or version that puts the run anywhere but below `default_root_dir`."""
    if not isinstance(root, str | Path):
        raise ConfigurationError(f"default_root_dir={root!r} must be the path of a folder.")
    if not isinstance(name, str) or not all(is_file_name(part) for part in name.split("/")):
        raise ConfigurationError(
            f"name={name!r} must be the name of a folder below default_root_dir, such as 'fedprox' or 'study/fedprox'. To "
            "put runs somewhere else set default_root_dir."
        )
    if version is not None and not is_file_name(version):
        raise ConfigurationError(
            f"version={version!r} must be the name of one folder, such as 'seed_1', without separators."
        )
    for what, place in (("name", name), ("version", version or ""), ("default_root_dir", str(root))):
        if not place.isprintable() or any(len(part.encode()) > LONGEST for part in place.split("/")):
            raise ConfigurationError(
                f"{what}={place!r:.80} cannot name a folder: it is longer than {LONGEST} bytes or holds characters that "
                "cannot be printed, such as line breaks. Choose a shorter, plain one."
            )


def loop_of(loop: Any) -> Loop:
    """Return the loop that is named, or refuse."""
    if isinstance(loop, Loop):
        return loop
    if loop != "synchronous":
        raise ConfigurationError(
            f"loop={loop!r} says when clients are visited: 'synchronous', or a loop such as "
            "fedlightning.federation.loops.Synchronous(). What trains inside a visit is local_loop."
        )
    return Synchronous()


def check_engine(given: Mapping[str, Any]) -> None:
    """Refuse options of another engine, and what worker processes cannot do."""
    workers, devices, strategy = given["workers"], given["devices"], given["strategy"]
    stack = given["clients_per_stack"]
    if stack is not None and given["engine"] != "vectorized":
        raise ConfigurationError(
            f"clients_per_stack={stack} means nothing to engine={given['engine']!r}. Use engine='vectorized', or leave it "
            "out."
        )
    engine = given["engine"]
    if given["ray"] is not None and engine != "ray":
        raise ConfigurationError(
            f"ray={given['ray']!r} means nothing to engine={engine!r}. Use engine='ray', or leave it out."
        )
    if engine not in ("processes", "ray"):
        if workers is not None:
            raise ConfigurationError(
                f"workers={workers} means nothing to engine={engine!r}. Use engine='processes' or 'ray', or leave it out."
            )
        return
    RayOptions.of(given["ray"])
    if given["num_nodes"] != 1:
        raise ConfigurationError(
            f"num_nodes={given['num_nodes']}, but "
            + (
                "the workers of engine='processes' are on one machine. Leave it out."
                if engine == "processes"
                else "engine='ray' trains each client on one machine, and takes the machines of its cluster. Leave it out."
            )
        )
    if devices not in (1, "1", "auto") and not (
        engine == "processes" and isinstance(devices, list) and len(devices) == 1
    ):
        raise ConfigurationError(
            f"devices={devices!r} "
            + ("names devices, which Ray chooses" if isinstance(devices, list) else "shares one client among devices")
            + f"; engine={engine!r} trains each client on one device, several clients at once. Use devices=1 and "
            "workers=..., or engine='sequential'."
        )
    if strategy != "auto":
        raise ConfigurationError(
            f"strategy={strategy!r} may share one client among processes; engine={engine!r} trains each client in one. "
            "Leave it out, or use engine='sequential'."
        )


def check_failures(given: Mapping[str, Any]) -> None:
    """Refuse options about failing clients that mean nothing."""
    retries = given["client_retries"]
    if retries is not None and given["on_client_error"] != "retry":
        raise ConfigurationError(
            f"client_retries={retries} means nothing to on_client_error={given['on_client_error']!r}. Use "
            "on_client_error='retry', or leave it out."
        )


def parse_time(value: str | timedelta | Mapping[str, int] | None) -> timedelta | None:
    """Return `max_time`, given in any of Lightning's three forms."""
    if value is None:
        return None
    if isinstance(value, timedelta):
        return _not_negative(value, value)
    if isinstance(value, Mapping):
        try:
            found = timedelta(**value)
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigurationError(
                f"max_time={dict(value)!r} is not a time ({error}). Use {{'hours': 1}}."
            ) from error
        return _not_negative(found, value)
    parts = value.split(":") if isinstance(value, str) else []
    if len(parts) != 4 or not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise ConfigurationError(f"max_time={value!r} is not of the form 'DD:HH:MM:SS'. One hour is '00:01:00:00'.")
    days, hours, minutes, seconds = map(int, parts)
    return _not_negative(timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds), value)


def _not_negative(time: timedelta, given: Any) -> timedelta:
    if time < timedelta(0) or given == {}:
        raise ConfigurationError(f"max_time={given!r} is no time. One hour is '00:01:00:00'.")
    return time
