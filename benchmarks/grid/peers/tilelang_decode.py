"""TileLang: a language, whose wheel (0.1.15) brings no decode kernel; the reason is recorded."""

from importlib.util import find_spec

from splitkv.cli.bench_shapes import Step
from splitkv.cli.bench_timing import Candidate


class TileLang:
    name = "tilelang"

    def missing(self) -> str | None:
        if find_spec("tilelang") is None:
            return "tilelang is not installed"
        return "tilelang's wheel holds no decode kernel; add one of yours with --peer"

    def refusal(self, step: Step) -> str | None:
        return self.missing()

    def prepare(self, step: Step) -> Candidate:
        raise NotImplementedError(self.missing())
