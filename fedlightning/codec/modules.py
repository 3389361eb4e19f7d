"""Modules as plain trees: their classes by name and their attributes, so that a wrapped module can be saved without pickle.

What pickle does with a module is this: name its class, make an instance without calling `__init__`, and set its attributes.
Here the names are data. Which of them are looked up is :mod:`fedlightning.codec.allowed`' to say, and which attributes
an object may be given :mod:`fedlightning.codec.allowed`'s. Nothing is called but `__new__` and `__setstate__` of these.
"""

from __future__ import annotations

import copyreg
import functools
from collections import OrderedDict
from types import BuiltinFunctionType, FunctionType
from typing import Any, cast

from torch import Tensor, nn

from fedlightning.codec.allowed import Trust, forbidden_attribute, is_trusted, look_up, path_of
from fedlightning.codec.plain import NATIVE, TAG, Decoder, Encoder, NotPlainError, encode
from fedlightning.codec.values import listed
from fedlightning.wrappers.mixing import Mixin, mixins_of, remade, user_class


def to_tree(module: nn.Module, owner: str) -> Any:
    """Return a module as a plain tree.

    Example:
        >>> from torch import nn
        >>> net = from_tree(to_tree(nn.Sequential(nn.Linear(2, 1), nn.ReLU()), "net"))
        >>> [type(layer).__name__ for layer in net]
        ['Linear', 'ReLU']
    """
    tree = encode(module, owner, _ObjectEncoder)
    from_tree(tree, trust=True)  # fails now rather than when it is needed
    return tree


def from_tree(tree: Any, trust: Trust = False) -> Any:
    """Return the module that :func:`to_tree` was given."""
    decoder = _ObjectDecoder(trust)
    made = decoder.value_of(tree)
    decoder.check_given()  # again: a dict that was empty may have been filled, as it is in two places
    return made


class _ObjectEncoder(Encoder):
    def other(self, value: Any) -> Any:
        """Write classes and functions by name, and objects as a class and attributes."""
        if isinstance(value, type | FunctionType | BuiltinFunctionType) and not _is_bound(value):
            return {TAG: "name", "value": self._parts(path_of, value)}
        tree: dict[str, Any] = {}
        self._done[id(value)] = (value, tree)  # what it holds may hold it
        if type(value) is functools.partial:
            parts = [value.func, list(value.args), dict(value.keywords)]
            tree |= {TAG: "partial", "value": self._at("", parts)}
        else:
            tree |= self._object(value)
        return tree

    def _object(self, value: Any) -> dict[str, Any]:
        try:
            user = user_class(value)
            maker, arguments, *rest = cast(Any, user).__reduce_ex__(value, 2)
        except (TypeError, AttributeError, ValueError, RuntimeError):  # torch pickles no parametrized layer
            return super().other(value)
        state, items, pairs = (*rest, None, None, None)[:3]
        plain_maker = maker is copyreg.__newobj__ and (len(arguments) == 1 or isinstance(value, nn.Module))  # type: ignore[attr-defined]
        if not plain_maker or items is not None or pairs is not None:  # torchmetrics has arguments that mean nothing
            return super().other(value)
        return {
            TAG: "object",
            "class": self._parts(path_of, user),
            "mixins": [self._parts(path_of, mixin) for mixin in mixins_of(value)],
            "value": None,
            "state": self._at("", _Attributes(state)) if isinstance(state, dict) else self.tree(state),
        }

    def _new(self, value: Any, kind: type) -> Any:
        if kind is _Attributes:
            return {name: self._at(f".{name}", entry) for name, entry in value.items()}
        return super()._new(value, kind)


class _Attributes(dict[str, Any]):
    """The attributes of an object, whose places read as such."""


class _ObjectDecoder(Decoder):
    def __init__(self, trust: Trust) -> None:
        super().__init__()
        self.trust = trust
        self._given: list[tuple[type, dict[Any, Any]]] = []

    def check_given(self) -> None:
        """Refuse attributes that no object of a class that is not trusted may have."""
        for cls, attributes in self._given:
            self._check(cls, attributes)

    def _check(self, cls: type, attributes: dict[Any, Any]) -> None:
        wrong = forbidden_attribute(cls, attributes)
        if wrong is not None:
            raise NotPlainError(f"a {cls.__name__} in it has {wrong}")

    def value(self, tree: Any) -> Any:
        """Return the value of a tree or of a part of it; only what an encoder writes is one."""
        kind = type(tree)
        if kind in (Tensor, nn.Parameter):
            if tree._backward_hooks or not all(type(held) in (*NATIVE, int) for held in vars(tree).values()):
                raise NotPlainError("it holds a tensor with more than numbers")
        elif kind not in (dict, OrderedDict, list, tuple, int, *NATIVE):
            raise NotPlainError(f"it holds a {kind.__name__} that is no part of a tree")
        return super().value(tree)

    def tagged(self, kind: str, tree: dict[str, Any]) -> Any:
        """Make objects, and look up what is named."""
        if kind == "name":
            return look_up(tree["value"], self.trust, called=True)
        if kind == "object":
            return self._object(tree)
        if kind == "partial":
            function, arguments, keywords = self.value(tree["value"])
            if not isinstance(function, type | FunctionType | BuiltinFunctionType):  # nothing that is not looked up
                raise NotPlainError(f"it holds a partial of a {type(function).__name__}")
            return functools.partial(function, *listed(arguments), **keywords)
        return super().tagged(kind, tree)

    def _object(self, tree: dict[str, Any]) -> Any:
        cls = look_up(tree["class"], self.trust)
        mixins = [look_up(path, self.trust) for path in tree["mixins"]]
        if not isinstance(cls, type) or not all(isinstance(mixin, type) for mixin in mixins):
            raise NotPlainError(f"{tree['class']} is no class")
        if mixins and not (issubclass(cls, nn.Module) and all(issubclass(mixin, Mixin) for mixin in mixins)):
            raise NotPlainError(f"{tree['class']} is mixed with what is no mixin")
        made = self.opened(tree, remade(cls, mixins))
        state = self.value(tree["state"])
        attributes, slots = state if isinstance(state, tuple) else (state, None)
        if not self._trusts(cls):
            self._given.append((type(made), {**(attributes or {}), **(slots or {})}))
            self._check(*self._given[-1])
        if hasattr(cls, "__setstate__"):
            made.__setstate__(state)  # torch's own or one that has been read, unless the class is trusted
        else:
            vars(made).update(attributes or {})
            for name, value in (slots or {}).items():
                object.__setattr__(made, name, value)
        return made

    def _trusts(self, cls: type) -> bool:
        return is_trusted(cls.__module__, self.trust)


def _is_bound(value: Any) -> bool:
    owner = getattr(value, "__self__", None)
    return (
        isinstance(value, BuiltinFunctionType) and owner is not None and type(owner).__name__ not in ("module", "type")
    )
