"""Certificates and keys for a server and its sites: a folder for each machine."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fedlightning.errors import ConfigurationError
from fedlightning.storage.files import write_secret

CA, SERVER, KEY, SITE, SIGN, SIGNED = "ca.pem", "server.pem", "server.key", "site.key", "sign.key", "sign.pub"
"""Files: certificates of the authority and the server, keys of server and site, the key that signs and its public part."""
DAYS = 825
LOCAL_NAMES = ("127.0.0.1", "localhost")
"""Names under which `fedlightning serve` reaches its own SuperLink: they are in every server's certificate."""


def make(folder: Path, hosts: Sequence[str], sites: Sequence[str]) -> list[Path]:
    """Make what a server and its sites need to know each other; return the folders, the server's first."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    if folder.exists():
        raise ConfigurationError(
            f"{folder} is there already. Choose a new folder, or remove that one: its keys get lost."
        )
    _check(sites)
    folder.mkdir(parents=True, mode=0o700)

    def signed(
        subject: str, key: Any, issuer: str, by: Any, names: Sequence[x509.GeneralName] = ()
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder().subject_name(_name(subject)).issuer_name(_name(issuer))
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(days=DAYS))
        builder = builder.add_extension(x509.BasicConstraints(ca=not names, path_length=None), critical=True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key())
        builder = builder.add_extension(issuer_key, critical=False)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        else:
            usage = dict.fromkeys(
                ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
                False,
            )
            usage |= {"key_cert_sign": True, "crl_sign": True, "encipher_only": False, "decipher_only": False}
            builder = builder.add_extension(x509.KeyUsage(**usage), critical=True)
        return builder.sign(by, hashes.SHA384())

    authority, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    signing = ed25519.Ed25519PrivateKey.generate()
    plain, pem = serialization.NoEncryption(), serialization.Encoding.PEM
    ca = signed("FedLightning", authority, "FedLightning", authority).public_bytes(pem)
    names = [_host(host) for host in dict.fromkeys((*hosts, *LOCAL_NAMES))]
    certificate = signed(hosts[0], server, "FedLightning", authority, names).public_bytes(pem)
    server_folder = folder / "server"
    _write(server_folder / CA, ca)
    _write(server_folder / SERVER, certificate)
    _write(server_folder / KEY, server.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    _write(server_folder / SIGN, signing.private_bytes_raw())
    return [server_folder, *(_site(folder, site, ca, signing) for site in sites)]


def add(folder: Path, sites: Sequence[str]) -> list[Path]:
    """Make the keys of further sites beside those that `make` has made; return their folders."""
    from cryptography.hazmat.primitives.asymmetric import ed25519

    home = folder / "server"
    ca, sign = needed(home, (CA, SIGN))
    _check(sites)
    for path in (path for site in sites for path in (folder / site, home / "sites" / f"{site}.pub") if path.exists()):
        raise ConfigurationError(
            f"{path} is there already. Choose another name, or remove it and the site's other files: its key gets lost."
        )
    signing = ed25519.Ed25519PrivateKey.from_private_bytes(sign.read_bytes())
    return [_site(folder, site, ca.read_bytes(), signing) for site in sites]


def _check(sites: Sequence[str]) -> None:
    bad = next((name for name in sites if not is_name(name)), None)
    if bad is not None or len(set(sites)) < len(sites):
        raise ConfigurationError(f"sites={list(sites)} must be different names of folders, and none of them 'server'.")


def _site(folder: Path, site: str, ca: bytes, signing: Any) -> Path:
    """Make a site's key; write what the site needs, and its public key for the server."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write(folder / "server" / "sites" / f"{site}.pub", public)
    _write(folder / site / CA, ca)
    _write(folder / site / SIGNED, signing.public_key().public_bytes_raw())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    _write(folder / site / SITE, private)
    return folder / site


def is_name(name: str) -> bool:
    """Return whether a text can be the name of a site, and of its folder.

    Example:
        >>> is_name("cleveland"), is_name("../etc"), is_name("server")
        (True, False, False)
    """
    return bool(name.strip()) and name not in (".", "..", "server") and not set(name) & set("/\\\0")


def _name(text: str) -> Any:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _host(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_secret(path, content)


def needed(folder: Path, names: Sequence[str]) -> list[Path]:
    """Return files of a folder."""
    for name in names:
        if not (folder / name).exists():
            raise ConfigurationError(
                f"{folder} has no {name}. Make certificates with `fedlightning certificates`, and give every machine its "
                "folder; or run without any, with --insecure, on a machine of your own."
            )
    return [folder / name for name in names]
