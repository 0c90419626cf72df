"""The files of a sandboxed program, as rules for the kernel (Landlock).

In: the scratch folder. Out: bytes and paths for the kernel. The kernel refuses all other files, also to root. Programs
may read the Python installation, the shared libraries and the environment's packages. Programs may write plain files
in the scratch folder, but no folders or links, so the scratch folder stays flat and can always be removed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from areal_rloo.errors import PreflightError

CREATE_RULESET = 444  # system calls from 424 on have the same number on every architecture
_VERSION_FLAG = 1

_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_REMOVE_FILE, _MAKE_REG, _TRUNCATE = 1 << 5, 1 << 8, 1 << 14
_FILE_RIGHTS = _WRITE_FILE | _READ_FILE | _TRUNCATE
_SCRATCH_RIGHTS = _FILE_RIGHTS | _READ_DIR | _REMOVE_FILE | _MAKE_REG
_NUM_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # by version of Landlock; later ones as 5
_NETWORK_RIGHTS = 0b11  # bind and connect of TCP, from version 4 on; seccomp refuses all sockets before that
_SCOPES = 0b11  # abstract Unix sockets and signals to the outside, from version 6 on; a second lock on both

_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
_PACKAGES = ("site-packages", "dist-packages")
_WHO, _REMEDY = "a program of the policy (tool 'python', task 'code')", "remove the tool or the task"


def landlock_version() -> int:
    """Return the kernel's version of Landlock.

    Raises:
        PreflightError: the kernel has no Landlock.
    """
    if not sys.platform.startswith("linux"):
        raise PreflightError(f"{_WHO} needs Linux for its sandbox, got {sys.platform}; {_REMEDY}")
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.argtypes, syscall.restype = [ctypes.c_long, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint], ctypes.c_long
    version = int(syscall(CREATE_RULESET, None, 0, _VERSION_FLAG))
    if version < 1:
        code = ctypes.get_errno()
        remedy = {
            errno.ENOSYS: "run on Linux 5.13 or later, built with Landlock",
            errno.EOPNOTSUPP: "start the kernel with `lsm=landlock,...`",
            errno.EPERM: "allow the landlock calls in the container's seccomp profile",
        }.get(code, _REMEDY)
        raise PreflightError(f"{_WHO} needs Landlock for its sandbox ({os.strerror(code)}); {remedy}")
    return version


def ruleset(version: int) -> bytes:
    """Encode `struct landlock_ruleset_attr`, with every right that this version can refuse."""
    file_rights = (1 << _NUM_FILE_RIGHTS[min(version, 5)]) - 1
    parts = [file_rights, *([_NETWORK_RIGHTS] if version >= 4 else []), *([_SCOPES] if version >= 6 else [])]
    return struct.pack(f"={len(parts)}Q", *parts)


def rules(version: int, scratch: Path) -> list[tuple[str, int]]:
    """Return paths, and the rights beneath each path."""
    known = (1 << _NUM_FILE_RIGHTS[min(version, 5)]) - 1
    rights = {str(path): _READ_FILE | _READ_DIR for path in readable()}
    rights |= {"/dev/null": _READ_FILE | _WRITE_FILE, "/dev/urandom": _READ_FILE, str(scratch): _SCRATCH_RIGHTS}
    return [
        (path, right & known & (~0 if Path(path).is_dir() else _FILE_RIGHTS))
        for path, right in rights.items()
        if Path(path).exists()
    ]


def readable() -> Iterator[Path]:
    """Yield the folders of Python, packages and shared libraries; never a whole prefix, which may be `/usr`."""
    yield from map(Path, _LIBRARIES)
    yield from (Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
    yield from (Path(sys.base_prefix) / name for name in ("lib", "lib64"))
    yield from package_folders()


def package_folders() -> Iterator[Path]:
    """Yield the folders of installed packages on `sys.path`; a checkout on the path is excluded."""
    yield from (path for path in map(Path, sys.path) if path.name in _PACKAGES and path.is_dir())
