"""Sentences for errors that bad input causes. Crashes keep their traceback."""

from __future__ import annotations

import argparse
import difflib
import errno
import linecache
import re
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

from fedlightning.errors import ConfigurationError, users_line
from fedlightning.options import FIELDS
from fedlightning.options.replaced import OF_COMMANDS, REPLACED
from fedlightning.options.value_objects import ENGINES

_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "NoneType": "null",
    "list": "a list",
}
_EXAMPLE = "pass --config FILE, for example configs/quickstart.yaml"


class InputError(ValueError):
    """Raised if the user's input cannot work. The message is the sentence to show.

    Example:
        >>> str(InputError("--jobs is 0: give the number of runs to make at a time, 1 or more."))
        '--jobs is 0: give the number of runs to make at a time, 1 or more.'
    """


def explain(error: BaseException) -> str | None:
    """Return the sentence to show for an error that bad input caused, or `None` for a crash."""
    if isinstance(error, InputError):
        return str(error)
    if isinstance(error, argparse.ArgumentError):
        return parse_sentence(str(error))
    cause = error.__cause__
    if any(kind.__name__ == "FederationError" for kind in type(error).__mro__):
        of_all = "failed with this error in round 1" in str(error)
        explained = cause is None or explain(cause) is not None or (of_all and not users_line(cause))
        return _one_line(error) if explained else None
    if isinstance(error, ConfigurationError) and cause is not None and users_line(cause):
        return None  # the user's own code has failed: the traceback says where
    if isinstance(
        error, FileNotFoundError | PermissionError | NotADirectoryError | IsADirectoryError | FileExistsError
    ):
        return _one_line(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
        return f"{error.strerror}: what was saved before is untouched. Make room, or use another folder."
    if type(error).__name__ == "MisconfigurationException" or _on_purpose(error):
        return _one_line(error)
    return None


def root_cause(error: BaseException) -> BaseException:
    """Return the error that the constructor of a class raised, below those of jsonargparse."""
    while error.__cause__ is not None and _raised_in(error).startswith("jsonargparse"):
        error = error.__cause__
    return error


def constructor_sentence(error: BaseException, config: Mapping[str, Any]) -> str:
    """Return the sentence for an error that a constructor raised, with the place of its class in the configuration."""
    places = [
        (path, name)
        for section in ("trainer", "model", "data")
        for path, name in _classes(config.get(section), section)
    ] + [(f"trainer.{name}", kind.__name__) for name, (kind, _) in FIELDS.items()]
    place, owner = "", ""
    trace = error.__traceback__
    while trace is not None:  # the innermost constructor of a class that the configuration names
        frame = trace.tb_frame
        if frame.f_code.co_name == "__init__" and "self" in frame.f_locals:
            kinds = {kind.__name__ for kind in type(frame.f_locals["self"]).__mro__}
            inner = [(path, name) for path, name in places if name in kinds]
            place, owner = inner[0] if inner else (place, owner)
        trace = trace.tb_next
    sentence = (
        _one_line(error)
        if isinstance(error, ValueError) and _on_purpose(error)
        else f"{type(error).__name__}: {_one_line(error)}"
    )
    if owner and owner not in sentence:
        sentence = f"{owner} cannot be made: {sentence}"
    where = f"{place}: " if place and not sentence.startswith(place) else ""
    return f"{where}{sentence.rstrip('.')}."


def _classes(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the path and the name of every class in a configuration."""
    if isinstance(value, Mapping):
        if isinstance(value.get("class_path"), str):
            yield path, value["class_path"].rpartition(".")[2]
        for key, item in value.items():
            yield from _classes(item, path if key in ("init_args", "dict_kwargs") else f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _classes(item, f"{path}[{index}]")


def _raised_in(error: BaseException) -> str:
    if error.__traceback__ is None:
        return ""
    return str(_innermost(error.__traceback__).tb_frame.f_globals.get("__name__", ""))


def suggestion(word: str, names: Iterable[str]) -> str:
    """Return "Did you mean ...?", or an empty text if nothing is close.

    Example:
        >>> suggestion("fedprocks", ["FedAvg", "FedProx"])
        'Did you mean FedProx?'
    """
    by_lower = {name.lower(): name for name in names}
    close = difflib.get_close_matches(word.lower(), by_lower, n=2, cutoff=0.6)
    return f"Did you mean {' or '.join(by_lower[name] for name in close)}?" if close else ""


def _on_purpose(error: BaseException) -> bool:
    """Return True if a `raise` statement of FedLightning, of Lightning or of a callback's `check` refused a value."""
    if not isinstance(error, ValueError | OSError | FloatingPointError | RuntimeError) or error.__traceback__ is None:
        return False
    frame = _innermost(error.__traceback__)
    package = str(frame.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
    line = linecache.getline(frame.tb_frame.f_code.co_filename, frame.tb_lineno).strip()
    owner = type(frame.tb_frame.f_locals.get("self"))  # by name: who watches runs does not import the contract
    is_check = frame.tb_frame.f_code.co_name == "check" and "FederatedCallback" in {
        kind.__name__ for kind in owner.__mro__
    }
    return line.startswith("raise ") and (
        package == "fedlightning" or ((package == "lightning" or is_check) and isinstance(error, ValueError))
    )


def _innermost(trace: TracebackType) -> TracebackType:
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return f"{error.strerror}: '{error.filename}'."
    return re.sub(r"(?<=\S)\.\.(?=\s|$)", ".", " ".join(str(error).split()))


# -- messages of jsonargparse ------------------------------------------------------------------------------------------
def parse_sentence(message: str) -> str:
    """Return the place and the reason from a message of jsonargparse, which lists everything that it tried.

    Example:
        >>> parse_sentence("Option 'trainer.precison' is not accepted")
        "the configuration has no option 'trainer.precison'. Did you mean trainer.precision or trainer.version?"
    """
    where = ".".join(dict.fromkeys(re.findall(r'Parser key "([^"]+)"', message)))
    text = re.sub(r"\[rank: \d+\] ", "", message)
    for pattern, answer in (
        (r"following arguments are required: ([\w., ]+)", _required),
        (r'Key "([\w.]+)" is required', _required),
        (r"Multiple subclasses with name (\w+)\. Give the full class path to avoid ambiguity: ([^\n]+)", _ambiguous),
        (r"Expected a dot import path string: ([^\n]+)", _unknown_class),
        (r"has no attribute '(\w+)'", _unknown_class),
        (r"No module named '([^']+)'", _unknown_module),
        (r"class_path '([^']+)':\s+Not a valid subclass of (\w+)", _wrong_class),
        (r"Import path (?:([\w.]+) )?does not correspond to a subclass of (\w+)", _wrong_class),
        (r"[Kk]ey '([\w.]+)' is not expected", _unexpected),
        (r"[Gg]roup '([\w.]+)' does not accept (?:nested key|option) '([\w.]+)'", _unexpected_nested),
        (r"Option '([\w.]+)' is not accepted", _unexpected),
        (r"[Uu]nrecognized arguments?: ([^\n]+)", _unrecognised),
        (r"Unexpected config:([^\n]*)", _no_mapping),
    ):
        match = re.search(pattern, text)
        if match:
            return answer(where, match, text)
    return _wrong_value(where, text)


def _required(where: str, match: re.Match[str], text: str) -> str:
    classes = re.findall(r"class_path '([\w.]+)'", text)
    names = match[1].strip(" .")
    if classes or where:
        owner = classes[-1].rpartition(".")[2] if classes else where
        place = f" (in {where}: --{where}.{names.split(',')[0]}=...)" if where else ""
        return f"{owner} needs {names}{place}."
    return f"{names.replace(', ', ' and ')} must be given: {_EXAMPLE}, or --{names.split(',')[0]} CLASS."


def _ambiguous(where: str, match: re.Match[str], text: str) -> str:
    return f"{where}: '{match[1]}' is the name of several classes. Give the full path: {match[2].rstrip('.')}."


def _unknown_class(where: str, match: re.Match[str], text: str) -> str:
    name = match[1].strip().rpartition(".")[2]
    paths = re.findall(r"class_path '([\w.]+)'", text)
    path = next((path for path in paths if path.endswith(name)), match[1].strip())
    if where == "trainer.engine":
        return f"{where}={name!r} is unknown. {suggestion(name, ENGINES) or f'Choose one of {list(ENGINES)}.'}"
    return f"{where}: there is no class '{path}'. {_close_class(name)}"


def _unknown_module(where: str, match: re.Match[str], text: str) -> str:
    paths = [path for path in re.findall(r"class_path '([\w.]+)'", text) if path.startswith(match[1].partition(".")[0])]
    module = paths[-1] if paths else match[1]
    return f"{where}: cannot import '{module}': there is no module '{match[1]}'. " + (
        _close_class(module.rpartition(".")[2], "") or "Check the spelling, or install it or set PYTHONPATH."
    )


def _close_class(name: str, otherwise: str = "Give the full path, as in my_package.MyClass.") -> str:
    from fedlightning.config.class_names import class_names

    return suggestion(name, class_names()) or otherwise


def _wrong_class(where: str, match: re.Match[str], text: str) -> str:
    value = re.search(r"Given value: ([\w.]+)", text)
    return f"{where}: '{match[1] or (value[1] if value else '?')}' is not a {match[2]}."


def _unexpected(where: str, match: re.Match[str], text: str) -> str:
    classes = re.findall(r"class_path '([\w.]+)'", text)
    classes = [
        path for path in classes if path != "lightning.Callback"
    ] or classes  # tried for an option of a list, too
    owner = classes[-1].rpartition(".")[2] if classes else where
    key = match[1]
    if key.partition(".")[0] in OF_COMMANDS:
        return f"the configuration has no option '{key}'. Use {OF_COMMANDS[key.partition('.')[0]]}."
    hint = _options_hint(key.rpartition(".")[2], classes[-1] if classes else "")
    place = f" (in {where})" if classes and where else ""
    return f"{owner or 'the configuration'} has no option '{key}'{place}. {hint}".strip()


def _unexpected_nested(where: str, match: re.Match[str], text: str) -> str:
    return f"{match[1]} has no option '{match[2]}'. {_options_hint(match[2], f'group:{match[1]}')}".strip()


def _options_hint(key: str, class_path: str) -> str:
    import inspect
    from importlib import import_module

    if class_path == "group:trainer" and key in REPLACED:
        return f"Use {REPLACED[key]}."
    if class_path == "group:trainer" or not class_path:
        from fedlightning.config.class_names import trainer_options

        prefix = "" if class_path else "trainer."
        return suggestion(prefix + key, [prefix + name for name in trainer_options()])
    module, _, name = class_path.rpartition(".")
    try:
        arguments = list(inspect.signature(getattr(import_module(module), name)).parameters)
    except (ImportError, AttributeError, ValueError):
        return ""
    return suggestion(key, arguments) or (f"It has {', '.join(arguments)}." if arguments else "It has none.")


def _no_mapping(where: str, match: re.Match[str], text: str) -> str:
    content = f"'{match[1].strip():.40}'" if match[1].strip() else "nothing"
    return f"a configuration holds {content}. It has to hold sections: model, data and trainer, each with entries of its own."


def _unrecognised(where: str, match: re.Match[str], text: str) -> str:
    from fedlightning.config.class_names import option_names

    words = match[1].strip()
    option = words.split()[0].partition("=")[0]
    instead = REPLACED.get(option.removeprefix("--trainer.")) if option.startswith("--trainer.") else None
    instead = instead or OF_COMMANDS.get(option.removeprefix("--").partition(".")[0])
    names = option_names()
    close = f"Use {instead}." if instead else "" if option in names else suggestion(option, names)  # another command's
    return f"there is no option '{option}'. {close or 'Options: fedlightning COMMAND --help.'}"


MAX_QUOTED = 80
"""Characters of a value that a sentence quotes."""


def _wrong_value(where: str, text: str) -> str:
    lines = [line.strip(" -") for line in text.splitlines()]
    noise = (
        "Parser key", "Does not validate", "Subtypes:", "Errors:", "Given value", "Problem with given",
        "Expected a path but", "Expected a <class 'NoneType'>", "Subclass types expect", "a class path (str)",
        "a dict with", "a dict without",
    )  # fmt: skip
    useful = list(dict.fromkeys(line for line in lines if line and not line.startswith(noise)))
    if not useful:
        first = re.sub(r'Parser key "[^"]+":\s*', "", text).strip()
        useful = [first.splitlines()[0].strip()] if first else ["it is not valid"]
    reasons = [_plain_words(line).rstrip(".") for line in useful[:3]]
    match = re.search(r"Given value: (?!NestedArg)([^\n]+)", text)
    value = f" (given: {_head(match[1].strip())})" if match and match[1].strip() not in " ".join(reasons) else ""
    return f"{where}: {'; or '.join(reasons)}{value}." if where else f"{'; '.join(reasons)}{value}."


def _plain_words(line: str) -> str:
    line = re.sub(r"(?:typing\.)?Literal\[([^\]]*)\]", r"one of \1", line).replace('in "<unicode string>", ', "")
    line = re.sub(r"Expected a one of", "must be one of", line)
    line = re.sub(r"<class '([\w.]+)'>", lambda m: _TYPES.get(m[1], m[1].rpartition(".")[2]), line)
    line = re.sub(r"Expected a (a|true|null)", r"must be \1", line)
    line = re.sub(r"Expected an? ", "must be a ", line).replace("a Sequence", "a list")
    line = re.sub(r"Key must be a string, got: (True|False)", _truth_value, line)
    return re.sub(r"\. Got value: (.+)$", lambda match: f", not '{_head(match[1])}'", line)


def _head(value: str) -> str:
    """Return the beginning of a value: whole configurations hide what is said of them."""
    return value if len(value) <= MAX_QUOTED else f"{value[:MAX_QUOTED].rstrip()} ..."


def _truth_value(match: re.Match[str]) -> str:
    words = "on, yes or true" if match[1] == "True" else "off, no or false"
    return f"a key is {words}, which YAML reads as a truth value. Put it in quotes"
