"""Where processes of ours begin: `bootrun`, `bootseer`, and `python -P _bootseer_entry.py MODULE ARGS...`.

Ours are started with the user's PYTHONPATH and working folder, where modules may lie that are called as ours or as
Python's. Here Python's own and ours come first, whatever stands there; ranks never run this. It lies beside our
packages, under a name that nobody else has, and is started by its path or by the commands that pip installs.
"""

import os
import sys

PLACE = os.path.dirname(os.path.abspath(__file__))
OURS = ("launcher", "bootseer")


def bootrun() -> None:
    """Entry point of `bootrun`."""
    find_own()
    from launcher.__main__ import bootrun

    bootrun()


def bootseer() -> None:
    """Entry point of `bootseer`."""
    find_own()
    from launcher.__main__ import bootseer

    bootseer()


def find_own() -> None:
    """Has Python's modules found first, then ours, then what is installed, at last what only PYTHONPATH has."""
    # Not in the folder of the script, which may be the working folder.
    path = sys.path if sys.flags.safe_path else sys.path[1:]
    library = os.path.dirname(os.__file__)
    archive = f"python{sys.version_info[0]}{sys.version_info[1]}.zip"
    pythons = [each for each in path if each == library or each.endswith(("/lib-dynload", "/" + archive))]
    if not pythons:
        return  # a Python of another kind
    begin = path.index(pythons[0])
    rest = [each for each in (*path[begin:], *path[:begin]) if each not in (PLACE, *pythons)]
    sys.path[:] = [*pythons, PLACE, *rest]
    # What start-up code of the user's has imported is its own business: it keeps it.
    for name, module in list(sys.modules.items()):
        top, file = name.partition(".")[0], getattr(module, "__file__", None)
        if not isinstance(file, str) or name == "__main__":
            continue
        if top in OURS:
            is_own = file.startswith(f"{PLACE}/{top}/")
        else:
            is_own = top not in sys.stdlib_module_names or any(file.startswith(each + "/") for each in pythons)
        if not is_own:
            del sys.modules[name]


def _main() -> None:
    """Runs a module of ours, as `python -m` does."""
    find_own()
    import runpy

    del sys.argv[0]
    runpy._run_module_as_main(sys.argv[0])  # type: ignore[attr-defined]


if __name__ == "__main__":
    _main()
