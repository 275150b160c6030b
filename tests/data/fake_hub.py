"""The hub's HTTP interface, as far as a download needs it, over a folder of files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = 1000
"""Bytes from which a file is known by its SHA-256 (stored apart, as large files are) and not by git's hash."""


class FakeHub:
    """``files`` of repositories by ``<owner>/<name>/<path>``; ``requests`` records what was asked for.

    ``cut`` names files of which the connection breaks once in the middle, ``gated`` repositories that are refused.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.requests: list[str] = []
        self.cut: set[str] = set()
        self.gated: set[str] = set()

    def tree(self, repo: str) -> list[dict[str, object]]:
        entries: list[dict[str, object]] = []
        for name, content in self.files.items():
            if name.startswith(repo + "/"):
                git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
                entry: dict[str, object] = {"type": "file", "oid": git, "size": len(content)}
                entry["path"] = name.removeprefix(repo + "/")
                if len(content) >= LARGE:
                    sha256 = hashlib.sha256(content).hexdigest()
                    entry["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 130}
                entries.append(entry)
        return entries


@contextmanager
def serving(hub: FakeHub) -> Iterator[str]:
    """The address of the hub while it is served."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path).removeprefix("/")
            hub.requests.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
            if path.startswith("api/"):
                return self.answer_api(path)
            repo, _, name = path.removeprefix("datasets/").partition(f"/resolve/{COMMIT}/")
            content = hub.files.get(f"{repo}/{name}")
            if content is None:
                return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            sha256 = hashlib.sha256(content).hexdigest()
            git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            headers = {
                "X-Repo-Commit": COMMIT,
                "ETag": f'"{sha256 if len(content) >= LARGE else git}"',
                "Accept-Ranges": "bytes",
            }
            status, total = 200, len(content)
            if wanted := self.headers.get("Range"):
                start = int(wanted.removeprefix("bytes=").split("-")[0])
                headers["Content-Range"] = f"bytes {start}-{total - 1}/{total}"
                status, content = 206, content[start:]
            if self.command == "GET" and f"{repo}/{name}" in hub.cut:
                hub.cut.discard(f"{repo}/{name}")
                self.answer(status, content, headers, send=len(content) // 2)
                self.close_connection = True
                return None
            return self.answer(status, content, headers)

        def answer_api(self, path: str) -> None:
            if path.count("/") < 3:
                return self.answer(404, b"{}", {})
            _, _, owner, name, *rest = path.split("/")
            repo = f"{owner}/{name}"
            if repo in hub.gated:
                return self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
            tree = hub.tree(repo)
            if not tree:
                return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            files = [{"rfilename": entry["path"]} for entry in tree]
            info = {
                "id": repo,
                "sha": COMMIT,
                "siblings": files,
                "private": False,
                "tags": [],
                "downloads": 0,
                "likes": 0,
            }
            body = tree if rest[:1] == ["tree"] else info
            return self.answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

        def answer(self, status: int, body: bytes, headers: dict[str, str], send: int | None = None) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body[:send])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def of_folder(root: Path) -> FakeHub:
    """All files of a folder that is laid out as the hub."""
    return FakeHub({str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()})
