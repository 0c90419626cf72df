"""Strangers at every listening socket of a run, and a worker that lies: the run goes on and counts them."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support.local_runs import Run, assert_drained
from support.processes import ends_of_logs, wire_port
from support.strangers import (
    AGENT,
    claim_name,
    lie_until_cut_off,
    processes_of,
    scraped,
    socket_files,
    tcp_ports,
    without_keys,
)

from areal_rloo.wire.address import Address, SocketFile, TcpAddress
from areal_rloo.wire.messages import Refusal
from areal_rloo.wire.peers import MOST_OFFENCES
from areal_rloo.wire.security import load_keys

MAX_ATTEMPTS = 3


@pytest.mark.full
@pytest.mark.parametrize("transport", ["tcp", pytest.param("auto", marks=pytest.mark.rare)])
def test_strangers_at_every_socket_change_nothing_and_are_counted(
    start: Callable[..., Run], tmp_path: Path, transport: str
) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    agent = ("rollout.episode.type=agent", f"rollout.episode.agent={tmp_path / 'agent.py'}:solve")
    run = start(
        *("learner.num_train_steps=10000", f"wire.transport={transport}", f"wire.max_attempts={MAX_ATTEMPTS}"),
        "rollout.num_slots=4",  # too few for all samples: the liar gets the others
        *("checkpoint.every_n_steps=10000", "evaluation.every_n_versions=10000"),
        *agent,
    )
    run.wait_for(lambda: len(run.records()) >= 1)
    processes = processes_of(run.process.pid)
    (learner,) = run.children("areal_rloo.learner")
    ports, files = tcp_ports(processes), socket_files(processes)
    keys = load_keys(run.folder / "keys", end="worker")
    address: Address
    if transport == "tcp":
        wire = ("127.0.0.1", wire_port(learner) or 0)
        address = TcpAddress(*wire, keys)
    else:
        (wire,) = files
        address = SocketFile(wire)
    assert wire in {*ports, *files}
    assert len({*ports, *files}) >= 3
    refusal = claim_name(address, "rollout-0")
    assert isinstance(refusal, Refusal) and not refusal.final
    num_lies = lie_until_cut_off(address)
    num_strangers = {where: without_keys(where, keys) for where in (*ports, *files)}
    by_port = {port: scraped(port) for port in ports}
    of_learner = by_port.pop(next(port for port, counts in by_port.items() if "areal_rloo_loss" in counts))
    assert of_learner["areal_rloo_wire_refused_connections_total"] >= num_strangers[wire]
    assert of_learner["areal_rloo_intake_cut_off_total"] == 1
    assert of_learner['areal_rloo_fleet_refused_workers_total{reason="name_taken"}'] == 1
    assert of_learner["areal_rloo_scrape_refused_total"] > 0
    assert sum("areal_rloo_scrape_refused_total" in counts for counts in by_port.values()) == 1, "the worker counts"
    last = len(run.records())
    run.wait_for(lambda: len(run.records()) >= last + 3)
    run.process.send_signal(signal.SIGTERM)
    code, output = run.wait()
    assert code == 0, output
    assert_drained(run)
    summary = run.summary()
    dropped = summary["ledger"]["dropped"]  # if the others are busy, the liar gets its sample again: an attempt
    assert set(dropped) <= {"max_attempts"} and sum(dropped.values()) <= MOST_OFFENCES // MAX_ATTEMPTS
    assert summary["ledger"]["trained"] + sum(dropped.values()) == 16 * summary["num_train_steps"]
    assert num_lies >= MOST_OFFENCES
    logs = ends_of_logs((run.folder / "logs").iterdir(), num_lines=1000)
    assert "Traceback" not in logs + output, logs + output
