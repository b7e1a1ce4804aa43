"""NVFLARE: a star whose frames go through its TIE layer, between the job processes of the sites."""

from __future__ import annotations

from outergrad.core.packages import how_to_install

try:
    import nvflare as _nvflare  # noqa: F401
except ImportError as error:
    _needs = "outergrad.integrations.nvflare needs nvflare: "
    raise ImportError(_needs + how_to_install("nvflare", "grpc", "cryptography")) from error

from outergrad.integrations.nvflare.job import star_job

__all__ = ["star_job"]
