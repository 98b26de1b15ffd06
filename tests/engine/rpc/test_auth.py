"""Authentication of the coordinator: token files, tokens, TLS files, loopback addresses."""

from __future__ import annotations

from pathlib import Path

import pytest

from atorch_ns.engine.rpc.auth import Tls, bearer, is_loopback, new_token, read_token, same_token
from atorch_ns.errors import InputError

TOKEN = "0123456789abcdef"


def test_token_files(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_token(path)
    path.touch(0o600)
    path.write_text("short\n")
    with pytest.raises(InputError, match="has 5 characters; it needs at least 16"):
        read_token(path)
    path.write_text(TOKEN + "\n")
    assert read_token(path) == TOKEN
    for mode in (0o644, 0o640):
        path.chmod(mode)
        with pytest.warns(UserWarning, match="other users can read the token file"):
            read_token(path)


def test_only_the_whole_token_is_the_same() -> None:
    token = new_token()
    assert len(token) >= 32
    assert token != new_token()
    shown = bearer(token)[1]
    assert same_token(shown, token)
    assert same_token(shown.encode(), token)
    for other in (None, "", token, shown[:-1], f"{shown}x", bearer(new_token())[1]):
        assert not same_token(other, token), other


def test_tls_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    assert Tls().read() == (None, None)
    cert = tmp_path / "cert.pem"
    cert.write_bytes(b"PEM")
    assert Tls(cert=cert).read() == (b"PEM", None)
    with pytest.raises(InputError, match=r"the TLS key .*key\.pem cannot be read: No such file"):
        Tls(cert=cert, key=tmp_path / "key.pem").read()


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("[::1]", True), ("LocalHost", True), ("0.0.0.0", False),
     ("::", False), ("10.0.0.1", False), ("localhost.example.org", False), ("", False)],
)  # fmt: skip
def test_loopback_addresses(host: str, local: bool) -> None:
    assert is_loopback(host) is local
