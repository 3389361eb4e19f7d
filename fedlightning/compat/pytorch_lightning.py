"""Code written for `import pytorch_lightning`, the same library under its old name but a separate tree of classes.

`lightning.pytorch` and `pytorch_lightning` are generated from one source. A class of one is not a subclass of the other's,
though, so a module built on `pytorch_lightning.LightningModule` is none for `lightning.pytorch.Trainer`. Two ways out:

* :func:`use_lightning_for_pytorch_lightning`, before the user's code is imported: `import pytorch_lightning` then gives
  `lightning.pytorch`. The command line does so by itself.
* :func:`adapt`, for objects that are there already: the classes of `lightning.pytorch` are put in front of those of
  `pytorch_lightning` among the bases of the user's classes. Done where both packages have the same version;
  `pytorch_lightning.Trainer` refuses the objects then.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}
"""Old name of a package: its present one."""
SWITCH = "FEDLIGHTNING_USE_LIGHTNING"
"""Environment variable by which worker and child processes do as their parent."""
WAY_OUT = (
    "Write `import lightning.pytorch as pl` instead of `import pytorch_lightning as pl`, or call "
    "fedlightning.compat.use_lightning_for_pytorch_lightning() before the first import of pytorch_lightning."
)


def use_lightning_for_pytorch_lightning() -> None:
    """Let `import pytorch_lightning` (and `lightning_fabric`) give `lightning.pytorch` from now on in this process.

    Call it first, before code that imports `pytorch_lightning`. A second call has no effect. Worker processes and the
    children of this process do the same.

    Example:
        >>> import fedlightning.compat
        >>> fedlightning.compat.use_lightning_for_pytorch_lightning()  # doctest: +SKIP
        >>> import pytorch_lightning as pl  # doctest: +SKIP
        >>> pl.LightningModule.__module__  # doctest: +SKIP
        'lightning.pytorch.core.module'
    """
    if any(isinstance(finder, OldNames) for finder in sys.meta_path):
        return
    if _is_imported():
        raise RuntimeError(
            "pytorch_lightning is imported already, so its classes cannot be replaced any more. Call "
            "use_lightning_for_pytorch_lightning() before the first import of it: at the top of the script."
        )
    os.environ[SWITCH] = "1"
    sys.meta_path.insert(0, OldNames())


def use_lightning_if_possible(*, asked: bool = True) -> None:
    """Do as :func:`use_lightning_for_pytorch_lightning`, unless `pytorch_lightning` is imported already."""
    if not _is_imported() and (asked or os.environ.get(SWITCH) == "1"):
        use_lightning_for_pytorch_lightning()


def _is_imported() -> bool:
    """Return True if there are classes of `pytorch_lightning`, which are not those of `lightning.pytorch`."""
    module = sys.modules.get("pytorch_lightning")
    return module is not None and module is not sys.modules.get("lightning.pytorch")


def _present(name: str) -> str | None:
    """Return the present name of a module; `None` if it is in none of :data:`PACKAGES`.

    Example:
        >>> _present("pytorch_lightning.callbacks"), _present("pytorch_lightning_extras")
        ('lightning.pytorch.callbacks', None)
    """
    package, _, rest = name.partition(".")
    new = PACKAGES.get(package)
    return None if new is None else f"{new}.{rest}" if rest else new


class OldNames(MetaPathFinder, Loader):
    """Finds the modules of :data:`PACKAGES` under their old names. They are the same module objects."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for an old name, `None` for all others and for modules that are no more."""
        new = _present(fullname)
        if new is None or importlib.util.find_spec(new) is None:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module of the present name."""
        module = importlib.import_module(str(_present(spec.name)))
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back; it has run already."""
        module.__spec__ = self._spec


# -- objects that are there already -------------------------------------------------------------------------------------
def adapt(*objects: Any) -> None:
    """Make objects of `pytorch_lightning` (modules, callbacks, data modules, loggers) those of `lightning.pytorch`.

    Of an object whose class is `pytorch_lightning`'s own, the class is replaced. A class that a user derived from one of
    them gets the present one as a base in front of it, so that `isinstance` holds for both packages;
    `pytorch_lightning.Trainer` refuses it then. Other objects stay as they are.
    """
    if not _is_imported():
        return
    for item in objects:
        if isinstance(item, list | tuple):
            adapt(*item)
            continue
        parts = item.modules() if _derives(type(item), "LightningModule") else [item]
        for part in list(parts):
            _adapt(part)


def _derives(kind: type, name: str) -> bool:
    return any(base.__name__ == name and _is_old(base) for base in kind.__mro__)


def _is_old(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in PACKAGES


def _adapt(item: Any) -> None:
    kind = type(item)
    old = next((base for base in kind.__mro__ if _is_old(base)), None)
    if old is None or _new_class(old) in kind.__mro__:
        return
    _require_same_version(kind)
    try:
        if _is_old(kind):
            object.__setattr__(item, "__class__", _new_class(kind))
        else:
            _put_in_front(kind)
    except TypeError as error:
        raise ValueError(f"{_of(kind)} cannot be made one of lightning.pytorch's ({error}). {WAY_OUT}") from error
    for value in vars(item).values():  # what holds hyper-parameters, for one
        if _is_old(type(value)) and isinstance(value, dict):
            object.__setattr__(value, "__class__", _new_class(type(value)))
    os.environ[SWITCH] = "1"


def _put_in_front(kind: type) -> None:
    """Put the present classes in front of the old ones among the bases of a class, and of its bases."""
    bases: list[type] = []
    for base in kind.__bases__:
        if _is_old(base):
            new = _new_class(base)
            bases += [new] if new not in kind.__bases__ else []
        else:
            _put_in_front(base)
        bases.append(base)
    if tuple(bases) != kind.__bases__:
        kind.__bases__ = tuple(bases)
        warnings.warn(
            f"{_of(kind)}. lightning.pytorch's class, the same code in version {_version('lightning')}, is put in "
            "front of it; from now on pytorch_lightning's own Trainer refuses it. To avoid this write "
            "`import lightning.pytorch as pl`.",
            UserWarning,
            stacklevel=5,
        )


def _new_class(old: type) -> type:
    target: Any = importlib.import_module(str(_present(old.__module__)))
    for part in old.__qualname__.split("."):
        target = getattr(target, part)
    kind: type = target
    return kind


def _of(kind: type) -> str:
    old = next(base for base in kind.__mro__ if _is_old(base))
    relation = "is a class of pytorch_lightning" if kind is old else f"derives from pytorch_lightning's {old.__name__}"
    return f"{kind.__name__} {relation}, which is not lightning.pytorch's"


def _version(package: str) -> str:
    return str(getattr(importlib.import_module(package), "__version__", "unknown"))


def _require_same_version(kind: type) -> None:
    old, new = _version("pytorch_lightning"), _version("lightning")
    if old != new:
        raise ValueError(
            f"{_of(kind)}, and the two have different versions ({old} and {new}), so it cannot be adapted. {WAY_OUT}"
        )
