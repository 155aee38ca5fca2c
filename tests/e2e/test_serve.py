"""`decodefleet serve` as a user runs it: Ray, HAProxy, Redis, two workers with the fake engine.

One cluster for the whole module, in the order of the tests: the last one stops it.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import redis
from raw_http import connect, post_in_two
from served import Served, command_line
from waiting import until

from decodefleet.cluster.directory.keys import PREFIX
from decodefleet.cluster.processes import free_ports, port_is_free

METRICS_PORT = free_ports(1)[0]
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "one two three four five"}]}


@pytest.fixture(scope="module")
def served(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(
        tmp_path_factory.mktemp("serve") / "log",
        str(smollm2),
        *("--served-model-name", "tiny", "--workers", "2", "--fake", "--fake-step-base-s", "0.01"),
        *("--log-format", "json", "--metrics-port", str(METRICS_PORT)),
    )
    try:
        served.wait_ready()
        yield served
    finally:
        if served.process.poll() is None:
            served.stop()


def chat(served: Served, **fields: Any) -> dict[str, Any]:
    response = httpx.post(f"{served.url}/v1/chat/completions", json=CHAT | fields, timeout=60)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def placements(served: Served, **query: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{served.url}/debug/placements", params=query).json()
    return found


def metric(served: Served, name: str) -> float:
    text = httpx.get(f"{served.url}/metrics").text
    return sum(float(value) for value in re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE))


def incarnations(served: Served) -> set[str]:
    """Of the workers that a request could go to now; none while no scheduler can be asked."""
    answer = chat(served, max_tokens=1)
    found = httpx.get(f"{served.url}/debug/placements", params={"request_id": answer["id"]})
    # a router that placed it by itself, without a scheduler, has told nobody
    return {one["incarnation"] for one in found.json()[-1]["considered"]} if found.is_success else set()


def test_serves_a_chat_completion(served: Served) -> None:
    answer = chat(served, max_tokens=5)
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["choices"][0]["finish_reason"] == "length"


def test_streams_it_too_with_the_same_text(served: Served) -> None:
    text = ""
    with httpx.stream(
        "POST", f"{served.url}/v1/chat/completions", json=CHAT | {"stream": True, "seed": 1}
    ) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    for event in events[:-1]:
        text += json.loads(event)["choices"][0]["delta"].get("content", "")
    assert text == chat(served, seed=1)["choices"][0]["message"]["content"]


def test_says_what_it_started(served: Served) -> None:
    until(lambda: "curl" in served.log.read_text())
    shown = served.log.read_text()
    assert shown.count("is ready: KV cache of 4096 blocks") == 2
    assert f"ready at {served.url}" in shown
    assert "ray" not in shown.lower().replace("array", "")


def test_placements_can_be_looked_up_by_request(served: Served) -> None:
    answer = chat(served, max_tokens=1)
    (decision,) = placements(served, request_id=answer["id"])
    assert len(decision["considered"]) == 2
    terms = set(decision["considered"][0]["cost_s"])
    assert {"start", "restore", "compute", "slowdown", "evict", "total"} <= terms


def test_metrics_are_the_fleets(served: Served) -> None:
    before = metric(served, "decodefleet_generation_tokens_total")
    with_both = [chat(served, max_tokens=5, ignore_eos=True) for _ in range(8)]
    until(lambda: metric(served, "decodefleet_generation_tokens_total") >= before + 5 * len(with_both))


def test_a_request_is_one_line_under_one_id(served: Served) -> None:
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine-1"})
    assert answer.headers.get_list("x-request-id") == ["mine-1"]
    (folder,) = re.findall(r"logs: (\S+)", served.log.read_text())

    def line() -> dict[str, Any] | None:
        for log in Path(folder).glob("ray/session_latest/logs/serve/replica_decodefleet_router_*.log"):
            for text in log.read_text().splitlines():
                request = json.loads(text).get("request", {})
                if request.get("id") == "mine-1":
                    return request  # type: ignore[no-any-return]
        return None

    until(lambda: line() is not None)
    told = line() or {}
    assert told["generation"] == answer.json()["id"]
    assert told["generated_tokens"] == answer.json()["usage"]["completion_tokens"]


def test_each_process_has_metrics_of_its_own(served: Served) -> None:
    texts = [httpx.get(f"http://127.0.0.1:{METRICS_PORT + number}/metrics").text for number in range(4)]
    assert sum("decodefleet_workers{" in text for text in texts) == 1
    assert sum("vllm:cache_config_info{" in text for text in texts) == 2
    assert all("process_resident_memory_bytes" in text for text in texts)


def test_a_health_check_finds_it_at_whatever_port(served: Served) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "decodefleet.cluster.health"], capture_output=True, text=True, check=False
    )
    # other servers of ours may run beside it
    assert f"{served.url} is ready" in done.stdout.splitlines()


def test_the_page_comes_through_the_proxy(served: Served) -> None:
    page = httpx.get(f"{served.url}/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert len(httpx.get(f"{served.url}/debug/fleet").json()["workers"]) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_noticed_behind_the_proxy(served: Served, stream: bool) -> None:
    aborted = "decodefleet_requests_finished_total(?={[^}]*abort)"
    before = metric(served, aborted)
    fields = {"model": "tiny", "prompt": "one two", "max_tokens": 2000, "ignore_eos": True, "stream": stream}
    head, body = post_in_two("/v1/completions", fields)
    with connect(served.url) as client:
        client.sendall(head)
        # as most clients do, in a packet of its own
        time.sleep(0.05)
        client.sendall(body)
        until(lambda: metric(served, "decodefleet_sequences_running") == 1)
    until(lambda: metric(served, "decodefleet_sequences_running") == 0)
    assert metric(served, aborted) == before + 1


def test_beyond_this_machine_only_serve_listens_and_answers_nobody_without_rays_token(served: Served) -> None:
    found = {(name, address) for name in served.census() for address in served.listening(name)}
    assert {"raylet", "gcs", "controller", "proxy"} <= {name for name, _ in found}
    reached = {(name, port) for name, (host, port) in found if host.removeprefix("::ffff:") != "127.0.0.1"}
    # Serve's replicas let each other in by gRPC, at an address that no option changes
    assert {name for name, _ in reached} == {"router", "scheduler", "supervisor"}
    for _, port in reached:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            for headers in ((), (("authorization", "Bearer " + "0" * 64),)):
                call = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
                with pytest.raises(grpc.RpcError) as refused:
                    call(b"", metadata=headers, timeout=60)
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_redis_holds_the_directory(served: Served) -> None:
    (server,) = served.named("redis-server")
    path = command_line(server).split("unixsocket:")[1].split()[0]
    chat(served, messages=[{"role": "user", "content": "a long prompt " * 40}], max_tokens=1)
    client = redis.Redis(unix_socket_path=path)
    assert len(client.smembers(f"{PREFIX}tiny:workers")) == 2
    until(lambda: max(client.strlen(key) for key in client.scan_iter(f"{PREFIX}tiny:tiers:*")) > 8)
    client.close()


def test_a_killed_rank_comes_back_while_the_other_serves(served: Served) -> None:
    before = incarnations(served)
    assert len(before) == 2
    served.named("decodefleet.worker.rank")[0].kill()
    for _ in range(20):
        chat(served, max_tokens=2)
    until(lambda: len(incarnations(served) - before) == 1 and len(incarnations(served)) == 2)
    assert "after a restart" in served.log.read_text()


def test_a_killed_scheduler_is_replaced_and_requests_go_on(served: Served) -> None:
    (scheduler,) = served.named("ServeReplica:decodefleet:scheduler")
    scheduler.kill()
    until(lambda: served.named("ServeReplica:decodefleet:scheduler"))
    until(lambda: served.answers("/ready"))
    until(lambda: len(incarnations(served)) == 2)


@pytest.mark.timeout(600)
def test_a_start_that_fails_after_a_lost_raylet_is_tried_again(served: Served) -> None:
    (raylet,) = served.census()["raylet"]
    raylet.kill()

    def take_port() -> socket.socket | None:
        try:
            return socket.create_server(("127.0.0.1", served.port))
        except OSError:
            return None

    # somebody else has it for a while
    with until(take_port) as server:
        assert server is not None
        until(lambda: "starting again in" in served.log.read_text())
    served.wait_ready()
    assert chat(served, max_tokens=2)["usage"]["completion_tokens"] == 2
    until(lambda: served.log.read_text().count("ready at") == 2)
    said = " ".join(served.log.read_text().split())
    assert f"(Address already in use) for [127.0.0.1:{served.port}]" in said


def test_ctrl_c_lets_streams_finish_and_leaves_no_process(served: Served) -> None:
    answers: list[dict[str, Any]] = []
    request = threading.Thread(
        target=lambda: answers.append(chat(served, max_tokens=150, ignore_eos=True)), daemon=True
    )
    running = metric(served, "decodefleet_generation_tokens_total")
    request.start()
    until(lambda: metric(served, "decodefleet_generation_tokens_total") > running)
    # of all its lives
    folders = re.findall(r"logs: (\S+)", served.log.read_text())
    assert Path(folders[-1]).exists()
    assert served.stop() == 0, served.log.read_text()
    request.join()
    assert answers[0]["usage"]["completion_tokens"] == 150
    assert not [process for process in served.seen.values() if process.is_running()]
    assert not [folder for folder in folders if Path(folder).exists()]
    assert port_is_free("127.0.0.1", served.port)
    assert "Traceback" not in served.log.read_text()


def test_ctrl_c_while_it_starts_is_told_and_leaves_nothing(smollm2: Path, tmp_path: Path) -> None:
    # with bars, as in a terminal
    starting = Served(tmp_path / "log", str(smollm2), "--fake", env={"FORCE_COLOR": "1", "TERM": "xterm"})
    until(lambda: starting.census()["gcs"])
    folder = re.search(r"logs: (\S+)", starting.log.read_text())
    assert folder is not None
    assert starting.stop() == 0, starting.log.read_text()
    before, told, after = starting.log.read_text().partition("stopping")
    assert told
    # the bar was there, was wiped away, and is not drawn again
    assert "starting Ray" in before
    assert before.endswith("\x1b[1A\x1b[2K")
    assert "starting" not in after
    assert not [process for process in starting.seen.values() if process.is_running()]
    assert not Path(folder[1]).exists()
