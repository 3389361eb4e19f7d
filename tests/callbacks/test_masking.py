"""The steps of secure aggregation without a federation: sums, masks, what a client refuses."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

pytest.importorskip("cryptography", reason="keys: pip install opacus cryptography")
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fedlightning.callbacks.shared import masking, masks
from fedlightning.callbacks.shared.fixed_point import FixedPoint, from_wire, to_wire

CLIENTS = [f"site {number}" for number in range(9)]
GONE = ["site 1", "site 4", "site 8"]


def fixed_secrets(monkeypatch, word="a secret"):
    """Draw secrets from a fixed stream, so that a test of randomness fails always or never."""
    drawn = iter(range(10**6))
    monkeypatch.setattr(masks, "new_seed", lambda: hashlib.sha256(f"{word} {next(drawn)}".encode()).digest())


def shared(clients=CLIENTS, threshold=6):
    """Carry out the first two steps; return what each client keeps, what all advertised, and what they have sent."""
    kept, keys = {}, {}
    for client in clients:
        kept[client], keys[client] = masking.advertise()
    sealed = {}
    for client in clients:
        kept[client], sealed[client] = masking.share(kept[client], client, keys, threshold)
    return kept, keys, sealed


def received(kept, sealed, together):
    return {
        client: masking.receive(
            kept[client], client, {other: sealed[other][client] for other in together if other != client}
        )
        for client in together
    }


def numbers(client, size, bits):
    draw = np.random.default_rng(CLIENTS.index(client))
    return draw.integers(0, 2**bits, size, dtype=f"u{bits // 8}")


def with_masks(integers, kept, me):
    masked = integers.copy()
    masking.add_own_masks(masked, kept, me)
    return masked


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("gone", [[], GONE], ids=["all stay", "a third is gone"])
def test_masked_sums_are_plain_sums_bit_for_bit(bits, gone):
    kept, keys, sealed = shared()
    kept = received(kept, sealed, CLIENTS)
    there = [client for client in CLIENTS if client not in gone]
    masked = {c: with_masks(numbers(c, 50, bits), kept[c], c) for c in there}
    flags = {client: torch.tensor(client in there) for client in CLIENTS}
    opened = {client: masking.reveal(kept[client], client, flags) for client in there}
    plain = sum(int(numbers(client, 50, bits)[0]) for client in there) % 2**bits
    found = masking.opened_sum(masked, keys, CLIENTS, opened)
    assert int(found[0]) == plain
    assert np.array_equal(found, sum((numbers(c, 50, bits) for c in there), np.zeros(50, f"u{bits // 8}")))


def test_the_threshold_s_shares_open_a_sum_and_one_fewer_does_not():
    kept, keys, sealed = shared()
    kept = received(kept, sealed, CLIENTS)
    there = [client for client in CLIENTS if client not in GONE]
    masked = {c: with_masks(numbers(c, 5, 32), kept[c], c) for c in there}
    flags = {client: torch.tensor(client in there) for client in CLIENTS}
    opened = {client: masking.reveal(kept[client], client, flags) for client in there}
    assert len(masking.opened_sum(masked, keys, CLIENTS, opened)) == 5
    few = dict(list(opened.items())[:5])
    with pytest.raises(ValueError, match=r"not give back|not enough"):
        masking.opened_sum(masked, keys, CLIENTS, few)


def test_who_fails_between_keys_and_shares_is_not_in_the_round():
    kept, keys, sealed = shared()
    together = CLIENTS[2:]
    kept = received(kept, sealed, together)
    masked = {c: with_masks(numbers(c, 5, 32), kept[c], c) for c in together}
    flags = {client: torch.tensor(True) for client in together}
    opened = {client: masking.reveal(kept[client], client, flags) for client in together[:6]}
    found = masking.opened_sum(masked, keys, together, opened)
    assert np.array_equal(found, sum((numbers(c, 5, 32) for c in together), np.zeros(5, "u4")))


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_a_mask_is_the_stream_of_its_seed_across_pieces(bits):
    size, seed = 2**15 + 3, bytes(range(32))
    total = np.arange(size, dtype=f"<u{bits // 8}")
    masks.add_masks(total, [(seed, 1)])
    keys = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor().update(bytes(size * bits // 8))
    assert np.array_equal(total - np.arange(size, dtype=total.dtype), np.frombuffer(keys, total.dtype))
    masks.add_masks(total, [(bytes(32), 1), (seed, -1), (bytes(32), -1)])
    assert np.array_equal(total, np.arange(size, dtype=total.dtype))


def test_a_single_masked_update_is_random(monkeypatch):
    """With the server's knowledge of everything but secrets: bytes are uniform, and do not follow the plain ones."""
    fixed_secrets(monkeypatch)
    kept, _, sealed = shared()
    kept = received(kept, sealed, CLIENTS)
    size = 40_000
    plain = FixedPoint(8.0, 32, 9).encode([torch.linspace(-0.1, 0.1, size - 1)], 0.1)
    masked = with_masks(plain, kept["site 3"], "site 3")
    counts = np.bincount(np.frombuffer(masked.tobytes(), np.uint8), minlength=256)
    expected = 4 * size / 256
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert 160 < chi_square < 370  # 255 degrees of freedom: 1e-6 on either side
    signed = masked.view("i4").astype(float), plain.view("i4").astype(float)
    assert abs(np.corrcoef(*signed)[0, 1]) < 5 / size**0.5
    without = masked.copy()
    masks.add_masks(without, [(bytes.fromhex(kept["site 3"]["seed"]), -1)])  # what the server learns when all stay
    assert abs(np.corrcoef(without.view("i4").astype(float), signed[1])[0, 1]) < 5 / size**0.5


def test_a_client_refuses_what_is_against_the_protocol():
    kept, keys, sealed = shared()
    one = "site 0"
    fresh, _ = masking.advertise()
    with pytest.raises(ValueError, match="not of this round"):
        masking.share(fresh, one, keys, 6)
    own, told = masking.advertise()
    with pytest.raises(ValueError, match="keys came for a threshold"):  # two names, one key
        masking.share(own, one, {one: told, "b": keys["site 1"], "c": keys["site 1"]}, 2)
    with pytest.raises(ValueError, match="keys came for a threshold"):
        masking.share(own, one, {**keys, one: told}, 4)
    others = {other: sealed[other][one] for other in CLIENTS if other != one}
    with pytest.raises(ValueError, match="3 clients have shared secrets, and 6"):
        masking.receive(kept[one], one, dict(list(others.items())[:2]))
    with pytest.raises(ValueError, match="changed on its way"):
        masking.receive(kept[one], one, {**others, "site 2": others["site 3"]})
    with pytest.raises(ValueError, match="not of this round"):
        masking.receive(fresh, one, others)
    ready = masking.receive(kept[one], one, others)
    with pytest.raises(ValueError, match="not of this round"):  # twice
        masking.receive(ready, one, others)
    flags = {client: torch.tensor(True) for client in CLIENTS}
    few = {client: torch.tensor(client in CLIENTS[:5]) for client in CLIENTS}
    for wrong, said in (({one: flags[one]}, "not of this round"), (few, "a sum of 5 clients")):
        with pytest.raises(ValueError, match=said):
            masking.reveal(ready, one, wrong)
    some = masking.reveal(ready, one, {client: torch.tensor(client not in GONE) for client in CLIENTS})
    assert {len(share) for share in some.values()} == {33}  # of each client one share, never both


def test_a_share_that_was_changed_is_found_out():
    kept, keys, sealed = shared()
    kept = received(kept, sealed, CLIENTS)
    there = [client for client in CLIENTS if client not in GONE]
    masked = {c: with_masks(numbers(c, 5, 32), kept[c], c) for c in there}
    flags = {client: torch.tensor(client in there) for client in CLIENTS}
    for of in ("site 0", "site 4"):
        opened = {client: dict(masking.reveal(kept[client], client, flags)) for client in there}
        opened["site 2"][of] = opened["site 2"][of] ^ 1
        with pytest.raises(ValueError, match=rf"'{of}'|not enough"):
            masking.opened_sum(masked, keys, CLIENTS, opened)


# -- numbers -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bits", [16, 32, 64])
def test_sums_at_the_bound_do_not_overflow_and_the_rounding_is_as_stated(bits):
    clients = 50
    point = FixedPoint(clip=2.0, bits=bits, clients=clients)
    draw = torch.Generator().manual_seed(0)
    rows = (4 * torch.rand(clients, 30, generator=draw, dtype=torch.float64) - 2).clamp(-2, 2)
    rows[:, 0], rows[:, 1] = 2.0, -2.0
    shares = torch.rand(clients, generator=draw, dtype=torch.float64)
    shares /= shares.sum()
    whole = [point.encode([row], float(share)) for row, share in zip(rows, shares, strict=True)]
    total = sum(whole, np.zeros(31, f"u{bits // 8}"))
    error = (point.decode(total) - (shares[:, None] * rows).sum(0)).abs().max()
    assert float(error) <= point.clip * clients / (2 * point.levels) + 1e-14
    assert point.clipped(total, clients) == 0.0
    assert torch.equal(to_wire(total, bits), torch.from_numpy(total.view(f"i{bits // 8}").copy()))
    assert np.array_equal(from_wire(to_wire(total, bits), bits), total)


def test_what_is_beyond_the_bound_is_cut_and_counted():
    point = FixedPoint(clip=1.0, bits=32, clients=3)
    rows = [torch.tensor([5.0, 0.5, -0.5, 0.0]), torch.tensor([0.0, -9.0, -3.0, 0.0]), torch.zeros(4)]
    total = sum((point.encode([row], 1 / 3) for row in rows), np.zeros(5, "u4"))
    assert torch.allclose(point.decode(total), torch.tensor([1.0, -0.5, -1.5, 0.0], dtype=torch.float64) / 3, atol=1e-8)
    assert point.clipped(total, 3) == pytest.approx(3 / 12, rel=1e-6)
    assert point.clipped(point.encode([torch.tensor([2.0] + 9999 * [0.0])], 0.0), 1) > 0  # one of many is told, too


def test_a_nan_does_not_become_a_number():
    with pytest.raises(ValueError, match="NaN"):
        FixedPoint(1.0, 32, 3).encode([torch.tensor([float("nan")])], 0.5)


def test_thresholds_are_held_to_the_client():
    """Half of the clients, of which two sums could be opened, and one client fewer than the threshold."""
    eight = CLIENTS[:8]
    own, keys = {}, {}
    for client in eight:
        own[client], keys[client] = masking.advertise()
    with pytest.raises(ValueError, match="8 keys came for a threshold of 4"):
        masking.share(own[eight[0]], eight[0], keys, 4)
    kept, _, sealed = shared()
    one = CLIENTS[0]
    with pytest.raises(ValueError, match="5 clients have shared secrets, and 6"):
        masking.receive(kept[one], one, {other: sealed[other][one] for other in CLIENTS[1:5]})
    assert (
        masking.receive(kept[one], one, {other: sealed[other][one] for other in CLIENTS[1:6]})["round"] == CLIENTS[:6]
    )


def test_a_client_opens_no_sum_that_it_is_not_in():
    kept, _, sealed = shared()
    one = CLIENTS[0]
    ready = received(kept, sealed, CLIENTS)[one]
    with pytest.raises(ValueError, match="a sum of 8 clients is to be opened"):
        masking.reveal(ready, one, {client: torch.tensor(client != one) for client in CLIENTS})


def test_keys_of_another_purpose_are_others():
    own, public = masks.new_seed(), {"b": masks.public_key(masks.new_seed())}
    assert masks.agreed(own, public, "mask") != masks.agreed(own, public, "shares")
