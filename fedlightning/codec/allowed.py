"""What a file may bring without the user's word: classes whose restoring is known to be plain, and pure functions.

Everything here is a list of what is allowed. An object of an allowed class is made by `object.__new__`, and its attributes
are put into its `__dict__`; what its class defines beyond that must be torch's own or have been read (:data:`AUDITED`).

Names of classes and functions in files: which of them are looked up, and which only with the user's word.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from abc import ABCMeta
from collections.abc import Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

import yaml
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fedlightning.wrappers.mixing import Mixin

OURS = "fedlightning"
ROOMS = tuple(f"{OURS}.{room}" for room in ("callbacks", "layers", "models", "tensors", "wrappers"))
"""Rooms of ours whose classes a file may name; of the first only modules and what is mixed into them."""
LAYERS = (
    "torch.nn.modules",
    "torchvision.models",
    "torchvision.ops",
    "timm.layers",
    "timm.models",
    "torch.ao.quantization.stubs",
    "torch.ao.nn.quantized.modules.functional_modules",
)
"""Modules whose `nn.Module`s a file may hold."""
MAKERS = ("torch.nn.modules", "torchvision.ops", "timm.layers", "timm.models.nextvit")
"""Modules whose layers a module in a file may make. Others are not among them: some of
timm trace what they are given, and tracing runs code that is written with the names in it."""
HOMES = (
    *LAYERS,
    "peft.tuners.lora.layer",
    "torchmetrics.aggregation",
    "torchmetrics.classification",
    "torchmetrics.collections",
    "torchmetrics.regression",
)
"""Modules whose `nn.Module`s a file may hold."""
SINGLE_CLASSES = (
    "peft.peft_model:PeftModel",
    "peft.tuners.lora.model:LoraModel",
    "peft.tuners.lora.config:LoraConfig",
    "peft.tuners.lora.config:LoraRuntimeConfig",
)
"""Single classes that a file may hold, beside those of :data:`HOMES`."""
IMPORTED = (*ROOMS, *HOMES, "peft.peft_model", "peft.tuners.lora")
"""Modules that are imported when a file names them; others have to be imported already."""
FUNCTIONS = ("torch.nn.functional", "torch._C._nn", "timm.layers.activations")
"""Modules whose public functions do nothing but compute."""
PURE = frozenset(
    [
        *(f"torch:{how}" for how in ("relu", "relu_", "tanh", "sigmoid", "selu", "celu", "rrelu", "softmax")),
        *(f"torch:{how}" for how in ("log_softmax", "exp", "sin", "cos", "abs")),
        *(f"torchmetrics.utilities.data:dim_zero_{how}" for how in ("cat", "max", "mean", "min", "sum")),
        "torchmetrics.metric:jit_distributed_available",
        "torchvision.ops.boxes:box_iou",
    ]
)
"""Single functions that do nothing but compute."""
SPECIAL_METHODS = (
    "__new__", "__init_subclass__", "__setstate__", "__reduce__", "__reduce_ex__", "__setattr__", "__delattr__",
    "__getattribute__", "__getattr__", "__call__", "__del__", "train", "eval",
)  # fmt: skip
"""Methods that run while an object is restored, used as any module is, or thrown away."""
BASES = (object, nn.Module, LightningModule)
"""Classes whose own of these methods may be inherited."""
AUDITED = {
    "torch.nn.modules": (
        "__setstate__",
        "__setattr__",
        "__call__",
    ),  # add what older files lack; lists that cannot be called
    "peft.peft_model": ("__getattr__",),  # asks the module inside
    "peft.tuners.tuners_utils": ("__getattr__",),
    "torchmetrics.metric": ("__setstate__", "__setattr__"),  # wraps update and compute, which no attribute hides
    "timm.layers": ("__setstate__",),  # adds what older files lack
    "timm.models": ("train",),  # empties a cache
    OURS: ("__setstate__", "__setattr__", "__delattr__", "__getattr__", "train"),
}
"""Modules whose definitions of these methods have been read, and do nothing but set attributes."""


def within(module: str, prefixes: tuple[str, ...]) -> bool:
    """Return True if a module is one of `prefixes` or lies below one."""
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)


def forbidden(cls: type) -> str | None:
    """Return why an object of a class may not be restored from a file; `None` if it may.

    Example:
        >>> forbidden(nn.Linear), forbidden(nn.parallel.DistributedDataParallel)
        (None, 'is none of the classes whose restoring is known to be plain')
    """
    path = f"{cls.__module__}:{cls.__qualname__}"
    ours = within(cls.__module__, ROOMS[1:]) or (
        within(cls.__module__, ROOMS[:1]) and issubclass(cls, nn.Module | Mixin)
    )
    listed = (issubclass(cls, nn.Module) and within(cls.__module__, HOMES)) or path in SINGLE_CLASSES
    if type(cls) not in (type, ABCMeta) or not (ours or listed):
        return "is none of the classes whose restoring is known to be plain"
    for name in SPECIAL_METHODS:
        owner = next((base for base in cls.__mro__ if name in vars(base)), None)
        if owner is None or owner in BASES or owner.__module__ == "typing":
            continue
        if not any(within(owner.__module__, (home,)) and name in names for home, names in AUDITED.items()):
            return f"has a {name} of its own"
    return None


def pure(called: Any, home: str) -> bool:
    """Return True if what a file's module calls does nothing but compute: an activation, a class of layers or optimizers."""
    if isinstance(called, type):
        layer = issubclass(called, nn.Module) and within(home, MAKERS) and forbidden(called) is None
        return layer or (issubclass(called, Optimizer | LRScheduler) and within(home, ("torch.optim",)))
    if not isinstance(called, FunctionType | BuiltinFunctionType):
        return False
    name = called.__name__
    return f"{home}:{name}" in PURE or (home in FUNCTIONS and not name.startswith("_"))


def constructed(called: Any, home: str) -> bool:
    """Return True if hyper-parameters may say with what something is called: what is pure, and our own networks.

    `TimmNet` is not among them, since it downloads what its arguments name.
    """
    ours = within(home, (f"{OURS}.models",)) and home != f"{OURS}.models.bridges"
    network = isinstance(called, type) and issubclass(called, nn.Module)
    return pure(called, home) or (ours and (network or called.__name__ == "unrecorded_net"))


HOOKS = frozenset(name for name, value in vars(nn.Module()).items() if "hook" in name and isinstance(value, dict))
"""Attributes of a module that hold functions which are called beside its own."""
EMPTY = HOOKS | {"_compiled_call_impl", "_trainer", "_fabric"}
"""Attributes of a module that a file has to leave empty."""
KIND_BY_ATTRIBUTE = {"_parameters": Tensor | None, "_buffers": Tensor | None, "_modules": nn.Module | None}
"""Attributes of a module that hold values of one kind only, by name."""
_ODD_NAME = re.compile(r'^$|^__.*__$|[."\\\x00-\x1f\x7f-\x9f\u2028\u2029]')
"""Names that no parameter or layer has: Python would ask for them itself, or code that torch.fx writes would end at them."""


def forbidden_attribute(cls: type, state: dict[Any, Any]) -> str | None:
    """Return what is wrong with the attributes that a file gives to an object of a class; `None` if nothing is."""
    for name, value in state.items():
        if type(name) is not str or (name.startswith("__") and name.endswith("__")):
            return f"the attribute {name!r:.60}"
        if name in EMPTY and not (value is None or (isinstance(value, dict) and not value)):
            return f"something in {name}, which has to be empty"
        if callable(next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)):
            return f"the attribute '{name}', which would hide a method"
        if name in KIND_BY_ATTRIBUTE:
            named = isinstance(value, dict) and all(type(key) is str for key in value)
            if not named or not all(isinstance(entry, KIND_BY_ATTRIBUTE[name]) for entry in value.values()):
                return f"{name} that are none"
            odd = next((key for key in value if _ODD_NAME.search(key)), None)
            if odd is not None:
                return f"an entry of {name} with the name {odd!r:.60}"
    return None


Trust = bool | Sequence[str]
"""True: whatever a file names. Or the packages and modules whose classes and functions a file may name."""


class UntrustedError(ValueError):
    """A file names a class or function that is looked up only with the user's word."""


def path_of(thing: Any) -> str:
    """Return the import path of a class or function.

    Example:
        >>> import torch
        >>> path_of(torch.nn.Linear)
        'torch.nn.modules.linear:Linear'
    """
    module = getattr(thing, "__module__", None) or "torch"
    # functions of torch have a false first one
    names = getattr(thing, "__qualname__", ""), getattr(thing, "__name__", "")
    for name in names:
        target: Any = sys.modules.get(module)
        for part in name.split("."):
            target = getattr(target, part, None)
        if target is thing:
            return f"{module}:{name}"
    raise ValueError(f"names {module}.{names[0]}, which cannot be imported by that name")


def look_up(path: Any, trust: Trust = False, called: bool = False) -> Any:
    """Return the class or function that a file names.

    Without trust it is a class whose objects are restored by setting attributes, or, where the file's module calls it, a
    function or class that only computes: :mod:`fedlightning.codec.allowed` lists them. All else needs `trust`.
    """
    module, name = _parts(path)
    target = _look_up(module, name, imported=is_trusted(module, trust) or within(module, IMPORTED))
    home = getattr(target, "__module__", None) or "torch"  # not the module that has imported it
    if trust is True or (is_trusted(module, trust) and is_trusted(home, trust)):
        return target
    if called and not pure(target, home):
        reason = "may do more than compute"
    elif not called and isinstance(target, type):
        reason = forbidden(target) or ""
    else:
        reason = "" if called else "is not a class"
    if reason:
        raise UntrustedError(
            f"it names {module}.{name}, which {reason}. If you trust the file, say so with trust=['{module}']"
        )
    return target


def plain_kind(path: Any, kind: type) -> Any:
    """Return the enum or named tuple that a file names, which is imported already or ours."""
    module, name = _parts(path)
    cls = _look_up(module, name, imported=within(module, IMPORTED))
    if not (isinstance(cls, type) and issubclass(cls, kind)):
        raise ValueError(f"{path} is no {kind.__name__.lower()}")
    if any("__call__" in vars(base) for base in cls.__mro__):
        raise UntrustedError(f"it names {path}, whose values can be called")
    return cls


def _parts(path: Any) -> tuple[str, str]:
    module, _, name = path.partition(":") if isinstance(path, str) else ("", "", "")
    if not module or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise ValueError(f"{path!r:.200} is not a name of a class")
    return module, name


def _look_up(module: str, name: str, imported: bool) -> Any:
    """Return what a module holds under a name, without asking the module's `__getattr__`, which would import more."""
    if imported:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ValueError(f"{module} cannot be imported ({error})") from None
    elif module not in sys.modules:
        raise UntrustedError(
            f"it names {module}.{name}, and {module} is not imported. Import it if it is yours, and say that you trust it "
            f"with trust=['{module}']"
        )
    target: Any = sys.modules[module]
    for depth, part in enumerate(name.split(".")):
        if depth and not isinstance(target, type):
            raise UntrustedError(f"it names {module}.{name}, which is neither a class nor a function")
        target = vars(target).get(part)
        if target is None:
            raise ValueError(f"{module} has no {name}")
    return target


def is_trusted(module: str, trust: Trust) -> bool:
    """Return True if the user trusts a module by its name or its package's."""
    if isinstance(trust, bool):
        return trust
    prefixes = [trust] if isinstance(trust, str) else trust
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)


HYPER_PARAMETERS = (LightningModule.CHECKPOINT_HYPER_PARAMS_KEY, "hparams", "module_arguments")
"""Entries of a checkpoint that Lightning makes a module with, those of its earlier versions included."""
_PATH = re.compile(r"(?<![\w./\\])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")


def refuse_untrusted_names(checkpoint: Mapping[str, Any], trust: Trust) -> None:
    """Refuse a checkpoint whose hyper-parameters would make Lightning import or call what is not trusted.

    Lightning's instantiator takes a text for a class or function wherever a parameter is one, so every text in such
    hyper-parameters that is the path of something importable is looked at.
    """
    if checkpoint.get(LightningModule.CHECKPOINT_HYPER_PARAMS_TYPE) is not None:
        raise UntrustedError("its hyper-parameters are of a type of their own, which is called when they are read")
    for entry in HYPER_PARAMETERS:
        values = checkpoint.get(entry) or {}
        if not isinstance(values, Mapping):
            raise UntrustedError(f"its {entry} are a {type(values).__name__}, not named values")
        if "_instantiator" in values or "_class_path" in values:
            for text in _texts({name: value for name, value in values.items() if name != "_instantiator"}, set()):
                for path in _PATH.findall(text):
                    _check_path(path, trust)


def _check_path(text: str, trust: Trust) -> None:
    """Refuse a text that Lightning's instantiator would take for something that is not trusted."""
    if is_trusted(text, trust):
        return
    parts = text.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module, name = ".".join(parts[:cut]), ".".join(parts[cut:])
        if module in sys.modules or within(module, IMPORTED):
            try:
                target = _look_up(module, name, imported=True)
            except ValueError:
                continue  # there is no such thing: a text that only looks like it
            home = getattr(target, "__module__", None) or "torch"
            if not (constructed(target, home) or is_trusted(home, trust)):
                raise UntrustedError(
                    f"its hyper-parameters name {text}, which may do more than compute. If you trust the file, say so with "
                    f"trust=['{module}']"
                )
            return
    spec = importlib.util.find_spec(parts[0])
    if spec is not None and spec.origin is not None:  # no folder that only has such a name
        raise UntrustedError(
            f"its hyper-parameters name {text}, which is not imported. Import it if it is yours, and say that you trust it "
            f"with trust=['{parts[0]}']"
        )


def _texts(values: Any, seen: set[str]) -> Iterator[str]:
    """Yield all texts in hyper-parameters, those in what Lightning's instantiator would parse or read included."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            if str(name).endswith("class_path") and not (isinstance(value, str) and "." in value):
                raise UntrustedError(f"its hyper-parameters name the class {value!r:.60} without its module")
            yield from _texts(value, seen)
    elif isinstance(values, list | tuple | set):
        for value in values:
            yield from _texts(value, seen)
    elif isinstance(values, str) and values not in seen:
        seen.add(values)
        yield values
        for text in (values, _content(values)):
            try:
                yield from _texts(yaml.safe_load(text), seen)
            except (yaml.YAMLError, RecursionError, ValueError):
                continue  # nobody else can read it either


def _content(text: str) -> str:
    """Return the beginning of the file that a text names; where a network is wanted it may be that of one."""
    try:
        with open(text, encoding="utf-8") as file:
            return file.read(1 << 20)
    except (OSError, ValueError):
        return ""
