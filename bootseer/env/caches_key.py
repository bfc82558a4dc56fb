"""The key of first-step caches: what has to be the same so that compiled code of one start may run in another.

Coarse on purpose, since the frameworks check inputs, options and their own versions themselves: a miss of ours
costs everything, a file too much a few bytes. Never the model: all models of a stack share one cache. What the
frameworks do not check is in it: inductor builds with `-march=native`, so a library of a CPU with more
instructions would end a rank by SIGILL.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from bootseer.env.inside import HERE, Inside
from bootseer.errors import ConfigError

FORMAT = "bootseer-caches-key/1"
PROBE_S = 60.0
_MOST_PROBE_BYTES = 1 << 20
# Flags of /proc/cpuinfo that are no instructions a compiler emits: the kernel's own words, the state of
# mitigations, clocks, power, virtual machines. They differ between nodes of one type. A flag that is not known
# here counts.
_NO_INSTRUCTIONS = re.compile(
    r"(?:constant|nonstop)_tsc|tsc(?:_\w+)?|rep_good|nopl|xtopology|cpuid(?:_fault)?|pti|ss?bd?|ssbd|l?ibrs\w*|ibpb\w*"
    r"|stibp\w*|retp\w*|rrsba\w*|bhi\w*|amd_(?:ib|ss|st|lbr|ppin)\w*|virt_ssbd|md_clear|flush_l1d|arch_capabilities"
    r"|hypervisor|vmmcall|svm\w*|vmx|smx|ept\w*|vpid|vnmi|flexpriority|tpr_shadow|npt|lbrv|nrip_save|vgif|v_\w+"
    r"|avic|x2avic|vmcb_clean|flushbyasid|decodeassists|pausefilter|pfthreshold|tsc_scale|vaes_emu|ap[ie]\w*f|apic"
    r"|extapic|x2apic|arat|a?perf\w*|epb|dtherm|ida|pln|pts|hwp\w*|hfi|ibt|user_shstk|acc_power|cppc|cpb|hw_pstate"
    r"|proc_feedback|dts|acpi|tm2?|pbe|est|ds_cpl|dtes64|monitor|pdcm|dca|xtpr|pcid|invpcid\w*|smep|smap|umip|erms"
    r"|fsrm|ht|cmp_legacy|topoext|nodeid_msr|wdt|skinit|osvw|ibs|mce|mca|vme|de|pse(?:36)?|pae|pat|pge|mtrr|sep|nx"
    r"|pdpe1gb|lm|cr8_legacy|art|arch_perfmon|pebs|bts|intel_pt|cat_l[23]|cdp_l[23]|rdt_a|mba|cqm\w*|smba|bmec"
    r"|split_lock_detect|bus_lock_detect|tme|pconfig|sme|sev\w*|debug_swap|succor|overflow_recov|smca|fsrs|fzrm"
    r"|mp|nfit|perfmon_v2|brs|extd_apicid|aperfmperf|xsaves_\w+|misalignsse_\w+|la57|pku|ospke|irperf|stepping\w*"
)
_DISTRIBUTIONS = (
    *("torch", "triton", "pytorch-triton", "pytorch-triton-rocm", "triton-nightly", "jax", "jaxlib"),
    *("jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin", "numba", "llvmlite", "nvidia-cutlass-dsl"),
)
# In the interpreter of the ranks, which may be any Python 3 from 3.8 on. Nothing heavy is imported, and nothing at
# all from the working folder ("" of -c): before the first import that has to go.
_PROBE = """
import sys
sys.path[:] = [each for each in sys.path if each]
import importlib.metadata, importlib.util, json, os, platform, re
python = (platform.python_implementation(), platform.python_version(), getattr(sys, "abiflags", ""))
found = {"python": "%s-%s%s" % python, "libc": "-".join(platform.libc_ver()), "machine": platform.machine()}
for name in sys.argv[1:]:
    try:
        found["dist:" + name] = importlib.metadata.version(name)
    except Exception:
        pass
try:
    place = os.path.join(os.path.dirname(importlib.util.find_spec("torch").origin), "version.py")
    with open(place, encoding="utf-8") as file:
        text = file.read(65536)
    for name in ("git_version", "cuda", "hip", "xpu"):
        value = re.search(r"^%s\\b[^=\\n]*= *['\\"]([^'\\"]*)" % name, text, re.M)
        if value:
            found["torch." + name] = value.group(1)
except Exception:
    pass
print(json.dumps(found))
"""


class CachesDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the key is made of; in clear, so that a miss can be explained."""

    format: str = FORMAT
    software: dict[str, str]  # the interpreter and the frameworks in it
    compilers: dict[str, str]  # "c++", "nvcc": what they say they are
    accelerators: list[str]  # models, each once, sorted
    driver: str
    cpu: list[str]  # instructions, sorted
    salt: str


class KeyedCaches(NamedTuple):
    """A key and what it stands for."""

    document: CachesDocument
    key: str  # 64 hex digits


def key_of(document: CachesDocument) -> str:
    """PURE: the SHA-256 of the canonical JSON, in hex."""
    table = msgspec.to_builtins(document)
    text = json.dumps(table, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()


def make_key(python: str, environ: Mapping[str, str], salt: str = "", inside: Inside = HERE) -> KeyedCaches:
    """The key for ranks that run `python` (an absolute path) with these variables on this node, or in an image.

    Raises: ConfigError when that interpreter cannot be run.
    """
    driver, accelerators = read_accelerators()
    document = CachesDocument(
        software=probe(python, environ, inside),
        compilers=read_compilers(environ, inside),
        accelerators=accelerators,
        driver=driver,
        cpu=instructions(_read("/proc/cpuinfo")),
        salt=salt,
    )
    return KeyedCaches(document, key_of(document))


def probe(python: str, environ: Mapping[str, str], inside: Inside = HERE) -> dict[str, str]:
    """Versions of the interpreter and of the frameworks that it would import. Raises: ConfigError."""
    words = inside.words([python, "-c", _PROBE, *_DISTRIBUTIONS])
    try:
        done = subprocess.run(
            words, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_S, check=False
        )
        found = msgspec.json.decode(done.stdout[:_MOST_PROBE_BYTES].strip(), type=dict[str, str])
    except (OSError, subprocess.TimeoutExpired, msgspec.MsgspecError, UnicodeError) as error:
        raise ConfigError(
            f"{python}: does not say its version, so it has no first-step caches: {error}"
        ) from error
    if done.returncode:
        raise ConfigError(f"{python}: ended with status {done.returncode} when it was asked for its version")
    return found


def instructions(cpuinfo: str) -> list[str]:
    """PURE: what the first processor of /proc/cpuinfo can do that a compiler may use, sorted."""
    found = re.search(r"^(?:flags|Features|isa)[ \t]*:[ \t]*(.*)$", cpuinfo, re.MULTILINE)
    if found is None:
        return [platform.machine()]
    return sorted({flag for flag in found[1].split() if _NO_INSTRUCTIONS.fullmatch(flag) is None})


def read_compilers(environ: Mapping[str, str], inside: Inside = HERE) -> dict[str, str]:
    """What the compilers are that extensions and inductor would run; those that are there."""
    found = {}
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH") or "/usr/local/cuda"
    for name, program in (("c++", environ.get("CXX") or "c++"), ("nvcc", os.path.join(home, "bin", "nvcc"))):
        words = inside.words([program, "--version"])
        try:
            done = subprocess.run(
                words, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired, ValueError):
            continue
        if done.returncode:
            continue  # it is not there, in an image
        lines = done.stdout.decode(errors="replace").strip().splitlines()
        if lines:
            found[name] = lines[-1 if name == "nvcc" else 0].strip()[:200]
    return found


def read_accelerators(root: str = "/") -> tuple[str, list[str]]:
    """The driver's version and the models of accelerators, "" and none without. Asks files, no library."""
    models = set()
    for folder in _listed(os.path.join(root, "proc/driver/nvidia/gpus")):
        found = re.search(r"^Model:[ \t]*(.+)$", _read(os.path.join(folder, "information")), re.MULTILINE)
        if found:
            models.add(found[1].strip()[:200])
    driver = ""
    version = re.search(
        r"Kernel Module.*?([0-9]+(?:\.[0-9]+)+)", _read(os.path.join(root, "proc/driver/nvidia/version"))
    )
    if version:
        driver = f"nvidia {version[1]}"
    for folder in _listed(os.path.join(root, "sys/class/kfd/kfd/topology/nodes")):
        target = re.search(
            r"^gfx_target_version ([1-9][0-9]*)$", _read(os.path.join(folder, "properties")), re.MULTILINE
        )
        if target:
            models.add(f"amdgpu gfx {target[1]}")
    amd = _read(os.path.join(root, "sys/module/amdgpu/version")).strip()
    if amd and not driver:
        driver = f"amdgpu {amd[:100]}"
    return driver, sorted(models)


def read_node_type(root: str = "/") -> str:
    """A digest of which accelerators and network cards are where on this node's buses; "" without an accelerator.

    NCCL's topology holds their addresses: it is that of nodes with this very layout.
    """
    rows = []
    has_accelerator = False
    for folder in _listed(os.path.join(root, "sys/bus/pci/devices")):
        kind = _read(os.path.join(folder, "class")).strip()
        if not kind.startswith(("0x03", "0x02", "0x12")):
            continue
        has_accelerator = has_accelerator or kind.startswith(("0x0302", "0x12"))
        facts = [_read(os.path.join(folder, name)).strip() for name in ("vendor", "device", "numa_node")]
        rows.append([os.path.basename(folder), kind, *facts])
    if not has_accelerator:
        return ""
    return hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest()[:16]


def _listed(folder: str) -> Iterable[str]:
    try:
        return [os.path.join(folder, name) for name in sorted(os.listdir(folder))]
    except OSError:
        return []


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 20)
    except OSError:
        return ""
