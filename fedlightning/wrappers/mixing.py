"""Wrap somebody else's module by swapping its class: it stays the user's LightningModule and learns something new.

An outer wrapper module breaks ``self.log``, patched methods break pickling; an instance whose ``__class__`` is a
generated subclass ``(Mixin, UserClass)`` keeps hooks, hyper-parameters, logging, ``isinstance`` and parameter names.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from lightning.pytorch import LightningModule
from torch import nn

if TYPE_CHECKING:
    _MixinBase = nn.Module
else:
    _MixinBase = object

ModuleT = TypeVar("ModuleT", bound=nn.Module)

STEPS = ("training_step", "validation_step", "test_step", "predict_step", "forward")
"""The methods of a LightningModule through which a batch reaches the network."""


class Mixin(_MixinBase):
    """What a wrapper adds to a module. Write no ``__init__``: set its state as attributes after :func:`mix`.

    ``wraps`` names methods of the user's class to be run through :meth:`around`. Each of them gets the user's own
    signature, and one that the user has not written stays unwritten: Lightning reads both (does ``training_step`` take
    ``batch_idx``? is there a ``validation_step``?), so do not override such a method with ``*args`` yourself.
    """

    wraps: ClassVar[tuple[str, ...]] = ()

    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the wrapped method ``name``; ``call`` is the user's bound method (or the next wrapper's).

        A subclass that overrides this names its base (``Base.around(self, ...)``): ``super()`` could be a stranger.
        """
        return call(*args, **kwargs)

    def on_unmix(self) -> None:
        """Take away what the wrapper added; raise a sentence when that is impossible. Called by :func:`unmix`."""


class AddedParametersMixin(Mixin):
    """A wrapper that adds trainable parameters: each joins the optimizer group of its original."""

    wraps: ClassVar[tuple[str, ...]] = ("configure_optimizers",)

    def added_parameters(self) -> dict[str, str]:
        """Name of an added parameter -> name of the parameter whose param group it joins.

        Cooperative: return ``{**super().added_parameters(), ...}``, so that several wrappers can stand on one module.
        """
        return {}

    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = call(*args, **kwargs)
        return adopt_parameters(self, result, self.added_parameters()) if name == "configure_optimizers" else result


def mix(module: ModuleT, mixin: type) -> ModuleT:
    """Swap the class of ``module`` (in place) for a subclass of ``mixin`` and its present class; returns ``module``.

    Equal (mixin, class) pairs give one and the same class object. Mixing in what is already there changes nothing.
    Several mixins stack, the last one outermost. The instance can be deep-copied, and pickled when the user's class can
    be imported by its name (not one defined inside a function).

    Raises:
        TypeError: a method that ``mixin`` wraps was set on the instance itself, where no class can reach it.
    """
    if mixin in mixins_of(module):
        return module
    for name in getattr(mixin, "wraps", ()):
        if name in vars(module):
            raise TypeError(
                f"{mixin.__name__} wraps `{name}`, but this {type(module).__name__} has `{name}` set on the instance. "
                f"Define `{name}` in the class instead."
            )
    object.__setattr__(module, "__class__", _mixed_class(mixin, type(module)))
    return module


def unmix(module: ModuleT) -> ModuleT:
    """Give ``module`` the user's class back (in place), after every mixin took away what it had added.

    What is then saved is opened by ``UserClass.load_from_checkpoint``.
    """
    for mixin in mixins_of(module):
        if issubclass(mixin, Mixin):
            mixin.on_unmix(cast(Mixin, module))
    object.__setattr__(module, "__class__", user_class(module))
    return module


def mixins_of(module: nn.Module | type) -> tuple[type, ...]:
    """The mixins on a module (or on a generated class), outermost first; empty for a plain one."""
    cls = module if isinstance(module, type) else type(module)
    return cast("tuple[type, ...]", getattr(cls, "__mixins__", ()))


def user_class(module: nn.Module | type) -> type:
    """The class that the user wrote, below all mixins."""
    cls = module if isinstance(module, type) else type(module)
    return cast(type, getattr(cls, "__user_class__", cls))


_CLASSES: weakref.WeakValueDictionary[tuple[type, type], type] = weakref.WeakValueDictionary()


def _mixed_class(mixin: type, base: type) -> type:
    """The generated class for ``mixin`` over ``base``; cached for as long as anybody holds it."""
    key = (mixin, base)
    made = _CLASSES.get(key)
    if made is None:
        user = user_class(base)
        name = f"{mixin.__name__.removesuffix('Mixin').lstrip('_')}_{base.__name__}"
        namespace: dict[str, Any] = {
            "__module__": user.__module__,
            "__qualname__": name,
            "__doc__": user.__doc__,
            "__mixins__": (mixin, *mixins_of(base)),
            "__user_class__": user,
            "__reduce_ex__": _reduce_ex,
        }
        for method in getattr(mixin, "wraps", ()):
            if _is_written(base, method):
                namespace[method] = _wrapped(cast("type[Mixin]", mixin), base, method)
        made = _CLASSES[key] = type(base)(name, (mixin, base), namespace)
    return made


def _is_written(base: type, name: str) -> bool:
    """Whether ``base`` has its own ``name``, rather than Lightning's or torch's placeholder."""
    root = LightningModule if issubclass(base, LightningModule) else nn.Module
    return getattr(base, name, None) is not getattr(root, name, None)


def _wrapped(mixin: type[Mixin], base: type, name: str) -> Callable[..., Any]:
    """The method ``name`` of a generated class: the mixin's ``around`` over the method of ``base``."""
    below = getattr(base, name)
    written = getattr(below, "__wrapped__", below)  # Lightning unwraps one level, so point straight at the user's own

    @functools.wraps(written)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return mixin.around(self, name, functools.partial(below, self), args, kwargs)

    return method


def _reduce_ex(self: Any, protocol: Any) -> tuple[Any, ...]:
    """Pickle as (mixins, how the user's class is made, state): generated classes exist in no file to import from."""
    user = user_class(self)
    maker, arguments, *rest = cast(Any, user).__reduce_ex__(self, protocol)
    arguments = tuple(user if argument is type(self) else argument for argument in arguments)
    return (_rebuild, (mixins_of(self), maker, arguments), *rest)


def _rebuild(mixins: tuple[type, ...], maker: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Inverse of :func:`_reduce_ex`; the state (attributes, parameters) is set by the unpickler afterwards."""
    instance = maker(*arguments)
    cls = user_class(instance)
    for mixin in reversed(mixins):
        cls = _mixed_class(mixin, cls)
    object.__setattr__(instance, "__class__", cls)
    return instance


def adopt_parameters(module: nn.Module, optimizers: Any, original_of: Mapping[str, str]) -> Any:
    """Put every trainable added parameter into the param group that holds its original.

    Args:
        module: the wrapped module, in which both names are looked up.
        optimizers: what ``configure_optimizers`` returned, in any form that Lightning accepts: an optimizer, a list of
            them, (optimizers, schedulers), a dict, a list of dicts, ``None``. Schedulers stay as they are.
        original_of: name of an added parameter -> name of its original. A parameter that already is in some group
            (``self.parameters()`` listed it) and a frozen one are left alone.

    Returns:
        ``optimizers``, its groups extended in place.

    Raises:
        ValueError: an added trainable parameter is in no group, and neither is its original: it would never train.
    """
    if optimizers is None:
        return None
    groups = [group for optimizer in _optimizers_in(optimizers) for group in optimizer.param_groups]
    group_of = {id(parameter): group for group in groups for parameter in group["params"]}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for added_name, original_name in original_of.items():
        added, original = parameters.get(added_name), parameters.get(original_name)
        if added is None or not added.requires_grad or id(added) in group_of:
            continue
        group = group_of.get(id(original))
        if group is None:
            raise ValueError(
                f"`{added_name}` was added to {user_class(module).__name__} and is trainable, but no optimizer holds "
                f"it: its original `{original_name}` is in no param group of `configure_optimizers` either. "
                f"Give `{original_name}` to an optimizer, or freeze it (requires_grad_(False)) before wrapping."
            )
        group["params"].append(added)
        if "param_names" in group:
            group["param_names"].append(added_name)
        group_of[id(added)] = group
    return optimizers


def _optimizers_in(configured: Any) -> Iterable[Any]:
    """Every optimizer in a return value of ``configure_optimizers``; schedulers and unknown things are passed over."""
    if hasattr(configured, "param_groups"):
        yield configured
    elif isinstance(configured, Mapping):
        yield from _optimizers_in(configured.get("optimizer"))
    elif isinstance(configured, (list, tuple)):
        for item in configured:
            yield from _optimizers_in(item)
