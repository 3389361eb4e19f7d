"""`fedlightning completion`: a script that completes commands and options in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

_SCRIPT = """# fedlightning completion for {shell}; use it with: {use}
{preamble}_fedlightning() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{commands}"
  else
    case "$previous" in
      -c|--config|--override|--run|--resume|--out|--folder) COMPREPLY=($(compgen -f -- "$word")); return ;;
    esac
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o filenames -o bashdefault -F _fedlightning fedlightning
"""


def completion(words: Sequence[str]) -> int:
    """Print the completion script of a shell, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="fedlightning completion",
        description='Print a completion script. To use it: eval "$(fedlightning completion bash)", best in ~/.bashrc.',
        exit_on_error=False,
    )
    parser.add_argument("shell", choices=["bash", "zsh"], help="shell that the script is for")
    print(script(parser.parse_args(list(words)).shell), end="")
    return 0


def script(shell: str) -> str:
    """Return the completion script of `shell`, with the options of all parsers."""
    from fedlightning.catalogue import list_algorithms
    from fedlightning.commands import (
        COMMANDS,
        card,
        certificates,
        compare,
        configs,
        league,
        report,
        reproduce,
        serve,
        sites,
        sweep,
        watch,
    )
    from fedlightning.commands.run import Commands, cli_class
    from fedlightning.commands.study_options import PASSED_ON
    from fedlightning.config.class_names import class_names
    from fedlightning.config.parsing import CommandLine

    passed_on = [option for option in Commands.option_strings("fit") if PASSED_ON.match(option)]
    choices = {
        "algorithms": ["--json", *list_algorithms()],
        "completion": ["bash", "zsh"],
        "configs": ["list", "copy", "schema", "--to", "--force", "--json", *configs.names()],
        "compare": [*compare.parser().option_strings(), *passed_on, *class_names()],
        "sweep": [*sweep.parser().option_strings(), *passed_on, *class_names()],
        "card": card.parser().option_strings(),
        "reproduce": [
            *reproduce.parser().option_strings(),
            *(path.stem for path in sorted(reproduce.TABLES.glob("*.yaml"))),
        ],
        "league": league.parser().option_strings(),
        "report": report.parser().option_strings(),
        "sites": sites.parser().option_strings(),
        "watch": watch.parser().option_strings(),
        "certificates": certificates.parser().option_strings(),
    }
    for command in COMMANDS:
        if command not in choices:
            kind: type[CommandLine] = serve.CLASSES.get(command) or cli_class(command)
            choices[command] = [*kind.option_strings(command), *class_names()]
    return _SCRIPT.format(
        shell=shell,
        use=f'eval "$(fedlightning completion {shell})"',
        preamble="autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "",
        commands=" ".join(COMMANDS),
        cases="\n".join(f'      {command}) words="{" ".join(words)}" ;;' for command, words in choices.items()),
    )
