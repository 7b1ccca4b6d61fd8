"""Limits for visitors of a page that is open to a network: bytes of an upload, jobs in the queue."""

import json
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

__all__ = ["Quotas"]

App = Callable[[MutableMapping[str, Any], Callable[..., Any], Callable[..., Awaitable[None]]], Awaitable[None]]


class Quotas:
    """ASGI middleware that refuses a request before its body is read: with 413 what is too large (411 if it does not
    say how large it is), with 429 what would wait behind too many others, of one client or of all.

    ``jobs`` counts, by client, what waits and what runs. Requests that were let in and are not answered yet count, too:
    else a hundred at once would all find the queue empty.
    """

    def __init__(self, app: App, *, jobs: Callable[[], Counter[str]], max_bytes: int, per_client: int,
                 in_all: int) -> None:  # fmt: skip
        self.app, self.jobs, self.max_bytes, self.per_client, self.in_all = app, jobs, max_bytes, per_client, in_all
        self.let_in: Counter[str] = Counter()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Callable[..., Any],
                       send: Callable[..., Awaitable[None]]) -> None:  # fmt: skip
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return await self.app(scope, receive, send)
        client = scope["client"][0] if scope.get("client") else ""
        refusal = self.refusal(client, dict(scope["headers"]).get(b"content-length"))
        if refusal is not None:
            body, headers = json.dumps({"detail": refusal[1]}).encode(), [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": refusal[0], "headers": headers})
            return await send({"type": "http.response.body", "body": body})
        self.let_in[client] += 1
        try:
            return await self.app(scope, receive, send)
        finally:
            self.let_in[client] -= 1
            self.let_in += Counter()  # forgets who is at zero

    def refusal(self, client: str, length: bytes | None) -> tuple[int, str] | None:
        """Status and reason, or None."""
        if length is None:
            return 411, "Say how long the request is (Content-Length)."
        if not length.isdigit() or int(length) > self.max_bytes:
            return 413, f"The request has more than {self.max_bytes:,} bytes: choose a smaller file."
        jobs = self.jobs() + self.let_in
        if jobs[client] >= self.per_client:
            return 429, f"{jobs[client]} of your requests are still waiting: try again in a few seconds."
        if jobs.total() >= self.in_all:
            return 429, f"{jobs.total()} requests are waiting, as many as may: try again in a minute."
        return None
