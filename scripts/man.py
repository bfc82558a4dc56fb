"""Write man pages and completions of shells in the layout of an installation's share/: `make man`."""

from __future__ import annotations

import os
import re
import sys

from bootseer.errors import UsageError
from launcher.cli.parser import complete
from launcher.completion import parsers

# Where distributions search for completions, relative to share/.
COMPLETIONS = {
    "bash": "bash-completion/completions/{}",
    "zsh": "zsh/site-functions/_{}",
    "fish": "fish/vendor_completions.d/{}.fish",
}


def write_shared(directory: str) -> list[str]:
    """Write man pages and completions in the layout of an installation's share/. Returns: their paths.

    Raises: UsageError without argparse-manpage or shtab.
    """
    found = write_pages(os.path.join(directory, "man", "man1"))
    for name, parser in parsers().items():
        for shell, place in COMPLETIONS.items():
            path = os.path.join(directory, place.format(name))
            os.makedirs(os.path.dirname(path), exist_ok=True)
            try:
                text = complete(parser, shell)
            except ModuleNotFoundError:
                raise UsageError("shtab is missing: pip install 'bootseer[completion]'") from None
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
            found.append(path)
    return found


def write_pages(directory: str) -> list[str]:
    """Write bootrun.1 and bootseer.1. Returns: their paths. Raises: UsageError without argparse-manpage."""
    try:
        from argparse_manpage.manpage import Manpage  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise UsageError("argparse-manpage is missing: pip install argparse-manpage") from None
    os.makedirs(directory, exist_ok=True)
    found = []
    for name, parser in parsers().items():
        path = os.path.join(directory, f"{name}.1")
        with open(path, "w", encoding="utf-8") as file:
            file.write(without_date(str(Manpage(parser))))
        found.append(path)
    return found


def without_date(page: str) -> str:
    """Return the page without its date, so that it changes only with the program."""
    first, newline, rest = page.partition("\n")
    return re.sub(r'"\d{4}\\?-\d\d\\?-\d\d"', '""', first) + newline + rest


if __name__ == "__main__":
    for each in write_shared(sys.argv[1] if len(sys.argv) > 1 else "share"):
        print(each)
