"""Modules as plain values: their classes by name and their attributes, so that a wrapped module can be saved without pickle.

What pickle does with a module is this: name its class, make an instance without calling `__init__`, and set its attributes.
Here the names are data. Which of them are looked up is :mod:`fedlightning.codec.allowed`' to say, and which attributes
an object may be given :mod:`fedlightning.codec.allowed`'s. Nothing is called but `__new__` and `__setstate__` of these.
"""

from __future__ import annotations

import copyreg
import functools
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType
from typing import Any, cast

import numpy as np
from torch import Tensor, nn

from fedlightning.codec.allowed import Trust, forbidden_attribute, is_trusted, look_up, path_of
from fedlightning.codec.exotic_values import listed
from fedlightning.codec.tree import PLAIN, NotPlainError, Reader, Writer, check_attributes
from fedlightning.wrappers.mixing import Mixin, mixins_of, remade, user_class


def to_tree(module: nn.Module, owner: str) -> dict[str, Any]:
    """Return a module as a text and tensors, which `torch.save` writes as they are.

    Example:
        >>> from torch import nn
        >>> net = from_tree(to_tree(nn.Sequential(nn.Linear(2, 1), nn.ReLU()), "net"))
        >>> [type(layer).__name__ for layer in net]
        ['Linear', 'ReLU']
    """
    writer = ObjectWriter(owner)
    text = writer.text(writer.node(module))
    tree = {"tree": text, "tensors": writer.tensors}
    from_tree(tree, trust=True)  # fails now rather than when it is needed
    return tree


def from_tree(tree: Any, trust: Trust = False) -> Any:
    """Return the module that :func:`to_tree` was given."""
    text, tensors = (tree.get("tree"), tree.get("tensors")) if type(tree) is dict else (None, None)
    if type(text) is not str or type(tensors) is not list:
        raise NotPlainError(
            f"it holds a {type(tree).__name__} in place of a module's text and tensors, as files of an earlier version "
            "do: export it again"
        )
    reader = _ObjectReader(tensors, trust)
    module = reader.value(text)
    reader.check_given()  # again: a dict that was empty may have been filled, as it is in two places
    return module


class ObjectWriter(Writer):
    """Writes classes and functions by name, and objects as a class and attributes."""

    def _may_hold_itself(self, kind: type) -> bool:
        return True

    def _tensor(self, value: Tensor) -> Any:
        """Leave a tensor to `torch.save`, which knows what shares its memory with the module's other tensors."""
        self._parts(check_attributes, value)
        return {"tensor": self._number(value)}

    def _other(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType | BuiltinFunctionType) and not _is_bound(value):
            return {"name": self._parts(path_of, value)}
        if type(value) is functools.partial:
            return {"partial": self._at("", [value.func, list(value.args), dict(value.keywords)])}
        try:
            user = user_class(value)
            maker, arguments, *rest = cast(Any, user).__reduce_ex__(value, 2)
        except (TypeError, AttributeError, ValueError, RuntimeError):  # torch pickles no parametrized layer
            return super()._other(value)
        state, items, pairs = (*rest, None, None, None)[:3]
        plain_maker = maker is copyreg.__newobj__ and (len(arguments) == 1 or isinstance(value, nn.Module))  # type: ignore[attr-defined]
        if not plain_maker or items is not None or pairs is not None:  # torchmetrics has arguments that mean nothing
            return super()._other(value)
        mixins = [self._parts(path_of, mixin) for mixin in mixins_of(value)]
        return {"object": [self._parts(path_of, user), mixins, self._at("", state)]}


class _ObjectReader(Reader):
    def __init__(self, tensors: list[Tensor], trust: Trust) -> None:
        super().__init__(tensors)
        self.trust = trust
        self._assigned: list[tuple[type, dict[Any, Any]]] = []

    def check_given(self) -> None:
        """Refuse attributes that no object of a class that is not trusted may have."""
        for cls, attributes in self._assigned:
            self._check(cls, attributes)

    def _check(self, cls: type, attributes: dict[Any, Any]) -> None:
        wrong = forbidden_attribute(cls, attributes)
        if wrong is not None:
            raise NotPlainError(f"a {cls.__name__} in it has {wrong}")

    def _tensor(self, number: Any) -> Tensor:
        tensor = super()._tensor(number)
        if type(tensor) not in (Tensor, nn.Parameter) or tensor._backward_hooks:
            raise NotPlainError(f"it holds a {type(tensor).__name__} that is not a plain tensor")
        check_attributes(tensor)
        return tensor

    def _new(self, kind: str, content: Any) -> Any:
        """Make objects, and look up what is named."""
        if kind == "name":
            return look_up(content, self.trust, called=True)
        if kind == "object":
            return self._object(*content)
        if kind == "partial":
            function, arguments, keywords = self._value(content)
            if not isinstance(function, type | FunctionType | BuiltinFunctionType):  # nothing that is not looked up
                raise NotPlainError(f"it holds a partial of a {type(function).__name__}")
            return functools.partial(function, *listed(arguments), **keywords)
        return super()._new(kind, content)

    def _object(self, path: Any, mixin_paths: Any, tree: Any) -> Any:
        cls = look_up(path, self.trust)
        mixins = [look_up(mixin, self.trust) for mixin in mixin_paths]
        if not isinstance(cls, type) or not all(isinstance(mixin, type) for mixin in mixins):
            raise NotPlainError(f"{path} is not a class")
        if mixins and not (issubclass(cls, nn.Module) and all(issubclass(mixin, Mixin) for mixin in mixins)):
            raise NotPlainError(f"{path} is mixed with what is not a mixin")
        instance = self._begun(remade(cls, mixins))
        state = self._value(tree)
        attributes, slots = state if isinstance(state, tuple) else (state, None)
        if not self._trusts(cls):
            self._assigned.append((type(instance), {**(attributes or {}), **(slots or {})}))
            self._check(*self._assigned[-1])
        if hasattr(cls, "__setstate__"):
            instance.__setstate__(state)  # torch's own or one that has been read, unless the class is trusted
        else:
            vars(instance).update(attributes or {})
            for name, value in (slots or {}).items():
                object.__setattr__(instance, name, value)
        return instance

    def _trusts(self, cls: type) -> bool:
        return is_trusted(cls.__module__, self.trust)


def _is_bound(value: Any) -> bool:
    owner = getattr(value, "__self__", None)
    return (
        isinstance(value, BuiltinFunctionType) and owner is not None and type(owner).__name__ not in ("module", "type")
    )


def native(value: Any) -> Any:
    """Return `value` as `torch.load(weights_only=True)` and everybody else opens it, without kinds of ours.

    Numbers of numpy become Python's, paths texts, and other mappings dicts: for files that Lightning reads too.

    Example:
        >>> from pathlib import Path
        >>> import numpy as np
        >>> native({"lr": np.float64(0.5), "root": Path("data")})
        {'lr': 0.5, 'root': 'data'}
    """
    return _native(value, {})


def _native(value: Any, done: dict[int, Any]) -> Any:
    if id(value) in done:
        return done[id(value)][1]
    kind, native = type(value), value
    if isinstance(value, np.generic):
        native = _native(value.item(), done)
    elif isinstance(value, PurePath):
        native = str(value)
    elif kind is tuple:
        native = tuple(_native(entry, done) for entry in value)
    elif kind is set and value:
        native = {_native(entry, done) for entry in value}
    elif kind is list:
        done[id(value)] = value, (native := [])  # it may hold itself
        native.extend(_native(entry, done) for entry in value)
    elif isinstance(value, Mapping):
        done[id(value)] = value, (native := OrderedDict() if kind is OrderedDict else {})
        native.update((_native(key, done), _native(entry, done)) for key, entry in value.items())
        if kind is OrderedDict:
            vars(native).update(_native(vars(value), done))  # the metadata of a state_dict
    elif kind in (Tensor, nn.Parameter):
        check_attributes(value)
    elif kind not in (*PLAIN, int) and not (kind in (bytes, bytearray) and value):
        raise NotPlainError(f"it holds a {kind.__name__}")
    done[id(value)] = value, native
    return native
