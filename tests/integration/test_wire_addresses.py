"""The addresses of the wire: who is kept out, and which addresses are refused."""

import asyncio
import dataclasses
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from support.workers import LIMITS, Ends, connected_channel, fresh_address, make_channel, make_ends

from areal_rloo.errors import PreflightError
from areal_rloo.wire.address import Address, SocketFile, TcpAddress
from areal_rloo.wire.channels import LearnerChannel
from areal_rloo.wire.messages import Goodbye, Work
from areal_rloo.wire.security import CurveKeys, load_keys, make_keys

pytestmark = pytest.mark.usefixtures("no_blocked_loop")

GOODBYE = Goodbye(None, Work())


def test_under_curve_the_messages_of_a_peer_without_the_key_are_lost(tmp_path: Path) -> None:
    ends = make_ends("tcp", tmp_path)
    make_keys(tmp_path / "other")

    async def scenario(learner: LearnerChannel, address: Address) -> None:
        assert isinstance(address, TcpAddress)
        stranger = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        stranger.setsockopt(zmq.IMMEDIATE, 1)
        stranger.connect(address.endpoint)
        forger = make_channel(dataclasses.replace(address, keys=_forged(tmp_path)), incarnation="forged")
        assert not await stranger.poll(300, zmq.POLLOUT)
        assert not await forger.connected(0.3)
        worker = await connected_channel(address)
        for channel in (forger, worker):
            channel.send(GOODBYE)
        await learner.receive()
        assert learner.statistics().messages_in == 1
        stranger.close(0)
        for channel in (forger, worker):
            channel.close()

    ends.run(scenario)


def _forged(folder: Path) -> CurveKeys:
    """Return the right server key with a client key that the learner does not know."""
    own = load_keys(folder / "other", end="worker")
    return CurveKeys(own.public, own.secret, load_keys(folder / "keys", end="worker").peer_public)


def test_keys_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "keys").iterdir()} == {0o600}
    (tmp_path / "keys" / "learner.secret").chmod(0o644)
    with pytest.raises(PreflightError, match="others can read"):
        load_keys(tmp_path / "keys", end="learner")


def _refusal(address: Address) -> str:
    async def main() -> str:
        with pytest.raises(PreflightError) as refused:
            LearnerChannel.bind(address, limits=LIMITS)
        return str(refused.value)

    return asyncio.run(main())


def test_a_taken_port_is_refused_in_a_line(tmp_path: Path) -> None:
    address = make_ends("tcp", tmp_path).address
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = _refusal(dataclasses.replace(address, port=port))
    assert said.endswith(f" 127.0.0.1:{port}: Address already in use; set wire.port to another port, or to 0")


def test_an_address_of_another_host_is_refused_in_a_line(tmp_path: Path) -> None:
    said = _refusal(dataclasses.replace(make_ends("tcp", tmp_path).address, host="203.0.113.7"))
    assert said.startswith("the wire: cannot bind 203.0.113.7:0: ")
    assert said.endswith("; set wire.host to an address that `ip address` shows on the learner's host")


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_a_folder_that_others_can_enter_is_refused_at_both_ends(mode: int) -> None:
    address = fresh_address()
    address.path.parent.chmod(mode)

    async def main() -> None:
        with pytest.raises(PreflightError, match=r"with mode 0700, got user \d+ and mode 0"):
            LearnerChannel.bind(address, limits=LIMITS)
        with pytest.raises(PreflightError, match="other users could connect"):
            make_channel(address)

    asyncio.run(main())
    assert not address.path.exists()


def test_a_removed_folder_is_no_proof_that_the_launcher_ended(tmp_path: Path) -> None:
    address = SocketFile.inside(tmp_path / "removed")
    with pytest.raises(
        PreflightError, match=r"No such file.*by the launcher at its end, or by somebody else"
    ) as raised:
        os.close(address.open_folder())
    assert "\n" not in str(raised.value)


def test_a_later_owner_of_the_path_gets_no_worker() -> None:
    """Without the launcher, its folder may be swept, and another user may take the path."""
    address = fresh_address()

    async def main() -> None:
        learner = LearnerChannel.bind(address, limits=LIMITS)
        worker = await connected_channel(address)
        learner.close()
        shutil.rmtree(address.path.parent)
        address.path.parent.mkdir()
        address.path.parent.chmod(0o777)
        stranger = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        stranger.bind(address.endpoint)
        while worker.send(GOODBYE):  # noqa: ASYNC110 - until the connection is known to be gone
            await asyncio.sleep(0.01)
        assert not await worker.connected(2.0)
        with pytest.raises(PreflightError, match="other users could connect"):
            worker.connect_anew()
        worker.close()
        stranger.close(0)

    asyncio.run(main())


def test_a_socket_file_with_a_long_path_is_refused_in_a_line() -> None:
    with pytest.raises(PreflightError, match=r"a path of 208 bytes.*set TMPDIR to a shorter folder"):
        SocketFile.inside(Path("/" + 199 * "x"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_connect_to_the_socket_file() -> None:
    code = "import os, socket, sys; os.setuid(65534); socket.socket(socket.AF_UNIX).connect(sys.argv[1])"

    async def scenario(learner: LearnerChannel, address: Address) -> None:
        assert isinstance(address, SocketFile)
        address.path.chmod(0o777)  # the folder alone protects
        command = [sys.executable, "-c", code, str(address.path)]
        ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
        assert "PermissionError" in ended.stderr

    Ends(fresh_address()).run(scenario)
