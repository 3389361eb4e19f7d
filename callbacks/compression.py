"""Fewer bytes up: a client sends a code of its change, and the server takes what the code stands for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from fedlightning.algorithm import (
    Change,
    Client,
    Facts,
    Message,
    Need,
    Server,
    State,
    Update,
    UpdateCodec,
    Wire,
    generator,
    requires,
)
from fedlightning.ranges import PositiveShare, Range
from fedlightning.tensors import add_row, as_reals, entry_kinds, has_mean, tied_names, to_row

WITH_A_SERVER = Need(
    "encodes changes of all entries that the server sent and asked for", ("neighbours", Change.PARTS, Change.ONE_WAY)
)


class _ChangeCodec(UpdateCodec):
    """Base of codes of the change of all trainable entries that came and go back, each or as one vector."""

    @property
    def facts(self) -> Facts:
        """It goes by the model that came, in synchronous rounds."""
        why, instead = "encodes changes of the model's trainable entries", f"Leave {self.key} out."
        travels = requires.Travels(why, instead, "trainable")
        return super().facts.extend(needs=[WITH_A_SERVER], requires=[travels], asynchronous=False)

    def encode(self, client: Client, update: Update) -> None:
        """Put the code in place of the entries.

        Raises:
            ValueError: If an entry goes back that did not come.
        """
        kinds = entry_kinds(client.module)
        chosen = [name for name, value in update.state.items() if kinds.get(name) == "trainable" and has_mean(value)]
        if not chosen or not client.contributed:
            return
        unsent = next((name for name in chosen if name not in client.received), None)
        if unsent is not None:
            raise ValueError(
                f"{self.key} sends changes, and '{unsent}' did not come: there is nothing to count its change from. A method "
                "that asks for what it does not send says so in its facts: Change.ONE_WAY"
            )
        coded = _without_copies(chosen, tied_names(client.module))
        change = to_row(update.state, coded) - to_row(client.received, coded)
        message = replace(client.message, model=update.model)  # the one that the client chose, of several that came
        update.extras[self.key] = self.code(change, message, client)
        update.state = {name: value for name, value in update.state.items() if name not in chosen}

    def decode(self, server: Server, message: Message, update: Update) -> State:
        """Return the entries that came, each with its part of the change."""
        coded = self._coded(server, message)
        start = {name: message.state[name] for name in coded}
        size = _size(start.values())
        decoded = add_row(start, self.change(update.extras[self.key], size, message, server))
        return {**update.state, **{copy: decoded[name] for name, copies in coded.items() for copy in copies}}

    def planned_bytes(self, server: Server, message: Message) -> int:
        """Return the bytes of the code, and of the entries that travel as they are."""
        coded, model = self._coded(server, message), server.models[message.model]
        names = {name for copies in coded.values() for name in copies}
        size = _size(message.state[name] for name in coded)
        rest = sum(model[name].nbytes for name in message.returns if name not in names)
        return rest + (self.length(size) if size else 0)

    def _coded(self, server: Server, message: Message) -> dict[str, list[str]]:
        """Return the entries that an answer to a message has in its code, each with all of its names."""
        architecture, sent = server.architecture_of(message.client), message.state
        chosen = [
            name
            for name in message.returns
            if architecture.kinds.get(name) == "trainable" and name in sent and has_mean(sent[name])
        ]
        return _without_copies(chosen, architecture.tied)

    def length(self, size: int) -> int:
        """Return the bytes of the code of a change of so many elements."""
        raise NotImplementedError

    def code(self, change: Tensor, message: Message, client: Client) -> dict[str, Tensor]:
        """Return the code of a change, an fp64 vector."""
        raise NotImplementedError

    def change(self, code: Mapping[str, Tensor], size: int, message: Message, server: Server) -> Tensor:
        """Return the change that a code stands for, an fp64 vector of `size`. What came is not to be trusted."""
        raise NotImplementedError


def _size(entries: Iterable[Tensor]) -> int:
    """Return the number of elements of entries; a complex one is two."""
    return sum(as_reals(entry).numel() for entry in entries)


def _without_copies(names: Sequence[str], tied: Mapping[str, Collection[str]]) -> dict[str, list[str]]:
    """Return names in order, of a tensor under several names the first one, each with all of its names."""
    names_by_first: dict[str, list[str]] = {}
    for name in sorted(names):
        first = min((tied_name for tied_name in tied.get(name, ()) if tied_name in names), default=name)
        names_by_first.setdefault(min(first, name), []).append(name)
    return names_by_first


def _part(code: Any, name: str, dtype: torch.dtype, size: int | None = None) -> Tensor:
    """Return a part of a code: a finite vector of a dtype.

    Raises:
        ValueError: If it is something else.
    """
    vector: Any = code.get(name) if isinstance(code, Mapping) else None
    fits = isinstance(vector, Tensor) and vector.dtype == dtype and vector.dim() == 1
    if not fits or (size is not None and len(vector) != size) or not bool(torch.isfinite(vector.double()).all()):
        raise ValueError(f"its '{name}' is not a vector of {'' if size is None else f'{size} '}finite {dtype} numbers")
    assert isinstance(vector, Tensor)
    return vector


def count_of(share: float, size: int) -> int:
    """Return how many of `size` elements a share is: one at least."""
    return min(max(1, round(share * size)), size)


class TopK(_ChangeCodec):
    r"""The largest elements of a client's change, and memory of what was left out.

    Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018 (arXiv:1809.07599); Lin, Han, Mao, Wang, Dally,
    "Deep gradient compression", ICLR 2018 (arXiv:1712.01887).

    * Client: ``p = (w_i - w) + e_i``; the ``k`` elements of largest magnitude go up with their places, 8 bytes each; the
      rest is kept: ``e_i = p - sent``, of several models that a client may choose from one each.
    * Server: ``w + sent`` instead of ``w_i``, in whatever follows.

    What was left out of an update that did not arrive is not sent again. It is biased; with memory the sum of all that a
    client sends is the sum of its changes but for the last memory.

    Args:
        share: ``k`` over all elements, in (0, 1].
        feedback: Whether a client keeps what was left out and adds it the next time.

    Raises:
        ValueError: If `share` is out of range.

    Example:
        >>> TopK(share=0.05).feedback
        True
    """

    def __init__(self, share: PositiveShare = 0.01, feedback: bool = True) -> None:
        self.share = share
        self.feedback = feedback

    @property
    def facts(self) -> Facts:
        """What is kept at a client has to agree with what the server has taken in."""
        return super().facts.extend(changes={Change.IN_STEP} if self.feedback else (), keeps=self.feedback or None)

    def wire(self, module: nn.Module) -> Wire:
        """Places and values."""
        return Wire(up={"places": (-1,), "values": (-1,)})

    def length(self, size: int) -> int:
        """Return 8 bytes for each of the elements that go up."""
        return 8 * count_of(self.share, size)

    def code(self, change: Tensor, message: Message, client: Client) -> dict[str, Tensor]:
        """Return places, in order, and values; keep the rest."""
        kept = client.state.get(self.key, {}).get("left", {})
        left = kept.get(message.model)
        if self.feedback and left is not None and len(left) == len(change):
            change = change + left.double()
        places = change.abs().topk(count_of(self.share, len(change))).indices.sort().values
        values = change[places].float()
        if self.feedback:
            rest = change.clone()
            rest[places] -= values.double()
            client.state[self.key] = {"left": kept | {message.model: rest.float()}}
        return {"places": places.int(), "values": values}

    def change(self, code: Mapping[str, Tensor], size: int, message: Message, server: Server) -> Tensor:
        """Return zeros with the values at their places."""
        count = count_of(self.share, size)
        places, values = _part(code, "places", torch.int32, count).long(), _part(code, "values", torch.float32, count)
        if bool((places < 0).any()) or bool((places >= size).any()) or bool((places.diff() <= 0).any()):
            raise ValueError(f"its 'places' are not {count} different ones below {size}, in order")
        return torch.zeros(size, dtype=torch.float64).index_put((places,), values.double())


class RandomK(_ChangeCodec):
    r"""A random share of the elements of a client's change, scaled up: its mean over draws is the change.

    Konečný, McMahan, Yu, Richtárik, Suresh, Bacon, "Federated learning: strategies for improving communication efficiency",
    2016 (arXiv:1610.05492), section 3 (random mask).

    * Client: ``k`` of ``d`` elements, drawn by an address that the server knows too, times ``d / k``: 4 bytes each.
    * Server: ``w`` with the scaled change at these places.

    Args:
        share: ``k / d``, in (0, 1].

    Raises:
        ValueError: If `share` is out of range.

    Example:
        >>> RandomK(share=0.1).share
        0.1
    """

    def __init__(self, share: PositiveShare = 0.1) -> None:
        self.share = share

    def wire(self, module: nn.Module) -> Wire:
        """Values only: the server draws the same places."""
        return Wire(up={"values": (-1,)})

    def length(self, size: int) -> int:
        """Return 4 bytes for each of the elements that go up."""
        return 4 * count_of(self.share, size)

    def places(self, size: int, message: Message, seed: int) -> Tensor:
        """Return the places of a visit, the same at the client and at the server."""
        draw = generator(seed, message.visit, message.client, self.key)
        return torch.randperm(size, generator=draw)[: count_of(self.share, size)]

    def code(self, change: Tensor, message: Message, client: Client) -> dict[str, Tensor]:
        """Return the scaled values."""
        places = self.places(len(change), message, client.seed)
        return {"values": (change[places] * (len(change) / len(places))).float()}

    def change(self, code: Mapping[str, Tensor], size: int, message: Message, server: Server) -> Tensor:
        """Return zeros with the values at the places of this visit."""
        places = self.places(size, message, server.seed)
        values = _part(code, "values", torch.float32, len(places))
        return torch.zeros(size, dtype=torch.float64).index_put((places,), values.double())


class QSGD(_ChangeCodec):
    r"""A byte for each element of a client's change, rounded at random: its mean over draws is the change.

    Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD: communication-efficient SGD via gradient quantization and encoding",
    NeurIPS 2017 (arXiv:1610.02132), section 3.1, without the entropy code.

    * Client: in buckets of `bucket` elements ``v``, ``||v|| sign(v_i) xi_i / s``, where ``s |v_i| / ||v||`` is rounded up
      with the probability of its fraction, and down else: a byte for each element, 4 for each bucket.
    * Variance of a bucket of ``d``: at most ``min(d / s^2, sqrt(d) / s) ||v||^2``.

    Engines that round a change otherwise (``"vectorized"``, other devices) may move an element by one level.

    Args:
        levels: ``s``, 1 to 127.
        bucket: Elements that share a norm.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> QSGD().levels
        127
    """

    def __init__(
        self, levels: Annotated[int, Range("[1, 127]")] = 127, bucket: Annotated[int, Range("[1, inf)")] = 512
    ) -> None:
        self.levels = levels
        self.bucket = bucket

    def wire(self, module: nn.Module) -> Wire:
        """Norms of the buckets, and levels of the elements."""
        return Wire(up={"norms": (-1,), "levels": (-1,)})

    def length(self, size: int) -> int:
        """Return a byte for each element, and 4 for each bucket."""
        return size + 4 * -(-size // self.bucket)

    def code(self, change: Tensor, message: Message, client: Client) -> dict[str, Tensor]:
        """Return norms and signed levels."""
        norms = torch.stack([part.norm() for part in change.split(self.bucket)]).float()
        whole = norms.double().repeat_interleave(self.bucket)[: len(change)]
        scaled = torch.where(whole > 0, change.abs() * self.levels / whole, 0.0).clamp(max=self.levels)
        up = torch.rand(len(change), generator=client.rng(self.key), dtype=torch.float64) < scaled - scaled.floor()
        return {"norms": norms, "levels": ((scaled.floor() + up) * change.sign()).to(torch.int8)}

    def change(self, code: Mapping[str, Tensor], size: int, message: Message, server: Server) -> Tensor:
        """Return norms times levels."""
        norms = _part(code, "norms", torch.float32, -(-size // self.bucket)).double()
        levels = _part(code, "levels", torch.int8, size).double()
        if bool((norms < 0).any()) or bool((levels.abs() > self.levels).any()):
            raise ValueError(f"its norms are negative, or its levels beyond {self.levels}")
        return norms.repeat_interleave(self.bucket)[:size] * levels / self.levels
