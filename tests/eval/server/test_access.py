"""Who reaches a server: keys of one start, of files and of the environment; unix sockets; TLS; lines for audits."""

from __future__ import annotations

import io
import os
import re
import socket
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
from rich.console import Console

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.eval.server import keys as keys_module
from pipeline.eval.server.keys import Keys, MadeKey, choose_keys, read_file
from pipeline.eval.server.private_link import PrivateLink
from pipeline.eval.server.serve import Access, opened
from tests.eval.server.running import Running, running
from tests.eval.server.thread import in_thread

KEY, OTHER = "0123456789abcdef", "fedcba9876543210"
is_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def key_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    file = folder / "keys"
    file.write_text(text)
    file.chmod(mode)
    return file


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_key_is_made_and_shown_on_the_terminal_alone(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPELINE_API_KEY", raising=False)
    for log in (Terminal(), io.StringIO()):
        keys = Access().keys()
        assert isinstance(keys, MadeKey)
        console = Console(file=log, force_terminal=log.isatty(), width=200)
        with opened(config, None, Access(), keys, console) as server, in_thread(server):
            assert httpx2.get(f"{server.url}/v1/models", timeout=None).status_code == 401
            assert httpx2.get(f"{server.url}/v1/models", headers=bearer(keys.key), timeout=None).status_code == 200
            link, file = f"{server.url}/#key={keys.key}", re.search(r"is in (\S+),", log.getvalue())
            if log.isatty():
                assert file is None and log.getvalue().count(keys.key) == 1 and link in log.getvalue()
            else:
                assert file is not None and keys.key not in log.getvalue()
                assert Path(file[1]).read_text() == f"{link}\n" and Path(file[1]).stat().st_mode & 0o777 == 0o600
        assert file is None or not Path(file[1]).exists()


def test_no_two_starts_have_the_same_key() -> None:
    assert MadeKey().key != MadeKey().key


def test_options_that_choose_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPELINE_API_KEY", raising=False)
    assert Access(no_key=True).keys() is None and Access(socket=tmp_path / "s").keys() is None
    with pytest.raises(UserError, match="either --no-key or --api-key-file"):
        Access(no_key=True, key_file=tmp_path / "keys").keys()
    monkeypatch.setenv("PIPELINE_API_KEY", KEY)
    assert Access(no_key=True).keys() is None
    file = key_file(tmp_path, f"alice {OTHER}")
    for keys, wanted in ((Access().keys(), [KEY]), (Access(key_file=file).keys(), [OTHER])):
        assert keys is not None
        assert [key for key in (KEY, OTHER) if keys.name(f"Bearer {key}".encode(), print) is not None] == wanted
    for bad in ("", "short", "0123456789 abcdef", "0123456789abcdé"):
        monkeypatch.setenv("PIPELINE_API_KEY", bad)
        with pytest.raises(UserError, match="PIPELINE_API_KEY has") as refused:
            choose_keys(None, makes_one=True)
        assert not bad or bad not in str(refused.value)


@pytest.mark.parametrize("bad", ["", "# none\n", "short", "alice short", "0123456789abcdé", f"a b {KEY}", f"a;b {KEY}"])
def test_files_without_usable_keys(tmp_path: Path, bad: str) -> None:
    with pytest.raises(UserError, match="a key is 16 or more letters") as refused:
        read_file(key_file(tmp_path, bad))
    assert KEY not in str(refused.value)


@is_root
def test_files_that_others_may_read_or_replace(tmp_path: Path) -> None:
    def opened_to(mode: int) -> Callable[[Path], object]:
        return lambda file: file.chmod(mode)

    cases: dict[str, Callable[[Path], object]] = {
        "can be read by others": opened_to(0o640),
        "can be read by others ": opened_to(0o604),
        "belongs to": lambda file: os.chown(file, 65534, 65534),
        "all users may write": lambda file: file.parent.chmod(0o777),
        "not a regular file": lambda file: (file.unlink(), os.mkfifo(file, 0o600)),
        "No such file": lambda file: file.unlink(),
    }
    for number, (says, spoil) in enumerate(cases.items()):
        folder = tmp_path / f"{number}"
        folder.mkdir(mode=0o700)
        spoil(file := key_file(folder, KEY))
        with pytest.raises(UserError, match=says.strip()):
            read_file(file)


def test_keys_change_while_the_server_runs(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_module, "REREAD_SECONDS", 0.0)
    file = key_file(tmp_path, f"# of the group\nalice {KEY}\n")
    with running(config, keys=Keys(read_file(file), file)) as server:

        def accepted() -> list[str]:
            statuses = {key: server.get("/v1/models", headers=bearer(key)).status_code for key in (KEY, OTHER)}
            assert set(statuses.values()) <= {200, 401}
            return [key for key, status in statuses.items() if status == 200]

        assert accepted() == [KEY]
        file.write_text(f"alice {KEY}\n\nalice {OTHER}\n")
        assert accepted() == [KEY, OTHER]
        (tmp_path / "new").write_text(OTHER)
        (tmp_path / "new").chmod(0o600)
        (tmp_path / "new").replace(file)
        assert accepted() == [OTHER]
        file.chmod(0o644)
        assert accepted() == []
        file.chmod(0o600)
        assert accepted() == [OTHER]
        file.unlink()
        assert accepted() == []
        log = server.log.getvalue()
        assert KEY not in log and OTHER not in log
        assert log.count("no key is accepted until") == 2 and "chmod 600" in log
        assert re.search(r"(?m)^\S+Z 127\.0\.0\.1:\d+ GET /v1/models 200 \d+ ms, key alice$", log)
        assert re.search(r"(?m)^\S+Z 127\.0\.0\.1:\d+ GET /v1/models 200 \d+ ms, key of line 1$", log)
        assert re.search(r"(?m)^\S+Z 127\.0\.0\.1:\d+ GET /v1/models 401 \d+ ms$", log)


def through(path: Path) -> httpx2.Client:
    return httpx2.Client(transport=httpx2.HTTPTransport(uds=str(path)), base_url="http://localhost", timeout=None)


def test_a_socket_is_open_to_its_user_alone(config: Config, tmp_path: Path) -> None:
    path = tmp_path / "serve.sock"
    access = Access(socket=path)
    with running(config, access=access) as server:
        assert path.stat().st_mode & 0o777 == 0o600
        assert server.url == f"unix:{path}"
        with through(path) as client:
            assert client.get("/health").json()["status"] == "ok"
            assert client.post("/v1/completions", json={"prompt": "the", "max_tokens": 1}).status_code == 200
            # A tunnel makes a port of it, which pages of the browser at its other end could reach by another name.
            assert client.get("/health", headers={"Host": "evil.example"}).status_code == 400
        assert " socket GET /health 200" in server.log.getvalue()
        with pytest.raises(UserError, match="is used by another server"), opened(config, None, access, None, Console()):
            pass
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    with running(config, access=access), through(path) as client:
        assert client.get("/health").status_code == 200
    path.write_text("a file")
    with pytest.raises(UserError, match="is not a socket"), opened(config, None, access, None, Console()):
        pass
    assert path.read_text() == "a file"


def test_sockets_that_others_could_replace(config: Config, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    for path, says in ((shared / "s", "all users may write to"), (tmp_path / ("s" * 200), "cannot be used")):
        access = Access(socket=path)
        with pytest.raises(UserError, match=says), opened(config, None, access, None, Console()):
            pass


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Access:
    """A certificate of localhost that signs itself."""
    folder = tmp_path_factory.mktemp("tls")
    names = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    made = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names)
    files = ("-keyout", folder / "key.pem", "-out", folder / "certificate.pem")
    subprocess.run([*made, *files], check=True, capture_output=True)
    (folder / "key.pem").chmod(0o600)
    return Access(certificate=folder / "certificate.pem", ssl_key=folder / "key.pem")


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
def test_tls(config: Config, certificate: Access) -> None:
    with running(config, key=KEY, access=certificate) as server:
        assert server.url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=str(certificate.certificate))
        with httpx2.Client(verify=trusting, base_url=server.url, timeout=None) as client:
            assert client.get("/v1/models", headers=bearer(KEY)).status_code == 200
            body = {"prompt": "the", "max_tokens": 30, "stream": True}
            with client.stream("POST", "/v1/completions", json=body, headers=bearer(KEY)) as streamed:
                assert [line for line in streamed.iter_lines() if line][-1] == "data: [DONE]"
        port = server.server.listening[0].getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"HTTP" not in plain.recv(100)
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
        with socket.create_connection(("127.0.0.1", port)) as first, pytest.raises((OSError, ssl.SSLError)):
            old.wrap_socket(first)


def test_certificates_that_cannot_be_used(config: Config, certificate: Access, tmp_path: Path) -> None:
    assert certificate.certificate is not None and certificate.ssl_key is not None
    open_key = tmp_path / "key.pem"
    open_key.write_bytes(certificate.ssl_key.read_bytes())
    open_key.chmod(0o644)
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("garbage")
    garbage.chmod(0o600)
    cases = {
        "both --ssl-certificate and --ssl-key": Access(certificate=certificate.certificate),
        "both --ssl-certificate and --ssl-key ": Access(ssl_key=certificate.ssl_key),
        "can be read by others": Access(certificate=certificate.certificate, ssl_key=open_key),
        "PEM files": Access(certificate=certificate.certificate, ssl_key=garbage),
        "PEM files ": Access(certificate=garbage, ssl_key=certificate.ssl_key),
    }
    for says, access in cases.items():
        with pytest.raises(UserError, match=says.strip()), opened(config, None, access, None, Console()):
            pass


def test_a_link_in_a_file_is_removed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    link = PrivateLink(Console(file=io.StringIO()))
    assert "secret" not in "".join(link.lines("it", "http://a", "http://a/secret"))
    (file,) = tmp_path.iterdir()
    assert file.read_text() == "http://a/secret\n"
    link.remove()
    link.remove()
    assert not list(tmp_path.iterdir())


def test_the_key_is_asked_for_before_the_body(config: Config) -> None:
    with running(config, key=KEY) as server:
        assert (
            _status(server, b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n") == 401
        )


def _status(server: Running, head: bytes) -> int:
    with socket.create_connection(server.server.listening[0].getsockname()) as connection:
        connection.sendall(head)
        return int(connection.recv(4096).split()[1])
