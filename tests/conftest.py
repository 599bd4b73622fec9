"""Settings for all tests: slow tests need --all, and no test sees the user's settings."""

from __future__ import annotations

import os
import signal

import hypothesis
import pytest

# No test asserts a time, since the machine may be busy. Property tests draw the same examples every time so that
# failures repeat; --all draws new ones.
_COMMON = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow], "print_blob": True}
hypothesis.settings.register_profile("same", derandomize=True, **_COMMON)
hypothesis.settings.register_profile("search", derandomize=False, max_examples=1000, **_COMMON)


def pytest_configure(config: pytest.Config) -> None:
    """Configure property tests, disable proxies for loopback and restore the default handling of SIGINT."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts background processes with SIGINT ignored; child processes of tests would inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    hypothesis.settings.load_profile("search" if config.getoption("--all") else "same")
    for name in ("no_proxy", "NO_PROXY"):
        os.environ[name] = ",".join([*filter(None, [os.environ.get(name)]), "127.0.0.1", "localhost"])


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option --all."""
    parser.addoption("--all", action="store_true", help="run the slow tests too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked slow unless --all is given."""
    if config.getoption("--all"):
        return
    skip = pytest.mark.skip(reason="slow: runs with --all")
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("PELTON_") or name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
            monkeypatch.delenv(name)
