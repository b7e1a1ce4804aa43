"""The star as a backend of torch.distributed, by the name of "outergrad".

With PyTorch 2.14 and later it is found by itself. Before, importing this module registers it::

    import outergrad.star.backend
    torch.distributed.init_process_group("outergrad", init_method="star:///etc/site-a.kit")
"""

from outergrad.star.backend.registration import NAME, register

register()

__all__ = ["NAME", "register"]
