"""Configuration: precedence, unknown names, secrets, and that each option can be reached by each way."""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any, Literal

import pytest
from certificates import make_certificate
from pydantic import ValidationError

from decodefleet.cluster.config import ConfigError, Option, ServeConfig, load_config, options


def write(folder: Path, text: str) -> Path:
    file = folder / "serve.yaml"
    file.write_text(text)
    return file


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = write(tmp_path, "port: 1\nworkers: 2\nmax-num-seqs: 3\nmodel: from-file\n")
    env = {"DECODEFLEET_PORT": "10", "DECODEFLEET_WORKERS": "20", "PATH": "/bin"}
    loaded = load_config({"port": 100, "workers": None}, file, env)
    assert loaded.config.port == 100
    assert loaded.config.workers == 20
    assert loaded.config.batch.max_num_seqs == 3
    assert loaded.config.routers == 1
    expected = {"port": "flag", "workers": "env", "max_num_seqs": "file", "routers": "default"}
    assert {name: loaded.origins[name] for name in expected} == expected


def test_origins_and_rows_name_every_visible_option() -> None:
    loaded = load_config({"port": 1234})
    assert set(loaded.origins) == set(options())
    rows = {name: (value, origin) for name, value, origin in loaded.rows()}
    assert rows["port"] == ("1234", "flag")
    assert set(rows) == {name for name, option in options().items() if not option.hidden}


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        ({"cli": {"prot": 1}}, ["prot", "port"]),
        ({"env": {"DECODEFLEET_PROT": "1"}}, ["DECODEFLEET_PROT", "DECODEFLEET_PORT"]),
        ({"file": "max-num-seq: 1"}, ["max_num_seq", "max_num_seqs", "serve.yaml"]),
    ],
)
def test_unknown_names_are_errors_that_suggest_the_nearest(
    layer: dict[str, Any], names: list[str], tmp_path: Path
) -> None:
    if "file" in layer:
        layer = {"file": write(tmp_path, layer["file"])}
    with pytest.raises(ConfigError) as error:
        load_config(**layer)
    assert all(name in str(error.value) for name in names)


def test_all_wrong_values_are_named_with_their_source(tmp_path: Path) -> None:
    file = write(tmp_path, "gpu-memory-utilization: 2\n")
    with pytest.raises(ConfigError) as error:
        load_config({"block_size": 0}, file, {"DECODEFLEET_PORT": "eighty"})
    lines = str(error.value).splitlines()
    assert len(lines) == 3
    assert any("block_size" in line for line in lines)
    assert any("gpu_memory_utilization" in line and "file" in line for line in lines)
    assert any("port" in line and "DECODEFLEET_PORT" in line for line in lines)


@pytest.mark.parametrize("text", ["- a\n- b\n", "port: [", "just words"])
def test_a_file_that_is_no_mapping_is_an_error(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"serve\.yaml"):
        load_config({}, write(tmp_path, text))


def test_a_missing_file_is_an_error_and_an_empty_one_is_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_config({}, tmp_path / "absent.yaml")
    assert load_config({}, write(tmp_path, "# nothing\n")).config == ServeConfig()


def sample(option: Option, folder: Path) -> Any:
    """A value other than the default that this option takes."""
    keys = folder / "keys"
    keys.write_text("key")
    special: dict[str, Any] = {"api_key_file": str(keys), "api_key": "key", "gpu_memory_utilization": 0.5}
    special |= {"max_body_bytes": 4096, "host": "::", "otlp_traces_endpoint": "http://collector:4318"}
    special |= {"allowed_origins": "https://app.example"}
    special |= {name: str(folder / file) for name, file in TLS_FILES.items()}
    choices = [
        value for part in typing.get_args(option.annotation) for value in typing.get_args(part) or [part]
    ]
    if option.name in special:
        return special[option.name]
    if option.annotation is bool or bool in choices:
        return not option.default
    if typing.get_origin(option.annotation) is Literal:
        return choices[-1]
    return "text" if {str, Path} & {option.annotation, *choices} else 8


# as `make_certificate` names them
TLS_FILES = {"ssl_certfile": "certificate.crt", "ssl_keyfile": "certificate.key"}


def needed(name: str, folder: Path) -> dict[str, str]:
    """In the environment, for an option that means nothing without another."""
    if name in TLS_FILES:
        (other,) = TLS_FILES.keys() - {name}
        return {options()[other].env: str(folder / TLS_FILES[other])}
    return {"DECODEFLEET_WINDOW": "64"} if name == "attention_sinks" else {}


SEVERAL = ("api_key", "allowed_origins")


@pytest.mark.parametrize("origin", ["flag", "env", "file"])
def test_every_option_can_be_set_by_every_way(origin: str, tmp_path: Path) -> None:
    make_certificate(tmp_path)
    base = {"DECODEFLEET_CLUSTER_SECRET": "s", "DECODEFLEET_REDIS_URL": "redis://r"}
    for name, option in options().items():
        if option.env_only or name == "redis_url":
            continue
        value = sample(option, tmp_path)
        given = base | needed(name, tmp_path)
        if origin == "flag":
            loaded = load_config({name: (value,) if name in SEVERAL else value}, None, given)
        elif origin == "env":
            loaded = load_config({}, None, given | {option.env: str(value)})
        else:
            loaded = load_config({}, write(tmp_path, json.dumps({name: value})), given)
        place: Any = loaded.config
        for part in option.path:
            place = getattr(place, part)
        assert loaded.origins[name] == origin
        assert place != option.default


def test_secrets_are_never_shown(tmp_path: Path) -> None:
    env = {
        "DECODEFLEET_CLUSTER_SECRET": "sesame-1",
        "DECODEFLEET_API_KEY": "sesame-2, sesame-3",
        "DECODEFLEET_REDIS_URL": "redis://:sesame-4@host",
    }
    loaded = load_config({}, None, env)
    assert "sesame" not in repr(loaded)
    assert "sesame" not in str(loaded.rows())
    assert "sesame" not in loaded.config.model_dump_json()
    assert loaded.config.api_keys() == ("sesame-2", "sesame-3")
    assert loaded.config.secret() == "sesame-1"
    with pytest.raises(ConfigError) as error:
        load_config({"port": 0}, None, env)
    assert "sesame" not in str(error.value)


def test_the_cluster_secret_comes_by_environment_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cluster_secret"):
        load_config({"cluster_secret": "x"})
    with pytest.raises(ConfigError, match="DECODEFLEET_CLUSTER_SECRET"):
        load_config({}, write(tmp_path, "cluster-secret: x\n"))


def test_a_file_of_api_keys_must_hold_one(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n# a comment\n two \n")
    # keys of the file may change: they are nothing that a configuration holds
    assert load_config({"api_key": ["zero"], "api_key_file": file}).config.api_keys() == ("zero",)
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="no key"):
        load_config({"api_key_file": file})
    with pytest.raises(ConfigError, match="cannot read"):
        load_config({"api_key_file": tmp_path / "absent"})
    # on a cluster it lies where the routers are
    shared = {"redis_url": "redis://r", "address": "auto", "api_key_file": tmp_path / "absent"}
    load_config(shared, env={"DECODEFLEET_CLUSTER_SECRET": "s"})


@pytest.mark.parametrize("setting", [{"address": "auto"}, {"data_host": "10.0.0.1"}])
def test_several_machines_need_a_secret_and_a_shared_redis(setting: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="DECODEFLEET_CLUSTER_SECRET"):
        load_config(setting | {"redis_url": "redis://r"})
    with pytest.raises(ConfigError, match="redis_url"):
        load_config(setting, env={"DECODEFLEET_CLUSTER_SECRET": "s"})
    load_config(setting | {"redis_url": "redis://r"}, env={"DECODEFLEET_CLUSTER_SECRET": "s"})


def test_the_engine_gets_its_parts_unchanged() -> None:
    config = load_config({"dtype": "float32", "max_model_len": 99, "num_gpu_blocks_override": 7}).config
    engine = config.engine_config(Path("/models/m"), "m")
    assert (engine.model.folder, engine.model.served_name) == (Path("/models/m"), "m")
    assert (engine.model.dtype, engine.model.max_model_len) == ("float32", 99)
    assert engine.cache.num_gpu_blocks_override == 7


def test_configuration_is_frozen() -> None:
    with pytest.raises(ValidationError):
        ServeConfig().port = 1  # type: ignore[misc]


def test_option_names_are_unique_and_described() -> None:
    described = options()
    assert all(option.description for option in described.values())
    fields = sum(
        len(field.annotation.model_fields) if hasattr(field.annotation, "model_fields") else 1
        for field in ServeConfig.model_fields.values()
    )
    assert len(described) == fields


def test_traces_go_to_an_http_address() -> None:
    assert load_config(
        {"otlp_traces_endpoint": "http://collector:4318/v1/traces"}
    ).config.otlp_traces_endpoint
    with pytest.raises(ConfigError, match="otlp_traces_endpoint: must be an http"):
        load_config({"otlp_traces_endpoint": "collector:4317"})
