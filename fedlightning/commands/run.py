"""`fedlightning fit | validate | test | evaluate | predict | leakage`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from json import dumps
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fedlightning.arguments import federated_data
from fedlightning.commands.evaluate import show_evaluation
from fedlightning.commands.folders import find_run, leave_nothing, to_resume, with_run_config
from fedlightning.commands.json_output import plain, print_json
from fedlightning.commands.partition import PartitionCommand
from fedlightning.commands.terminal import console, say, shown
from fedlightning.commands.watch import watched
from fedlightning.compat.rich_tables import print_whole
from fedlightning.config.input_errors import InputError, explain
from fedlightning.config.parsing import CommandLine
from fedlightning.datamodules.federated_data import FederatedDataModule
from fedlightning.datamodules.partition_report import class_names_of
from fedlightning.errors import ConfigurationError
from fedlightning.leakage import canaries as audit
from fedlightning.leakage import describe_attacks, inversion, leakage, likelihood_ratio
from fedlightning.onboarding.onboarding import SUMMARY
from fedlightning.ranges import PositiveInt
from fedlightning.resume.stop_requests import requeued
from fedlightning.scores.table import evaluation_line, important_metrics, print_results
from fedlightning.storage.files import is_writing_process, read_json, save_tensors, write_text_atomically, writing
from fedlightning.study.client_failures import failures_line
from fedlightning.study.comparison_files import as_csv
from fedlightning.study.finished_runs import SUMMARY_FILE, Run, read_config
from fedlightning.study.run_scores import common_metric
from fedlightning.study.target_units import Target, target_of
from fedlightning.trainer import FederatedTrainer

Attack = Literal["usual", "ratio", "canaries", "inversion"]
NOTHING: dict[str, Any] = {"membership": [], "sites": None, "missing": []}
NOTHING |= dict.fromkeys(("likelihood_ratio", "canaries", "inversion"))
FILE, PICTURE = "leakage.json", "leakage_images.png"


def leakage_by(
    attack: Attack,
    trainer: FederatedTrainer,
    data: FederatedDataModule,
    folder: Path,
    samples: int,
    shadows: int,
    canaries: int | None,
    power: float,
    unit: Literal["record", "client"] | None,
    batch: int,
    checkpoint: str,
) -> dict[str, Any]:
    """Make one attack, and return what `leakage.json` has now.

    Raises:
        InputError: If it cannot be made.
    """

    def tell(text: str) -> None:
        say(console(), f"{text} ...", markup=False)

    try:
        if attack == "usual":
            content = leakage(trainer, data, samples, checkpoint)
        elif attack == "ratio":
            content = {"likelihood_ratio": likelihood_ratio(trainer, data, shadows, samples, checkpoint, report=tell)}
        elif attack == "canaries":
            content = {
                "canaries": audit(trainer, data, canaries, unit, checkpoint=checkpoint, report=tell, power=power)
            }
        else:
            content = {"inversion": inversion(trainer, data, batch, picture=folder / PICTURE)}
    except ValueError as error:
        raise InputError(f"--attack {attack}: {error}") from error
    before = read_json(folder / FILE) if (folder / FILE).exists() else {}
    return {**NOTHING, **before, **plain(content)}


def show_leakage(content: dict[str, Any], attack: Attack, folder: Path, screen: Console, as_json: bool) -> None:
    """Write what was found, and show what is new."""
    write_text_atomically(folder / FILE, dumps(plain(content), indent=1) + "\n")
    new = {"ratio": "likelihood_ratio"}.get(attack, attack)
    now = {name: content[name] for name in (("membership", "sites", "missing") if attack == "usual" else (new,))}
    if attack == "usual":
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for name in ("model", "members", "others", "AUC", "95 % interval", "found at 1 % false alarms", "by chance"):
            table.add_column(name, justify="left" if name == "model" else "right")
        for row in content["membership"]:
            numbers = f"{row['auc']:.3f}", f"{row['low']:.3f} to {row['high']:.3f}"
            shares = f"{row['hits']:.1%}", f"{row['chance']:.1%}"
            table.add_row(row["model"], str(row["members"]), str(row["others"]), *numbers, *shares)
        print_whole(screen, table)
    for line in describe_attacks(now):
        say(screen, f"\n{line}", markup=False)
    say(screen, f"\nWritten: {shown(folder / FILE)}{f' and {PICTURE}' if attack == 'inversion' else ''}")
    if as_json:
        images = content["inversion"] and {
            name: value for name, value in content["inversion"].items() if name != "images"
        }
        print_json("leakage", run=folder, **{**content, "inversion": images})


def run(command: str, words: Sequence[str]) -> int:
    """Parse and carry out one command."""
    cli = cli_class(command)(command, written_out(command, words))
    getattr(cli, command)(**cli.options())
    return 0


def written_out(command: str, words: Sequence[str]) -> list[str]:
    """Return the words of a command with flags as options, and the configuration of its run in front."""
    flags = {"--dry-run": "--dry_run=true", "--dry_run": "--dry_run=true", "--dry-run=json": "--dry_run=json"}
    flags |= {"--json": "--json=true", "--watch": "--watch=true"}
    if command == "evaluate" and words and not words[0].startswith("-"):
        words = [*words[1:], f"--trainer.init_from={words[0]}"]  # last: a configuration may hold null
    return with_run_config(command, [flags.get(word, word) for word in words])


def cli_class(command: str) -> type[CommandLine]:
    """Return the class that has `command` as a method."""
    return PartitionCommand if command == "partition" else Commands


class Commands(CommandLine):
    """The commands that need a model, data and a trainer. Their docstrings are the texts of `--help`."""

    trainer: FederatedTrainer  # type: ignore[assignment]

    def fit(
        self,
        resume: str | None = None,
        test_after_fit: bool = True,
        allow_config_change: bool = False,
        allow_new_clients: bool = False,
        dry_run: bool | Literal["json"] = False,
        watch: bool = False,
        json: bool = False,
    ) -> None:
        """Train a federation, test it and show the results.

        The files of the run go to <default_root_dir>/<name>/version_N (by default runs/federation/version_0):
        config.yaml, metrics.csv, summary.json and checkpoints.

        Args:
            resume: Go on with a run: its folder, last (the one of this name that was saved last), or auto (last, or a new
                run where there is none).
            test_after_fit: Score on test data when all rounds are done.
            allow_config_change: Resume although the configuration has changed; summary.json lists what has.
            allow_new_clients: Resume although the data have clients that the run did not train.
            dry_run: Train nothing; try a batch with clients, and say what the model holds and what a round sends and
                lasts. json: say it as JSON.
            watch: Show the run in the browser while it goes on.
            json: Print the results as one line of JSON too, the last one.
        """
        if dry_run:
            self._dry_run(as_json=json or dry_run == "json")
            return
        screen = console()
        arguments = self.trainer.arguments
        place = Path(arguments["default_root_dir"], arguments["name"], arguments["version"] or "")
        with self._in_words(), watched(place, watch and is_writing_process()):
            self.trainer.fit(
                self.model,
                self.datamodule,
                resume=to_resume(resume),
                allow_config_change=allow_config_change,
                allow_new_clients=allow_new_clients,
            )
        results = self.trainer.results
        stopped = self.trainer.stopped_by
        has_tests = any(self.datamodule.num_samples(client, "test") for client in self.datamodule.client_ids)
        if test_after_fit and has_tests and stopped is None:
            self._test_all()
            results = self.trainer.results
        if is_writing_process():
            self._show(results, screen)
            if json:
                costs = {key: self.trainer.summary.get(key) for key in ("bytes_up", "bytes_down", "seconds")}
                print_json("fit", **self._fields(), **costs, failures=self.trainer.summary.get("failures", []))
        if stopped is not None:
            raise SystemExit(stopped.code)

    def _test_all(self) -> None:
        """Score what the fit has made on test data."""
        with requeued(self.trainer.signals, lambda: (self.trainer.rounds_done, self.trainer.max_rounds)):
            self.trainer.test(checkpoint="all", verbose=False)

    def _show(self, results: list[dict[str, Any]], screen: Console) -> None:
        """Print the results of a fit."""
        splits = {row["split"] for row in results}
        self._print(results, "test" if "test" in splits else "val", screen)
        summary = self.trainer.summary
        line = failures_line(summary.get("failures", []), len(self.datamodule.client_ids), sites=summary.get("sites"))
        for text in (line, evaluation_line(self.trainer.summary)):
            if text is not None:
                say(screen, f"\n{text}", markup=False)
        if self.trainer.run is not None:
            say(screen, f"\nRun: {shown(self.trainer.run.path)}")

    def _print(self, results: list[dict[str, Any]], split: str, screen: Console) -> None:
        """Print a table of scores; errors of a regression in the units of its target."""
        path = None if self.trainer.run is None else self.trainer.run.path
        target = self._target()
        headline = None
        if path is not None and (path / SUMMARY_FILE).exists():  # metrics.csv of long runs takes minutes to read
            headline = common_metric([Run("", 0, None, read_json(path / SUMMARY_FILE))], split)
        print_results(target.results(results), split, screen, headline)
        of_split = [row for row in results if row["split"] == split]
        shown_metric = next(iter(important_metrics(of_split, headline=headline)), "")
        if (units := target.in_words(shown_metric)) is not None:
            say(screen, f"\n{units}", markup=False)

    def _fields(self, results: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """Return what `--json` says of a run, whichever command has scored it."""
        folder = None if self.trainer.run is None else self.trainer.run.path
        shown_results = self._target().results(self.trainer.results if results is None else results)
        return {"run": folder, "rounds": self.trainer.rounds_done, "results": shown_results}

    def _target(self) -> Target:
        return Target() if self.trainer.run is None else target_of(read_config(self.trainer.run.path))

    def validate(self, run: str, checkpoint: str = "all", json: bool = False) -> None:
        """Score a finished or interrupted run on validation data.

        Args:
            run: Folder of the run.
            checkpoint: Models to score: latest, best_local, best_global, or all that the run has.
            json: Print the results as one line of JSON too, the last one.
        """
        self._evaluate(run, checkpoint, "val", json)

    def test(self, run: str, checkpoint: str = "all", json: bool = False) -> None:
        """Score a finished or interrupted run on test data. The scores go to its metrics.csv and summary.json.

        Args:
            run: Folder of the run.
            checkpoint: Models to score: latest, best_local, best_global, or all that the run has.
            json: Print the results as one line of JSON too, the last one.
        """
        self._evaluate(run, checkpoint, "test", json)

    def evaluate(self, split: Literal["test", "val"] = "test", least: PositiveInt = 10, json: bool = False) -> None:
        """Score a given model at all clients, without training: fedlightning evaluate MODEL --config FILE.

        MODEL is a checkpoint, as fit exports it, or a state_dict (--trainer.init_from). Each client's metrics have their
        samples and intervals, and calibration where the data are here; clients with fewer than least samples have none. At
        sites: fedlightning serve --evaluate true.

        Args:
            split: Data to score on: test or val.
            least: Fewest samples of a client that gets metrics of its own.
            json: Print the results as one line of JSON too, the last one.
        """
        if self.trainer.arguments["init_from"] is None:
            raise InputError("there is no model: fedlightning evaluate MODEL --config FILE.")
        with self._in_words():
            self.trainer.evaluate(self.model, self.datamodule, split=split, least=least)
            if is_writing_process():
                data = federated_data(self.datamodule, None, None, None)
                show_evaluation(self.trainer, data, split, least, console(), json)

    def predict(
        self, run: str, client: str | None = None, checkpoint: str = "latest", out: str = "predictions.pt"
    ) -> None:
        """Write the predictions of a client's model on its test data, or of the global model on all clients' test data.

        Into a table if --out ends with .csv: a line a sample, in the order of the test data.

        Args:
            run: Folder of the run.
            client: Id of the client whose model predicts. Default: the global model.
            checkpoint: Model that predicts: latest, best_local or best_global.
            out: File to write.
        """
        import torch

        self.trainer.restore(self.model, self.datamodule, find_run(run))
        if client is not None and client not in self.datamodule.client_ids:
            raise InputError(f"There is no client '{client}'. Clients: {', '.join(self.datamodule.client_ids[:20])}.")
        batches: Any = self.trainer.predict(client=client, checkpoint=checkpoint)
        if batches and all(isinstance(batch, torch.Tensor) for batch in batches):
            batches = torch.cat(batches)
        with writing(Path(out)):
            Path(out).parent.mkdir(parents=True, exist_ok=True)
            if Path(out).suffix == ".csv":
                write_text_atomically(Path(out), _as_table(batches, class_names_of(self.datamodule)))
            else:
                save_tensors(batches, Path(out))
        shape = f", shape {tuple(batches.shape)}" if isinstance(batches, torch.Tensor) else ""
        whose, data = (
            ("the global model", "all clients'") if client is None else (f"client {client}'s model", "its own")
        )
        rounds = f"{checkpoint}, after {self.trainer.rounds_done} of {self.trainer.max_rounds} rounds"
        say(console(), f"Predictions of {whose} ({rounds}) on {data} test data{shape}: {out}", markup=False)

    def onboard(
        self, run: str, newcomers: str | None = None, clients: list[str] | None = None, epochs: int = 1
    ) -> None:
        """Let new clients join a finished or interrupted run: score them, fine-tune each on its own data, score them again.

        Nothing of the run changes. Its folder gets onboarding.csv, onboarding.json and checkpoints/newcomers.

        Args:
            run: Folder of the run.
            newcomers: YAML file whose data section has the new clients. Default: the run's own data, with its held-out
                clients.
            clients: Ids of the clients that join. Default: all that the run did not train.
            epochs: Epochs of fine-tuning.
        """
        folder = find_run(run)
        data = None
        if newcomers is not None:
            if not Path(newcomers).is_file():
                raise InputError(f"newcomers={newcomers!r} is not a YAML file with a data section.")
            data = PartitionCommand("partition", ["--config", newcomers]).datamodule
        self.trainer.restore(self.model, self.datamodule, folder)
        self.trainer.onboard(data, clients, epochs=epochs)
        if is_writing_process():
            summary = read_json(folder / SUMMARY)
            line = failures_line(summary.get("failures", []), len(summary["clients"]), SUMMARY)
            if line is not None:
                say(console(), f"\n{line}", markup=False)
            say(console(), f"\nOnboarding: {shown(folder / SUMMARY)}")

    def leakage(
        self,
        run: str,
        attack: Attack = "usual",
        samples: int = 1000,
        shadows: int = 16,
        canaries: int | None = None,
        power: float = 0.8,
        unit: Literal["record", "client"] | None = None,
        batch: int = 1,
        checkpoint: str = "latest",
        json: bool = False,
    ) -> None:
        """Attack the models of a finished run: who was in the training data, whose is a sample, how much the gradient shows.

        The data have to be here. Attacks: usual (membership by the loss, and whose a sample is), ratio (membership by shadow
        runs, each as long as the run), canaries (a bound of epsilon from below, by one more run), inversion (images from the
        gradient of one step). The results go to leakage.json of the run's folder, beside those of the other attacks.

        Args:
            run: Folder of the run.
            attack: The attack.
            samples: Samples to try, at most, of each model's training and other data.
            shadows: Number of shadow runs.
            canaries: Number of canaries, at most. Default: 100, or as many more as have the power.
            power: Probability with which canaries are to find a leak of twice the epsilon that is accounted for.
            unit: What a canary is: record or client. Default: what the run accounts for.
            batch: Images of the step that is inverted, 1 to 4.
            checkpoint: Models to attack: latest, best_local or best_global.
            json: Print the results as one line of JSON too, the last one.
        """
        folder = find_run(run)
        self.trainer.restore(self.model, self.datamodule, folder)
        with self._in_words():
            content = leakage_by(
                attack,
                self.trainer,
                self.datamodule,
                folder,
                samples,
                shadows,
                canaries,
                power,
                unit,
                batch,
                checkpoint,
            )
        if is_writing_process():
            show_leakage(content, attack, folder, console(), json)

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        """Let nothing lie there after bad input; tell an argument of the trainer by the full path of its key."""
        try:
            yield
        except Exception as error:
            if explain(error) is not None:
                leave_nothing(self.trainer)
            if isinstance(error, ConfigurationError) and str(error).partition("=")[0] in self.trainer.arguments:
                raise InputError(f"trainer.{error}") from error.__cause__
            raise

    def _dry_run(self, as_json: bool) -> None:
        with self._in_words():
            report = self.trainer.dry_run(self.model, self.datamodule)
        if is_writing_process():
            print(dumps(report.as_dict(), indent=2) if as_json else report)
        if report.problems:
            raise InputError(f"{len(report.problems)} clients failed in the dry run; the first: {report.problems[0]}.")

    def _evaluate(self, run: str, checkpoint: str, split: Literal["val", "test"], as_json: bool) -> None:
        folder = find_run(run)
        self.trainer.restore(self.model, self.datamodule, folder)
        score = self.trainer.test if split == "test" else self.trainer.validate
        results = score(checkpoint=checkpoint, verbose=False)
        if is_writing_process():
            screen = console()
            self._print(results, split, screen)
            rounds = f"after {self.trainer.rounds_done} of {self.trainer.max_rounds} rounds"
            say(screen, f"\nRun: {shown(folder)} ({rounds})")
            if as_json:
                fields = self._fields(results) | {"run": folder}
                print_json("validate" if split == "val" else "test", **fields)


def _as_table(predictions: Any, classes: Sequence[str]) -> str:
    """Return predictions as CSV; those of classes that have names stand under them."""
    if not hasattr(predictions, "shape") or len(predictions.shape) not in (1, 2):
        shape = tuple(predictions.shape) if hasattr(predictions, "shape") else type(predictions).__name__
        raise InputError(
            f"a CSV file has a line of numbers for each sample; predictions are {shape}. Let --out end with .pt."
        )
    values = predictions.reshape(len(predictions), -1).tolist()
    width = len(values[0]) if values else 1
    names = list(classes) if len(classes) == width else [f"output_{place}" for place in range(width)]
    names = ["prediction"] if width == 1 else names
    return as_csv([{"sample": number} | dict(zip(names, line, strict=True)) for number, line in enumerate(values)])
