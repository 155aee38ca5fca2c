"""Asks OSV for known vulnerabilities of the versions in constraints.txt; a part of `make lint`.

Exit status 0: none but those accepted here. 1: found one. Where no advisories can be had it says so loudly
and exits with 0, so that the checks run on machines without the internet; with --require, for releases, it
is 2 then. A service that knows nothing bad of `CANARY` has no advisories: mirrors call everything clean.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PINS = Path(__file__).with_name("constraints.txt")
OSV_URL = "https://api.osv.dev/v1/query"
# sandbox breakouts, known since 2024
CANARY = "jinja2==3.1.2"
TIMEOUT_S = 10
UNANSWERED = 2

# advisory (any of its names) -> why it does not harm us
ACCEPTED: Mapping[str, str] = {}


class NoAdvisories(RuntimeError):
    """Nobody could be asked; says why."""


@dataclass(frozen=True)
class Finding:
    package: str
    names: frozenset[str]
    fixed_in: tuple[str, ...]

    def __str__(self) -> str:
        fix = f"fixed in {', '.join(self.fixed_in)}" if self.fixed_in else "no fixed version"
        return f"{self.package}: {' = '.join(sorted(self.names))}; {fix}"


def main(arguments: Sequence[str], accepted: Mapping[str, str] = ACCEPTED) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--require", action="store_true", help="fail where no advisories can be had")
    parser.add_argument("--pins", type=Path, default=PINS, help="file of name==version lines")
    parser.add_argument("--osv-url", default=OSV_URL, help="a service that speaks OSV's API")
    options = parser.parse_args(arguments)
    try:
        found = _checked(options.pins, options.osv_url)
    except NoAdvisories as error:
        print(
            f"NOT AUDITED: {options.pins.name} was not checked for vulnerabilities: {error}", file=sys.stderr
        )
        return UNANSWERED if options.require else 0
    return _told(found, accepted)


def _checked(pins: Path, url: str) -> list[Finding]:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as canary:
        canary.write(CANARY + "\n")
        canary.flush()
        if not findings(_ask(Path(canary.name), url)):
            raise NoAdvisories(f"{url} knows nothing of {CANARY}, so it has no advisories")
    return findings(_ask(pins, url))


def _ask(pins: Path, url: str) -> Any:
    """pip-audit's report, which it writes only where all were answered; its exit status tells less."""
    options = ["--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off"]
    service = ["--vulnerability-service", "osv", "--osv-url", url, "--timeout", str(TIMEOUT_S)]
    ran = subprocess.run(
        [sys.executable, "-m", "pip_audit", "--requirement", str(pins), *options, *service],
        capture_output=True,
        text=True,
    )
    try:
        return json.loads(ran.stdout)
    except json.JSONDecodeError:
        lines = ran.stderr.strip().splitlines() or ["pip-audit said nothing"]
        raise NoAdvisories(lines[-1]) from None


def findings(report: Any) -> list[Finding]:
    """Raises NoAdvisories where a package was left out."""
    found = []
    for package in report["dependencies"]:
        if "skip_reason" in package:
            raise NoAdvisories(package["skip_reason"])
        for flaw in package["vulns"]:
            names = frozenset([flaw["id"], *flaw["aliases"]])
            name = f"{package['name']} {package['version']}"
            found.append(Finding(name, names, tuple(flaw["fix_versions"])))
    return found


def _told(found: Sequence[Finding], accepted: Mapping[str, str]) -> int:
    refused = [finding for finding in found if not finding.names & accepted.keys()]
    for finding in refused:
        print(f"VULNERABLE: {finding}", file=sys.stderr)
    for name in sorted(accepted.keys() - {name for finding in found for name in finding.names}):
        print(f"{name} is accepted in {Path(__file__).name}, but no longer there: remove it", file=sys.stderr)
    print(f"audited: {len(refused)} advisories, {len(found) - len(refused)} more accepted")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
