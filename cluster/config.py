"""What `decodefleet serve` can be told, and the only reader of environment variables and YAML.

`ServeConfig` is frozen and complete; the engine's own parts are taken over from `worker.config`, never
repeated. On the command line, in the environment and in a file all options are flat: `options()` maps each
name to its place, and is what the command line and the documentation are generated from.
Precedence: flag, then `DECODEFLEET_*`, then file, then default. Starts nothing and knows no Ray.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from decodefleet.worker.config import (
    BatchConfig,
    CacheConfig,
    EngineConfig,
    FakeConfig,
    Frozen,
    ModelConfig,
    ModelOptions,
    RunnerConfig,
)
from decodefleet.worker.logs import LogFormat

from .access.keyring import Keyring, UnusableKeys
from .addresses import is_loopback, local_url
from .autoscaling.config import ScalingOptions
from .scheduling.config import MAX_QUEUE, PolicyName
from .tls import TlsOptions, UnusableCertificate

ENV_PREFIX = "DECODEFLEET_"

Origin = Literal["flag", "env", "file", "default"]
LogLevel = Literal["debug", "info", "warning", "error"]


class ConfigError(ValueError):
    """Configuration that cannot be used; the message names each wrong option and where it was set."""


def _option(default: Any, panel: str, description: str, **extra: Any) -> Any:
    """`hidden`: not in help. `env_only`: not by flag or file. `env`: name of its variable."""
    constraints = {key: extra.pop(key) for key in ("ge", "gt", "le", "min_length") if key in extra}
    return Field(default, description=description, json_schema_extra={"panel": panel, **extra}, **constraints)


class ServeConfig(Frozen):
    """A whole server: its front, its control plane, and the workers behind it."""

    model: str = _option(
        "smollm2-135m", "Model", "built-in name, Hugging Face folder, .gguf file, or hub id", min_length=1
    )
    served_model_name: str | None = _option(
        None, "Model", "name by which requests ask for the model; the model's own if not given"
    )
    revision: str | None = _option(None, "Model", "branch, tag or commit of a hub model")
    cache_dir: Path | None = _option(
        None, "Model", "folder of models; ~/.cache/decodefleet if not given", env="DECODEFLEET_CACHE"
    )

    host: str = _option("127.0.0.1", "Server", "address that the HTTP server listens on")
    port: int = _option(8000, "Server", "port that the HTTP server listens on", ge=1, le=65535)
    api_key: tuple[SecretStr, ...] = _option(
        (), "Server", "key that clients must present; several are allowed (in the environment: by commas)"
    )
    api_key_file: Path | None = _option(
        None, "Server", "API keys made by `decodefleet keys`, or one per line; read again when it changes"
    )
    allowed_origins: tuple[str, ...] = _option(
        (), "Server", "origin whose pages may call the API from a browser; several are allowed, * is all"
    )
    max_body_bytes: int = _option(16 << 20, "Server", "largest request body in bytes", ge=1024)
    log_level: LogLevel = _option("info", "Server", "least severe message that is logged")

    log_format: LogFormat = _option("text", "Observability", "json writes each line as one JSON object")
    access_log: bool = _option(True, "Observability", "log one line per request, with its tokens and times")
    otlp_traces_endpoint: str | None = _option(
        None, "Observability", "where traces go, as OTLP over HTTP, e.g. http://127.0.0.1:4318/v1/traces"
    )
    metrics_port: int | None = _option(
        None,
        "Observability",
        "first port for metrics of each process by itself; the fleet's are at /metrics in any case",
        ge=1,
        le=65535,
    )

    workers: int = _option(1, "Cluster", "number of model replicas", ge=1, le=1024)
    routers: int = _option(1, "Cluster", "number of routers, which answer HTTP and tokenize", ge=1, le=256)
    policy: PolicyName = _option(
        "cost",
        "Cluster",
        "how a worker is picked: by predicted time, in turn, or by load or cached prefix alone",
    )
    max_queue: int = _option(
        MAX_QUEUE, "Cluster", "requests that may wait for a worker before 429 is sent", ge=0
    )
    max_queue_wait_s: float = _option(
        30.0, "Cluster", "predicted wait for a worker beyond which 429 is sent at once", gt=0
    )
    drain_s: float = _option(
        30.0, "Cluster", "seconds that running requests may take to finish when a worker stops", ge=0, le=3600
    )
    redis_url: SecretStr | None = _option(
        None,
        "Cluster",
        "prefix directory: redis://, rediss://, unix:// or redis+sentinel://; a private one if not given",
    )
    address: str | None = _option(
        None, "Cluster", "Ray cluster to run on, of several machines; a private local one if not given"
    )
    data_host: str | None = _option(
        None,
        "Cluster",
        "address by which the parts meet; if not given loopback, or with --address each machine's own",
    )
    advertise_host: str | None = _option(
        None, "Cluster", "address told to the other parts instead of data_host, where a forwarder is between"
    )
    cluster_secret: SecretStr | None = _option(
        None, "Cluster", "encrypts and authenticates the traffic inside the cluster", env_only=True
    )

    fake: bool = _option(False, "Testing", "pretended workers that compute nothing", hidden=True)

    tls: TlsOptions = TlsOptions()
    weights: ModelOptions = ModelOptions()
    cache: CacheConfig = CacheConfig()
    batch: BatchConfig = BatchConfig()
    runner: RunnerConfig = RunnerConfig()
    scaling: ScalingOptions = ScalingOptions()
    fake_engine: FakeConfig = FakeConfig()

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _has_scheme(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ValueError("must be an http:// or https:// address; OTLP over gRPC is not spoken")
        return endpoint

    @model_validator(mode="after")
    def _several_machines(self) -> Self:
        if self.address is None and (self.data_host is None or is_loopback(self.data_host)):
            return self
        setting = "address" if self.address is not None else "data_host"
        if self.cluster_secret is None:
            raise ValueError(f"{setting} spans machines: set {ENV_PREFIX}CLUSTER_SECRET on all of them")
        if self.redis_url is None:
            raise ValueError(f"{setting} spans machines: the private Redis does not, set redis_url")
        if self.address is not None and self.tls.enabled:
            raise ValueError("ssl_certfile: a cluster's proxies are its own, end TLS before them")
        return self

    def engine_config(self, folder: Path, served_name: str) -> EngineConfig:
        """The engine's part, for a model that has been resolved to a local folder."""
        model = ModelConfig(folder=folder, served_name=served_name, **self.weights.model_dump())
        return EngineConfig(model=model, cache=self.cache, batch=self.batch, runner=self.runner)

    @property
    def first_workers(self) -> int:
        """With which the server begins."""
        return self.workers if self.scaling.max_workers is None else max(1, self.scaling.min_workers)

    @property
    def most_workers(self) -> int:
        return self.scaling.max_workers or self.workers

    def api_keys(self) -> tuple[str, ...]:
        """Those given by themselves, which may do everything; a file may hold more."""
        return tuple(key.get_secret_value() for key in self.api_key)

    @property
    def url(self) -> str:
        """Where clients on this machine reach the server."""
        return local_url(self.host, self.port, tls=self.tls.enabled)

    def secret(self) -> str | None:
        return self.cluster_secret.get_secret_value() if self.cluster_secret else None


@dataclass(frozen=True)
class Option:
    """One setting: its flat name, where it lives in `ServeConfig`, and what help says of it."""

    name: str
    path: tuple[str, ...]
    annotation: Any
    default: Any
    description: str
    panel: str
    env: str
    hidden: bool = False
    env_only: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


@dataclass(frozen=True)
class _Group:
    panel: str
    prefix: str = ""
    hidden: bool = False


_GROUPS = {
    "tls": _Group("Server"),
    "weights": _Group("Model"),
    "cache": _Group("KV cache"),
    "batch": _Group("Batching"),
    "runner": _Group("Compute"),
    "scaling": _Group("Autoscaling"),
    "fake_engine": _Group("Testing", prefix="fake_", hidden=True),
}


def options() -> dict[str, Option]:
    """Every option by its flat name, in the order in which help shows them."""
    return {option.name: option for option in _options()}


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration and, by flat option name, where each value came from."""

    config: ServeConfig
    origins: dict[str, Origin]

    def rows(self) -> list[tuple[str, str, Origin]]:
        """(name, value as text, origin) of every visible option; secrets are masked."""
        return [
            (option.name, _shown(self.config, option.path), self.origins[option.name])
            for option in _options()
            if not option.hidden or self.origins[option.name] != "default"
        ]


def load_config(
    cli: Mapping[str, object] | None = None,
    file: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> LoadedConfig:
    """Merges flags, environment and file by flat option names; a flag that is None was not given.

    Raises ConfigError that names every unknown key (with the nearest known one) and every bad value.
    """
    known = options()
    layers: dict[Origin, dict[str, Any]] = {
        "flag": _from_flags(cli or {}, known),
        "env": _from_environment(env or {}, known),
        "file": _from_file(file, known) if file is not None else {},
    }
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = dict.fromkeys(known, "default")
    for origin, layer in reversed(layers.items()):
        values |= layer
        origins |= dict.fromkeys(layer, origin)
    config = _build(values, origins, known)
    if config.address is None:
        # elsewhere the file lies where the routers are
        _check_files(config)
    return LoadedConfig(config, origins)


def _options() -> Iterator[Option]:
    for name, field in ServeConfig.model_fields.items():
        group = _GROUPS.get(name)
        if group is None:
            yield _describe(name, (name,), field, field.json_schema_extra)
            continue
        members: dict[str, FieldInfo] = field.annotation.model_fields  # type: ignore[union-attr]
        for member, part in members.items():
            extra = {"panel": group.panel, "hidden": group.hidden}
            yield _describe(group.prefix + member, (name, member), part, extra)


def _describe(name: str, path: tuple[str, ...], field: FieldInfo, extra: Any) -> Option:
    return Option(
        name=name,
        path=path,
        annotation=field.annotation,
        default=field.default,
        description=field.description or "",
        panel=extra["panel"],
        env=extra.get("env", ENV_PREFIX + name.upper()),
        hidden=extra.get("hidden", False),
        env_only=extra.get("env_only", False),
    )


def _from_flags(cli: Mapping[str, object], known: Mapping[str, Option]) -> dict[str, Any]:
    given = {name: value for name, value in cli.items() if value is not None}
    _refuse_unknown(given, [name for name, option in known.items() if not option.env_only], "option")
    return given


def _from_environment(env: Mapping[str, str], known: Mapping[str, Option]) -> dict[str, Any]:
    by_variable = {option.env: option for option in known.values()}
    given = {key: value for key, value in env.items() if key.startswith(ENV_PREFIX) and value != ""}
    _refuse_unknown(given, by_variable, "environment variable")
    values: dict[str, Any] = {}
    for key, text in given.items():
        option = by_variable[key]
        values[option.name] = _split(text) if isinstance(option.default, tuple) else text
    return values


def _from_file(file: Path, known: Mapping[str, Option]) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: expected `option: value` lines, found a {type(content).__name__}")
    values = {str(key).replace("-", "_"): value for key, value in content.items()}
    secret = [name for name in values if name in known and known[name].env_only]
    if secret:
        raise ConfigError(f"{file}: {secret[0]} may only be set by {known[secret[0]].env}")
    _refuse_unknown(values, known, "key", f" in {file}")
    for name, value in values.items():
        if isinstance(known[name].default, tuple) and isinstance(value, str):
            values[name] = (value,)
    return values


def _refuse_unknown(
    given: Mapping[str, object], allowed: Mapping[str, object] | list[str], what: str, where: str = ""
) -> None:
    lines = []
    for name in sorted(set(given) - set(allowed)):
        near = difflib.get_close_matches(name, list(allowed), n=1)
        lines.append(f"unknown {what} {name}{where}" + (f"; did you mean {near[0]}?" if near else ""))
    if lines:
        raise ConfigError("\n".join(lines))


def _build(
    values: Mapping[str, Any], origins: Mapping[str, Origin], known: Mapping[str, Option]
) -> ServeConfig:
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *parents, leaf = known[name].path
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[leaf] = value
    try:
        return ServeConfig.model_validate(tree)
    except ValidationError as error:
        by_path = {option.path: option for option in known.values()}
        lines = [_explain(detail, origins, by_path) for detail in error.errors(include_input=False)]
        # Without its cause: pydantic's own text would print the values, secrets among them.
        raise ConfigError("\n".join(lines)) from None


def _explain(detail: Any, origins: Mapping[str, Origin], by_path: Mapping[tuple[str, ...], Option]) -> str:
    message = detail["msg"].removeprefix("Value error, ")
    location = tuple(str(part) for part in detail["loc"])
    for length in range(len(location), 0, -1):
        option = by_path.get(location[:length])
        if option is not None:
            source = {"env": f" (from {option.env})", "file": " (from the file)"}
            return f"{option.name}: {message}{source.get(origins[option.name], '')}"
    return str(message)


def _shown(config: ServeConfig, path: tuple[str, ...]) -> str:
    value: Any = config
    for part in path:
        value = getattr(value, part)
    if isinstance(value, tuple):
        return ", ".join(str(item) for item in value)
    return "" if value is None else str(value)


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _check_files(config: ServeConfig) -> None:
    try:
        Keyring(config.api_keys(), config.api_key_file)
    except UnusableKeys as error:
        raise ConfigError(f"api_key_file: {error}") from error
    try:
        config.tls.pem()
    except UnusableCertificate as error:
        raise ConfigError(f"ssl_certfile: {error}") from error
