"""The offline API: a model in this very process, no server.

    from decodefleet.worker.llm import LLM, SamplingParams
    LLM("smollm2-135m").generate(["The capital of France is"], SamplingParams(max_tokens=8))

Drives the same engine as a worker does; knows nothing of sockets.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.progress import Progress as ProgressBar

from .assets.resolve import resolve_model
from .config import BatchConfig, CacheConfig, EngineConfig, Frozen, ModelConfig, RunnerConfig
from .engine import Engine
from .kv.hashing import pack_tokens
from .protocol import Submit, Tier, TokenDelta, TokenLogprobs
from .sampling_params import InvalidRequest, SamplingParams
from .text.stream import TextStream
from .text.tokenizer import Tokenizer

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@dataclass
class CompletionOutput:
    """One generated sequence. stop_reason: the stop string or stop token that ended it, if one did.

    logprobs: one per token, where asked for. finish_reason: "stop", "length" or "error"; error says why.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None


@dataclass
class RequestOutput:
    """A prompt and what became of it. cached_tokens: prompt tokens that the prefix cache supplied.

    prompt_logprobs: one per prompt token but the first, where asked for.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None


class LLM:
    """A loaded model. options: any field of the worker's configuration (`max_model_len=…`, `dtype=…`).

    Raises ModelError where the model cannot be had or does not fit, TypeError for an unknown option.
    """

    def __init__(self, model: str, **options: Any) -> None:
        resolved = resolve_model(model)
        self.tokenizer = Tokenizer.from_folder(resolved.folder)
        options.setdefault("served_name", resolved.served_name)
        # the caller waits anyway
        options.setdefault("max_waiting", sys.maxsize)
        self._engine = Engine(_engine_config(options, folder=resolved.folder), _NoSink(), lambda *_: None)
        self._requests = 0

    @property
    def engine(self) -> Engine:
        return self._engine

    def close(self) -> None:
        """Give back what is outside of this process: other ranks, tiers. Its end gives them back as well."""
        self._engine.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Complete each prompt (text or token ids); one SamplingParams for all, or one each.

        Raises InvalidRequest naming the field of the first request that cannot be served; nothing runs then.
        """
        jobs = self._jobs(_as_list(prompts), params)
        with ProgressBar(disable=not progress) as bar:
            task = bar.add_task("generating", total=sum(job.params.n for job in jobs.values()))
            for job, delta in self._run(jobs):
                job.take(delta)
                if job.output.outputs[delta.index].finish_reason is not None:
                    bar.advance(task)
        return [job.output for job in jobs.values()]

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        progress: bool = True,
    ) -> RequestOutput:
        """Answer one conversation."""
        return self.generate(self._chat_prompt(messages), params, progress=progress)[0]

    def stream(
        self, prompt: str, params: SamplingParams | None = None, *, chat: bool = False
    ) -> Iterator[str]:
        """The text of one completion, or of one answer, piece by piece as it is final."""
        tokens = self._chat_prompt([{"role": "user", "content": prompt}]) if chat else prompt
        for job, delta in self._run(self._jobs([tokens], params)):
            text = job.take(delta)
            if text:
                yield text

    def _chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        rendered = self.tokenizer.apply_chat_template(messages)
        return self.tokenizer.encode(rendered, add_special_tokens=False)

    def _jobs(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> dict[str, _Job]:
        """Submitted requests by id; all or none."""
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(prompts)
        jobs: dict[str, _Job] = {}
        try:
            for prompt, own in zip(prompts, each, strict=True):
                job = _Job(self.tokenizer, prompt, own)
                self._requests += 1
                request_id = f"offline-{self._requests}"
                self._engine.submit(job.submit(request_id))
                jobs[request_id] = job
        except Exception:
            self._abort(jobs)
            raise
        return jobs

    def _run(self, jobs: dict[str, _Job]) -> Iterator[tuple[_Job, TokenDelta]]:
        """Deltas as they come. What is unfinished when the caller stops is aborted."""
        left = sum(job.params.n for job in jobs.values())
        try:
            # the engine may go on to save blocks, which nobody here waits for
            while left and self._engine.has_work():
                for delta in self._engine.step():
                    job = jobs.get(delta.request_id)
                    if job is None:
                        continue
                    left -= delta.finish_reason is not None
                    yield job, delta
                    if job.stopped(delta.index) and delta.finish_reason is None:
                        left -= 1
                        self._engine.abort(delta.request_id, 0, delta.index)
        finally:
            self._abort(jobs)

    def _abort(self, jobs: dict[str, _Job]) -> None:
        for request_id in jobs:
            self._engine.abort(request_id, 0)


class _Job:
    """One request's way from tokens to text."""

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, params: SamplingParams) -> None:
        self.params = params
        tokens = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        try:
            self._packed = pack_tokens(tokens)
        except OverflowError:
            raise InvalidRequest("prompt", "token ids must lie between 0 and the vocabulary's size") from None
        self._streams = [TextStream(tokenizer, params, prompt=tokens) for _ in range(params.n)]
        self.output = RequestOutput(
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=tokens,
            outputs=[
                CompletionOutput(index, logprobs=None if params.logprobs is None else [])
                for index in range(params.n)
            ],
        )

    def submit(self, request_id: str) -> Submit:
        return Submit(request_id=request_id, incarnation="", epoch=0, prompt=self._packed, params=self.params)

    def take(self, delta: TokenDelta) -> str:
        """Record a delta; returns the text that became final."""
        output = self.output.outputs[delta.index]
        if delta.index == 0 and delta.cached_tokens is not None:
            self.output.cached_tokens = delta.cached_tokens
        if delta.prompt_logprobs is not None:
            self.output.prompt_logprobs = list(delta.prompt_logprobs)
        output.token_ids += delta.tokens
        if output.logprobs is not None:
            output.logprobs += delta.logprobs or ()
        text = self._streams[delta.index].push(
            delta.tokens, finished=delta.finish_reason is not None, stop_token=delta.stop_token
        )
        output.text += text.text
        output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_token
        output.error = delta.error
        if text.stop_match is not None:
            output.finish_reason, output.stop_reason = "stop", text.stop_match
        return text.text

    def stopped(self, index: int) -> bool:
        return isinstance(self.output.outputs[index].stop_reason, str)


class _NoSink:
    """Nobody asks which blocks an offline engine holds."""

    def kv_stored(self, hashes: list[bytes], tier: Tier = "gpu") -> None:
        pass

    def kv_removed(self, hashes: list[bytes], tier: Tier = "gpu") -> None:
        pass

    def kv_cleared(self) -> None:
        pass


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _engine_config(options: dict[str, Any], folder: os.PathLike[str]) -> EngineConfig:
    """Flat options, each to the part of the configuration that has it."""
    options = {**options, "folder": folder}
    parts: dict[str, type[Frozen]] = {
        "model": ModelConfig,
        "cache": CacheConfig,
        "batch": BatchConfig,
        "runner": RunnerConfig,
    }
    built = {
        name: part(**{key: options.pop(key) for key in list(options) if key in part.model_fields})
        for name, part in parts.items()
    }
    if options:
        known = sorted(key for part in parts.values() for key in part.model_fields if key != "folder")
        raise TypeError(f"unknown option {', '.join(options)}; there are: {', '.join(known)}")
    return EngineConfig(**built)
