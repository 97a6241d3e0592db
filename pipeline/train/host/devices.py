"""Devices that runs are planned for: the figures of their vendors, and the memory that their drivers report."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pipeline.common.errors import UserError
from pipeline.train.host.shares import MeasuredShares, Shares, measured


@dataclass(frozen=True)
class Device:
    """A GPU in a node as it is usually built. Figures are stated ones but for the memory and what `measured` has."""

    name: str
    """Name that `pipeline plan --device` takes."""
    memory: str
    """Memory that the vendor states, in words."""
    memory_bytes: int
    """Memory that the driver reports (`nvidia-smi`, memory.total)."""
    flops: Mapping[str, float]
    """Dense peak of matrix products, FLOP/s, by number format: bf16, fp16, fp32 and, where there is one, fp8."""
    memory_bandwidth: float
    """Bytes a second."""
    link_bandwidth: float
    """Bytes a second one way, of a device to the others in its node."""
    network_bandwidth: float
    """Bytes a second one way, of a device to other nodes: its share of the node's adapters."""
    source: str
    """Source of the figures."""
    products_share: float = 0.6
    """Share of the peak that large matrix products are taken to reach if nothing was measured. An assumption: devices
    whose clocks fall under load reach less of it."""
    node_devices: int = 8
    """Devices in a node."""
    driver: str = field(default="", repr=False)
    """Regular expression for what the driver calls devices that have this peak."""
    gres: str = field(default="", repr=False)
    """The same for what sites call them in SLURM's gres, in lower case."""
    card: str = field(default="", repr=False)
    """Full name by the driver of the one device that all figures are of: only its measurements count."""
    measured: MeasuredShares | None = None
    """Shares that were measured on it; see `calibrated`."""

    @property
    def shares(self) -> Shares:
        """Shares of the peaks: measured, else assumed."""
        return Shares(self.products_share) if self.measured is None else self.measured.shares


_MIB, _TFLOPS, _TB_S, _GB_S, _GBIT_S = 2**20, 1e12, 1e12, 1e9, 1e9 / 8

# Tensor cores; for fp32 those of the ordinary cores, as torch computes fp32 without TF32.
_ALL = (
    Device(
        "a100",
        memory="80 GB",
        memory_bytes=81_920 * _MIB,
        flops={"bf16": 312 * _TFLOPS, "fp16": 312 * _TFLOPS, "fp32": 19.5 * _TFLOPS},
        memory_bandwidth=2.039 * _TB_S,
        link_bandwidth=300 * _GB_S,
        network_bandwidth=200 * _GBIT_S,
        products_share=0.75,
        source="NVIDIA A100 80GB SXM datasheet; network of a DGX A100: 200 Gbit/s per GPU",
        driver=r"NVIDIA A100[ -](SXM4|PCIE|PCIe)-(40|80)GB|NVIDIA A100 80GB PCIe",
        gres=r"(nvidia[_-])?a100([_-](sxm4|pcie))?([_-](40|80)gb)?([_-]pcie)?",
        card="NVIDIA A100-SXM4-80GB",
    ),
    Device(
        "h100",
        memory="80 GB",
        memory_bytes=81_559 * _MIB,
        flops={"bf16": 989 * _TFLOPS, "fp16": 989 * _TFLOPS, "fp32": 67 * _TFLOPS, "fp8": 1979 * _TFLOPS},
        memory_bandwidth=3.35 * _TB_S,
        link_bandwidth=450 * _GB_S,
        network_bandwidth=400 * _GBIT_S,
        source="NVIDIA H100 SXM datasheet; network of a DGX H100: 400 Gbit/s per GPU",
        driver=r"NVIDIA H100 80GB HBM3",
        gres=r"(nvidia[_-])?h100([_-]sxm5?)?([_-]80gb([_-]hbm3)?)?",
        card="NVIDIA H100 80GB HBM3",
    ),
    Device(
        "h100-pcie",
        memory="80 GB",
        memory_bytes=81_559 * _MIB,
        flops={"bf16": 756 * _TFLOPS, "fp16": 756 * _TFLOPS, "fp32": 51 * _TFLOPS, "fp8": 1513 * _TFLOPS},
        memory_bandwidth=2 * _TB_S,
        link_bandwidth=64 * _GB_S,
        network_bandwidth=200 * _GBIT_S,
        source="NVIDIA H100 PCIe product brief; PCIe 5 x16 without bridges; network taken as 200 Gbit/s per GPU",
        driver=r"NVIDIA H100 PCIe",
        gres=r"(nvidia[_-])?h100[_-]pcie",
        card="NVIDIA H100 PCIe",
    ),
    Device(
        "h200",
        memory="141 GB",
        memory_bytes=143_771 * _MIB,
        flops={"bf16": 989 * _TFLOPS, "fp16": 989 * _TFLOPS, "fp32": 67 * _TFLOPS, "fp8": 1979 * _TFLOPS},
        memory_bandwidth=4.8 * _TB_S,
        link_bandwidth=450 * _GB_S,
        network_bandwidth=400 * _GBIT_S,
        source="NVIDIA H200 SXM datasheet; network of a DGX H200: 400 Gbit/s per GPU",
        driver=r"NVIDIA H200",
        gres=r"(nvidia[_-])?h200([_-]sxm5?)?",
        card="NVIDIA H200",
    ),
    Device(
        "b200",
        memory="180 GB",
        memory_bytes=183_359 * _MIB,
        flops={"bf16": 2250 * _TFLOPS, "fp16": 2250 * _TFLOPS, "fp32": 75 * _TFLOPS, "fp8": 4500 * _TFLOPS},
        memory_bandwidth=8 * _TB_S,
        link_bandwidth=900 * _GB_S,
        network_bandwidth=400 * _GBIT_S,
        source="NVIDIA DGX B200 datasheet, an eighth of it; network: 400 Gbit/s per GPU",
        driver=r"NVIDIA B200",
        gres=r"(nvidia[_-])?b200",
        card="NVIDIA B200",
    ),
    Device(
        "gh200",
        memory="96 GB",
        memory_bytes=97_871 * _MIB,
        flops={"bf16": 989 * _TFLOPS, "fp16": 989 * _TFLOPS, "fp32": 67 * _TFLOPS, "fp8": 1979 * _TFLOPS},
        memory_bandwidth=4 * _TB_S,
        link_bandwidth=450 * _GB_S,
        network_bandwidth=200 * _GBIT_S,
        node_devices=4,
        source="NVIDIA GH200 datasheet, with HBM3; a node of four as in Alps, network: 200 Gbit/s per GPU",
        driver=r"NVIDIA GH200 (120|480)GB",
        gres=r"(nvidia[_-])?gh200([_-](120|480)gb)?",
    ),
    Device(
        "mi300x",
        memory="192 GB",
        # torch reports 191.98 GiB.
        memory_bytes=196_592 * _MIB,
        flops={
            "bf16": 1307.4 * _TFLOPS,
            "fp16": 1307.4 * _TFLOPS,
            "fp32": 163.4 * _TFLOPS,
            "fp8": 2614.9 * _TFLOPS,
        },
        memory_bandwidth=5.3 * _TB_S,
        link_bandwidth=448 * _GB_S,
        network_bandwidth=400 * _GBIT_S,
        source="AMD Instinct MI300X data sheet: 7 links of 64 GB/s one way; network taken as 400 Gbit/s per GPU",
        # No name of the driver's: a partition of one, with less of everything, may have the same.
        gres=r"(amd[_-])?(instinct[_-])?mi300x([_-]oam)?",
    ),
)
DEVICES: dict[str, Device] = {device.name: device for device in _ALL}
"""Devices by name, with assumed shares."""


def calibrated(device: Device) -> Device:
    """The device with the shares that were measured on its own card, where there are some."""
    found = measured(device.name)
    return replace(device, measured=found) if found is not None and found.driver == device.card else device


def find_device(name: str) -> Device:
    """The device of a name, calibrated: ours, or what sites call it in gres. Case does not matter.

    Raises:
        UserError: there is none of it.
    """
    found = DEVICES.get(name.lower()) or device_of_gres(name)
    if found is None:
        raise UserError(f"--device {name}: this device is unknown; take one of {', '.join(DEVICES)}")
    return calibrated(found)


def device_of_driver(name: str) -> Device | None:
    """The device with the peak of one that the driver gives this full name; None where it is not known.

    A slice of a device or a variant with other clocks is not known, which is better than a wrong figure. A variant with
    the same peak is not calibrated.
    """
    found = next((device for device in _ALL if re.fullmatch(device.driver, name)), None)
    return calibrated(found) if found is not None and found.card == name else found


def device_of_gres(name: str | None) -> Device | None:
    """The device that a site gives this name in gres; not calibrated."""
    return next((device for device in _ALL if name is not None and re.fullmatch(device.gres, name.lower())), None)
