"""The trainer's folders, loggers and engine, checked as they are given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger

from fedlightning.arguments.local import check_callbacks
from fedlightning.compat.pytorch_lightning import adapt
from fedlightning.errors import ConfigurationError, warn
from fedlightning.options import Processes, Ray
from fedlightning.options.lightning_arguments import check_forwarded
from fedlightning.ranges import to_python
from fedlightning.resume.manifest import is_file_name


def check(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that cannot work together, and what annotations cannot say of one."""
    adapt(arguments["callbacks"], arguments["logger"])
    check_place(arguments["name"], arguments["version"], arguments["default_root_dir"])
    _check_kinds(arguments)
    check_held_out(arguments["held_out"])
    if arguments["participation"] == 1 and isinstance(arguments["participation"], int):
        warn("participation=1 is one client a round. All clients are participation=1.0.")
    check_engine(arguments)
    check_forwarded(arguments)
    check_callbacks(arguments)


def check_held_out(held_out: Any) -> None:
    """Refuse what names a client twice."""
    names = [str(client) for client in held_out] if isinstance(held_out, list | tuple) else []
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigurationError(f"held_out names client '{twice[0]}' twice. Name it once.")


def _check_kinds(arguments: Mapping[str, Any]) -> None:
    """Refuse loggers that are of another kind."""
    if not isinstance(arguments["logger"], bool | None | Logger | Iterable) or isinstance(
        arguments["logger"], str | Mapping
    ):
        raise ConfigurationError(
            f"logger={arguments['logger']!r} is not a logger. Pass True, False or instances such as CSVLogger('logs')."
        )


MAX_NAME_BYTES = 255
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
        if not place.isprintable() or any(len(part.encode()) > MAX_NAME_BYTES for part in place.split("/")):
            raise ConfigurationError(
                f"{what}={place!r:.80} cannot name a folder: it is longer than {MAX_NAME_BYTES} bytes or holds characters "
                "that cannot be printed, such as line breaks. Choose a shorter, plain one."
            )


def check_engine(arguments: Mapping[str, Any]) -> None:
    """Refuse what worker processes cannot do."""
    options, devices, strategy = arguments["engine"], arguments["devices"], arguments["strategy"]
    if not isinstance(options, Processes | Ray):
        return
    engine = options.name
    if arguments["num_nodes"] != 1:
        raise ConfigurationError(
            f"num_nodes={arguments['num_nodes']}, but "
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
            f"{type(options).__name__}(workers=...), or engine='sequential'."
        )
    if strategy != "auto":
        raise ConfigurationError(
            f"strategy={strategy!r} may share one client among processes; engine={engine!r} trains each client in one. "
            "Leave it out, or use engine='sequential'."
        )


def parse_time(value: str | timedelta | Mapping[str, int] | None) -> timedelta | None:
    """Return `max_time`, given in any of Lightning's three forms."""
    if value is None:
        return None
    if isinstance(value, timedelta):
        return _not_negative(value, value)
    if isinstance(value, Mapping):
        try:
            time = timedelta(**{unit: to_python(number) for unit, number in value.items()})
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigurationError(
                f"max_time={dict(value)!r} is not a time ({error}). Use {{'hours': 1}}."
            ) from error
        return _not_negative(time, value)
    parts = value.split(":") if isinstance(value, str) else []
    if len(parts) != 4 or not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise ConfigurationError(f"max_time={value!r} is not of the form 'DD:HH:MM:SS'. One hour is '00:01:00:00'.")
    days, hours, minutes, seconds = map(int, parts)
    return _not_negative(timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds), value)


def _not_negative(time: timedelta, value: Any) -> timedelta:
    if time < timedelta(0) or value == {}:
        raise ConfigurationError(f"max_time={value!r} is not a time. One hour is '00:01:00:00'.")
    return time
