"""Operators that torchvision registers on import; its build for CUDA cannot be loaded beside a torch for the CPU."""

import torch

torchvision_operators = torch.library.Library("torchvision", "DEF")  # kept: it registers for as long as it lives
for name in ("nms", "qnms"):
    torchvision_operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
