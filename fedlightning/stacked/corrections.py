"""Gradient corrections of algorithms on a stack: `correct_gradient`, mapped over the clients.

A callback writes its correction for one client. Where its payload and state are tensors, they are stacked and the
correction is mapped. Where it reads something that cannot be stacked (the client's id, plain values that differ from
client to client), it is called for one client after another, with the same result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import vmap

from fedlightning.client.client import Client
from fedlightning.contract import FederatedCallback, GradientContext
from fedlightning.stacked.stack import Rows, join_tree, split_tree, take


class _PerClientError(Exception):
    """The correction reads what only a single client has."""


class _StackContext:
    """The :class:`~fedlightning.contract.GradientContext` of a mapped correction, without what only one client has."""

    def __init__(self, anchor: Mapping[str, Tensor], payload: Any, state: Any, lr: Any, phase: str) -> None:
        self.anchor, self.payload, self.state, self.lr, self.phase = anchor, payload, state, lr, phase

    def __getattr__(self, name: str) -> Any:
        raise _PerClientError(name)


class Correction:
    """One callback's correction for the clients of a stack.

    Args:
        callback: Callback with a gradient correction.
        clients: Clients in the order of the stack's rows.
        names: Names of the parameters that train.
        phase: Name of the phase.
        device: Device of the stack.
    """

    def __init__(
        self,
        callback: FederatedCallback,
        clients: Sequence[Client],
        names: Sequence[str],
        phase: str,
        device: torch.device,
    ) -> None:
        self.callback, self.clients, self.phase, self.device = callback, clients, phase, device
        self.anchors = [
            {name: anchor for name in names if (anchor := client.anchor(name, device)) is not None}
            for client in clients
        ]
        trees = [(anchor, *self._own(client)) for anchor, client in zip(self.anchors, clients, strict=True)]
        self._stacked = stack_trees(trees, device)

    def _own(self, client: Client) -> tuple[Any, Any]:
        key = self.callback.key
        return client.message.extras.get(key, {}), client.state.get(key, {})

    @torch.no_grad()
    def __call__(
        self,
        rows: Rows,
        numbers: Sequence[int],
        parameters: Mapping[str, Tensor],
        found: Mapping[str, Tensor],
        rates: Mapping[str, Sequence[float]],
    ) -> dict[str, Tensor]:
        """Return corrected gradients."""
        if self._stacked is not None:
            try:
                return self._mapped(rows, parameters, found, rates)
            except (_PerClientError, RuntimeError, TypeError):
                self._stacked = None  # cannot be mapped; an error of the correction itself is raised again below
        return self._one_by_one(numbers, parameters, found, rates)

    def _mapped(
        self,
        rows: Rows,
        parameters: Mapping[str, Tensor],
        found: Mapping[str, Tensor],
        rates: Mapping[str, Sequence[float]],
    ) -> dict[str, Tensor]:
        assert self._stacked is not None
        leaves, skeleton = self._stacked
        shared = {name: lr[0] for name, lr in rates.items() if all(value == lr[0] for value in lr)}
        own = {name: torch.tensor(lr, device=self.device) for name, lr in rates.items() if name not in shared}

        def one(
            values: dict[str, Tensor], grads: dict[str, Tensor], leaves: list[Tensor], own: dict[str, Tensor]
        ) -> Any:
            anchor, payload, state = join_tree(skeleton, leaves)
            lrs: dict[str, Any] = {**shared, **own}
            corrected = {}
            for name, gradient in grads.items():
                near = {name: anchor[name]} if name in anchor else {}
                context = cast(GradientContext, _StackContext(near, payload, state, lrs[name], self.phase))
                new = self.callback.correct_gradient(context, name, values[name], gradient)
                corrected[name] = new.to(gradient.dtype)
            return corrected

        values = {name: parameters[name] for name in found}
        result: dict[str, Tensor] = vmap(one)(values, dict(found), [take(leaf, rows) for leaf in leaves], own)
        return result

    def _one_by_one(
        self,
        numbers: Sequence[int],
        parameters: Mapping[str, Tensor],
        found: Mapping[str, Tensor],
        rates: Mapping[str, Sequence[float]],
    ) -> dict[str, Tensor]:
        corrected = {name: torch.empty_like(gradient) for name, gradient in found.items()}
        for place, number in enumerate(numbers):
            client = self.clients[number]
            payload, state = self._own(client)
            self.callback._client = client
            try:
                for name, gradient in found.items():
                    near = self.anchors[number]
                    context = GradientContext(
                        anchor={name: near[name]} if name in near else {},
                        payload=payload,
                        state=state,
                        client=client.id,
                        num_samples=client.num_samples,
                        lr=rates[name][place],
                        phase=self.phase,
                    )
                    new = self.callback.correct_gradient(context, name, parameters[name][place], gradient[place])
                    corrected[name][place] = new.to(gradient.dtype)
            finally:
                self.callback._client = None
        return corrected


def stack_trees(trees: Sequence[Any], device: torch.device) -> tuple[list[Tensor], Any] | None:
    """Return trees of tensors and plain values as one tree of stacked tensors; `None` if they are not alike."""
    parts = [split_tree(tree) for tree in trees]
    leaves, skeleton = parts[0]
    for others, form in parts[1:]:
        if not _alike(form, skeleton) or any(a.shape != b.shape for a, b in zip(others, leaves, strict=True)):
            return None
    return [_stack(group, device) for group in zip(*(part[0] for part in parts), strict=True)], skeleton


def _stack(group: Sequence[Tensor], device: torch.device) -> Tensor:
    """Stack tensors on a client axis; where all clients hold the same tensor, the result is a view of it."""
    if all(tensor is group[0] for tensor in group):
        return group[0].to(device).expand(len(group), *group[0].shape)
    return torch.stack(list(group)).to(device)


def _alike(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except (RuntimeError, ValueError, TypeError):
        return False
