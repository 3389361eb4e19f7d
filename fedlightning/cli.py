"""The console script `fedlightning`. A command is imported when it is run."""

from __future__ import annotations

import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TextIO

from fedlightning.commands import COMMANDS
from fedlightning.compat.pytorch_lightning import use_lightning_if_possible

Command = Callable[[list[str]], int]
"""What carries out a command: the words that follow it -> exit code."""
HELP = f"""usage: fedlightning COMMAND [OPTIONS]

Federated learning with the LightningModule you already have.

commands:
{chr(10).join(f"  {name:<12} {text}" for name, text in COMMANDS.items())}

options:
  -h, --help    show this text, or the options of a command
  --version     print the version
  --debug       show the traceback of every error (also: FEDLIGHTNING_DEBUG=1)

examples:
  fedlightning fit --config configs/quickstart.yaml
  fedlightning fit --config configs/quickstart.yaml --config configs/algorithms/fedprox.yaml --trainer.callbacks.mu=0.3
  fedlightning test --run runs/quickstart/version_0 --checkpoint best_local
  fedlightning partition --config configs/quickstart.yaml --images 8     (who holds what, before you train)
  fedlightning compare configs/heart_disease/*.yaml --seeds 5 --out runs/heart
  fedlightning compare configs/heart_disease/*.yaml --leave-one-site-out   (each hospital once unseen)
  fedlightning watch runs/heart          (a page that follows a run, or the runs of an experiment)
  fedlightning reproduce closed_forms
  fedlightning algorithms fenda
  fedlightning configs copy quickstart

Exit codes: 0 success, 1 a crash or failed runs, 2 bad input (one sentence says what is wrong), 130 interrupted,
128 and the signal's number after another signal (143 for SIGTERM).
"""


def main(args: Sequence[str] | None = None, instead: Mapping[str, Command] = MappingProxyType({})) -> int:
    """Run `fedlightning` and return its exit code.

    Args:
        args: Words of the command line. Default: those of this process.
        instead: Command -> what carries it out in place of the usual.
    """
    words = list(sys.argv[1:] if args is None else args)
    debug = "--debug" in words or os.environ.get("FEDLIGHTNING_DEBUG", "0") not in ("", "0")
    words = [word for word in words if word != "--debug"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if words[0] == "--version":
        from fedlightning import __version__

        print(f"fedlightning {__version__}")
        return 0
    command, rest = words[0], words[1:]
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # classes in the current folder; last, so that nothing installed is shadowed
    use_lightning_if_possible()
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # they are about Lightning's own calls
    with _short_warnings(command in ("serve", "site")):
        try:
            return (instead.get(command) or _find(command))(rest)
        except SystemExit as stop:  # raised by --help and --print_config
            # what Lightning's Trainer makes of it
            if isinstance(stop.__cause__ or stop.__context__, KeyboardInterrupt):
                return _interrupted(command)
            return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 2
        except KeyboardInterrupt:
            return _interrupted(command)
        except BrokenPipeError:  # the reader of a pipe (head, less) has ended
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except Exception as error:
            return _report(command, error, debug)


def _interrupted(command: str) -> int:
    if command == "site":
        print("\nStopped. Go on with the same command.", file=sys.stderr)
    else:
        again = command if command == "serve" else "fit"
        print(f"\nInterrupted. Go on with: fedlightning {again} --config ... --resume auto", file=sys.stderr)
    return 130


def _find(command: str) -> Command:
    if command in ("fit", "validate", "test", "evaluate", "predict", "onboard", "leakage", "partition"):
        from fedlightning.commands.run import run

        return lambda rest: run(command, rest)
    if command in ("serve", "site"):
        from fedlightning.commands.serve import run as run_between_machines

        return lambda rest: run_between_machines(command, rest)
    if command == "sites":
        from fedlightning.commands.sites import sites

        return sites
    if command == "certificates":
        from fedlightning.commands.certificates import certificates

        return certificates
    if command == "compare":
        from fedlightning.commands.compare import compare

        return lambda rest: compare(rest, main)
    if command == "sweep":
        from fedlightning.commands.sweep import sweep

        return lambda rest: sweep(rest, main)
    if command == "reproduce":
        from fedlightning.commands.reproduce import reproduce

        return lambda rest: reproduce(rest, main)
    if command == "league":
        from fedlightning.commands.league import league

        return lambda rest: league(rest, main)
    if command == "watch":
        from fedlightning.commands.watch import watch

        return watch
    if command == "report":
        from fedlightning.commands.report import report

        return report
    if command == "card":
        from fedlightning.commands.card import card

        return card
    if command == "algorithms":
        from fedlightning.commands.algorithms import algorithms

        return algorithms
    if command == "configs":
        from fedlightning.commands.configs import configs

        return configs
    if command == "completion":
        from fedlightning.commands.completion import completion

        return completion
    from fedlightning.config.input_errors import InputError, suggestion

    hint = suggestion(command, COMMANDS) or f"Commands: {', '.join(COMMANDS)}."
    raise InputError(f"There is no command '{command}'. {hint}")


def _report(command: str, error: Exception, debug: bool) -> int:
    """Print what went wrong on stderr and return the exit code."""
    from fedlightning.config.input_errors import explain

    sentence = explain(error)
    if debug or sentence is None:
        traceback.print_exception(error)
    if sentence is None:
        return 1
    if os.environ.get("LOCAL_RANK", "0") != "0":  # under DDP only the first process prints
        return 2
    name = f"fedlightning {command}" if command in COMMANDS else "fedlightning"
    print(f"{name}: {sentence}", file=sys.stderr)
    return 2


@contextmanager
def _short_warnings(timed: bool = False) -> Iterator[None]:
    """Print warnings as one line, without their place in the source; `timed`: with the time in front, as for days."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: Any = None,
    ) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S ") if timed else ""
        print(f"{stamp}Warning: {message}", file=file or sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


if __name__ == "__main__":
    from fedlightning.cli import main as entry  # child processes must find `main` in fedlightning.cli, not __main__

    sys.exit(entry())
