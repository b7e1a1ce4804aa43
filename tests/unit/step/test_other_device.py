"""No step mixes devices up, and what it makes the host wait for is in this list.

There need be no GPU: `other_device` stands for one. What waits here would wait on CUDA, too; how
long it takes there, and what CUDA's own kernels do, is not seen.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import outergrad
from steps_on_a_device import METHODS, SPOILED

_SOURCE = Path(outergrad.__file__).parents[1]
_PROGRAM = Path(__file__).parents[2] / "support" / "steps_on_a_device.py"

ALLOWED = {
    "gloo sends from the host and receives there: this is the boundary": [
        "comm/torch.py:TorchComm._staged",
        "comm/torch.py:TorchComm._exchanged.<locals>.result.<locals>.<listcomp>",
    ],
    "a message is checked before it is believed, and told by words of the host": [
        "messages/wire.py:_words_of",
        "messages/wire.py:Preamble.write",
        "core/payload.py:_check_ids",
        "messages/places.py:_objection",
        "messages/places.py:_ones",
        "replay/block_use.py:Message.read",
        "replay/block_use.py:Message.write",
    ],
    "whether a step counts is decided on the host, once per message": [
        "buckets/dense.py:DensePending.wait",
        "buckets/sketch.py:_SketchPending.wait",
        "buckets/sketch.py:_SketchPending._exact",
        "buckets/sketch.py:_SketchPending._take_exact",
        "messages/checksum.py:Digest.__int__",
        "messages/checksum.py:combined",
        "replay/fingerprint.py:is_like",
    ],
    "in the first two backwards of a layer its tensors are compared with copies": [
        "capture/kept.py:_is_same",
    ],
    "how many ids differ decides the length of a message": [
        "layers/embedding.py:distinct",
        "linalg/outer.py:coalesce",
    ],
    "how many directions are kept decides the length of a message": [
        "linalg/low_rank.py:_numerical_rank",
        "linalg/low_rank.py:_rank_within",
        "linalg/low_rank.py:truncate",
        "methods/low_rank/sketches.py:Subspace._adapted",
    ],
    "LAPACK's decompositions say whether they failed": [
        "linalg/power.py:rayleigh_ritz",
        "linalg/low_rank.py:small_core",
        "linalg/subspace.py:warm_iteration",
        "linalg/orthonormal.py:principal",
    ],
    "another, slower way is taken where numbers are not finite or out of range": [
        "core/coding.py:refuse_out_of_range",
        "linalg/finite.py:is_finite",
        "linalg/low_rank.py:_times",
        "linalg/orthonormal.py:cholesky_qr2",
        "linalg/product.py:_scaled",
        "linalg/power.py:without_void",
        "linalg/subspace.py:start",
        "methods/low_rank/sketches.py:AlternatingSketches.begin",
        "methods/low_rank/sketches.py:AlternatingSketches.end",
        "methods/low_rank/merging.py:Merging._with_rest_of",
        "methods/low_rank/sketches.py:GlobalSketches.end",
        "methods/low_rank/sketches.py:GlobalSketches.turn",
        "methods/low_rank/sketches.py:_usable",
        "methods/low_rank/triplets.py:_finite",
        "methods/low_rank/triplets.py:_finite_ones",
    ],
    "which entries are the largest is found by counting": [
        "linalg/selection.py:_first",
        "linalg/selection.py:_kth_largest",
        "linalg/selection.py:_largest",
        "linalg/selection.py:_walked",
    ],
    "fixed numbers are made on the host once, and kept on the device": [
        "linalg/power.py:_probe_of_power",
        "replay/fingerprint.py:_vector",
    ],
}
"""What may wait: by reason, `file.py:function`."""
_PLACES = {place for places in ALLOWED.values() for place in places}
QUICK = ("dense", "dad", "edad", "rank-dad", "rank-dad, all_reduce")
TRAVELS = {
    "dad": "factors",
    "edad": "replayed",
    "rank-dad": "factors",
    "rank-dad, two_way": "low rank",
    "rank-dad, all_reduce": "low rank",
    "rank-dad, alternate": "low rank",
    "sparse": "sparse",
    "local steps of low rank": "factors",
}
"""How some layer must have travelled: a method that did nothing would be without fault."""


def found(names):
    """What steps by these methods, or with these faults, made the host wait for."""
    run = subprocess.run(
        [sys.executable, str(_PROGRAM), *names],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(_SOURCE), str(_PROGRAM.parent)])},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.stdout, run.stderr[-2000:]
    return json.loads(run.stdout)


def check(results):
    """Nothing went wrong, the sites agree, and nothing waited that may not."""
    for name, result in results.items():
        assert "error" not in result, f"{name}: {result['error']}"
        assert result["apart"] < 1e-5, name
        assert TRAVELS.get(name, "dense") in result["travels"], name
        assert unforeseen(result) == [], name


def unforeseen(result):
    return [(place, what) for place, what, _ in result["waits"] if place not in _PLACES]


pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="places are told by names that code has from 3.11 on"
)


def test_some_methods_wait_nowhere_else():
    check(found(QUICK))


@pytest.mark.slow
def test_no_method_waits_elsewhere_and_the_list_has_no_more_than_is_needed():
    results = found(METHODS)
    check(results)
    seen = {place for result in results.values() for place, *_ in result["waits"]}
    assert seen == _PLACES


@pytest.mark.slow
def test_what_must_not_be_on_the_way_is_seen():
    for name, result in found(SPOILED).items():
        assert unforeseen(result), name
