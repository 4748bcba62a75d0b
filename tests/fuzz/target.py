"""What is fuzzed: a parser, inputs to begin with, and the only exceptions that a bad input may raise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ringfence.admission.messages import Reason, Refuse
from ringfence.errors import AdmissionError


@dataclass(frozen=True)
class Target:
    """`run` returns if the input was accepted, raises one of `refusals` if not; anything else that it raises is a find."""

    name: str
    seeds: Callable[[], list[bytes]]
    run: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...]
    bounded: int = 2000  # inputs in the default run of the tests
    longest: int = 4096  # bytes of an input that a fuzzer makes
    words: tuple[bytes, ...] = ()  # what the format is made of

    def attempt(self, data: bytes) -> bool:
        """Whether `data` was accepted."""
        try:
            self.run(data)
        except self.refusals as error:
            text = str(error)  # goes to the peer, to people and into logs, whatever the input was
            assert len(text) < 4096, "a refusal as long as an attack"
            if isinstance(error, AdmissionError):
                Refuse(Reason.PROOF, text).body()
            return False
        return True
