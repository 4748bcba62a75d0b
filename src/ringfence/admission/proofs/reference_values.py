"""Reference values: what the firmware of a GPU measures, for one model, driver and VBIOS, from a file of the policy.

model = "GH100"
driver = "550.90.07"
vbios = "96.00.9F.00.01"
firmware_id = "f5c3..."       # of the firmware that the boot ROM started
[measurements]
1 = "0000..."                 # SHA-384; or a list of values, any one of which is right
2 = "8048..."

All GPUs of one model under one driver and VBIOS report the same, so a policy needs one such file per combination that is
in use. `ringfence evidence measure` writes it from a report in hand: one from a machine that is trusted to be good.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ringfence.admission import encoding
from ringfence.admission.proofs import nvidia_chain, spdm
from ringfence.errors import AdmissionError, PolicyError
from ringfence.policy.toml_table import Table, parse

_NAMED: Final = 8  # of the measurements that differ, in a message


@dataclass(frozen=True)
class ReferenceValues:
    """One combination of model, driver and VBIOS, and what it measures."""

    model: str
    driver: str
    vbios: str
    firmware_ids: tuple[bytes, ...]  #           any one of them
    measurements: dict[int, tuple[bytes, ...]]  # index: any one of them

    def __str__(self) -> str:
        return f"{self.model}, driver {self.driver}, VBIOS {self.vbios}"

    @property
    def key(self) -> tuple[str, str, str]:
        return self.model, self.driver, self.vbios

    def content(self) -> bytes:
        """Canonical: the order in which a file lists things does not matter."""
        parts = [encoding.text(each) for each in self.key]
        parts.append(_values(self.firmware_ids))
        for index in sorted(self.measurements):
            parts += [encoding.number(index, 1), _values(self.measurements[index])]
        return b"".join(parts)

    def compare(self, firmware_id: bytes, measurements: dict[int, bytes]) -> None:
        """Exactly these measurements, each of a known value."""
        advice = "run a firmware that the policy knows, or measure this one anew with `ringfence evidence measure`"
        if firmware_id not in self.firmware_ids:
            raise AdmissionError(
                f"a GPU ({self}) was started with other firmware than the policy's file says: {advice}"
            )
        differing = sorted(
            index
            for index in measurements.keys() | self.measurements.keys()
            if measurements.get(index) not in self.measurements.get(index, ())
        )
        if differing:
            named = ", ".join(map(str, differing[:_NAMED])) + (", ..." if len(differing) > _NAMED else "")
            raise AdmissionError(
                f"a GPU ({self}) differs from the policy's reference values in measurement {named}: {advice}"
            )


def read(content: bytes, where: str) -> ReferenceValues:
    """A file of reference values."""
    table = parse(content, _no_files, where)
    measured = table.table("measurements")
    reference_values = ReferenceValues(
        model=_word(table, "model"),
        driver=_word(table, "driver"),
        vbios=_word(table, "vbios"),
        firmware_ids=table.hexes("firmware_id", nvidia_chain.FIRMWARE_ID_BYTES),
        measurements={_index(measured, name): measured.hexes(name, spdm.MEASUREMENT_BYTES) for name in measured.names},
    )
    table.done()
    if not reference_values.measurements:
        raise measured.error("holds no measurement")
    return reference_values


def write(reference_values: ReferenceValues) -> str:
    """The file that `read` reads."""
    heads = zip(("model", "driver", "vbios"), reference_values.key, strict=True)
    lines = [f'{name} = "{value}"' for name, value in heads]
    lines += [f"firmware_id = {_listed(reference_values.firmware_ids)}", "", "[measurements]"]
    lines += [f"{index} = {_listed(values)}" for index, values in sorted(reference_values.measurements.items())]
    return "\n".join(lines) + "\n"


# -- parts ----------------------------------------------------------------------------------------------------------


def _no_files(path: str, limit: int) -> bytes:
    raise PolicyError("a file of reference values names no other file")


def _word(table: Table, name: str) -> str:
    value = table.text(name)
    if len(value) > 32 or not value.isascii() or " " in value or '"' in value or "\\" in value:
        raise table.error(f"{name} must be a short word, as `ringfence evidence measure` prints it")
    return value


def _index(table: Table, name: str) -> int:
    if not name.isascii() or not name.isdigit() or name != str(int(name[:4])) or not 1 <= int(name) <= 255:
        raise table.error("the names in it must be the measurements' numbers, 1 to 255")
    return int(name)


def _values(values: tuple[bytes, ...]) -> bytes:
    return encoding.number(len(values), 2) + b"".join(sorted(values))


def _listed(values: tuple[bytes, ...]) -> str:
    texts = [f'"{value.hex()}"' for value in values]
    return texts[0] if len(texts) == 1 else "[" + ", ".join(texts) + "]"
