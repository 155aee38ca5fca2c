"""Secrets that the chart makes: strong, hashed where that is enough, and the same after an upgrade.

An upgrade reads what the cluster holds, so a small API server stands in for one, and helm asks it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml
from helm_chart import Manifest, of_kind, render, template

from decodefleet.cluster.access.keys import Grant, digest_of, parse_file


def by_name(manifests: list[Manifest]) -> dict[str, dict[str, str]]:
    return {found["metadata"]["name"]: found["data"] for found in of_kind(manifests, "Secret")}


def decoded(value: str) -> str:
    return base64.b64decode(value).decode()


def discovery(manifests: list[Manifest]) -> dict[str, Any]:
    """What an API server says of itself that knows the kinds of these manifests: answers by path."""
    resources: dict[str, dict[str, Any]] = {}
    for found in manifests:
        kind = found["kind"]
        name = kind.lower().removesuffix("y") + ("ies" if kind.endswith("y") else "s")
        about = {
            "name": name,
            "singularName": "",
            "namespaced": True,
            "kind": kind,
            "verbs": ["get", "create"],
        }
        resources.setdefault(found["apiVersion"], {})[kind] = about
    groups: list[dict[str, Any]] = []
    answers: dict[str, Any] = {
        "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
    }
    for version, kinds in resources.items():
        group, _, number = version.rpartition("/")
        path = f"/apis/{version}" if group else f"/api/{version}"
        listed = {"kind": "APIResourceList", "groupVersion": version, "resources": list(kinds.values())}
        answers[path] = listed
        if group:
            groups.append({"name": group, "versions": [{"groupVersion": version, "version": number}]})
    return answers


@contextmanager
def api_server(known: list[Manifest], objects: list[Manifest]) -> Iterator[str]:
    """URL of as much of Kubernetes as `helm template --dry-run=server` asks: discovery, and secrets."""
    secrets = {found["metadata"]["name"]: found for found in of_kind(objects, "Secret")}
    for secret in secrets.values():
        # helm writes them when it installs
        owner = {"meta.helm.sh/release-name": "fleet", "meta.helm.sh/release-namespace": "serving"}
        secret["metadata"]["annotations"] |= owner
    answers = discovery(known)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            found = answers.get(path) or ("/secrets/" in path and secrets.get(path.rpartition("/")[2]))
            missing = {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}
            body = json.dumps(found or missing).encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def upgraded(objects: list[Manifest], folder: Path) -> list[Manifest]:
    """What the chart renders where the cluster holds `objects` already."""
    with api_server(render(), objects) as url:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "serving"}}],
            "current-context": "x",
        }
        (folder / "config").write_text(yaml.safe_dump(config))
        env = {"KUBECONFIG": str(folder / "config"), "HOME": str(folder)}
        done = template(options=("--dry-run=server", "--disable-openapi-validation"), env=env)
    assert done.returncode == 0, done.stderr
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]


def test_an_upgrade_keeps_what_was_generated(tmp_path: Path) -> None:
    first = render()
    assert by_name(upgraded(first, tmp_path)) == by_name(first)


def test_without_them_new_ones_are_made(tmp_path: Path) -> None:
    first, second = by_name(render()), by_name(upgraded([], tmp_path))
    assert set(first) == set(second)
    for name, data in first.items():
        assert not set(data.values()) & set(second[name].values())


def test_a_first_key_that_was_deleted_stays_deleted(tmp_path: Path) -> None:
    first = render()
    (keys,) = (found for found in of_kind(first, "Secret") if "keys" in found["data"])
    del keys["data"]["api-key"]
    assert by_name(upgraded(first, tmp_path)) == by_name(first)


def test_routers_read_hashes_only() -> None:
    data = by_name(render())["fleet-decodefleet-api-keys"]
    key, admin = decoded(data["api-key"]), decoded(data["admin-key"])
    assert len(key) >= 43
    assert decoded(data["keys"]).splitlines() == [
        f"sha256:{hashlib.sha256(key.encode()).hexdigest()} tenant=default",
        f"sha256:{hashlib.sha256(admin.encode()).hexdigest()} tenant=admin admin",
    ]


def test_routers_understand_what_they_read() -> None:
    data = by_name(render())["fleet-decodefleet-api-keys"]
    grants = parse_file(decoded(data["keys"]))
    assert grants[digest_of(decoded(data["api-key"]))] == Grant(tenant="default")
    assert grants[digest_of(decoded(data["admin-key"]))] == Grant(tenant="admin", admin=True)


def test_given_secrets_are_used_and_none_is_made() -> None:
    given = {"secrets": {"existingSecret": "mine"}, "apiKeys": {"existingSecret": "my-keys"}}
    manifests = render(given)
    assert of_kind(manifests, "Secret") == []
    assert "fleet-decodefleet-api-keys" not in str(manifests)
