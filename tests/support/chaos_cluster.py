"""A served cluster under attack: what it runs, what must be equal, and whether all is as before.

`Cluster` starts `decodefleet serve` with everything between its parts going through a `Wire`. `disturb` runs
streams, strikes in their midst, and compares what clients got with what they get in peace.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import redis
from chaos_streams import Answer, Length, Request, Transcript, make_requests, run_streams
from chaos_wire import HOST, Wire
from prometheus_client.parser import text_string_to_metric_families
from quantiles import quantile
from served import Served, command_line

from decodefleet.cluster.directory.keys import Keys

MODEL = "tiny"
# a machine at ten times its cores still meets them: one part started again, and everything, models included
SETTLE_S = 90.0
ALL_ANEW_S = 300.0
LOG_LINES = 40
PATIENCE_S = 240.0
# a pause that a client may notice
NOTICED_S = 0.25
LASTING = (
    "rank",
    "follower",
    "supervisor",
    "scheduler",
    "router",
    "redis",
    "controller",
    "proxy",
    "proxy manager",
)
# what streams may do in a scenario
GOES_ON = "go on"
SOME_BREAK = "some may break"
BREAKS = "may break"
# how a stream ends that went through what was killed; an error of ours inside of it is none of these
EXCUSES = ("the connection ended", "the stream has no end", "HTTP/1.1 502", "HTTP/1.1 503", "Connection")


@dataclass(frozen=True)
class Scenario:
    """strike: does the harm, in a thread; says what it did.

    streams: what those may do that went through what was killed. moves: whether some must have gone on at
    another worker, or the harm hit nothing. ranks: how many a worker must have for it. settle_s: how
    soon all must be as before.
    """

    name: str
    strike: Callable[[Cluster, random.Random], str]
    streams: str = GOES_ON
    moves: bool = False
    ranks: int = 1
    settle_s: float = SETTLE_S


@dataclass
class Outcome:
    """silences: the longest pause in seconds of each stream held up. moved: streams that changed workers."""

    scenario: str
    struck: str
    at_s: float
    equal: int = 0
    broken: int = 0
    moved: int = 0
    faults: list[str] = field(default_factory=list)
    silences: list[float] = field(default_factory=list)
    settled_s: float = 0.0

    def __str__(self) -> str:
        pauses = f"p50 {quantile(self.silences, 0.5):.2f} s, p99 {quantile(self.silences, 0.99):.2f} s"
        return (
            f"{self.scenario}: {self.struck} after {self.at_s:.2f} s; "
            f"{self.equal} equal, {self.broken} broken, {self.moved} moved, "
            f"{len(self.silences)} held up ({pauses}); "
            f"settled after {self.settled_s:.1f} s" + "".join(f"\n    FAULT {fault}" for fault in self.faults)
        )


class Cluster:
    """`start` before use, `stop` after."""

    def __init__(
        self,
        folder: Path,
        model: str,
        length: Length,
        workers: int = 3,
        wired: bool = True,
        env: Mapping[str, str] | None = None,
        **options: object,
    ) -> None:
        """options: those of `serve`, by their names in a configuration file."""
        own = {"served_model_name": MODEL, "workers": workers, "routers": 2, "drain_s": 0.5, "threads": 1}
        self.options = own | ({"advertise_host": HOST} if wired else {}) | options
        flags = [word for name, value in self.options.items() for word in flag(name, value)]
        self.served = Served(folder / "log", model, *flags, env=env)
        self.wire = Wire(self._talking)
        self.model, self.workers = model, workers
        self._length = length
        self._peaceful: dict[int, tuple[list[Request], list[Answer]]] = {}
        self._blocks = 0.0

    def start(self) -> None:
        self.wire.start()
        self.served.wait_ready()
        if wrong := wait_settled(self):
            raise TimeoutError(f"after the start: {wrong}\n{self.last_words()}")
        self._blocks = fleet_metrics(self.served.url)["decodefleet_kv_blocks"]

    def stop(self) -> int:
        code = self.served.process.poll()
        if code is None:
            code = self.served.stop()
        self.wire.stop()
        return code

    def last_words(self) -> str:
        """Of the command: why it started again, and where it left logs."""
        return "\n".join(self.served.log.read_text(errors="replace").splitlines()[-LOG_LINES:])

    def end(self) -> list[str]:
        """That the command has ended, where it has."""
        code = self.served.process.poll()
        return [] if code is None else [f"the server ended with {code}"]

    def of(self, role: str) -> list[psutil.Process]:
        return self.served.census()[role]

    def peaceful(self, seed: int, count: int) -> tuple[list[Request], list[Answer]]:
        """Requests, and what they are answered when nothing is harmed."""
        if seed not in self._peaceful:
            requests = make_requests(seed, count, MODEL, self._length)
            transcripts = asyncio.run(run_streams(self.served.url, requests))
            self._peaceful[seed] = requests, [transcript.answer() for transcript in transcripts]
        return self._peaceful[seed]

    def moved(self) -> int:
        """Streams that went on at another worker than they began at."""
        return int(fleet_metrics(self.served.url)["decodefleet_router_migrations_total"])

    def unsettled(self) -> list[str]:
        """What is not as at the start."""
        return self.unsettled_fleet() or self._unusual_processes() + self._unlisted_workers()

    def unsettled_fleet(self) -> list[str]:
        """The part of it that the fleet's metrics tell."""
        try:
            seen = fleet_metrics(self.served.url)
        except httpx.HTTPError as error:
            return [f"no metrics: {error!r}"]
        wrong = [f"{name} {value:g}" for name, value in residue(seen).items()]
        total, workers = seen["decodefleet_kv_blocks"], seen["decodefleet_workers"]
        if workers != self.workers or (self._blocks and total != self._blocks):
            wrong.append(f"{workers:g} workers with {total:g} blocks")
        return wrong

    def _unusual_processes(self) -> list[str]:
        census = self.served.census()
        followers = self.workers * (int(str(self.options.get("tensor_parallel_size", 1))) - 1)
        workers = {"rank": self.workers, "supervisor": self.workers, "follower": followers}
        wanted = dict.fromkeys(LASTING, 1) | {"router": 2} | workers
        counts = {role: len(census[role]) for role in LASTING}
        return [f"{counts[role]} of {role}" for role in LASTING if counts[role] != wanted[role]]

    def _unlisted_workers(self) -> list[str]:
        """Those that the directory does not know."""
        servers = self.of("redis")
        if not servers:
            return ["no directory"]
        path = command_line(servers[-1]).split("unixsocket:")[1].split()[0]
        try:
            with redis.Redis(unix_socket_path=path) as client:
                listed = client.scard(Keys(MODEL).workers)
        except redis.RedisError as error:
            return [repr(error)]
        return [] if listed >= self.workers else [f"{listed} workers in the directory"]

    def _talking(self) -> Iterable[psutil.Process]:
        try:
            census = self.served.census()
        except psutil.NoSuchProcess:
            return []
        return [*census["rank"], *census["scheduler"]]


def flag(name: str, value: object) -> list[str]:
    words = [f"--{name.replace('_', '-')}"]
    return words if value is True else [*words, str(value)]


def disturb(cluster: Cluster, scenario: Scenario, seed: int, count: int) -> Outcome:
    """One scenario, once. Times and victims are the seed's; streams go on for as long as it is being done."""
    if gone := cluster.end():
        raise RuntimeError(f"before {scenario.name}: {gone}")
    rng = random.Random(f"{scenario.name} {seed}")
    requests, expected = cluster.peaceful(seed, count)
    outcome = Outcome(scenario.name, "", rng.uniform(0.7, 1.5))
    moved = cluster.moved()
    struck = 0.0

    async def run() -> list[Transcript]:
        nonlocal struck
        streams = asyncio.create_task(run_streams(cluster.served.url, requests))
        await asyncio.sleep(outcome.at_s)
        struck = time.monotonic()
        striking = asyncio.create_task(asyncio.to_thread(scenario.strike, cluster, rng))
        transcripts = await asyncio.wait_for(streams, PATIENCE_S)
        while not striking.done():
            again = run_streams(cluster.served.url, requests)
            transcripts += await asyncio.wait_for(again, PATIENCE_S)
        outcome.struck = striking.result()
        return transcripts

    transcripts = asyncio.run(run())
    ended = time.monotonic()
    for transcript in transcripts:
        judge(transcript, expected[transcript.request.number], scenario, outcome)
        outcome.silences += [pause for pause in [transcript.silence_after(struck)] if pause > NOTICED_S]
    left = wait_settled(cluster, scenario.settle_s)
    outcome.settled_s = time.monotonic() - ended
    if left:
        # the rest would ask what does not answer
        left += cluster.end()
        outcome.faults += [f"left over after {outcome.settled_s:.0f} s: {what}" for what in left]
        return outcome
    if scenario.streams != BREAKS and not outcome.equal:
        outcome.faults.append("no stream came to its end")
    outcome.moved = max(0, cluster.moved() - moved)
    if scenario.moves and not outcome.moved:
        outcome.faults.append("no stream had to move")
    _ask_again(cluster, requests[:6], expected, outcome)
    return outcome


def fleet_metrics(url: str) -> Counter[str]:
    """Sums over labels; of workers only those that serve. Raises httpx.HTTPError."""
    sums: Counter[str] = Counter()
    answer = httpx.get(f"{url}/metrics", trust_env=False, timeout=10)
    for family in text_string_to_metric_families(answer.raise_for_status().text):
        for sample in family.samples:
            if sample.labels.get("state", "serving") == "serving":
                sums[sample.name] += sample.value
    return sums


def residue(seen: Counter[str]) -> dict[str, float]:
    """What an idle fleet does not have."""
    pools = ("kv_blocks", "kv_blocks_free", "kv_blocks_cached")
    total, free, cached = (seen[f"decodefleet_{name}"] for name in pools)
    idle = ("sequences_running", "sequences_waiting", "scheduler_reservations", "scheduler_queue_length")
    left = {name: seen[f"decodefleet_{name}"] for name in idle} | {"blocks in use": total - free - cached}
    return {name: value for name, value in left.items() if value}


def wait_settled(cluster: Cluster, limit_s: float = SETTLE_S) -> list[str]:
    """What is not as at the start after all patience; empty as soon as all is."""
    give_up = time.monotonic() + limit_s
    while (wrong := cluster.unsettled()) and time.monotonic() < give_up and not cluster.end():
        time.sleep(0.1)
    return wrong


def judge(transcript: Transcript, expected: Answer, scenario: Scenario, outcome: Outcome) -> None:
    number = transcript.request.number
    try:
        answer = transcript.answer()
    except ValueError as error:
        outcome.broken += 1
        if scenario.streams == GOES_ON or not str(error).startswith(EXCUSES):
            outcome.faults.append(f"stream {number}: {error}")
        return
    if answer == expected:
        outcome.equal += 1
    else:
        outcome.faults.append(f"stream {number}: {difference(answer, expected)}")


def _ask_again(cluster: Cluster, requests: list[Request], expected: list[Answer], outcome: Outcome) -> None:
    for transcript in asyncio.run(run_streams(cluster.served.url, requests)):
        try:
            if transcript.answer() != expected[transcript.request.number]:
                outcome.faults.append(f"afterwards, {transcript.request.number} is another text")
        except ValueError as error:
            outcome.faults.append(f"afterwards, {transcript.request.number}: {error}")


def difference(answer: Answer, expected: Answer) -> str:
    """The first thing that differs."""
    for index, choice in expected.choices.items():
        got = answer.choices.get(index)
        if got is None:
            return f"choice {index} is missing"
        if got.text != choice.text:
            same = next(
                (i for i, (a, b) in enumerate(zip(got.text, choice.text, strict=False)) if a != b),
                min(len(got.text), len(choice.text)),
            )
            around = slice(max(0, same - 20), same + 20)
            there, wanted = got.text[around], choice.text[around]
            return f"choice {index} differs from character {same} on: {there!r} for {wanted!r}"
        if got != choice:
            return f"choice {index} has the same text, but not the same {_other_field(got, choice)}"
    return (
        f"usage {answer.prompt_tokens}+{answer.completion_tokens} "
        f"for {expected.prompt_tokens}+{expected.completion_tokens}"
    )


def _other_field(got: object, wanted: object) -> str:
    names = vars(wanted)
    return next(
        f"{name}: {getattr(got, name)!r:.80} for {names[name]!r:.80}"
        for name in names
        if getattr(got, name) != names[name]
    )
