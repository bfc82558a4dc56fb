"""What a Watch notes of imports, and what a Sentry finds changed: small libraries in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from launcher.in_rank import import_watch
from launcher.ranks.fork import import_plan
from launcher.ranks.fork.import_plan import MAIN, ImportPlan, WatchNotes

# As bootstrap.py loads it. What follows in place of SCRIPT is a script's text, under its own file's name.
WATCHING = """
import os, sys
sys.path.insert(0, os.path.abspath("site-packages"))
names = {"__name__": "_bootseer_rank"}
with open(sys.argv[1]) as file:
    exec(compile(file.read(), sys.argv[1], "exec"), names)
watch = names["Watch"](sys.argv[2] == "whole")
watch.install()
with open("train.py") as file:
    script = compile(file.read(), os.path.abspath("train.py"), "exec")
exec(script, {"__name__": "__main__", "watch": watch})
with open(os.environ["PLACE"] + "/uses", "w") as file:
    file.writelines(watch.lines())
watch.remove()
"""
GUARDED = """
import os, sys
sys.path.insert(0, os.path.abspath("site-packages"))
names = {"__name__": "_bootseer_rank"}
with open(sys.argv[1]) as file:
    exec(compile(file.read(), sys.argv[1], "exec"), names)
watch = names["Watch"](False)
watch.install()
import user_of_hub, where, settings, again, caller, tqdm
watch.remove()
sentry = names["Sentry"](watch, sys.argv[3:])
said = []
sentry.arm("train.py", lambda: sys.argv[2] == "over", said.append)
with open("train.py") as file:
    script = compile(file.read(), os.path.abspath("train.py"), "exec")
exec(script, {"__name__": "__main__"})
print("\\n".join(said))
"""
LIBRARIES = {
    "base": "value = 1",
    "hub": "import os\nHOME = os.environ.get('HUB_HOME')",
    "user_of_hub": "from hub import HOME\nimport base",
    "where": "import os\nHERE = os.getcwd()",
    "settings": "import os\nTEXT = os.path.exists('/settings') or open(os.environ['PLACE'] + '/settings').read()",
    "again": "import base, hub",
    "tqdm/__init__": "from . import std",
    "tqdm/std": "import os\nSET = {name: value for name, value in os.environ.items() if name.startswith('TQDM_')}",
    "caller": "import late\nlate.load()",
    "late": "import base\ndef load():\n    import hub",
    "ranked": "import os\nRANK = os.environ.get('RANK')",
    "package/__init__": "",
    "package/part": "import base",
    "package/user": "from package import part",
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name, text in LIBRARIES.items():
        write(tmp_path / "site-packages" / f"{name}.py", text)
    write(tmp_path / "settings", "the first")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))


def run(place: Path, program: str, script: str, *words: str, env: Mapping[str, str] | None = None) -> str:
    write(place / "train.py", script)
    argv = [sys.executable, "-S", "-c", program, import_watch.__file__, *words]
    environ = {"PATH": os.environ["PATH"], "PLACE": os.fspath(place), "HOME": "/root", **(env or {})}
    done = subprocess.run(argv, cwd=place, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def watched(place: Path, script: str, how: str = "whole", env: Mapping[str, str] | None = None) -> WatchNotes:
    run(place, WATCHING, script, how, env=env)
    found = import_plan.parse((place / "uses").read_text())
    assert found is not None
    return found


def decided(place: Path, script: str) -> ImportPlan:
    """What may be imported before, of libraries; no text mentions anything."""
    found = watched(place, script)
    candidates = [name for name, module in found.modules.items() if "/site-packages/" in module.origin]
    return import_plan.decide(found, candidates, (), lambda *_: ())


def uses_of(found: WatchNotes, who: str) -> set[tuple[str, bool]]:
    return {(use.what, use.is_change) for use in found.uses if use.by == who}


# ---- noting ----------------------------------------------------------------------------------------------------


def test_who_imports_what_in_which_order(place: Path) -> None:
    found = watched(place, "import user_of_hub\nfrom package import part\nimport late\nlate.load()\n")
    order = [name for name, module in found.modules.items() if "/site-packages/" in module.origin]
    assert order == ["user_of_hub", "hub", "base", "package", "package.part", "late"]
    assert {name: found.modules[name].by for name in order} == {
        "user_of_hub": MAIN,
        "hub": "user_of_hub",
        "base": "user_of_hub",
        "package": MAIN,
        "package.part": MAIN,
        "late": MAIN,
    }
    assert [found.modules[name].line for name in ("user_of_hub", "package", "late")] == [1, 2, 3]
    assert set(found.needs["user_of_hub"]) == {"hub", "base"}


def test_who_imports_what_is_there_already(place: Path) -> None:
    """Whatever has begun since: base, which user_of_hub has imported, and hub, which it was imported by."""
    found = watched(place, "import user_of_hub\nfrom package import part, user\nimport late\nlate.load()\n")
    assert set(found.needs["package.part"]) == {"base"}
    assert set(found.needs["late"]) == {"base"}  # its function is called by the script
    assert set(found.needs["package.user"]) == {"package", "package.part"}


@pytest.mark.parametrize("how", ["whole", "part"])
def test_who_depends_on_a_module(place: Path, how: str) -> None:
    """Directly or not; all of a package that does are there by its name."""
    write(place / "site-packages/wide/__init__.py", "import user_of_hub\nfrom . import part\n")
    write(place / "site-packages/wide/part.py", "import base\n")
    script = "import again, where, wide\nprint(watch.dependents('hub'), watch.dependents('where'))\n"
    assert run(place, WATCHING, script, how) == "['again', 'wide', 'user_of_hub'] []\n"


def test_frames_are_gone_through_only_while_something_is_imported(place: Path) -> None:
    """A compiler in the first step reads variables and imports from deep calls, some ten thousand times."""
    (place / "script.py").write_text(
        """
import sys, types
sys.path.insert(0, FOLDER)
import import_watch
looked = []
class Frame:
    f_back = None
    f_globals = {"__name__": "deep"}
    @property
    def f_code(self):
        looked.append(1)
        return types.SimpleNamespace(co_name="f")
sys.find = lambda: import_watch.find_importing(Frame())
assert sys.find() == "__main__" and not looked
import while_imported
assert while_imported.found == "__main__" and len(looked) == 1
assert sys.find() == "__main__" and len(looked) == 1
try:
    import fails
except ValueError:
    pass
assert sys.find() == "__main__" and len(looked) == 1
""".replace("FOLDER", repr(os.path.dirname(import_watch.__file__)))
    )
    (place / "while_imported.py").write_text("import sys\nfound = sys.find()\n")
    (place / "fails.py").write_text("raise ValueError\n")
    subprocess.run([sys.executable, "script.py"], cwd=place, check=True)


def test_frames_of_importlib_are_passed_without_their_code(place: Path) -> None:
    """Each access to a frame's code calls all audit hooks: some ten for each imported module."""
    (place / "script.py").write_text(
        """
import sys
sys.path.insert(0, FOLDER)
import import_watch
watch = import_watch.Watch(False)
watch.install()
count = 0
def hook(event, args):
    global count
    count += event == "object.__getattr__" and args[1:] == ("f_code",)
sys.addaudithook(hook)
import outer
watch.remove()
assert [watch.begun[name][1] for name in ("outer", "inner")] == ["__main__", "outer"]
print(count)
""".replace("FOLDER", repr(os.path.dirname(import_watch.__file__)))
    )
    (place / "outer.py").write_text("import inner\n")
    (place / "inner.py").write_text("")
    words = [sys.executable, "-B", "script.py"]
    done = subprocess.run(words, cwd=place, check=True, capture_output=True, text=True)
    assert int(done.stdout) <= 2 * 4  # of its importer, and of the readers of its files; else 13


@pytest.mark.parametrize("how", ["whole", "light"])
def test_what_modules_read(place: Path, how: str) -> None:
    found = watched(place, "import hub, where, settings, ranked\n", how)
    assert uses_of(found, "hub") == {("env:HUB_HOME", False)}
    assert uses_of(found, "where") == {("cwd", False)}
    assert uses_of(found, "settings") == {("env:PLACE", False), (f"file:{place}/settings", False)}
    assert uses_of(found, "ranked") == {("env:RANK", False)}


def test_what_is_installed_is_looked_up(place: Path) -> None:
    """Versions of packages are looked for in all of sys.path, which has a zip that need not exist."""
    text = """
        import importlib.metadata, sys
        sys.path.append("/opt/lib/python311.zip")
        try:
            VERSION = importlib.metadata.version("other")
        except importlib.metadata.PackageNotFoundError:
            VERSION = ""
    """
    write(place / "site-packages/versioned.py", text)
    found = watched(place, "import os\nos.system('true')\nimport versioned\n")
    assert [what for what, _ in uses_of(found, "versioned") if what.startswith("file:")] == []


@pytest.mark.parametrize(
    ("script", "what"),
    [
        ("os.environ['HUB_HOME'] = '/data'", "env:HUB_HOME"),
        ("os.putenv('HUB_HOME', '/data')", "env:HUB_HOME"),
        ("del os.environ['HOME']", "env:HOME"),
        ("os.chdir('/')", "cwd"),
        ("open('made', 'w').close()", "file:PLACE/made"),
        ("os.mkdir('folder')", "file:PLACE/folder"),
        ("os.rename('settings', 'other')", "file:PLACE/other"),
        ("os.system('true')", "process"),
        ("sys.argv.append('more')", "argv"),
        ("sys.path.append('/more')", "path"),
        ("sys.setrecursionlimit(5000)", "recursion"),
        ("sys.stdout = sys.stderr", "streams"),
        ("sys.excepthook = print", "hooks"),
        ("sys.meta_path.append(type('Finder', (), {'find_spec': print}))", "finders"),
        ("import builtins; builtins.more = 1", "builtins"),
        ("import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN)", "signals"),
        ("import warnings, logging; warnings.simplefilter('error')", "warnings"),
        ("import random; import json; random.seed(1)", "random"),
    ],
)
def test_what_a_script_changes(place: Path, script: str, what: str) -> None:
    found = watched(place, f"import os, sys\n{script}\nimport base\n")
    change = what.replace("PLACE", os.fspath(place))
    ticks = {use.first for use in found.uses if use.by == MAIN and use.is_change and use.what == change}
    assert len(ticks) == 1
    # What cannot be seen when it happens is at the next import.
    assert ticks.pop() <= found.modules["base"].tick + 1


def test_nothing_is_left_of_a_watch(place: Path) -> None:
    after = """
import importlib.machinery
assert watch not in sys.meta_path
specs = [module.__spec__ for module in list(sys.modules.values()) if getattr(module, "__spec__", None)]
assert {type(spec) for spec in specs} == {importlib.machinery.ModuleSpec}
ticks = watch.tick
os.environ["X"] = "1"
os.getcwd()
open("train.py").close()
import hub
assert watch.tick == ticks
print(os.getcwd.__name__)
"""
    assert run(place, WATCHING + after, "import base\n", "whole") == "getcwd\n"


# ---- what that decides -----------------------------------------------------------------------------------------


def test_a_variable_that_was_changed_before(place: Path) -> None:
    plan = decided(place, "import os\nos.environ['HUB_HOME'] = '/data'\nimport user_of_hub, where\n")
    assert plan.modules == ("base", "where")
    assert list(plan.left_out) == ["hub", "user_of_hub"]


@pytest.mark.parametrize(
    "script",
    [
        "os.environ['HUB_HOME'] = '/data'\ndel os.environ['HUB_HOME']",
        "os.environ.update(HUB_HOME='/data')\nos.environ.pop('HUB_HOME')",
        "before = dict(os.environ)\nos.environ.clear()\nos.environ.update(before)",
        "os.environ['PLACE'], before = '/', os.environ['PLACE']\nos.environ['PLACE'] = before",
        "here = os.getcwd()\nos.chdir('/')\nos.chdir(here)",
    ],
)
def test_a_change_that_was_undone_before(place: Path, script: str) -> None:
    """accelerate empties os.environ, and fills it again."""
    plan = decided(place, f"import os\n{script}\nimport user_of_hub, settings, where\n")
    assert (set(plan.modules), plan.left_out) == ({"user_of_hub", "hub", "base", "settings", "where"}, {})
    assert plan.changes == ()  # in a later start it may not be undone


@pytest.mark.parametrize(
    ("script", "left_out"),
    [
        (
            "os.environ['HUB_HOME'] = '/data'\nimport user_of_hub\ndel os.environ['HUB_HOME']",
            {"hub", "user_of_hub"},
        ),
        ("for value in ('/data', '', '/more'):\n    os.environ['HUB_HOME'] = value\nimport hub", {"hub"}),
        (
            "os.environ['HUB_HOME'] = ''\ndel os.environ['HUB_HOME']\nos.environ['HUB_HOME'] = '/'\nimport hub",
            {"hub"},
        ),
        ("os.environ['HUB_HOME'] = ''\nimport base, hub", {"hub"}),
        ("here = os.getcwd()\nos.chdir('/')\nimport where\nos.chdir(here)", {"where"}),
    ],
)
def test_a_change_that_is_undone_too_late_or_not_at_all(place: Path, script: str, left_out: set[str]) -> None:
    assert set(decided(place, f"import os\n{script}\n").left_out) == left_out


def test_what_goes_through_all_variables_for_its_own(place: Path) -> None:
    """As tqdm does, so that torch did not go before a script that loads a .env with HF_HOME."""
    script = "import os\nos.environ['{}'] = '1'\nimport tqdm, base\n"
    assert set(decided(place, script.format("HF_HOME")).modules) == {"tqdm", "tqdm.std", "base"}
    assert set(decided(place, script.format("TQDM_DISABLE")).modules) == {"base"}
    assert run(place, GUARDED, script.format("HF_HOME"), "begun").strip() == ""
    assert "tqdm.std reads TQDM_DISABLE" in run(place, GUARDED, script.format("TQDM_DISABLE"), "begun")


# ---- checking --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import user_of_hub, where, settings", ""),
        (
            "os.environ['HUB_HOME'] = '/data'\nimport base, user_of_hub",
            "hub reads HUB_HOME when it is imported, and train.py has changed it",
        ),
        (
            "os.environ['HUB_HOME'] = '/data'\nimport base, again",  # which finds hub imported
            "hub reads HUB_HOME when it is imported, and train.py has changed it",
        ),
        (
            "os.environ['HUB_HOME'] = '/data'\nimport base, caller",  # of a function that does so
            "hub reads HUB_HOME when it is imported, and train.py has changed it",
        ),
        ("import user_of_hub\nos.environ['HUB_HOME'] = '/data'\nimport hub", ""),  # it has been imported
        ("os.environ['HUB_HOME'] = '/data'\ndel os.environ['HUB_HOME']\nimport hub", ""),
        ("os.environ['OTHER'] = '/data'\nimport hub", ""),
        (
            "os.chdir('/')\nimport where",
            "where reads the working directory when it is imported, and train.py has changed it",
        ),
        ("os.chdir('/')\nimport base", ""),
        (
            "open('settings', 'a').write('more')\nimport settings",
            "settings reads PLACE/settings when it is imported, and that has changed",
        ),
        (
            "os.mkdir('own'); open('own/hub.py', 'w').close(); sys.path.insert(0, 'own')\nimport hub",
            "train.py has put own in front of sys.path, which has another hub",
        ),
    ],
)
def test_what_a_forked_rank_finds_changed(place: Path, script: str, said: str) -> None:
    script = f"import os, sys\n{script}\n"
    assert run(place, GUARDED, script, "begun").strip() == said.replace("PLACE", os.fspath(place))


def test_nothing_is_looked_at_once_others_count_on_the_rank(place: Path) -> None:
    script = "import os\nos.environ['HUB_HOME'] = '/data'\nimport hub\n"
    assert run(place, GUARDED, script, "begun") != "\n"
    assert run(place, GUARDED, script, "over") == "\n"


def test_what_is_known_to_be_changed_is_allowed(place: Path) -> None:
    script = "import os\nos.environ['HUB_HOME'] = '/data'\nos.chdir('/')\nimport hub, where\n"
    assert run(place, GUARDED, script, "begun", "env:HUB_HOME", "cwd").strip() == ""
