"""Updates checked on arrival, whatever sent them: an update that breaks a rule is a client that failed.

Everything that an update holds is looked at here, by what was declared: entries of the model, extras, counts, scores, logs.
What is too large (:mod:`fedlightning.guards.update_checks`) is refused here too, before anything of it is folded in.

How large updates usually are: one that is far beyond that is a failed client, decided before it is folded in.

Usual is the median over the last :data:`WINDOW` rounds of each round's median over what was accepted in it. It changes
between rounds only, so that neither the engine nor the order of arrival within a round matters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedlightning.client.trainer_context import MEDIA
from fedlightning.contract import POOLED, Change, FederatedCallback, SumCodec
from fedlightning.contract.messages import ClientLog, Extra, Message, Update, check_extras, sizes_in
from fedlightning.datamodules.federated_data import SPLITS
from fedlightning.errors import ConfigurationError
from fedlightning.scores.metric_names import outside
from fedlightning.scores.rows import EVERYBODY, Row
from fedlightning.server.parts import Part
from fedlightning.server.server import Server, error_in_check, refused
from fedlightning.tensors import first_nonfinite, widen

if TYPE_CHECKING:
    from fedlightning.server.federation import Federation


WINDOW = 25
"""Rounds whose medians are kept."""
FACTOR = 1e3
"""Multiple of the usual norm beyond which an update is refused, unless the trainer says otherwise."""
POWERS = {"parameters": (1, 1), "buffers": (4, 2), "extra": (2, 1), "entries": (1, 1)}
"""To which powers the factor is taken, in the first round and later: running variances are squares, and what they and extras
will be cannot be seen from a model that has not trained. `"entries"` are extras shaped as the model's."""
ZERO_LENGTH = 1e-6
"""Root mean square below which what was sent, being all zeros, tells nothing of the size of its numbers: it counts as 1."""

FAST = (torch.float32, torch.float64)
CHUNK = 2**17
"""Numbers whose differences are taken at a time: they stay in the cache."""


@dataclass
class Norms:
    """What is usual in a run.

    Attributes:
        factor: The trainer's `failures.update_limit`; `None`: nothing is refused.
        usual: By what is measured, the medians of the last rounds that had one.
    """

    factor: float | None = FACTOR
    usual: dict[str, list[float]] = field(default_factory=dict)
    _now: dict[str, dict[tuple[str, int], float]] = field(default_factory=dict)  # of this round, by client and visit

    def limit(self, what: str, kind: str, sent: Callable[[], float], norm: float) -> tuple[float, float] | None:
        """Return the largest norm that is accepted and what is usual, where `norm` is beyond it; `None` if it is accepted."""
        if self.factor is None:
            return None
        first, later = (self.factor**power for power in POWERS[kind])
        before = self.usual.get(what)
        usual = median(before) if before else 0.0
        if norm <= later * usual:
            return None
        reference = sent()
        most = max(later * usual, reference) if before else first * reference
        return None if norm <= most else (most, usual if before else reference)

    def note(self, client: str, visit: int, norms: Mapping[str, float]) -> None:
        """Take in an update that was accepted. One that comes again, as when a visit is tried again, counts once."""
        for what, norm in norms.items():
            if 0.0 < norm < math.inf:
                self._now.setdefault(what, {})[client, visit] = float(f"{norm:.6g}")  # the same in every engine

    def end_round(self) -> None:
        """Note what was usual in a round."""
        for what, norms in self._now.items():
            self.usual[what] = [*self.usual.get(what, []), median(norms.values())][-WINDOW:]
        self._now.clear()

    def forget_round(self) -> None:
        """Forget what was seen of a round that is not finished."""
        self._now.clear()


def norm_of(values: Iterable[Tensor]) -> float:
    """Return the norm of some tensors together; finite if all their numbers are (as far as float64 goes)."""
    return math.hypot(*map(_norm, values))


def norm_of_change(pairs: Iterable[tuple[Tensor, Tensor | None]]) -> float:
    """Return the norm of `value - base` over all pairs; without a base, of the value."""
    return math.hypot(
        *(_norm(value) if base is None else _distance(value, base.to(value.device)) for value, base in pairs)
    )


def _distance(value: Tensor, base: Tensor) -> float:
    if value.numel() <= CHUNK:
        return _norm(value - base)
    parts = zip(value.reshape(-1).split(CHUNK), base.reshape(-1).split(CHUNK), strict=True)
    return math.hypot(*(_norm(a - b) for a, b in parts))


def _norm(value: Tensor) -> float:
    if value.dtype in FAST:
        norm = float(torch.linalg.vector_norm(value))
        if math.isfinite(norm):
            return norm
    return float(torch.linalg.vector_norm(widen(value)))  # the squares of finite numbers can overflow in others


def norm_of_sent(values: Iterable[Tensor]) -> float:
    """Return the norm of what was sent; where that is all zeros, what it would be if all numbers were 1."""
    tensors = list(values)
    norm, ones = norm_of(tensors), math.sqrt(max(sum(value.numel() for value in tensors), 1))
    return norm if norm > ZERO_LENGTH * ones else ones


def numbers_in(value: Any) -> list[Tensor]:
    """Return the tensors in an extra, numbers as tensors too."""
    if isinstance(value, Mapping):
        return [tensor for part in value.values() for tensor in numbers_in(part)]
    if isinstance(value, int | float):
        return [torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)]
    if not isinstance(value, Tensor):
        raise ValueError(f"it holds a {type(value).__name__}")
    return [value]


COUNTERS = ("num_samples", "steps", "skipped", "own_steps", "selections")
COUNT_LIMIT = 2**53
"""Counts beyond this are none: sums of them are not whole numbers any more."""


class UpdateChecks(Part):
    """Refuses updates that break a rule, or are far larger than is usual.

    Args:
        limit: Multiple of the usual norm beyond which an update is refused; `None`: none is, for its size.
    """

    key = "norms"

    def __init__(self, limit: float | None = FACTOR) -> None:
        self.norms = Norms(limit)

    def state(self) -> dict[str, list[float]]:
        return self.norms.usual

    def load(self, state: Mapping[str, list[float]]) -> None:
        self.norms.usual = dict(state)

    def check(self, federation: Federation) -> None:
        """Refuse a limit that somebody has set where nothing may go by single updates; then there is none."""
        callbacks = federation.server.callbacks
        sums = callbacks.find(SumCodec)
        hiding = [] if sums is None else [sums.key]
        hiding += [callback.key for callback in callbacks.protecting if callback.hides_clients]
        if hiding and self.norms.factor not in (None, FACTOR):
            raise ConfigurationError(
                f"failures.update_limit={self.norms.factor:g} goes by single updates, which {hiding[0]} hides. Leave it out."
            )
        if callbacks.hides_clients:
            self.norms.factor = None

    def on_restored(self, federation: Federation) -> None:
        self.check(federation)

    def on_round_start(self, federation: Federation) -> None:
        self.norms.forget_round()

    def check_update(self, server: Server, message: Message, update: Update) -> Update:
        sizes = Sizes(self.norms)
        try:
            reason = find_update_fault(server, message, update, sizes)
        except Exception as error:  # tensors that cannot be looked at: nested, of a dtype without arithmetic ...
            reason = error_in_check(error)
        if reason is not None:
            return refused(message, reason)
        if not server.callbacks.hides_clients:
            self.norms.note(message.client, message.visit, sizes.norms)
        return update

    def check_score(self, server: Server, row: Row) -> str | None:
        return _fault_of_score(server, row.client, row.data, row.split, row.metric, row.value, row.num_samples)

    def on_round_trained(self, federation: Federation, updates: Sequence[Update]) -> None:
        self.norms.end_round()


class Sizes:
    """The norms of what one update holds, each compared with what is usual.

    Args:
        usual: What is usual.

    Attributes:
        norms: The norms so far, by what was measured.
    """

    def __init__(self, usual: Norms) -> None:
        self.usual = usual
        self.norms: dict[str, float] = {}

    def fault(self, what: str, kind: str, norm: float, sent: Callable[[], float]) -> str | None:
        """Take in a norm; return in words that it is too large; `None` if it is not.

        Args:
            what: What was measured.
            kind: One of :data:`~fedlightning.guards.update_checks.POWERS`.
            norm: Its norm.
            sent: Gives the norm of what was sent, which is the measure in the first round.
        """
        self.norms[what] = norm
        beyond = self.usual.limit(what, kind, sent, norm)
        if beyond is None:
            return None
        measure = "is usual" if what in self.usual.usual else "is that of what it was sent"
        limit = f"failures.update_limit={self.usual.factor:g}"
        return f"the norm {norm:.3g}, and {beyond[1]:.3g} {measure}: more than {beyond[0]:.3g} is refused ({limit})"


def find_update_fault(server: Server, message: Message, update: Update, sizes: Sizes) -> str | None:
    """Return what is wrong with an update, the first fault alone; `None` if nothing is."""
    # a client may choose among the server's models
    if not isinstance(update.model, str) or update.model not in server.models:
        return f"it is for model {update.model!r}; the server has {sorted(server.models)}"
    for name in ("round", "client", "tag", "links"):
        answer, asked = getattr(update, name), getattr(message, name)
        if type(answer) is not type(asked) or answer != asked:
            return f"it says {name}={answer!r}, but answers the message with {name}={asked!r}"
    for name in COUNTERS:
        count = getattr(update, name)
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < COUNT_LIMIT:
            return f"{name} is {count!r}, which is not a count"
    if update.contributed is not None and not isinstance(update.contributed, bool):
        return f"contributed is {update.contributed!r:.80}, which is neither yes nor no"
    samples = server.num_samples.get(message.client)
    most = sum(server.num_samples.values()) if samples is None else samples
    if update.num_samples > most:
        return f"num_samples is {update.num_samples}, but the client has {most} training samples"
    return (
        _fault_of_scores(server, update)
        or _fault_of_state(server, message, update, sizes)
        or next(
            filter(None, (_fault_of_extras(server, message, update, callback, sizes) for callback in server.callbacks)),
            None,
        )
    )


def _fault_of_scores(server: Server, update: Update) -> str | None:
    if not _is_number(update.lr_sum) or not 0 <= update.lr_sum < math.inf:
        return f"lr_sum is {update.lr_sum!r:.80}, which is not a sum of learning rates"
    if not isinstance(update.origin, str):
        return f"its origin is {update.origin!r:.80}, not the name of a model"
    metrics: Any = update.metrics
    if not isinstance(metrics, dict) or not all(isinstance(k, str) and _is_number(v) for k, v in metrics.items()):
        return "its metrics are not numbers by name"
    for name, kinds in (("evaluations", (str, str, str, str, float, int)), ("gaps", (str, str, str, str))):
        entries = getattr(update, name)
        if not isinstance(entries, list) or not all(_is_row(row, kinds) for row in entries):
            return f"its {name} are not a list of {len(kinds)} values each"
    logs: Any = update.logs
    if not isinstance(logs, list) or not all(map(_is_log, logs)):
        return "what it has logged is not a list of numbers or media by name"
    train = [("L2", "local", "train", metric, value, 0) for metric, value in metrics.items()]
    scored = [(row, _fault_of_score(server, update.client, *row[1:])) for row in (*train, *update.evaluations)]
    if any(why for _, why in scored):  # gaps: the update itself is as good as any
        update.gaps = [*update.gaps, *((*row[:3], why) for row, why in scored if why)]
        update.metrics = {row[3]: row[4] for row, why in scored[: len(train)] if not why}
        update.evaluations = [row for row, why in scored[len(train) :] if not why]
    return None


def _fault_of_score(
    server: Server, client: str, data: str, split: str, metric: str, value: float, num_samples: int
) -> str | None:
    """Return why a score cannot be one; `None` if it can. One that is not defined may be a NaN."""
    architecture = server.architecture() if client == EVERYBODY else server.architecture_of(client)
    if (range := outside(architecture.metric_bounds, metric, value)) is not None:
        return f"{metric} is {value:g}, and can only be in {range}"
    counted = data == "local" and split in SPLITS and client in server.population.sizes
    most = server.population.sizes[client][SPLITS.index(split)] if counted else 0
    return f"{metric} is said to be of {num_samples} samples, and there are {most}" if 0 < most < num_samples else None


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63)


def _is_row(row: Any, kinds: tuple[type, ...]) -> bool:
    if not isinstance(row, tuple) or len(row) != len(kinds):
        return False
    fits = (
        _is_number(entry) if kind is float else isinstance(entry, kind) for entry, kind in zip(row, kinds, strict=True)
    )
    return all(fits) and (kinds[-1] is not int or 0 <= row[-1] < COUNT_LIMIT)


def _is_log(log: Any) -> bool:
    if not isinstance(log, ClientLog) or not isinstance(log.values, dict) or not isinstance(log.step, int):
        return False
    numbers = log.method == "metrics" and all(map(_is_number, log.values.values()))
    return (numbers or log.method in MEDIA) and all(isinstance(name, str) for name in log.values)


def _fault_of_tensor(name: str, value: Any, like: Tensor | None = None) -> str | None:
    if not isinstance(value, Tensor):
        return f"'{name}' is a {type(value).__name__}, not a tensor"
    if value.layout is not torch.strided or value.is_nested or value.is_meta:
        return f"'{name}' is not a dense tensor with values"
    if like is not None and (
        value.is_floating_point() != like.is_floating_point() or value.is_complex() != like.is_complex()
    ):
        return f"'{name}' has dtype {value.dtype}, the model's is {like.dtype}"
    return None


# -- entries of the model ----------------------------------------------------------------------------------------------
def _fault_of_state(server: Server, message: Message, update: Update, sizes: Sizes) -> str | None:
    state: Any = update.state
    if not isinstance(state, dict):
        return f"its state is a {type(state).__name__}, not named tensors"
    unasked = sorted(set(state) - set(message.returns))
    if unasked:
        return f"'{unasked[0]}' was not asked for"
    base = (
        server.architecture(update.model).kinds if message.client == POOLED else {}
    )  # what is as built does not travel
    missing = [
        name for name in message.returns if name not in state and (name in message.state or base.get(name) != "frozen")
    ]
    if missing and not server.callbacks.making(Change.PARTS) and server.callbacks.find(SumCodec) is None:
        why = "a callback that leaves out entries says so in its facts: Change.PARTS"
        return f"'{missing[0]}' was asked for and is missing ({why})"
    model = server.models[update.model]
    unknown = next((name for name in state if name not in model), None)
    if unknown is not None:
        return f"model '{update.model}' has no '{unknown}'"
    resized = server.callbacks.role("reduce") is not None  # that algorithm knows sub-models
    for name, value in state.items():
        if (fault := _fault_of_tensor(name, value, model[name])) is not None:
            return fault
        if value.shape != model[name].shape and not resized:
            return (
                f"'{name}' has shape {tuple(value.shape)}, the model's is {tuple(model[name].shape)}; models of differing "
                "shapes need an algorithm that reduces them"
            )
        if resized and (fault := _fault_of_part(server, message, name, value, model[name])) is not None:
            return fault
    return _fault_of_change(server, message, update, sizes)


def _fault_of_part(server: Server, message: Message, name: str, value: Tensor, whole: Tensor) -> str | None:
    """Return what is wrong with the shape of a part of an entry: it is that of what was sent, or smaller where it may be."""
    sent = message.state.get(name)
    most = whole if sent is None else sent
    if value.shape != most.shape and not server.callbacks.making(Change.SMALLER):
        return f"'{name}' has shape {tuple(value.shape)}, and is to have {tuple(most.shape)}"
    if value.ndim != most.ndim or any(have > want for have, want in zip(value.shape, most.shape, strict=True)):
        return f"'{name}' has shape {tuple(value.shape)}, which is not a part of {tuple(most.shape)}"
    return None


def _fault_of_change(server: Server, message: Message, update: Update, sizes: Sizes) -> str | None:
    """Return what is wrong with the size of an update's change; numbers that are not finite have no size."""
    model, kinds = server.models[update.model], server.architecture(update.model).kinds
    parts: dict[str, dict[str, tuple[Tensor, Tensor | None]]] = {"parameters": {}, "buffers": {}}
    for name, value in update.state.items():
        if value.is_floating_point() or value.is_complex():
            like = (base for base in (message.state.get(name), model[name]) if base is not None)
            part = parts["buffers" if kinds[name] == "float_buffer" else "parameters"]
            part[name] = value, next((base for base in like if base.shape == value.shape), None)
    for what, pairs in parts.items():
        if not pairs:
            continue
        norm = norm_of_change(pairs.values())
        if not math.isfinite(norm):
            if (bad := _first_nonfinite(update.state, model)) is not None:
                return f"'{bad}' holds NaN or infinite values"
            pairs = {name: pair for name, pair in pairs.items() if math.isfinite(norm_of_change([pair]))}  # a mask
            norm = norm_of_change(pairs.values())
        bases = {name: message.state.get(name, model[name]) for name in pairs}
        fault = sizes.fault(what, what, norm, lambda bases=bases: norm_of_sent(bases.values()))  # type: ignore[misc]
        if fault is not None:
            most = max(pairs, key=lambda name: norm_of_change([pairs[name]]))
            return f"its change of the {what} has {fault}; it moves '{most}' most"
    return None


def _first_nonfinite(state: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> str | None:
    if first_nonfinite(state) is None:
        return None
    return first_nonfinite({name: value for name, value in state.items() if bool(torch.isfinite(model[name]).all())})


# -- extras ------------------------------------------------------------------------------------------------------------
def _fault_of_extras(
    server: Server, message: Message, update: Update, callback: FederatedCallback, sizes: Sizes
) -> str | None:
    extras: Any = update.extras
    if not isinstance(extras, dict) or not all(isinstance(entry, Mapping) for entry in extras.values()):
        return "its extras are not named values by callback"
    key, architecture = callback.key, server.architecture_of(message.client)
    entries = extras.get(key, {})
    if not entries:
        extras.pop(key, None)  # nothing is as good as none
    if not entries and not callback.claims("wire") and not callback.claims("check_update"):
        return None
    wire = callback.wire(architecture.module)
    declared = wire.up
    for name, spec in declared.items():
        extra = Extra.of(spec)
        if name not in entries and message.tag in extra.due and (message.work == 0 or update.contributed):
            return f"{key}'s '{name}' is missing"
        words = {size for size in extra.form if isinstance(size, str)} if isinstance(extra.form, tuple) else set()
        for other in entries if words and name not in entries else ():
            form = Extra.of(declared[other]).form if other in declared else ()
            if isinstance(form, tuple) and words & {*form}:
                return f"{key}'s '{other}' comes without '{name}'"
    try:
        lengths = sizes_in(message.extras.get(key, {}), wire.down)
        check_extras(key, entries, declared, architecture.shapes, lengths)
        measured = callback.check_update(server, message, update) or {}
    except ValueError as error:
        return str(error)
    for what, (norm, sent) in measured.items():
        fault = sizes.fault(f"{key}'s {what}", "parameters", norm, partial(float, sent))
        if fault is not None:
            return f"{key}'s {what} has {fault}"
    model = server.models[update.model]
    for name, value in entries.items():
        fault = _fault_of_extra(server, update, f"{key}'s '{name}'", Extra.of(declared[name]), value, model, sizes)
        if fault is not None:
            return fault
    return None


def _fault_of_extra(
    server: Server, update: Update, what: str, extra: Extra, value: Any, model: Mapping[str, Tensor], sizes: Sizes
) -> str | None:
    shaped = extra.form in ("parameters", "state", "states")
    if extra.form in ("parameters", "state"):
        for entry, tensor in value.items():
            if (fault := _fault_of_tensor(entry, tensor, model.get(entry))) is not None:
                return f"{what}: {fault}"
    tensors = numbers_in(value)
    for tensor in tensors:
        if _fault_of_tensor("", tensor) or (tensor.is_complex() and not shaped):
            return f"{what} is not dense and real"
        if extra.whole and (tensor.is_floating_point() or tensor.is_complex()):
            return f"{what} has dtype {tensor.dtype}, and is of whole numbers"
    numbers = (
        [torch.nan_to_num(values_of_extra, 0.0, 0.0, 0.0) for values_of_extra in tensors] if extra.gaps else tensors
    )
    norm = norm_of(numbers)
    if not math.isfinite(norm):
        return f"{what} holds NaN or infinite values"
    low = 0.0 if extra.counts else extra.low
    if (low, extra.high) != (-math.inf, math.inf):
        slack = 1e-6 * max(1.0, *(abs(end) for end in (low, extra.high) if math.isfinite(end)))  # of rounding
        for values_of_extra in numbers:
            if values_of_extra.numel() and not (
                low - slack <= float(values_of_extra.min()) and float(values_of_extra.max()) <= extra.high + slack
            ):
                return f"{what} is not in [{low:g}, {extra.high:g}]"
    total = server.num_samples.get(update.client, math.inf)
    total *= max(server.blueprint.settings.work, 1) if extra.counts == "seen" else 1
    if extra.counts and sum(float(values_of_extra.sum(dtype=torch.float64)) for values_of_extra in numbers) > total:
        return f"{what} counts more samples than the {total} of client '{update.client}'"
    if extra.whole or extra.counts or extra.gaps or extra.told:
        return None
    kind = "entries" if shaped else "extra"
    fault = sizes.fault(
        what, kind, norm, lambda: math.sqrt(max(sum(values_of_extra.numel() for values_of_extra in numbers), 1))
    )
    return None if fault is None else f"{what} has {fault}"
