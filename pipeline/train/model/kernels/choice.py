"""Choice of the kernel of attention: a function of the device, of installed packages, and of the model."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from pipeline.common.errors import UserError, install_extra
from pipeline.config.model import ModelConfig
from pipeline.config.train import AttentionConfig, TrainConfig
from pipeline.train.model.decoder_spec import DecoderSpec
from pipeline.train.model.kernels.attention_mask import Kernel
from pipeline.train.model.kernels.packed import FLASH_MODULES, Flash, Varlen, flash_function, followed, takes_soft_caps
from pipeline.train.model.kernels.packed_sinks import takes_sinks
from pipeline.train.model.kernels.sdpa import Sdpa
from pipeline.train.model.kernels.te import TransformerEngine
from pipeline.train.model.part_spec import KernelUse, Reach

Backend = Literal["sdpa", "flex", "varlen", "flash", "te"]

FUSED = ("varlen", "flash", "te")
"""Backends that compute in 16 bits alone."""
MOST = 256
"""Head size that they take at most; they take multiples of `MULTIPLE`."""
MULTIPLE = 8

_CARDS = {2: range(8, 13), 3: range(9, 10), 4: range(9, 12)}
"""Major compute capabilities by version of flash-attn."""
_FLASH4_HEAD = 128
"""Head size that version 4 takes at most, on all of its cards."""


@dataclass(frozen=True)
class DeviceCaps:
    """Capabilities of a device: its kind, its generation, and the packages with kernels for it."""

    device: str
    """cpu or cuda."""
    capability: tuple[int, int] = (0, 0)
    """Compute capability of a GPU."""
    flash: frozenset[int] = frozenset()
    """Versions of flash-attn that are installed."""
    te: bool = False
    """True if Transformer Engine is installed."""
    unfit: Mapping[int, str] = field(default_factory=dict)
    """Reason why a version of flash-attn that was tried cannot be taken, by version."""
    fla: bool = False
    """True if fla-core is installed."""

    @classmethod
    def of(cls, device: torch.device) -> DeviceCaps:
        """Capabilities of a device. No package is imported: its errors do not concern those who do not use it."""
        if device.type != "cuda":
            return cls(device.type)
        capability, te = torch.cuda.get_device_capability(device), _folder("transformer_engine")
        return cls("cuda", capability, _flash_versions(), te, fla=_folder("fla"))


@dataclass(frozen=True)
class KernelRequirements:
    """Requirements of a model on a kernel."""

    documents: bool
    """Tokens attend to those of their document alone."""
    windows: bool
    """True if some layer sees the tokens near a token alone."""
    head_size: int
    """Of the layer that demands most, see `hardest_size`."""
    compute: str
    """fp32, bf16 or fp16."""
    deterministic: bool = False
    compiled: bool = False
    """True within compiled layers."""
    both: bool = False
    """True if some layer sees tokens after a token."""
    soft_cap: bool = False
    sinks: bool = False
    prefixes: bool = False
    """Documents have prefixes, which see themselves in both directions."""
    biased: bool = False
    """True if some layer has relative positions, whose attention no backend computes: it has all scores in memory."""
    pieces: bool = False
    """Kernels get pieces of a sequence, of which some layer sees windows to both sides."""

    @classmethod
    def of(
        cls, model: ModelConfig, spec: DecoderSpec, train: TrainConfig, compiled: bool, cut: bool = False
    ) -> KernelRequirements:
        """Requirements of a training, whose sequences are perhaps cut into pieces."""
        uses = [use for use in spec_uses(spec) if not use.bias]
        return cls(
            model.document_attention,
            any(use.reach.back is not None or use.reach.ahead for use in uses),
            hardest_size(uses),
            train.precision.compute,
            train.deterministic,
            compiled,
            both=any(use.reach.ahead != 0 for use in uses),
            soft_cap=any(use.soft_cap is not None for use in uses),
            sinks=any(use.sinks for use in uses),
            biased=len(uses) < len(spec_uses(spec)),
            pieces=cut and any(windows_to_both(use.reach) for use in uses),
        )


def spec_uses(spec: DecoderSpec) -> list[KernelUse]:
    """The different demands of a model's layers on the kernel."""
    mixers = [part for layer in spec.different_layers for part in (layer.mixer, layer.cross) if part is not None]
    return [use for part in mixers if (use := part.kernel) is not None]


def windows_to_both(reach: Reach) -> bool:
    """True if a token sees some of those after it, and some that come before or after are out of its reach."""
    return reach.ahead != 0 and reach != Reach(None, None)


def hardest_size(uses: Sequence[KernelUse]) -> int:
    """The head size that fewest kernels take: one besides the multiples of `MULTIPLE`, or else the largest; or 0.

    A kernel that wants values of the size of keys gets the smaller ones filled up.
    """
    sizes = [max(use.head_dim, use.value_dim) for use in uses]
    return max(sizes, key=lambda size: (size % MULTIPLE > 0, size), default=0)


@dataclass(frozen=True)
class KernelChoice:
    """A backend, and why it is taken."""

    backend: Backend
    reason: str
    version: int | None = None
    """Version of flash-attn."""
    slow: bool = False
    """True where the reason is that no better kernel fits: worth a warning."""

    def build(self, deterministic: bool) -> Kernel:
        """The kernel itself.

        Raises:
            UserError: Transformer Engine cannot be imported.
        """
        if self.backend == "flash":
            assert self.version is not None
            return Flash(self.version, deterministic)
        if self.backend == "flex":
            # It imports the compiler, which takes a second or two.
            from pipeline.train.model.kernels.flex import Flex

            return Flex()
        if self.backend == "te":
            try:
                return TransformerEngine()
            except Exception as error:  # its import looks for libraries in ways of its own
                raise UserError(
                    f"train.attention.backend=te needs the package transformer-engine, which {_not_imported(error)}: "
                    "repair or reinstall it, or set train.attention.backend=auto"
                ) from error
        return Sdpa() if self.backend == "sdpa" else Varlen()

    def __str__(self) -> str:
        version = "" if self.version is None else f" {self.version}"
        return f"{self.backend}{version} ({self.reason})"


def choose(config: AttentionConfig, need: KernelRequirements, machine: DeviceCaps) -> KernelChoice:
    """The kernel of a training.

    Raises:
        UserError: The backend that is named is not installed, or not for this device or model.
    """
    choice = _choose(config, need, machine)
    if need.biased:
        return replace(choice, reason=f"{choice.reason}; with relative positions scores are in memory")
    return choice


def _choose(config: AttentionConfig, need: KernelRequirements, machine: DeviceCaps) -> KernelChoice:
    if config.backend == "auto":
        return _best(need, machine)
    if obstacle := _obstacle(config.backend, need, machine):
        raise UserError(f"train.attention.backend={config.backend} {obstacle}, or train.attention.backend=auto")
    version = _flash_version(need, machine) if config.backend == "flash" else None
    return KernelChoice(config.backend, "as the run file says", version)


def choose_on(config: AttentionConfig, need: KernelRequirements, device: torch.device) -> KernelChoice:
    """The kernel that `choose` takes on this machine, after importing the flash-attn that it takes.

    Raises:
        UserError: See `choose`.
    """
    machine = DeviceCaps.of(device)
    while True:
        choice = choose(config, need, machine)
        if choice.version is None or not (why := _unfit(choice.version, need)):
            return choice
        machine = replace(machine, flash=machine.flash - {choice.version}, unfit={**machine.unfit, choice.version: why})


def _unfit(version: int, need: KernelRequirements) -> str | None:
    """The fault of a version of flash-attn that is installed, if it has one; it is imported."""
    try:
        flash_function(version)
    except Exception as error:  # built for another torch, it may end in anything
        return _not_imported(error)
    if need.compiled and not followed(version):
        return "is a build that torch.compile cannot follow"
    if need.soft_cap and not takes_soft_caps(version):
        return "has no soft caps, which came with 2.6"
    if need.sinks and not takes_sinks(f"flash {version}"):
        return "has no passes that sinks can be added to, which came with 2.7"
    return None


def _not_imported(error: Exception) -> str:
    return f"cannot be imported ({type(error).__name__}: {error})"


def _best(need: KernelRequirements, machine: DeviceCaps) -> KernelChoice:
    if machine.device == "cpu":
        return KernelChoice("sdpa", "the device is a CPU")
    if need.compute == "fp32" and not need.soft_cap:
        return KernelChoice("sdpa", "fp32 is computed by torch's own kernels alone")
    hidden = ["documents"] * need.documents + ["windows"] * need.windows + ["prefixes"] * need.prefixes
    if not hidden and not need.soft_cap:
        seen = "others" if need.both else "that come before"
        return KernelChoice("sdpa", f"tokens see all {seen}, for which torch's own flash kernels need no mask")
    what = " and ".join(hidden + ["soft caps"] * need.soft_cap)
    order: tuple[Backend, ...] = ("flash", "varlen", "flex")
    for backend in order:
        if not _obstacle(backend, need, machine):
            version = _flash_version(need, machine) if backend == "flash" else None
            unfit = "".join(f"; flash-attn {number} {why}" for number, why in machine.unfit.items())
            return KernelChoice(backend, f"{what} without {'a mask' if hidden else 'scores'} in memory{unfit}", version)
    if need.soft_cap:
        raise UserError(
            "train.attention.backend=auto finds no kernel for the soft caps of this model's attention on a GPU of "
            f"compute capability {_dotted(machine)}: use one from 8.0 on, or set launch.device=cpu"
        )
    return KernelChoice(
        "sdpa",
        f"{what} as masks of sequence x sequence in memory, since no other backend takes a GPU of compute "
        f"capability {_dotted(machine)} and heads of {need.head_size}",
        slow=True,
    )


def _obstacle(backend: Backend, need: KernelRequirements, machine: DeviceCaps) -> str | None:
    """Why a backend is not possible and what to set instead; None: it is."""
    if backend == "sdpa" and machine.device == "cpu":
        return None
    if term := unknown_term(backend, need):
        return f"has no {term} on a GPU, which this model has: set train.attention.backend=flex"
    if backend == "sdpa":
        return None
    if machine.device != "cuda":
        return f"needs a CUDA device, but this run is on a {machine.device.upper()}: set train.attention.backend=sdpa"
    if backend in FUSED and need.compute == "fp32":
        return "computes in 16 bits only, but train.precision.compute=fp32: set train.precision.compute=bf16"
    if backend in FUSED and (need.head_size % MULTIPLE or need.head_size > MOST):
        return (
            f"takes head sizes that are multiples of {MULTIPLE} up to {MOST}, but this model's is {need.head_size}: "
            "set train.attention.backend=flex"
        )
    if machine.capability < (8, 0):
        return f"needs compute capability 8.0, but this GPU has {_dotted(machine)}: set train.attention.backend=sdpa"
    if backend in FUSED and need.pieces:
        return (
            "takes windows to both sides of whole sequences alone, but parallel.cp_method=all_gather cuts them: set "
            "train.attention.backend=flex"
        )
    if backend == "te" and need.compiled:
        return "cannot be followed by torch.compile: set train.compile=false"
    if backend == "te" and not machine.te:
        return f"needs the package transformer-engine: install the extra te ({install_extra('te')})"
    if backend == "flash" and _flash_version(need, machine) is None:
        if machine.flash or machine.unfit:
            have = [f"{version}" for version in sorted(machine.flash)]
            have += [f"{version}, which {why}" for version, why in machine.unfit.items()]
            return (
                f"finds no version of flash-attn for this GPU (compute capability {_dotted(machine)}), heads of "
                f"{need.head_size} and these settings, only {'; '.join(have)}: install version 2 with the extra flash"
            )
        return f"needs the package flash-attn: install the extra flash ({install_extra('flash')})"
    return None


def unknown_term(backend: str, need: KernelRequirements) -> str | None:
    """A term of a model's attention that a backend does not compute on a GPU; None: it computes all.

    torch's own kernels compute sinks as one more key, and kernels of packed documents by their passes.
    """
    if need.soft_cap and backend in ("sdpa", "varlen", "te"):
        return "soft caps"
    if need.sinks and backend == "te":
        return "sinks"
    return "prefixes" if need.prefixes and backend in FUSED else None


def _flash_version(need: KernelRequirements, machine: DeviceCaps) -> int | None:
    """Version of flash-attn for a need: that for Hopper, then the one in use for years; None: there is none."""
    for version in (3, 2, 4):
        if version not in machine.flash or machine.capability[0] not in _CARDS[version]:
            continue
        # Version 4 makes its kernels when it is called, which torch.compile cannot follow.
        if version == 4 and (need.compiled or need.deterministic or need.head_size > _FLASH4_HEAD):
            continue
        # Its backward pass is not known to have soft caps, and cannot be called for sinks.
        if version == 4 and (need.soft_cap or need.sinks):
            continue
        return version
    return None


def _dotted(machine: DeviceCaps) -> str:
    return ".".join(map(str, machine.capability))


def _flash_versions() -> frozenset[int]:
    """Installed versions of flash-attn. In the folder of version 2 is an early version 4, without what that imports."""
    found = {version for version, module in FLASH_MODULES.items() if _folder(*module.split("."))}
    if not (_distribution("flash-attn-4") and _folder("cutlass")):
        found -= {4}
    return frozenset(found)


def _folder(package: str, module: str | None = None) -> bool:
    """True if there is a package, and a module in its folder; nothing is imported."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    if spec is None or module is None:
        return spec is not None
    folders = map(Path, spec.submodule_search_locations or ())
    return any((folder / module).is_dir() or (folder / f"{module}.py").is_file() for folder in folders)


def _distribution(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
