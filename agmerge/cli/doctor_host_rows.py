# SPDX-License-Identifier: Apache-2.0
"""Rows of the doctor's table about hosts and the links between them, with advice."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agmerge.backends.addresses import only_here
from agmerge.backends.diagnosis import Row
from agmerge.cli import doctor_agent
from agmerge.cli.doctor import LEVELS, python

Facts = Mapping[str, Any]  # as the agent's ``facts`` returns them

CLOCK = 1.0  # seconds by which clocks may differ: then the lines of two logs can still be put in order
FIREWALL = "iptables -I INPUT -p tcp -s {} -j ACCEPT"
TITLES = {"loops": "native kernels", "agmerge": "agmerge", "python": "Python", "horovod": "Horovod"}


@dataclass(frozen=True)
class Link:
    """Link from one host to another, as the first one has found it."""

    source: str
    target: str
    found: Mapping[str, Any]  # as the agent's ``connect`` returns it


@dataclass
class Found:
    """Findings about hosts and links; by the names of hosts, in the order in which they were given."""

    folder: str  # in which launchers start the workers of every host
    unreached: dict[str, str] = field(default_factory=dict)  # why a host could not be asked
    facts: dict[str, Facts] = field(default_factory=dict)  # of those that could
    clocks: dict[str, tuple[float, float]] = field(default_factory=dict)  # seconds ahead of ours, and how wrong that is
    links: list[Link] = field(default_factory=list)  # from each host to each other one


def rows(found: Found) -> list[Row]:
    """Return all rows: hosts, software that is to be alike, clocks, networks, links."""
    return [
        *(unreached(host, why) for host, why in found.unreached.items()),
        *(host_row(host, facts, found.folder) for host, facts in found.facts.items()),
        *(
            row
            for name in ("python", "agmerge", "torch", "horovod", "mpi4py", "mpirun", "loops")
            for row in alike(name, {host: facts[name] for host, facts in found.facts.items()})
        ),
        *(clock_row(host, *told) for host, told in found.clocks.items()),
        *network_rows(found),
        *(link_row(link, found) for link in found.links),
    ]


def unreached(host: str, why: str) -> Row:
    """Return the row of a host that could not be asked. ``why``: the message of ssh, or of the shell there."""
    fix = f"make `ssh -o BatchMode=yes {host} true` work"
    if "ermission denied" in why:
        fix += f": ssh-copy-id {host}"
    elif "erification failed" in why:
        fix += ": log in by hand once, to accept its key"
    elif "resolve" in why or "not known" in why:
        fix += ": give its name to DNS or /etc/hosts, or write its address"
    elif "not found" in why or "No such file" in why:
        fix = f"install the same environment there, at the same place: {python()}"
    return Row("host", host, False, why, fix)


def host_row(host: str, facts: Facts, folder: str) -> Row:
    """Return the row of a host that answers: whether a worker could run there. ``folder``: where it would start."""
    if facts["problem"]:
        return Row("host", host, False, f"no agmerge: {facts['problem']}", f"on {host}: install agmerge for {python()}")
    if not facts["folder"]:
        fix = f"on {host}: put the script into the same folder, or launch in one that all hosts have"
        return Row("host", host, False, f"there is no folder {folder}", fix)
    return Row("host", host, True, f"calls itself {facts['host']}")


def alike(name: str, values: Mapping[str, str]) -> Iterator[Row]:
    """Yield the row that says whether all hosts have the same value; the first host's is the reference.

    ``name``: of the fact. ``values``: by host; empty: there is none.
    """
    title = TITLES.get(name, name)
    owners: dict[str, list[str]] = {}
    for host, value in values.items():
        owners.setdefault(value, []).append(host)
    said = {value: _level(value) if name == "loops" else value or "none" for value in owners}
    if len(owners) < 2:
        yield from (Row("alike", title, True, f"{text} on all") for text in said.values())
        return
    (first, reference), *others = owners.items()
    fix = f"on {', '.join(host for _, hosts in others for host in hosts)}: "
    if name == "loops":
        fix += "see `python -m agmerge doctor` there; the slowest host sets the pace"
    elif name in ("torch", "mpi4py") and first:
        fix += f"{python()} -m pip install {name}=={first.partition('+')[0]}"
    elif name == "horovod" and first:
        fix += f"{python()} -m agmerge build-horovod"
    else:
        fix += f"make it what {reference[0]} has"
    yield Row("alike", title, False, "; ".join(f"{said[v]} on {', '.join(hosts)}" for v, hosts in owners.items()), fix)


def clock_row(host: str, ahead: float, wrong: float) -> Row:
    """Return the row of a host's clock: seconds that it is ahead of ours, and by how many that may be wrong."""
    told = f"{round(ahead, 3) + 0.0:+.3f} s from this machine's, give or take {wrong:.3f} s"
    if abs(ahead) <= CLOCK + wrong:
        return Row("clock", host, True, told)
    return Row(
        "clock", host, False, told, f"on {host}: set the clock, by chrony for example; logs are put in order by it"
    )


def network_rows(found: Found) -> Iterator[Row]:
    """Yield by which interface each host is reached, and addresses that several hosts have."""
    for host, names in _used(found).items():
        facts = found.facts[host]
        texts = [_interface(name, facts["networks"][name]) for name in names]
        if texts and only_here(facts["own"]):  # launchers and libraries that ask for it are misled
            texts.append(f"its own name leads to {facts['own'] or 'no address'}")
        if texts:
            yield Row("network", host, True, "; ".join(texts))
    owners: dict[str, list[str]] = {}
    for host, facts in found.facts.items():
        for name, network in facts["networks"].items():
            owners.setdefault(network["address"], []).append(f"{name} of {host}")
    for address, places in owners.items():
        if len(places) > 1:
            detail = f"is {' and '.join(places)}; Open MPI tries it, and fails or waits for ever"
            fix = f"mpirun --mca btl_tcp_if_include {','.join(_networks(found)) or '<another network>'}"
            yield Row("network", address, False, detail, fix)


def link_row(link: Link, found: Found) -> Row:
    """Return the row of a link: how fast it is, or why there is none."""
    name, told = f"{link.source} -> {link.target}", link.found
    to = told["to"] or "no address"
    if not told["error"]:
        speed = f"{1e3 * told['latency']:.2g} ms, {_bits(told['rate'])}, " if "rate" in told else ""
        return Row("link", name, True, f"{speed}from {told['via']} to {to}")
    why = {
        doctor_agent.REFUSED: f"refused at {to}: by a firewall, or the address is another machine's",
        doctor_agent.SILENT: f"nothing comes back from {to}: a firewall drops it, or no way leads there",
    }.get(told["error"], f"{told['error']} ({to})")
    own = [network["address"] for network in found.facts[link.target]["networks"].values()]
    if to not in own:
        fix = f"on {link.source}: {link.target} leads to {to}; its addresses are {', '.join(own)}: DNS, /etc/hosts"
    else:
        sources = found.facts[link.source]["networks"].values()
        near = [one["address"] for one in sources if ipaddress.ip_address(to) in ipaddress.ip_network(one["network"])]
        rule = FIREWALL.format(near[0] if near else f"<the address of {link.source}>")
        fix = f"on {link.target}: let {link.source} in at all TCP ports, for example: {rule}"
    return Row("link", name, False, why, fix)


def launching(found: Found) -> str:
    """Return the settings by which launchers take the network over which the hosts have reached each other."""
    names = sorted({name for names in _used(found).values() for name in names})
    networks = ",".join(_networks(found))
    if not names:
        return "No host reaches another one."
    lines = ["To have this network, and no other, taken:"]
    if len(names) == 1:
        lines.append(f"  torchrun, srun  GLOO_SOCKET_IFNAME={names[0]} NCCL_SOCKET_IFNAME={names[0]}, on every host")
        lines.append(f"  horovodrun      --network-interfaces {names[0]}")
    else:
        lines.append("  torchrun, srun  GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, on every host its own")
    return "\n".join([*lines, f"  mpirun          --mca btl_tcp_if_include {networks}"])


def _used(found: Found) -> dict[str, list[str]]:
    """Return, by host, the interfaces over which the links run that could be made from it and to it."""
    used = {}
    for host, facts in found.facts.items():
        ends = {link.found["via"] for link in found.links if link.source == host and not link.found["error"]}
        ends |= {link.found["to"] for link in found.links if link.target == host and not link.found["error"]}
        used[host] = [name for name, network in facts["networks"].items() if network["address"] in ends]
    return used


def _networks(found: Found) -> list[str]:
    """Return the networks over which the links run, as 10.0.0.0/24."""
    used = _used(found).items()
    return sorted({found.facts[host]["networks"][name]["network"] for host, names in used for name in names})


def _interface(name: str, network: Mapping[str, Any]) -> str:
    """Return an interface in words, with the speed that it gives itself."""
    speed = _bits(1e6 * network["speed"]) if network["speed"] else "of a speed that is not told"
    return f"{name}, {network['address']}, {speed}"


def _level(name: str) -> str:
    """Return the instruction set of native kernels in words."""
    return LEVELS.get(name, "none" if name == "none" else "not known")


def _bits(rate: float) -> str:
    """Return bits a second in words."""
    return f"{rate / 1e9:.3g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:.3g} Mbit/s"
