"""Labels that callers choose, kept few: what a label can be bounds the memory of every Prometheus."""

from __future__ import annotations

OTHER = "other"


class TenantLabels:
    """The first `limit` tenants have labels of their own, all later ones share one; so do the nameless."""

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def label(self, tenant: str) -> str:
        if not tenant:
            return "none"
        if tenant not in self._known:
            if len(self._known) >= self._limit:
                return OTHER
            self._known.add(tenant)
        return tenant
