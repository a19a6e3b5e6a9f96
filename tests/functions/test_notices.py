"""What clouds say of a machine that goes, read from a stub on loopback and from files."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from rlhfless_ray.functions import notices as module
from rlhfless_ray.functions.notice_reader import AT_ONCE_S, NAME, TOKEN, NoticeReader, removal_s
from rlhfless_ray.functions.notices import NoticePolls

AT = "2026-11-29T12:00:00Z"
AT_S = 1795953600.0


def event(kind: str, *machines: str, at: str = "Sun, 29 Nov 2026 12:00:00 GMT") -> dict[str, Any]:
    return {"EventType": kind, "Resources": list(machines), "NotBefore": at, "EventStatus": "Scheduled"}


@pytest.mark.parametrize(
    ("text", "at_s"),
    [
        ("", None),
        ("FALSE\n", None),
        ("TRUE", 0.0),
        (AT, AT_S),
        (str(AT_S), AT_S),
        (json.dumps({"action": "terminate", "time": AT}), AT_S),
        (json.dumps({"action": "rebalance", "time": AT}), None),
        (json.dumps({"DocumentIncarnation": 1, "Events": []}), None),
        (json.dumps({"Events": [event("Preempt", "mine"), event("Preempt", "mine", at="")]}), 0.0),
        (json.dumps({"Events": [event("Reboot", "mine"), event("Preempt", "other")]}), None),
        (json.dumps({"Events": [event("Preempt", "mine", "other")]}), AT_S),
    ],
)
def test_the_words_of_three_clouds(text: str, at_s: float | None) -> None:
    assert removal_s(text, lambda: "mine\n") == at_s


@pytest.mark.parametrize("text", ["<html>moved</html>", "[1]", "{", '{"Events": [1]}', '{"Events": 1}', '{"action": "stop", "time": 3}'])
def test_another_text_is_a_failure(text: str, tmp_path: Path) -> None:
    (tmp_path / "notice").write_text(text)
    removed_s, failure = NoticeReader().read(str(tmp_path / "notice"))
    assert removed_s is None and "Error: " in failure


class Stub(ThreadingHTTPServer):
    """A metadata server of every cloud. `replies`: {path: text}; other paths are 404. It wants a token if it has one."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies: dict[str, str] = {}
        self.token, self.asked = "", list[tuple[str, str]]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Stub

    def do_GET(self) -> None:
        self.server.asked.append(("GET", self.path))
        if self.server.token and self.headers["X-aws-ec2-metadata-token"] != self.server.token:
            self.send_error(401)
        elif self.headers["Metadata-Flavor"] != "Google" or self.headers["Metadata"] != "true":
            self.send_error(403)
        elif self.path not in self.server.replies:
            self.send_error(404)
        else:
            self._reply(self.server.replies[self.path])

    def do_PUT(self) -> None:
        self.server.asked.append(("PUT", self.path))
        self._reply(self.server.token)

    def _reply(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def stub() -> Iterator[Stub]:
    with Stub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_aws_gives_a_time_to_who_has_a_token(stub: Stub) -> None:
    stub.token, reader, path = "secret", NoticeReader(), "/latest/meta-data/spot/instance-action"
    assert reader.read(stub.url + path) == (None, "")
    stub.replies[path] = json.dumps({"action": "terminate", "time": AT})
    assert reader.read(stub.url + path) == (AT_S, "")
    assert [method for method, _ in stub.asked] == ["GET", "PUT", "GET", "GET"] and stub.asked[1][1] == TOKEN[0]


def test_google_gives_no_time_so_its_half_minute_counts_from_the_first_look(stub: Stub) -> None:
    reader, path = NoticeReader(), "/computeMetadata/v1/instance/preempted"
    stub.replies[path] = "FALSE"
    assert reader.read(stub.url + path) == (None, "")
    stub.replies[path] = "TRUE"
    first = reader.read(stub.url + path)[0]
    assert first == pytest.approx(time.time() + AT_ONCE_S, abs=5) and reader.read(stub.url + path) == (first, "")


def test_azure_tells_a_group_of_machines_so_the_name_is_asked_for(stub: Stub) -> None:
    path = "/metadata/scheduledevents?api-version=2020-07-01"
    stub.replies |= {path: json.dumps({"Events": [event("Preempt", "vm_1")]}), NAME: "vm_2"}
    assert NoticeReader().read(stub.url + path) == (None, "")
    stub.replies[NAME] = "vm_1"
    assert NoticeReader().read(stub.url + path) == (AT_S, "")


def test_a_file_is_a_notice_as_soon_as_it_exists(tmp_path: Path) -> None:
    reader, file = NoticeReader(), tmp_path / "notice"
    assert reader.read(str(file)) == (None, "")
    file.write_text("")
    assert reader.read(str(file))[0] == pytest.approx(time.time() + AT_ONCE_S, abs=5)
    file.write_text(AT)
    assert reader.read(str(file)) == (AT_S, "")


def test_what_cannot_be_read_is_told_and_is_no_notice(stub: Stub, tmp_path: Path) -> None:
    stub.replies["/moved"] = "<html>"
    assert NoticeReader().read(f"{stub.url}/moved") == (None, "ValueError: '<html>' is no notice and no time")
    address = stub.url
    stub.shutdown()
    stub.server_close()
    removed_s, failure = NoticeReader().read(f"{address}/moved")
    assert removed_s is None and "Connection refused" in failure
    assert "IsADirectoryError" in NoticeReader().read(str(tmp_path))[1]


class Answer:
    """A reference to an answer."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer


class Reader:
    """An actor that answers at once, or fails."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers, self.read = answers, self

    def remote(self, source: str) -> Any:
        return Answer(self.answers[source])


@pytest.fixture
def polls(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Polls of nodes `a` and `b`, by address, with `answers` by source."""

    def get(ref: Any) -> Any:
        if isinstance(ref.answer, Exception):
            raise ref.answer
        return ref.answer

    answers: dict[str, Any] = {"/n/10.0.0.1": (None, ""), "/n/10.0.0.2": (None, "")}
    started: list[str] = []
    context = SimpleNamespace(get_node_id=lambda: "a")
    fake = SimpleNamespace(get=get, wait=lambda refs, **_: (refs, []), get_runtime_context=lambda: context)
    monkeypatch.setattr(module, "ray", fake)
    monkeypatch.setattr(module, "POLL_S", 0.0)
    monkeypatch.setattr(module, "draining_nodes", lambda: drained)
    monkeypatch.setattr(module, "start_actor", lambda cls, slot, *_: started.append(slot.node) or Reader(answers))
    drained: dict[str, float] = {}
    said: list[str] = []
    alive = [{"NodeID": id, "Alive": True, "NodeManagerAddress": f"10.0.0.{n}"} for n, id in enumerate("ab", 1)]
    made = NoticePolls("/n/{address}", lambda: alive, said.append)
    return SimpleNamespace(call=made, answers=answers, started=started, drained=drained, said=said, alive=alive)


def test_notices_of_a_source_and_of_ray_are_one(polls: Any) -> None:
    assert polls.call() == {} and polls.started == ["a"]
    polls.answers["/n/10.0.0.2"] = (AT_S, "")
    polls.call()
    polls.drained["a"] = 7.0
    assert polls.call() == {"b": AT_S, "a": 7.0}
    polls.drained["b"] = 0.0
    assert polls.call() == {"b": AT_S, "a": 7.0}, "the source knows when"
    polls.alive[1]["Alive"] = False
    polls.drained.clear()
    polls.call()
    assert polls.call() == {}


def test_a_poll_that_fails_is_one_warning_and_takes_no_notice_back(polls: Any) -> None:
    polls.answers["/n/10.0.0.2"] = (AT_S, "")
    polls.call(), polls.call()
    polls.answers["/n/10.0.0.2"] = (None, "OSError: refused")
    for _ in range(3):
        assert polls.call() == {"b": AT_S}
    [said] = polls.said
    assert said == "functions.notice: /n/{address} cannot be read on node b: OSError: refused; the run goes on without its notices"
    polls.answers["/n/10.0.0.1"] = ray.exceptions.RayActorError()
    polls.call(), polls.call()
    assert polls.started == ["a", "a"] and len(polls.said) == 2, "its process is started anew"
