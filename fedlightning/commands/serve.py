"""`fedlightning serve`, `fedlightning site` and `fedlightning certificates`: a federation between machines."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fedlightning.commands.folders import leave_nothing, to_resume
from fedlightning.commands.run import Commands
from fedlightning.commands.study import Parser
from fedlightning.config.errors import InputError, explain
from fedlightning.config.parsing import FederatedCLI
from fedlightning.engines.flower import certificates as files
from fedlightning.engines.flower import programs
from fedlightning.engines.sites.elsewhere import DataElsewhere
from fedlightning.engines.sites.link import connected
from fedlightning.errors import ConfigurationError
from fedlightning.run.files import is_writer
from fedlightning.run.lock import only_writer
from fedlightning.trainer import FederatedTrainer

AGAIN = 3.0
"""Seconds until a site tries again to be let in."""
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
        """Make model and trainer: the clients' data are elsewhere, so a `data` section is for the sites."""
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
        resume: str | None = None,
        allow_config_change: bool = False,
    ) -> None:
        """Train a federation whose clients are at sites: other machines, started with `fedlightning site`.

        It starts Flower's SuperLink, waits for the sites and trains with them. Data, personal models and records stay
        there. A data section of the configuration is not looked at. trainer.client_timeout has to be set.

        Args:
            sites: Number of sites to wait for before the run begins.
            host: Address to listen on: 0.0.0.0 for all of this machine.
            port: Port to listen on.
            folder: Folder for what Flower keeps.
            certificates: The server's folder that `fedlightning certificates` has made.
            insecure: No TLS and no authentication, for a machine of your own only.
            resume: Resume an interrupted run: "last", "auto", or the folder of a run.
            allow_config_change: Resume although the configuration has changed, at the sites too.
        """
        if sites < 1:
            raise InputError(f"sites={sites} must be at least 1.")
        home = Path(folder).resolve()
        own = Path(certificates).resolve()
        if not insecure:
            files.needed(own, (files.CA, files.SERVER, files.KEY, files.SIGN, "sites"))
        programs.prepare(home / "flower")
        with only_writer(home), superlink(home, host, port, None if insecure else own, sites) as link, connected(link):
            try:
                self.trainer.fit(
                    self.model, DataElsewhere(), resume=to_resume(resume), allow_config_change=allow_config_change
                )
                if self.trainer.stopped_by is None and self._has_tests():
                    self.trainer.test(checkpoint="all", verbose=False)
            except Exception as error:
                if explain(error) is not None:
                    leave_nothing(self.trainer)
                raise self._with_path(error) from error.__cause__
        if is_writer():
            self._report()
        if self.trainer.stopped_by is not None:
            raise SystemExit(self.trainer.stopped_by.code)

    def _has_tests(self) -> bool:
        federation = self.trainer.federation
        known = None if federation is None else federation.engine.runner.described
        return known is not None and any(known.num_samples(client, "test") for client in known.client_ids)

    def _report(self) -> None:
        from fedlightning.commands.terminal import console

        self.datamodule = self.trainer.federation.engine.runner.described  # type: ignore[union-attr]
        self._show(self.trainer.results, console())


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
        """
        from fedlightning.arguments import federated_data
        from fedlightning.datamodules.held_out import without
        from fedlightning.engines.sites.site import Site

        home = Path(folder).resolve()
        own = Path(certificates or f"certificates/{name}").resolve()
        if not insecure:
            files.needed(own, (files.CA, files.SITE, files.SIGNED))
        data = federated_data(self.datamodule, None, None, None)
        if clients is not None:
            data.prepare_data()
            data.setup("fit")
            known, here = data.client_ids, [str(client) for client in clients]
            missing = next((client for client in here if client not in known), None)
            if missing is not None:
                raise InputError(f"clients: there is no client '{missing}'. The data have {', '.join(known[:20])}.")
            data = without(data, [client for client in known if client not in here])
        site = Site(name, self.trainer.blueprint(self.model), data, home)
        programs.prepare(home / "flower")
        with only_writer(home):
            print(f"Site '{name}' takes part in what {superlink} asks for. Stop it with Ctrl-C.", flush=True)
            while True:  # a SuperNode ends where the SuperLink does not know it yet, or no more
                with supernode(home, superlink, None if insecure else own) as take_part:
                    take_part(site.answer)
                print(
                    f"{superlink} does not let this site in, or is gone (see {home / 'supernode.log'}). Trying again.",
                    flush=True,
                )
                time.sleep(AGAIN)


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
    local = "127.0.0.1" if host in ("0.0.0.0", "::") else host
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

        def take_part(answer: Any) -> None:
            known = answer if own is None else signatures.verified(answer, own / files.SIGNED)
            runtime.serve_site(address, known, lives)

        yield take_part


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
