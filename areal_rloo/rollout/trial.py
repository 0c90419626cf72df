"""Tries the user's episode before a run starts, in a process of its own: the constructor is the user's code.

    launcher ─ config ─► `python -m areal_rloo.rollout.trial` ─► the reason why no worker can use the episode, or none

The process makes the episode as a worker does, on a running event loop, and exits despite threads of the episode. The
process has a keeper (`areal_rloo/keeper.py`), so everything started by the constructor ends with the trial.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import msgspec

from areal_rloo.config import Config, import_entry
from areal_rloo.decoding import from_msgpack
from areal_rloo.errors import ConfigError, UserError, is_shortage, raised
from areal_rloo.keeper import TRY_AGAIN, kept, was_killed
from areal_rloo.waiting import run_beside_user_code

_TRIAL_S = 20.0  # a slower constructor may load a model
_KEEPER_S = 10.0  # for the keeper to kill everything
_MOST_BYTES = 1 << 16  # of a reason: far more than a `UserError` keeps
_STDERR = 2
_KEY = "rollout.episode.type"


def try_own_episode(config: Config, *, timeout_s: float = _TRIAL_S) -> bool:
    """Make the user's episode of a config in another process; return False if the timeout is too short.

    Raises:
        ConfigError: the class cannot be imported or made from the config, or has no `run` of an episode.
    """
    result, theirs = os.pipe()
    with contextlib.ExitStack() as closing:
        closing.callback(os.close, result)
        try:
            process = subprocess.Popen(
                kept([sys.executable, "-m", "areal_rloo.rollout.trial", str(theirs)]),
                pass_fds=[theirs],
                stdin=subprocess.PIPE,
                stdout=_STDERR,  # output of the user's code is a log
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        try:
            process.communicate(msgspec.msgpack.encode(config), timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return False
        finally:
            _end(process)
        os.set_blocking(result, False)  # a process out of the keeper's reach may hold the other end
        try:
            reason = os.read(result, _MOST_BYTES).decode(errors="replace")
        except BlockingIOError:
            reason = ""
    if reason:
        raise ConfigError(reason)
    if process.returncode != 0 and not was_killed(process.returncode):
        path = config.rollout.episode.type
        raise ConfigError(f"{_KEY}: {path} ends the process that makes it from the config: code {process.returncode}")
    return process.returncode == 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and everything it started, also on Ctrl-C."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_KEEPER_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main() -> None:
    """Read a config from the standard input, try the episode, and write the reason why not, if any."""
    result, reason = int(sys.argv[1]), ""
    os.set_inheritable(result, False)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no KeyboardInterrupt, which would look like one of the constructor
    config: Config = from_msgpack(sys.stdin.buffer.read(), Config)
    try:
        run_beside_user_code(_try(config))
    except BaseException as error:  # noqa: BLE001 - the user's code may raise anything
        if is_shortage(error):
            os._exit(TRY_AGAIN)
        reason = (
            str(error)
            if isinstance(error, UserError)
            else f"{_KEY}: {config.rollout.episode.type} cannot be made from the config: {raised(error)}"
        )
    os.write(result, reason.encode(errors="replace"))
    os._exit(0)


async def _try(config: Config) -> None:
    from areal_rloo.rollout.episode_types import make_own_episode  # noqa: PLC0415 - the other end needs no aiohttp

    import_entry(config.run.entry)
    make_own_episode(config)


if __name__ == "__main__":
    main()
