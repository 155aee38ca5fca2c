"""From a Submit to a Request: checked against the model, so that the engine loop meets nothing invalid.

Raises InvalidRequest naming the field. Keeps nothing.
"""

from __future__ import annotations

import secrets

from decodefleet.kernels.ops import child_seed

from .kv.hashing import extend_chain, request_root, split_hashes, unpack_tokens
from .protocol import ModelCard, Submit
from .sampling_params import InvalidRequest, SamplingParams
from .sequence import Request, Sequence


def admit(submit: Submit, card: ModelCard, arrival: int) -> Request:
    """The request with its sequences, of which all but the first wait to be forked unless they resume."""
    prompt = _prompt(submit, card)
    params = submit.params
    _check_token_ids(params, card)
    room = card.max_model_len - len(prompt)
    max_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
    _check_resume(submit, card, max_tokens)
    root = request_root(card.hash_root, cache_salt=submit.cache_salt)
    request = Request(
        request_id=submit.request_id,
        attempt=submit.attempt,
        params=params,
        prompt=prompt,
        root_hash=root,
        max_tokens=max_tokens,
        end_tokens=frozenset(params.stop_token_ids) | (set() if params.ignore_eos else {*card.eos_token_ids}),
        order=(submit.priority, arrival),
    )
    _add_sequences(request, submit, _prompt_hashes(submit, card, prompt, root), card.block_size)
    return request


def _prompt(submit: Submit, card: ModelCard) -> list[int]:
    prompt = unpack_tokens(submit.prompt)
    if not prompt:
        raise InvalidRequest("prompt", "must have at least one token")
    if max(prompt) >= card.vocab_size:
        raise InvalidRequest("prompt", f"token ids must be below {card.vocab_size}, not {max(prompt)}")
    limit = card.max_model_len - (submit.params.max_tokens != 0)
    if len(prompt) > limit:
        raise InvalidRequest(
            "prompt", f"has {len(prompt)} tokens; with room for an answer at most {limit} fit"
        )
    return prompt


def _check_token_ids(params: SamplingParams, card: ModelCard) -> None:
    for field, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        for token in ids:
            if token >= card.vocab_size:
                raise InvalidRequest(field, f"token ids must be below {card.vocab_size}, not {token}")


def _prompt_hashes(submit: Submit, card: ModelCard, prompt: list[int], root: bytes) -> list[bytes]:
    """Those the router sent, unless they were made for another model form."""
    hashes = split_hashes(submit.block_hashes)
    if submit.hash_root == card.hash_root and len(hashes) == len(prompt) // card.block_size:
        return hashes
    return extend_chain(root, prompt, card.block_size)


def _add_sequences(request: Request, submit: Submit, hashes: list[bytes], block_size: int) -> None:
    seed = submit.params.seed if submit.params.seed is not None else secrets.randbits(64)
    for index in submit.live:
        tokens = [*request.prompt, *(submit.resume[index] if submit.resume else ())]
        request.live.append(
            Sequence(
                request=request,
                index=index,
                seed=child_seed(seed, index),
                tokens=tokens,
                hashes=_known_hashes(request, hashes, tokens, block_size),
            )
        )
    request.unborn = [] if submit.resume else request.live[1:]


def _known_hashes(request: Request, hashes: list[bytes], tokens: list[int], block_size: int) -> list[bytes]:
    """Of all full blocks: what an earlier attempt generated may be cached as well."""
    parent = hashes[-1] if hashes else request.root_hash
    return [*hashes, *extend_chain(parent, tokens[len(hashes) * block_size :], block_size)]


def _check_resume(submit: Submit, card: ModelCard, max_tokens: int) -> None:
    n, resume = submit.params.n, submit.resume
    if resume and len(resume) != n:
        raise InvalidRequest("resume", f"has {len(resume)} sequences for n={n}")
    if not submit.live:
        raise InvalidRequest("ended", f"leaves nothing to generate of n={n}")
    for index in submit.live if resume else ():
        if max(resume[index], default=0) >= card.vocab_size:
            raise InvalidRequest("resume", f"token ids must be below {card.vocab_size}")
        if len(resume[index]) >= max(max_tokens, 1):
            raise InvalidRequest(
                "resume", f"{len(resume[index])} tokens leave none of {max_tokens} to generate"
            )
