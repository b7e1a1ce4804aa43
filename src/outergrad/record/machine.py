"""Description of a site's machine, in one line."""

import os
import platform

import torch

from outergrad._amounts import many


def machine(device: torch.device) -> str:
    """Returns the system, its cores, PyTorch's threads, and the accelerator, if there is one.

    Args:
        device: device of the parameters.
    """
    cores, threads = os.cpu_count() or 1, torch.get_num_threads()
    told = f"{platform.system()} {platform.machine()}, {many(cores, 'core')}"
    told += f", {many(threads, 'thread')} of PyTorch"
    if device.type == "cuda":
        return f"{told}, {torch.cuda.get_device_name(device)}"
    return told if device.type == "cpu" else f"{told}, {device.type}"
