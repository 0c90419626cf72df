"""Replace torchvision's file of this name, which loads C++ operators for CUDA. Torch for a CPU cannot load them.

It declares the two operators whose shapes torchvision registers on import. Nothing calls them for a model of text.
"""

import torch

torchvision_operators = torch.library.Library("torchvision", "DEF")  # kept: it registers for as long as it lives
for _name in ("nms", "qnms"):
    torchvision_operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _load_library(name):
    return False


def _has_ops():
    return False


def _assert_has_ops():
    raise RuntimeError("torchvision has no C++ operators here")


def _check_cuda_version():
    return -1
