"""What a run leaves behind: scores, the summary, loggers' entries, exported checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from lightning.pytorch.loggers import Logger

from fedlightning import checkpoints
from fedlightning.datamodules.base import SPLITS, FederatedDataModule
from fedlightning.engines.sequential import ClientStore
from fedlightning.evaluation.results import Row, summarise
from fedlightning.evaluation.stages import deployed_module
from fedlightning.run_folder import RunFolder, config_hash, is_writer, peak_memory_mb, versions
from fedlightning.server import Server
from fedlightning.tensors import equal, module_state


@dataclass
class Recorder:
    """Keeps a run's scores in memory and, in the process that writes, on disk and in loggers.

    Attributes:
        run: the run's folder, ``None`` where nothing is written; loggers: Lightning loggers of the writing process.
        rows: every score so far; results, summary: as in ``summary.json``, brought up to date by :meth:`summarise`.
    """

    run: RunFolder | None = None
    loggers: list[Logger] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def writes(self) -> bool:
        """Whether this process writes files."""
        return self.run is not None and is_writer()

    def record(self, rows: list[Row]) -> None:
        """Add scores; those that are there already (a repeated test) are not added twice."""
        known = {row.address for row in self.rows}
        rows = [row for row in rows if row.address not in known]
        self.rows += rows
        if self.run is not None and is_writer():
            self.run.write_rows(rows)
        means = {
            f"{row['split']}/{row['stage']}/{row['data']}/{row['metric']}": row["mean"]
            for row in summarise(row for row in rows if row.split != "test")
            if row["mean"] is not None
        }
        for logger in self.loggers if means else ():
            logger.log_metrics(means, step=rows[0].round)

    def summarise(
        self,
        server: Server,
        rounds: int,
        seconds: float,
        arguments: Mapping[str, Any],
        history: Sequence[Mapping[str, float]] = (),
    ) -> None:
        """Bring ``results`` and ``summary`` (and ``summary.json``) up to date: the newest scores of every stage."""
        latest = [row for row in self.rows if row.checkpoint == "latest" and row.round >= rounds]
        newest = {row.stage: row.round for row in sorted(latest, key=lambda row: row.round)}
        chosen = [row for row in latest if row.round == newest[row.stage]]
        chosen += [row for row in self.rows if row.checkpoint != "latest"]
        self.results = summarise(row for row in chosen if row.split != "train")
        config = {key: value for key, value in arguments.items() if key not in ("default_root_dir", "version")}
        callbacks = {callback.key: callback.hyperparameters() for callback in server.callbacks}
        self.summary = {
            "results": self.results,
            "rounds": rounds,
            "num_clients": len(server.clients),
            "num_samples": server.num_samples,
            "data": describe_data(server.runner.data),
            "callbacks": callbacks,
            "model": type(server.runner.template).__name__,
            "seed": arguments["seed"],
            "bytes_up": server.bytes_up,
            "bytes_down": server.bytes_down,
            "local_loop": server.runner.loop.used,
            "local_steps_total": server.steps,
            "seconds": round(seconds, 3),
            "per_round": [dict(entry) for entry in history],
            "peak_memory_mb": round(peak_memory_mb(), 1),
            "versions": versions(),
            "config_hash": config_hash({**config, "callbacks": callbacks}),
        }
        if self.run is not None and is_writer():
            self.run.write_summary(self.summary)

    def export(self, server: Server, store: ClientStore) -> None:
        """Write the models to use as native Lightning checkpoints: the selected ones, else the latest.

        The file of a client that deploys the global model is a link to the global one: no disk full of copies.
        """
        if self.run is None or not is_writer():
            return
        folder, exporter = self.run.path / "checkpoints", checkpoints.Exporter(server.runner.template)
        (folder / "clients").mkdir(parents=True, exist_ok=True)
        names = [kept["name"] for kept in server.checkpoints.values()]
        whole = None
        if names or server.global_module(None) is not None:
            name = next(iter(names), "latest")
            whole = deployed_module(server, store, None, name)
            exporter.save(folder / "global.ckpt", whole, {"checkpoint": name})
        for client in server.clients:
            name = next((entry["name"] for entry in store.get(client).checkpoints.values()), "latest")
            module = deployed_module(server, store, client, name)
            path = folder / "clients" / f"{quote(client, safe='')}.ckpt"
            if whole is not None and type(module) is type(whole) and equal(module_state(module), module_state(whole)):
                checkpoints.link(path, folder / "global.ckpt")
            else:
                exporter.save(path, module, {"client": client, "checkpoint": name})

    def close(self) -> None:
        """Let the loggers write what they hold."""
        for logger in self.loggers:
            logger.finalize("success")


def describe_data(data: FederatedDataModule) -> dict[str, Any]:
    """Who holds what, for ``summary.json``: two runs are on the same split where ``splits`` agree."""
    return {
        "module": type(data).__name__,
        "partition": data.partition_name,
        "splits": {split: data.fingerprint(split) for split in SPLITS},
        "clients": {
            client: {split: data.num_samples(client, split) for split in SPLITS}
            | {"classes": data.class_counts(client, "train")}
            for client in data.client_ids
        },
    }
