"""Loading of settings from a TOML file, the environment and flags; later sources win, and unknown names are errors.

A field `max_num_seqs` is the TOML key `max-num-seqs`, the variable PELTON_MAX_NUM_SEQS and the flag --max-num-seqs.
Gateway and worker may share one file and one environment: each uses its own settings and knows the names of the
other's.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import tomllib
import typing
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar, get_args, get_origin

import msgspec

from shared.arguments import Parser, suggestion
from shared.errors import ConfigurationError
from shared.settings import CommonSettings, GatewaySettings, ServeSettings, WorkerSettings

ENVIRONMENT_PREFIX = "PELTON_"
SECRET_FIELDS = frozenset({"api_key", "admin_api_key", "cache_secret"})
"""Settings that never appear on a child's command line, which every user of the machine can read, nor in a message."""

OTHER_VARIABLES = frozenset({"PELTON_CONFIG", "PELTON_SUPERVISOR_FD", "PELTON_TORCH_INDEX"})
"""Variables with the prefix that are not settings."""

_SIDES = {
    "both sides": CommonSettings,
    "the gateway": GatewaySettings,
    "workers": WorkerSettings,
    "serve": ServeSettings,
}
"""Headings of --help, and the class with the settings below each."""

SettingsT = TypeVar("SettingsT", bound=CommonSettings)


@dataclasses.dataclass(frozen=True)
class SettingInfo:
    """One setting as its users see it. `type` contains the range (msgspec Meta)."""

    name: str
    type: Any
    default: Any
    doc: str

    @property
    def flag(self) -> str:
        """Command-line flag."""
        return "--" + self.key

    @property
    def key(self) -> str:
        """Key in the TOML file."""
        return self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """Environment variable."""
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def repeatable(self) -> bool:
        """True if the flag may be given several times."""
        return isinstance(self.default, tuple)


def describe(cls: type[CommonSettings]) -> dict[str, SettingInfo]:
    """Return the settings of a class by field name, with their documentation."""
    hints = typing.get_type_hints(cls, include_extras=True)
    described = {}
    for field in dataclasses.fields(cls):
        doc = next((meta.description for meta in get_args(hints[field.name])[1:] if meta.description), "")
        described[field.name] = SettingInfo(field.name, hints[field.name], field.default, doc)
    return described


def load_settings(cls: type[SettingsT], argv: Sequence[str], env: Mapping[str, str], *, prog: str) -> SettingsT:
    """Return the settings of one process.

    Args:
        cls: Settings class to fill.
        argv: Arguments without the program's name. `--help` prints the help and exits with 0.
        env: Environment; PELTON_CONFIG names the file if --config does not.
        prog: Name of the program for messages.

    Raises:
        ConfigurationError: A name is unknown, a value is invalid, or a file cannot be read. The message names it
            and its source.
    """
    known = describe(cls)
    flags = _parse_flags(known, argv, prog)
    config = flags.pop("config", None) or env.get("PELTON_CONFIG", "")
    values = {
        **(_read_file(known, config) if config else {}),
        **_read_environment(known, env),
        **{name: _convert(known[name], raw, known[name].flag, strict=False) for name, raw in flags.items()},
    }
    settings = cls(**values)
    if isinstance(settings, WorkerSettings) and settings.pipeline_parallel_size > 1:
        raise ConfigurationError(
            f"--pipeline-parallel-size is {settings.pipeline_parallel_size}; only 1 is supported. Split the layers "
            "with --tensor-parallel-size instead."
        )
    return settings


def settings_to_argv(cls: type[CommonSettings], settings: CommonSettings) -> list[str]:
    """Return flags that make load_settings(cls, ...) see the values of `settings`, which may be of a wider class.

    Secrets are left out; settings_to_environment passes them on. Values equal to the default are left out too, so the
    child's environment must not contain settings of its own.
    """
    argv = []
    for info in describe(cls).values():
        value = getattr(settings, info.name)
        if info.name in SECRET_FIELDS or value == info.default:
            continue
        if isinstance(value, bool):
            argv.append(info.flag if value else f"--no-{info.key}")
        else:
            argv.extend(f"{info.flag}={item}" for item in (value if info.repeatable else (value,)))
    return argv


def settings_to_environment(
    cls: type[CommonSettings], settings: CommonSettings, env: Mapping[str, str]
) -> dict[str, str]:
    """Return `env` without Pelton's settings, plus the secrets of `settings` that `cls` takes."""
    every = {info.variable for info in describe(ServeSettings).values()} | {"PELTON_CONFIG"}
    child = {name: value for name, value in env.items() if name not in every}
    for info in describe(cls).values():
        value = getattr(settings, info.name)
        if info.name in SECRET_FIELDS and value:
            # The line break at the end prevents a comma inside a value from being read as a separator.
            child[info.variable] = "".join(f"{item}\n" for item in value) if info.repeatable else value
    return child


class _Parser(Parser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message} (see {self.prog} --help)")

    def error_of_flag(self, flag: str) -> str:
        if flag in {info.flag for info in describe(ServeSettings).values()}:
            return f"{flag} is not a setting of {self.prog}"
        return super().error_of_flag(flag)


def _parse_flags(known: Mapping[str, SettingInfo], argv: Sequence[str], prog: str) -> dict[str, Any]:
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [-h] {'[MODEL] ' if 'model' in known else ''}[--config FILE.toml] [FLAGS]",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        epilog="A flag --max-num-seqs is also the variable PELTON_MAX_NUM_SEQS and the file's key max-num-seqs.",
    )
    parser.add_argument("--config", metavar="FILE.toml", help="file with settings; environment and flags override it")
    if "model" in known:
        parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="the same as --model")
    for title, cls in _SIDES.items():
        group = parser.add_argument_group(title)
        for name in filter(known.__contains__, cls.__annotations__):  # its own docstring, not an inherited one
            info, text = known[name], _help_text(known[name])
            if isinstance(info.default, bool):
                group.add_argument(info.flag, dest=name, action=argparse.BooleanOptionalAction, help=text)
            else:
                action = "append" if info.repeatable else "store"
                group.add_argument(info.flag, dest=name, action=action, metavar=_metavar(info), help=text)
    flags = vars(parser.parse_args(argv))
    positional = flags.pop("model_argument", None)
    if positional is not None:
        if "model" in flags:
            raise ConfigurationError(f"MODEL is given twice: {positional} and --model {flags['model']}; give it once")
        flags["model"] = positional
    return flags


def _help_text(info: SettingInfo) -> str:
    default = "none" if info.default in ((), "") else str(info.default)
    return f"{info.doc} (default: {default})".replace("%", "%%")


def _metavar(info: SettingInfo) -> str:
    inner = get_args(info.type)[0]
    if get_origin(inner) is typing.Literal:
        return "{" + ",".join(get_args(inner)) + "}"
    return {int: "N", float: "X"}.get(inner, "TEXT")


def _read_file(known: Mapping[str, SettingInfo], path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigurationError(f"--config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--config {path}: {error}") from error
    every = {info.key: name for name, info in describe(ServeSettings).items()}
    values = {}
    for key, raw in table.items():
        if key not in every:
            raise ConfigurationError(f"{path}: unknown key {key}{suggestion(key, every)}")
        name = every[key]
        if name in known:
            values[name] = _convert(known[name], raw, f"{path}: {key}", strict=True)
    return values


def _read_environment(known: Mapping[str, SettingInfo], env: Mapping[str, str]) -> dict[str, Any]:
    every = {info.variable: name for name, info in describe(ServeSettings).items()}
    values = {}
    for variable, raw in env.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in OTHER_VARIABLES:
            continue
        if variable not in every:
            raise ConfigurationError(f"unknown environment variable {variable}{suggestion(variable, every)}")
        info = known.get(every[variable])
        if info is not None:
            value = _split(raw) if info.repeatable else raw
            values[info.name] = _convert(info, value, variable, strict=False)
    return values


def _split(text: str) -> list[str]:
    """Split several values in one variable: at line breaks if there are any, else at commas."""
    parts = text.splitlines() if "\n" in text else text.split(",")
    return [part.strip() for part in parts if part.strip()]


def _convert(info: SettingInfo, raw: Any, source: str, *, strict: bool) -> Any:
    got = "" if info.name in SECRET_FIELDS else f", got {raw!r}"
    try:
        value = msgspec.convert(raw, info.type, strict=strict)
    except msgspec.ValidationError as error:
        expected = str(error).split(", got ")[0].replace("`", "").replace("Expected ", "expected ")
        if expected.startswith("Invalid enum value"):
            expected = "expected one of " + ", ".join(get_args(get_args(info.type)[0]))
        raise ConfigurationError(f"{source}: {expected}{got}") from error
    if isinstance(value, tuple) and any(not item.strip() for item in value):
        # An unset shell variable as --api-key would otherwise open the server to everyone.
        raise ConfigurationError(f"{source}: the value is empty")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigurationError(f"{source}: expected a finite number{got}")
    return value
