"""The end of the stage for a source whose chunks all have receipts: manifests, rejected records, report."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from pipeline.common.errors import UserError
from pipeline.common.format import counted
from pipeline.config.data import HELD_OUT
from pipeline.config.root import Config
from pipeline.data.chat.template_files import TEMPLATE_FILE
from pipeline.data.datasets.files import TRAIN
from pipeline.data.datasets.manifest import CODE_VERSION, part_record, write_dataset
from pipeline.data.preprocess.report import SourceReport
from pipeline.data.preprocess.source_plan import SourcePlan
from pipeline.data.preprocess.splits import splits_in_words
from pipeline.data.sources.damage import in_words
from pipeline.data.sources.records import EMPTY, NO_PAGE, NULL_TEXT
from pipeline.data.sources.templates.chat_template import ChatTemplate
from pipeline.data.tokenization.coverage import Coverage, covered
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.data.work.bad_input import BadInput, put_changed, reasons_in_words
from pipeline.data.work.receipt_totals import Counts
from pipeline.data.work.receipts import Receipts
from pipeline.data.work.units import chunk_order

REPORT_FILE = "report.json"


class Finalizer:
    """Finishes one source. Memory: some hundred bytes a chunk.

    Args:
        plan: of the source.
        config: the run.
        tokenizer: of the run.
        start_over: how to begin again with repaired files, for messages.
        rejected_engines: engines that were seen to give other ids than `tokenizers`, with the evidence.
        receipts: of the source, complete.
    """

    def __init__(
        self,
        plan: SourcePlan,
        config: Config,
        tokenizer: Tokenizer,
        start_over: str,
        rejected_engines: dict[str, str],
        receipts: Receipts,
    ) -> None:
        self._plan = plan
        self._receipts = receipts
        self._config = config
        self._tokenizer = tokenizer
        self._start_over = start_over
        self._folder = config.data_dir / plan.found.source.name
        self.report = SourceReport(
            plan.found.source.name,
            self._folder,
            len(plan.units),
            rejected_engines=rejected_engines,
            bytes=plan.found.bytes,
        )
        self.parts: dict[str, npt.NDArray[Any]] = {}
        """`PART` records of each split in the order of the dataset."""
        self._inner_ends: Counter[str] = Counter()
        self._text_bytes: dict[str, list[int]] = {}
        # By split, at the end of each earlier generation.
        self._parts_before: list[int] = []

    def check(self) -> None:
        """Sum up the receipts, collect the rejected records.

        Raises:
            UserError: a file is damaged, too many records are bad, or nothing is left to train on.
        """
        report, seed = self.report, self._config.data.preprocess.seed
        bad = BadInput(
            self._folder, report.name, self._plan.units, self._plan.found.reader, self._receipts, self._start_over
        )
        curated: Counter[str] = Counter()
        engines: Counter[str] = Counter()
        report.edited_bytes = 0
        masks = 0 if self._plan.found.reader.keeps_mask else None
        report.splits = {name: Counts(trained_tokens=masks) for name in self._plan.splits.names}
        report.coverage = {name: Coverage() for name in self._plan.splits.names}
        rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in self._plan.splits.names}
        order = []
        record = part_record(
            weights=self._plan.found.reader.weight_key is not None, mask=self._plan.found.reader.keeps_mask
        )
        names = record.names[4:] if record.names else ()
        generations: list[int] = []
        self._inner_ends.clear()
        ends = [end for _, end in self._plan.earlier]
        self._text_bytes = {name: [0] * len(ends) for name in self._plan.splits.names}
        for receipt in (receipt for unit in self._plan.units for receipt in self._receipts.of(unit.index)):
            engines[receipt["engine"]] += 1
            curated.update(receipt.get("curated", {}))
            report.edited_bytes += receipt.get("edited_bytes", 0)
            report.checked += receipt["checked"]
            unit, chunk = receipt["unit"], receipt["link"]
            order.append(chunk_order(seed, self._plan.units[unit], chunk))
            generations.append(bisect_right(ends, unit))
            for name, split in receipt["splits"].items():
                hashes = (int(split["files"].get(f, {"xxh3": "0"})["xxh3"], 16) for f in names)
                report.coverage[name].add(split)
                rows[name].append((split["tokens"], split["documents"], unit, chunk, *hashes))
                self._inner_ends[name] += split.get("inner_ends", 0)
                trained = split.get("trained_tokens")
                report.splits[name].add(Counts(split["documents"], split["tokens"], split["text_bytes"], trained))
                for number in range(generations[-1], len(ends)):
                    self._text_bytes[name][number] += split["text_bytes"]
        report.curated = dict(sorted(curated.items()))
        report.rejected = dict(sorted(bad.rejected.items()))
        report.engines = dict(sorted(engines.items()))
        # Within generations: parts are appended, so that documents keep their numbers.
        places = np.lexsort((np.array(order, dtype=np.uint64), np.array(generations)))
        self._parts_before = np.searchsorted(np.sort(generations), np.arange(1, len(ends) + 1)).tolist()
        self.parts = {name: np.array(table, dtype=record)[places] for name, table in rows.items()}
        bad.write()
        report.records, report.damaged, report.first_rejected = bad.records, bad.damaged, bad.first
        bad.check(self._config.data.preprocess)
        covered(list(report.coverage.values())).check(report.name, self._config.data.preprocess.max_unknown)
        if self._plan.found.held_out:
            if not report.splits[HELD_OUT].documents:
                raise self._nothing("to score", bad.rejected)
        elif not report.splits[TRAIN].documents:
            raise self._nothing("to train on", bad.rejected)

    def write(self) -> SourceReport:
        """Write the manifests of `parts` and the report."""
        path = self._folder / REPORT_FILE
        self.report.is_first = not path.exists()
        # The training split last: what is new is used when all splits have it.
        for name, parts in reversed(self.parts.items()):
            coverage = self.report.coverage[name]
            about = {
                "source": self.report.name,
                "split": name,
                "text_bytes": self.report.splits[name].text_bytes,
                "unknown_tokens": coverage.unknown_tokens,
                "round_trip": coverage.round_trip,
                "trained_tokens": self.report.splits[name].trained_tokens,
                "inner_ends": self._inner_ends[name],
                "salvaged_bytes": sum(each.salvaged for each in self.report.damaged) or None,
                "settings": self._plan.settings,
                "config_hash": self._plan.config_hash,
                "code_version": CODE_VERSION,
            }
            hashes = [config_hash for config_hash, _ in self._plan.earlier]
            earlier = list(zip(self._parts_before, self._text_bytes[name], hashes, strict=True))
            _, is_new = write_dataset(self._folder / name, parts, self._tokenizer, about, earlier, self._more_files())
            if is_new:
                self.report.written.insert(0, self._folder / name)
        text = orjson.dumps(self.report.as_json(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        if put_changed(path, text):
            self.report.written.append(path)
        return self.report

    def _more_files(self) -> dict[str, bytes]:
        """Files beside the tokenizer: the chat template that the text was made with."""
        template = self._plan.found.reader.template
        return {TEMPLATE_FILE: template.template.encode()} if isinstance(template, ChatTemplate) else {}

    def _nothing(self, use: str, rejected: Counter[str]) -> UserError:
        records = self.report.records
        empty, curated = rejected[EMPTY] + rejected[NULL_TEXT], sum(self.report.curated.values())
        elsewhere, pageless = records - rejected.total() - curated, rejected[NO_PAGE]
        bad = rejected.total() - empty - pageless
        kinds = [
            (bad, f"bad ({reasons_in_words(rejected)})"),
            (empty, "empty"),
            (pageless, NO_PAGE),
            (curated, "removed by data.curate"),
            (elsewhere, "held out"),
        ]
        what = " and ".join(f"{count} {'is' if count == 1 else 'are'} {kind}" for count, kind in kinds if count)
        found = f"of {counted(records, 'record')} {what}" if records else "its files hold no records"
        if self.report.damaged:
            found = f"{found if records else 'no record was read'}; {in_words(self.report.damaged, self.report.bytes)}"
        lower = f", or lower data.splits ({splits_in_words(self._config.data)})" if elsewhere else ""
        is_cut = any(each.is_cut for each in self.report.damaged)
        salvages = self._config.data.preprocess.on_damaged_file == "salvage" or self._plan.found.source.type in (
            "text",
            "html",
        )
        ways = ", or fetch the damaged files again" if self.report.damaged else ""
        ways += ", or set data.preprocess.on_damaged_file: salvage" if is_cut and not salvages else ""
        return UserError(f"source {self.report.name!r} has no document {use}: {found}; add documents{lower}{ways}")
