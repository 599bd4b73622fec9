"""Settings: precedence, ranges, and errors that name the setting and where it came from."""

from __future__ import annotations

import pytest

from shared.config import describe, load_settings, settings_to_argv, settings_to_environment
from shared.errors import ConfigurationError
from shared.settings import GatewaySettings, ServeSettings, WorkerSettings


def load(cls=ServeSettings, argv=(), env=None):
    return load_settings(cls, list(argv), env or {}, prog="pelton")


def test_flags_win_over_environment_and_that_over_the_file(tmp_path):
    file = tmp_path / "pelton.toml"
    file.write_text('port = 1\nmax-num-seqs = 1\nmax-model-len = 1\nmodel = "a"\n')
    env = {"PELTON_MAX_NUM_SEQS": "2", "PELTON_MAX_MODEL_LEN": "2"}
    settings = load(argv=["--config", str(file), "--max-model-len", "3"], env=env)
    assert (settings.port, settings.max_num_seqs, settings.max_model_len, settings.model) == (1, 2, 3, "a")
    other = tmp_path / "other.toml"
    other.write_text('model = "b"')
    env = {"PELTON_CONFIG": str(file)}
    assert load(env=env).model == "a"
    assert load(env=env, argv=["--config", str(other)]).model == "b"


def test_repeatable_settings_in_every_source(tmp_path):
    file = tmp_path / "pelton.toml"
    file.write_text('served-model-name = ["a", "b"]')
    assert load(argv=["--config", str(file)]).served_model_name == ("a", "b")
    assert load(env={"PELTON_SERVED_MODEL_NAME": "a, b"}).served_model_name == ("a", "b")
    assert load(env={"PELTON_SERVED_MODEL_NAME": "a,b\nc\n"}).served_model_name == ("a,b", "c")
    assert load(argv=["--served-model-name", "a", "--served-model-name=-b"]).served_model_name == ("a", "-b")


def test_model_may_stand_without_its_flag_but_once():
    assert load(argv=["folder"]).model == "folder"
    assert load(WorkerSettings, ["folder"]).model == "folder"
    with pytest.raises(ConfigurationError, match="given twice"):
        load(argv=["folder", "--model", "other"])


def test_booleans():
    assert load(argv=["--no-enable-prefix-caching"]).enable_prefix_caching is False
    assert load(env={"PELTON_ENABLE_PREFIX_CACHING": "false"}).enable_prefix_caching is False
    assert load(env={"PELTON_SHARED_PREFIX_CACHE": "1"}).shared_prefix_cache is True


def test_one_file_and_environment_serve_both_sides(tmp_path):
    file = tmp_path / "pelton.toml"
    file.write_text("port = 9\nblock-size = 32\n")
    env = {"PELTON_MAX_NUM_SEQS": "2", "PELTON_DRAIN_TIMEOUT": "3"}
    gateway = load(GatewaySettings, ["--config", str(file)], env)
    worker = load(WorkerSettings, ["--config", str(file)], env)
    assert (gateway.port, gateway.drain_timeout) == (9, 3.0)
    assert (worker.block_size, worker.max_num_seqs) == (32, 2)


@pytest.mark.parametrize(
    ("argv", "env", "message"),
    [
        (["--port", "70000"], {}, "--port: expected int <= 65535, got '70000'"),
        (["--port", "http"], {}, "--port: expected int, got 'http'"),
        (["--port", "1.5"], {}, "--port"),
        (["--device", "tpu"], {}, "--device: expected one of auto, cpu, cuda, got 'tpu'"),
        (["--write-timeout", "nan"], {}, "--write-timeout"),
        (["--write-timeout", "inf"], {}, "--write-timeout: expected a finite number"),
        (["--gpu-memory-utilization", "1.1"], {}, "--gpu-memory-utilization"),
        (["--block-size", "0"], {}, "--block-size"),
        # A server must not start without keys because a variable is empty.
        (["--api-key", ""], {}, "--api-key: the value is empty"),
        (["--api-key", "  "], {}, "--api-key: the value is empty"),
        # A sixteenth of it must hold what a reader is sent at a time, or streams end with stream_expired at once.
        (["--stream-buffer-size", "1048575"], {}, "--stream-buffer-size: expected int >= 1048576, got '1048575'"),
        (["--prot", "1"], {}, "--prot; did you mean --port? (see pelton --help)"),
        (["--por", "1"], {}, "--por"),
        (["--port"], {}, "--port"),
        ([], {"PELTON_PORT": "x"}, "PELTON_PORT: expected int, got 'x'"),
        ([], {"PELTON_PROT": "1"}, "PELTON_PROT; did you mean PELTON_PORT?"),
        ([], {"PELTON_SHARED_PREFIX_CACHE": "maybe"}, "PELTON_SHARED_PREFIX_CACHE: expected bool"),
        (["--pipeline-parallel-size", "2"], {}, "--pipeline-parallel-size is 2; only 1 is supported"),
        (["--config", "/nowhere/pelton.toml"], {}, "--config /nowhere/pelton.toml: No such file"),
    ],
)
def test_errors_name_setting_and_source(argv, env, message):
    with pytest.raises(ConfigurationError) as caught:
        load(argv=argv, env=env)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "unknown key prot; did you mean port?"),
        ("max_num_seqs = 1", "unknown key max_num_seqs; did you mean max-num-seqs?"),
        ('port = "8000"', "port: expected int, got '8000'"),
        ("port = true", "port: expected int"),
        ("[gateway]\nport = 1", "unknown key gateway"),
        ("port =", "pelton.toml: "),
        ('api-key = "sk-secret"', "api-key: expected array"),
    ],
)
def test_errors_in_the_file_name_the_file(tmp_path, text, message):
    file = tmp_path / "pelton.toml"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        load(argv=["--config", str(file)])
    assert message in str(caught.value)
    assert "pelton.toml" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_flag_of_the_other_side_is_named_as_such():
    with pytest.raises(ConfigurationError, match="--port is not a setting of pelton "):
        load(WorkerSettings, ["--port", "1"])


def test_variables_of_other_programs_are_ignored():
    assert load(env={"PATH": "/bin", "PELTON_TORCH_INDEX": "x", "PELTON_SUPERVISOR_FD": "3"}) == ServeSettings()


def test_settings_survive_the_way_to_a_child():
    settings = ServeSettings(
        host="::1",
        port=0,
        model="-odd name",
        api_key=("sk-1,2", "sk-3"),
        cache_secret="s",
        worker=("ipc:///a", "tcp://b"),
        write_timeout=0.1,
        shared_prefix_cache=True,
    )
    argv = settings_to_argv(ServeSettings, settings)
    env = settings_to_environment(ServeSettings, settings, {"PELTON_PORT": "1", "PELTON_CONFIG": "x", "HOME": "/"})
    assert load(argv=argv, env=env) == settings
    assert env["HOME"] == "/"
    assert not any("sk-" in argument or "secret" in argument for argument in argv)


def test_help_shows_every_setting_with_its_documentation(capsys):
    with pytest.raises(SystemExit) as ended:
        load(argv=["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    # Each setting is listed below the side that uses it.
    marks = [
        *("\nboth sides:\n", "  --log-level ", "\nthe gateway:\n", "  --port "),
        *("\nworkers:\n", "  --max-num-seqs ", "\nserve:\n", "  --data-parallel-size "),
    ]
    places = [out.index(mark) for mark in marks]
    assert places == sorted(places)
    shown = "".join(out.split())
    for info in describe(ServeSettings).values():
        assert info.flag in shown
        assert "".join(info.doc.split()) in shown
