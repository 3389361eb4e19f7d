"""A study: methods x seeds on the same data, and every number that a comparison of them needs.

>>> from fedlightning.study.runs import load_study
>>> study = Study(load_study(["runs/heart"]), metric="accuracy")  # doctest: +SKIP
>>> study.overview()[0]["mean"], study.problems  # doctest: +SKIP

What each number means, and where it comes from: docs/evaluation.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from fedlightning.scoring.metrics import bare, higher_is_better
from fedlightning.study import baselines, costs, curves, differences, incentives, overview, scores
from fedlightning.study.export import write_comparison
from fedlightning.study.measures import Estimate, RunScores, SeedScore, estimate
from fedlightning.study.problems import Problem, find_problems, fingerprint, odd_splits
from fedlightning.study.ranks import ranks, seed_ranks
from fedlightning.study.runs import DEPLOYED, Run

__all__ = ["Problem", "Study", "Table", "ranks", "seed_ranks", "write_comparison"]

Table = list[dict[str, Any]]
"""Lines of a table, each with the same keys and plain values, ready for JSON, CSV and a page."""


class Study:
    """Runs of several methods and seeds.

    Seeds are averaged per method; a seed whose run diverged leaves the mean empty, and a seed that was tested on other
    data than the rest is left out of it where the method has others. A confidence interval needs two seeds.

    Args:
        runs: what :func:`fedlightning.study.runs.load_study` returns.
        metric: the score to compare, with or without its split's prefix.
        checkpoint: which models are compared: ``"deployed"`` (each client's ``best_local`` model if the run has one, else
            the latest as received), or one checkpoint for all (``"latest"``, ``"best_local"``, ``"best_global"``).
        confidence: of intervals; their columns are called ``ci95`` whatever it is.
        interval: ``"t"`` (Student) or ``"bootstrap"`` (percentiles of 1000 seeded resamples).
        split: the split that is compared.

    Attributes:
        methods: names in the order given, baselines that ``compare`` added last; seeds: of all runs, ascending.
        finished: (method, seed) -> scores, of every run that has a result.
        odd: (method, seed) of runs on other test data than most of that seed -> one of those.

    Raises:
        ValueError: if there is no run, or no run has the metric or the checkpoint.
    """

    def __init__(
        self,
        runs: Iterable[Run],
        metric: str = "accuracy",
        checkpoint: str = DEPLOYED,
        confidence: float = 0.95,
        interval: str = "t",
        split: str = "test",
    ) -> None:
        self.runs = list(runs)
        if not self.runs:
            raise ValueError("There is no run to compare. Give run folders, or the --out folder of a compare.")
        self.metric = bare(metric)
        self.checkpoint = checkpoint
        self.confidence = confidence
        self.interval = interval
        self.split = split
        names = dict.fromkeys(run.name for run in self.runs)
        added = {run.name for run in self.runs if run.baseline}
        self.methods = [*(name for name in names if name not in added), *(name for name in names if name in added)]
        self.seeds = sorted({run.seed for run in self.runs})
        self.finished = {(run.name, run.seed): RunScores(run) for run in self.runs if run.error is None}
        self.odd = odd_splits([found.run for found in self.finished.values()], split)
        self._check_metric()
        self._check_checkpoint()

    def _check_metric(self) -> None:
        known = [found.metrics(self.split) for found in self.finished.values()]
        if known and not any(self.metric in metrics for metrics in known):
            have = ", ".join(dict.fromkeys(metric for metrics in known for metric in metrics)) or "none"
            raise ValueError(
                f"No run has a score '{self.metric}' on {self.split} data; there is: {have}. Choose one of these, or test "
                "the runs first."
            )

    def _check_checkpoint(self) -> None:
        rows = [score.row for found in self.finished.values() for score in found if score.row["split"] == self.split]
        known = list(dict.fromkeys(str(row["checkpoint"]) for row in rows))
        if known and self.checkpoint not in (DEPLOYED, *known):
            raise ValueError(
                f"No run has scores of a checkpoint '{self.checkpoint}' on {self.split} data; there is: {DEPLOYED}, "
                f"{', '.join(known)}."
            )

    # -- what there is ---------------------------------------------------------------------------------------------

    @property
    def higher_is_better(self) -> bool:
        """Whether more of the metric is better."""
        return higher_is_better(self.metric)

    @cached_property
    def problems(self) -> list[Problem]:
        """Everything a reader must know before believing the tables."""
        return find_problems(self)

    @cached_property
    def baselines(self) -> dict[str, str]:
        """Role (``siloed``, ``fedavg``, ``finetuned``, ``central``) -> the method that plays it, where there is one."""
        return baselines.choose(self)

    @cached_property
    def baseline_problems(self) -> list[Problem]:
        """Methods that cannot be measured against a baseline, and baselines that are not there."""
        return baselines.problems(self)

    def role(self, method: str) -> str | None:
        """The baseline role that ``method`` was chosen for."""
        return next((role for role, name in self.baselines.items() if name == method), None)

    def comparable(self, method: str) -> bool:
        """Whether any finished run of ``method`` is on the same test data as most."""
        return any(name == method and (name, seed) not in self.odd for name, seed in self.finished)

    def seeds_of(self, method: str) -> list[int]:
        """Seeds that a method's means are taken over: comparable ones; all finished ones if none is."""
        done = [seed for seed in self.seeds if (method, seed) in self.finished]
        return [seed for seed in done if (method, seed) not in self.odd] or done

    @property
    def seed_text(self) -> str:
        """What the seeds change, in a sentence for the tables."""
        listed = ", ".join(str(seed) for seed in self.seeds)
        if len(self.seeds) == 1:
            return f"One seed ({listed}): no interval over seeds."
        changed = [words for split, words in _SPLIT_WORDS.items() if self._varies(split)]
        same = [words for split, words in _SPLIT_WORDS.items() if not self._varies(split)]
        text = f"{len(self.seeds)} seeds ({listed}): they change {_listed(['the initialisation and batch order', *changed])}"
        return f"{text}; {_listed(same)} {'stays' if len(same) == 1 else 'stay'} the same." if same else f"{text}."

    def _varies(self, split: str) -> bool:
        """Whether a seed changes ``split`` in any method."""
        for method in self.methods:
            found = {fingerprint(self.finished[method, seed].run, split) for seed in self.seeds_of(method)}
            if len(found) > 1:
                return True
        return False

    # -- scores ----------------------------------------------------------------------------------------------------

    def find(
        self, method: str, metric: str | None = None, every_seed: bool = False, **where: Any
    ) -> dict[int, SeedScore]:
        """One row of each seed's run that has it.

        Args:
            method: its name; metric: default the study's.
            every_seed: also of runs on other test data.
            where: arguments of :meth:`fedlightning.study.runs.Run.result`.
        """
        where = {"split": self.split} | where
        seeds = self.seeds if every_seed else self.seeds_of(method)
        found = {}
        for seed in seeds:
            if (method, seed) in self.finished:
                score = self.finished[method, seed].find(metric or self.metric, **where)
                if score is not None:
                    found[seed] = score
        return found

    def deployed(self, method: str, every_seed: bool = False, **where: Any) -> dict[int, SeedScore]:
        """Scores of the models the clients would use, by the study's checkpoint rule."""
        for model in ("personal", "global"):
            found = self.find(method, every_seed=every_seed, model=model, checkpoint=self.checkpoint, **where)
            if found or self.checkpoint == DEPLOYED:
                return found
        return {}

    def shared(self, method: str, **where: Any) -> dict[int, SeedScore]:
        """Scores of the global model: ``best_global`` if there is one (and the study's rule is not ``"latest"``)."""
        rule = "latest" if self.checkpoint == "latest" else DEPLOYED
        return self.find(method, model="global", checkpoint=rule, **where)

    def estimate(self, values: Sequence[float | None]) -> Estimate:
        """Mean and interval over seeds."""
        return estimate(values, self.confidence, self.interval)

    # -- tables ----------------------------------------------------------------------------------------------------

    def overview(self) -> Table:
        """One line a method; see :func:`fedlightning.study.overview.overview`."""
        return overview.overview(self)

    def results(self) -> Table:
        """Every score of every method; see :func:`fedlightning.study.scores.results`."""
        return scores.results(self)

    def measured(self) -> Table:
        """Every metric of the deployed models; see :func:`fedlightning.study.scores.measured`."""
        return scores.measured(self)

    def stages(self) -> Table:
        """Before and after aggregation; see :func:`fedlightning.study.scores.stages`."""
        return scores.stages(self)

    def checkpoints(self) -> Table:
        """Latest and selected models; see :func:`fedlightning.study.scores.checkpoints`."""
        return scores.checkpoints(self)

    def clients(self) -> Table:
        """Each client with each method; see :func:`fedlightning.study.scores.clients`."""
        return scores.clients(self)

    def matrix(self, method: str) -> dict[str, Any]:
        """The cross-client matrix of a method; see :func:`fedlightning.study.scores.matrix`."""
        return scores.matrix(self, method)

    def partition(self) -> Table:
        """Who holds what; see :func:`fedlightning.study.scores.partition`."""
        return scores.partition(self)

    def fairness(self, thresholds: Sequence[float] | None = None) -> Table:
        """Spread, incentives, thresholds; see :func:`fedlightning.study.incentives.fairness`."""
        return incentives.fairness(self, thresholds)

    def appeal(self) -> Table:
        """Personal model appeal, client by client; see :func:`fedlightning.study.incentives.appeal`."""
        return incentives.appeal(self)

    def differences(self, reference: str | None = None) -> Table:
        """Paired differences over seeds; see :func:`fedlightning.study.differences.differences`."""
        return differences.differences(self, reference)

    def curves(self, metric: str | None = None) -> Table:
        """Validation curves; see :func:`fedlightning.study.curves.curves`."""
        return curves.curves(self, metric)

    def costs(self, target: float | None = None) -> Table:
        """What it costs to reach a target; see :func:`fedlightning.study.costs.costs`."""
        return costs.costs(self, target)


_SPLIT_WORDS = {"train": "the training split", "val": "the validation split", "test": "the test split"}


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
