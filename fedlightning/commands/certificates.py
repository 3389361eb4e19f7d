"""`fedlightning certificates`: what a server and its sites know each other by."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedlightning.commands.study_options import Parser
from fedlightning.config.input_errors import InputError
from fedlightning.errors import ConfigurationError, missing_package
from fedlightning.sites.flower import certificate_files as files

DESCRIPTION = (
    "Make certificates and keys for a server and its sites, in a folder for each machine. Give each its own only."
)
EXAMPLES = """examples:
  fedlightning certificates --hosts fl.example.org --sites cleveland hungarian long-beach
  fedlightning certificates --add --sites switzerland
"""


def parser() -> Parser:
    """Return the parser of `fedlightning certificates`."""
    command = Parser("certificates", "--sites NAME [NAME ...]", DESCRIPTION, EXAMPLES)
    command.add_argument(
        "--hosts",
        nargs="+",
        help="names and addresses under which sites reach the server (default: 127.0.0.1 localhost)",
    )
    command.add_argument("--sites", nargs="+", required=True, help="names of the sites")
    command.add_argument("--out", default="certificates", help="new folder (default: certificates)")
    command.add_argument("--add", action="store_true", help="make keys for further sites of a folder that is there")
    return command


def certificates(words: Sequence[str]) -> int:
    """Make certificates and keys for a server and its sites."""
    options = parser().parse_args(list(words))
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise ConfigurationError(missing_package("Certificates need cryptography, as Flower does", "flower")) from None
    if options.add and options.hosts is not None:
        raise InputError("--hosts is in the server's certificate, which --add leaves as it is. Leave it out.")
    hosts = options.hosts or ["127.0.0.1", "localhost"]
    folder = Path(options.out)
    for file in files.add(folder, options.sites) if options.add else files.make(folder, hosts, options.sites):
        print(file)
    return 0
