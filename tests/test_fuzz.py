"""Files that somebody damaged or forged: a sentence or a correct read, and nothing else."""

import itertools
import resource
from pathlib import Path

import pytest
from fuzzing import TARGETS, attempt
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

MEGABYTES = 500
"""More than so much memory no file makes a reader take."""
_number = itertools.count()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Real files of every kind, made when first asked for."""
    return {name: tmp_path_factory.mktemp("real") / "files" for name in TARGETS}


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_a_mutated_file_is_refused_with_a_sentence_or_read(
    name: str, pristine: dict[str, Path], tmp_path: Path
) -> None:
    target = TARGETS[name]
    target.make(pristine[name])
    target.read(pristine[name])
    told: set[str] = set()

    @settings(
        max_examples=40,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],  # a seed cannot be made smaller
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    @given(st.integers(0, 2**32))
    def mutations(seed: int) -> None:
        told.add(attempt(target, pristine[name], tmp_path / f"work{next(_number)}", seed))

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    mutations()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < MEGABYTES
    assert len(told) > 3  # several kinds of damage were found
