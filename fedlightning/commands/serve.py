"""`fedlightning serve` and `fedlightning site`: the server and the sites of a federation between machines."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule

from fedlightning.commands.evaluate import show_evaluation
from fedlightning.commands.folders import refuse_taken, to_resume
from fedlightning.commands.run import Commands
from fedlightning.commands.terminal import console
from fedlightning.config.input_errors import InputError, explain
from fedlightning.config.parsing import CommandLine
from fedlightning.config.short_forms import CLASS_PATHS, engine_of
from fedlightning.datamodules import FederatedDataModule, NaturalPartitioner, Partitioned
from fedlightning.datamodules.public_only import PublicDataModule
from fedlightning.errors import listed, warn
from fedlightning.options import Flower, Sequential
from fedlightning.ranges import PositiveInt
from fedlightning.resume.lock import only_writer
from fedlightning.resume.stop_requests import Terminated, endings
from fedlightning.sites.engine import DataElsewhere
from fedlightning.sites.flower import certificate_files as files
from fedlightning.sites.flower import programs, reachability
from fedlightning.sites.link import connected
from fedlightning.sites.run_quotas import MAX_RUNS
from fedlightning.sites.server_log import Run, ServerLog, showing
from fedlightning.sites.site import Site
from fedlightning.sites.site_log import SiteLog
from fedlightning.sites.status import NAME, printable, stamped
from fedlightning.storage.files import is_writing_process
from fedlightning.trainer import FederatedTrainer

RETRY_SECONDS = 3.0
"""Seconds until a site tries again to be let in."""
LET_IN, FAILED = "SuperNode ID", "Connection attempt failed"
"""What a SuperNode says when it is let in, and when it reaches nobody."""


class AtSite(CommandLine):
    """A site's command. The docstring of its method is the text of `--help`."""

    trainer: FederatedTrainer  # type: ignore[assignment]

    def site(
        self,
        superlink: str,
        name: str,
        clients: list[str | int] | None = None,
        folder: str = "site",
        certificates: str | None = None,
        insecure: bool = False,
        export: Literal["sites", "server"] = "sites",
        send_texts: bool = False,
        allow_other_code: bool = False,
        most_runs: int = MAX_RUNS,
    ) -> None:
        """Take part in a federation with data that stay here.

        It starts Flower's SuperNode and trains what the server asks for, until it is stopped. The configuration is the run's,
        with this site's own data section; the server's must be the same but for that, and is refused otherwise. A data module
        that knows no clients is one client, which is called as the site is. Models and records of the clients lie in a folder
        here: start the site with the same folder again after it was stopped. It keeps most_runs of them at most
        (`fedlightning sites --runs`).

        Args:
            superlink: Host and port of the server.
            name: Name of this site, as in its certificate.
            clients: Ids of the clients that take part. Default: all of the data's clients.
            folder: Folder for models, records and logs of the clients.
            certificates: Folder of this site's certificate and keys. Default: certificates/NAME.
            insecure: Connect without certificates, for trials on one machine.
            export: Where clients' models stay: sites (here), or server (there too). As at the server.
            send_texts: Let the texts of errors leave, and what modules log besides numbers.
            allow_other_code: Take part although the server has other code under the same names, if it allows that too.
            most_runs: Runs that are kept in the folder.
        """
        from fedlightning.arguments import federated_data
        from fedlightning.datamodules.held_out import exclude_clients

        reachability.host_and_port(superlink)
        if not files.is_name(name) or name != printable(name, NAME):
            raise InputError(
                f"name={name!r} is not a name of a site: it is one of a folder, of 1 to {NAME} characters."
            )
        if most_runs < 1:
            raise InputError(f"most_runs={most_runs} must be at least 1.")
        if clients == []:
            raise InputError("clients=[]: a site has one client at least. Leave it out for all of its data's clients.")
        home = Path(folder).resolve()
        keys = Path(certificates or f"certificates/{name}").resolve()
        if not insecure:
            files.needed(keys, (files.CA, files.SITE, files.SIGNED))
        refuse_taken(home, "a site")
        data = federated_data(one_client(self.datamodule, name), None, None, None)
        data.prepare_data()
        data.setup("fit")  # now: data that are not there are said before anybody waits for this site
        if data.named_by_file:
            options = ", ".join(f"{option}: {value}" for option, value in data.named_by_file.items())
            raise InputError(
                f"this site's file alone decides {options}. Another site's may have other words, which would mean something "
                "else to the network: give these options in the data section of every site. With `categories` other words "
                "share one more feature: `fedlightning partition` says the in_features."
            )
        all_clients = here = list(data.client_ids)
        if clients is not None:
            here = [str(client) for client in clients]
            missing = next((client for client in here if client not in all_clients), None)
            if missing is not None:
                raise InputError(
                    f"clients: there is no client '{missing}'. The data have {', '.join(all_clients[:20])}."
                )
            data = exclude_clients(data, [client for client in all_clients if client not in here])
        programs.prepare(home / "flower")
        blueprint, may_export = self.trainer.blueprint(self.model), export == "server"
        site = Site(
            name,
            blueprint,
            data,
            home,
            export=may_export,
            send_texts=send_texts,
            allow_other_code=allow_other_code,
            most_runs=most_runs,
        )
        stopped: BaseException | None = None
        with only_writer(home), endings() as request:
            print(stamped(f"Site '{name}' takes part in what {superlink} asks for. Stop it with Ctrl-C."), flush=True)
            site.log = SiteLog(home, name, superlink, here)
            try:
                take_part(site, home, superlink, None if insecure else keys)
            except (KeyboardInterrupt, Terminated) as ending:
                stopped = ending
            finally:
                site.log.end()
        if stopped is not None:
            print(stamped(f"Stopped by {request.name or 'Ctrl-C'}. Start it again with the same folder."), flush=True)
            raise SystemExit(request.code or 130)


def one_client(data: Any, name: str) -> Any:
    """Return a plain data module as that of one client, which is called as the site is; any other as it is."""
    if not isinstance(data, LightningDataModule) or isinstance(data, FederatedDataModule):
        return data
    print(stamped(f"{type(data).__name__} knows no clients: all of its data are those of client '{name}'."), flush=True)
    whole = NaturalPartitioner(groups=lambda dataset: np.full(len(dataset), name))
    return Partitioned(data, whole, val_fraction=0.0, test_fraction=0.0)  # what it has for validation and test


def take_part(site: Site, home: Path, server: str, keys: Path | None) -> None:
    """Take part for ever: a SuperNode ends where the SuperLink does not know it yet, or no more."""
    site_log, authority = site.log, None if keys is None else keys / files.CA
    log = programs.Log(home / "supernode.log")

    def lives() -> bool:
        """Look at what the SuperNode says, beside the work."""
        for line in log.new_lines():
            if LET_IN in line:
                site_log.connection(None)
            elif FAILED in line:
                site_log.connection(reachability.unreachable(server, authority))
        return True

    while True:
        reason = reachability.unreachable(server, authority)
        if reason is not None:
            site_log.connection(reason)
        else:
            with programs.supernode(home, server, keys, site.name, site_log.refused) as answer_all:
                answer_all(site.answer, lives)
            lives()
            reason = reachability.unreachable(server, authority)
            key = "" if keys is None else f"{keys / files.SITE}, or another process is connected with it"
            reason_of_node = log.reason()
            if reason_of_node is None:  # it was killed
                reason = reason or f"This site's SuperNode has ended ({home / 'supernode.log'})."
            site_log.connection(
                reason
                or f"{server} does not let this site in: {reason_of_node}"
                + (f" It does not know the key {key}." if key else "")
            )
        time.sleep(RETRY_SECONDS)


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

        Args:
            sites: Number of sites to wait for.
            host: Address to listen on.
            port: Port to listen on.
            folder: Folder of the server's state and logs.
            certificates: Folder of the server's certificates and keys.
            insecure: Let sites connect without certificates: whoever reaches the port can take part.
            export: Where clients' models stay: sites (there), or server (here too). As at the sites.
            resume: Go on with a run: its folder, last, or auto (last, or a new run where there is none).
            allow_config_change: Resume although the configuration has changed; summary.json lists what has.
            allow_new_clients: Resume although sites have clients that the run did not train.
            allow_other_code: Train with sites that have other code under the same names, if they allow that too.
            max_share: Largest share of all training samples that a site may say it has.
            evaluate: Train nothing, and score the model of trainer.init_from.
            least: Fewest test samples of a client that is scored.
        """
        if evaluate and self.trainer.arguments["init_from"] is None:
            raise InputError("there is no model to evaluate: give trainer.init_from.")
        callbacks = self.trainer.options.callbacks
        training = [callback.key for callback in callbacks if callback not in callbacks.protecting]
        if evaluate and training:
            raise InputError(
                f"evaluate=true trains nothing, and trainer.callbacks has {listed(training)}. Take them out of the file, "
                "here and at the sites, which compare theirs with it."
            )
        if sites < 1:
            raise InputError(f"sites={sites} must be at least 1.")
        if not 0 < max_share <= 1:
            raise InputError(
                f"max_share={max_share} must be in (0, 1]: the share of all samples that one site may have."
            )
        home = Path(folder).resolve()
        keys = Path(certificates).resolve()
        site_names: list[str] = []
        if not insecure:
            files.needed(keys, (files.CA, files.SERVER, files.KEY, files.SIGN, "sites"))
            site_names = sorted(path.stem for path in (keys / "sites").glob("*.pub"))
            if sites > len(site_names):
                raise InputError(
                    f"sites={sites}, but {keys / 'sites'} has keys of {len(site_names)}: no other can connect. Give fewer, "
                    "or make certificates for all sites."
                )
        if insecure and not reachability.is_own(host):
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
        reachability.check_port(host, port)
        if not insecure:
            reachability.check_certificate(keys, programs.itself(host))
        programs.prepare(home / "flower")
        with (
            only_writer(home),
            _log_end(ServerLog(home, sites, self._shown, site_names)) as log,
            programs.superlink(home, host, port, None if insecure else keys, sites) as link,
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
        if is_writing_process() and evaluate:
            show_evaluation(self.trainer, None, "test", least, console(), False)
        elif is_writing_process():
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
        data = None if federation is None else federation.engine.runner.described
        return data is not None and any(data.num_samples(client, "test") for client in data.client_ids)

    def _report(self) -> None:
        self.datamodule = self.trainer.federation.engine.runner.described  # type: ignore[union-attr]
        self._show(self.trainer.results, console())


def _is_public(section: Any) -> bool:
    """Whether a data section has public data and nothing else."""
    module, _, name = str(getattr(section, "class_path", "")).rpartition(".")
    kind = getattr(sys.modules.get(module), name, None)  # the parser has imported it
    return isinstance(kind, type) and issubclass(kind, PublicDataModule)


@contextmanager
def _log_end(log: ServerLog) -> Iterator[ServerLog]:
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
