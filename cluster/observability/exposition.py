"""Prometheus text: read it, add it up, write it. Knows no metric by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from prometheus_client.parser import text_string_to_metric_families

Labels = tuple[tuple[str, str], ...]

_SUMMABLE = ("counter", "histogram", "summary")


class Family:
    """One metric: samples by (name, labels), in the order in which they came."""

    def __init__(self, kind: str, documentation: str) -> None:
        self.kind = kind
        self.documentation = documentation
        self.samples: dict[tuple[str, Labels], float] = {}

    def add(self, name: str, labels: Labels, value: float) -> None:
        key = (name, labels)
        self.samples[key] = self.samples.get(key, 0.0) + value


class Exposition:
    """A set of families that can be added up. Names are as they stand in the text, `_total` included."""

    def __init__(self) -> None:
        self.families: dict[str, Family] = {}

    def family(self, name: str, kind: str, documentation: str) -> Family:
        return self.families.setdefault(name, Family(kind, documentation))

    def record(
        self,
        name: str,
        kind: str,
        documentation: str,
        value: float,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Add one value to a sample that is named like its family."""
        self.family(name, kind, documentation).add(name, tuple((labels or {}).items()), value)

    def add(self, other: Exposition, *, counters_only: bool = False) -> None:
        """Add another's samples; gauges only where the source still lives."""
        for name, theirs in other.families.items():
            if counters_only and theirs.kind not in _SUMMABLE:
                continue
            ours = self.family(name, theirs.kind, theirs.documentation)
            for (sample, labels), value in theirs.samples.items():
                ours.add(sample, labels, value)

    def render(self) -> str:
        return "".join(line for name, family in self.families.items() for line in _lines(name, family))


def parse(text: str) -> Exposition:
    """Raises ValueError where the text is not Prometheus text."""
    parsed = Exposition()
    for metric in text_string_to_metric_families(text):
        if metric.name.endswith("_created"):
            continue
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        family = parsed.family(name, metric.type, metric.documentation)
        for sample in metric.samples:
            if not math.isnan(sample.value):
                family.add(sample.name, tuple(sample.labels.items()), sample.value)
    return parsed


def _lines(name: str, family: Family) -> Iterable[str]:
    documentation = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
    yield f"# HELP {name} {documentation}\n"
    yield f"# TYPE {name} {family.kind}\n"
    for (sample, labels), value in family.samples.items():
        rendered = ",".join(f'{key}="{_escape(text)}"' for key, text in labels)
        yield f"{sample}{{{rendered}}} {_number(value)}\n" if rendered else f"{sample} {_number(value)}\n"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(value)
