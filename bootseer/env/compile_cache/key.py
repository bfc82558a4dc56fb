"""The key of compile caches: the facts that must be equal to run code compiled in one start in another one.

It is coarse on purpose, as the frameworks check inputs, options and their own versions themselves. A needless miss
costs all caches, a needless file a few bytes. The model is not in it: all models of a stack share one cache. It
contains the facts that the frameworks do not check. For example, inductor builds with `-march=native`, so a
library for a CPU with more instructions would end a rank by SIGILL.
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

from bootseer.env.exec_place import HERE, ExecPlace
from bootseer.errors import ConfigError
from bootseer.linux.cgroups import read_text
from bootseer.linux.child_processes import run_limited

FORMAT = "bootseer-caches-key/1"
PROBE_S = 60.0
_MAX_PROBE_BYTES = 1 << 20
# Flags of /proc/cpuinfo that are not instructions a compiler emits: flags of the kernel, of mitigations, clocks,
# power, virtual machines. They differ between nodes of one type. All other flags count.
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
# Runs in the interpreter of the ranks, any Python from 3.8 on. It imports no heavy module, and none from the
# working directory ("" of -c), which it removes from the path before the first import.
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
    """The inputs of the key, in plain text, so that a miss can be explained."""

    format: str = FORMAT
    software: dict[str, str]  # the interpreter and the frameworks in it
    compilers: dict[str, str]  # "c++", "nvcc": their version lines
    accelerators: list[str]  # models, each once, sorted
    driver: str
    cpu: list[str]  # instructions, sorted
    salt: str


class KeyedCaches(NamedTuple):
    document: CachesDocument
    key: str  # 64 hex digits


def key_of(document: CachesDocument) -> str:
    """PURE: return the SHA-256 of the canonical JSON, in hex."""
    table = msgspec.to_builtins(document)
    text = json.dumps(table, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()


def make_key(python: str, environ: Mapping[str, str], salt: str = "", inside: ExecPlace = HERE) -> KeyedCaches:
    """Return the key for ranks that run `python` (an absolute path) on this node, or in an image.

    Raises: ConfigError if that interpreter cannot be run.
    """
    driver, accelerators = read_accelerators()
    document = CachesDocument(
        software=probe(python, environ, inside),
        compilers=read_compilers(environ, inside),
        accelerators=accelerators,
        driver=driver,
        cpu=instructions(read_text("/proc/cpuinfo")),
        salt=salt,
    )
    return KeyedCaches(document, key_of(document))


def probe(python: str, environ: Mapping[str, str], inside: ExecPlace = HERE) -> dict[str, str]:
    """Return versions of the interpreter and of the frameworks that it would import. Raises: ConfigError."""
    words = inside.words([python, "-c", _PROBE, *_DISTRIBUTIONS])
    try:
        done = run_limited(words, timeout_s=PROBE_S, environ=environ)
        found = msgspec.json.decode(done.stdout[:_MAX_PROBE_BYTES].strip(), type=dict[str, str])
    except (OSError, subprocess.TimeoutExpired, msgspec.MsgspecError, UnicodeError) as error:
        raise ConfigError(
            f"{python}: did not report its version, which the key of compile caches needs: {error}"
        ) from error
    if done.returncode:
        raise ConfigError(f"{python}: exited with status {done.returncode} while reporting its version")
    return found


def instructions(cpuinfo: str) -> list[str]:
    """PURE: return the instruction sets of the first processor of /proc/cpuinfo that compilers use, sorted."""
    found = re.search(r"^(?:flags|Features|isa)[ \t]*:[ \t]*(.*)$", cpuinfo, re.MULTILINE)
    if found is None:
        return [platform.machine()]
    return sorted({flag for flag in found[1].split() if _NO_INSTRUCTIONS.fullmatch(flag) is None})


def read_compilers(environ: Mapping[str, str], inside: ExecPlace = HERE) -> dict[str, str]:
    """Return the versions of the compilers that extensions and inductor would run, if installed."""
    found = {}
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH") or "/usr/local/cuda"
    for name, program in (("c++", environ.get("CXX") or "c++"), ("nvcc", os.path.join(home, "bin", "nvcc"))):
        words = inside.words([program, "--version"])
        try:
            done = run_limited(words, timeout_s=10, environ=environ)
        except (OSError, subprocess.TimeoutExpired, ValueError):
            continue
        if done.returncode:
            continue  # the image does not have it
        lines = done.stdout.decode(errors="replace").strip().splitlines()
        if lines:
            found[name] = lines[-1 if name == "nvcc" else 0].strip()[:200]
    return found


def read_accelerators(root: str = "/") -> tuple[str, list[str]]:
    """Return the driver's version and the models of accelerators, "" and none without. Reads files, no library."""
    models = set()
    for directory in _listed(os.path.join(root, "proc/driver/nvidia/gpus")):
        found = re.search(r"^Model:[ \t]*(.+)$", read_text(os.path.join(directory, "information")), re.MULTILINE)
        if found:
            models.add(found[1].strip()[:200])
    driver = ""
    version = re.search(
        r"Kernel Module.*?([0-9]+(?:\.[0-9]+)+)", read_text(os.path.join(root, "proc/driver/nvidia/version"))
    )
    if version:
        driver = f"nvidia {version[1]}"
    for directory in _listed(os.path.join(root, "sys/class/kfd/kfd/topology/nodes")):
        target = re.search(
            r"^gfx_target_version ([1-9][0-9]*)$", read_text(os.path.join(directory, "properties")), re.MULTILINE
        )
        if target:
            models.add(f"amdgpu gfx {target[1]}")
    amd = read_text(os.path.join(root, "sys/module/amdgpu/version")).strip()
    if amd and not driver:
        driver = f"amdgpu {amd[:100]}"
    return driver, sorted(models)


def read_node_type(root: str = "/") -> str:
    """Return a digest of the accelerators and network cards on this node's buses; "" without an accelerator.

    NCCL's topology contains their addresses, so it fits only nodes with this layout.
    """
    rows = []
    has_accelerator = False
    for directory in _listed(os.path.join(root, "sys/bus/pci/devices")):
        kind = read_text(os.path.join(directory, "class")).strip()
        if not kind.startswith(("0x03", "0x02", "0x12")):
            continue
        has_accelerator = has_accelerator or kind.startswith(("0x0302", "0x12"))
        facts = [read_text(os.path.join(directory, name)).strip() for name in ("vendor", "device", "numa_node")]
        rows.append([os.path.basename(directory), kind, *facts])
    if not has_accelerator:
        return ""
    return hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest()[:16]


def _listed(directory: str) -> Iterable[str]:
    try:
        return [os.path.join(directory, name) for name in sorted(os.listdir(directory))]
    except OSError:
        return []
