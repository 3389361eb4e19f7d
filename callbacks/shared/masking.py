"""The steps of secure aggregation: what a client keeps, sends and refuses in each, and how the server opens a sum.

What a client keeps are plain values, secrets as hexadecimal texts: they live in its private state, for one round.

Shamir's secret sharing: any `threshold` shares give a secret back, and fewer tell nothing of it.

Shamir, "How to share a secret", Communications of the ACM 22(11), 1979.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache, reduce
from typing import Any

import numpy as np
from torch import Tensor

from fedlightning.callbacks.shared import masks

PRIME = 2**256 + 297
"""The field is that of the integers modulo this prime, the first one beyond all secrets of 32 bytes."""
LENGTH = 33
"""Bytes of a share."""


def split(secret: bytes, threshold: int, places: Iterable[int]) -> dict[int, bytes]:
    """Return the shares of a secret by place: values of a random polynomial, which is the secret at 0.

    Args:
        secret: At most 32 bytes.
        threshold: Shares that give it back.
        places: Different whole numbers from 1.

    Example:
        >>> shares = split(b"a secret of at most 32 bytes", 2, [1, 2, 3])
        >>> join({1: shares[1], 3: shares[3]}).lstrip(bytes(1))
        b'a secret of at most 32 bytes'
    """
    drawn = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    highest_first = [*drawn, int.from_bytes(secret, "big")]
    values = {place: reduce(lambda sum, next: (sum * place + next) % PRIME, highest_first, 0) for place in places}
    return {place: value.to_bytes(LENGTH, "big") for place, value in values.items()}


def join(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret of some shares, as 32 bytes: Lagrange's interpolation at 0.

    Args:
        shares: By place, as many as the threshold, or more.

    Raises:
        ValueError: If they are not shares of one secret, as far as can be seen.
    """
    factors = zip(shares.values(), _factors(tuple(shares)), strict=True)
    secret = sum(int.from_bytes(share, "big") * factor for share, factor in factors) % PRIME
    if secret >= 2**256:
        raise ValueError("these are not enough shares of one secret, or they were changed")
    return secret.to_bytes(32, "big")


@lru_cache(maxsize=64)  # all secrets of a round have shares at the same places
def _factors(places: tuple[int, ...]) -> tuple[int, ...]:
    """Return what the values at some places count in the value at 0."""
    factors = []
    for place in places:
        above = below = 1
        for other in places:
            if other != place:
                above, below = above * other % PRIME, below * (other - place) % PRIME
        factors.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(factors)


ADVERTISED = 3 * masks.SEED
"""Bytes that a client advertises: the public key for masks, the one for sealed texts, and a digest of its own seed."""


def mask_key(advertised: bytes) -> bytes:
    """Return the public key that masks are made with."""
    return advertised[: masks.SEED]


def box_key(advertised: bytes) -> bytes:
    """Return the public key that texts for its owner are sealed with."""
    return advertised[masks.SEED : 2 * masks.SEED]


def digest_of(seed: bytes) -> bytes:
    """Return what is told of a seed before it is opened: who opens another one is found out."""
    return hashlib.sha256(seed).digest()


# -- at a client -------------------------------------------------------------------------------------------------------
def advertise() -> tuple[dict[str, Any], Tensor]:
    """Draw the secrets of a round; return what is kept, and what is advertised."""
    mask, box, seed = masks.new_seed(), masks.new_seed(), masks.new_seed()
    public = masks.public_key(mask) + masks.public_key(box) + digest_of(seed)
    return {"mask": mask.hex(), "box": box.hex(), "seed": seed.hex(), "told": public.hex()}, masks.as_tensor(public)


def share(
    kept: Mapping[str, Any], me: str, keys: Mapping[str, Tensor], threshold: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Share the private mask key and the seed among all clients; return what is kept, and a sealed text for each other.

    Args:
        kept: What :func:`advertise` has kept.
        me: The client.
        keys: What each client has advertised.
        threshold: Shares that give a secret back.

    Raises:
        ValueError: If the server's list is not what a client may share its secrets with.
    """
    texts = {client: masks.as_bytes(keys[client]) for client in sorted(keys)}
    if "mask" not in kept or texts.get(me, b"").hex() != kept["told"]:
        raise ValueError("the keys that came are not of this round")
    if len(set(texts.values())) != len(texts) or not len(texts) / 2 < threshold <= len(texts):
        raise ValueError(f"{len(texts)} keys came for a threshold of {threshold}")
    places = {client: place for place, client in enumerate(texts, start=1)}
    of_key = split(bytes.fromhex(kept["mask"]), threshold, places.values())
    of_seed = split(bytes.fromhex(kept["seed"]), threshold, places.values())
    both = {client: of_key[place] + of_seed[place] for client, place in places.items()}
    others = {client: box_key(text) for client, text in texts.items() if client != me}
    boxes = masks.agreed(bytes.fromhex(kept["box"]), others, "shares")
    sealed = {client: masks.as_tensor(masks.seal(key, both[client], me < client)) for client, key in boxes.items()}
    agreed_keys = {"keys": {client: mask_key(text).hex() for client, text in texts.items()}}
    agreed_keys["boxes"] = {client: key.hex() for client, key in boxes.items()}
    return {**kept, **agreed_keys, "threshold": threshold, "held": {me: both[me].hex()}}, sealed


def receive(kept: Mapping[str, Any], me: str, sealed: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what is kept with the shares of the others, who are the clients of this round.

    Args:
        kept: What :func:`share` has kept.
        me: The client.
        sealed: Their sealed texts, by sender.

    Raises:
        ValueError: If they are too few or not of this round, or one was changed on its way.
    """
    if "held" not in kept or "round" in kept or not sealed.keys() <= kept["keys"].keys() - {me}:
        raise ValueError("the shares that came are not of this round")
    if len(sealed) + 1 < kept["threshold"]:
        raise ValueError(f"{len(sealed) + 1} clients have shared secrets, and {kept['threshold']} were agreed on")
    shares = dict(kept["held"])
    for client, text in sealed.items():
        shares[client] = masks.unseal(bytes.fromhex(kept["boxes"][client]), masks.as_bytes(text), client < me).hex()
    return {**kept, "held": shares, "round": sorted(shares)}


def add_own_masks(total: np.ndarray, kept: Mapping[str, Any], me: str) -> None:
    """Add a client's masks to its integers: one of its own, and one with each other client, which cancels in the sum.

    Args:
        total: The integers.
        kept: What :func:`receive` has kept.
        me: The client.
    """
    others = {client: bytes.fromhex(kept["keys"][client]) for client in kept["round"] if client != me}
    between = masks.agreed(bytes.fromhex(kept["mask"]), others, "mask").items()
    signed = ((seed, 1 if me < client else -1) for client, seed in between)
    masks.add_masks(total, [(bytes.fromhex(kept["seed"]), 1), *signed])


def reveal(kept: Mapping[str, Any], me: str, there: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return shares of the seed of each client that is there, and of the mask key of each that is not.

    Args:
        kept: What :func:`receive` has kept. Forget it then: who answered twice could give away both of a client.
        me: The client.
        there: Whether the server has a client's masked update.

    Raises:
        ValueError: If fewer are there than the threshold, or others than those of this round.
    """
    if "round" not in kept or sorted(there) != kept["round"]:
        raise ValueError("the sum that is to be opened is not of this round")
    alive = {client for client, flag in there.items() if bool(flag)}
    if me not in alive or len(alive) < kept["threshold"]:
        raise ValueError(f"a sum of {len(alive)} clients is to be opened, and {kept['threshold']} were agreed on")
    both = {client: bytes.fromhex(text) for client, text in kept["held"].items()}
    parts = {client: (LENGTH, None) if client in alive else (0, LENGTH) for client in both}
    return {client: masks.as_tensor(both[client][slice(*part)]) for client, part in parts.items()}


# -- at the server -----------------------------------------------------------------------------------------------------
def opened_sum(
    masked: Mapping[str, np.ndarray],
    keys: Mapping[str, Tensor],
    together: Collection[str],
    shares: Mapping[str, Mapping[str, Tensor]],
) -> np.ndarray:
    """Return the sum of masked integers without its masks.

    Args:
        masked: The integers, by client.
        keys: What each client has advertised, in step 1.
        together: The clients of the round: those that have masks between each other.
        shares: The shares that clients have opened, by sender and by owner.

    Raises:
        ValueError: If the shares do not give back what an owner has advertised.
    """
    texts = {client: masks.as_bytes(keys[client]) for client in sorted(keys)}
    places = {client: place for place, client in enumerate(texts, start=1)}
    total: np.ndarray = sum(masked.values(), start=np.zeros((), next(iter(masked.values())).dtype))
    seeds: list[tuple[bytes, int]] = []
    for client in together:
        secret = join(
            {places[holder]: masks.as_bytes(theirs[client]) for holder, theirs in shares.items() if client in theirs}
        )
        here = client in masked
        digest, key = texts[client][2 * masks.SEED :], mask_key(texts[client])
        if digest != digest_of(secret) if here else key != masks.public_key(secret):
            raise ValueError(f"the shares of client '{client}' do not give back what it has advertised")
        if here:
            seeds.append((secret, -1))
            continue
        between = masks.agreed(secret, {other: mask_key(texts[other]) for other in masked}, "mask")
        # as the client that is gone would have: what they have added cancels
        seeds += [(seed, 1 if client < other else -1) for other, seed in between.items()]
    masks.add_masks(total, seeds)
    return total
