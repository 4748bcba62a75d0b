"""Reference values of a GPU's firmware for one model, driver and VBIOS, from a file of the policy.

model = "GH100"
driver = "550.90.07"
vbios = "96.00.9F.00.01"
firmware_id = "f5c3..."       # of the firmware that the boot ROM started
[measurements]
1 = "0000..."                 # SHA-384; or a list of accepted values
2 = "8048..."

All GPUs of one model with one driver and VBIOS report the same values, so a policy needs one such file for each combination
in use. `ringfence evidence measure` writes it from the report of a trusted machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ringfence.admission import encoding
from ringfence.admission.policy_file.toml_table import TomlTable, no_files, parse
from ringfence.admission.proofs import nvidia_chain, spdm
from ringfence.errors import AdmissionError

_NAMED: Final = 8  # of the measurements that differ, in a message


@dataclass(frozen=True)
class ReferenceValues:
    """The accepted values for one combination of model, driver and VBIOS."""

    model: str
    driver: str
    vbios: str
    firmware_ids: tuple[bytes, ...]  #           accepted values
    measurements: dict[int, tuple[bytes, ...]]  # index: accepted values

    def __str__(self) -> str:
        return f"{self.model}, driver {self.driver}, VBIOS {self.vbios}"

    @property
    def key(self) -> tuple[str, str, str]:
        return self.model, self.driver, self.vbios

    def content(self) -> bytes:
        """Return a canonical encoding, independent of the order in the file."""
        parts = [encoding.text(each) for each in self.key]
        parts.append(_values(self.firmware_ids))
        for index in sorted(self.measurements):
            parts += [encoding.number(index, 1), _values(self.measurements[index])]
        return b"".join(parts)

    def compare(self, firmware_id: bytes, measurements: dict[int, bytes]) -> None:
        """Check that exactly these measurements are present with accepted values. Raises AdmissionError."""
        advice = "run firmware that the policy lists, or measure this one with `ringfence evidence measure`"
        if firmware_id not in self.firmware_ids:
            raise AdmissionError(
                f"a GPU ({self}) was started with firmware that is not in the policy's reference values: {advice}"
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
    """Read a file of reference values. Raises PolicyError."""
    table = parse(content, no_files, where)
    measured = table.table("measurements")
    reference_values = ReferenceValues(
        model=_short_text(table, "model"),
        driver=_short_text(table, "driver"),
        vbios=_short_text(table, "vbios"),
        firmware_ids=table.hexes("firmware_id", nvidia_chain.FIRMWARE_ID_BYTES),
        measurements={_index(measured, name): measured.hexes(name, spdm.MEASUREMENT_BYTES) for name in measured.names},
    )
    table.done()
    if not reference_values.measurements:
        raise measured.error("has no measurement")
    return reference_values


def write(reference_values: ReferenceValues) -> str:
    """Return the content of a file that `read` accepts."""
    heads = zip(("model", "driver", "vbios"), reference_values.key, strict=True)
    lines = [f'{name} = "{value}"' for name, value in heads]
    lines += [f"firmware_id = {_listed(reference_values.firmware_ids)}", "", "[measurements]"]
    lines += [f"{index} = {_listed(values)}" for index, values in sorted(reference_values.measurements.items())]
    return "\n".join(lines) + "\n"


# -- parts ----------------------------------------------------------------------------------------------------------


def _short_text(table: TomlTable, name: str) -> str:
    value = table.text(name)
    if len(value) > 32 or not value.isascii() or " " in value or '"' in value or "\\" in value:
        raise table.error(f"{name} must be a short text without spaces, as `ringfence evidence measure` prints it")
    return value


def _index(table: TomlTable, name: str) -> int:
    if not name.isascii() or not name.isdigit() or name != str(int(name[:4])) or not 1 <= int(name) <= 255:
        raise table.error("its keys must be the numbers of measurements, 1 to 255")
    return int(name)


def _values(values: tuple[bytes, ...]) -> bytes:
    return encoding.number(len(values), 2) + b"".join(sorted(values))


def _listed(values: tuple[bytes, ...]) -> str:
    texts = [f'"{value.hex()}"' for value in values]
    return texts[0] if len(texts) == 1 else "[" + ", ".join(texts) + "]"
