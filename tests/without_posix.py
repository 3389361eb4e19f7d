"""A process without what only POSIX systems have: `python -m tests.without_posix WORDS` is `fedlightning WORDS` there.

`then` between words begins another command of the same process; the exit code is the first that is not 0.

FedLightning's own imports of these modules get what is left of them on Windows; other packages have their ways there, and
go on as they are.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from types import ModuleType
from typing import Any

GONE = {
    "os": "fork forkpty killpg getpgid getpgrp setsid setpgid getuid geteuid getgid getegid chown fchown fchmod lchown mkfifo"
    " nice pread pwrite preadv pwritev sched_getaffinity sched_setaffinity register_at_fork uname getloadavg memfd_create"
    " posix_fallocate fdatasync sync wait3 wait4 statvfs getpriority O_DIRECTORY O_NOFOLLOW O_CLOEXEC O_NONBLOCK WNOHANG",
    "signal": "SIGHUP SIGUSR1 SIGUSR2 SIGALRM SIGKILL SIGCHLD SIGQUIT SIGCONT SIGSTOP SIGTSTP SIGPIPE alarm"
    " setitimer getitimer pause pthread_kill pthread_sigmask siginterrupt sigwait",
    "multiprocessing": "forkserver popen_fork popen_forkserver",
    "multiprocessing.context": "ForkServerContext ForkContext",
    "multiprocessing.reduction": "send_handle recv_handle sendfds recvfds",
}
MODULES = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "multiprocessing.forkserver"}


class Left(ModuleType):
    """What is left of a module."""

    def __init__(self, module: ModuleType, gone: str) -> None:
        super().__init__(module.__name__)
        self._module, self._gone = module, set(gone.split())

    def __getattr__(self, name: str) -> Any:
        if name in self._gone:
            raise AttributeError(f"module '{self.__name__}' has no attribute '{name}' here")
        return getattr(self._module, name)


LEFT = {name: Left(importlib.import_module(name), gone) for name, gone in GONE.items()}


def no_folder(path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
    import os

    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", path)
    return os.open(path, flags, mode, **options)


def no_question(pid: int, number: int) -> None:
    import os

    assert number != 0, "signal 0 is Ctrl-C on Windows"
    os.kill(pid, number)


def no_descriptor(path: Any, *times: Any, **options: Any) -> None:
    import os

    assert not isinstance(path, int), "os.utime takes no descriptor on Windows"
    os.utime(path, *times, **options)


LEFT["os"].__dict__.update(open=no_folder, kill=no_question, utime=no_descriptor, supports_fd=set())
LEFT["multiprocessing"].__dict__.update(get_all_start_methods=lambda: ["spawn"])
whole_import = builtins.__import__


def import_left(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
    """Import for FedLightning what is left of a module."""
    if not str((globals or {}).get("__name__")).startswith("fedlightning"):
        return whole_import(name, globals, locals, fromlist, level)
    if name in MODULES or any(f"{name}.{part}" in MODULES for part in fromlist or ()):
        raise ModuleNotFoundError(f"No module named '{name}' here", name=name)
    found = whole_import(name, globals, locals, fromlist, level)
    if not fromlist and "." in name:
        return LEFT.get(name.partition(".")[0], found)
    return LEFT.get(name, found)


builtins.__import__ = import_left


if __name__ == "__main__":
    from fedlightning.cli import main

    commands: list[list[str]] = [[]]
    for word in sys.argv[1:]:
        if word == "then":
            commands.append([])
        else:
            commands[-1].append(word)
    sys.exit(next((code for words in commands if (code := main(words))), 0))
