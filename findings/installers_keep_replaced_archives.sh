#!/bin/bash
# A local archive is replaced by another build of the same name and version: pip and uv install the one of before.
# Seen with pip 26.3: what was built of `links/eps-1.0.tar.gz` (--find-links) is kept by its file:// URL alone.
# Seen with uv 0.13.9: a wheel of --find-links is kept by folder and file name; time, size and content are not looked at.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv tools
tools/bin/pip install --quiet --disable-pip-version-check pip==26.3 uv==0.13.9
tools/bin/pip download --quiet --no-deps --dest links flit_core==4.2.0
python3 -m venv --without-pip target
export PIP_CACHE_DIR="$folder/pip" UV_CACHE_DIR="$folder/uv" PIP_NO_INDEX=1 PIP_DISABLE_PIP_VERSION_CHECK=1
unset PIP_FIND_LINKS PIP_NO_CACHE_DIR
mkdir -p eps-1.0/eps wheels
printf '[build-system]\nrequires = ["flit_core"]\nbuild-backend = "flit_core.buildapi"\n[project]\nname = "eps"\nversion = "1.0"\ndescription = "it"\n' >eps-1.0/pyproject.toml
build() {  # N: the archive and the wheel say V = N
    echo "V = $1" >eps-1.0/eps/__init__.py
    tar -czf links/eps-1.0.tar.gz eps-1.0
    tools/bin/pip wheel --quiet --no-deps --no-cache-dir --find-links links --wheel-dir wheels ./eps-1.0
}
by_pip() {
    tools/bin/pip --python target/bin/python install --quiet --force-reinstall --find-links links eps==1.0
    target/bin/python -c 'import eps; print(eps.V)'
}
by_uv() {
    tools/bin/uv pip uninstall --quiet --python target/bin/python eps
    tools/bin/uv pip install --quiet --python target/bin/python --no-index --find-links wheels eps
    target/bin/python -c 'import eps; print(eps.V)'
}
tools/bin/pip --version
tools/bin/uv --version
build 1
by_pip >/dev/null
by_uv >/dev/null
build 2
pip=$(by_pip) uv=$(by_uv)
echo "replaced by V = 2; installed by pip: V = $pip; by uv: V = $uv"
[ "$pip" = 1 ] && [ "$uv" = 1 ]
