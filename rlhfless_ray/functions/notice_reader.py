"""Read a cloud's notice that a machine will be taken away, from a URL or a file. Only the standard library is imported."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import urlsplit

from rlhfless_ray.common.json_types import JsonObject

FETCH_S = 2.0  # timeout of a request: metadata servers answer in milliseconds
AT_ONCE_S = 30.0  # notice of a cloud that gives no time: Google's and the least of Azure's
# a metadata server wants the header of its own cloud, and ignores the other
HEADERS = {"Metadata-Flavor": "Google", "Metadata": "true"}
TOKEN = "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}  # version 2 of AWS's metadata service
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"  # Azure's name of the machine
TAKEN_AWAY = ("Preempt", "Terminate")  # Azure's events after which a machine does not come back


class NoticeReader:
    """Reads notices of one machine, or of several. An actor runs on each machine: no other one can read its metadata."""

    def __init__(self) -> None:
        self.token = ""
        self.seen_s: dict[str, float] = {}  # by source: when a notice without a time was read first

    def read(self, source: str) -> tuple[float | None, str]:
        """Return when the machine will be removed (seconds since the epoch; None without notice), and why that is not known ("" if it is).

        `source`: a URL, or the path of a file. A file that does not exist is no notice, as is the status 404.
        """
        try:
            text = self._fetch(source) if "://" in source else _content(Path(source))
            removed_s = removal_s(text, lambda: self._fetch(_at(source, NAME)))
        except (OSError, ValueError, TypeError, AttributeError) as error:  # the last two: JSON of another shape
            return None, f"{type(error).__name__}: {error}"
        if removed_s is None:
            self.seen_s.pop(source, None)
            return None, ""
        return removed_s or self.seen_s.setdefault(source, time.time() + AT_ONCE_S), ""

    def _fetch(self, url: str, *, again: bool = True) -> str:
        headers = HEADERS | ({"X-aws-ec2-metadata-token": self.token} if self.token else {})
        try:
            return _open(url, headers)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return ""
            if error.code != 401 or not again:
                raise
        path, wanted = TOKEN
        self.token = _open(_at(url, path), wanted, "PUT")
        return self._fetch(url, again=False)


def removal_s(text: str, own_name: Callable[[], str] = str) -> float | None:
    """Return the time of a removal in seconds since the epoch, 0 if the notice has none, or None without a notice.

    It understands AWS's `spot/instance-action`, Google's `instance/preempted`, Azure's scheduled events, a time (ISO 8601, RFC 1123 or
    seconds since the epoch), and `true`. `own_name`: returns the machine's name, because Azure tells a whole group of machines.

    Raises ValueError for any other text, and TypeError or AttributeError for other JSON.
    """
    text = text.strip()
    if text.lower() in ("", "false", "none"):
        return None
    if text.lower() == "true":
        return 0.0
    if not text.startswith("{"):
        return _time(text)
    notice = json.loads(text)
    if "Events" in notice:
        times = [_time(event.get("NotBefore") or "") for event in notice["Events"] if _concerns(event, own_name)]
        return min(times, default=None)
    return _time(notice.get("time") or "") if notice.get("action") in ("terminate", "stop", "hibernate") else None


def _concerns(event: JsonObject, own_name: Callable[[], str]) -> bool:
    """Return whether one of Azure's events takes this machine away."""
    named = event.get("Resources") or []
    return event.get("EventType") in TAKEN_AWAY and (not named or own_name().strip() in named)


def _time(text: str) -> float:
    """Return a time in seconds since the epoch. An empty text is 0: now, which Azure means by it."""
    if not text or re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text or 0)
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        try:
            found = parsedate_to_datetime(text)
        except (TypeError, ValueError):
            raise ValueError(f"{text[:80]!r} is no notice and no time") from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _content(path: Path) -> str:
    try:
        return path.read_text()[:65536] or "true"  # an empty file is a notice without a time
    except FileNotFoundError:
        return ""


def _at(url: str, path: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}{path}"


def _open(url: str, headers: dict[str, str], method: str = "GET") -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # metadata servers are on the machine's own link
    with opener.open(urllib.request.Request(url, headers=headers, method=method), timeout=FETCH_S) as reply:
        return str(reply.read(65536).decode())
