"""Images as OCI layout folders, made by hand, for skopeo to push: what others' tools write, not ours."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.testing.registry import RegistryServer

SKOPEO = shutil.which("skopeo")
OCI = "application/vnd.oci.image"
Layer = Mapping[str, bytes | None]  # path -> content, None: a folder


def make_layout(directory: Path, images: Mapping[str, Sequence[Layer]]) -> None:
    """One image for each architecture, in one index with the tag `v1`."""
    blobs = directory / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def put(data: bytes, media_type: str, **more: Any) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data), **more}

    manifests = []
    for architecture, layers in images.items():
        tars = [make_tar(layer) for layer in layers]
        config = {
            "architecture": architecture,
            "os": "linux",
            "config": {"Env": ["PATH=/bin"], "Entrypoint": ["/bin/sh"]},
            "rootfs": {
                "type": "layers",
                "diff_ids": [f"sha256:{hashlib.sha256(tar).hexdigest()}" for tar in tars],
            },
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{OCI}.manifest.v1+json",
            "config": put(json.dumps(config).encode(), f"{OCI}.config.v1+json"),
            "layers": [put(gzip.compress(tar, mtime=0), f"{OCI}.layer.v1.tar+gzip") for tar in tars],
        }
        platform = {"os": "linux", "architecture": architecture}
        manifests.append(put(json.dumps(manifest).encode(), f"{OCI}.manifest.v1+json", platform=platform))
    top = manifests[0]
    if len(manifests) > 1:
        index = {"schemaVersion": 2, "mediaType": f"{OCI}.index.v1+json", "manifests": manifests}
        top = put(json.dumps(index).encode(), f"{OCI}.index.v1+json")
    top["annotations"] = {"org.opencontainers.image.ref.name": "v1"}
    (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (directory / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [top]}))


def make_tar(layer: Layer) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, content in layer.items():
            info = tarfile.TarInfo(path)
            info.mtime = 1_700_000_000
            if content is None:
                info.type, info.mode = tarfile.DIRTYPE, 0o755
            else:
                info.size, info.mode = len(content), 0o644
            tar.addfile(info, io.BytesIO(content or b""))
    return buffer.getvalue()


def skopeo(registry: RegistryServer, directory: Path, *args: str | os.PathLike[str]) -> str:
    """Runs skopeo, which knows the registry's password and authority; `REGISTRY` is its place in arguments."""
    assert SKOPEO is not None
    certs = directory / "certs"
    certs.mkdir(exist_ok=True)
    if registry.certificates is not None:
        shutil.copy(registry.certificates.ca, certs / "ca.crt")
    environ = {
        **os.environ, "TMPDIR": str(directory), "REGISTRY_AUTH_FILE": registry.auth_file, "HOME": str(directory),
        "XDG_RUNTIME_DIR": str(directory),
    }  # fmt: skip
    where = ["--cert-dir", str(certs)] if args[0] == "inspect" else []
    if args[0] == "copy":
        where = ["--dest-cert-dir", str(certs), "--src-cert-dir", str(certs)]
    argv = [SKOPEO, "--insecure-policy", args[0], *where, *args[1:]]
    argv = [str(arg).replace("REGISTRY", registry.host) for arg in argv]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout
