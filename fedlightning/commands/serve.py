"""`fedlightning serve`, `fedlightning site` and `fedlightning certificates`: a federation between machines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

from fedlightning.commands.folders import leave_nothing, to_resume
from fedlightning.commands.run import Commands
from fedlightning.commands.study import Parser
from fedlightning.config.errors import InputError, explain
from fedlightning.config.parsing import FederatedCLI
from fedlightning.datamodules.public_only import PublicDataModule
from fedlightning.engines.flower import certificates as files
from fedlightning.engines.flower import programs, reach
from fedlightning.engines.sites.board import Board, Run, showing
from fedlightning.engines.sites.diary import Diary
from fedlightning.engines.sites.elsewhere import DataElsewhere
from fedlightning.engines.sites.link import Answer, connected
from fedlightning.engines.sites.site import Site
from fedlightning.engines.sites.status import NAME, printable
from fedlightning.errors import ConfigurationError
from fedlightning.run.files import is_writer
from fedlightning.run.lock import holder_of, only_writer
from fedlightning.trainer import FederatedTrainer

AGAIN = 3.0
"""Seconds until a site tries again to be let in."""
LET_IN, FAILED = "SuperNode ID", "Connection attempt failed"
"""What a SuperNode says when it is let in, and when it reaches nobody."""
DESCRIPTION = (
    "Make certificates and keys for a server and its sites, in a folder for each machine. Give each its own only."
)
EXAMPLES = """examples:
  fedlightning certificates --hosts fl.example.org --sites cleveland hungarian long-beach
  fedlightning certificates --add --sites switzerland
"""


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
        if self.config.trainer.engine not in ("sequential", "flower"):
            raise InputError(
                f"trainer.engine={self.config.trainer.engine!r}: clients at sites train there. Leave it out, or 'flower'."
            )
        self.config.trainer.engine = "flower"
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
    ) -> None:
        """Train a federation whose clients are at sites: other machines, started with `fedlightning site`.

        It starts Flower's SuperLink, waits for the sites and trains with them. Data, personal models and records stay
        there. A data section of the configuration is not looked at, but for a PublicDataModule: the public data that some
        methods need, which every site has too. trainer.client_timeout has to be set.

        Args:
            sites: Number of sites to wait for before the run begins.
            host: Address to listen on: 0.0.0.0 for all of this machine.
            port: Port to listen on.
            folder: Folder for what Flower keeps.
            certificates: The server's folder that `fedlightning certificates` has made.
            insecure: No TLS and no authentication, for a machine of your own only.
            export: Where the clients' models are when the run ends: at their "sites", or at the "server", if every site
                allows it by the same option.
            resume: Resume an interrupted run: "last", "auto", or the folder of a run.
            allow_config_change: Resume although the configuration has changed, at the sites too.
            allow_new_clients: Resume although there are more sites or clients than before, which join the run.
        """
        if sites < 1:
            raise InputError(f"sites={sites} must be at least 1.")
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
        if self.trainer.arguments["client_timeout"] is None:
            raise InputError(
                "trainer.client_timeout is not set: set it to the seconds that a visit of a client may take at most, with "
                "the way there and back. A site that is gone would be waited for for ever."
            )
        _free(home, "the server")
        reach.check_port(host, port)
        if not insecure:
            reach.check_certificate(own, programs.itself(host))
        programs.prepare(home / "flower")
        with (
            only_writer(home),
            _told(Board(home, sites, self._shown, known)) as board,
            superlink(home, host, port, None if insecure else own, sites) as link,
            connected(link, export == "server"),
            showing(board),
        ):
            try:
                self.trainer.fit(
                    self.model,
                    self.datamodule or DataElsewhere(),
                    resume=to_resume(resume),
                    allow_config_change=allow_config_change,
                    allow_new_clients=allow_new_clients,
                )
                if self.trainer.stopped_by is None and self._has_tests():
                    self.trainer.test(checkpoint="all", verbose=False)
            except Exception as error:
                if explain(error) is not None:
                    leave_nothing(self.trainer)
                raise self._with_path(error) from error.__cause__
            if self.trainer.stopped_by is not None:
                board.outcome = "stopped by a signal; it goes on with --resume last"
        if is_writer():
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
        from fedlightning.commands.terminal import console

        self.datamodule = self.trainer.federation.engine.runner.described  # type: ignore[union-attr]
        self._show(self.trainer.results, console())


def _is_public(section: Any) -> bool:
    """Whether a data section has public data and nothing else."""
    module, _, name = str(getattr(section, "class_path", "")).rpartition(".")
    kind = getattr(sys.modules.get(module), name, None)  # the parser has imported it
    return isinstance(kind, type) and issubclass(kind, PublicDataModule)


class AtSite(FederatedCLI):
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
    ) -> None:
        """Take part in a federation with data that stay here.

        It starts Flower's SuperNode and trains what the server asks for, until it is stopped. The configuration is the run's,
        with this site's own data section; the server's must be the same but for that, and is refused otherwise. Models and
        records of the clients lie in a folder here: start the site with the same folder again after it was stopped.

        Args:
            superlink: Address of the server, host:port.
            name: Name of this site, for people.
            clients: Those of the data's clients that are here, as [a, b]; default: all.
            folder: Folder for records and models.
            certificates: The site's folder that `fedlightning certificates` has made; default: certificates/NAME.
            insecure: No TLS and no authentication, for a server on a machine of your own only.
            export: Whether the clients' models stay at the "sites", or the "server" is given them when a run ends, if it
                asks for them.
        """
        from fedlightning.arguments import federated_data
        from fedlightning.datamodules.held_out import without

        reach.host_and_port(superlink)
        if not files.is_name(name) or name != printable(name, NAME):
            raise InputError(f"name={name!r} is no name of a site: it is one of a folder, of 1 to {NAME} characters.")
        if clients == []:
            raise InputError("clients=[]: a site has one client at least. Leave it out for all of its data's clients.")
        home = Path(folder).resolve()
        own = Path(certificates or f"certificates/{name}").resolve()
        if not insecure:
            files.needed(own, (files.CA, files.SITE, files.SIGNED))
        _free(home, "a site")
        data = federated_data(self.datamodule, None, None, None)
        data.prepare_data()
        data.setup("fit")  # now: data that are not there are said before anybody waits for this site
        known = here = list(data.client_ids)
        if clients is not None:
            here = [str(client) for client in clients]
            missing = next((client for client in here if client not in known), None)
            if missing is not None:
                raise InputError(f"clients: there is no client '{missing}'. The data have {', '.join(known[:20])}.")
            data = without(data, [client for client in known if client not in here])
        site = Site(name, self.trainer.blueprint(self.model), data, home, export=export == "server")
        programs.prepare(home / "flower")
        stopped = False
        with only_writer(home):
            print(f"Site '{name}' takes part in what {superlink} asks for. Stop it with Ctrl-C.", flush=True)
            site.diary = Diary(home, name, superlink, here)
            try:
                take_part(site, home, superlink, None if insecure else own)
            except KeyboardInterrupt:
                stopped = True
            finally:
                site.diary.end()
        if stopped:
            print("Stopped. Start it again with the same folder.", flush=True)
            raise SystemExit(130)


def take_part(site: Site, home: Path, server: str, own: Path | None) -> None:
    """Take part for ever: a SuperNode ends where the SuperLink does not know it yet, or no more.

    Args:
        site: The site.
        home: Folder for what Flower keeps.
        server: Address of the SuperLink.
        own: The site's certificates and keys; `None`: without.
    """
    diary, authority = site.diary, None if own is None else own / files.CA
    assert diary is not None
    log = programs.Log(home / "supernode.log")

    def lives() -> bool:
        """Look at what the SuperNode says, beside the work."""
        for line in log.new_lines():
            if LET_IN in line:
                diary.connection(None)
            elif FAILED in line:
                diary.connection(reach.unreachable(server, authority))
        return True

    while True:
        reason = reach.unreachable(server, authority)
        if reason is not None:
            diary.connection(reason)
        else:
            with supernode(home, server, own) as answer_all:
                answer_all(site.answer, lives)
            lives()
            reason = reach.unreachable(server, authority)
            key = "" if own is None else f"{own / files.SITE}, or another process is connected with it"
            said = log.reason()
            if said is None:  # it was killed
                reason = reason or f"This site's SuperNode has ended ({home / 'supernode.log'})."
            diary.connection(
                reason
                or f"{server} does not let this site in: {said}" + (f" It does not know the key {key}." if key else "")
            )
        time.sleep(AGAIN)


def _free(home: Path, who: str) -> None:
    """Refuse a folder that another process works with.

    Raises:
        InputError: Naming that process.
    """
    holder = holder_of(home)
    if holder is not None:
        raise InputError(
            f"folder={home} is that of process {holder.get('pid', '?')} on {holder.get('host', '?')} since "
            f"{holder.get('since', '?')}: {who} needs a --folder of its own."
        )


@contextmanager
def _told(board: Board) -> Iterator[Board]:
    """Let a board say how the block has ended."""
    try:
        yield board
    except BaseException as error:
        board.end(
            f"ended by an error: {explain(error) or type(error).__name__}"
            if isinstance(error, Exception)
            else "stopped"
        )
        raise
    board.end(board.outcome)


@contextmanager
def superlink(home: Path, host: str, port: int, own: Path | None, sites: int) -> Iterator[Any]:
    """Run a SuperLink inside the block, and give the connection to its sites.

    Args:
        home: Folder for what it keeps.
        host: Address that it listens on.
        port: Its port.
        own: The server's certificates and keys; `None`: without.
        sites: Number of sites to wait for.
    """
    secret_file, secret = programs.secret_file(home)
    words = ["--host", host, "--port", str(port), "--database", str(home / "superlink.db")]
    words += ["--isolation", "process", "--superexec-auth-secret-file", str(secret_file)]
    words += ["--disable-runtime-dependency-installation"]
    if own is None:
        words += ["--insecure"]
    else:
        ca, certificate, key = files.needed(own, (files.CA, files.SERVER, files.KEY))
        words += ["--ssl-ca-certfile", str(ca), "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]
        words += ["--enable-supernode-auth"]
    local = programs.itself(host)
    with ExitStack() as stack:
        lives = stack.enter_context(programs.running("flower-superlink", words, port, home / "superlink.log", host))
        from fedlightning.engines.flower import runtime, signatures

        address = runtime.Address(f"{local}:{port}", None if own is None else str(own / files.CA), secret)
        runtime.stop_runs(address)
        if own is None:
            link = runtime.FlowerLink(address, sites, lives=lives)
        else:
            allowed = runtime.register(address, sorted((own / "sites").glob("*.pub")))
            link = runtime.FlowerLink(address, sites, allowed, signatures.signer(own / files.SIGN), lives)
        stack.callback(link.close)
        yield link


@contextmanager
def supernode(home: Path, server: str, own: Path | None) -> Iterator[Any]:
    """Run a SuperNode inside the block, and give what answers its messages with a site.

    Args:
        home: Folder for what it keeps.
        server: Address of the SuperLink.
        own: The site's certificates and keys; `None`: without.
    """
    secret_file, secret = programs.secret_file(home)
    port = programs.free_port()
    words = ["--superlink", server, "--port", str(port), "--isolation", "process"]
    words += ["--superexec-auth-secret-file", str(secret_file)]
    if own is None:
        words += ["--insecure"]
    else:
        words += ["--root-certificates", str(own / files.CA), "--auth-supernode-private-key", str(own / files.SITE)]
    with programs.running("flower-supernode", words, port, home / "supernode.log") as lives:
        from fedlightning.engines.flower import runtime, signatures

        address = runtime.Address(f"127.0.0.1:{port}", None, secret)

        def answer_all(answer: Answer, beside: Callable[[], bool]) -> None:
            known = answer if own is None else signatures.verified(answer, own / files.SIGNED)
            runtime.serve_site(address, known, lambda: beside() and lives())

        yield answer_all


CLASSES: dict[str, type[FederatedCLI]] = {"serve": Serve, "site": AtSite}
"""Commands of this file that read a configuration."""


def parser() -> Parser:
    """Return the parser of `fedlightning certificates`."""
    made = Parser("certificates", "--sites NAME [NAME ...]", DESCRIPTION, EXAMPLES)
    made.add_argument(
        "--hosts",
        nargs="+",
        help="names and addresses under which sites reach the server (default: 127.0.0.1 localhost)",
    )
    made.add_argument("--sites", nargs="+", required=True, help="names of the sites")
    made.add_argument("--out", default="certificates", help="new folder (default: certificates)")
    made.add_argument("--add", action="store_true", help="make keys for further sites of a folder that is there")
    return made


def certificates(words: Sequence[str]) -> int:
    """Make certificates and keys for a server and its sites."""
    given = parser().parse_args(list(words))
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise ConfigurationError("Certificates need Flower's packages: pip install 'fedlightning[flower]'.") from None
    if given.add and given.hosts is not None:
        raise InputError("--hosts is in the server's certificate, which --add leaves as it is. Leave it out.")
    hosts = given.hosts or ["127.0.0.1", "localhost"]
    folder = Path(given.out)
    for made in files.add(folder, given.sites) if given.add else files.make(folder, hosts, given.sites):
        print(made)
    return 0
