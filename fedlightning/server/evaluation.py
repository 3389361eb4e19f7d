"""Scores at the stages of a round: G (the server's model) and L1 (what each client would hold after receiving it).

L2 is scored inside the visit, while the trained model is there. Nothing here changes a client: L1 is evaluated on a
copy of its state, so absent clients are treated like those that took part. The engine decides where models are scored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from fedlightning.client.requests import Evaluate, Scores
from fedlightning.contract import POOLED
from fedlightning.contract.messages import GLOBAL, Update
from fedlightning.engines.attempts import stop_at
from fedlightning.engines.contract import Engine
from fedlightning.engines.score_tasks import Lost, Place, ScoreClient, ScoredModel, ScoreModel, ServerModel
from fedlightning.errors import warn
from fedlightning.scores.rows import EVERYBODY, LATEST, LOCAL, Gap, Row
from fedlightning.server.server import Scores as ScoresOfRound
from fedlightning.server.server import Server
from fedlightning.tensors import State, equal, module_state, state_digest
from fedlightning.wrappers import user_class


class ScoringError(RuntimeError):
    """A stage at which no model could be scored."""


def rows_from_updates(
    updates: Iterable[Update], model_of: Callable[[str], str] = lambda client: GLOBAL, round: int | None = None
) -> list[Row]:
    """Return the L2 scores and training metrics that came with the updates of a round.

    They go under the model that the client was sent: `"personal"` for the global one and for the client's own, else its key,
    so that a client that trains several models in a round has a row for each.
    """
    rows = []
    trained: Counter[tuple[str, str]] = Counter()
    for update in updates:
        number, client = (update.round if round is None else round) + 1, update.client
        model = "personal" if update.origin in (GLOBAL, model_of(client)) else update.origin
        if update.metrics or update.evaluations:  # a client may train a model of the server more than once in a round
            trained[client, model] += 1
            model += f" {trained[client, model]}" if trained[client, model] > 1 else ""
        rows += [
            Row(number, "L2", model, "latest", "local", "train", client, metric, value, update.num_samples)
            for metric, value in update.metrics.items()
        ]
        rows += [
            Row(number, stage, model, "latest", data, split, client, metric, value, size)
            for stage, data, split, metric, value, size in update.evaluations
        ]
    return rows


def index_scores(rows: Iterable[Row]) -> ScoresOfRound:
    """Return the scores of a round as callbacks read them (`server.scores`): what was scored -> client -> value, samples."""
    scores: ScoresOfRound = {}
    for row in rows:
        model = None if row.model in ("global", "personal") else row.model
        key = (model, row.stage, row.data, row.split, row.metric)
        scores.setdefault(key, {})[row.client] = (row.value, row.num_samples)
    return scores


def score_global_model(server: Server, engine: Engine, evaluate: Evaluate) -> list[Row]:
    """Score stage G, where the method has a global model: one for all, or one per client's cluster."""
    module = server.global_module(None)
    scored = ScoredModel(server.round + 1, "G", GLOBAL)
    if module is not None:
        return score_global(server, engine, module, evaluate, scored)

    def tasks() -> Iterator[ScoreModel]:
        local_only = replace(evaluate, data=tuple(data for data in evaluate.data if data == "local"))
        for client in server.population.scored:
            module = server.global_module(client)
            if module is not None:
                yield ScoreModel(ServerModel(module, server.blueprint), (client,), local_only, scored)

    return _without_gaps(server, engine, (row for rows in engine.map(tasks()) for row in rows))


def score_global(
    server: Server, engine: Engine, module: LightningModule, evaluate: Evaluate, scored: ScoredModel
) -> list[Row]:
    """Score one model of the server on the data of every client that is evaluated, and on the union."""
    return _without_gaps(server, engine, rows_of_global(engine, module, server.population.scored, evaluate, scored))


def rows_of_global(
    engine: Engine, module: LightningModule, ids: Sequence[str], evaluate: Evaluate, scored: ScoredModel
) -> list[Row]:
    """Return the scores of one model of the server on the data of some clients and on the union, and the gaps."""
    tasks, model = [], ServerModel(module, engine.runner.blueprint)
    if "local" in evaluate.data:
        timed = engine.attempts.policy.timeout is not None  # the time is each client's own
        for clients in [(client,) for client in ids] if timed else _shares(ids, engine.width):
            tasks.append(ScoreModel(model, clients, Evaluate(evaluate.splits), scored))
    if POOLED in evaluate.data:
        tasks.append(ScoreModel(model, (EVERYBODY,), Evaluate(evaluate.splits, (POOLED,)), scored))
    answers = list(engine.map(tasks))
    rows: list[Row] = []
    for task, answer in zip(tasks, answers, strict=True):
        if isinstance(answer, Lost) and len(task.clients) > 1:  # whose data cost the workers? one by one it shows
            alone = [replace(task, clients=(client,)) for client in task.clients]
            rows += [row for client_rows in engine.map(alone) for row in client_rows]
        else:
            rows += answer
    return rows


def _without_gaps(server: Server, engine: Engine, rows_and_gaps: Iterable[Row]) -> list[Row]:
    """Tell of models that could not be scored, and return the scores of the others."""
    rows = [_possible(server, row) for row in rows_and_gaps]
    gaps = [row for row in rows if isinstance(row, Gap)]
    for gap in gaps:
        stop_at(engine.attempts.policy, gap.sentence, f"Round {server.round + 1}")
    if gaps and len(gaps) == len(rows):
        raise ScoringError(
            f"No model could be scored at stage {gaps[0].stage}; client '{gaps[0].client}': {gaps[0].reason}"
        )
    for gap in gaps:
        server.note_failure(gap.client, gap.sentence, gap.stage)
    return [row for row in rows if not isinstance(row, Gap)]


def _possible(server: Server, row: Row) -> Row:
    """Return a score, or a gap in place of one that cannot be."""
    if isinstance(row, Gap):
        return row
    why = server.parts.check_score(server, row)
    return row if why is None else Gap(**vars(row), reason=why)


def _shares(clients: Sequence[str], width: int) -> list[tuple[str, ...]]:
    """The clients in order, in parts of nearly equal length: one part, or two for each task that runs at a time."""
    parts = min(1 if width == 1 else 2 * width, len(clients))
    ends = [len(clients) * part // parts for part in range(parts + 1)]
    return [tuple(clients[start:end]) for start, end in pairwise(ends)]


def score_received_models(
    server: Server, engine: Engine, evaluate: Evaluate, global_rows: Sequence[Row] = ()
) -> list[Row]:
    """Score stage L1 of every client that is evaluated."""
    # else stage G scored each client's cluster's model, or that of its architecture
    one_for_all = server.callbacks.role("global_module") is None and not server.is_mixed
    shared = module_state(server.module_with(server.model)) if global_rows and not server.is_mixed else None
    known_of = scores_of_global(global_rows if one_for_all else ())
    scored = ScoredModel(server.round + 1, "L1", "personal")
    taken_over: dict[str, list[Row]] = {}
    if shared is not None and deploy_what_is_sent(server, engine, shared):
        taken_over = _taken_over(server, engine, evaluate, scored, known_of)
    asked = [client for client in server.population.scored if client not in taken_over]
    tasks = (
        ScoreClient(
            server.message(server.job(client, work=0)),
            evaluate,
            scored,
            others=server.population.scored,
            shared=shared,
            known=known_of(client, evaluate.data),
        )
        for client in asked
    )
    rows_by_client = taken_over | dict(zip(asked, engine.map(tasks), strict=True))
    return _without_gaps(server, engine, (row for client in server.population.scored for row in rows_by_client[client]))


def deploy_what_is_sent(server: Server, engine: Engine, shared: State) -> bool:
    """Whether a client that keeps no entries of its own deploys the global model, and nobody asks to see it do so."""
    asked = ("on_broadcast", "personal_module", "on_client_evaluated")
    if any(callback.claims(name) for callback in server.callbacks for name in asked):
        return False
    sent = {name: server.model[name] for name in server.shared_names()}
    entries = engine.runner.blueprint.plain_entries(sent, "server")
    return entries is not None and equal(entries, shared)


def _taken_over(
    server: Server, engine: Engine, evaluate: Evaluate, scored: ScoredModel, known_of: Callable[..., Known]
) -> dict[str, list[Row]]:
    """Return the rows of clients without entries of their own, where stage G has scored the model on all their data."""
    rows_by_client: dict[str, list[Row]] = {}
    if "clients" in evaluate.data:
        return rows_by_client
    wanted = [(split, data) for split in evaluate.splits for data in (LOCAL, POOLED) if data in evaluate.data]
    for client in server.population.scored:
        scores_by_place = known_of(client, evaluate.data)
        if (
            all(scores_by_place.get(place, ({}, 0))[0] for place in wanted)
            and not engine.store.note(client).is_personal
        ):
            rows_by_client[client] = [
                row
                for split, data in wanted
                for row in Place(client, split, data, scores_by_place[split, data][1]).rows(
                    scored, scores_by_place[split, data][0]
                )
            ]
    return rows_by_client


Known = dict[tuple[str, str], tuple[Scores, int]]


def scores_of_global(rows: Sequence[Row]) -> Callable[[str, Sequence[str]], Known]:
    """Return what gives a client that holds the global model its scores: from stage G, where they stand already."""
    scores_by_client: dict[str, dict[str, tuple[Scores, int]]] = {}  # by client and split
    for row in rows:
        if row.checkpoint == LATEST:
            by_split = scores_by_client.setdefault(row.client, {})
            by_split.setdefault(row.split, ({}, row.num_samples))[0][row.metric] = row.value
    pooled = {(split, POOLED): scores for split, scores in scores_by_client.get(EVERYBODY, {}).items()}
    others = {
        (split, f"client:{client}"): scores
        for client, by_split in scores_by_client.items()
        if client != EVERYBODY
        for split, scores in by_split.items()
    }

    def known_of(client: str, data: Sequence[str]) -> Known:
        local = {(split, LOCAL): scores for split, scores in scores_by_client.get(client, {}).items()}
        return local | pooled | (others if "clients" in data else {})

    return known_of


def checkpoint_rows(server: Server, engine: Engine, evaluate: Evaluate) -> list[Row]:
    """Score the models that checkpoint callbacks selected, each at the round and stage it was selected in.

    On the pooled data, models that several clients or callbacks have kept are scored once.
    """
    rows = []
    for kept in server.checkpoints.values():
        scored = ScoredModel(kept["round"], "G", GLOBAL, kept["name"])
        module, model_name = server.global_with(kept["model"], kept.get("of", GLOBAL)), kept.get("of")
        if model_name is None:
            rows += score_global(server, engine, module, evaluate, scored)
            continue
        members = [client for client in server.population.scored if server.model_of(client) == model_name]
        alone = replace(evaluate, data=tuple(data for data in evaluate.data if data == LOCAL))
        if members:  # else nobody has it any more, or nobody of those that are scored
            rows += _without_gaps(server, engine, rows_of_global(engine, module, members, alone, scored))

    def task(client: str, key: str, data: tuple[str, ...]) -> ScoreClient:
        kept = engine.store.note(client).checkpoints[key]
        scored = ScoredModel(kept["round"], kept["stage"], "personal", kept["name"])
        message = server.message(server.job(client, work=0))
        return ScoreClient(message, replace(evaluate, data=data), scored, others=server.population.scored, kept=key)

    drawn: list[tuple[str, str]] = []  # the tasks: client and callback
    leader: dict[tuple[str, str], tuple[str, str]] = {}  # of a task: the first one with the very same model
    first: dict[str, tuple[str, str]] = {}
    # else what is deployed is more than the kept entries, or nobody here knows whose are the same
    alike = server.callbacks.role("personal_module") is None and engine.store.is_here

    def tasks() -> Iterator[ScoreClient]:
        for client in server.population.scored:
            for key in engine.store.note(client).checkpoints:
                place = (client, key)
                drawn.append(place)
                leader[place] = place
                if alike:
                    leader[place] = first.setdefault(
                        state_digest(engine.store.get(client).checkpoints[key]["model"]), place
                    )
                yield task(client, key, tuple(d for d in evaluate.data if d != POOLED or leader[place] == place))

    rows_by_place = {drawn[place]: rows_of_task for place, rows_of_task in enumerate(engine.map(tasks()))}

    def again() -> Iterator[ScoreClient]:
        """The pooled data once more, where the client that stood for others could not be opened."""
        for client, key in missed:
            yield task(client, key, (POOLED,))

    missed = [
        place
        for place in drawn
        if leader[place] != place and any(isinstance(row, Gap) for row in rows_by_place[leader[place]])
    ]
    own_pooled = dict(zip(missed, engine.map(again()), strict=True)) if POOLED in evaluate.data else {}
    for place in drawn:
        client, kept = place[0], engine.store.note(place[0]).checkpoints[place[1]]
        theirs = own_pooled.get(place, rows_by_place[leader[place]] if leader[place] != place else [])
        pooled = [
            replace(row, client=client, round=kept["round"], stage=kept["stage"], checkpoint=kept["name"])
            for row in theirs
            if row.data == POOLED
        ]
        for split in evaluate.splits:
            part = [row for row in rows_by_place[place] if row.split == split]
            local = [row for row in part if row.data == LOCAL]
            rows += [*local, *(row for row in pooled if row.split == split), *part[len(local) :]]
    return _without_gaps(server, engine, rows)


def warn_unscored_stages(server: Server, engine: Engine, split: str, rows: Sequence[Row], asked: bool = True) -> None:
    """Warn of a step that gives no score, though models were evaluated with it.

    Args:
        server: Has the clients and the template.
        engine: Knows their data.
        split: Split that was evaluated.
        rows: What was found.
        asked: Whether the user has asked for scores, so that a module without the step is told of as well.
    """
    data = engine.runner.described
    has_data = any(data.num_samples(client, split) for client in server.population.scored)
    if not has_data or any(row.split == split for row in rows):
        return
    template = server.blueprint.template
    tests = split == "test" and is_overridden("test_step", template)
    step, name = "test_step" if tests else "validation_step", user_class(template).__name__
    if not asked and not is_overridden(step, template):
        return
    why = (
        f"{name}.{step} logs nothing and returns no loss"
        if is_overridden(step, template)
        else f"{name} has neither test_step nor validation_step"
    )
    warn(
        f"There are no scores on {split} data: {why}. Log them in {step} or on_{step.removesuffix('_step')}_epoch_end by "
        "self.log(name, value); what a module keeps to itself, prints or logs with logger=False cannot be seen."
    )
