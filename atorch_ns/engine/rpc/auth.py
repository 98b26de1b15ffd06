"""Authentication of the coordinator: tokens, TLS files, and loopback addresses."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import warnings
from dataclasses import dataclass
from pathlib import Path

from atorch_ns.errors import InputError

_MIN_TOKEN_CHARACTERS = 16  # 64 bits, if they are hexadecimal digits


@dataclass(frozen=True, kw_only=True)
class Tls:
    """Files for an encrypted connection, all PEM.

    Attributes:
        cert: the server's certificate with its chain; on a client those it trusts, ``None`` for the system's.
        key: the server's private key; not needed on a client.
        server_name: the name that the certificate carries, where it is not that of the address.
    """

    cert: Path | None = None
    key: Path | None = None
    server_name: str | None = None

    def read(self) -> tuple[bytes | None, bytes | None]:
        """Certificate and key.

        Raises:
            InputError: a file cannot be read.
        """
        return _read_tls_file(self.cert, "certificate"), _read_tls_file(self.key, "key")


def _read_tls_file(path: Path | None, what: str) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"the TLS {what} {path} cannot be read: {error.strerror}") from error


def new_token() -> str:
    """A token for one job: 256 random bits."""
    return secrets.token_urlsafe(32)


def read_token(path: Path) -> str:
    """The token in a file.

    Raises:
        InputError: no such file, or a token of fewer than 16 characters.
    """
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise InputError(f"the token file {path} cannot be read: {error.strerror}") from error
    if len(token) < _MIN_TOKEN_CHARACTERS or not token.isascii() or not token.isprintable():
        raise InputError(
            f"the token in {path} has {len(token)} characters; it needs at least {_MIN_TOKEN_CHARACTERS}, all "
            f"printable ASCII. Make one: (umask 077; openssl rand -hex 32 > {path})"
        )
    if path.stat().st_mode & 0o077:
        warnings.warn(f"other users can read the token file {path}: chmod 600 {path}", stacklevel=2)
    return token


def bearer(token: str) -> tuple[str, str]:
    """The metadata that carries the token."""
    return "authorization", f"Bearer {token}"


def same_token(header: str | bytes | None, token: str) -> bool:
    """Returns whether the metadata carries this token, in the same time wherever they differ."""
    text = header.encode() if isinstance(header, str) else header or b""
    return hmac.compare_digest(text, bearer(token)[1].encode())


def is_loopback(host: str) -> bool:
    """Returns whether an address or name can be reached from this machine only."""
    bare = host.strip("[]")
    if bare.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:  # a name: it may stand for any address
        return False
