"""Layouts of `bench env_key` for poetry, pdm, pipenv and hatch.

In: nothing. Out: `layouts()`. Paths are meant from the working folder.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench.env_key_pip import TRAIN
from bench.env_key_project import Layout, Rebuilt, Wheel, add, edit, remove, touch, variable, wheels
from bench.env_key_tools import HATCH, PDM, PIPENV, POETRY

# A build backend that needs nothing, in the package itself: what these tools fetch is not the matter here.
BACKEND = """\
import os, zipfile
NAME = os.path.basename(os.getcwd())
def build_wheel(folder, config_settings=None, metadata_directory=None):
    info = NAME + "-1.0.dist-info"
    files = {info + "/METADATA": "Metadata-Version: 2.1\\nName: %s\\nVersion: 1.0\\n" % NAME,
        info + "/WHEEL": "Wheel-Version: 1.0\\nGenerator: own\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"}
    for above, _, names in os.walk(NAME):
        for each in sorted(names):
            if each.endswith((".py", ".json")):
                path = os.path.join(above, each)
                files[path] = open(path).read()
    name = NAME + "-1.0-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        for path, text in sorted(files.items()):
            wheel.writestr(path, text)
        wheel.writestr(info + "/RECORD", "".join(path + ",,\\n" for path in [*files, info + "/RECORD"]))
    return name
build_editable = build_wheel
"""


def package(directory: str, name: str) -> dict[str, str]:
    """With the backend above."""
    return {
        f"{directory}/pyproject.toml": "[build-system]\nrequires = []\n"
        'build-backend = "backend"\nbackend-path = ["."]\n'
        f'[project]\nname = "{name}"\nversion = "1.0"\nrequires-python = ">=3.11"\n',
        f"{directory}/backend.py": BACKEND,
        f"{directory}/{name}/__init__.py": "V = 1\n",
        f"{directory}/{name}/build/__init__.py": "B = 1\n",
        f"{directory}/tests/test_it.py": "def test_it(): pass\n",
    }


def layouts() -> Iterator[Layout]:
    """All of them."""
    yield poetry("-C app sync --without dev", "app")
    yield poetry("install --no-root --without dev", ".")
    yield pdm("sync -p app --prod -G train", "app")
    yield pdm("install --frozen-lockfile --prod -G train", ".")
    yield pipenv()
    yield hatch()


def poetry(words: str, directory: str) -> Layout:
    """Path dependencies, groups, and the project itself."""
    is_root = "--no-root" not in words
    up = "../" * (directory != ".")
    project = (
        '[tool.poetry]\nname = "app"\nversion = "1.0"\ndescription = ""\nauthors = []\nreadme = "README.md"\n'
        '[tool.poetry.dependencies]\npython = ">=3.11,<3.15"\n'
        f'liby = {{path = "{up}libs/liby"}}\nlibo = {{path = "{up}../outside/libo", develop = false}}\n'
        f'alpha = {{path = "{up}wheels/alpha-1.0-py3-none-any.whl"}}\n'
        f'[tool.poetry.group.train.dependencies]\nbeta = {{path = "{up}wheels/beta-1.0-py3-none-any.whl"}}\n'
        f'[tool.poetry.group.dev.dependencies]\ngamma = {{path = "{up}wheels/gamma-1.0-py3-none-any.whl"}}\n'
        '[build-system]\nrequires = ["poetry-core"]\nbuild-backend = "poetry.core.masonry.api"\n'
    )
    changed = [
        edit("the lock", f"{directory}/poetry.lock", "# This file", "#  This file"),
        edit("a module of a path dependency", "libs/liby/liby/__init__.py", "V = 1", "V = 2"),
        edit("its subfolder named build", "libs/liby/liby/build/__init__.py", "B = 1", "B = 2"),
        add("a new module of it", "libs/liby/liby/more.py"),
        remove("a module of it goes", "libs/liby/liby/build"),
        edit("its build backend", "libs/liby/backend.py", "import os", "import  os"),
        edit("a module outside the project", "../outside/libo/libo/__init__.py", "V = 1", "V = 2"),
        add("a wheel", "wheels/alpha-1.0-py3-none-any.whl", Wheel("alpha", text="V = 2\n")),
        add("a wheel of a group", "wheels/beta-1.0-py3-none-any.whl", Wheel("beta", text="V = 2\n")),
        edit("pyproject.toml", f"{directory}/pyproject.toml", 'version = "1.0"', 'version = "1.1"'),
        add("a poetry.toml appears", f"{directory}/poetry.toml", "[installer]\nno-binary = ['beta']\n"),
        add("settings of the user appear", "~/.config/pypoetry/config.toml", "[installer]\nparallel = false\n"),
        variable("POETRY_INSTALLER_NO_BINARY appears", "POETRY_INSTALLER_NO_BINARY", "beta"),
    ]
    if is_root:
        changed.append(edit("README.md of the project", f"{directory}/README.md", "long", "longer"))
    return Layout(
        name=f"{POETRY}: poetry {words}",
        tool=POETRY,
        commands=(f"poetry {words}",),
        files={
            **package("libs/liby", "liby"),
            **package("../outside/libo", "libo"),
            f"{directory}/pyproject.toml": project,
            f"{directory}/README.md": "long\n",
            f"{directory}/app/__init__.py": "V = 1\n",
            "train.py": TRAIN,
            **wheels("wheels", *map(Wheel, ("alpha", "beta", "gamma"))),
        },
        environ={"VIRTUAL_ENV": "{target}"},
        inputs=(directory,) if is_root else (),  # the project is installed in place
        before=(f"poetry -C {directory} lock",),
        changed=changed,
        stayed=[
            edit("the training code", "train.py", "trains", "trains longer"),
            edit("tests of a path dependency", "libs/liby/tests/test_it.py", "pass", "assert 1"),
            touch("times", "libs/liby/liby/__init__.py"),
            add("a new file", "notes.md"),
            variable("POETRY_CACHE_DIR", "POETRY_CACHE_DIR", "{work}/../cache"),
        ],
        rebuilt=[
            Rebuilt("a module of a path dependency", "import liby; print(liby.V)", "2"),
            Rebuilt("a module outside the project", "import libo; print(libo.V)", "2"),
        ],
    )


def pdm(words: str, directory: str) -> Layout:
    """Path dependencies by URL, groups, a lock."""
    up = "../" * (directory != ".")
    project = (
        '[project]\nname = "app"\nversion = "1.0"\nrequires-python = ">=3.11"\n'
        f'dependencies = ["liby @ file:///${{PROJECT_ROOT}}/{up}libs/liby", "alpha",\n'
        f'  "libo @ file:///${{PROJECT_ROOT}}/{up}../outside/libo"]\n'
        '[project.optional-dependencies]\ntrain = ["beta"]\n[dependency-groups]\ndev = ["gamma"]\n'
        "[tool.pdm]\ndistribution = false\n"
        f'[[tool.pdm.source]]\nname = "pypi"\ntype = "find_links"\nurl = "file:///${{PROJECT_ROOT}}/{up}wheels"\n'
        "verify_ssl = false\n"
    )
    return Layout(
        name=f"{PDM}: pdm {words}",
        tool=PDM,
        commands=(f"pdm {words}",),
        files={
            **package("libs/liby", "liby"),
            **package("../outside/libo", "libo"),
            f"{directory}/pyproject.toml": project,
            f"{directory}/README.md": "long\n",
            "train.py": TRAIN,
            **wheels("wheels", *map(Wheel, ("alpha", "beta", "gamma"))),
        },
        environ={"VIRTUAL_ENV": "{target}", "PDM_CHECK_UPDATE": "0"},
        before=(f"pdm lock -q -p {directory} -G :all",),
        changed=[
            edit("the lock", f"{directory}/pdm.lock", "# This file", "#  This file"),
            edit("a module of a path dependency", "libs/liby/liby/__init__.py", "V = 1", "V = 2"),
            edit("its subfolder named build", "libs/liby/liby/build/__init__.py", "B = 1", "B = 2"),
            add("a new module of it", "libs/liby/liby/more.py"),
            edit("its build backend", "libs/liby/backend.py", "import os", "import  os"),
            edit("a module outside the project", "../outside/libo/libo/__init__.py", "V = 1", "V = 2"),
            add("a wheel", "wheels/alpha-1.0-py3-none-any.whl", Wheel("alpha", text="V = 2\n")),
            edit("pyproject.toml", f"{directory}/pyproject.toml", '"beta"', '"beta>=1"'),
            add("a pdm.toml appears", f"{directory}/pdm.toml", "[install]\ncache = false\n"),
            add("settings of the user appear", "~/.config/pdm/config.toml", "[install]\nparallel = false\n"),
            variable("PDM_NO_BINARY appears", "PDM_NO_BINARY", "beta"),
        ],
        stayed=[
            edit("the training code", "train.py", "trains", "trains longer"),
            edit("tests of a path dependency", "libs/liby/tests/test_it.py", "pass", "assert 1"),
            touch("times", "libs/liby/liby/__init__.py"),
            add("a new file", "notes.md"),
            variable("PDM_CACHE_DIR", "PDM_CACHE_DIR", "{work}/../cache"),
        ],
        rebuilt=[
            Rebuilt("a module of a path dependency", "import liby; print(liby.V)", "2"),
            Rebuilt("a module outside the project", "import libo; print(libo.V)", "2"),
        ],
    )


def pipenv() -> Layout:
    """A Pipfile with path dependencies."""
    return Layout(
        name=f"{PIPENV}: pipenv sync",
        tool=PIPENV,
        commands=("pipenv sync --categories 'packages train'",),
        files={
            "Pipfile": "[packages]\nliby = {path = './libs/liby'}\n"
            "alpha = {path = './wheels/alpha-1.0-py3-none-any.whl'}\n"
            "[train]\nbeta = {path = './wheels/beta-1.0-py3-none-any.whl'}\n",
            **package("libs/liby", "liby"),
            "train.py": TRAIN,
            **wheels("wheels", *map(Wheel, ("alpha", "beta"))),
        },
        environ={"VIRTUAL_ENV": "{target}", "PIPENV_VERBOSITY": "-1"},
        before=("pipenv lock",),
        changed=[
            edit("the lock", "Pipfile.lock", '"pipfile-spec": 6', '"pipfile-spec":  6'),
            edit("a module of a path dependency", "libs/liby/liby/__init__.py", "V = 1", "V = 2"),
            add("a new module of it", "libs/liby/liby/more.py"),
            add("a wheel", "wheels/alpha-1.0-py3-none-any.whl", Wheel("alpha", text="V = 2\n")),
            add("a wheel of a category", "wheels/beta-1.0-py3-none-any.whl", Wheel("beta", text="V = 2\n")),
            add("a .env appears", ".env", "PIP_NO_DEPS=1\n"),
            variable("PIPENV_PIPFILE appears", "PIPENV_PIPFILE", "{work}/Pipfile"),
        ],
        stayed=[
            edit("the training code", "train.py", "trains", "trains longer"),
            edit("tests of a path dependency", "libs/liby/tests/test_it.py", "pass", "assert 1"),
        ],
        rebuilt=[Rebuilt("a module of a path dependency", "import liby; print(liby.V)", "2")],
    )


def hatch() -> Layout:
    """An environment of hatch, in the project, with pip's settings."""
    project = (
        '[project]\nname = "app"\nversion = "1.0"\n'
        '[tool.hatch.envs.default]\npath = ".venv"\ninstaller = "uv"\nskip-install = true\n'
        'dependencies = ["liby @ {root:uri}/libs/liby", "alpha"]\n'
    )
    return Layout(
        name=f"{HATCH}: hatch env create",
        tool=HATCH,
        commands=("hatch env create",),
        files={
            "pyproject.toml": project,
            **package("libs/liby", "liby"),
            "train.py": TRAIN,
            **wheels("wheels", Wheel("alpha")),
        },
        environ={"UV_NO_INDEX": "1", "UV_FIND_LINKS": "{work}/wheels"},
        target=".venv",
        is_inside=True,
        has_venv=False,
        changed=[
            edit("pyproject.toml", "pyproject.toml", '"alpha"', '"alpha>=1"'),
            edit("a module of a path dependency", "libs/liby/liby/__init__.py", "V = 1", "V = 2"),
            add("a new module of it", "libs/liby/liby/more.py"),
            add("a hatch.toml appears", "hatch.toml", "[envs.default]\ndependencies = []\n"),
            add("a wheel", "wheels/alpha-1.0-py3-none-any.whl", Wheel("alpha", text="V = 2\n")),
            variable("HATCH_ENV appears", "HATCH_ENV", "default"),
        ],
        stayed=[
            edit("the training code", "train.py", "trains", "trains longer"),
            edit("tests of a path dependency", "libs/liby/tests/test_it.py", "pass", "assert 1"),
        ],
        rebuilt=[Rebuilt("a module of a path dependency", "import liby; print(liby.V)", "2")],
    )
