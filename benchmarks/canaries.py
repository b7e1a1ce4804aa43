"""Lower bounds of ε, measured with canaries, beside the ε of the ledger.

    python benchmarks/canaries.py [TRAININGS]

Two sites train through `og.distribute` and `og.Private` with the noise for ε 1, 3 and 8 at a δ of
1e-5: as claimed, with half of the noise, and with one site's noise left out. The last two are what
the measurement has to notice. How it measures: `src/outergrad_lab/canaries.py`.
"""

import sys

import outergrad as og
from outergrad_lab.canaries import Audit

STEPS, RATE, DELTA = 2, 0.5, 1e-5
WAYS = {"as claimed": (), "half the noise": (0.5, 0.5), "one site without": (1.0, 0.0)}


def main(trainings: int) -> None:
    """Prints a row for each ε and δ."""
    print("ε at 1e-05", "δ", "claimed", *(f"measured, {way}" for way in WAYS), sep=" | ")
    sampling = og.private.Poisson(RATE)
    for wanted in (1, 3, 8):
        noise = og.private.noise_for(wanted, DELTA, sampling, STEPS)
        release = og.private.Release(noise, sampling, sites=2, sums="masked")
        audits = [
            Audit(release=release, steps=STEPS, trainings=trainings, shares=shares)
            for shares in WAYS.values()
        ]
        seen = [audit.run() for audit in audits]
        for delta in (DELTA, 1e-2):
            found = [f"{one.epsilon(delta):.2f}" for one in seen]
            print(wanted, delta, f"{audits[0].claimed(delta):.2f}", *found, sep=" | ", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
