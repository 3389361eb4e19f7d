"""The numbers that a cell may hold, each from a finished run's own files. Their keywords are the keys in YAML."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

from fedlightning.compat.system import file_name_of
from fedlightning.config.input_errors import suggestion
from fedlightning.errors import listed
from fedlightning.experiments.yaml_blocks import Block, Number
from fedlightning.ranges import Length, Natural, NonNegativeFloat, Range, Share
from fedlightning.scores.metric_names import bare, higher_is_better
from fedlightning.scores.rows import Row
from fedlightning.study.columns import GLOBAL, LOCAL, PERSONAL
from fedlightning.study.fairness_measures import spread
from fedlightning.study.finished_runs import Run, natural
from fedlightning.study.run_scores import RunScores

Runs = Mapping[str, Run]
"""Name of a run in the table -> the run with one seed."""
Checkpoint = Literal["deployed", "latest", "best_global", "best_local"]
Stage = Literal["G", "L1", "L2"]
Model = Literal["personal", "global", "unseen"]
Data = Literal["local", "pooled"]
Split = Literal["val", "test"]
Order = Annotated[float, Range("(1, inf)")]
CLIENT = "client:"
"""Before the id of a client in the column `data` of scores of all models on its data."""
OVER = ("mean", "weighted", "median", "worst", "best", "std", "variance", "tenth_percentile")
"""Statistics over clients; `client:NAME` is one client's own score."""


class NoValueError(ValueError):
    """A run does not have what a measure asks for. The message says what it has."""


@dataclass(frozen=True)
class Value:
    """A measured number.

    Attributes:
        number: The number; NaN if a model diverged.
        beyond: Whether it is only known to be larger, as the rounds to a target that was not reached.
        below: Whether it is only known to be smaller, as a ratio to such rounds.
    """

    number: float
    beyond: bool = False
    below: bool = False


@dataclass(frozen=True)
class Spec:
    """A measure as a table asks for it.

    Attributes:
        kind: Its kind.
        name: Its name in the table, else its options in words.
        options: Keywords of the function of that kind.
    """

    kind: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def runs(self) -> list[str]:
        """The further runs that it reads."""
        inner: list[str] = self.options["of"].runs if "of" in self.options else []
        return [*self._against, *inner]

    @property
    def _against(self) -> list[str]:
        runs = self.options.get("against", [])
        return [runs] if isinstance(runs, str) else list(runs)

    def list_readings(self, run: str | None) -> list[tuple[str, Spec]]:
        """Return what it reads in runs, itself or what it is of, each with its run, if it is measured in `run`."""
        runs = [*([] if run is None else [run]), *self._against]
        if "of" in self.options:
            return [reading for name in runs for reading in self.options["of"].list_readings(name)]
        return [(name, self) for name in runs]


# -- scores ------------------------------------------------------------------------------------------------------------
def score(
    run: Run,
    *,
    metric: str,
    checkpoint: Checkpoint = "deployed",
    model: Model | None = None,
    stage: Stage | None = None,
    data: Data = "local",
    split: Split = "test",
    over: str = "mean",
) -> Value:
    """Return a final score: of the models of one checkpoint and stage, as a statistic over clients.

    `model` is `global` for `checkpoint: best_global` and `stage: G`, else `personal`.
    """
    kind = model or _kind_of_model(checkpoint, stage)
    seed_score = RunScores(run).find(metric, split, kind, checkpoint, stage, data)
    if seed_score is None:
        metrics = sorted({bare(row["metric"]) for row in run.results if row["split"] == split})
        asked = ", ".join(filter(None, (kind, checkpoint, stage, data)))
        raise NoValueError(f"no {split} score '{metric}' ({asked}); the run has {', '.join(metrics) or 'none'}")
    if seed_score.diverged and not over.startswith("client:"):
        return Value(math.nan)
    weighted = seed_score.weighted_mean
    return Value(_over(seed_score.defined, over, metric, math.nan if weighted is None else weighted))


def offered(
    run: Run, *, client: str, metric: str, checkpoint: Checkpoint = "deployed", stage: Stage | None = None
) -> Value:
    """Return the mean score over all clients' test data of the model of one client, offered to all (FENDA-FL, table 2).

    The run needs `evaluation.test_data: [local, clients]`.
    """
    scores = RunScores(run)
    others = sorted({row["data"] for row in run.results if str(row["data"]).startswith(CLIENT)})
    places = [LOCAL, *(place for place in others if place != f"{CLIENT}{client}")]
    rows = [scores.find(metric, "test", PERSONAL, checkpoint, stage, place) for place in places]
    if any(row is not None and client in row.diverged for row in rows):
        return Value(math.nan)
    values = [None if row is None else row.defined.get(client) for row in rows]
    if not others or None in values:
        raise NoValueError(
            f"no test scores '{metric}' of the model of client '{client}' on the data of all clients; "
            "set trainer.evaluation.test_data: [local, clients]"
        )
    return Value(sum(map(float, values)) / len(values))  # type: ignore[arg-type]  # none is None


def at_round(
    run: Run, *, metric: str, round: int, stage: Stage = "G", data: Data = "local", over: str = "mean"
) -> Value:
    """Return the score of one round (on validation data; with `test_curve`, on test data)."""
    curve = _curve(run, metric, stage, data, over)
    if round not in curve:
        raise NoValueError(f"no score of round {round}; it has rounds {min(curve)} to {max(curve)}")
    return Value(curve[round])


def best_round(
    run: Run, *, metric: str, stage: Stage = "G", data: Data = "local", over: str = "mean", until: int | None = None
) -> Value:
    """Return the best score over all rounds, or over those until one."""
    curve = _curve(run, metric, stage, data, over)
    values = [value for number, value in curve.items() if until is None or number <= until]
    defined = [value for value in values if not math.isnan(value)]
    return Value(math.nan if not defined else max(defined) if higher_is_better(metric) else min(defined))


def rounds_to(
    run: Run, *, metric: str, target: Number, stage: Stage = "G", data: Data = "local", over: str = "mean"
) -> Value:
    """Return the rounds until the best score so far reaches a target, interpolated between rounds (McMahan et al. 2017).

    The curve is made monotone: each round has the best score of all rounds until it. A target that is not reached takes more
    rounds than the run has.
    """
    curve = _curve(run, metric, stage, data, over)
    return rounds_until(list(curve), list(curve.values()), target, higher_is_better(metric))


def rounds_until(rounds: Sequence[int], scores: Sequence[float], target: float, higher: bool = True) -> Value:
    """Return where a curve first reaches a target.

    Example:
        >>> round(rounds_until([1, 2, 3, 4], [0.5, 0.9, 0.7, 1.0], target=0.95).number, 6)
        3.5
        >>> rounds_until([1, 2], [0.5, 0.9], target=0.95)
        Value(number=2.0, beyond=True, below=False)
    """
    sign = 1.0 if higher else -1.0
    goal, best, before = sign * target, -math.inf, 0
    for number, value in zip(rounds, scores, strict=True):
        highest = best if math.isnan(value) else max(best, sign * value)
        if highest >= goal:
            share = 1.0 if math.isinf(best) else (goal - best) / (highest - best)
            return Value(before + share * (number - before))
        best, before = highest, number
    return Value(float(rounds[-1]), beyond=True)


def gaining_share(
    run: Run,
    *,
    against: Sequence[Run],
    metric: str,
    checkpoint: Checkpoint = "deployed",
    stage: Stage | None = None,
    data: Data = "local",
) -> Value:
    """Return the share of clients that score strictly better than in each of one or more other runs.

    Against local training and FedAvg it is PLayer-FL's incentivised participation rate (equation A.6).
    """
    gains = _of_clients(lambda score, *others: score > max(others), [run, *against], metric, checkpoint, stage, data)
    return Value(sum(gains) / len(gains))


def opt_outs(
    run: Run,
    *,
    against: Run,
    metric: str,
    checkpoint: Checkpoint = "deployed",
    stage: Stage | None = None,
    data: Data = "local",
) -> Value:
    """Return the share of clients that score strictly worse than in another run (PI-FL, equation 15, against FedAvg)."""
    losses = _of_clients(lambda score, other: score < other, [run, against], metric, checkpoint, stage, data)
    return Value(sum(losses) / len(losses))


def clients_below(
    run: Run,
    *,
    metric: str,
    bar: Number,
    checkpoint: Checkpoint = "deployed",
    stage: Stage | None = None,
    data: Data = "local",
) -> Value:
    """Return how many clients score below a bar, or above it where lower is better (FLIU, figure 8)."""
    limit = _sign(metric) * bar
    return Value(sum(_of_clients(lambda score: score < limit, [run], metric, checkpoint, stage, data)))


def _sign(metric: str) -> float:
    return 1.0 if higher_is_better(metric) else -1.0


def _of_clients(
    holds: Callable[..., bool], runs: Sequence[Run], metric: str, checkpoint: str, stage: str | None, data: str
) -> list[float]:
    """Return for each client that has a score in all runs whether something holds of its scores, 0 or 1.

    Higher scores are better: those of other metrics have the other sign. It is NaN where a model diverged, so that a run
    gains nothing by losing clients.
    """
    kind = _kind_of_model(checkpoint, stage)
    rows = [RunScores(run).find(metric, "test", kind, checkpoint, stage, data) for run in runs]
    tables = [{**row.defined, **dict.fromkeys(row.diverged, math.nan)} for row in rows if row is not None]
    shared = [client for client in (tables or [{}])[0] if all(client in table for table in tables)]
    if None in rows or not shared:
        names = ", ".join(run.name for run in runs)
        raise NoValueError(f"no test score '{metric}' that a client has in all of the runs {names}")
    values = [[_sign(metric) * table[client] for table in tables] for client in shared]
    return [math.nan if any(map(math.isnan, scores)) else float(holds(*scores)) for scores in values]


def _kind_of_model(checkpoint: str, stage: str | None) -> Model:
    """Return whose models a checkpoint and a stage are of."""
    return GLOBAL if checkpoint == "best_global" or stage == "G" else PERSONAL  # type: ignore[return-value]  # constants


# -- other numbers of a run --------------------------------------------------------------------------------------------
def logged(
    run: Run,
    *,
    metric: str,
    round: int | None = None,
    stage: Stage | None = None,
    model: Model | None = None,
    data: str | None = None,
    split: str | None = None,
    over: str = "mean",
) -> Value:
    """Return any value of `metrics.csv` by its full name, of one round or the last, as a statistic over clients."""
    labels = {"stage": stage, "model": model, "data": data, "split": split}
    rows = [row for row in run.rows if row.metric == metric and _is(row, labels)]
    if not rows:
        names = sorted({row.metric for row in run.rows})
        raise NoValueError(f"no '{metric}' like that in metrics.csv, which has {', '.join(names)}")
    last = max(row.round for row in rows) if round is None else round
    kept = {row.client: row for row in rows if row.round == last}
    return Value(_over_rows(kept, over, metric))


def summary(run: Run, *, key: str) -> Value:
    """Return a number of `summary.json` by its dotted key, as in `bytes_up` or `terms.own_steps`."""
    number: Any = run.summary
    for part in key.split("."):
        number = number.get(part) if isinstance(number, Mapping) else None
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise NoValueError(f"no number '{key}' in summary.json")
    return Value(float(number))


def entry(run: Run, *, name: str, client: str | None = None, index: list[int] | int = 0) -> Value:
    """Return one number of a trained model: of a client's exported model, or of the server's."""
    state = _state(run, client)
    if name not in state:
        raise NoValueError(f"no entry '{name}' in the model, which has {', '.join(state)}")
    values = state[name].double()
    return Value(float(values.flatten()[index] if isinstance(index, int) else values[tuple(index)]))


def model_size(run: Run, *, client: str | None = None) -> Value:
    """Return how many numbers an exported model holds: a client's, or the server's."""
    return Value(float(sum(values.numel() for values in _state(run, client).values())))


def model_norm(run: Run, *, client: str | None = None) -> Value:
    """Return the length of all numbers of an exported model, as one vector: a client's, or the server's."""
    return Value(math.sqrt(sum(float(values.double().square().sum()) for values in _state(run, client).values())))


# -- two runs ----------------------------------------------------------------------------------------------------------
def difference(run: Run, *, of: Callable[[Run], Value], against: Run) -> Value:
    """Return a measure of this run minus that of another one."""
    a, b = of(run), of(against)
    return Value(a.number - b.number, a.beyond or b.below, a.below or b.beyond)


def ratio(run: Run, *, of: Callable[[Run], Value], against: Run) -> Value:
    """Return a measure of this run divided by that of another one."""
    a, b = of(run), of(against)
    return Value(a.number / b.number if b.number else math.nan, a.beyond or b.below, a.below or b.beyond)


# -- no run ------------------------------------------------------------------------------------------------------------
def epsilon(
    *,
    q: Share,
    sigma: NonNegativeFloat,
    steps: Natural,
    delta: Annotated[float, Range("(0, 1)")],
    accountant: Literal["rdp", "prv"] = "rdp",
    orders: Annotated[list[Order], Length(1)] | None = None,
) -> Value:
    """Return the epsilon that ClientDP and SampleDP would count for a sampled Gaussian mechanism. No run is needed.

    `q` is the sampling rate, `sigma` the noise multiplier; `orders` are those of Rényi accounting.
    """
    from fedlightning.callbacks.shared.spending import spent_by

    return Value(spent_by(accountant, delta, ((sigma, q, steps),), tuple(orders or ())))


OF_TWO = (gaining_share, opt_outs, difference, ratio)
"""Kinds that read other runs, `against`: `gaining_share` one or more, the others one."""
OF_ONE = (
    score,
    offered,
    at_round,
    best_round,
    rounds_to,
    clients_below,
    logged,
    summary,
    entry,
    model_size,
    model_norm,
)
KINDS: dict[str, Callable[..., Value]] = {kind.__name__: kind for kind in (*OF_ONE, *OF_TWO, epsilon)}
"""Name of a kind of measure -> its function."""
SCORED = ("score", "offered", "at_round", "best_round", "rounds_to", "gaining_share", "opt_outs", "clients_below")
"""Kinds that read a score of the test or validation data by its name."""
CURVES = ("at_round", "best_round", "rounds_to")
"""Kinds that read the scores of rounds on validation data."""
TESTED = ("score", "offered", "gaining_share", "opt_outs", "clients_below")
"""Kinds that read final scores, on test data if nothing else is said."""
LOWER = ("rounds_to", "model_size", "epsilon", "opt_outs", "clients_below")
"""Kinds of which the lower value is the better one."""


def measure(spec: Spec, runs: Runs, run: str | None) -> Value:
    """Return the number that a measure finds in a run, or in several with one seed.

    Raises:
        NoValueError: If the run does not have it.
    """
    return _measure(spec, runs, *([] if run is None else [runs[run]]))


def _measure(spec: Spec, runs: Runs, *run: Run) -> Value:
    options = dict(spec.options)
    if "of" in options:
        options["of"] = partial(_measure, spec.options["of"], runs)
    if "against" in options:
        against = spec.options["against"]
        options["against"] = runs[against] if isinstance(against, str) else [runs[name] for name in against]
    return KINDS[spec.kind](*run, **options)


def fault_of(spec: Spec, config: Mapping[str, Any], clients: Collection[str]) -> str | None:
    """Return why a run of a configuration cannot have what a measure reads in it; `None`: it can.

    Args:
        spec: A measure that is of no other one.
        config: Complete configuration of the run.
        clients: Ids of its clients; empty: not known.
    """
    trainer, options = config["trainer"], spec.options
    evaluation, rounds = trainer["evaluation"], trainer["max_rounds"]
    every, number = evaluation["every"], options.get("round")
    if number is not None and not 1 <= number <= rounds:
        return f"reads round {number}, and the run has rounds 1 to {rounds}"
    if spec.kind in CURVES:
        stage, data = options.get("stage", "G"), options.get("data", LOCAL)
        if not every:
            return "reads scores of rounds, and trainer.evaluation.every is 0"
        for name, place in (("stages", stage), ("data", data)):
            if place not in evaluation[name]:
                return (
                    f"reads scores of rounds at {place}, and trainer.evaluation.{name} has {listed(evaluation[name])}"
                )
        if number is not None and number % every and number != rounds and evaluation["seconds"] is None:
            return f"reads round {number}, and trainer.evaluation.every={every} scores others"
    place = "clients" if spec.kind == offered.__name__ else options.get("data", LOCAL)
    tested = ("local", "pooled") if evaluation["test_data"] is None else evaluation["test_data"]
    if spec.kind in TESTED and options.get("split", "test") == "test" and place not in tested:
        return f"reads test scores on {place} data, and trainer.evaluation.test_data has {listed(tested)}"
    over = str(options.get("over", ""))
    client = options.get("client") or (over.removeprefix(CLIENT) if over.startswith(CLIENT) else None)
    if client is not None and clients and client not in clients:
        ids: list[str] = sorted(clients, key=natural)
        return f"is of client '{client}', and the clients are {listed(ids)}"
    return None


def better_is_higher(spec: Spec) -> bool:
    """Return whether the higher value of a measure is the better one."""
    if "of" in spec.options:
        return better_is_higher(spec.options["of"])
    if spec.kind in LOWER or spec.options.get("over") in ("std", "variance"):
        return False
    return "metric" not in spec.options or higher_is_better(spec.options["metric"])


def read_measure(entry: Any, at: Block, runs: Collection[str], measures: Mapping[str, Spec], name: str = "") -> Spec:
    """Return a measure as a table has it: by its name, or written out with a kind and the keywords of its function.

    Args:
        entry: The name, or the keywords.
        at: The block that it stands in.
        runs: Names of the table's runs.
        measures: The table's measures by name.
        name: Its own name in the table.

    Raises:
        InputError: If it has an unknown kind or key, lacks one, or names an unknown run.
    """
    if isinstance(entry, str) and entry in measures:
        return measures[entry]
    if not isinstance(entry, Mapping):
        hint = suggestion(str(entry), [*measures, *KINDS]) or f"There is {', '.join(measures or KINDS)}."
        raise at.error(f"has the measure {entry!r:.60}, which is none. {hint}")
    kind = str(entry.get("kind", "score"))
    options = {str(key): value for key, value in entry.items() if key != "kind"}
    place = f"measure '{name}'" if name else "measure"
    if kind not in KINDS:
        hint = suggestion(kind, KINDS) or f"Kinds: {', '.join(KINDS)}."
        raise at.error(f"has the {place} of kind '{kind}', which is none. {hint}")
    block = Block(options, at.file, f"the {place} ({kind}) of {at.where}")
    if KINDS[kind] in OF_TWO:
        several = KINDS[kind] is gaining_share
        options["against"] = block.take("against", Annotated[list[str], Length(1)] if several else str)
        for run in options["against"] if several else [options["against"]]:
            block.check_name(run, runs, "against")
    block.take_arguments(KINDS[kind], ["against"])
    if "of" in options:
        options["of"] = read_measure(options["of"], block, runs, measures)
        if options["of"].kind == epsilon.__name__:
            raise block.error(
                "is of an epsilon, which is of no run, so that two runs have the same. Give another measure."
            )
    over = options.get("over", "mean")
    if over not in OVER and not str(over).startswith("client:"):
        raise block.error(f"has over: {over}. Give {', '.join(OVER)} or client:NAME.")
    words = [
        value.name
        if isinstance(value, Spec)
        else " and ".join(value)
        if key == "against" and not isinstance(value, str)
        else str(value)
        for key, value in options.items()
    ]
    return Spec(kind, name or " ".join([*([] if kind == "score" else [kind.replace("_", " ")]), *words]), options)


# -- parts -------------------------------------------------------------------------------------------------------------
def _curve(run: Run, metric: str, stage: str, data: str, over: str) -> dict[int, float]:
    """Return round -> score of the latest models on validation data."""
    by_round: dict[int, dict[str, Row]] = {}
    where = {
        "stage": stage,
        "data": data,
        "split": "val",
        "checkpoint": "latest",
        "model": GLOBAL if stage == "G" else PERSONAL,
    }
    for row in run.rows:
        if bare(row.metric) == bare(metric) and _is(row, where):
            by_round.setdefault(row.round, {})[row.client] = row
    if not by_round:
        raise NoValueError(f"no score '{metric}' on validation data at stage {stage}, {data}")
    return {number: _over_rows(rows, over, metric) for number, rows in sorted(by_round.items())}


def _is(row: Row, where: Mapping[str, str | None]) -> bool:
    return all(value is None or getattr(row, name) == value for name, value in where.items())


def _over_rows(rows: Mapping[str, Row], over: str, metric: str) -> float:
    total = sum(row.num_samples for row in rows.values())
    weighted = sum(row.value * row.num_samples for row in rows.values()) / total if total else math.nan
    return _over({client: row.value for client, row in rows.items()}, over, metric, weighted)


def _over(clients: Mapping[str, float], over: str, metric: str, weighted: float) -> float:
    """Return a statistic over clients; NaN if one that counts has no finite score."""
    if over.startswith("client:"):
        name = over.removeprefix("client:")
        if name not in clients:
            raise NoValueError(f"no client '{name}'; there is {', '.join(clients)}")
        return clients[name]
    if any(math.isnan(value) for value in clients.values()):
        return math.nan
    return weighted if over == "weighted" else float(getattr(spread(clients, higher_is_better(metric)), over))


def _state(run: Run, client: str | None) -> Mapping[str, Any]:
    """Return the entries of an exported model, those of its frozen network among them."""
    from fedlightning.deployment.checkpoints import read_state

    assert run.path is not None
    name = "global.ckpt" if client is None else f"clients/{file_name_of(client)}.ckpt"
    path = run.path / "checkpoints" / name
    if not path.exists():
        raise NoValueError(f"no model {name} in its checkpoints")
    return read_state(path)
