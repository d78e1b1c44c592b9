"""Debian's nginx with docs/nginx.conf in front of a server on this machine."""

import contextlib
import json
import os
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

CONFIGURATION = Path(__file__).resolve().parents[2] / "docs" / "nginx.conf"
MEGABYTE = 2**20


@contextlib.contextmanager
def proxy(server_port: int, folder: Path) -> Iterator[int]:
    """The port of nginx, which knows the user `me` with the password `secret`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    password = subprocess.run(["openssl", "passwd", "-apr1", "secret"], capture_output=True, text=True, check=True).stdout
    (folder / "users").write_text(f"me:{password}")
    key = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=x"]
    subprocess.run(key, cwd=folder, check=True, capture_output=True)
    text = CONFIGURATION.read_text()
    for old, new in (
        ("127.0.0.1:8501", f"127.0.0.1:{server_port}"),
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("/etc/nginx/models.users", str(folder / "users")),
        ("/etc/nginx/cert.pem", str(folder / "cert.pem")),
        ("/etc/nginx/key.pem", str(folder / "key.pem")),
    ):
        assert old in text
        text = text.replace(old, new)
    head = f"daemon off; pid {folder}/pid; error_log {folder}/log; events {{}}"
    head += " user root;" if os.geteuid() == 0 else ""  # who can read this folder
    parts = "".join(f"{part}_temp_path {folder}/{part};" for part in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    (folder / "nginx.conf").write_text(f"{head}\nhttp {{ access_log off; {parts}\n{text}}}\n")
    command = ["nginx", "-c", str(folder / "nginx.conf"), "-e", str(folder / "log")]
    checked = subprocess.run([*command, "-t"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield port
    finally:
        process.terminate()
        process.wait(20)


def check(server_port: int, path: str, content: object, folder: Path) -> None:
    """Everything that docs/nginx.conf promises, with a right request to the server behind it."""
    with proxy(server_port, folder) as port:

        def ask(*options: str, at: str = path) -> str:
            curl = ["curl", "-sk", "--http1.1", "--max-time", "60", "-w", "%{http_code}", f"https://127.0.0.1:{port}{at}"]
            return subprocess.run([*curl, *options], capture_output=True, text=True).stdout[-3:]

        user, body = ("-u", "me:secret"), ("-d", json.dumps(content))
        end = time.monotonic() + 20
        while ask(*body) != "401":
            assert time.monotonic() < end
            time.sleep(0.2)
        assert ask("-u", "me:wrong", *body) == "401"
        assert ask(*user, *body) == "200"
        (folder / "large").write_bytes(b" " * 33 * MEGABYTE)
        assert ask(*user, "--data-binary", f"@{folder}/large") == "413"
        for inside in ("/-/routes", "/-/healthz", "/"):
            assert ask(*user, at=inside) == "404"
        upgrade = (
            "Connection: Upgrade",
            "Upgrade: websocket",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
        )
        assert ask(*user, *(part for header in upgrade for part in ("-H", header)), *body) == "200"
        assert seconds_until_cut_off(port, b"POST / HTTP/1.1\r\nX: ") < 30


def seconds_until_cut_off(port: int, sent: bytes) -> float:
    """How long a client may leave its request where it is."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    begun = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=60) as plain, context.wrap_socket(plain) as connection:
        connection.sendall(sent)
        with contextlib.suppress(OSError):
            while connection.recv(1000):
                pass
    return time.monotonic() - begun
