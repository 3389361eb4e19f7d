"""Arithmetic on entries is done on real numbers, and the room of tensors says how they are had."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fedlightning.tensors import add_row, distance, narrow, to_row, widen

ROOT = Path(__file__).parents[2]
CAST = re.compile(r"\.(double|float)\(\)|\.to\(torch\.float(32|64)\b")
"""A cast that forgets the imaginary part of a complex number."""
NO_ENTRIES = {
    "callbacks/attacks/backdoor.py",
    "callbacks/compression.py",
    "callbacks/diagnostics/layer_diagnostics.py",
    "callbacks/dsfl.py",
    "callbacks/fccl.py",
    "callbacks/fd.py",
    "callbacks/fedet.py",
    "callbacks/fedkd.py",
    "callbacks/fedtype.py",
    "callbacks/flde.py",
    "callbacks/gpfl.py",
    "callbacks/harmony.py",
    "callbacks/hetlora.py",
    "callbacks/pfedla.py",
    "callbacks/pi_fl.py",
    "callbacks/shared/contributions.py",
    "callbacks/sample_dp.py",
    "callbacks/shared/distillation.py",
    "callbacks/shared/fixed_point.py",
    "callbacks/shared/ensemble_fusion.py",
    "callbacks/shared/low_rank.py",
    "callbacks/shared/gossip.py",
    "callbacks/shared/mutual.py",
    "callbacks/shared/prototypes.py",
    "callbacks/shared/blocks.py",
    "callbacks/shared/record_gradients.py",
    "callbacks/shared/representations.py",
    "fedlightning/stacked/logs.py",
    "fedlightning/stacked/scoring.py",
    "fedlightning/experiments/reproduce/measures.py",
    "fedlightning/guards/explosions.py",
    "fedlightning/client/probes.py",
    "fedlightning/client/logged_metrics.py",
}
"""Files in which such casts are of logits, features, losses, scores, codes or keys. This list may only shrink."""


def test_casts_of_entries_are_made_by_the_room_of_tensors() -> None:
    casting = {
        str(path.relative_to(ROOT))
        for top in ("callbacks", "fedlightning")
        for path in (ROOT / top).rglob("*.py")
        if not {"tensors", "models", "study", "leakage"} & set(path.relative_to(ROOT).parts)
        and CAST.search(path.read_text())
    }
    assert casting <= NO_ENTRIES, f"Use widen and narrow of fedlightning.tensors in {sorted(casting - NO_ENTRIES)}."
    assert casting >= NO_ENTRIES, f"Take {sorted(NO_ENTRIES - casting)} off the list: nothing is cast there."


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_an_entry_is_its_real_numbers(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    entry = torch.randn(shape, dtype=dtype)
    assert torch.equal(narrow(widen(entry), entry), entry)
    assert torch.equal(narrow(widen(entry).flatten(), entry), entry)
    assert to_row({"a": entry}).numel() == entry.numel() * (2 if dtype.is_complex else 1)
    state = {"a": entry, "b": torch.ones(2)}
    assert all(torch.equal(moved, state[name]) for name, moved in add_row(state, 0 * to_row(state)).items())


def test_distances_count_imaginary_parts() -> None:
    assert distance({"w": torch.tensor([3 + 4j])}, {"w": torch.tensor([0j])}) == 5.0
