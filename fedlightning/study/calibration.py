"""How far predicted probabilities can be believed, and whether acting on them does more good than harm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIN_EVENTS = 5
"""Fewest samples with and without the event of which a slope is given."""
BINS = 5
"""Bins of a calibration curve, with about as many samples in each."""
THRESHOLDS = tuple(round(0.01 * step, 2) for step in range(1, 100))
_EDGE = 1e-6  # probabilities of 0 and 1 have no logit


@dataclass(frozen=True)
class Calibration:
    r"""How probabilities of an event and what happened go together.

    Logistic recalibration (Cox 1958) fits :math:`\operatorname{logit} P(y = 1) = a + b \operatorname{logit} p`. Perfect
    probabilities have :math:`a = 0, b = 1`; :math:`b < 1` says that predictions are too extreme.

    Attributes:
        samples: Number of samples.
        events: Samples with the event.
        expected: Mean probability.
        slope: The slope :math:`b`; `None` with fewer than `MIN_EVENTS` samples of either kind, or where one probability
            parts the two kinds.
        intercept: The intercept :math:`a` beside that slope.
        in_the_large: The intercept where the slope is held at 1 (calibration in the large); `None` without both kinds.
        brier: Mean of :math:`(p - y)^2`.
        ece: Mean distance of confidence and frequency over 15 bins of equal width, weighted by their samples.
        auroc: Area under the ROC curve; `None` without both kinds.
    """

    samples: int
    events: int
    expected: float
    slope: float | None
    intercept: float | None
    in_the_large: float | None
    brier: float
    ece: float
    auroc: float | None

    @property
    def observed(self) -> float:
        """Share of samples with the event."""
        return self.events / self.samples


def calibration(events: np.ndarray, probabilities: np.ndarray) -> Calibration:
    """Return the calibration of probabilities.

    Args:
        events: 1 where the event happened, else 0, shape `(n,)`.
        probabilities: Predicted probability of it, shape `(n,)`.

    Raises:
        ValueError: If there is no sample, or a value is not a probability.

    Example:
        >>> events, probabilities = np.array([0, 1] * 20), np.array([0.4, 0.6] * 10 + [0.6, 0.4] * 10)
        >>> found = calibration(events, probabilities)
        >>> abs(round(found.slope, 6)), found.observed, round(found.expected, 6)  # they tell nothing
        (0.0, 0.5, 0.5)
    """
    y, p = np.asarray(events, dtype=np.float64), np.asarray(probabilities, dtype=np.float64)
    if not len(y) or not ((p >= 0) & (p <= 1)).all():
        raise ValueError(
            f"{len(y)} probabilities from {np.min(p, initial=0)} to {np.max(p, initial=0)} are none in [0, 1]."
        )
    happened = int(y.sum())
    both = 0 < happened < len(y)
    slope, intercept = _recalibrated(y, p) if min(happened, len(y) - happened) >= MIN_EVENTS else (None, None)
    return Calibration(
        len(y), happened, float(p.mean()), slope, intercept, _in_the_large(y, p) if both else None,
        float(np.mean((p - y) ** 2)), _ece(y, p), _auroc(y, p) if both else None,
    )  # fmt: skip


RESAMPLES = 200
"""Resamples of the patients, of which intervals are percentiles."""
INTERVALS = ("slope", "in_the_large", "brier", "auroc")
"""Fields of `Calibration` that have intervals."""


def calibration_intervals(
    pairs: Sequence[tuple[np.ndarray, np.ndarray]], seed: int = 0
) -> dict[str, list[float] | None]:
    """Return `FIELD_ci95` of each field in `INTERVALS`: 95 % percentiles over resamples of the patients.

    A field that more than a tenth of the resamples lack, as a slope of a few events, has none.

    Args:
        pairs: Events and probabilities of each seed; a statistic is the mean over seeds. Seeds of as many patients resample
            the same ones.
        seed: Seed of the resamples.
    """
    draws: dict[str, list[float]] = {name: [] for name in INTERVALS}
    for number in range(RESAMPLES):
        drawn = []
        for y, p in pairs:
            rows = np.random.default_rng([seed, number, len(y)]).integers(0, len(y), len(y))
            drawn.append(calibration(y[rows], p[rows]))
        for name, values in draws.items():
            scores = [value for sample in drawn if (value := getattr(sample, name)) is not None]
            if len(scores) == len(drawn):
                values.append(float(np.mean(scores)))
    ends = {
        name: [float(end) for end in np.quantile(values, [0.025, 0.975])] if len(values) >= 0.9 * RESAMPLES else None
        for name, values in draws.items()
    }
    return {f"{name}_ci95": pair for name, pair in ends.items()}


def wilson(share: float, samples: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share (JASA 1927).

    Example:
        >>> tuple(round(end, 3) for end in wilson(1.0, 16))
        (0.806, 1.0)
    """
    z = 1.959964
    centre = (share + z * z / (2 * samples)) / (1 + z * z / samples)
    radius = z / (1 + z * z / samples) * np.sqrt(share * (1 - share) / samples + z * z / (4 * samples**2))
    return max(0.0, float(centre - radius)), min(1.0, float(centre + radius))


def curve(events: np.ndarray, probabilities: np.ndarray, bins: int = BINS) -> list[tuple[float, float]]:
    """Return (mean probability, share of events) of bins with about as many samples each, as scikit-learn's quantile bins.

    Example:
        >>> curve(np.array([0, 0, 1, 1]), np.array([0.1, 0.2, 0.7, 0.8]), bins=2)
        [(0.15, 0.0), (0.75, 1.0)]
    """
    from sklearn.calibration import calibration_curve

    shares, means = calibration_curve(events, probabilities, n_bins=bins, strategy="quantile")
    return [(round(float(mean), 12), float(share)) for mean, share in zip(means, shares, strict=True)]


def net_benefit(
    events: np.ndarray, probabilities: np.ndarray, thresholds: Sequence[float] = THRESHOLDS
) -> list[tuple[float, float, float]]:
    r"""Return (threshold, net benefit, that of treating all) for each threshold (Vickers & Elkin 2006); of none it is 0.

    .. math:: \frac{\text{true positives}}{n} - \frac{\text{false positives}}{n} \frac{t}{1 - t}

    Example:
        >>> net_benefit(np.array([0, 0, 1, 1]), np.array([0.1, 0.6, 0.7, 0.8]), [0.5])
        [(0.5, 0.25, 0.0)]
    """
    y, p = np.asarray(events, dtype=bool), np.asarray(probabilities)
    points = []
    for t in thresholds:
        treated, odds = p >= t, t / (1 - t)
        gain = float((treated & y).mean() - (treated & ~y).mean() * odds)
        points.append((float(t), gain, float(y.mean() - (~y).mean() * odds)))
    return points


def _recalibrated(y: np.ndarray, p: np.ndarray) -> tuple[float | None, float | None]:
    """Return slope and intercept of the logistic regression on the logit by Newton's method; `None` where there is none."""
    x = _logit(p)
    with_event, without = x[y == 1], x[y == 0]
    if with_event.min() >= without.max() or with_event.max() <= without.min():  # separated: the slope is infinite
        return None, None
    design, beta = np.stack([np.ones_like(x), x], axis=1), np.zeros(2)
    for _ in range(100):
        fitted = _expit(design @ beta)
        information = design.T @ (design * (fitted * (1 - fitted))[:, None])
        if np.linalg.cond(information) > 1e14:  # all probabilities are one
            return None, None
        step = np.linalg.solve(information, design.T @ (y - fitted))
        beta = beta + step * min(1.0, 5.0 / max(float(np.abs(step).max()), 1e-300))
        if np.abs(step).max() < 1e-10:
            return float(beta[1]), float(beta[0])
    return None, None


def _in_the_large(y: np.ndarray, p: np.ndarray) -> float:
    from scipy.optimize import brentq

    x, events = _logit(p), y.sum()
    return float(brentq(lambda a: _expit(a + x).sum() - events, -60, 60, xtol=1e-12))


def _logit(p: np.ndarray) -> np.ndarray:
    inside = np.clip(p, _EDGE, 1 - _EDGE)
    return np.asarray(np.log(inside / (1 - inside)))


def _expit(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-np.clip(x, -700, 700))))


def _ece(y: np.ndarray, p: np.ndarray) -> float:
    """Return the expected calibration error of the event's probability, in 15 bins closed above as torchmetrics'."""
    gaps = np.bincount(np.clip(np.ceil(p * 15).astype(int) - 1, 0, 14), weights=p - y)
    return float(np.abs(gaps).sum() / len(y))


def _auroc(y: np.ndarray, p: np.ndarray) -> float:
    from scipy.stats import rankdata

    events = y.sum()
    return float((rankdata(p)[y == 1].sum() - events * (events + 1) / 2) / (events * (len(y) - events)))
