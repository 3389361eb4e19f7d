"""Whether a server can be reached, and if not why, in a sentence: Flower's programs try in silence."""

from __future__ import annotations

import base64
import errno
import ipaddress
import re
import socket
import ssl
import time
import urllib.parse
import urllib.request
from contextlib import suppress
from email.utils import parsedate_to_datetime
from pathlib import Path

from fedlightning.errors import ConfigurationError
from fedlightning.sites.flower.certificate_files import CA, KEY, SERVER
from fedlightning.sites.status import NAME, printable

WAIT = 5.0
"""Seconds that a server has to answer."""
FAST, OLD = 5.0, 300.0
"""Seconds that the clock of a site may be ahead of the server's, and behind it: Flower compares the times of requests."""
HEADERS = 2**16
"""Bytes of a proxy's answer that are read."""
FREED = 3.0
"""Seconds in which a port becomes free again after the program that held it was killed."""


def host_and_port(place: str) -> tuple[str, int]:
    """Return the parts of "host:port".

    Example:
        >>> host_and_port("fl.example.org:8443"), host_and_port("[::1]:80")
        (('fl.example.org', 8443), ('::1', 80))
    """
    host, colon, port = place.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    fits = colon and bare and "/" not in bare and (":" not in bare or bare != host)
    if not fits or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ConfigurationError(
            f"superlink={place!r} is not an address of a server: it is host:port, such as fl.example.org:8443, with a port "
            "from 1 to 65535 and nothing in front."
        )
    return bare, int(port)


def is_own(host: str) -> bool:
    """Return whether nobody but this machine reaches what listens on an address.

    Example:
        >>> is_own("127.0.0.1"), is_own("localhost"), is_own("0.0.0.0")
        (True, True, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_port(host: str, port: int) -> None:
    """Refuse a port that a server cannot listen on."""
    if not 0 < port < 65536:
        raise ConfigurationError(f"port={port} must be from 1 to 65535.")
    try:
        kind, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, UnicodeError):
        raise ConfigurationError(
            f"host={host!r} is not an address of this machine; 0.0.0.0 stands for all of them."
        ) from None
    ends = time.monotonic() + FREED
    while True:
        try:
            with socket.socket(kind, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
            return
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < ends:
                time.sleep(0.2)
                continue
            why = {
                errno.EADDRINUSE: f"port={port} is taken by another program: stop that, or choose another --port here and "
                "in --superlink of the sites.",
                errno.EACCES: f"port={port} is not for everybody to listen on: choose one from 1024.",
                errno.EADDRNOTAVAIL: f"host={host!r} is not an address of this machine; 0.0.0.0 stands for all of them.",
            }
            sentence = why.get(error.errno or 0, f"host={host!r}, port={port}: {error.strerror}.")
            raise ConfigurationError(sentence) from None


def unreachable(place: str, authority: Path | None) -> str | None:
    """Return why no server is reached at an address, in a sentence; `None`: one listens there as it should."""
    host, port = host_and_port(place)
    proxy = proxy_for(host, "http" if authority is None else "https")
    if proxy is not None:
        return _through(proxy, place, authority)
    try:
        connection = socket.create_connection((host, port), timeout=WAIT)
    except (socket.gaierror, UnicodeError):
        return f"The host of {place} is not known: look at --superlink, or at this machine's network."
    except ConnectionRefusedError:
        return f"Nobody listens at {place}: the server is not started yet, or has ended."
    except TimeoutError:
        return f"{place} does not answer within {WAIT:g} seconds: a firewall may be in the way."
    except OSError as error:
        return f"{place} cannot be reached: {error.strerror or error}."
    with connection:
        return _without_tls(connection, place) if authority is None else _tls(connection, place, host, authority)


def proxy_for(host: str, scheme: str) -> str | None:
    """Return the address of the proxy by which a host is reached, as httpx finds it: by the environment."""
    proxies = urllib.request.getproxies()
    address = proxies.get(scheme) or proxies.get("all")
    if not address or urllib.request.proxy_bypass(host):
        return None
    return address if "://" in address else f"http://{address}"


def _through(proxy: str, place: str, authority: Path | None) -> str | None:
    """Return why no server is reached through a proxy, in a sentence; `None`: one is."""
    at = urllib.parse.urlsplit(proxy)
    name = f"proxy {at.netloc.rpartition('@')[2]} (of HTTPS_PROXY or the like; hosts in NO_PROXY are reached without)"
    try:
        if at.scheme != "http" or at.hostname is None:
            return f"The {name} is not an HTTP proxy, which is http://HOST:PORT."
        with socket.create_connection((at.hostname, at.port or 80), timeout=WAIT) as connection:
            if authority is None:  # without TLS each request is the proxy's to pass on
                return None
            answer = _connected(connection, at, place)
            if answer is None:
                return f"The {name} answers with other than HTTP."
            if answer.startswith("407"):
                return f"The {name} wants a user and a password: HTTPS_PROXY=http://USER:PASSWORD@HOST:PORT."
            if not answer.startswith("2"):
                return f"{place} is not reached through the {name}, which says {answer}."
            return _tls(connection, place, host_and_port(place)[0], authority)
    except (OSError, ValueError) as error:  # also of a port that is none
        return f"The {name} is not reached: {getattr(error, 'strerror', None) or error}."


def _connected(connection: socket.socket, at: urllib.parse.SplitResult, place: str) -> str | None:
    """Ask a proxy for a connection to a place; return the status of its answer, or `None` if that is not HTTP."""
    user = ":".join(map(urllib.parse.unquote, (at.username or "", at.password or "")))
    authorization = f"Proxy-Authorization: Basic {base64.b64encode(user.encode()).decode()}\r\n" if at.username else ""
    connection.sendall(f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n{authorization}\r\n".encode())
    answer = b""
    while not answer.endswith(b"\r\n\r\n") and len(answer) < HEADERS and (more := connection.recv(1)):
        answer += more  # not a byte of what follows
    status_line = re.match(rb"HTTP/1\.[01] (\d{3}[^\r\n]*)", answer)
    return None if status_line is None else printable(status_line[1].decode(errors="replace"), NAME)


def _tls(connection: socket.socket, place: str, host: str, authority: Path) -> str | None:
    try:
        context = ssl.create_default_context(cafile=str(authority))
    except (OSError, ssl.SSLError):
        return f"{authority} is not a certificate: put it back as `fedlightning certificates` has made it."
    try:
        with context.wrap_socket(connection, server_hostname=host) as secure:
            return _of_clock(secure, place)
    except ssl.SSLCertVerificationError as error:
        return _of_certificate(error, place, host, authority)
    except ssl.SSLError:
        return f"{place} does not speak TLS: is the server started with --insecure?"
    except OSError:
        return f"{place} does not answer: the server is about to start, or has ended."
    return None


def _of_clock(server: ssl.SSLSocket, place: str) -> str | None:
    """Return why Flower would refuse all requests of this machine by their times, in a sentence; `None`: it would not."""
    answer = b""
    with suppress(OSError):
        server.sendall(f"GET / HTTP/1.1\r\nHost: {place}\r\nConnection: close\r\n\r\n".encode())
        answer = server.recv(HEADERS)
    date_header = re.search(rb"\r\ndate: ([^\r\n]+)", answer, re.IGNORECASE)
    try:
        then = None if date_header is None else parsedate_to_datetime(date_header[1].decode()).timestamp()
    except ValueError:
        return None
    ahead = 0.0 if then is None else time.time() - then
    if -OLD < ahead < FAST + 1:  # the answer has whole seconds
        return None
    way = f"{ahead:.0f} s ahead of" if ahead > 0 else f"{-ahead:.0f} s behind"
    return (
        f"The clock of this machine is {way} that of {place}, and {FAST:g} s ahead and {OLD:g} s behind are borne: set both "
        "by NTP."
    )


def _of_certificate(error: ssl.SSLCertVerificationError, place: str, host: str, authority: Path) -> str:
    """Return why a server's certificate is not trusted, in a sentence."""
    if "IP address mismatch" in str(error) or "ostname mismatch" in str(error):
        return (
            f"The certificate of {place} is not for '{host}': use an address that it is for, or make certificates with "
            f"--hosts {host}."
        )
    if "expired" in str(error):
        return f"The certificate of {place} has ended: make new ones with `fedlightning certificates`."
    if "not yet valid" in str(error):
        return f"The certificate of {place} is not valid yet: is the clock of this machine right?"
    return (
        f"The certificate of {place} is not of the authority in {authority} ({error.verify_message}): site and server "
        "need folders of one `fedlightning certificates`."
    )


def check_certificate(key_folder: Path, host: str) -> None:
    """Refuse a certificate with which a server could not be reached, not even by itself. Nothing is connected for that."""
    authority, pem, key = (key_folder / name for name in (CA, SERVER, KEY))
    at_server, at_site = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        at_site.load_verify_locations(authority)
    except (OSError, ssl.SSLError):
        raise ConfigurationError(
            f"{authority} is not a certificate: put it back as `fedlightning certificates` has made it."
        ) from None
    try:
        at_server.load_cert_chain(pem, key)
    except (OSError, ssl.SSLError):
        raise ConfigurationError(
            f"{pem} and {key} are not a certificate and its key: put both back as `fedlightning certificates` has made them."
        ) from None
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = at_site.wrap_bio(back, there, server_hostname=host)
    server = at_server.wrap_bio(there, back, server_side=True)
    for side in (client, server, client):  # greeting, certificate, verdict
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLCertVerificationError as error:
            raise ConfigurationError(_of_certificate(error, str(pem), host, authority)) from None


def _without_tls(connection: socket.socket, place: str) -> str | None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        context.wrap_socket(connection).close()
    except OSError:  # also of ssl: it does not speak TLS
        return None
    return f"{place} wants TLS and a key: leave out --insecure, and give --certificates."
