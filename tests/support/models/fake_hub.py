"""A hub on loopback for tests: it has the hub's protocol, and it sends parts of files on request."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

LARGE = 1000  # files of at least this many bytes are in Git LFS


class FakeHub:
    """Repositories as {id: {commit: {file: bytes}}}; `revisions` names commits. Without a `token`, all may read."""

    def __init__(
        self, repos: dict[str, dict[str, dict[str, bytes]]], revisions: dict[str, str], token: str = ""
    ) -> None:
        self.repos, self.revisions, self.token = repos, revisions, token
        self.asked: list[str] = []  # the last part of each path
        self.ranges: list[str | None] = []  # of the requests for contents
        self.cut_at: int | None = None  # bytes of a large file until connections are closed
        self.goes_on: threading.Event | None = None  # the event that they wait for before that
        self.wrong_bytes = self.is_gated = False
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def use(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let this process use this hub, and caches in `folder`."""
        monkeypatch.setattr(constants, "ENDPOINT", self.url)
        template = f"{self.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_ENDPOINT", self.url)
        monkeypatch.setenv("CALLBOARD_CACHE", str(folder / "cache"))

    def __enter__(self) -> FakeHub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def do_GET(self) -> None:
        self.hub.asked.append(self.path.rpartition("/")[2])
        parts = self.path.partition("?")[0].strip("/").split("/")
        of_api = parts[:2] == ["api", "models"]
        repo_id = "/".join(parts[2:4] if of_api else parts[:2])
        commits, rest = self.hub.repos.get(repo_id), parts[4:] if of_api else parts[2:]
        if self.hub.token and self.headers["Authorization"] != f"Bearer {self.hub.token}":
            return self._refuse(401, "RepoNotFound")
        if commits is None:
            return self._refuse(404, "RepoNotFound")
        match rest:
            case ["revision", revision] if (sha := self.hub.revisions.get(revision, revision)) in commits and of_api:
                siblings = [{"rfilename": name, **_metadata(content)} for name, content in commits[sha].items()]
                self._answer(json.dumps({"id": repo_id, "sha": sha, "siblings": siblings}).encode())
            case ["tree", sha] if sha in commits and of_api:
                entries = [
                    {"type": "file", "path": name, "oid": hashlib.sha1(content).hexdigest(), "size": len(content)}
                    for name, content in commits[sha].items()
                ]
                self._answer(json.dumps(entries).encode())
            case ["resolve", revision, *name] if not of_api:
                sha = self.hub.revisions.get(revision, revision)
                if (content := commits[sha].get("/".join(name))) is None:
                    return self._refuse(404, "EntryNotFound")
                if self.hub.is_gated:
                    return self._refuse(403, "GatedRepo")
                self._file(content, sha)
            case _:
                self._refuse(404, "RevisionNotFound" if of_api else "EntryNotFound")

    do_HEAD = do_GET

    def _file(self, content: bytes, sha: str) -> None:
        """A file, or the range of it that was requested."""
        etag, start, status = f'"{hashlib.sha256(content).hexdigest()}"', 0, 200
        if self.command == "GET":
            self.hub.ranges.append(self.headers["Range"])
        if self.headers["Range"] and self.headers["If-Range"] in (None, etag):
            start, status = int(self.headers["Range"].removeprefix("bytes=").rstrip("-")), 206
        if self.hub.wrong_bytes and len(content) >= LARGE:
            content = bytes(len(content))
        whole = f"bytes {start}-{len(content) - 1}/{len(content)}" if status == 206 else ""
        self._answer(content[start:], sha, etag, status, whole)

    def _answer(self, content: bytes, sha: str = "", etag: str = "", status: int = 200, whole: str = "") -> None:
        self.send_response(status)
        if whole:
            self.send_header("Content-Range", whole)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", etag)
        self.send_header("X-Repo-Commit", sha)
        self.end_headers()
        if self.command == "GET":
            is_cut = self.hub.cut_at is not None and len(content) >= LARGE
            self.wfile.write(content[: self.hub.cut_at] if is_cut else content)
            if is_cut and self.hub.goes_on:
                self.wfile.flush()
                self.hub.goes_on.wait()

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def _metadata(content: bytes) -> dict[str, Any]:
    """The fields of a file in a listing."""
    facts: dict[str, Any] = {"size": len(content), "blobId": hashlib.sha1(content).hexdigest()}
    if len(content) >= LARGE:
        facts["lfs"] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest(), "pointerSize": 130}
    return facts
