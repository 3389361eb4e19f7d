"""Wrap somebody else's module by replacing its class: the object stays the user's LightningModule and gains methods.

An outer wrapper module would break `self.log`, and patched methods would break pickling. An instance whose `__class__`
is a generated subclass `(Mixin, UserClass)` keeps hooks, hyper-parameters, logging, `isinstance` and parameter names.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    """Base of the classes that are mixed into a user's module.

    A subclass has no `__init__`; set its state as attributes after `mix`. `wraps` names methods of the user's class
    that run through `around`. Each of them keeps the user's signature, and a method that the user did not write stays
    unwritten: Lightning reads both (does `training_step` take `batch_idx`? is there a `validation_step`?). For the same
    reason a subclass must not override such a method with `*args` itself.

    Attributes:
        wraps: Names of the methods that run through `around`.

    Example:
        >>> import torch
        >>> from fedlightning.models import MLP
        >>> from fedlightning.wrappers import Mixin, mix
        >>> class ShapeMixin(Mixin):
        ...     wraps = ("forward",)
        ...     def around(self, name, call, args, kwargs):
        ...         return tuple(call(*args, **kwargs).shape)
        >>> net = mix(MLP(4, [3], 2), ShapeMixin)
        >>> net(torch.zeros(5, 4)), isinstance(net, MLP)
        ((5, 2), True)
    """

    wraps: ClassVar[tuple[str, ...]] = ()

    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the wrapped method `name`.

        A subclass that overrides this calls its base by name (`Base.around(self, ...)`), because `super()` may be
        another mixin.

        Args:
            name: Name of the method.
            call: The user's bound method, or that of the next wrapper.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
        """
        return call(*args, **kwargs)

    def on_unmix(self) -> None:
        """Remove what the wrapper added, or raise an error if that is impossible. Called by `unmix`."""


class AddedParametersMixin(Mixin):
    """A wrapper that adds trainable parameters: each one joins the optimizer group of its original.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fedlightning.models import MLP, Classifier
        >>> from fedlightning.wrappers import AddedParametersMixin, mix
        >>> class ScaleMixin(AddedParametersMixin):
        ...     def added_parameters(self):
        ...         return {**super().added_parameters(), "scale": "net.fc1.weight"}
        >>> module = mix(Classifier(MLP(4, [], 2), num_classes=2), ScaleMixin)
        >>> module.scale = nn.Parameter(torch.ones(1))
        >>> any(p is module.scale for p in module.configure_optimizers().param_groups[0]["params"])
        True
    """

    wraps: ClassVar[tuple[str, ...]] = ("configure_optimizers",)

    def added_parameters(self) -> dict[str, str]:
        """Return the name of each added parameter with the name of the parameter whose optimizer group it joins.

        Return `{**super().added_parameters(), ...}`, so that several wrappers can be mixed into one module.
        """
        return {}

    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = call(*args, **kwargs)
        return adopt_parameters(self, result, self.added_parameters()) if name == "configure_optimizers" else result


def mix(module: ModuleT, mixin: type) -> ModuleT:
    """Replace the class of `module` (in place) by a subclass of `mixin` and its present class.

    Equal pairs of mixin and class give the same class object. A mixin that is already there changes nothing. Several
    mixins stack, the last one outermost. The instance can be deep-copied, and it can be pickled if the user's class can
    be imported by name (not if it is defined inside a function).

    Args:
        module: The module to change.
        mixin: A subclass of `Mixin`.

    Returns:
        `module` itself.

    Raises:
        TypeError: If a method that `mixin` wraps was set on the instance, where a class cannot wrap it.

    Example:
        >>> from fedlightning.models import MLP
        >>> from fedlightning.wrappers import Mixin, mix, user_class
        >>> class MarkedMixin(Mixin):
        ...     marked = True
        >>> net = mix(MLP(4, [3], 2), MarkedMixin)
        >>> net.marked, type(net).__name__, user_class(net).__name__
        (True, 'Marked_MLP', 'MLP')
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


@contextmanager
def mixed(module: nn.Module, mixin: type, **attributes: Any) -> Iterator[None]:
    """Within the block, a module has a mixin, and attributes that this one reads; afterwards its own class again."""
    own_class = module.__class__
    mix(module, mixin)
    vars(module).update(attributes)
    try:
        yield
    finally:
        module.__class__ = own_class
        for part in module.modules():  # a twin in the module has the attributes of its host
            for name in attributes:
                vars(part).pop(name, None)


def unmix(module: ModuleT) -> ModuleT:
    """Remove all mixins from `module` (in place), after each of them has removed what it added.

    A checkpoint saved afterwards can be opened with `UserClass.load_from_checkpoint`.

    Args:
        module: A module, with mixins or without.

    Returns:
        `module` itself, with the user's class.

    Example:
        >>> from fedlightning.models import MLP
        >>> from fedlightning.wrappers import Mixin, mix, unmix
        >>> type(unmix(mix(MLP(4, [3], 2), Mixin))) is MLP
        True
    """
    for mixin in mixins_of(module):
        if issubclass(mixin, Mixin):
            mixin.on_unmix(cast(Mixin, module))
    object.__setattr__(module, "__class__", user_class(module))
    return module


def mixins_of(module: nn.Module | type) -> tuple[type, ...]:
    """Return the mixins of a module, outermost first; empty for a module without any.

    Args:
        module: A module or its class.

    Example:
        >>> from fedlightning.models import MLP
        >>> from fedlightning.wrappers import Mixin, mix, mixins_of
        >>> mixins_of(mix(MLP(4, [3], 2), Mixin)) == (Mixin,), mixins_of(MLP)
        (True, ())
    """
    cls = module if isinstance(module, type) else type(module)
    return cast("tuple[type, ...]", getattr(cls, "__mixins__", ()))


def user_class(module: nn.Module | type) -> type:
    """Return the class that the user wrote, without mixins.

    Args:
        module: A module or its class.

    Example:
        >>> from fedlightning.models import MLP
        >>> from fedlightning.wrappers import Mixin, mix, user_class
        >>> user_class(mix(MLP(4, [3], 2), Mixin)) is MLP
        True
    """
    cls = module if isinstance(module, type) else type(module)
    return cast(type, getattr(cls, "__user_class__", cls))


def adopt_parameters(module: nn.Module, optimizers: Any, original_of: Mapping[str, str]) -> Any:
    """Add every trainable added parameter to the optimizer group that holds its original.

    Args:
        module: The wrapped module, in which both names are looked up.
        optimizers: The return value of `configure_optimizers` in any form that Lightning accepts: an optimizer, a list
            of them, (optimizers, schedulers), a dict, a list of dicts, `None`. Schedulers stay as they are.
        original_of: Name of an added parameter to name of its original. A parameter that is in a group already
            (`self.parameters()` listed it) and a frozen one are left alone.

    Returns:
        `optimizers`, with its groups extended in place.

    Raises:
        ValueError: If neither an added trainable parameter nor its original is in a group: it would never train.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fedlightning.wrappers import adopt_parameters
        >>> layer = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD([layer.weight], lr=0.1)
        >>> _ = adopt_parameters(layer, optimizer, {"bias": "weight"})
        >>> [tuple(parameter.shape) for parameter in optimizer.param_groups[0]["params"]]
        [(1, 2), (1,)]
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


_CLASSES: weakref.WeakValueDictionary[tuple[type, type], type] = weakref.WeakValueDictionary()


def _mixed_class(mixin: type, base: type) -> type:
    """Return the generated class for `mixin` over `base`, cached for as long as it is in use."""
    key = (mixin, base)
    mixed_class = _CLASSES.get(key)
    if mixed_class is None:
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
        mixed_class = _CLASSES[key] = type(base)(name, (mixin, base), namespace)
    return mixed_class


def _is_written(base: type, name: str) -> bool:
    """Return True if `base` has its own method `name` rather than the placeholder of Lightning or torch."""
    root = LightningModule if issubclass(base, LightningModule) else nn.Module
    return getattr(base, name, None) is not getattr(root, name, None)


def _wrapped(mixin: type[Mixin], base: type, name: str) -> Callable[..., Any]:
    """Return the method `name` of a generated class: the mixin's `around` over the method of `base`."""
    below = getattr(base, name)
    written = getattr(below, "__wrapped__", below)  # Lightning unwraps one level, so point straight at the user's own

    @functools.wraps(written)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return mixin.around(self, name, functools.partial(below, self), args, kwargs)

    return method


def _reduce_ex(self: Any, protocol: Any) -> tuple[Any, ...]:
    """Pickle as (mixins, constructor of the user's class, state), because generated classes cannot be imported."""
    user = user_class(self)
    maker, arguments, *rest = cast(Any, user).__reduce_ex__(self, protocol)
    arguments = tuple(user if argument is type(self) else argument for argument in arguments)
    return (_rebuild, (mixins_of(self), maker, arguments), *rest)


def _rebuild(mixins: tuple[type, ...], maker: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Undo `_reduce_ex`; the unpickler sets the state (attributes, parameters) afterwards."""
    return _with_mixins(maker(*arguments), mixins)


def remade(cls: type, mixins: Sequence[type]) -> Any:
    """Return an instance of a user's class with mixins, without attributes: they are set afterwards.

    Example:
        >>> from fedlightning.models import MLP
        >>> from fedlightning.wrappers import Mixin, mixins_of
        >>> mixins_of(remade(MLP, [Mixin])) == (Mixin,)
        True
    """
    return _with_mixins(cast(Any, cls).__new__(cls), mixins)


def _with_mixins(instance: Any, mixins: Sequence[type]) -> Any:
    cls = user_class(instance)
    for mixin in reversed(mixins):
        cls = _mixed_class(mixin, cls)
    object.__setattr__(instance, "__class__", cls)
    return instance


def _optimizers_in(configured: Any) -> Iterable[Any]:
    """Yield every optimizer in a return value of `configure_optimizers`, leaving out schedulers and unknown objects."""
    if hasattr(configured, "param_groups"):
        yield configured
    elif isinstance(configured, Mapping):
        yield from _optimizers_in(configured.get("optimizer"))
    elif isinstance(configured, (list, tuple)):
        for item in configured:
            yield from _optimizers_in(item)
