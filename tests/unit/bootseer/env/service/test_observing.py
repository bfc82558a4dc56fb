"""What is planned of set-up that is watched: told from what it would run."""

from __future__ import annotations

from pathlib import Path

import pytest

from bootseer.env.key.keying import make_key
from bootseer.env.service.observing import may_ask, plan
from bootseer.env.spec import SetupSpec


@pytest.mark.parametrize(
    ("commands", "files", "asks"),
    [
        (["sudo apt-get install -y make"], {}, True),
        (["sh setup.sh"], {"setup.sh": "sudo ldconfig\n"}, True),
        pytest.param(["make deps"], {"Makefile": "deps:\n\tsudo ldconfig\n"}, True),
        pytest.param(["make -C tools deps"], {"tools/Makefile": "deps:\n\tsudo ldconfig\n"}, True),
        pytest.param(["make"], {"Makefile": "include more.mk\n", "more.mk": "all:\n\tdoas true\n"}, True),
        pytest.param(
            ["sh a.sh"],
            {"a.sh": '"$PWD"/scripts/b.sh\n', "scripts/b.sh": "#!/bin/sh\nsudo true\n"},
            True,
        ),
        pytest.param(["sh a/a.sh"], {"a/a.sh": ". ./b.sh\n", "a/b.sh": "sudo true\n"}, True),
        pytest.param(
            ["python x.py"],
            {"x.py": "import run\nrun('lib/y.py')\n", "lib/y.py": "call('sudo')\n"},
            True,
        ),
        (["sh a.sh"], {"a.sh": "sh b.sh\n", "b.sh": "sh a.sh\n"}, False),
        (["pip install -r r.txt"], {"r.txt": "numpy\n", "docs/setup.sh": "sudo true\n"}, False),
        (["sh a.sh"], {"a.sh": "cat README.md\n", "README.md": "Say sudo apt install.\n"}, False),
    ],
)
def test_what_may_ask_for_privileges(
    tmp_path: Path, commands: list[str], files: dict[str, str], asks: bool
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert may_ask(commands, str(tmp_path)) is asks


@pytest.mark.parametrize("in_image", [False, True])
@pytest.mark.parametrize(
    ("command", "makes"), [("pip install -r r.txt", False), ("pip install -r r.txt && echo x > made", True)]
)
def test_what_pip_alone_makes_is_not_reported(tmp_path: Path, command: str, makes: bool, in_image: bool) -> None:
    """Nobody reads it as an input, in an image as little as elsewhere; it is most of what there is to tell."""
    (tmp_path / "r.txt").write_text("numpy==2.0\n")
    spec = SetupSpec(
        commands=(command,),
        targets=(str(tmp_path / "env"),),
        cwd=str(tmp_path),
        in_image=in_image,
        image="0" * 64 if in_image else "",
    )
    watch = plan(make_key(spec, {}), spec, {}).watch
    assert watch is not None and watch["makes"] is makes
