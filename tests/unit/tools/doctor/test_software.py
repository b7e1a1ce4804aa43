from __future__ import annotations

import pytest

from outergrad.core.packages import REQUIREMENTS
from outergrad.tools.doctor.findings import Level
from outergrad.tools.doctor.machine import (
    EXTRAS,
    LEAST,
    check_extras,
    check_gpus,
    check_software,
)
from places import REPOSITORY

PYPROJECT = (REPOSITORY / "pyproject.toml").read_text()


def test_the_oldest_versions_are_those_of_the_package():
    assert f'requires-python = ">={LEAST["python"]}"' in PYPROJECT
    assert f'"torch>={LEAST["torch"]}"' in PYPROJECT
    assert f'"numpy>={LEAST["numpy"]}"' in PYPROJECT


def test_the_extras_are_those_of_the_package():
    for name in EXTRAS:
        assert f"\n{name} = [" in PYPROJECT
    for modules, _ in EXTRAS.values():
        for module in modules:
            assert f'"{REQUIREMENTS[module]}"' in PYPROJECT


def software(has_gloo: bool = True, **versions: str) -> dict:
    """Findings by subject, where other versions are as they should be."""
    return {finding.what: finding for finding in check_software({**LEAST, **versions}, has_gloo)}


@pytest.mark.parametrize(
    ("name", "version", "level", "said"),
    [
        ("torch", "2.11.0+cpu", Level.OK, "2.11.0+cpu"),
        ("torch", "2.11", Level.OK, "2.11"),
        ("torch", "3.0.0a0+git123", Level.OK, "3.0.0a0+git123"),
        ("torch", "2.9.1", Level.PROBLEM, "2.9.1 is too old: 2.11 or later is needed"),
        ("python", "3.9.18", Level.PROBLEM, "3.9.18 is too old: 3.10 or later is needed"),
    ],
)
def test_versions(name, version, level, said):
    finding = software(**{name: version})[name]
    assert (finding.level, finding.said) == (level, said)
    assert bool(finding.remedy) == (level == Level.PROBLEM)


def test_gloo_is_needed():
    assert software()["gloo"].level == Level.OK
    assert software(has_gloo=False)["gloo"].level == Level.PROBLEM


def test_gpus_are_counted_and_not_needed():
    (two,) = check_gpus(["H100", "H100"], "12.8", "2.27.5")
    assert two.said == "2 x H100, CUDA 12.8; NCCL 2.27.5"
    (none,) = check_gpus([], None, "")
    assert none.level == Level.OK
    (unseen,) = check_gpus([], "12.8", "")
    assert "sees no GPU" in unseen.said


def test_a_missing_extra_is_said_with_its_use():
    first, second = check_extras(lambda module: module not in ("plotly",))
    assert first.said == "installed: cli, bench, star, tensorboard"
    assert second.remedy == "pip install 'plotly>=6.0'"
    assert "reports" in second.said
