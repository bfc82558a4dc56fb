"""Layouts of `bench env_key` for pip (versions 23 to 26) and pip-tools: set-up as users write it, and changes.

In: nothing. Out: `layouts()`. Paths are meant from the working folder.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench.env_key_project import (
    Layout,
    Link,
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
from bench.env_key_tools import PIP_TOOLS, PIPS

OFFLINE = "--no-index --find-links {backends}"
TRAIN = "print('trains')\n"

# A package that setuptools builds, which reads more than its modules.
SETUP_PY = """\
import os, re
from setuptools import find_packages, setup
here = os.path.dirname(os.path.abspath(__file__))
def read(name):
    with open(os.path.join(here, name)) as file:
        return file.read()
setup(
    name="liby",
    version=read("VERSION").strip(),
    long_description=read("README.md"),
    install_requires=[line for line in read("requirements.txt").splitlines() if line],
    packages=find_packages(include=["liby*"]),
    package_data={"liby": ["data/*.json"]},
)
"""
GIT = "git -c user.name=a -c user.email=a@example.org -c init.defaultBranch=main"


def setuptools_package(directory: str, name: str = "liby") -> dict[str, str | Wheel | Link]:
    """Setup.py and setup.cfg, a version, a text and requirements in files, data, and a subfolder named build."""
    return {
        f"{directory}/setup.py": SETUP_PY.replace("liby", name),
        f"{directory}/setup.cfg": "[metadata]\ndescription = file: SUMMARY\n",
        f"{directory}/SUMMARY": "of the package\n",
        f"{directory}/VERSION": "1.0\n",
        f"{directory}/README.md": "long\n",
        f"{directory}/requirements.txt": "",
        f"{directory}/{name}/__init__.py": "V = 1\n",
        f"{directory}/{name}/build/__init__.py": "B = 1\n",
        f"{directory}/{name}/data/table.json": "{}\n",
        f"{directory}/tests/test_it.py": "def test_it(): pass\n",
    }


def backend_package(directory: str, name: str, requires: str, backend: str, more: str = "") -> dict[str, str]:
    """A package with a pyproject.toml."""
    return {
        f"{directory}/pyproject.toml": f'[build-system]\nrequires = ["{requires}"]\nbuild-backend = "{backend}"\n'
        f'[project]\nname = "{name}"\nversion = "1.0"\nreadme = "README.md"\ndescription = "it"\n{more}',
        f"{directory}/README.md": "long\n",
        f"{directory}/{name}/__init__.py": '"""It."""\nV = 1\n',
        f"{directory}/tests/test_it.py": "def test_it(): pass\n",
    }


def repository(directory: str) -> tuple[str, ...]:
    """Makes a folder with a package a git repository."""
    return (f"cd {directory} && {GIT} init -q && git add -A && {GIT} commit -qm one",)


def layouts() -> Iterator[Layout]:
    """All of them."""
    for tool in PIPS:
        yield requirements(tool)
        yield plain(tool)
    for tool in (PIPS[0], PIPS[3]):
        yield packages(tool)
        yield archives(tool)
    for tool in PIPS[1:3]:
        yield shells(tool)
    yield groups(PIPS[2])
    yield groups(PIPS[3])
    yield pylock(PIPS[3])
    yield git(PIPS[0])
    yield git(PIPS[3])
    yield pip_tools()


def requirements(tool: str) -> Layout:
    """One file of requirements and all that it leads to."""
    return Layout(
        name=f"{tool}: requirements.txt and what it names",
        tool=tool,
        commands=("pip install -r requirements.txt",),
        files={
            "requirements.txt": "-r nested/base.txt\n-c constraints.txt\nbeta==1.0\n"
            "./own/delta-1.0-py3-none-any.whl\n",
            "nested/base.txt": "-r more/more.txt\nalpha==1.0\n",
            "nested/more/more.txt": "eps>=1\n",
            "constraints.txt": "zeta<2\n",
            "users.txt": "eps<3\n",
            "other-users.txt": "eps<2\n",
            "conf/pip.conf": "[global]\nno-index = true\nfind-links = wheels\n",
            "conf/other.conf": "[global]\nno-index = true\nfind-links = wheels\npre = true\n",
            "train.py": TRAIN,
            "wheels/notes.txt": "of these wheels\n",
            **wheels("wheels", Wheel("alpha"), Wheel("beta", requires=("zeta",)), Wheel("eps"), Wheel("zeta")),
            **wheels("own", Wheel("delta")),
        },
        environ={"PIP_CONFIG_FILE": "conf/pip.conf", "PIP_CONSTRAINT": "users.txt"},
        changed=[
            edit("a version in requirements.txt", "requirements.txt", "beta==1.0", "beta>=1.0"),
            edit("a requirement in a file that it names", "nested/base.txt", "alpha==1.0", "alpha"),
            edit("a requirement in a file that this one names", "nested/more/more.txt", "eps>=1", "eps>=1,<4"),
            edit("a constraint", "constraints.txt", "zeta<2", "zeta<3"),
            edit("a constraint of PIP_CONSTRAINT", "users.txt", "eps<3", "eps<4"),
            variable("PIP_CONSTRAINT names another file", "PIP_CONSTRAINT", "other-users.txt"),
            variable("PIP_CONSTRAINT goes", "PIP_CONSTRAINT", None),
            edit("pip.conf of PIP_CONFIG_FILE", "conf/pip.conf", "no-index = true", "no-index = true\npre = true"),
            variable("PIP_CONFIG_FILE names another file", "PIP_CONFIG_FILE", "conf/other.conf"),
            add("a pip.conf of the user appears", "~/.config/pip/pip.conf", "[install]\nno-deps = true\n"),
            add("an older pip.conf of the user appears", "~/.pip/pip.conf", "[install]\nno-deps = true\n"),
            add("a pip.conf in the environment appears", "target:pip.conf", "[install]\nno-deps = true\n"),
            add(
                "a local wheel is another build",
                "own/delta-1.0-py3-none-any.whl",
                Wheel("delta", text="V = 2\n"),
            ),
            add(
                "a wheel of --find-links is another build",
                "wheels/alpha-1.0-py3-none-any.whl",
                Wheel("alpha", text="V = 2\n"),
            ),
            add(
                "a newer wheel in --find-links", "wheels/eps-1.1-py3-none-any.whl", Wheel("eps", "1.1", "V = 2\n")
            ),
            remove("a wheel of --find-links goes", "wheels/zeta-1.0-py3-none-any.whl"),
            variable("PIP_NO_DEPS appears", "PIP_NO_DEPS", "1"),
            variable("PIP_PRE appears", "PIP_PRE", "1"),
            variable("PIP_FIND_LINKS appears", "PIP_FIND_LINKS", "own"),
            commands(
                "a file of requirements becomes a link",
                "mv constraints.txt c0 && echo 'zeta<4' >c1 && ln -s c1 constraints.txt",
                "mv c0 constraints.txt && rm c1",
            ),
        ],
        stayed=[
            edit("the training code", "train.py", "trains", "trains longer"),
            add("a new module", "model.py"),
            add("a checkpoint", "checkpoints/step-10/model.pt"),
            add("a log", "train.log"),
            touch("times", "requirements.txt"),
            chmod("bits for the group", "requirements.txt", 0o020),
            variable("PIP_CACHE_DIR", "PIP_CACHE_DIR", "{work}/../pip-cache"),
            variable("PIP_QUIET", "PIP_QUIET", "1"),
            variable("PIP_TIMEOUT", "PIP_TIMEOUT", "99"),
            variable("a variable of the job", "WANDB_NAME", "second"),
            add("a repository begins", ".git/HEAD", "ref: refs/heads/main\n"),
        ],
        rebuilt=[Rebuilt("a newer wheel in --find-links", "import eps; print(eps.V)", "2")],
    )


def plain(tool: str) -> Layout:
    """What most people have: pinned, from an index or a folder, and nothing of their own."""
    return Layout(
        name=f"{tool}: pinned requirements",
        tool=tool,
        commands=("pip install --no-index --find-links wheels -r requirements.txt",),
        files={
            "requirements.txt": "alpha==1.0\nbeta==1.0\n",
            "train.py": TRAIN,
            "pyproject.toml": '[project]\nname = "job"\nversion = "1"\n',
            **wheels("wheels", Wheel("alpha"), Wheel("beta")),
        },
        changed=[
            edit("a version", "requirements.txt", "beta==1.0", "beta>=1.0"),
            edit("a requirement goes", "requirements.txt", "beta==1.0\n", ""),
            add("another build", "wheels/beta-1.0-py3-none-any.whl", Wheel("beta", text="V = 2\n")),
            add("a pip.conf of the user appears", "~/.config/pip/pip.conf", "[install]\nno-deps = true\n"),
            variable("PIP_CONSTRAINT appears", "PIP_CONSTRAINT", "pyproject.toml"),
        ],
        stayed=[
            edit("the training code", "train.py", "trains", "trains longer"),
            edit("a description that this set-up does not read", "pyproject.toml", '"1"', '"2"'),
            add("a package that nobody installs", "lib/setup.py", SETUP_PY),
        ],
        rebuilt=[Rebuilt("another build", "import beta; print(beta.V)", "2")],
    )


def packages(tool: str) -> Layout:
    """Packages of the user's own, of five build backends, one of them in place."""
    return Layout(
        name=f"{tool}: local packages of five backends",
        tool=tool,
        commands=(
            f"pip install {OFFLINE} ./libs/liby './libs/libh[more]' ./libs/libf",
            f"pip install {OFFLINE} -r local.txt",
            f"pip install {OFFLINE} --find-links wheels -e libs/libe",
        ),
        files={
            **setuptools_package("libs/liby"),
            **backend_package(
                "libs/libh",
                "libh",
                "hatchling",
                "hatchling.build",
                "[project.optional-dependencies]\nmore = []\n[tool.hatch.build.targets.wheel.force-include]\n"
                '"../shared.json" = "libh/shared.json"\n',
            ),
            "libs/shared.json": "{}\n",
            **backend_package("libs/libf", "libf", "flit_core", "flit_core.buildapi"),
            **backend_package("libs/libp", "libp", "poetry-core", "poetry.core.masonry.api"),
            **backend_package(
                "../beside/libd", "libd", "pdm-backend", "pdm.backend", "[tool.pdm.build]\nincludes = ['libd']\n"
            ),
            **backend_package("libs/libe", "libe", "setuptools", "setuptools.build_meta"),
            "libs/libe/pyproject.toml": '[build-system]\nrequires = ["setuptools"]\n'
            'build-backend = "setuptools.build_meta"\n[project]\nname = "libe"\nversion = "1.0"\n'
            'dependencies = ["alpha"]\n[tool.setuptools]\npackages = ["libe"]\n',
            "local.txt": "./libs/libp\nlibd @ file://{work}/../beside/libd\n",
            "train.py": TRAIN,
            **wheels("wheels", Wheel("alpha")),
        },
        changed=[
            edit("a module (setuptools)", "libs/liby/liby/__init__.py", "V = 1", "V = 2"),
            edit("its subfolder named build", "libs/liby/liby/build/__init__.py", "B = 1", "B = 2"),
            edit("its data", "libs/liby/liby/data/table.json", "{}", "[]"),
            edit("VERSION that setup.py reads", "libs/liby/VERSION", "1.0", "1.1"),
            edit("README.md that setup.py reads", "libs/liby/README.md", "long", "longer"),
            edit("requirements.txt that setup.py reads", "libs/liby/requirements.txt", "", "pluggy\n"),
            edit("SUMMARY that setup.cfg reads", "libs/liby/SUMMARY", "of", "about"),
            edit("setup.cfg", "libs/liby/setup.cfg", "[metadata]", "[metadata]\nauthor = a"),
            edit("setup.py", "libs/liby/setup.py", "version=", "author='a', version="),
            add("a pyproject.toml appears", "libs/liby/pyproject.toml", "[build-system]\nrequires = []\n"),
            add("a MANIFEST.in appears", "libs/liby/MANIFEST.in", "include *.md\n"),
            add("a new module", "libs/liby/liby/more.py"),
            add("a new package", "libs/liby/liby/sub/__init__.py"),
            add("new data", "libs/liby/liby/data/more.json"),
            remove("a module goes", "libs/liby/liby/build"),
            edit("a module (hatchling)", "libs/libh/libh/__init__.py", "V = 1", "V = 2"),
            edit("a file beside that it takes in", "libs/shared.json", "{}", "[]"),
            edit("an extra", "libs/libh/pyproject.toml", "more = []", 'more = ["pluggy"]'),
            add("a new module (hatchling)", "libs/libh/libh/more.py"),
            edit("a module (flit)", "libs/libf/libf/__init__.py", "V = 1", "V = 2"),
            edit("a module (poetry-core)", "libs/libp/libp/__init__.py", "V = 1", "V = 2"),
            edit("README.md (poetry-core)", "libs/libp/README.md", "long", "longer"),
            edit("a module beside the project (pdm-backend)", "../beside/libd/libd/__init__.py", "V = 1", "V = 2"),
            add("a new module there", "../beside/libd/libd/more.py"),
            edit("what is installed in place: dependencies", "libs/libe/pyproject.toml", '"alpha"', '"alpha>=1"'),
        ],
        stayed=[
            edit("the training code", "train.py", "trains", "trains longer"),
            edit("tests of a package (setuptools)", "libs/liby/tests/test_it.py", "pass", "assert 1"),
            edit("tests of a package (flit)", "libs/libf/tests/test_it.py", "pass", "assert 1"),
            edit("a module of what is installed in place", "libs/libe/libe/__init__.py", "V = 1", "V = 2"),
            touch("times of a module", "libs/liby/liby/__init__.py"),
            add("what Python has compiled", "libs/liby/liby/__pycache__/x.cpython-311.pyc"),
        ],
        rebuilt=[
            Rebuilt("a module (setuptools)", "import liby; print(liby.V)", "2"),
            Rebuilt("a module (hatchling)", "import libh; print(libh.V)", "2"),
            Rebuilt("a module beside the project (pdm-backend)", "import libd; print(libd.V)", "2"),
        ],
    )


def archives(tool: str) -> Layout:
    """Archives of sources, by path and in a folder of links."""
    sources = {
        **backend_package("src/eps-1.0", "eps", "flit_core", "flit_core.buildapi"),
        **backend_package("src/theta-1.0", "theta", "flit_core", "flit_core.buildapi"),
    }
    another = "cp {0} ../kept && echo V = 2 >src/{1}-1.0/{1}/__init__.py && tar -C src -czf {0} {1}-1.0"
    links, own = "links/eps-1.0.tar.gz", "own/theta-1.0.tar.gz"
    return Layout(
        name=f"{tool}: archives of sources",
        tool=tool,
        commands=(f"pip install {OFFLINE} --find-links links eps==1.0 ./own/theta-1.0.tar.gz",),
        files={**sources, "links/notes.txt": "", "own/notes.txt": "", "train.py": TRAIN},
        before=(f"tar -C src -czf {links} eps-1.0 && tar -C src -czf {own} theta-1.0",),
        changed=[
            commands("an archive of --find-links", another.format(links, "eps"), f"mv ../kept {links}"),
            commands("an archive by path", another.format(own, "theta"), f"mv ../kept {own}"),
        ],
        stayed=[
            edit("the training code", "train.py", "trains", "trains longer"),
            edit("sources beside the archive", "src/eps-1.0/README.md", "long", "longer"),
        ],
        rebuilt=[
            Rebuilt("an archive of --find-links", "import eps; print(eps.V)", "2"),
            Rebuilt("an archive by path", "import theta; print(theta.V)", "2"),
        ],
    )


def shells(tool: str) -> Layout:
    """Commands from which no text tells what is read."""
    offline = "--no-index --find-links {work}/wheels"
    return Layout(
        name=f"{tool}: shells, scripts, make",
        tool=tool,
        commands=(
            f"(cd a && pip install {offline} -r list.txt) && pip install {offline} -r r.txt",
            f'cd b && pip install {offline} -r "$PWD"/list.txt && cd "$OLDPWD"',
            f"bash -c 'set -e; cd c; pip install {offline} $(cat list.txt)'",
            "sh scripts/setup.sh",
            "make -s -C tools deps",
            "python scripts/install.py",
            f"xargs pip install {offline} < x.txt",
        ),
        files={
            "a/list.txt": "alpha==1.0\n",
            "r.txt": "beta==1.0\n",
            "b/list.txt": "gamma==1.0\n",
            "c/list.txt": "delta==1.0\n",
            "x.txt": "iota==1.0\n",
            "scripts/setup.sh": '#!/bin/sh\nset -e\nhere=$(dirname "$0")\n. "$here/versions.env"\n'
            '[ -f "$here/site.env" ] && . "$here/site.env"\n'
            f"pip install {offline} eps==$EPS\n",
            "scripts/versions.env": "EPS=1.0\n",
            "scripts/install.py": "import json, os, subprocess, sys\n"
            "here = os.path.dirname(os.path.abspath(__file__))\n"
            "wanted = json.load(open(os.path.join(here, 'wanted.json')))\n"
            "subprocess.check_call([sys.executable, '-m', 'pip', 'install', '--no-index', '--find-links',\n"
            "    os.path.join(here, '..', 'wheels'), *wanted])\n",
            "scripts/wanted.json": '["theta==1.0"]\n',
            "tools/Makefile": "include ../deps.mk\n-include local.mk\n"
            f"deps:\n\tpip install {offline} zeta==$(ZETA)\n",
            "deps.mk": "ZETA = 1.0\n",
            "train.py": TRAIN,
            "notes.md": "of the set-up\n",
            "scripts/train.sh": "#!/bin/sh\ntrue\n",
            **wheels(
                "wheels",
                *map(Wheel, ("alpha", "beta", "gamma", "delta", "eps", "zeta", "theta", "iota")),
                Wheel("eps", "2.0"),
            ),
        },
        changed=[
            edit("requirements in a subshell's folder", "a/list.txt", "==", ">="),
            edit("requirements after a subshell", "r.txt", "==", ">="),
            edit('requirements by "$PWD" after cd', "b/list.txt", "==", ">="),
            edit("a list that a shell reads by cat", "c/list.txt", "==", ">="),
            edit("a list as standard input", "x.txt", "==", ">="),
            edit("a script", "scripts/setup.sh", "set -e", "set -eu"),
            edit("versions that a script sources", "scripts/versions.env", "1.0", "2.0"),
            add("a file that a script looks for", "scripts/site.env", "EPS=2.0\n"),
            edit("a program", "scripts/install.py", "import json", "import  json"),
            edit("a list that a program reads", "scripts/wanted.json", "==", ">="),
            edit("a Makefile", "tools/Makefile", "zeta", "-U zeta"),
            edit("what a Makefile includes", "deps.mk", "1.0", "1"),
            add("what a Makefile would include", "tools/local.mk", "ZETA = 1\n"),
        ],
        stayed=[
            edit("the training code", "train.py", "trains", "trains longer"),
            edit("notes", "notes.md", "of", "about"),
            edit("a script that set-up does not run", "scripts/train.sh", "true", "false"),
            add("a new script", "scripts/eval.sh", "#!/bin/sh\n"),
        ],
        rebuilt=[
            Rebuilt(
                "versions that a script sources",
                'import importlib.metadata as m; print(m.version("eps"))',
                "2.0",
            )
        ],
    )


def groups(tool: str) -> Layout:
    """Dependency groups, one in another, one of another file."""
    return Layout(
        name=f"{tool}: dependency groups",
        tool=tool,
        commands=("pip install --no-index --find-links wheels --group dev --group sub/pyproject.toml:test",),
        files={
            "pyproject.toml": '[dependency-groups]\nbase = ["alpha"]\n'
            'dev = ["beta", {include-group = "base"}]\nother = ["delta"]\n',
            "sub/pyproject.toml": '[dependency-groups]\ntest = ["gamma"]\n',
            "train.py": TRAIN,
            **wheels("wheels", *map(Wheel, ("alpha", "beta", "gamma", "delta"))),
        },
        changed=[
            edit("a group", "pyproject.toml", '"beta"', '"beta>=1"'),
            edit("a group in it", "pyproject.toml", '"alpha"', '"alpha>=1"'),
            edit("a group of another file", "sub/pyproject.toml", '"gamma"', '"gamma>=1"'),
        ],
        stayed=[edit("the training code", "train.py", "trains", "trains longer")],
    )


def pylock(tool: str) -> Layout:
    """A lock of PEP 751: a folder, an archive and a wheel by path."""
    return Layout(
        name=f"{tool}: pylock.toml",
        tool=tool,
        commands=(f"pip install {OFFLINE} -r pylock.toml", f"pip install {OFFLINE} -r locks/pylock.own.toml"),
        files={
            "pylock.toml": LOCK_HEAD + LOCKED_DIRECTORY,
            "locks/pylock.own.toml": LOCK_HEAD + LOCKED_WHEEL.replace("own/", "../own/"),
            **setuptools_package("libs/liby"),
            **wheels("own", Wheel("delta")),
            "train.py": TRAIN,
        },
        before=(LOCK_WHEEL.replace("pylock.toml", "locks/pylock.own.toml"),),
        changed=[
            edit("a module of the folder", "libs/liby/liby/__init__.py", "V = 1", "V = 2"),
            edit("VERSION of the folder", "libs/liby/VERSION", "1.0", "1.1"),
            add("the wheel", "own/delta-1.0-py3-none-any.whl", Wheel("delta", text="V = 2\n")),
            edit("the lock", "pylock.toml", 'created-by = "own"', 'created-by = "me"'),
        ],
        stayed=[
            edit("the training code", "train.py", "trains", "trains longer"),
            edit("tests of the folder", "libs/liby/tests/test_it.py", "pass", "assert 1"),
        ],
        rebuilt=[Rebuilt("a module of the folder", "import liby; print(liby.V)", "2")],
    )


LOCK_HEAD = 'lock-version = "1.0"\ncreated-by = "own"\n'
LOCKED_DIRECTORY = '[[packages]]\nname = "liby"\n[packages.directory]\npath = "libs/liby"\n'
LOCKED_WHEEL = """\
[[packages]]
name = "delta"
version = "1.0"
[[packages.wheels]]
name = "delta-1.0-py3-none-any.whl"
path = "own/delta-1.0-py3-none-any.whl"
[packages.wheels.hashes]
sha256 = "SUM"
"""
PYLOCK = LOCK_HEAD + LOCKED_DIRECTORY + LOCKED_WHEEL
LOCK_WHEEL = "sed -i s/SUM/$(sha256sum own/delta-1.0-py3-none-any.whl | cut -c-64)/ pylock.toml"


def git(tool: str) -> Layout:
    """Packages of repositories on this machine: by branch, by tag, by commit, and a version that git gives."""
    return Layout(
        name=f"{tool}: git repositories",
        tool=tool,
        commands=(
            f"pip install {OFFLINE} git+file://{{work}}/../repos/libg@main",
            f"pip install {OFFLINE} git+file://{{work}}/../repos/libt@v1",
            f"pip install {OFFLINE} git+file://{{work}}/repos/libi@main",
        ),
        files={
            **setuptools_package("../repos/libg", "libg"),
            **setuptools_package("../repos/libt", "libt"),
            **setuptools_package("repos/libi", "libi"),
            "train.py": TRAIN,
        },
        before=(
            *repository("../repos/libg"),
            *repository("../repos/libt"),
            "git -C ../repos/libt tag v1",
            *repository("repos/libi"),
        ),
        changed=[
            commands(
                "a commit on the branch",
                f"cd ../repos/libg && echo V = 2 >libg/__init__.py && {GIT} commit -qam two",
                "git -C ../repos/libg reset -q --hard HEAD~",
            ),
            commands(
                "the tag moves",
                f"cd ../repos/libt && echo V = 2 >libt/__init__.py && {GIT} commit -qam two && git tag -f v1",
                "cd ../repos/libt && git reset -q --hard HEAD~ && git tag -f v1",
            ),
            commands(
                "a commit on the branch of a repository in the project",
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


def pip_tools() -> Layout:
    """Compiled and synchronised in one set-up."""
    python = "--python-executable {target}/bin/python"
    offline = "--no-index --find-links {work}/wheels"
    return Layout(
        name=f"{PIP_TOOLS}: pip-compile, pip-sync",
        tool=PIP_TOOLS,
        commands=(
            f"pip-compile -q {offline} -o {{target}}/compiled.txt requirements.in",
            f"pip-sync {offline} {python} requirements.txt",
        ),
        files={
            "requirements.in": "-c constraints.txt\nalpha\n",
            "requirements.txt": "alpha==1.0\n",
            "constraints.txt": "alpha<3\n",
            "train.py": TRAIN,
            **wheels("wheels", Wheel("alpha")),
        },
        changed=[
            edit("requirements.in", "requirements.in", "alpha", "alpha>=1"),
            edit("a constraint", "constraints.txt", "<3", "<4"),
            edit("requirements.txt", "requirements.txt", "==1.0", ">=1.0"),
            add("a newer wheel", "wheels/alpha-1.1-py3-none-any.whl", Wheel("alpha", "1.1")),
        ],
        stayed=[edit("the training code", "train.py", "trains", "trains longer")],
    )
