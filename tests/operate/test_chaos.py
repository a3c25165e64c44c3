"""Bad links as deploy/chaos makes them, in a network namespace of its own with an eth0 in it. As root, with iproute2.

A kernel may have no netem: then only the rate is limited, and what tc says of the shipped line is that it has understood it.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator

import pytest
import yaml

from tests.operate.docker import ROOT
from tests.process.namespaces import require, run
from tests.process.sites import until

NETEM_LINE = re.findall(r"\$\{CHAOS:-(.*?)\}", (ROOT / "deploy/chaos/chaos.sh").read_text())[0]
KERNELS_REFUSAL = 2


@pytest.fixture
def namespace() -> Iterator[str]:
    """With a veth pair: eth0, and far at the other end."""
    require()
    name = f"gmchaos{os.getpid()}"
    run("ip", "netns", "add", name)
    try:
        run("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", "far")
        run("ip", "-n", name, "link", "set", "eth0", "up")
        yield name
    finally:
        run("ip", "netns", "del", name)


def chaos(namespace: str, **environment: str) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", namespace, "sh", str(ROOT / "deploy/chaos/chaos.sh")]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env={**os.environ, **environment}, stdout=pipe, stderr=pipe, text=True)


def qdisc(namespace: str) -> str:
    return run("tc", "-n", namespace, "qdisc", "show", "dev", "eth0")


def test_what_it_is_told_holds_until_it_is_stopped(namespace: str) -> None:
    process = chaos(namespace, CHAOS_RATE="20mbit")
    applied = until(lambda: re.search(r"(netem|tbf) .*", qdisc(namespace)), "bad links", 30.0)[0]
    assert "rate 20Mbit" in applied
    assert applied.startswith("tbf") or {"delay", "80ms", "loss", "0.5%"} <= set(applied.split())
    process.terminate()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert said.startswith("links of this site: ")
    assert ("no netem" in said) == applied.startswith("tbf")
    assert not re.search("netem|tbf", qdisc(namespace))


def test_tc_understands_the_shipped_lines(namespace: str) -> None:
    """With a kernel that has netem it also takes them."""
    told = (ROOT / "docker-compose.yml").read_text()
    lines = {NETEM_LINE, *re.findall(r'CHAOS="([^"]+)"', told)}
    assert len(lines) == 1, "the example is the default"
    command = ["tc", "-n", namespace, "qdisc", "replace", "dev", "eth0", "root", "netem"]
    for rate in ("200mbit", "20mbit"):
        done = subprocess.run([*command, *NETEM_LINE.split(), "rate", rate], capture_output=True, text=True)
        assert done.returncode in (0, KERNELS_REFUSAL), done.stderr
    done = subprocess.run([*command, "delay", "lots"], capture_output=True, text=True)
    assert done.returncode not in (0, KERNELS_REFUSAL), "and says so of what it does not"


@pytest.mark.parametrize(("variable", "value"), [("CHAOS", "delay lots"), ("CHAOS_RATE", "fast")])
def test_what_tc_does_not_understand_is_an_error_that_names_it(namespace: str, variable: str, value: str) -> None:
    _, said = (process := chaos(namespace, **{variable: value})).communicate(timeout=60)
    assert process.returncode == 1
    assert f'{variable}="{value}"' in said


def test_it_ends_with_the_network_that_it_was_in_so_that_it_is_started_in_the_next(namespace: str) -> None:
    process = chaos(namespace)
    until(lambda: re.search("netem|tbf", qdisc(namespace)), "bad links", 30.0)
    run("ip", "-n", namespace, "link", "del", "eth0")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the network of this site is gone" in said
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert {service["restart"] for name, service in services.items() if name.startswith("chaos-")} == {"on-failure"}
