"""Which runs may be compared: those on the same splits, with the same rounds and clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fedlightning.study.finished_runs import Run

Sampling = Literal["training", "splits", "folds"]
SAMPLED: Mapping[Sampling, str] = {
    "training": "Intervals and p-values (paired t-test) are for this test set.",
    "splits": "Their test sets overlap, so intervals and p-values are of the corrected resampled t-test (Nadeau & Bengio "
    "2003).",
    "folds": "Each tests another of disjoint folds of the same samples: intervals and p-values (paired t-test) are over "
    "folds.",
}
"""What seeds change -> which test that takes, in a sentence."""
SAMPLED_CROSSED = (
    "Intervals and p-values are of an analysis of variance by source: runs that share a seed vary together."
)


def sampling(runs: Sequence[Run], split: str) -> Sampling:
    """Return what the seeds of a study change: training alone, the split, or which fold of the data is tested.

    Folds are known by the option `fold` or `..._fold` of the data, another at every seed, where the tested samples of all
    seeds are no more than there are.
    """
    if len({fingerprint(run, split) for run in runs}) < 2:
        return "training"
    folds = {run.seed: fold for run in runs if (fold := _fold(run.config)) is not None}
    tested = {run.seed: _samples(run, split) for run in runs}
    disjoint = len(set(folds.values())) == len(tested) and sum(tested.values()) <= sum(
        _samples(runs[0], name) for name in ("train", "val", "test")
    )
    return "folds" if disjoint else "splits"


def test_share(runs: Sequence[Run], split: str) -> float:
    """Return the mean over runs of samples tested for each that training and validation had; 1 if a run does not tell."""
    shares = [
        _samples(run, split) / samples if (samples := _samples(run, "train") + _samples(run, "val")) else 1.0
        for run in runs
    ]
    return sum(share or 1.0 for share in shares) / len(shares)


def _samples(run: Run, split: str) -> int:
    return sum(counts.get(split) or 0 for counts in run.summary.get("data", {}).get("clients", {}).values())


def _fold(config: Mapping[str, Any]) -> str | None:
    init_args = (config.get("data") or {}).get("init_args") or {}
    return next((str(value) for key, value in init_args.items() if key.split("_")[-1] == "fold"), None)


def fingerprint(run: Run, split: str, by_size: bool = False) -> str:
    """Return a text that is equal for two runs that were scored on the same `split`, at the same clients of it.

    Runs that wrote no fingerprint are told apart by the sizes of their clients (`by_size`).
    """
    digest = None if by_size else _written(run, split)
    text = str(digest) if digest is not None else f"sizes {sorted(run.summary.get('num_samples', {}).items())}"
    scored = run.summary.get("evaluation", {})
    if split == "val":  # a run can be tested at other clients than those it was validated at
        scored = scored.get("in_training", scored)
    who = scored.get("who")
    return text if who is None or split == "train" else f"{text}, scored at {who}"


def fingerprints(runs: Sequence[Run], split: str) -> list[str]:
    """Return texts that are equal where runs were scored on the same `split`; by sizes where a private one does not tell."""
    by_size = any(_written(run, split) is None for run in runs)
    return [fingerprint(run, split, by_size) for run in runs]


def _written(run: Run, split: str) -> Any:
    return run.summary.get("data", {}).get("splits", {}).get(split)


def odd_splits(runs: Sequence[Run], split: str) -> dict[tuple[str, int], Run]:
    """Find the runs whose `split` is not the one that most runs of the same seed have.

    Of several equally frequent splits, the one that comes first counts as the usual one.
    """
    by_seed: dict[int, list[Run]] = {}
    for run in runs:
        by_seed.setdefault(run.seed, []).append(run)
    odd: dict[tuple[str, int], Run] = {}
    for seed, members in by_seed.items():
        texts = fingerprints(members, split)
        usual = Counter(texts).most_common(1)[0][0]
        example = members[texts.index(usual)]
        odd |= {(run.name, seed): example for run, text in zip(members, texts, strict=True) if text != usual}
    return odd


def why_not(run: Run, baseline: Run) -> str | None:
    """Return in a few words why two runs of one seed cannot be compared, or `None` if they can."""
    counts = [other.summary.get("num_clients", len(other.clients)) for other in (run, baseline)]
    listed = counts == [len(run.clients), len(baseline.clients)]  # else those that took part, of very many
    if counts[0] != counts[1] or (listed and run.clients != baseline.clients):
        return f"other clients ({len(run.clients)} against {len(baseline.clients)})"
    for split in ("test", "train", "val"):
        if len(set(fingerprints([run, baseline], split))) > 1:
            return f"another {split} split"
    rounds, others = run.summary.get("rounds"), baseline.summary.get("rounds")
    return f"{rounds} rounds against {others}" if rounds != others else None
