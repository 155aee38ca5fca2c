"""Keeps the cached prefixes of tenants apart: the time of an answer tells nothing of what others sent."""

from __future__ import annotations


def cache_salt(tenant: str, given: str) -> str:
    """What joins a prompt's block hashes. given: the request's own, which divides a tenant's cache further.

    Without keys there are no tenants, and the request's own is all. No two pairs give the same.
    """
    return f"{tenant}\0{given}" if tenant else given
