"""`python -m areal_rloo.launcher.doctor.probe_torch devices|nccl`: report the devices of torch as JSON.

The probe is a process because importing torch takes seconds, and a collective between two GPUs that cannot communicate
hangs.
"""

from __future__ import annotations

import sys
import warnings

import msgspec
import torch

from areal_rloo.launcher.doctor.devices import Device, TorchSeen


def look() -> TorchSeen:
    """Describe torch and compute on every device."""
    trouble = ""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available and torch.version.cuda is not None:
        trouble = str(warned[0].message) if warned else _trouble()
    nums = range(torch.cuda.device_count() if available else 0)
    return TorchSeen(
        version=str(torch.__version__),
        cuda=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if available else None,
        architectures=tuple(torch.cuda.get_arch_list()) if available else (),
        devices=tuple(_device(num) for num in nums),
        trouble=" ".join(trouble.split()),
        without_peers=tuple(
            (a, b) for a in nums for b in nums if a < b and not torch.cuda.can_device_access_peer(a, b)
        ),
    )


def sum_over_devices() -> None:
    """Run an all-reduce over all GPUs; print `ok` if the sum is right."""
    num = torch.cuda.device_count()
    parts = [torch.full((1 << 20,), index + 1.0, device=f"cuda:{index}") for index in range(num)]
    torch.cuda.nccl.all_reduce(parts)
    expected = num * (num + 1) / 2
    assert all(bool((part == expected).all()) for part in parts), "NCCL's sum is wrong"
    print("ok")  # noqa: T201 - the face of the program


def _trouble() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error)
    return ""


def _device(num: int) -> Device:
    major, minor = torch.cuda.get_device_capability(num)
    trouble = ""
    try:
        ones = torch.ones(256, 256, device=f"cuda:{num}")
        if float((ones @ ones).sum()) != 256.0**3:
            trouble = "a product of matrices is wrong"
    except RuntimeError as error:
        trouble = str(error).strip().splitlines()[0]
    return Device(torch.cuda.get_device_name(num), f"sm_{major}{minor}", trouble)


if __name__ == "__main__":
    if sys.argv[1:] == ["nccl"]:
        sum_over_devices()
    else:
        print(msgspec.json.encode(look()).decode())  # noqa: T201
