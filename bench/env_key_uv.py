"""Layouts of `bench env_key` for uv: its pip, projects and workspaces, locks, and where it looks for settings.

In: nothing. Out: `layouts()`. Paths are meant from the working folder.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench.env_key_pip import (
    GIT,
    LOCK_WHEEL,
    OFFLINE,
    PYLOCK,
    SETUP_PY,
    TRAIN,
    backend_package,
    repository,
    setuptools_package,
)
from bench.env_key_project import (
    Layout,
    Rebuilt,
    Wheel,
    add,
    chmod,
    commands,
    edit,
    remove,
    touch,
    variable,
    wheels,
)
from bench.env_key_tools import UV

SETTINGS = 'no-index = true\nfind-links = ["{backends}", "{work}/wheels"]\n'
IN_PYPROJECT = "[tool.uv]\n" + SETTINGS


def layouts() -> Iterator[Layout]:
    """All of them."""
    yield pip()
    yield above()
    yield settings_above()
    yield elsewhere()
    yield pylock()
    yield workspace()
    yield script()
    yield git()
    yield wrapped()


def pip() -> Layout:
    """`uv pip install`, with settings and variables."""
    return Layout(
        name=f"{UV}: uv pip install",
        tool=UV,
        commands=("uv pip install -r requirements.txt", "uv pip install --no-deps -r more/local.txt"),
        files={
            "requirements.txt": "-r nested/base.txt\nliby @ ./libs/liby\n./libs/libf\nbeta==1.0\n",
            "nested/base.txt": "-c con.txt\nalpha>=1\n",
            "nested/con.txt": "alpha<3\n",
            "more/local.txt": "./libs/libh\n-e ./libs/libe\n",
            "constraints.txt": "beta<3\n",
            "override.txt": "gamma==1.0\n",
            "build.txt": "setuptools<99\n",
            "exclude.txt": "zeta\n",
            "uv.toml": SETTINGS,
            **setuptools_package("libs/liby"),
            **backend_package("libs/libf", "libf", "flit_core", "flit_core.buildapi"),
            **backend_package("libs/libh", "libh", "hatchling", "hatchling.build"),
            **backend_package("libs/libe", "libe", "flit_core", "flit_core.buildapi"),
            "train.py": TRAIN,
            **wheels(
                "wheels",
                Wheel("alpha"),
                Wheel("beta", requires=("gamma", "zeta")),
                *map(Wheel, ("gamma", "zeta")),
            ),
        },
        environ={
            "UV_CONSTRAINT": "constraints.txt",
            "UV_OVERRIDE": "override.txt",
            "UV_BUILD_CONSTRAINT": "build.txt",
            "UV_EXCLUDE": "exclude.txt",
        },
        changed=[
            edit("a version", "requirements.txt", "beta==1.0", "beta>=1.0"),
            edit("a nested requirement", "nested/base.txt", "alpha>=1", "alpha"),
            edit("a nested constraint", "nested/con.txt", "<3", "<4"),
            edit("UV_CONSTRAINT's file", "constraints.txt", "<3", "<4"),
            edit("UV_OVERRIDE's file", "override.txt", "==1.0", ">=1.0"),
            edit("UV_BUILD_CONSTRAINT's file", "build.txt", "<99", "<98"),
            edit("UV_EXCLUDE's file", "exclude.txt", "zeta", "alpha"),
            variable("UV_EXCLUDE goes", "UV_EXCLUDE", None),
            variable("UV_RESOLUTION appears", "UV_RESOLUTION", "lowest"),
            variable("UV_CONFIG_FILE appears", "UV_CONFIG_FILE", "{work}/uv.toml"),
            edit("uv.toml", "uv.toml", "no-index", "prerelease = 'allow'\nno-index"),
            add("a uv.toml of the user appears", "~/.config/uv/uv.toml", "resolution = 'lowest'\n"),
            edit("a module of `liby @ ./libs/liby`", "libs/liby/liby/__init__.py", "V = 1", "V = 2"),
            edit("its subfolder named build", "libs/liby/liby/build/__init__.py", "B = 1", "B = 2"),
            edit("its VERSION", "libs/liby/VERSION", "1.0", "1.1"),
            edit("its README.md", "libs/liby/README.md", "long", "longer"),
            edit("its data", "libs/liby/liby/data/table.json", "{}", "[]"),
            add("a new module of it", "libs/liby/liby/more.py"),
            remove("a module of it goes", "libs/liby/liby/build"),
            edit("a module of ./libs/libf", "libs/libf/libf/__init__.py", "V = 1", "V = 2"),
            edit("a module of ./libs/libh", "libs/libh/libh/__init__.py", "V = 1", "V = 2"),
            add("a newer wheel", "wheels/alpha-1.1-py3-none-any.whl", Wheel("alpha", "1.1", "V = 2\n")),
            add("a wheel is another build", "wheels/beta-1.0-py3-none-any.whl", Wheel("beta", text="V = 2\n")),
        ],
        stayed=[
            edit("the training code", "train.py", "trains", "trains longer"),
            add("a new module", "model.py"),
            edit("tests of a package", "libs/liby/tests/test_it.py", "pass", "assert 1"),
            touch("times", "libs/liby/liby/__init__.py"),
            chmod("bits for the group", "requirements.txt", 0o020),
            variable("UV_CACHE_DIR", "UV_CACHE_DIR", "{work}/../cache"),
            variable("UV_NO_PROGRESS", "UV_NO_PROGRESS", "1"),
            variable("UV_CONCURRENT_BUILDS", "UV_CONCURRENT_BUILDS", "1"),
        ],
        rebuilt=[
            Rebuilt("a module of `liby @ ./libs/liby`", "import liby; print(liby.V)", "2"),
            Rebuilt("a module of ./libs/libf", "import libf; print(libf.V)", "2"),
            Rebuilt("a module of ./libs/libh", "import libh; print(libh.V)", "2"),
            Rebuilt("a wheel is another build", "import beta; print(beta.V)", "2"),
        ],
    )


def above() -> Layout:
    """Settings in a pyproject.toml of the working folder, which is found from below it."""
    return Layout(
        name=f"{UV}: [tool.uv] of the working folder",
        tool=UV,
        commands=("uv pip install alpha", "cd sub/deep && uv pip install beta"),
        files={
            "pyproject.toml": '[project]\nname = "job"\nversion = "1"\n' + IN_PYPROJECT,
            "sub/deep/notes.md": "",
            "train.py": TRAIN,
            **wheels("wheels", *map(Wheel, ("alpha", "beta"))),
        },
        changed=[
            edit("[tool.uv]", "pyproject.toml", "no-index", "prerelease = 'allow'\nno-index"),
            add("uv.toml comes before [tool.uv]", "uv.toml", "resolution = 'lowest'\n" + SETTINGS),
            add("a pyproject.toml nearer", "sub/deep/pyproject.toml", "[tool.uv]\nresolution = 'lowest'\n"),
            add("a project nearer", "sub/pyproject.toml", '[project]\nname = "sub"\nversion = "1"\n'),
            add("a uv.toml of the user appears", "~/.config/uv/uv.toml", "resolution = 'lowest'\n"),
            variable("UV_INDEX_URL appears", "UV_INDEX_URL", "https://example.org/simple"),
        ],
        stayed=[
            edit("the training code", "train.py", "trains", "trains longer"),
            edit("notes", "sub/deep/notes.md", "", "of that\n"),
            add("a pyproject.toml in a folder of something else", "tool/pyproject.toml", IN_PYPROJECT),
        ],
    )


def settings_above() -> Layout:
    """Settings in a uv.toml of folders above that of a command, and above the working folder."""
    return Layout(
        name=f"{UV}: uv.toml above",
        tool=UV,
        commands=("uv pip install alpha", "cd sub/deep && uv pip install beta"),
        files={
            "../uv.toml": SETTINGS,
            "sub/uv.toml": SETTINGS,
            "sub/deep/notes.md": "",
            "train.py": TRAIN,
            **wheels("wheels", *map(Wheel, ("alpha", "beta"))),
        },
        changed=[
            edit("uv.toml above the working folder", "../uv.toml", "no-index", "prerelease = 'allow'\nno-index"),
            edit("uv.toml above a subfolder", "sub/uv.toml", "no-index", "prerelease = 'allow'\nno-index"),
            add("uv.toml nearer", "sub/deep/uv.toml", "resolution = 'lowest'\n" + SETTINGS),
            add("uv.toml in the working folder", "uv.toml", "resolution = 'lowest'\n" + SETTINGS),
            add("a pyproject.toml nearer", "sub/deep/pyproject.toml", "[tool.uv]\nresolution = 'lowest'\n"),
        ],
        stayed=[edit("the training code", "train.py", "trains", "trains longer")],
    )


def elsewhere() -> Layout:
    """The folder is another one than the working folder."""
    package = backend_package("a", "liba", "flit_core", "flit_core.buildapi")
    other = backend_package("b", "libb", "flit_core", "flit_core.buildapi")
    return Layout(
        name=f"{UV}: --directory, --project, UV_WORKING_DIR",
        tool=UV,
        commands=(
            f"uv --directory a pip install {OFFLINE} -r r.txt",
            f"UV_WORKING_DIR=b uv pip install {OFFLINE} -r r.txt",
            f"uv pip install {OFFLINE} --project c --find-links wheels -r c/r.txt",
        ),
        files={
            **package,
            **other,
            "a/r.txt": ".\n",
            "b/r.txt": "./\n",
            "c/r.txt": "alpha\n",
            "c/pyproject.toml": "[tool.uv]\nprerelease = 'if-necessary'\n",
            "r.txt": "nothing\n",
            "train.py": TRAIN,
            **wheels("wheels", Wheel("alpha")),
        },
        changed=[
            edit("requirements of --directory", "a/r.txt", ".\n", ".\n\n"),
            edit("a module of --directory", "a/liba/__init__.py", "V = 1", "V = 2"),
            edit("requirements of UV_WORKING_DIR", "b/r.txt", "./", "."),
            edit("a module of UV_WORKING_DIR", "b/libb/__init__.py", "V = 1", "V = 2"),
            edit("requirements beside --project", "c/r.txt", "alpha", "alpha>=1"),
            edit("[tool.uv] of --project", "c/pyproject.toml", "if-necessary", "allow"),
            add("uv.toml of --directory", "a/uv.toml", "resolution = 'lowest'\n"),
        ],
        stayed=[
            edit("the training code", "train.py", "trains", "trains longer"),
            edit("requirements that nobody reads", "r.txt", "nothing", "everything"),
            edit("tests there", "a/tests/test_it.py", "pass", "assert 1"),
        ],
        rebuilt=[
            Rebuilt("a module of --directory", "import liba; print(liba.V)", "2"),
            Rebuilt("a module of UV_WORKING_DIR", "import libb; print(libb.V)", "2"),
        ],
    )


def pylock() -> Layout:
    """A lock of PEP 751: a folder, an archive and a wheel by path."""
    archive = (
        '[[packages]]\nname = "libs"\n[packages.archive]\npath = "own/libs.tar.gz"\nhashes = {sha256 = "ARC"}\n'
    )
    sources = backend_package("own/libs-1.0", "libs", "flit_core", "flit_core.buildapi")
    made = "tar -C own -czf own/libs.tar.gz libs-1.0 && rm -r own/libs-1.0"
    return Layout(
        name=f"{UV}: pylock.toml",
        tool=UV,
        commands=(f"uv pip install --preview {OFFLINE} -r pylock.toml",),
        files={
            "pylock.toml": PYLOCK + archive,
            **setuptools_package("libs/liby"),
            **sources,
            **wheels("own", Wheel("delta")),
            "train.py": TRAIN,
        },
        before=(LOCK_WHEEL, made, "sed -i s/ARC/$(sha256sum own/libs.tar.gz | cut -c-64)/ pylock.toml"),
        changed=[
            edit("a module of the folder", "libs/liby/liby/__init__.py", "V = 1", "V = 2"),
            edit("VERSION of the folder", "libs/liby/VERSION", "1.0", "1.1"),
            add("the wheel", "own/delta-1.0-py3-none-any.whl", Wheel("delta", text="V = 2\n")),
            add("the archive", "own/libs.tar.gz", "none\n"),
            edit("the lock", "pylock.toml", 'created-by = "own"', 'created-by = "me"'),
        ],
        stayed=[
            edit("the training code", "train.py", "trains", "trains longer"),
            edit("tests of the folder", "libs/liby/tests/test_it.py", "pass", "assert 1"),
        ],
        rebuilt=[Rebuilt("a module of the folder", "import liby; print(liby.V)", "2")],
    )


def workspace() -> Layout:
    """A member of a workspace whose root lies above, with sources outside of it."""
    root = (
        '[tool.uv.workspace]\nmembers = ["work", "libm"]\n[tool.uv]\nno-index = true\n'
        'find-links = ["{backends}", "{work}/../wheels"]\n'
    )
    app = (
        '[project]\nname = "app"\nversion = "1.0"\nrequires-python = ">=3.11"\n'
        'dependencies = ["libm", "libo", "alpha"]\n[project.optional-dependencies]\nmore = ["beta"]\n'
        '[dependency-groups]\nbase = ["gamma"]\ntrain = [{include-group = "base"}, "delta"]\n'
        '[tool.uv.sources]\nlibm = {workspace = true}\nlibo = {path = "../../outside/libo"}\n'
    )
    return Layout(
        name=f"{UV}: uv sync in a workspace",
        tool=UV,
        commands=("uv sync --frozen --all-extras --group train --no-editable",),
        files={
            "../pyproject.toml": root,
            "pyproject.toml": app,
            **backend_package(
                "../libm", "libm", "flit_core", "flit_core.buildapi", 'requires-python = ">=3.11"\n'
            ),
            **backend_package("../../outside/libo", "libo", "hatchling", "hatchling.build"),
            "train.py": TRAIN,
            **wheels("../wheels", *map(Wheel, ("alpha", "beta", "gamma", "delta"))),
        },
        environ={"UV_PROJECT_ENVIRONMENT": "{target}"},
        before=("uv lock -q --no-cache",),
        changed=[
            edit("the lock", "../uv.lock", "revision = ", "revision =  "),
            edit("the root of the workspace", "../pyproject.toml", "no-index", "prerelease = 'allow'\nno-index"),
            edit("what the member says", "pyproject.toml", '"alpha"]', '"alpha>=1"]'),
            edit("a group that another includes", "pyproject.toml", '"gamma"', '"gamma>=1"'),
            edit("an extra of --all-extras", "pyproject.toml", '"beta"', '"beta>=1"'),
            edit("a module of another member", "../libm/libm/__init__.py", "V = 1", "V = 2"),
            edit("a module outside the workspace", "../../outside/libo/libo/__init__.py", "V = 1", "V = 2"),
            edit("its README.md", "../../outside/libo/README.md", "long", "longer"),
            add("a new module there", "../../outside/libo/libo/more.py"),
            add(
                "a wheel is another build", "../wheels/alpha-1.0-py3-none-any.whl", Wheel("alpha", text="V = 2\n")
            ),
            add("uv.toml at the root", "../uv.toml", "resolution = 'lowest'\n"),
            variable("UV_NO_GROUP appears", "UV_NO_GROUP", "base"),
        ],
        stayed=[
            edit("the training code", "train.py", "trains", "trains longer"),
            add("a new module", "model.py"),
            edit("tests of a member", "../libm/tests/test_it.py", "pass", "assert 1"),
        ],
        rebuilt=[
            Rebuilt("a module of another member", "import libm; print(libm.V)", "2"),
            Rebuilt("a module outside the workspace", "import libo; print(libo.V)", "2"),
        ],
    )


def script() -> Layout:
    """Script metadata (PEP 723), as requirements and exported, and extras of a project."""
    metadata = '# /// script\n# dependencies = ["alpha"]\n# [tool.uv]\n# prerelease = "allow"\n# ///\n' + TRAIN
    offline = "--no-index --find-links wheels"
    return Layout(
        name=f"{UV}: script metadata, extras of a pyproject.toml",
        tool=UV,
        commands=(
            f"uv pip install {offline} -r train.py",
            f"uv pip install {offline} -r pyproject.toml --all-extras --group lint",
            f"uv export -q --script tool.py {offline} | uv pip install {offline} -r -",
        ),
        files={
            "train.py": metadata,
            "tool.py": metadata.replace("alpha", "delta"),
            "eval.py": metadata,
            "pyproject.toml": '[project]\nname = "job"\nversion = "1"\ndependencies = []\n'
            '[project.optional-dependencies]\none = ["beta"]\n[dependency-groups]\nlint = ["gamma"]\n',
            **wheels("wheels", *map(Wheel, ("alpha", "beta", "gamma", "delta"))),
        },
        changed=[
            edit("a script's requirement", "train.py", '"alpha"', '"alpha>=1"'),
            edit("an exported script's requirement", "tool.py", '"delta"', '"delta>=1"'),
            edit("an extra", "pyproject.toml", '"beta"', '"beta>=1"'),
            edit("another extra", "pyproject.toml", "one =", 'two = ["gamma"]\none ='),
            edit("a group", "pyproject.toml", '"gamma"', '"gamma>=1"'),
            add("a lock of the script", "tool.py.lock", "version = 1\n"),
        ],
        stayed=[
            edit("a script that nobody installs for", "eval.py", '"alpha"', '"alpha>=1"'),
            add("a new script", "serve.py", SETUP_PY),
        ],
    )


def git() -> Layout:
    """Packages of repositories on this machine, by branch."""
    return Layout(
        name=f"{UV}: git repositories",
        tool=UV,
        commands=(
            f"uv pip install {OFFLINE} 'libg @ git+file://{{work}}/../repos/libg@main'",
            f"uv pip install {OFFLINE} 'libi @ git+file://{{work}}/repos/libi'",
        ),
        files={
            **setuptools_package("../repos/libg", "libg"),
            **setuptools_package("repos/libi", "libi"),
            "train.py": TRAIN,
        },
        before=(*repository("../repos/libg"), *repository("repos/libi")),
        changed=[
            commands(
                "a commit on the branch",
                f"cd ../repos/libg && echo V = 2 >libg/__init__.py && {GIT} commit -qam two",
                "git -C ../repos/libg reset -q --hard HEAD~",
            ),
            commands(
                "a commit in the project",
                f"cd repos/libi && echo V = 2 >libi/__init__.py && {GIT} commit -qam two",
                "git -C repos/libi reset -q --hard HEAD~",
            ),
        ],
        stayed=[
            edit("the training code", "train.py", "trains", "trains longer"),
            edit("a file that is not committed", "../repos/libg/libg/__init__.py", "V = 1", "V = 3"),
        ],
        rebuilt=[Rebuilt("a commit on the branch", "import libg; print(libg.V)", "2")],
    )


def wrapped() -> Layout:
    """uv in subshells, a Makefile and a script of the user's."""
    offline = "--no-index --find-links {work}/wheels --find-links {backends}"
    return Layout(
        name=f"{UV}: in shells, scripts, make",
        tool=UV,
        commands=(
            f"(cd a && uv pip install {offline} .) && uv pip install {offline} -r r.txt",
            f'cd ws && uv pip install {offline} -r "$PWD/r.txt"',
            "make -s deps",
        ),
        files={
            **backend_package("a", "liba", "hatchling", "hatchling.build"),
            **backend_package("ws/pk", "libw", "hatchling", "hatchling.build"),
            "r.txt": "alpha==1.0\n",
            "ws/r.txt": "./pk\nbeta\n",
            "Makefile": f"deps: versions.txt\n\tuv pip install {offline} $$(cat versions.txt)\n",
            "versions.txt": "gamma==1.0\n",
            "train.py": TRAIN,
            **wheels("wheels", *map(Wheel, ("alpha", "beta", "gamma"))),
        },
        changed=[
            edit("a module in a subshell's folder", "a/liba/__init__.py", "V = 1", "V = 2"),
            edit("requirements after it", "r.txt", "==", ">="),
            edit('requirements by "$PWD"', "ws/r.txt", "beta", "beta>=1"),
            edit("a module that they name", "ws/pk/libw/__init__.py", "V = 1", "V = 2"),
            edit("a Makefile", "Makefile", "deps:", "all: deps\ndeps:"),
            edit("what a Makefile reads", "versions.txt", "==", ">="),
        ],
        stayed=[
            edit("the training code", "train.py", "trains", "trains longer"),
            edit("tests", "ws/pk/tests/test_it.py", "pass", "assert 1"),
        ],
        rebuilt=[
            Rebuilt("a module in a subshell's folder", "import liba; print(liba.V)", "2"),
            Rebuilt("a module that they name", "import libw; print(libw.V)", "2"),
        ],
    )
