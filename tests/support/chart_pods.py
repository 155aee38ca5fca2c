"""The chart's pods on this machine, each in namespaces of its own: address, processes, /tmp.

What KubeRay would do is done here: `ray start` with the chart's environment, labels and CPUs, and the Serve
configuration put to the head. A bridge connects the pods with each other and with the test. Needs root.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
from dockerfile import image_environment
from helm_chart import Manifest, one, pods, serve_config
from served import command_line
from waiting import until

from decodefleet.cluster import http_proxy
from decodefleet.cluster.processes import die_with_parent

NETWORK = "10.201.77"
GCS_PORT, DASHBOARD_PORT, SERVE_PORT = 6379, 8265, 8000
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
COMMAND = [sys.executable, "-c", "from decodefleet.cluster.cli import main; main()"]
PASSWORD = "sesame"
# as KubeRay tells pods other than the head where the head's state survives it
RECONNECT_S = 600


def missing() -> str | None:
    """What this machine lacks for it."""
    if os.geteuid() != 0:
        return "needs root, for namespaces"
    if absent := [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]:
        return f"needs {', '.join(absent)}"
    return None


@contextlib.contextmanager
def network() -> Iterator[str]:
    """A bridge, and our own address on it."""
    name = f"df{secrets.token_hex(4)}"
    run("ip", "link", "add", name, "type", "bridge")
    try:
        run("ip", "addr", "add", f"{NETWORK}.1/24", "dev", name)
        run("ip", "link", "set", name, "up")
        yield name
    finally:
        run("ip", "link", "delete", name)


def run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


class Pod:
    """One that runs `command` until it is killed."""

    def __init__(
        self, bridge: str, ip: str, command: Sequence[str], env: Mapping[str, str], log: Path
    ) -> None:
        self.ip, self.env = ip, dict(env)
        self._namespace = f"df{secrets.token_hex(4)}"
        near = f"v{secrets.token_hex(4)}"
        run("ip", "netns", "add", self._namespace)
        run("ip", "link", "add", near, "type", "veth", "peer", "name", "eth0", "netns", self._namespace)
        run("ip", "link", "set", near, "master", bridge, "up")
        for words in (("addr", "add", f"{ip}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
            run("ip", "-n", self._namespace, *words)
        run("ip", "-n", self._namespace, "link", "set", "lo", "up")
        inside = 'mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm && exec "$@"'
        unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]
        parent = os.getpid()
        with log.open("a") as output:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", self._namespace, *unshare, "sh", "-c", inside, "sh", *command],
                env=self.env,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                # or a test that is killed leaves its pods running
                preexec_fn=lambda: die_with_parent(parent),
            )

    def start_inside(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """As `kubectl exec` does."""
        (first,) = psutil.Process(self.process.pid).children()
        spaces = ["nsenter", "--target", str(first.pid), "--net", "--pid", "--mount"]
        return subprocess.Popen([*spaces, *words], env=self.env, text=True, **options)

    def named(self, words: str) -> list[psutil.Process]:
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in found if words in command_line(process)]

    def probe(self, probe: Manifest, ports: Mapping[str, int]) -> int | None:
        """The status of an answer to what a kubelet would ask; None without one in time."""
        asked = probe["httpGet"]
        port = ports.get(str(asked["port"]), asked["port"])
        try:
            url = f"http://{self.ip}:{port}{asked['path']}"
            return httpx.get(url, timeout=probe["timeoutSeconds"], trust_env=False).status_code
        except httpx.HTTPError:
            return None

    def kill(self) -> None:
        """All of it, at once."""
        self.process.kill()
        self.process.wait()
        # the pod may have ended before, and left its name
        subprocess.run(["ip", "netns", "delete", self._namespace], capture_output=True, check=False)


class ChartCluster:
    """The pods of a rendered chart, as many as it says. redis: host and port of its Redis."""

    def __init__(self, manifests: list[Manifest], bridge: str, folder: Path, redis: tuple[str, int]) -> None:
        self.manifests, self.templates = manifests, pods(manifests)
        self._bridge, self._folder, self._redis = bridge, folder, redis
        self._addresses = itertools.count(10)
        self._token = secrets.token_hex(32)
        self.head_ip = f"{NETWORK}.2"
        cluster = one(manifests, "RayService")["spec"]["rayClusterConfig"]
        self.groups: dict[str, Manifest] = {
            group["groupName"]: group for group in cluster["workerGroupSpecs"]
        }
        self._state_in_redis = "gcsFaultToleranceOptions" in cluster
        self._proxy = http_proxy.prepare(folder)
        self.pods: dict[str, list[Pod]] = {name: [] for name in self.groups}
        self.head: Pod | None = None

    def start(self) -> None:
        self.start_head()
        for name, group in self.groups.items():
            for _ in range(group["replicas"]):
                self.pods[name].append(self._start_member(name, f"{NETWORK}.{next(self._addresses)}"))

    def start_head(self) -> Pod:
        """The first one, or one in its place, at the same address."""
        if self.head is not None:
            self.head.kill()
        state = {
            "RAY_REDIS_ADDRESS": f"redis://{self._redis[0]}:{self._redis[1]}",
            "REDIS_PASSWORD": PASSWORD,
            "RAY_external_storage_namespace": "fleet",
        }
        own = state if self._state_in_redis else {}
        login = ["--redis-password", PASSWORD] if self._state_in_redis else []
        options = [*login, "--head", "--port", str(GCS_PORT), "--num-cpus", "0"]
        options += ["--dashboard-host", "0.0.0.0"]
        self.head = self._start("head", self.head_ip, options, own)
        return self.head

    def settled(self) -> bool:
        """Whether Serve says that all runs. Starts again what has ended, as a kubelet would."""
        if self.head is None or self.head.process.poll() is not None:
            self.start_head()
        for name, found in self.pods.items():
            for number, pod in enumerate(found):
                if pod.process.poll() is not None:
                    pod.kill()
                    found[number] = self._start_member(name, pod.ip)
        applications = self.applications().values()
        return bool(applications) and all(found["status"] == "RUNNING" for found in applications)

    def start_pod(self, name: str) -> Pod:
        """One more of a group; returns when Ray runs in it."""
        self.pods[name].append(self._start_member(name, f"{NETWORK}.{next(self._addresses)}"))
        found = self.pods[name]
        until(lambda: self.settled() and self.probe(name, found[-1], "livenessProbe") == 200, look_s=0.5)
        return found[-1]

    def _start_member(self, name: str, ip: str) -> Pod:
        group = self.groups[name]
        labels = ",".join(f"{key}={value}" for key, value in group["labels"].items())
        options = ["--address", f"{self.head_ip}:{GCS_PORT}", "--labels", labels]
        options += ["--num-cpus", group["rayStartParams"]["num-cpus"]]
        own = {"RAY_gcs_rpc_server_reconnect_timeout_s": str(RECONNECT_S)} if self._state_in_redis else {}
        return self._start(name, ip, options, own)

    def _start(self, name: str, ip: str, options: Sequence[str], own: Mapping[str, str]) -> Pod:
        # ports of the agent and of metrics are those that KubeRay gives
        fixed = ["--dashboard-agent-listen-port", "52365", "--metrics-export-port", "8080"]
        fixed += ["--node-ip-address", ip, "--object-store-memory", str(100 << 20), "--block"]
        env = self._environment(name) | own
        return Pod(
            self._bridge, ip, [*RAY, "start", *options, *fixed], env, self._folder / f"{name}-{ip}.log"
        )

    def _environment(self, name: str) -> dict[str, str]:
        """Of the image, of the chart, and what KubeRay and Secrets add; paths are those of this machine."""
        container = self.container(name)
        chart = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
        secret = {"DECODEFLEET_CLUSTER_SECRET": "s" * 48}
        if "DECODEFLEET_REDIS_URL" in chart:
            secret["DECODEFLEET_REDIS_URL"] = f"redis://:{PASSWORD}@{self._redis[0]}:{self._redis[1]}/1"
        machine = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "RAY_SERVE_HAPROXY_BINARY_PATH": str(self._proxy),
            # models lie where they do on this machine
            "HOME": os.environ["HOME"],
            "DECODEFLEET_CACHE": "",
        }
        kuberay = {
            "RAY_ADDRESS": f"{self.head_ip}:{GCS_PORT}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._token,
        }
        return image_environment() | chart | secret | machine | kuberay

    def container(self, name: str) -> Manifest:
        found: Manifest = self.templates[name]["spec"]["containers"][0]
        return found

    def probe(self, name: str, pod: Pod, kind: str) -> int | None:
        container = self.container(name)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        return pod.probe(container[kind], ports)

    def ask_head(self, method: str, **options: Any) -> httpx.Response:
        """Serve's part of the dashboard, as KubeRay asks it. Raises httpx.HTTPError."""
        url = f"http://{self.head_ip}:{DASHBOARD_PORT}/api/serve/applications/"
        headers = {"x-ray-authorization": f"Bearer {self._token}"}
        return httpx.request(method, url, headers=headers, timeout=60, trust_env=False, **options)

    def deploy(self) -> None:
        """Puts the chart's Serve configuration."""
        config = serve_config(self.manifests)

        def put() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return self.ask_head("PUT", json=config).is_success
            return False

        until(put, look_s=0.5)

    def applications(self) -> dict[str, Any]:
        """What Serve says of them; empty while nobody answers."""
        with contextlib.suppress(httpx.HTTPError):
            answer = self.ask_head("GET")
            if answer.is_success:
                found: dict[str, Any] = answer.json()["applications"]
                return found
        return {}

    def stop(self) -> None:
        living = [pod for found in self.pods.values() for pod in found]
        for pod in [*living, *([self.head] if self.head else [])]:
            pod.kill()


def pre_stop(cluster: ChartCluster, name: str, pod: Pod) -> subprocess.Popen[str]:
    """Begins what Kubernetes runs before it ends a pod."""
    words = cluster.container(name)["lifecycle"]["preStop"]["exec"]["command"]
    return pod.start_inside(*COMMAND, *words[1:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
