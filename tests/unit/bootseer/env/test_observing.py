"""Whether set-up may need privileges that it could not get while it is watched: told from what it would run."""

from __future__ import annotations

from pathlib import Path

import pytest

from bootseer.env.observing import may_ask


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
