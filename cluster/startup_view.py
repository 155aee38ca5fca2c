"""What `decodefleet serve` shows while workers start, and once they are ready. Text only."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from decodefleet.worker.protocol import Failed, Loading, Ready
from decodefleet.worker.text.tokenizer import has_chat_template

from .config import ServeConfig
from .terminal import Bars


class WorkersView(Bars):
    """One bar per worker until all are ready; later news is one line each."""

    def __init__(self, console: Console, workers: int) -> None:
        progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            # else log handlers that are made meanwhile would write to the console ever after
            redirect_stdout=False,
            redirect_stderr=False,
        )
        super().__init__(progress)
        self._console = console
        self._workers = workers
        self._began = time.monotonic()
        self._ready: dict[str, Ready] = {}
        self._bars: dict[str, TaskID] = {}
        self._stage = progress.add_task("starting", total=None)

    @property
    def complete(self) -> bool:
        return len(self._ready) >= self._workers

    def stage(self, text: str) -> None:
        self._progress.update(self._stage, description=text)

    def show(self, worker_id: str, news: Loading | Ready | Failed) -> None:
        match news:
            case Loading(stage=stage, fraction=fraction):
                if worker_id not in self._bars:
                    self._bars[worker_id] = self._progress.add_task("", total=1.0)
                self._progress.update(
                    self._bars[worker_id], description=f"{worker_id}: {stage}", completed=fraction
                )
            case Ready():
                self._finish(worker_id)
                self._line(f"{worker_id} is ready: {_size(news)}{self._again(worker_id)}")
                self._ready[worker_id] = news
            case Failed(message=message):
                self._finish(worker_id)
                self._line(f"{worker_id} failed: {message}")

    def _finish(self, worker_id: str) -> None:
        bar = self._bars.pop(worker_id, None)
        if bar is not None:
            self._progress.remove_task(bar)

    def _again(self, worker_id: str) -> str:
        if worker_id in self._ready:
            return ", after a restart"
        return f", after {time.monotonic() - self._began:.1f} s"

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_ready(console: Console, config: ServeConfig) -> None:
    """The address, and a request to try."""
    folder = Path(config.model)
    if not folder.is_dir() or has_chat_template(folder):
        path = "chat/completions"
        asked: dict[str, object] = {
            "messages": [{"role": "user", "content": "What is the capital of France?"}]
        }
    else:
        path, asked = "completions", {"prompt": "The capital of France is"}
    body = {"model": config.served_model_name or config.model, **asked, "stream": True}
    # a certificate names the machine as others know it, this address is the machine's own
    insecure = ["--insecure"] if config.tls.enabled else []
    words = ["curl", "-N", *insecure, f"{config.url}/v1/{path}", "-H", "Content-Type: application/json"]
    if config.api_key or config.api_key_file:
        words += ["-H", "Authorization: Bearer KEY"]
    words += ["-d", msgspec.json.encode(body).decode()]
    console.print(f"\n[bold green]ready[/] at [bold]{config.url}[/] (OpenAI API: {config.url}/v1)\n")
    console.print(shlex.join(words), markup=False, highlight=False, soft_wrap=True)
    console.print()


def _size(ready: Ready) -> str:
    groups = ready.card.group_blocks
    tokens = ready.total_blocks * ready.card.block_size // len(groups)
    kv_mib = tokens * ready.card.kv_bytes_per_token / (1 << 20)
    # a window needs less than its share of the blocks, so the other layers have more
    at_least = "at least " if any(groups) else ""
    return f"KV cache of {ready.total_blocks} blocks, {at_least}{tokens} tokens, {kv_mib:.0f} MiB"
