"""What torchrun has since 2.14 and 2.15: flags and variables, as its own source has them."""

from __future__ import annotations

import socket

import pytest

from bootseer.errors import ConfigError
from launcher.cli.parser import parse
from launcher.ranks.devices import visible_device_of
from launcher.ranks.output import logs
from launcher.spec import LaunchSpec, build_spec


def spec_of(*argv: str, **environ: str) -> LaunchSpec:
    return build_spec(parse([*argv, "--no-python", "true"], environ), environ)


def test_the_prefix_of_lines_is_a_flag_which_wins_over_the_variable() -> None:
    variable = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "v"}
    assert spec_of("--log-line-prefix-template", "f", **variable).log_line_prefix_template == "f"
    assert spec_of(**variable).log_line_prefix_template == "v"
    assert spec_of(PET_LOG_LINE_PREFIX_TEMPLATE="p", **variable).log_line_prefix_template == "p"
    assert spec_of("--log_line_prefix_template", "", **variable).log_line_prefix_template == "v"


def test_the_name_of_the_node_may_stand_there() -> None:
    expected = f"{socket.gethostname()}:3: ".encode()
    assert logs.line_prefix("${hostname}:${rank}: ", "default", 3, 1, "its.qualified.name") == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_is_printed_without_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(["--print-completion", shell], {})
    assert end.value.code in (0, None)
    assert "bootrun" in capsys.readouterr().out


def test_the_devices_of_hip_come_first_and_are_set_beside_the_others() -> None:
    environ = {"HIP_VISIBLE_DEVICES": "6, 7", "CUDA_VISIBLE_DEVICES": "1"}
    assert visible_device_of(environ, 1) == "7"
    with pytest.raises(ConfigError, match="HIP_VISIBLE_DEVICES=6, 7"):
        visible_device_of(environ, 2)
    assert visible_device_of({**environ, "HIP_VISIBLE_DEVICES": ""}, 0) == "1"


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "x"])
def test_the_pause_after_a_failed_write_has_to_be_a_number(text: str) -> None:
    where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:1")
    with pytest.raises(ConfigError, match="cas_backoff_max_seconds"):
        spec_of(*where, "--rdzv-conf", f"cas_backoff_max_seconds={text}")
    spec_of(*where, "--rdzv-conf", "cas_backoff_max_seconds=0.5")
