"""Secure aggregation: the server learns the sum of the clients' changes, and no single one.

What SecureAggregation refuses before round 1 of the clients, and of the entries that they send.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from fedlightning.algorithm import (
    WEIGHTINGS,
    Change,
    Client,
    Extra,
    Facts,
    Job,
    Message,
    Need,
    Newcomers,
    Plan,
    Promise,
    Server,
    Setup,
    State,
    SumCodec,
    Update,
    Wire,
    contributors,
    warn,
)
from fedlightning.callbacks.shared import masking, masks
from fedlightning.callbacks.shared.fixed_point import SIGNED, FixedPoint, from_wire, to_wire
from fedlightning.callbacks.shared.private_options import Private
from fedlightning.callbacks.shared.secret_noise import digest_of
from fedlightning.callbacks.shared.single_updates import refuse_other_ways
from fedlightning.callbacks.shared.sum_noise import PLACE, SumNoise
from fedlightning.ranges import PositiveFloat, Range, make_init
from fedlightning.tensors import add_row, as_reals, has_mean, widen
from fedlightning.tensors.memory import PIECE


def refuse_unfit(setup: Setup, clip: float, bits: int, least: int) -> None:
    """Refuse rounds of too few clients, sums that could overflow, and entries that are not numbers to add up.

    Args:
        setup: The federation.
        clip: Bound of an element's change.
        bits: Bits of an integer.
        least: Clients whose sum may be opened.

    Raises:
        ValueError: With the way out.
    """
    share, count = setup.run.participation, len(setup.run.clients)
    drawn = share if isinstance(share, int) and not isinstance(share, bool) else round(share * count)
    if min(drawn, count) < least:
        raise ValueError(
            f"{min(drawn, count)} clients take part in a round, and SecureAggregation opens sums of {least} at least: of "
            "fewer, one would know the other's."
        )
    if FixedPoint(clip, bits, count).levels < 100 * count:
        raise ValueError(
            f"SecureAggregation(bits={bits}) leaves fewer than a hundred levels for each of {count} clients, if the "
            "sum is not to overflow. Take more bits."
        )
    travelling = set(setup.shared_names())
    for name, layer in setup.module.named_modules():
        if f"{name}.num_batches_tracked" in travelling and getattr(layer, "momentum", 0) is None:
            raise ValueError(
                f"'{name}' averages over all batches that it has counted (momentum=None), and SecureAggregation leaves "
                "integer buffers as they are. Give it a momentum, or take float_buffers='local'."
            )


LEAST = 3
"""Clients whose sum may be opened: of two, each would know the other's."""
KEYS, SHARES, OPEN = "keys", "shares", "open"
"""Tags of the messages around the training of a round."""
ONE_SUM = Need(
    "opens one sum of changes of the model that everybody was sent",
    (
        *("reduce", "denominator", "plan_round", Change.PARTS, Change.SMALLER, "on_build"),
        *("model_of", "neighbours", "encode"),
    ),
)


@make_init
class SecureAggregation(SumCodec):
    r"""Secure aggregation by pairwise masks: the server sees random integers, and opens nothing but their sum.

    Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth, "Practical secure aggregation for
    privacy-preserving machine learning", CCS 2017, section 4 (honest but curious server).

    A round has four visits of each client:

    1. *Keys*: client ``u`` draws two pairs of keys (X25519), one for masks and one to send each other secrets, and a seed
       ``b_u``; it tells the public keys and a digest of the seed.
    2. *Shares*: it sends everybody a share of ``b_u`` and of its private mask key, which only the receiver can read; any
       ``t`` shares give a secret back (Shamir).
    3. Training. With the weight ``p_u`` and the change ``x_u`` of all entries that travel, in fixed point, it sends
       ``y_u = p_u x_u + PRG(b_u) + sum_(v > u) PRG(s_uv) - sum_(v < u) PRG(s_uv)  mod 2^bits``, where ``s_uv`` is what the
       mask keys of ``u`` and ``v`` agree on.
    4. *Open*: those that are still there send their shares of ``b_u`` of who has sent ``y_u``, and of the mask key of who has
       not, never both. In the sum of the ``y_u`` all masks between survivors cancel; the server subtracts the others.

    Then ``w + sum_u p_u x_u / sum_u p_u`` over the survivors; the server's optimizer, if there is one, sees no difference. A
    client that fails or is late after step 2 has dropped out, one that fails before is not in the round. Fewer survivors than
    ``t`` end the run with a sentence; a round that fewer than three take part in (`PoissonSampling`), or in which fewer than
    three took a real step, leaves the model as it is, and says so. Secrets come from the operating system, and are deleted
    when the round ends. The sum does not depend on them, so that runs agree bit for bit.

    **Against whom**: a server that follows the protocol and looks at all that it gets, in a simulation. A server that lies
    about who is there is not countered (there are no signed keys, no consistency round), so that sites are refused. The
    server still sees sample counts (weights), who took part, scores and logged numbers; and the sum itself, which may tell of
    a client: it is not differential privacy. :class:`~fedlightning.callbacks.SampleDP` beside it is: an update has all of its
    noise before it is masked, so that epsilon is the same with and without masks; so is ``ClientDP(where="masked")``.

    **What the server cannot check any more**: finite numbers and lengths of single updates (`failures.update_limit`). A
    client refuses to send a NaN, and cuts each element of its change to ``[-clip, clip]``; what part was cut is told once. A
    client that does not follow the protocol can spoil the sum. Integer buffers stay as the server has them.

    Cost: of `d` elements, ``d bits / 8`` bytes up, some 100 bytes up and down for every other client, and as many masks as
    there are clients to make at each: it is made for up to a few hundred participants.

    Args:
        threshold: ``t`` over the participants of a round, above a half; two thirds take one more where 3 divides their
            number: 5 of 6. At least 3 clients in any case.
        clip: Bound of an element's change in a round.
        bits: Bits of an integer: 16, 32 or 64. The mean is wrong by at most ``clip * clients / 2^bits`` if all stay.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> SecureAggregation().survivors(20)
        14
    """

    rank = 1000  # what everybody else has made of an update is masked
    promise = (
        f"a server that keeps to the protocol sees only sums of {LEAST} updates or more (SecureAggregation); epsilon does "
        "not rest on it"
    )

    threshold: Annotated[float, Range("(0.5, 1]")] = 2 / 3
    clip: PositiveFloat = 8.0
    bits: Literal[16, 32, 64] = 32

    @property
    def promises(self) -> Sequence[Promise]:
        """What masks hide from a server that keeps to the protocol."""
        left = "sizes, participants, scores, logs, the sum"
        provided = "it keeps to the protocol, few clients help it"
        return (Promise("the server", f"a change: it sees sums of {LEAST} or more", provided, left),)

    @property
    def facts(self) -> Facts:
        """It knows one sum in synchronous rounds, and keeps nothing from round to round that newcomers lack."""
        return super().facts.extend(needs=[ONE_SUM], asynchronous=False, newcomers=Newcomers(join=True))

    def survivors(self, participants: int) -> int:
        """Return ``t``: how many of a round's participants have to stay until its end."""
        more = 2 * participants // 3 + 1 if self.threshold >= 2 / 3 else 0  # just two thirds are too few: section 6
        return max(LEAST, more, math.ceil(self.threshold * participants - 1e-9))

    def wire(self, module: nn.Module) -> Wire:
        """Declare public keys, sealed shares, masked integers and opened shares."""
        down: dict[str, Any] = {"keys": "tensors", "threshold": "scalar", "shares": "tensors", "share": "scalar"}
        sealed = {name: Extra("tensors", whole=True, due=(name,)) for name in (SHARES, OPEN)}
        up = {KEYS: Extra((-1,), whole=True, due=(KEYS,)), **sealed, "masked": Extra((-1,), whole=True)}
        return Wire(down={**down, "entries": "tensors", "there": "tensors"}, up=up)

    # -- before round 1 ------------------------------------------------------------------------------------------------
    def check(self, setup: Setup) -> None:
        """Refuse what needs single updates, what the masks do not cover, and sums that could overflow.

        Raises:
            ValueError: With the reason.
        """
        masks.library()
        refuse_other_ways(self, setup, "does not show the server: it sees sums of models", sums=True)
        for other in setup.callbacks:
            if callable(other.weighting):
                raise ValueError(
                    f"{other.key} weighs updates by a function of its own, which SecureAggregation does not show the server. "
                    f"Use a weighting of {sorted(WEIGHTINGS)}."
                )
        refuse_unfit(setup, self.clip, self.bits, LEAST)

    def on_federation_start(self, server: Server) -> None:
        """Refuse sites.

        Raises:
            ValueError: With the reason.
        """
        if server.sites:
            raise ValueError(
                "SecureAggregation is a simulation with a server that keeps to the protocol, and these clients are at sites: "
                "a server that lies could open single updates. Remove it, or train in one place."
            )

    def on_round_start(self, server: Server) -> None:
        """Refuse the same in a run that goes on with other options; forget a round that was not finished."""
        self.on_federation_start(server)
        self._keep(server)

    # -- a round, at the server ----------------------------------------------------------------------------------------
    def plan_round(self, server: Server) -> Plan:
        """Collect keys and sealed shares, let the clients train, and have the sum opened.

        Raises:
            ValueError: If fewer clients than the threshold are there.
        """
        asked = server.participants()
        if len(asked) < LEAST:  # drawn, and no failure: nobody has said anything yet
            warn(
                f"Round {server.round + 1}: {len(asked)} of {len(server.clients)} clients take part, and SecureAggregation "
                f"opens no sum of fewer than {LEAST}. They are not visited, and the model stays as it is."
            )
            return
        needed = self._needed(server, asked)
        answers = yield self._visits(server, KEYS, {client: {} for client in asked})
        weights = self._weights(server, answers)
        keys = {client: extras[KEYS] for client, extras in self._of(answers).items() if client in weights}
        self._refuse_few(server, keys, asked, "have sent keys", answers)
        answers = yield self._visits(server, SHARES, {client: {"keys": keys, "threshold": needed} for client in keys})
        sealed = {client: extras[SHARES] for client, extras in self._of(answers).items()}
        self._refuse_few(server, sealed, asked, "have shared secrets", answers)
        whole = sum(weights[client] for client in sealed)
        shares = {client: weights[client] / whole for client in sealed}
        entries = {name: torch.empty(0) for name in self._entries(server)}
        texts = {
            client: {other: shares_of_other[client] for other, shares_of_other in sealed.items() if other != client}
            for client in sealed
        }
        training = {client: {"entries": entries, "share": shares[client], "shares": texts[client]} for client in sealed}
        answers = yield self._visits(server, "", training)
        present = [answer.client for answer in answers if answer.error is None]
        self._refuse_few(server, present, asked, "have sent masked updates", answers)
        # The changes of the others are zero: the sum would show one or two.
        if len(moved := contributors(answers)) < LEAST:
            warn(
                f"Round {server.round + 1}: {len(moved)} of {len(present)} clients that have sent masked updates took a real "
                f"step, and SecureAggregation opens no sum of fewer than {LEAST}. The model stays as it is."
            )
            self._keep(server)
            return
        flags = {client: torch.tensor(client in present) for client in sealed}
        answers = yield self._visits(server, OPEN, {client: {"there": flags} for client in present})
        opened = {client: extras[OPEN] for client, extras in self._of(answers).items()}
        self._refuse_few(server, opened, asked, "were left to open the sum", answers)
        self._keep(server, keys=keys, opened=opened, shares=shares)

    def _visits(self, server: Server, tag: str, down: Mapping[str, Mapping[str, Any]]) -> list[Job]:
        """Return the jobs of a step, and keep what their messages bring."""
        self._keep(server, down=dict(down))
        if tag == "":
            return [server.job(client) for client in down]
        return [Job(client, work=0, tag=tag, down=(), returns=()) for client in down]

    def _keep(self, server: Server, **values: Any) -> None:
        """Keep what the next step needs, and of the one before only whether the user was told of what is cut."""
        server_state = server.state.pop(self.key, {})
        if values or "told" in server_state:
            server.state[self.key] = {name: server_state[name] for name in ("told",) if name in server_state} | values

    def _of(self, answers: Iterable[Update]) -> dict[str, Mapping[str, Any]]:
        """Return what those clients sent whose updates are good."""
        return {answer.client: answer.extras[self.key] for answer in answers if answer.error is None}

    def _weights(self, server: Server, answers: Iterable[Update]) -> dict[str, float]:
        """Return the weights of the clients that have samples."""
        weights = {}
        for answer in (answer for answer in answers if answer.error is None):
            if answer.num_samples:
                weights[answer.client] = server.callbacks.weight(server, answer)
            else:
                server.note_failure(answer.client, f"client '{answer.client}' has no training samples")
        return weights

    def _needed(self, server: Server, asked: Sequence[str]) -> int:
        """Return how many have to stay: the threshold, or as many as the noise of the sum takes."""
        shares = (protection.shares or 0 for protection in server.callbacks if isinstance(protection, Private))
        return max(self.survivors(len(asked)), *shares, 0)

    def _refuse_few(
        self, server: Server, there: Collection[str], asked: Sequence[str], what: str, answers: Iterable[Update]
    ) -> None:
        needed = self._needed(server, asked)
        if len(there) < needed:
            why = next((f"; {answer.error.rstrip('.')}" for answer in answers if answer.error), "")
            raise ValueError(
                f"Round {server.round + 1}: {len(there)} of {len(asked)} clients {what}, and SecureAggregation(threshold="
                f"{self.threshold:.3g}) opens no sum of fewer than {needed}{why}. Resume goes on from the round before."
            )

    def _entries(self, server: Server) -> list[str]:
        """Return the names of the entries that are summed: numbers that training may change."""
        model, kinds = server.model, server.kinds
        names = (name for name in server.returned_names() if kinds[name] in ("trainable", "float_buffer"))
        return sorted(name for name in names if has_mean(model[name]))

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Add what the step brings. Everybody is sent the same model, of whose change the sum is.

        Raises:
            ValueError: If somebody is sent another one.
        """
        down = server.state.get(self.key, {}).get("down", {}).get(job.client)
        if not down:
            return
        message.extras[self.key] = down
        other = [name for name in down.get("entries", ()) if message.state.get(name) is not server.model[name]]
        if other:
            raise ValueError(
                f"Client '{job.client}' is sent another '{other[0]}' than the server has, and SecureAggregation knows only "
                "the sum of all changes. Remove it, or what sends clients models of their own."
            )

    def check_update(self, server: Server, message: Message, update: Update) -> None:
        """Refuse entries in the clear, and what are not masked integers, keys or shares.

        Raises:
            ValueError: With what is wrong.
        """
        if update.state:
            raise ValueError("it holds entries in the clear beside SecureAggregation")
        sent, came = update.extras.get(self.key, {}), message.extras.get(self.key, {})
        if message.tag in (SHARES, OPEN):
            shares = sent[message.tag]
            asked = set(came["there"]) if message.tag == OPEN else {*came["keys"]} - {message.client}
            if set(shares) != asked or any(share.dtype != torch.uint8 or share.dim() != 1 for share in shares.values()):
                raise ValueError(f"its shares are not bytes for each of {len(asked)} clients")
        if message.tag == KEYS and (sent[KEYS].dtype != torch.uint8 or len(sent[KEYS]) != masking.ADVERTISED):
            raise ValueError(f"what it advertises are not {masking.ADVERTISED} bytes")
        if message.returns and message.work != 0:
            size = 1 + sum(as_reals(server.model[name]).numel() for name in self._entries(server))
            masked = sent.get("masked", torch.empty(0))
            if masked.dtype != SIGNED[self.bits] or len(masked) != size:
                raise ValueError(f"it holds no {size} masked integers of {self.bits} bits")

    def reduce(self, server: Server, updates: list[Update]) -> State:
        """Return the model moved by the mean change: the sum of the masked integers without its masks."""
        server_state = server.state.get(self.key, {})
        self._keep(server)
        if "opened" not in server_state:
            return {}
        masked = {update.client: from_wire(update.extras[self.key]["masked"], self.bits) for update in updates}
        total = masking.opened_sum(masked, server_state["keys"], server_state["shares"], server_state["opened"])
        point = FixedPoint(self.clip, self.bits, len(server_state["shares"]))
        self._tell(server, point.clipped(total, len(masked)))
        came = sum(server_state["shares"][update.client] for update in contributors(updates))
        old = {name: server.model[name] for name in self._entries(server)}
        return add_row(old, point.decode(total) / came)

    def _tell(self, server: Server, part: float) -> None:
        """Say once what part of all changes was beyond the bound."""
        if part > 0.0 and self.key not in server.state:
            server.state[self.key] = {"told": True}
            warn(
                f"Round {server.round + 1}: {part:.2g} of all elements changed by more than SecureAggregation(clip="
                f"{self.clip:g}), and were cut to it. A larger clip cuts fewer."
            )

    # -- a round, at a client ------------------------------------------------------------------------------------------
    def on_send(self, client: Client, update: Update) -> None:
        """Answer the steps around training.

        Raises:
            ValueError: If entries are asked for in the clear, or something is against the protocol.
        """
        message, kept = client.message, client.state.get(self.key, {})
        if message.work != 0:
            return
        if update.state:
            raise ValueError("its entries are asked for in the clear beside SecureAggregation: they stay")
        came: Mapping[str, Any] = message.extras.get(self.key, {})
        sent: Any
        if message.tag == KEYS:
            kept, sent = masking.advertise()
        elif message.tag == SHARES:
            kept, sent = masking.share(kept, client.id, came["keys"], int(came["threshold"]))
        elif message.tag == OPEN:
            kept, sent = {}, masking.reveal(kept, client.id, came["there"])
        else:
            return
        client.state.pop(self.key, None)
        if kept:
            client.state[self.key] = kept
        update.extras[self.key] = {message.tag: sent}

    def encode(self, client: Client, update: Update) -> None:
        """Put masked integers in place of all entries.

        Raises:
            ValueError: If nothing was agreed that would mask them, or a number is not finite.
        """
        came = client.message.extras.get(self.key, {})
        if "entries" not in came:
            if update.state:
                raise ValueError("its update is asked for without masks beside SecureAggregation: it stays")
            return
        names = sorted(came["entries"])
        kept = masking.receive(client.state.get(self.key, {}), client.id, came["shares"])
        point = FixedPoint(self.clip, self.bits, len(kept["round"]))
        share = float(came["share"]) if client.contributed else 0.0
        change = (piece for name in names for piece in changes(update.state[name], client.received[name]))
        integers = point.encode(change, share)
        noise: SumNoise | None = client.scratch.get(PLACE)
        if noise is not None:
            self._refuse_thin(kept, share, noise)
            covered = {f"received {name}": client.received[name] for name in names}
            noise.add(integers, point, digest_of("sum", covered | {"integers": to_wire(integers, self.bits)}))
        masking.add_own_masks(integers, kept, client.id)
        client.state[self.key] = kept
        update.state = {}
        update.extras[self.key] = {"masked": to_wire(integers, self.bits)}

    def _refuse_thin(self, kept: Mapping[str, Any], share: float, noise: SumNoise) -> None:
        """Refuse a sum that may be opened with less noise than is accounted for.

        Raises:
            ValueError: With what the server asked for.
        """
        if kept["threshold"] < noise.shares or share * len(kept["round"]) > 1.0 + 1e-9:
            raise ValueError(
                f"a sum of {kept['threshold']} clients, in which it has the share {share:.4g}, would have less noise than "
                f"{noise.shares} shares of clients with equal weights: its update stays"
            )


def changes(new: Tensor, old: Tensor) -> Iterator[Tensor]:
    """Give by how much an entry has changed, in pieces that fit into a cache; infinities that have not, by 0."""
    sides = (as_reals(entry.detach()).reshape(-1).split(PIECE) for entry in (new, old))
    for now, before in zip(*sides, strict=True):
        change = widen(now) - widen(before)
        yield change if math.isfinite(float(change.sum())) else change.masked_fill(now == before, 0.0)
