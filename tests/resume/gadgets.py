"""Files made to attack `fedlightning.load`: every class and callable that can be named, with attributes that lead somewhere.

`python -m tests.resume.gadgets FOLDER` tries all of them, watched by an audit hook, and prints what they have done.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
import os
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

import fedlightning
from fedlightning.codec.allowed import look_up, path_of
from fedlightning.codec.modules import ObjectWriter, from_tree
from fedlightning.deployment.checkpoints import Exporter
from fedlightning.models import MLP, Classifier

PACKAGES = ("torch", "torchvision", "timm", "peft", "torchmetrics", "lightning", "fedlightning")
LEFT_ALONE = (
    "torch.utils.benchmark",
    "torch.testing",
    "torch.distributed.elastic",
    "lightning.app",
    "torch.utils.tensorboard",
)
"""Modules that the sweep does not import, since their import itself does more than define things."""
_seen: list[str] = []
_watching: list[frozenset[str]] = []
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
QUIET = (
    "object.__",
    "sys._getframe",
    "gc.",
    "code.__new__",
    "cpython.",
    "builtins.id",
    "sys.set_async",
    "compile",
    "tempfile",
)
"""Events of no consequence. What is compiled is of consequence where it is run, which is another event."""


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if not _watching or event.startswith(QUIET):
        return
    if event == "open":
        path, mode, flags = args
        writes = (isinstance(mode, str) and set(mode) & set("wax+")) or (isinstance(flags, int) and flags & WRITES)
        if not writes and (str(path) in _watching[-1] or str(path).endswith((".py", ".pyc"))):
            return
    elif (event == "import" and args[0] in sys.modules) or event in ("os.listdir", "os.scandir", "marshal.loads"):
        return
    _seen.append(f"{event} {args!r:.200}")


@functools.cache
def _install() -> None:
    sys.addaudithook(_hook)  # for ever; it does nothing outside the block


@contextlib.contextmanager
def watched(*readable: str | Path) -> Iterator[list[str]]:
    """Note what the block opens, starts, connects to, imports and runs.

    Args:
        readable: Files that it may read.
    """
    _install()
    _seen.clear()
    _watching.append(frozenset(map(str, readable)))
    found: list[str] = []
    try:
        yield found
    finally:
        _watching.pop()
        found.extend(_seen)


class Forged:
    """An entry of a file that a writer would not make.

    Args:
        kind: Its kind.
        content: What is written as the values that they are.
        before: What is written as it is, before these.
    """

    def __init__(self, kind: str, *content: Any, before: tuple[Any, ...] = ()) -> None:
        self.kind, self.content, self.before = kind, content, before


class Forger(ObjectWriter):
    """Writes such entries beside honest ones."""

    def _other(self, value: Any) -> Any:
        if not isinstance(value, Forged):
            return super()._other(value)
        nodes = [*value.before, *(self._tree(entry) for entry in value.content)]
        return {value.kind: nodes[0] if len(nodes) == 1 else nodes}


def forged(value: Any) -> dict[str, Any]:
    """Return what a file holds that brings a value."""
    writer = Forger("it")
    return {"tree": writer.text(writer.node(value)), "tensors": writer.tensors}


def object_of(path: str, state: Any, mixins: tuple[str, ...] = ()) -> Forged:
    """Return the entry of an object."""
    return Forged("object", state, before=(path, list(mixins)))


def name_of(path: str) -> Forged:
    """Return the entry of a class or function that is called."""
    return Forged("name", path)


def partial_of(path: str, *args: Any, **keywords: Any) -> Forged:
    """Return the entry of a partial."""
    return Forged("partial", [name_of(path), list(args), keywords])


def own_state() -> dict[str, Any]:
    """Return the attributes of a plain module."""
    return dict(vars(nn.Identity()))


WRITER = "fedlightning.storage.files:write_text_atomically"


def pools(victim: Path) -> dict[str, Any]:
    """Return values that an attribute might lead somewhere with."""
    return {
        "text": str(victim),
        "path": victim,
        "tensor": torch.zeros(2, 4),
        "number": 1,
        "function": name_of("torch.nn.functional:relu"),
        "class": name_of("torch.nn.modules.linear:Linear"),
        "module": object_of("torch.nn.modules.linear:Identity", own_state()),
        "partial": partial_of("torch.nn.functional:relu", victim),
        "mapping": {"a": str(victim), "forward": name_of("torch.nn.functional:relu")},
    }


def evil(victim: Path) -> dict[str, Any]:
    """Return values that no file may bring."""
    relu, plain = name_of("torch.nn.functional:relu"), "torch.nn.modules.linear:Identity"
    return {
        "writer": partial_of(WRITER, victim, "evil"),
        "mkdir": partial_of("os:mkdir", str(victim)),
        "load": name_of("fedlightning:load"),
        "timm": partial_of("fedlightning.models.bridges:TimmNet", "hf-hub:a/b", 2, pretrained=True),
        "hooks": object_of(plain, own_state() | {"_forward_hooks": {0: relu}}),
        "call": object_of(plain, own_state() | {"_compiled_call_impl": relu}),
        "method": object_of(plain, own_state() | {"train": relu}),
        "partial of a module": Forged("partial", [object_of(plain, own_state()), [], {}]),
        "compiled": object_of(
            "torch._dynamo.eval_frame:OptimizedModule",
            own_state() | {"_orig_mod": object_of("torch.nn.modules.linear:Identity", own_state())}
            | {"dynamo_ctx": partial_of(WRITER, victim, "evil")},
        ),
    }  # fmt: skip


def names_in(cls: type) -> list[str]:
    """Return the names of attributes that the methods of a class use."""
    found: set[str] = set()

    def look(code: CodeType) -> None:
        found.update(code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                look(constant)

    for base in cls.__mro__:
        if base not in (object, nn.Module):
            for value in vars(base).values():
                if isinstance(value, FunctionType):
                    look(value.__code__)
    hidden = {name for base in cls.__mro__ for name, value in vars(base).items() if callable(value)}
    return sorted(name for name in found - hidden if not name.startswith("__") and name not in vars(nn.Module()))


class Maker:
    """Writes gadget files.

    Args:
        folder: Where they lie.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "gadget.ckpt"
        self.victim = folder / "victim"
        self._module = Classifier(MLP(4, [3], 2), num_classes=2)
        Exporter(lambda architecture: Classifier(MLP(4, [3], 2), num_classes=2)).save(self.path, self._module, {})
        self._content = torch.load(self.path, weights_only=True)

    def write(self, net: Any, **more: Any) -> Path:
        """Write a file whose classifier has `net` as its network, and more attributes."""
        state = dict(self._module.__reduce_ex__(2)[2])  # type: ignore[call-overload]
        state |= {"_modules": {**state["_modules"], "net": net}, **more}
        tree = forged(object_of(path_of(Classifier), state))
        torch.save(self._content | {"fedlightning": {**self._content["fedlightning"], "wrapped": tree}}, self.path)
        return self.path

    def tried(self, net: Any, **more: Any) -> tuple[bool, list[str]]:
        """Open such a file, use what comes, and return whether it opened and what it has done.

        Only errors of one kind may come from `load`; any error may come from the use of a module that makes no sense.
        """
        path = self.write(net, **more)
        opened = False
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), watched(path) as done:
            warnings.simplefilter("ignore")
            try:
                module = fedlightning.load(path)
                opened = True
            except ValueError:
                module = None
            if module is not None:
                for use in (
                    lambda: module(torch.zeros(2, 4)),
                    lambda: module(torch.zeros(1, 3, 8, 8)),
                    module.state_dict,
                    module.train,
                ):
                    with contextlib.suppress(Exception):
                        use()
                del module
        return opened, [*done, *(["the victim is there"] if self.victim.exists() else [])]


def _may(named: Any, called: bool) -> bool:
    with contextlib.suppress(ValueError):
        look_up(path_of(named), called=called)
        return True
    return False


def refused(net: Any, **more: Any) -> tuple[bool, list[str]]:
    """Try a tree that will not open without a file around it, which takes a hundredth of the time."""
    opened = False
    with watched() as done, contextlib.suppress(ValueError):
        from_tree(forged(net))
        opened = True
    return opened, done


def import_all() -> None:
    """Import every module of the packages that can be imported."""
    for package in PACKAGES:
        root = importlib.import_module(package)
        for info in pkgutil.walk_packages(root.__path__, f"{package}.", onerror=lambda name: None):
            if info.name.startswith(LEFT_ALONE) or info.name.endswith("__main__"):
                continue
            with contextlib.suppress(BaseException):
                importlib.import_module(info.name)


def modules() -> list[type]:
    """Return every subclass of `nn.Module` that is imported and can be named."""
    found: dict[type, None] = {}
    todo = [nn.Module]
    while todo:
        cls = todo.pop()
        if cls not in found:
            found[cls] = None
            todo.extend(type.__subclasses__(cls))
    return [cls for cls in found if "<" not in cls.__qualname__ and _has_path(cls)]


def _has_path(thing: Any) -> bool:
    try:
        return bool(path_of(thing))
    except ValueError:
        return False


def callables() -> list[Any]:
    """Return every function and class of the packages that is imported and can be named."""
    found: dict[int, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in PACKAGES:
            for value in list(vars(module).values()):
                if (inspect.isroutine(value) or isinstance(value, type)) and _has_path(value):
                    found[id(value)] = value
    return list(found.values())


def sweep(folder: Path, part: int = 0, parts: int = 1) -> tuple[int, int, list[str]]:
    """Try gadgets of everything; return how many were tried, how many opened, and what was done."""
    maker = Maker(folder)
    tried, opened, done = 0, 0, []

    def one(what: str, named: Any, called: bool, net: Any, **more: Any) -> None:
        nonlocal tried, opened
        came, did = maker.tried(net, **more) if _may(named, called) else refused(net, **more)
        tried, opened = tried + 1, opened + came
        done.extend(f"{what}: {line}" for line in did)
        maker.victim.unlink(missing_ok=True)

    for cls in modules()[part::parts]:
        names = names_in(cls)
        for kind, value in (pools(maker.victim) | evil(maker.victim)).items():
            one(f"{cls} {kind}", cls, False, object_of(path_of(cls), own_state() | dict.fromkeys(names, value)))
    layer = "torch.nn.modules.transformer:TransformerEncoderLayer"
    for thing in callables()[part::parts]:
        path = path_of(thing)
        for kind, value in (("", name_of(path)), ("of a path", partial_of(path, str(maker.victim)))):
            one(
                f"{path} {kind}",
                thing,
                True,
                object_of(layer, own_state() | {"activation": value}),
                make_optimizer=value,
            )
    return tried, opened, done


if __name__ == "__main__":
    import_all()
    where, part, parts = Path(sys.argv[1]), *map(int, sys.argv[2:] or (0, 1))
    print(len(modules()), "modules,", len(callables()), "callables")
    tried, opened, done = sweep(where, part, parts)
    print(tried, "files,", opened, "opened")
    for line in sorted(set(done)):
        print(line)
