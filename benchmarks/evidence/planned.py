"""Memory and time of a step by plan, for items that compare them with what they measure."""

from __future__ import annotations

from train_gpu_variants import planned_bytes, planned_seconds

from pipeline.config import Config
from pipeline.train.planning.devices import device_of_driver
from pipeline.train.planning.timing import basis


def planned(config: Config, processes: int, device_name: str) -> dict[str, float | str | None]:
    """`planned_gb` (10^9 bytes, of the largest process), `planned_s` (of a step), `planned_from`: its basis.

    Args:
        config: The run file; all of its steps have one shape.
        processes: Of the run.
        device_name: As the driver gives it. All values are None where nothing is known of it, as of a CPU.

    Raises:
        UserError: The layout is refused.
    """
    device = device_of_driver(device_name)
    if device is None:
        return {"planned_gb": None, "planned_s": None, "planned_from": None}
    return {
        "planned_gb": round(planned_bytes(config, processes) / 1e9, 2),
        "planned_s": round(planned_seconds(config, processes, device), 5),
        "planned_from": basis(device),
    }
