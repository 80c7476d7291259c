"""A hub on this machine: enough of its API for models, datasets and uploads, and for what can go wrong with them."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlparse

COMMITS = {"main": "a" * 40, "v1": "b" * 40}
Revisions = dict[str, dict[str, bytes]]  # revision -> file -> content


@dataclass
class Hub:
    """What the hub holds, how it misbehaves, and what it was asked.

    Repositories are {name: {revision: {file: content}}}; one in `gated` gives its list to everybody and its files to nobody.
    """

    models: dict[str, Revisions] = field(default_factory=dict)
    datasets: dict[str, Revisions] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    wrong: set[str] = field(default_factory=set)  # files whose content isn't what their hash says
    cut: dict[str, int] = field(default_factory=dict)  # file -> after how many bytes its first connection breaks
    stall: dict[str, int] = field(default_factory=dict)  # file -> after how many bytes it stops and waits
    busy: bool = False
    tokens: dict[str, str] = field(default_factory=dict)  # token -> whose; only these may write
    private: set[str] = field(default_factory=set)  # repositories that were made private
    read_only: set[str] = field(default_factory=set)  # repositories into which nobody may write
    refuse: dict[str, int] = field(default_factory=dict)  # a part of a path -> the status it is answered with
    broken: set[str] = field(default_factory=set)  # parts of paths whose connections break
    asked: list[tuple[str, str, str]] = field(default_factory=list)  # (verb, path, range)
    released: threading.Event = field(default_factory=threading.Event)
    messages: list[str] = field(default_factory=list)  # of commits
    commits: dict[tuple[str, str], str] = field(default_factory=dict)  # (repository, revision) -> its newest commit
    stored: dict[str, bytes] = field(default_factory=dict)  # large files by their SHA-256

    def start(self) -> str:
        """Serve; returns the address."""
        hub = self

        class Handler(_Handler):
            owner = hub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"
        return self.address

    def stop(self) -> None:
        """No longer there."""
        self.released.set()
        self.server.shutdown()
        self.server.server_close()

    def commit_of(self, name: str, revision: str) -> str:
        """The newest commit of a revision."""
        return self.commits.get((name, revision)) or COMMITS.get(revision) or "0" * 40

    def files(self, name: str, revision: str, kind: str = "models") -> tuple[str, dict[str, bytes]] | None:
        """Commit and files of a revision, by branch, tag or commit."""
        for known, files in getattr(self, kind)[name].items():
            if revision in (known, self.commit_of(name, known)):
                return self.commit_of(name, known), files
        return None

    def take(self, name: str, branch: str, lines: list[dict[str, Any]]) -> str:
        """Make a commit; returns its name."""
        files = self.models[name].setdefault(branch, dict(self.models[name].get("main", {})))
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.messages.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.stored[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        told = json.dumps([branch, {f: hashlib.sha1(c).hexdigest() for f, c in files.items()}])
        self.commits[name, branch] = hashlib.sha1(told.encode()).hexdigest()
        return self.commits[name, branch]


def is_large(file: str) -> bool:
    """Whether the hub keeps a file apart and tells its SHA-256."""
    return file.endswith((".safetensors", ".bin", ".parquet", ".png"))


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

    def body(self) -> bytes:
        """What was sent along, in one piece or in chunks."""
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def trouble(self, path: str) -> bool:
        """Whether something else than an answer was planned for this request."""
        hub = self.owner
        if any(part in path for part in hub.broken):
            self.close_connection = True
            self.connection.close()
            return True
        for part, status in hub.refuse.items():
            if part in path:
                self.answer(status, {"error": f"refused with {status}"})
                return True
        return False

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.owner, unquote(urlparse(self.path).path).strip("/")
        hub.asked.append((self.command, path, self.headers.get("Range", "")))
        parts = path.split("/")
        if hub.busy:
            return self.answer(503, {"error": "busy"})
        if self.trouble(path):
            return None
        if path == "api/whoami-v2":
            who = self.who()
            return self.answer(200, {"type": "user", "name": who, "auth": {}}) if who else self.answer(401, {"error": "Invalid credentials"})  # fmt: skip
        api = parts[0] == "api"
        parts = parts[1:] if api else parts
        kind = parts[0] if parts[0] in ("models", "datasets") else "models"
        parts = parts[1:] if parts[0] == kind else parts
        name, rest = "/".join(parts[:2]), parts[2:]
        if name not in getattr(hub, kind) or (name in hub.private and not self.who()):
            return self.answer(401, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        revision = rest[1] if len(rest) > 1 else "main"
        found = hub.files(name, revision, kind)
        if found is None:
            return self.answer(404, {"error": "no such revision"}, X_Error_Code="RevisionNotFound")
        commit, files = found
        if api and rest[:1] == ["tree"]:
            return self.tree("/".join(rest[2:]), files)
        if api:
            siblings = [{"rfilename": f, **entry(f, c)} for f, c in files.items()]
            about = {"id": name, "sha": commit, "siblings": siblings, "private": name in hub.private}
            return self.answer(200, about | ({"modelId": name} if kind == "models" else {}))
        if name in hub.gated:
            return self.answer(403, {"error": "ask first"}, X_Error_Code="GatedRepo")
        return self.file("/".join(rest[2:]), commit, files)

    def tree(self, folder: str, files: dict[str, bytes]) -> None:
        """What is in a folder of a repository."""
        inside = {f: c for f, c in files.items() if not folder or f.startswith(folder + "/")}
        if folder and not inside:
            return self.answer(404, {"error": "no such folder"}, X_Error_Code="EntryNotFound")
        parents = {f.rsplit("/", i)[0] for f in inside for i in range(1, f.count("/") + 1)}
        deep = "recursive=true" in urlparse(self.path).query.lower()
        depth = folder.count("/") + 1 if folder else 0
        listed: list[dict[str, Any]] = [{"type": "directory", "path": p, "oid": "0" * 40, "size": 0} for p in sorted(parents - {folder}) if deep or p.count("/") == depth]  # fmt: skip
        listed += [
            {"type": "file", "path": f, **entry(f, c)} for f, c in inside.items() if deep or f.count("/") == depth
        ]
        return self.answer(200, listed)

    def file(self, file: str, commit: str, files: dict[str, bytes]) -> None:
        """A file's content, from where it is asked for."""
        hub = self.owner
        if file not in files:
            return self.answer(404, {"error": "no such file"}, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
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

    def who(self) -> str | None:
        """Whose token came along."""
        return self.owner.tokens.get(self.headers.get("Authorization", "").removeprefix("Bearer "))

    def do_PUT(self) -> None:
        hub, path = self.owner, unquote(urlparse(self.path).path).strip("/")
        hub.asked.append((self.command, path, ""))
        if self.trouble(path):
            return None
        data = self.body()
        if hashlib.sha256(data).hexdigest() != path.removeprefix("store/"):
            return self.answer(400, {"error": "not what was announced"})
        hub.stored[path.removeprefix("store/")] = data
        return self.answer(200)

    def do_POST(self) -> None:
        hub, path = self.owner, unquote(urlparse(self.path).path).strip("/")
        hub.asked.append((self.command, path, ""))
        data = self.body()
        if self.trouble(path):
            return None
        if path == "api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        parts = path.split("/")
        kind = parts[1] if parts[:1] == ["api"] and parts[1] in ("models", "datasets") else "models"
        name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2]).removesuffix(".git")
        if parts[4:5] == ["paths-info"]:
            return self.paths_info(name, parts[5], kind, data)
        if not self.who():
            return self.answer(401, {"error": "Invalid username or password."})
        if path == "api/repos/create":
            return self.create(json.loads(data))
        if name not in hub.models:
            return self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        if name in hub.read_only:
            return self.answer(403, {"error": "You don't have the rights to write here."})
        return self.write(name, parts, data)

    def paths_info(self, name: str, revision: str, kind: str, data: bytes) -> None:
        """What is known of some files."""
        found = self.owner.files(name, revision, kind)
        if found is None:
            return self.answer(404, {"error": "no such revision"}, X_Error_Code="RevisionNotFound")
        text = data.decode()
        asked = json.loads(text)["paths"] if text[:1] == "{" else [unquote(p.split("=")[1]) for p in text.split("&") if p.startswith("paths=")]  # fmt: skip
        listed = [{"type": "file", "path": p, **entry(p, found[1][p])} for p in asked if p in found[1]]
        folders = [p for p in asked if p not in found[1] and any(f.startswith(p + "/") for f in found[1])]
        return self.answer(
            200, listed + [{"type": "directory", "path": p, "oid": "0" * 40, "size": 0} for p in folders]
        )

    def create(self, wanted: dict[str, Any]) -> None:
        """A new repository."""
        hub, who = self.owner, self.who()
        owner = wanted.get("organization") or who
        name = f"{owner}/{wanted['name']}"
        if owner != who:
            return self.answer(403, {"error": f"You don't have the rights to create a model under the namespace {owner!r}."})  # fmt: skip
        if name in hub.models:
            return self.answer(409, {"error": "You already created this model repo", "url": f"{hub.address}/{name}"})
        hub.models[name] = {"main": {}}
        if wanted.get("private") or wanted.get("visibility") == "private":
            hub.private.add(name)
        return self.answer(200, {"url": f"{hub.address}/{name}", "name": name, "id": name})

    def write(self, name: str, parts: list[str], data: bytes) -> None:
        """Ask how files come, where large ones go, and the commit; a branch."""
        hub = self.owner
        if parts[2:] == ["info", "lfs", "objects", "batch"]:
            objects = []
            for one in json.loads(data)["objects"]:
                told = {"oid": one["oid"], "size": one["size"]}
                if one["oid"] not in hub.stored:
                    told["actions"] = {"upload": {"href": f"{hub.address}/store/{one['oid']}"}}
                objects.append(told)
            return self.answer(200, {"transfer": "basic", "objects": objects})
        revision = "/".join(parts[5:])
        if parts[4] == "branch":
            if revision in hub.models[name]:
                return self.answer(409, {"error": "the branch exists"})
            hub.models[name][revision] = dict(hub.models[name]["main"])
            hub.commits[name, revision] = hub.commit_of(name, "main")
            return self.answer(200, {})
        found = hub.files(name, revision)
        if found is None:
            return self.answer(404, {"error": "no such revision"}, X_Error_Code="RevisionNotFound")
        if parts[4] == "preupload":
            asked = [f["path"] for f in json.loads(data)["files"]]
            modes = [
                {"path": p, "uploadMode": "lfs" if is_large(p) else "regular", "shouldIgnore": False, "oid": None}
                for p in asked
            ]
            return self.answer(200, {"files": modes})
        lines = [json.loads(line) for line in data.splitlines() if line.strip()]
        parent = lines[0]["value"].get("parentCommit")
        if parent and parent != found[0]:
            return self.answer(412, {"error": "A commit has happened since. Please refresh and try again."})
        made = hub.take(name, revision, lines)
        return self.answer(
            200, {"success": True, "commitOid": made, "commitUrl": f"{hub.address}/{name}/commit/{made}"}
        )
