"""The systemd units: what they promise, and that systemd itself accepts them."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from shared.config import load_settings
from shared.settings import GatewaySettings, ServeSettings
from tests.architecture.source import ROOT

UNITS = ["pelton.target", "pelton-gateway.service", "pelton-worker@.service"]
SERVICES = UNITS[1:]
# Newer than the oldest systemd in use; older ones name them and go on.
NEW_KEYS = ("RestartSteps", "RestartMaxDelaySec")


def read_unit(name: str) -> dict[str, list[str]]:
    """All values of each key, sections put together."""
    values: dict[str, list[str]] = {}
    for line in (ROOT / "systemd" / name).read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            key, value = line.split("=", 1)
            values.setdefault(key, []).append(value)
    return values


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_units(tmp_path):
    for name in UNITS:
        text = (ROOT / "systemd" / name).read_text()
        text, count = re.subn(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", text)
        assert count == (0 if name.endswith("target") else 1)
        (tmp_path / name).write_text(text)
    paths = [str(tmp_path / name.replace("@", "@0")) for name in UNITS]
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *paths],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env={"SYSTEMD_UNIT_PATH": f"{tmp_path}:", "PATH": "/usr/bin:/bin"},
    )
    # The machine's own units, of which verify may complain too, are not ours.
    about_ours = [line for line in result.stderr.splitlines() if "pelton" in line]
    complaints = [line for line in about_ours if not any(f"'{key}'" in line for key in NEW_KEYS)]
    assert complaints == []
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", SERVICES)
def test_services_are_watched_restarted_and_not_root(name):
    unit = read_unit(name)
    assert unit["Type"] == ["notify"]
    assert unit["User"] == ["pelton"]
    assert unit["KillMode"] == ["mixed"]
    assert unit["Restart"] == ["always"]
    assert int(unit["WatchdogSec"][0]) >= 10
    assert int(unit["LimitNOFILE"][0]) >= 65536
    assert unit["NoNewPrivileges"] == ["yes"]
    assert unit["ProtectSystem"] == ["strict"]
    assert unit["CapabilityBoundingSet"] == [""]
    assert unit["PartOf"] == ["pelton.target"]
    # A unit's own runtime directory would vanish with it.
    assert "RuntimeDirectory" not in unit
    assert unit["ReadWritePaths"] == ["/run/pelton"]


def test_the_gateway_may_finish_its_drain():
    stop_seconds = float(read_unit("pelton-gateway.service")["TimeoutStopSec"][0])
    assert stop_seconds > GatewaySettings().drain_timeout + 5


def test_workers_may_do_what_a_model_needs():
    unit = read_unit("pelton-worker@.service")
    assert unit["MemoryDenyWriteExecute"] == ["no"]
    assert "AF_NETLINK" in unit["RestrictAddressFamilies"][0].split()
    assert unit["CacheDirectory"] == ["pelton"]
    assert any("nvidia" in device for device in unit["DeviceAllow"])
    assert any("PELTON_CACHE_DIR=/var/cache/pelton" in line for line in unit["Environment"])


def test_out_of_memory_takes_workers_first():
    gateway, worker = (int(read_unit(name)["OOMScoreAdjust"][0]) for name in SERVICES)
    assert gateway < worker


def test_environment_file_holds_settings_that_exist():
    # Those that are commented out are suggestions: they must be right as well.
    text = (ROOT / "systemd" / "pelton.env").read_text()
    variables = dict(re.findall(r"(?m)^#?(PELTON_[A-Z_]+)=(.*)$", text))
    settings = load_settings(ServeSettings, [], variables, prog="test")
    assert settings.runtime_dir == "/run/pelton"
    tmpfiles = (ROOT / "systemd" / "pelton-tmpfiles.conf").read_text()
    assert "\nd /run/pelton 0700 pelton pelton -" in tmpfiles
