"""`noise_for` is the inverse of the ledger."""

from __future__ import annotations

import pytest

from outergrad.private import Fixed, Ledger, Poisson, Release, noise_for
from outergrad.private.calibration import ERROR
from outergrad.private.observers import noise_seen

pytest.importorskip("dp_accounting", reason="pip install 'dp-accounting>=0.6'")

CASES = {
    "usual": (3.0, 1e-5, 0.01, 2000, {"accountant": "pld"}),
    "by RDP": (3.0, 1e-5, 0.01, 2000, {}),
    "little noise": (8.0, 1e-4, 0.001, 100, {}),
    "much noise": (0.5, 1e-6, 0.2, 1000, {}),
    "other sites": (3.0, 1e-5, 0.01, 2000, {"sites": 5, "sums": "masked", "observer": "site"}),
    "colluding": (
        3.0,
        1e-5,
        0.01,
        2000,
        {"sites": 5, "sums": "masked", "observer": "site", "colluding": 3},
    ),
    "open": (3.0, 1e-5, 0.01, 2000, {"sites": 5, "sums": "open", "observer": "site"}),
    "replaced": (3.0, 1e-5, 0.01, 500, {"accountant": "pld", "adjacency": "replace"}),
    "fixed": (3.0, 1e-5, Fixed(10, 1000), 500, {"adjacency": "replace"}),
}


@pytest.mark.parametrize(("eps", "delta", "rate", "steps", "how"), CASES.values(), ids=CASES)
def test_noise_is_the_least_that_is_enough(eps, delta, rate, steps, how):
    how = {"accountant": "rdp", **how}
    found = noise_for(eps, delta, rate, steps, **how)
    sites, sums = how.pop("sites", 1), how.pop("sums", "open")
    observer = how.pop("observer", "model")
    sampling = rate if isinstance(rate, Fixed) else Poisson(rate)

    def of(noise):
        ledger = Ledger(delta, **how)
        ledger.record(Release(noise, sampling, sites, sums), steps)
        return ledger.epsilon(observer)

    colluding = how.get("colluding", 1)
    share = noise_seen(1.0, observer, sites=sites, sums=sums, colluding=colluding)
    assert of(found + 1e-9) <= eps < of(found - ERROR / share)


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"epsilon": 0.0}, "epsilon must be above 0"),
        ({"epsilon": 60.0, "accountant": "pld"}, "50 at most by PLD: pass accountant='rdp'"),
        ({"steps": 0}, "steps must be 1 or more"),
        ({"rate": 1.5}, "rate must be above 0"),
        ({"delta": 0.0}, "delta must be between"),
        ({"epsilon": 1e-3, "rate": 1.0, "steps": 10_000}, r"no noise up to 1e\+06 is enough"),
        ({"observer": "site"}, "there is one site"),
    ],
)
def test_what_cannot_be_is_refused(kwargs, said):
    usual = {"epsilon": 3.0, "delta": 1e-5, "rate": 0.01, "steps": 100, "accountant": "rdp"}
    with pytest.raises(ValueError, match=said):
        noise_for(**{**usual, **kwargs})
