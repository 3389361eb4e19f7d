"""Keys that two clients agree on, sealed texts, and streams of random bits, by the package `cryptography`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlightning.algorithm import missing_package
from fedlightning.tensors.memory import PIECE

SEED = 32
"""Bytes of keys and seeds."""


@cache
def library() -> Any:
    """Return what is used of `cryptography`, which only this function names.

    Raises:
        ValueError: If it is not installed.
    """
    try:
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import x25519
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError as error:
        raise ValueError(missing_package("Keys, masks and noise are made by cryptography", "privacy")) from error
    return SimpleNamespace(
        sha256=hashes.SHA256,
        private=x25519.X25519PrivateKey,
        public=x25519.X25519PublicKey,
        hkdf=HKDF,
        stream=lambda seed: Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor(),
        sealed=AESGCM,
    )


# -- keys --------------------------------------------------------------------------------------------------------------
def new_seed() -> bytes:
    """Return a secret from the operating system: a seed, or a private key."""
    return secrets.token_bytes(SEED)


def public_key(private: bytes) -> bytes:
    """Return the public key of a private one (X25519)."""
    return bytes(library().private.from_private_bytes(private).public_key().public_bytes_raw())


def agreed(private: bytes, public: Mapping[str, bytes], purpose: str) -> dict[str, bytes]:
    """Return the keys that the owner of a pair of keys agrees on with others, each from the other's public one.

    Args:
        private: One's own private key.
        public: The others' public keys, by name.
        purpose: What they are for (HKDF's `info`); another purpose gives other keys.
    """
    used = library()
    owner, options = used.private.from_private_bytes(private), {"length": SEED, "salt": None, "info": purpose.encode()}
    shared = {name: owner.exchange(used.public.from_public_bytes(key)) for name, key in public.items()}
    return {name: bytes(used.hkdf(used.sha256(), **options).derive(key)) for name, key in shared.items()}


def seal(key: bytes, text: bytes, first: bool) -> bytes:
    """Encrypt and authenticate a text (AES-GCM; 16 bytes longer).

    Args:
        key: A key of two, each of whom seals one text with it.
        text: The text.
        first: Which of the two it is.
    """
    return bytes(library().sealed(key).encrypt(first.to_bytes(12, "big"), text, None))


def unseal(key: bytes, sealed: bytes, first: bool) -> bytes:
    """Return what was sealed.

    Raises:
        ValueError: If it was sealed with another key, by the other one, or changed.
    """
    try:
        return bytes(library().sealed(key).decrypt(first.to_bytes(12, "big"), sealed, None))
    except Exception as error:
        raise ValueError("a share of another client was changed on its way") from error


# -- streams -----------------------------------------------------------------------------------------------------------
ZEROS = memoryview(bytes(8 * PIECE))
"""What is encrypted to get a stream's bits."""


def room() -> np.ndarray:
    """Return memory for the bytes of a piece, and what a cipher may want beyond."""
    return np.empty(8 * PIECE + 16, np.uint8)


def stream(seed: bytes, bits: np.ndarray | None = None) -> Callable[[int], np.ndarray]:
    """Return what gives the next random bytes of a stream, at most 8 for each number of a piece (AES-256, counter mode).

    They are overwritten by the next call: memory that is in the cache already costs less than the encryption.

    Args:
        seed: A key of 32 bytes, of this stream alone.
        bits: Memory for them (:func:`room`), which streams that take turns may share; default: of its own.
    """
    encryptor, buffer = library().stream(seed), room() if bits is None else bits

    def next_bytes(count: int) -> np.ndarray:
        encryptor.update_into(ZEROS[:count], buffer)
        return buffer[:count]

    return next_bytes


def add_masks(total: np.ndarray, seeds: Iterable[tuple[bytes, int]]) -> None:
    """Add the random integers of seeds to others of the same bits, or subtract them.

    All of them to a piece before the next one: it stays in the cache.

    Args:
        total: The integers.
        seeds: Seeds, each with 1 to add its integers or -1 to subtract them.
    """
    bits = room()
    streams = [(stream(seed, bits), np.add if sign > 0 else np.subtract) for seed, sign in seeds]
    for start in range(0, len(total), PIECE):
        piece = total[start : start + PIECE]
        for next_bytes, change in streams:
            change(piece, next_bytes(piece.nbytes).view(total.dtype), out=piece)


# -- bytes as tensors --------------------------------------------------------------------------------------------------
def as_bytes(sent: Tensor) -> bytes:
    """Return the bytes of a tensor of bytes."""
    return sent.cpu().contiguous().numpy().tobytes()


def as_tensor(text: bytes) -> Tensor:
    """Return bytes as a tensor."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
