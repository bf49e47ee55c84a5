"""What backends declare: complete, covered by cases, and worded."""

import pytest

from splitkv.backends.base import Backend
from splitkv.backends.registry import BACKENDS, backend_named
from splitkv.common.spec import Feature
from splitkv.common.support import No, Support, Why
from splitkv.matrix.case import Case
from splitkv.matrix.cases import CASES
from splitkv.matrix.cells import tables
from splitkv.matrix.parity import Outcome, refusals, run_case

every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
REFUSED = [
    pytest.param(backend, case, id=f"{backend.name}-{case.id}")
    for backend in BACKENDS
    for case in CASES
    if refusals(backend, case)
]


@every_backend
def test_every_feature_is_stated(backend: Backend) -> None:
    assert set(backend.support.features) == set(Feature)


def test_an_unstated_feature_is_an_error() -> None:
    cpu = BACKENDS[-1].support
    features = {feature: None for feature in Feature if feature is not Feature.SINKS}
    with pytest.raises(TypeError, match="SINKS"):
        Support(
            cpu.dtypes,
            cpu.kv_dtypes,
            cpu.head_dim,
            cpu.head_dim_v,
            cpu.group,
            cpu.page_size,
            cpu.num_queries,
            features,
        )


@pytest.mark.parametrize("feature", Feature, ids=lambda feature: feature.name)
def test_every_feature_has_a_case(feature: Feature) -> None:
    assert [case.id for case in CASES if feature in case.features]


@every_backend
def test_every_no_has_a_sentence(backend: Backend) -> None:
    for feature, no in backend.support.features.items():
        if no is not None:
            assert isinstance(no.why, Why), feature
            assert len(no.reason.split()) >= 3, f"{feature.name}: {no.reason!r} is no sentence"


def test_the_cpu_refuses_no_case() -> None:
    assert [case.id for case in CASES if refusals(backend_named("cpu"), case)] == []


def test_case_ids_are_unique_and_cases_say_what_they_stand_for() -> None:
    assert len({case.id for case in CASES}) == len(CASES)
    assert len({case.digest for case in CASES}) == len(CASES)
    assert all(case.stands_for for case in CASES)


def test_every_row_of_every_table_has_a_case() -> None:
    for title, rows in tables(CASES).items():
        for row in rows:
            assert any(row.holds(case) for case in CASES), f"{title}: {row.title}"


@pytest.mark.parametrize(("backend", "case"), REFUSED)
def test_refusals_say_what_is_declared(backend: Backend, case: Case) -> None:
    result = run_case(backend, case)
    assert result.outcome is Outcome.REFUSED, "; ".join(result.why)
    for feature in case.features:
        no = backend.support.features[feature]
        if isinstance(no, No):
            assert f"{feature.value}: {no}" in result.why
