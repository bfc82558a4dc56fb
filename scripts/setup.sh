#!/bin/bash
# setup.sh [demo|man|docs]: makes .venv with everything that tests and benches need, or with what `make demo`,
# `make man` or `make docs` needs; `make` calls it when pyproject.toml has changed.
# For tests, as root, it also installs the system packages that are missing, by apt; else it says what is left out and
# why. With CI=true a tool that is missing in the end is an error.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
python=${PYTHON:-python3}
what=${1:-test} ready=.ready
case $what in
    test) ;;
    demo | man | docs) ready=.ready-$what ;;
    *) echo "setup: $what: say nothing, demo, man or docs" >&2; exit 2 ;;
esac

say() { echo "setup: $*" >&2; }
die() { say "$*"; exit 1; }

apt_updated=
apt_install() {  # what apt says is shown if it fails
    local said
    if [ -z "$apt_updated" ]; then
        said=$(apt-get update -qq 2>&1) || echo "$said" >&2
        apt_updated=yes
    fi
    said=$(DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" 2>&1) && return
    echo "$said" >&2
    return 1
}
can_install() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

# ---- system tools: command and the Debian package that has it, one a line ------------------------------------
tools='ip iproute2
tc iproute2
unshare util-linux
nsenter util-linux
mount mount
hostname hostname
ps procps
git git
fusermount3 fuse3
losetup mount
mkfs.ext4 e2fsprogs
zstd zstd
c++ g++
nginx nginx-light
fsck.erofs erofs-utils
mkfs.erofs erofs-utils
setpriv util-linux
fincore util-linux-extra
ssh-keygen openssh-client
docker-registry docker-registry
skopeo skopeo
runc runc
chromium chromium
java default-jdk-headless
javac default-jdk-headless'
[ "$what" = test ] || tools=
missing=() packages=()
while read -r tool package; do
    if [ -n "$tool" ] && ! command -v "$tool" >/dev/null; then
        missing+=("$tool")
        packages+=("$package")
    fi
done <<<"$tools"
if [ ${#missing[@]} -gt 0 ] && can_install; then
    say "installing $(printf '%s\n' "${packages[@]}" | sort -u | tr '\n' ' ')"
    RUNLEVEL=1 apt_install "${packages[@]}" || say "apt-get could not install them"  # 1: no service is started
    case " ${packages[*]} " in
        *" docker-registry "*) update-rc.d docker-registry disable >/dev/null 2>&1 || true ;;  # only tests start it
    esac
    still=()
    for tool in "${missing[@]}"; do command -v "$tool" >/dev/null || still+=("$tool"); done
    missing=("${still[@]}")
fi
if [ ${#missing[@]} -gt 0 ]; then
    why="not root, so nothing can be installed"
    can_install && why="apt-get could not install them"
    [ "$(id -u)" = 0 ] && ! command -v apt-get >/dev/null && why="there is no apt-get"
    [ "${CI:-}" = true ] && die "missing: ${missing[*]} ($why); with CI=true that is an error"
    say "missing: ${missing[*]} ($why): tests that need them are skipped"
fi

# ---- Python ----------------------------------------------------------------------------------------------------
command -v "$python" >/dev/null || die "$python was not found: Python 3.11 or newer is needed"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "$python is $("$python" -V 2>&1): Python 3.11 or newer is needed (name another with PYTHON=...)"
if ! "$venv/bin/python" -c pass 2>/dev/null; then
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
        can_install || die "$python cannot make virtual environments: as root, apt-get install $package"
        say "installing $package"
        apt_install "$package"
    fi
    say "making $venv"
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi
# torch.compile builds against the headers of the interpreter, which distributions have in a package of their own.
if [ "$what" = test ] && ! "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'; then
    package=$("$python" -c 'import sys; print("python%d.%d-dev" % sys.version_info[:2])')
    if can_install && apt_install "$package"; then
        say "installed $package"
    else
        [ "${CI:-}" = true ] && die "Python.h of $python is missing ($package); with CI=true that is an error"
        say "Python.h of $python is missing ($package): tests that compile fail"
    fi
fi
case $what in
    test) say "installing what tests and benches need into $venv, torch among it: some minutes (5 GB with CUDA)" ;;
    demo) say "installing torch and what else the demo needs into $venv: some minutes (5 GB with CUDA)" ;;
    man) say "installing what makes man pages into $venv" ;;
    docs) say "installing what makes the site into $venv" ;;
esac
# Commands that older ones write import re: 4 ms of each start.
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.2'
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile -e ".[$what]"
# The accessibility checks of pages: axe-core is a file in it. What it would be driven by (playwright) is not needed.
if [ "$what" = test ]; then
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --no-deps axe-playwright-python==0.1.8
fi
# pip would compile one file after the other; some packages have templates that are no Python.
"$venv/bin/python" -m compileall -q -q -j 0 "$venv/lib" || true
touch "$venv/$ready"
