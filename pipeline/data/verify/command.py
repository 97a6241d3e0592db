"""`pipeline data verify`: the check of datasets and packs, with repair and seals where they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from pipeline.common import storage
from pipeline.common.console import alarm, echo
from pipeline.common.errors import UserError
from pipeline.common.hashing import put_sealed
from pipeline.config.load import load_run
from pipeline.config.root import Config
from pipeline.data.datasets.files import TRAIN
from pipeline.data.datasets.manifest import REPAIR
from pipeline.data.datasets.open import dataset_folder
from pipeline.data.datasets.packing.verify import verify_packs
from pipeline.data.datasets.verify import Verification, verify
from pipeline.data.verify.repair import repair


def verify_all(
    data: Path,
    overrides: Sequence[str],
    console: Console,
    *,
    repairs: bool = False,
    dry_run: bool = False,
    seals: bool = False,
) -> bool:
    """Check datasets, print what is wrong, and repair it if that is asked for; returns whether all is sound.

    Args:
        data: folder of a dataset, or of several; or a run file, for all datasets of its sources.
        overrides: `key.path=value` for the run file.
        console: for the progress bar.
        repairs: make damaged parts again.
        dry_run: only say what would be made again.
        seals: add the hashes that files of earlier versions lack, if all else is sound.

    Raises:
        UserError: there is no dataset.
    """
    if dry_run and not repairs:
        raise UserError("--dry-run shows what --repair would do; add --repair")
    config, folders = None, [data]
    if data.is_file() or (data.suffix in (".yaml", ".yml") and not data.is_dir()):
        config = load_run(data, overrides)
        inputs = config.data.inputs.values()
        made = [dataset_folder(config, source, TRAIN).parent if source.dataset else None for source in inputs]
        folders = [*([config.data_dir] if None in made else []), *dict.fromkeys(filter(None, made))]
    elif overrides:
        raise UserError(f"{overrides[0]!r} overrides a key of a run file, but {data} is not one; name the run file")
    elif not data.is_dir() and any(data.with_name(data.name + suffix).exists() for suffix in ("", ".bin", ".idx")):
        raise UserError(
            f"{data} is a pair of .bin and .idx without a manifest, so nothing says what its bytes should be: verify "
            "the dataset that it was merged from, and merge that again (`pipeline data merge`); or adopt it"
        )
    sound = [_verify_folder(folder, config, console, repairs, dry_run, seals) for folder in folders]
    return all(sound)


def _seal(found: Verification, seals: bool) -> None:
    """Give sound files of earlier versions the hash of their own that they lack; or say that they lack it."""
    if not found.unsealed:
        return
    if seals:
        for path in found.unsealed:
            put_sealed(path, storage.get_json(path))
        echo(f"sealed: {len(found.unsealed):,} manifests, plans and receipts have a hash of their own now")
    else:
        echo(
            f"note: {len(found.unsealed):,} manifests, plans and receipts of an earlier version have no hash of their "
            f"own ({found.unsealed[0]}, say): a change that agrees with all other files is not seen in them. To add "
            "the hashes, run the same command with --seal"
        )


def _verify_folder(
    folder: Path, config: Config | None, console: Console, repairs: bool, dry_run: bool, seals: bool
) -> bool:
    found = verify(folder)
    for problem in found.problems:
        alarm("bad:", problem)
    if found.problems and not repairs:
        if found.lost or any(dataset not in found.adopted for dataset, _, _ in found.damaged):
            alarm("to repair:", "run the same command with --repair: it makes parts again from the source files")
        for advice in found.repairs:
            alarm("to repair:", advice)
        return False
    if not found.problems:
        return _verify_packs(folder, found, seals)
    result = repair(found, config, console, dry_run=dry_run)
    for line in result.done:
        echo(f"{'would be made again' if dry_run else 'made again'}: {line}")
    for line in result.failed:
        alarm("not repaired:", line)
    if not result.done and not result.failed:
        alarm("not repaired:", f"no part is damaged; {REPAIR}")
    if dry_run or not result.done:
        return False
    left = verify(folder)
    for problem in left.problems:
        alarm("still bad:", problem)
    return not left.problems and _verify_packs(folder, left, seals)


def _verify_packs(folder: Path, datasets: Verification, seals: bool) -> bool:
    """Check the packs of datasets that are sound, and print the result of both."""
    packs = verify_packs(folder)
    for problem in packs.problems:
        alarm("bad:", problem)
    for advice in packs.repairs:
        alarm("to repair:", advice)
    if not packs.problems:
        what = "everything that has a hash" if datasets.unsealed else "everything"
        echo(f"{folder}: {', '.join(filter(None, map(str, (datasets, packs))))}: {what} is as it was written")
        _seal(datasets, seals)
    return not packs.problems
