"""The formats that Adam's two moments are kept in, and which tensor gets which."""

from __future__ import annotations

from mt_lightning.errors import ConfigError
from mt_lightning.optim.packed.panels import C5
from mt_lightning.optim.packed.place import Place
from mt_lightning.optim.packed.records import FP32, M4V4, M8V8, R0, R1, R2, Format

MIN_PACKED_NUMEL = 4096
"""Below it, "dynamic" keeps fp32: such tensors take no memory and often matter most."""

MIN_FEW_BITS_NUMEL = 1 << 18
"""Below it, "dynamic" takes m8v8. Formats of few bits cost a little loss in small models that are
trained from scratch, and small tensors have few bytes to save: of SmolLM2-135M they are 5%."""

C5_WIDTHS = (256, 32768)
"""Least and most columns with which "dynamic" takes C5. In narrow matrices a block spans rows of
different scale; beside wide ones its column vectors would need panels of many megabytes."""

C5_MIN_ROWS = 64
"""Below it, "dynamic" takes R1: the column vectors would take much beside few rows."""

FORMATS: dict[str, Format] = {format.name: format for format in (FP32, M8V8, C5, M4V4, R2, R1, R0)}
"""Every format by name."""

DYNAMIC = "dynamic"
"""The name that leaves the choice to `choose`."""


def choose(name: str, place: Place) -> Format:
    """Return the format of a tensor.

    Args:
        name: "dynamic" for fp32 where a tensor has less than 4096 elements or two dimensions, m8v8
            where it has less than 262144 elements, C5 where it is a matrix (64 rows or more, 256 to
            32768 columns), and R1 elsewhere; the name of a format to take it for every tensor.
        place: The tensor.

    Raises:
        ConfigError: There is no format of this name.
    """
    if name != DYNAMIC:
        return named(name)
    if place.dims < 2 or place.numel < MIN_PACKED_NUMEL:
        return FP32
    if place.numel < MIN_FEW_BITS_NUMEL:
        return M8V8
    least, most = C5_WIDTHS
    return C5 if least <= place.width <= most and place.rows >= C5_MIN_ROWS else R1


def named(name: str) -> Format:
    """Return the format that has a name.

    Raises:
        ConfigError: There is none.
    """
    if name not in FORMATS:
        raise ConfigError(
            f"There is no state format {name!r}. Use one of {', '.join([DYNAMIC, *FORMATS])}."
        )
    return FORMATS[name]
