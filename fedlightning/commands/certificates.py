"""`fedlightning certificates`: what a server and its sites know each other by."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedlightning.commands.study import Parser
from fedlightning.config.errors import InputError
from fedlightning.errors import ConfigurationError, missing_package
from fedlightning.sites.flower import certificates as files

DESCRIPTION = (
    "Make certificates and keys for a server and its sites, in a folder for each machine. Give each its own only."
)
EXAMPLES = """examples:
  fedlightning certificates --hosts fl.example.org --sites cleveland hungarian long-beach
  fedlightning certificates --add --sites switzerland
"""


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
        raise ConfigurationError(missing_package("Certificates need cryptography, as Flower does", "flower")) from None
    if given.add and given.hosts is not None:
        raise InputError("--hosts is in the server's certificate, which --add leaves as it is. Leave it out.")
    hosts = given.hosts or ["127.0.0.1", "localhost"]
    folder = Path(given.out)
    for made in files.add(folder, given.sites) if given.add else files.make(folder, hosts, given.sites):
        print(made)
    return 0
