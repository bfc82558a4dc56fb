"""Facts about NICs and InfiniBand ports, for network.py, with their counters read twice.

Sources: Documentation/ABI/testing/sysfs-class-net, sysfs-class-net-statistics, sysfs-class-infiniband.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from bootseer.health.host_interface import HostInterface

# Of damaged frames, or frames lost by the hardware. Frames dropped by a busy program (rx_dropped) are separate.
ERRORS = ("rx_errors", "tx_errors", "rx_crc_errors", "rx_frame_errors", "rx_fifo_errors", "tx_carrier_errors")
DROPS = ("rx_dropped", "tx_dropped", "rx_missed_errors")
PORT_ERRORS = (
    "symbol_error",
    "port_rcv_errors",
    "link_error_recovery",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
_IS_UP = 1  # IFF_UP


class Link(NamedTuple):
    """A NIC, or a port of an InfiniBand or RoCE device."""

    name: str
    is_up: bool  # administratively up
    has_carrier: bool
    state: str  # in the kernel's words
    bits_per_s: float  # 0: unknown
    half_duplex: bool
    has_default_route: bool
    counters: Mapping[str, int]


def read_links(system: HostInterface) -> list[Link]:
    """Return hardware NICs (or virtual ones of a VM), bonds, those of the default route, and InfiniBand ports."""
    return _nics(system) + _ports(system)


def read_rates(system: HostInterface, before: list[Link], seconds: float) -> dict[str, dict[str, float]]:
    """Return the growth of counters per second, by link; reads them again after `seconds`."""
    began_s = system.now_s()
    system.sleep(seconds)
    after = {link.name: link for link in read_links(system)}
    elapsed_s = max(system.now_s() - began_s, 1e-6)
    return {
        link.name: {
            counter: max(0, after[link.name].counters[counter] - value) / elapsed_s  # counters may be reset
            for counter, value in link.counters.items()
            if counter in after[link.name].counters
        }
        for link in before
        if link.name in after
    }


def _nics(system: HostInterface) -> list[Link]:
    routes = [line.split() for line in system.text("proc/net/route").splitlines()[1:]]
    routed = {words[0] for words in routes if len(words) > 7 and words[1] == words[7] == "00000000"}
    found = []
    for name in system.names("sys/class/net"):
        base = f"sys/class/net/{name}"
        if not (name in routed or system.exists(f"{base}/device") or system.exists(f"{base}/bonding")):
            continue  # bridges and tunnels: their underlying NICs are checked
        counters = {
            counter: value
            for counter in (*ERRORS, *DROPS)
            if (value := system.number(f"{base}/statistics/{counter}")) is not None
        }
        changes = system.number(f"{base}/carrier_changes")
        speed = system.number(f"{base}/speed") or 0  # -1: unknown
        found.append(
            Link(
                name,
                bool((system.number(f"{base}/flags") or 0) & _IS_UP),
                system.text(f"{base}/carrier") == "1",
                system.text(f"{base}/operstate") or "unknown",
                max(0, speed) * 1e6,
                system.text(f"{base}/duplex") == "half",
                name in routed,
                counters if changes is None else {**counters, "carrier_changes": changes},
            )
        )
    return found


def _ports(system: HostInterface) -> list[Link]:
    found = []
    for device in system.names("sys/class/infiniband"):
        for number in system.names(f"sys/class/infiniband/{device}/ports"):
            base = f"sys/class/infiniband/{device}/ports/{number}"
            state = system.text(f"{base}/state").partition(": ")[2]  # 4: ACTIVE
            physical = system.text(f"{base}/phys_state").partition(": ")[2]  # 5: LinkUp
            rate = system.text(f"{base}/rate").partition(" Gb/sec")[0]
            counters = {
                counter: value
                for counter in (*PORT_ERRORS, "link_downed")
                if (value := system.number(f"{base}/counters/{counter}")) is not None
            }
            found.append(
                Link(
                    f"{device}/{number}",
                    physical != "Disabled",
                    state == "ACTIVE",
                    f"{state or 'unknown'}, {physical or 'unknown'}",
                    float(rate) * 1e9 if rate.replace(".", "", 1).isdecimal() else 0.0,
                    False,
                    False,
                    counters,
                )
            )
    return found
