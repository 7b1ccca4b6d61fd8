"""A small stand-in of the Hub, over HTTP: what the real ``huggingface_hub`` client asks for to create a repository,
upload a folder and download files again, by LFS or (where its storage client can keep data in a local folder) by Xet.

Nothing of ours is replaced: tests start a process with ``HF_ENDPOINT`` set to ``HubServer.url``. Point an
interactive session at it to look around: ``python tests/hub_server.py``.
"""

import base64
import contextlib
import hashlib
import json
import re
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_standin"
LARGE = (".safetensors", ".bin", ".png")  # what the Hub keeps outside of git


@dataclass
class Blob:
    """A file: its content, or (kept by Xet) where its content is."""

    sha256: str
    size: int
    content: bytes | None = None
    large: bool = False

    @property
    def etag(self) -> str:
        if self.large or self.content is None:
            return self.sha256
        return hashlib.sha1(b"blob %d\0" % self.size + self.content).hexdigest()


@dataclass
class Repository:
    private: bool
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)  # by id: all files
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, Blob], message: str) -> str:
        oid = hashlib.sha1(f"{branch} {len(self.commits)} {message}".encode()).hexdigest()
        self.commits[oid], self.branches[branch] = files, oid
        self.messages.append(message)
        return oid

    def resolve(self, revision: str) -> str | None:
        return self.branches.get(revision) or (revision if revision in self.commits else None)


class Answer(Exception):  # noqa: N818
    """What a request gets; raised from anywhere."""

    def __init__(self, status: int, body: Any = None, **headers: str) -> None:
        super().__init__(status)
        self.status, self.headers = status, {key.replace("_", "-"): value for key, value in headers.items()}
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else b""


class HubServer(ThreadingHTTPServer):
    """``with HubServer(storage) as hub: ... hub.url ...``; ``hub.requests`` lists what was asked for."""

    daemon_threads = True

    def __init__(self, storage: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.storage = storage
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}  # uploaded by LFS, by sha256
        self.requests: list[str] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def objects_url(self) -> str:
        """Large files come from another host, as the Hub's do: tokens must not go there."""
        return f"http://localhost:{self.server_port}/objects"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def xet_hash(self, sha256: str) -> str | None:
        """The name under which Xet's local storage keeps a file, from the shards it wrote."""
        for shard in self.storage.rglob("*.mdb"):
            if found := read_shard(shard.read_bytes()).get(sha256):
                return found
        return None


def read_shard(content: bytes) -> dict[str, str]:
    """Xet hashes by sha256 of the files that a shard of Xet's storage describes.

    A header of 48 bytes, then per file: its hash, flags and a count n; n segments; with flag 31 n checks; with flag 30
    its sha256; 48 bytes each. A hash of ones ends the list.
    """
    found, place = {}, 48
    while place + 48 <= len(content) and content[place : place + 32] != b"\xff" * 32:
        flags, count = struct.unpack_from("<II", content, place + 32)
        name = _hash(content, place)
        place += 48 * (1 + count * (2 if flags & 1 << 31 else 1))
        if flags & 1 << 30:
            found[_hash(content, place)] = name
            place += 48
    return found


def _hash(content: bytes, place: int) -> str:
    return "".join(f"{part:016x}" for part in struct.unpack_from("<4Q", content, place))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, *_: Any) -> None:
        pass

    def handle_any(self) -> None:
        path = unquote(urlsplit(self.path).path)
        with self.server.lock:
            self.server.requests.append(f"{self.command} {path}")
        body = self._body()
        try:
            for pattern, answer in ROUTES:
                if match := re.fullmatch(pattern, f"{self.command} {path}"):
                    answer(self, body, *match.groups())
            raise Answer(404, {"error": f"the stand-in has no {self.command} {path}"})
        except Answer as answer:
            self.send_response(answer.status)
            for key, value in answer.headers.items():
                self.send_header(key, value)
            if "Content-Length" not in answer.headers:
                self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body)

    do_GET = do_HEAD = do_POST = do_PUT = handle_any  # noqa: N815

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    # who may do what

    def _is_owner(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _must_be_owner(self) -> None:
        if not self._is_owner():
            raise Answer(401, {"error": "Invalid username or password."}, X_Error_Message="Invalid credentials")

    def _repository(self, repo_id: str) -> Repository:
        found = self.server.repositories.get(repo_id)
        if found is None or (found.private and not self._is_owner()):
            raise Answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        return found

    def _files(self, repo_id: str, revision: str) -> tuple[str, dict[str, Blob]]:
        repository = self._repository(repo_id)
        oid = repository.resolve(revision)
        if oid is None:
            raise Answer(404, {"error": f"Invalid rev id: {revision}"}, X_Error_Code="RevisionNotFound")
        return oid, repository.commits[oid]

    # requests

    def create(self, body: bytes) -> None:
        self._must_be_owner()
        wanted = json.loads(body)
        repo_id = f"{wanted['organization']}/{wanted['name']}"
        if repo_id in self.server.repositories:
            raise Answer(409, {"error": "You already created this model repo", "url": f"{self.server.url}/{repo_id}"})
        private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        repository = self.server.repositories[repo_id] = Repository(private)
        repository.commit("main", {}, "initial commit")
        raise Answer(200, {"url": f"{self.server.url}/{repo_id}", "name": repo_id, "id": repo_id, "private": private})

    def branch(self, body: bytes, repo_id: str, name: str) -> None:
        self._must_be_owner()
        repository = self._repository(repo_id)
        if name in repository.branches:
            raise Answer(409, {"error": "Reference already exists"})
        repository.branches[name] = repository.branches["main"]
        raise Answer(200, {})

    def validate(self, body: bytes) -> None:
        """The Hub checks a card's metadata; here: that there is a licence and that names have their form."""
        text = json.loads(body)["content"]
        problems = [] if re.search(r"^license: [\w.-]+$", text, re.M) else [{"message": '"license" is required'}]
        raise Answer(400 if problems else 200, {"errors": problems, "warnings": []})

    def preupload(self, body: bytes, repo_id: str, revision: str) -> None:
        self._must_be_owner()
        _, files = self._files(repo_id, revision)
        modes = [{"path": file["path"], "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                  "shouldIgnore": False, "oid": files[file["path"]].etag if file["path"] in files else None}
                 for file in json.loads(body)["files"]]  # fmt: skip
        raise Answer(200, {"files": modes})

    def lfs_batch(self, body: bytes, repo_id: str) -> None:
        self._must_be_owner()
        asked, objects = json.loads(body), []
        if "xet" in asked["transfers"]:  # older clients learn here that they may use it
            raise Answer(200, {"transfer": "xet", "objects": asked["objects"]})
        for wanted in asked["objects"]:
            known = wanted["oid"] in self.server.objects
            action = {} if known else {"actions": {"upload": {"href": f"{self.server.objects_url}/{wanted['oid']}"}}}
            objects.append({**wanted, **action})
        raise Answer(200, {"transfer": "basic", "objects": objects})

    def lfs_put(self, body: bytes, sha256: str) -> None:
        if hashlib.sha256(body).hexdigest() != sha256:
            raise Answer(400, {"error": "content does not match its sha256"})
        self.server.objects[sha256] = body
        raise Answer(200, {})

    def lfs_get(self, body: bytes, sha256: str) -> None:
        if sha256 not in self.server.objects or "Authorization" in self.headers:
            raise Answer(403, {"error": "no such object, or a token where none belongs"})
        raise Answer(200, self.server.objects[sha256], ETag=f'"{sha256}"')

    def commit(self, body: bytes, repo_id: str, revision: str) -> None:
        self._must_be_owner()
        oid, files = self._files(repo_id, revision)
        files, message = dict(files), ""
        for line in body.splitlines():
            step = json.loads(line)
            value = step["value"]
            if step["key"] == "header":
                message = value["summary"]
            elif step["key"] == "file":
                content = base64.b64decode(value["content"])
                files[value["path"]] = Blob(hashlib.sha256(content).hexdigest(), len(content), content)
            elif step["key"] == "lfsFile":
                content = self.server.objects.get(value["oid"])
                if content is None and self.server.xet_hash(value["oid"]) is None:
                    raise Answer(400, {"error": f"{value['path']} was never uploaded"})
                files[value["path"]] = Blob(value["oid"], value["size"], content, large=True)
            else:
                raise Answer(400, {"error": f"the stand-in cannot {step['key']}"})
        oid = self._repository(repo_id).commit(revision, files, message)
        raise Answer(200, {"commitUrl": f"{self.server.url}/{repo_id}/commit/{oid}", "commitOid": oid, "success": True})

    def info(self, body: bytes, repo_id: str, revision: str | None = None) -> None:
        oid, files = self._files(repo_id, revision or "main")
        raise Answer(200, {"_id": oid, "id": repo_id, "modelId": repo_id, "sha": oid, "downloads": 0, "likes": 0,
                           "private": self._repository(repo_id).private, "tags": [],
                           "siblings": [{"rfilename": path} for path in files]})  # fmt: skip

    def paths_info(self, body: bytes, repo_id: str, revision: str) -> None:
        _, files = self._files(repo_id, revision)
        wanted = parse_qs(body.decode()).get("paths") or json.loads(body)["paths"]
        raise Answer(200, [_describe(path, blob) for path, blob in files.items() if path in wanted])

    def tree(self, body: bytes, repo_id: str, revision: str) -> None:
        _, files = self._files(repo_id, revision)
        raise Answer(200, [_describe(path, blob) for path, blob in files.items()])

    def xet_token(self, body: bytes, repo_id: str, kind: str, revision: str) -> None:
        if kind == "write":
            self._must_be_owner()
        self._repository(repo_id)
        access = {"casUrl": f"local://{self.server.storage}", "exp": int(time.time()) + 3600, "accessToken": "xet"}
        raise Answer(200, access, X_Xet_Cas_Url=access["casUrl"], X_Xet_Access_Token=access["accessToken"],
                     X_Xet_Token_Expiration=str(access["exp"]))  # fmt: skip

    def resolve(self, body: bytes, repo_id: str, revision: str, path: str) -> None:
        oid, files = self._files(repo_id, revision)
        if path not in files:
            raise Answer(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound", X_Repo_Commit=oid)
        blob = files[path]
        known = {"X_Repo_Commit": oid, "ETag": f'"{blob.etag}"'}
        if not blob.large:
            raise Answer(200, blob.content, **known)
        known |= {"X_Linked_Etag": f'"{blob.sha256}"', "X_Linked_Size": str(blob.size)}
        if blob.content is None:
            route = f"{self.server.url}/api/models/{repo_id}/xet-read-token/{oid}"
            known |= {"X_Xet_Hash": self.server.xet_hash(blob.sha256) or "", "X_Xet_Refresh_Route": route}
        raise Answer(302, b"", Location=f"{self.server.objects_url}/{blob.sha256}", **known)


def _describe(path: str, blob: Blob) -> dict[str, Any]:
    lfs = {"lfs": {"oid": blob.sha256, "size": blob.size, "pointerSize": 130}} if blob.large else {}
    return {"type": "file", "path": path, "oid": blob.etag, "size": blob.size, **lfs}


NAME = r"([^/]+/[^/]+)"
ROUTES: list[tuple[str, Callable[..., None]]] = [
    (r"POST /api/repos/create", Handler.create),
    (r"POST /api/validate-yaml", Handler.validate),
    (rf"POST /api/models/{NAME}/branch/(.+)", Handler.branch),
    (rf"POST /api/models/{NAME}/preupload/(.+)", Handler.preupload),
    (rf"POST /api/models/{NAME}/commit/(.+)", Handler.commit),
    (rf"POST /api/models/{NAME}/paths-info/(.+)", Handler.paths_info),
    (rf"GET /api/models/{NAME}/tree/(.+)", Handler.tree),
    (rf"GET /api/models/{NAME}/xet-(read|write)-token/(.+)", Handler.xet_token),
    (rf"GET /api/models/{NAME}(?:/revision/(.+))?", Handler.info),
    (rf"POST /{NAME}\.git/info/lfs/objects/batch", Handler.lfs_batch),
    (r"PUT /objects/([0-9a-f]{64})", Handler.lfs_put),
    (r"(?:GET|HEAD) /objects/([0-9a-f]{64})", Handler.lfs_get),
    (rf"(?:GET|HEAD) /{NAME}/resolve/([^/]+)/(.+)", Handler.resolve),
]


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder, HubServer(Path(folder)) as hub:
        print(f"HF_ENDPOINT={hub.url} HF_TOKEN={TOKEN}; stop with Control-C")
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
