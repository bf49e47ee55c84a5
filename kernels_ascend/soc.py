"""Which generation of the chip an NPU is: what an operator takes depends on it."""

from enum import Enum


class Soc(Enum):
    """A chip generation; the value is how the runtime's device names go on after ``Ascend``."""

    A2 = "910B"
    A3 = "910_93"
    ATLAS_310P = "310P"
    A5 = "950"

    def __str__(self) -> str:
        return f"Ascend {self.value}"


def soc_of(device_name: str) -> Soc | None:
    """The generation of a device called ``Ascend910B3``; None where limits.yaml speaks of none."""
    return next((soc for soc in Soc if device_name.startswith(f"Ascend{soc.value}")), None)


def soc_named(name: str) -> Soc:
    """``Soc`` of its own name or value in any case (A2, 910B, 310P, 950), or of a device's.

    Raises:
        ValueError: there is none; the text lists those there are.
    """
    if (found := soc_of(name)) is not None:
        return found
    for soc in Soc:
        if name.upper() in (soc.name, soc.value.upper()):
            return soc
    raise ValueError(f"unknown SoC {name!r}, known: {', '.join(soc.value for soc in Soc)}")
