"""What a file may bring without the user's word: classes whose restoring is known to be plain, and pure functions.

Everything here is a list of what is allowed. An object of an allowed class is made by `object.__new__`, and its attributes
are put into its `__dict__`; what its class defines beyond that must be torch's own or have been read (:data:`AUDITED`).
"""

from __future__ import annotations

import re
from abc import ABCMeta
from types import BuiltinFunctionType, FunctionType
from typing import Any

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
SINGLE = (
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
SPECIAL = (
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
    listed = (issubclass(cls, nn.Module) and within(cls.__module__, HOMES)) or path in SINGLE
    if type(cls) not in (type, ABCMeta) or not (ours or listed):
        return "is none of the classes whose restoring is known to be plain"
    for name in SPECIAL:
        owner = next((base for base in cls.__mro__ if name in vars(base)), None)
        if owner is None or owner in BASES or owner.__module__ == "typing":
            continue
        if not any(within(owner.__module__, (home,)) and name in names for home, names in AUDITED.items()):
            return f"has a {name} of its own"
    return None


def pure(found: Any, home: str) -> bool:
    """Return True if what a file's module calls does nothing but compute: an activation, a class of layers or optimizers."""
    if isinstance(found, type):
        layer = issubclass(found, nn.Module) and within(home, MAKERS) and forbidden(found) is None
        return layer or (issubclass(found, Optimizer | LRScheduler) and within(home, ("torch.optim",)))
    if not isinstance(found, FunctionType | BuiltinFunctionType):
        return False
    name = found.__name__
    return f"{home}:{name}" in PURE or (home in FUNCTIONS and not name.startswith("_"))


def constructed(found: Any, home: str) -> bool:
    """Return True if hyper-parameters may say with what something is called: what is pure, and our own networks.

    `TimmNet` is not among them, since it downloads what its arguments name.
    """
    ours = within(home, (f"{OURS}.models",)) and home != f"{OURS}.models.timm_bridge"
    network = isinstance(found, type) and issubclass(found, nn.Module)
    return pure(found, home) or (ours and (network or found.__name__ == "unrecorded_net"))


HOOKS = frozenset(name for name, value in vars(nn.Module()).items() if "hook" in name and isinstance(value, dict))
"""Attributes of a module that hold functions which are called beside its own."""
EMPTY = HOOKS | {"_compiled_call_impl", "_trainer", "_fabric"}
"""Attributes of a module that a file has to leave empty."""
HELD = {"_parameters": Tensor | None, "_buffers": Tensor | None, "_modules": nn.Module | None}
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
        if name in HELD:
            named = isinstance(value, dict) and all(type(key) is str for key in value)
            if not named or not all(isinstance(entry, HELD[name]) for entry in value.values()):
                return f"{name} that are none"
            odd = next((key for key in value if _ODD_NAME.search(key)), None)
            if odd is not None:
                return f"an entry of {name} with the name {odd!r:.60}"
    return None
