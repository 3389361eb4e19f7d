"""`fedlightning serve`: the server of a federation between machines."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from jsonargparse import Namespace

from fedlightning.commands.evaluate import show_evaluation
from fedlightning.commands.folders import refuse_taken, to_resume
from fedlightning.commands.run import Commands
from fedlightning.commands.site import AtSite
from fedlightning.commands.terminal import console
from fedlightning.config.errors import InputError, explain
from fedlightning.config.parsing import CommandLine
from fedlightning.config.short_forms import CLASS_PATHS, engine_of
from fedlightning.datamodules.public_only import PublicDataModule
from fedlightning.errors import warn
from fedlightning.options import Flower, Sequential
from fedlightning.ranges import PositiveInt
from fedlightning.resume.lock import only_writer
from fedlightning.sites.flower import certificates as files
from fedlightning.sites.flower import programs
from fedlightning.sites.flower import reachability as reach
from fedlightning.sites.link import connected
from fedlightning.sites.remote_data import DataElsewhere
from fedlightning.sites.server_log import Run, ServerLog, showing
from fedlightning.storage.files import is_writer


def run(command: str, words: Sequence[str]) -> int:
    """Parse and carry out `serve` or `site`."""
    cli = CLASSES[command](command, words)
    getattr(cli, command)(**cli.options())
    return 0


class Serve(Commands):
    """The server's command. The docstring of its method is the text of `--help`."""

    needs_data = False

    def instantiate_classes(self) -> None:
        """Make model and trainer: the clients' data are elsewhere, so only public data are looked at."""
        if not _is_public(self.config.get("data")):
            self.config.data = None
        engine = engine_of(self.config.trainer.as_dict())
        if engine not in (Sequential, Flower):
            name = "None" if engine is None else repr(engine.name)
            raise InputError(f"trainer.engine={name}: clients at sites train there. Leave it out, or 'flower'.")
        self.config.trainer.engine = Namespace(class_path=CLASS_PATHS["flower"])
        super().instantiate_classes()

    def serve(
        self,
        sites: int,
        host: str = "127.0.0.1",
        port: int = 8443,
        folder: str = "serve",
        certificates: str = "certificates/server",
        insecure: bool = False,
        export: Literal["sites", "server"] = "sites",
        resume: str | None = None,
        allow_config_change: bool = False,
        allow_new_clients: bool = False,
        allow_other_code: bool = False,
        max_share: float = 1.0,
        evaluate: bool = False,
        least: PositiveInt = 10,
    ) -> None:
        """Train a federation whose clients are at sites: other machines, started with `fedlightning site`.

        It starts Flower's SuperLink, waits for the sites and trains with them. Data, personal models and records stay
        there. A data section of the configuration is not looked at, but for a PublicDataModule: the public data that some
        methods need, which every site has too. trainer.failures.timeout has to be set. A site that says it has more than
        max_share of all training samples is refused.

        With evaluate=true nothing is trained: the model of trainer.init_from is scored at the sites' clients that have at
        least so many test samples.
        """
        if evaluate and self.trainer.arguments["init_from"] is None:
            raise InputError("there is no model to evaluate: give trainer.init_from.")
        if sites < 1:
            raise InputError(f"sites={sites} must be at least 1.")
        if not 0 < max_share <= 1:
            raise InputError(
                f"max_share={max_share} must be in (0, 1]: the share of all samples that one site may have."
            )
        home = Path(folder).resolve()
        own = Path(certificates).resolve()
        known: list[str] = []
        if not insecure:
            files.needed(own, (files.CA, files.SERVER, files.KEY, files.SIGN, "sites"))
            known = sorted(path.stem for path in (own / "sites").glob("*.pub"))
            if sites > len(known):
                raise InputError(
                    f"sites={sites}, but {own / 'sites'} has keys of {len(known)}: no other can connect. Give fewer, or "
                    "make certificates for all sites."
                )
        if insecure and not reach.is_own(host):
            warn(
                f"insecure=True and host={host!r}: whoever reaches port {port} can take part under any name, and reads and "
                "changes what is sent. Make certificates with `fedlightning certificates`, or listen on 127.0.0.1."
            )
        if self.trainer.arguments["failures"].timeout is None:
            raise InputError(
                "trainer.failures.timeout is not set: set it to the seconds that a visit of a client may take at most, with "
                "the way there and back. A site that is gone would be waited for for ever."
            )
        refuse_taken(home, "the server")
        reach.check_port(host, port)
        if not insecure:
            reach.check_certificate(own, programs.itself(host))
        programs.prepare(home / "flower")
        with (
            only_writer(home),
            _told(ServerLog(home, sites, self._shown, known)) as log,
            programs.superlink(home, host, port, None if insecure else own, sites) as link,
            connected(link, export == "server", allow_other_code, max_share),
            showing(log),
        ):
            data = self.datamodule or DataElsewhere()
            with self._in_words():
                if evaluate:
                    self.trainer.evaluate(self.model, data, least=least)
                else:
                    self.trainer.fit(
                        self.model,
                        data,
                        resume=to_resume(resume),
                        allow_config_change=allow_config_change,
                        allow_new_clients=allow_new_clients,
                    )
                    if self.trainer.stopped_by is None and self._has_tests():
                        self._test_all()
            if self.trainer.stopped_by is not None:
                log.outcome = "stopped by a signal; it goes on with --resume auto"
        if is_writer() and evaluate:
            show_evaluation(self.trainer, None, "test", least, console(), False)
        elif is_writer():
            self._report()
        if self.trainer.stopped_by is not None:
            raise SystemExit(self.trainer.stopped_by.code)

    def _shown(self) -> Run:
        trainer, federation = self.trainer, self.trainer.federation
        folder = "" if trainer.run is None else str(trainer.run.path)
        if federation is None:
            return Run(folder, 0, trainer.max_rounds)
        return Run(folder, federation.rounds_done, trainer.max_rounds, federation.server.failures)

    def _has_tests(self) -> bool:
        federation = self.trainer.federation
        known = None if federation is None else federation.engine.runner.described
        return known is not None and any(known.num_samples(client, "test") for client in known.client_ids)

    def _report(self) -> None:
        self.datamodule = self.trainer.federation.engine.runner.described  # type: ignore[union-attr]
        self._show(self.trainer.results, console())


def _is_public(section: Any) -> bool:
    """Whether a data section has public data and nothing else."""
    module, _, name = str(getattr(section, "class_path", "")).rpartition(".")
    kind = getattr(sys.modules.get(module), name, None)  # the parser has imported it
    return isinstance(kind, type) and issubclass(kind, PublicDataModule)


@contextmanager
def _told(log: ServerLog) -> Iterator[ServerLog]:
    """Write down in the log how the block has ended."""
    try:
        yield log
    except BaseException as error:
        log.end(
            f"ended by an error: {explain(error) or type(error).__name__}"
            if isinstance(error, Exception)
            else "stopped"
        )
        raise
    log.end(log.outcome)


CLASSES: dict[str, type[CommandLine]] = {"serve": Serve, "site": AtSite}
"""Commands between machines that read a configuration."""
