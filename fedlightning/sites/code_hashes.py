"""Which code a side runs: a hash of each file of the packages that model, callbacks and data module are made of.

A configuration names classes; two machines can have other files under the same names. Packages that are installed
(site-packages) are told by their versions, others and FedLightning itself by their files, wherever these lie.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedlightning.client.blueprint import Blueprint
from fedlightning.client.fit import optimizers_of

Code = dict[str, dict[str, str]]
"""By package: a short hash of each file by its place in the package, or its version under an empty name."""
OWN = __name__.partition(".")[0]
LISTED = 100
"""Files up to which a package is told file by file; of more, all are one hash."""
UNSEEN = "cannot be read"
"""In place of a hash: a notebook has no file, and neither has code in an archive."""
INSTALLED = ("site-packages", "dist-packages")
BENEATH = ("torch", "lightning", "pytorch_lightning", "torchmetrics", "numpy")
"""What everything stands on: other versions of torch and Lightning are said, and refuse nobody."""


def of_blueprint(blueprint: Blueprint) -> Code:
    """Return the code of module, optimizers and callbacks, and of what they hold."""
    parts: list[Any] = [*blueprint.template.modules(), *blueprint.callbacks, *blueprint.settings.callbacks]
    with suppress(Exception):  # of the user's: it needs more than a module alone
        parts += optimizers_of(blueprint.template)
    return of_objects(parts, (value for part in parts for value in vars(part).values()))


def of_objects(parts: Iterable[Any], objects: Iterable[Any] = ()) -> Code:
    """Return the code of objects, classes and functions, and what it has imported that is not installed.

    Example:
        >>> sorted(of_objects([of_objects, Path()]))
        ['fedlightning']
    """
    named = {_top(name) for part in parts for name in _modules_of(part)}
    waiting, code = [*named, *(_top(name) for value in objects for name in _modules_of(value))], Code()
    while waiting:
        top = waiting.pop()
        if top in code or top in BENEATH or (top in sys.stdlib_module_names and top != "__main__"):
            continue
        files = _of_package(top)
        if "" not in files:
            waiting += [] if top == OWN else [_top(name) for name in _imported_by(top)]
        elif top not in named:
            continue
        code[top] = files
    return code


def differences(theirs: Mapping[str, Any], own_code: Code) -> list[str]:
    """Return where two sides have other code, a few words each.

    Example:
        >>> differences({"mine": {"net.py": "1a", "loss.py": "2b"}}, {"mine": {"net.py": "1a", "loss.py": "3c"}})
        ['mine/loss.py']
        >>> differences({"timm": {"": "1.0.1"}}, {"timm": {"": "1.0.2"}})
        ['timm (1.0.1 there, 1.0.2 here)']
    """
    differing = []
    for top in sorted({*theirs, *own_code}):
        there, here = theirs.get(top, {}), own_code.get(top, {})
        there = there if isinstance(there, Mapping) else {}
        if there.get("") != here.get("") or not (there and here):
            differing.append(f"{top} ({_in_words(there)} there, {_in_words(here)} here)")
            continue
        files = sorted({*there, *here})
        other = [file for file in files if there.get(file) != here.get(file) or here[file] == UNSEEN]
        differing += [file if file == f"{top}.py" else f"{top}/{file}" for file in other]
    return differing


def digest(code: Code) -> str:
    """Return all of it as one hash."""
    return hashlib.sha256(
        repr(sorted((top, sorted(files.items())) for top, files in code.items())).encode()
    ).hexdigest()


def _top(name: str) -> str:
    return name.partition(".")[0]


def _in_words(files: Mapping[str, str]) -> str:
    return files.get("") or ("files" if files else "nothing")


def _modules_of(thing: Any) -> Iterator[str]:
    """Yield the names of modules that define an object: those of its class and its base classes, or of a function."""
    kind = thing if isinstance(thing, type) else type(thing)
    module_name = getattr(thing, "__module__", None) if callable(thing) else None
    for name in (module_name, *(base.__module__ for base in kind.__mro__)):
        if isinstance(name, str):
            yield name
    inner = getattr(thing, "func", None)  # of a partial function
    if inner is not None and callable(inner):
        yield from _modules_of(inner)


def _imported_by(top: str) -> Iterator[str]:
    for name, module in list(sys.modules.items()):
        if module is not None and _top(name) == top:
            for value in list(vars(module).values()):
                module_name = value.__name__ if isinstance(value, type(sys)) else getattr(value, "__module__", None)
                if isinstance(module_name, str):
                    yield module_name


@functools.cache  # what was imported counts: files may change later
def _of_package(top: str) -> dict[str, str]:
    module = sys.modules.get(top)
    file, places = getattr(module, "__file__", None), [Path(place) for place in getattr(module, "__path__", ())]
    roots = [place for place in places if top == OWN or not _is_installed(place)]
    if (places and not roots) or (not places and file is not None and _is_installed(Path(file))):
        return {"": _version(top)}
    if not places:
        files = {} if file is None else {"the script" if top == "__main__" else Path(file).name: Path(file)}
    elif file is None:  # a namespace can be as large as the folder that somebody works in: what is imported of it
        loaded = [getattr(module, "__file__", None) for name, module in list(sys.modules.items()) if _top(name) == top]
        paths = [Path(file_name) for file_name in loaded if isinstance(file_name, str)]
        files = {
            path.relative_to(root).as_posix(): path for root in roots for path in paths if path.is_relative_to(root)
        }
    else:
        files = {path.relative_to(root).as_posix(): path for root in roots for path in _sources(root)}
    hashes = {name: _of_file(path) for name, path in sorted(files.items())}
    if len(hashes) > LISTED:
        hashes = {f"{len(hashes)} files": digest({top: hashes})[:16]}
    return hashes or {"code": UNSEEN}


def _sources(root: Path) -> Iterator[Path]:
    """Yield the Python files below a folder; links are followed, each folder once."""
    seen: set[str] = set()
    for folder, below, names in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            below.clear()
            continue
        seen.add(real)
        below[:] = sorted(name for name in below if not name.startswith((".", "__pycache__")))
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


def _of_file(path: Path) -> str:
    """Return a hash of a file's text; the ends of lines are those of a machine."""
    try:
        text = path.read_bytes()
    except OSError:
        return UNSEEN
    return hashlib.sha256(text.replace(b"\r\n", b"\n").removeprefix(b"\xef\xbb\xbf")).hexdigest()[:16]


def _is_installed(path: Path) -> bool:
    real = path.resolve()
    return bool({*INSTALLED} & {*real.parts}) or real.is_relative_to(Path(sysconfig.get_path("stdlib")).resolve())


def _version(top: str) -> str:
    names = importlib.metadata.packages_distributions().get(top, [])
    return ", ".join(sorted({importlib.metadata.version(name) for name in names})) or "unknown version"
