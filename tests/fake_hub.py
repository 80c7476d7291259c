"""A hub on this machine: enough of its API for models and their files, and for what can go wrong with them."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlparse

COMMITS = {"main": "a" * 40, "v1": "b" * 40}


@dataclass
class Hub:
    """What the hub holds, how it misbehaves, and what it was asked.

    Models are {name: {revision: {file: content}}}; a model in `gated` gives its list to everybody and its files to nobody.
    """

    models: dict[str, dict[str, dict[str, bytes]]]
    gated: set[str] = field(default_factory=set)
    wrong: set[str] = field(default_factory=set)  # files whose content isn't what their hash says
    cut: dict[str, int] = field(default_factory=dict)  # file -> after how many bytes its first connection breaks
    stall: dict[str, int] = field(default_factory=dict)  # file -> after how many bytes it stops and waits
    busy: bool = False
    asked: list[tuple[str, str, str]] = field(default_factory=list)  # (verb, path, range)
    released: threading.Event = field(default_factory=threading.Event)

    def start(self) -> str:
        """Serve; returns the address."""
        hub = self

        class Handler(_Handler):
            owner = hub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def stop(self) -> None:
        """No longer there."""
        self.released.set()
        self.server.shutdown()
        self.server.server_close()

    def files(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Commit and files of a revision, by branch, tag or commit."""
        revisions = self.models[name]
        for known, files in revisions.items():
            if revision in (known, COMMITS[known]):
                return COMMITS[known], files
        return None


def is_large(file: str) -> bool:
    """Whether the hub keeps a file apart and tells its SHA-256."""
    return file.endswith((".safetensors", ".bin"))


def entry(file: str, content: bytes) -> dict[str, Any]:
    """How the hub lists a file."""
    git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    found: dict[str, Any] = {"size": len(content), "blobId": git, "oid": git}
    if is_large(file):
        found["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}  # fmt: skip
    return found


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    owner: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Silence."""

    def answer(self, status: int, body: Any = b"", **headers: str) -> None:
        """Send all of it."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), "Content-Type": "application/json", **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.owner, unquote(urlparse(self.path).path).strip("/")
        hub.asked.append((self.command, path, self.headers.get("Range", "")))
        parts = path.split("/")
        if hub.busy:
            return self.answer(503, {"error": "busy"})
        if parts[:2] == ["api", "models"]:
            name, rest = "/".join(parts[2:4]), parts[4:]
        else:
            name, rest = "/".join(parts[:2]), parts[2:]
        if name not in hub.models:
            return self.answer(401, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        revision = rest[1] if len(rest) > 1 else "main"
        found = hub.files(name, revision)
        if found is None:
            return self.answer(404, {"error": "no such revision"}, X_Error_Code="RevisionNotFound")
        commit, files = found
        if parts[0] == "api" and rest[:1] == ["tree"]:
            return self.answer(200, [{"type": "file", "path": f, **entry(f, c)} for f, c in files.items()])
        if parts[0] == "api":
            siblings = [{"rfilename": f, **entry(f, c)} for f, c in files.items()]
            return self.answer(
                200, {"id": name, "modelId": name, "sha": commit, "siblings": siblings, "private": False}
            )
        if name in hub.gated:
            return self.answer(403, {"error": "ask first"}, X_Error_Code="GatedRepo")
        return self.file("/".join(rest[2:]), commit, files)

    def file(self, file: str, commit: str, files: dict[str, bytes]) -> None:
        """A file's content, from where it is asked for."""
        hub = self.owner
        if file not in files:
            return self.answer(404, {"error": "no such file"}, X_Error_Code="EntryNotFound")
        content, about = files[file], entry(file, files[file])
        etag = about["lfs"]["sha256"] if "lfs" in about else about["oid"]
        content = bytes(len(content)) if file in hub.wrong else content
        begin = int(self.headers.get("Range", "bytes=0-").split("=")[1].split("-")[0])
        rest = content[begin:]
        self.send_response(206 if begin else 200)
        headers = {
            "ETag": f'"{etag}"', "X-Repo-Commit": commit, "Content-Length": str(len(rest)), "Accept-Ranges": "bytes",
            "X-Linked-Size": str(len(content)), "X-Linked-Etag": f'"{etag}"',
        }  # fmt: skip
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        for kept in (hub.cut, hub.stall):
            if not begin and (n := kept.pop(file, None)) is not None:
                self.wfile.write(rest[:n])
                self.wfile.flush()
                if kept is hub.stall:
                    hub.released.wait(60)
                self.close_connection = True
                return
        self.wfile.write(rest)
