"""A dataset in memory, with every question answered by a plain scan of a list."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np

from pipeline.data.datasets.dataset import Pieces

EOD = 0


class OnePart:
    """What datasets of one part do alike."""

    def pieces(self, starts, counts):
        assert (counts > 0).all() and (starts >= 0).all() and (starts + counts <= self.tokens).all()
        nothing = np.zeros_like(starts)
        return Pieces(np.arange(len(starts)), nothing, nothing, starts, counts)

    def starts_of(self, documents):
        return np.array([self.document_start(document) for document in documents.tolist()], np.int64)

    def part_view(self, part, start, end):
        assert part == 0
        ids = np.empty(end - start, self.dtype)
        self.fill(start, ids)
        return ids

    def starts_in(self, pieces):
        """The documents of one piece after the other."""
        rows, tokens = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for row, (start, count) in enumerate(zip(pieces.start.tolist(), pieces.length.tolist(), strict=True)):
            found = self.document_starts(start, count)
            rows.append(np.full(len(found), row))
            tokens.append(found)
        return np.concatenate(rows), np.concatenate(tokens)


class MemoryDataset(OnePart):
    """Documents of the given lengths, end-of-document token included; every other token is its offset plus one."""

    folder = Path("memory")

    def __init__(self, lengths, dtype=np.int64):
        self.lengths = list(lengths)
        self._starts = [sum(self.lengths[:d]) for d in range(len(self.lengths) + 1)]
        self.ids = np.arange(1, self._starts[-1] + 1, dtype=dtype)
        self.ids[[start - 1 for start in self._starts[1:] if start]] = EOD
        self.owner = [d for d, length in enumerate(self.lengths) for _ in range(length)]
        tokenizer = SimpleNamespace(fingerprint="f", vocab_size=100_000, end_of_document=EOD)
        self.manifest = SimpleNamespace(settings={}, tokenizer=tokenizer, has_mask=False)

    def with_mask(self, mask):
        """Itself, with which tokens are trained on as targets."""
        self.mask = np.asarray(mask, np.uint8)
        assert len(self.mask) == self.tokens and not self.mask[self._starts[:-1]].any()
        self.manifest.has_mask = True
        return self

    def fill_mask(self, part, start, out):
        out[:] = self.mask[start : start + len(out)]

    def trained_targets(self, documents):
        counts = [int(self.mask[self._starts[d] : self._starts[d + 1]].sum()) for d in documents.tolist()]
        return np.array(counts, np.int64)

    @property
    def dtype(self):
        return self.ids.dtype

    @property
    def tokens(self):
        return len(self.ids)

    @property
    def documents(self):
        return len(self.lengths)

    def read(self, start, count):
        if not 0 <= start <= start + count <= self.tokens:
            raise IndexError((start, count))
        return self.ids[start : start + count].copy()

    def fill(self, start, out):
        out[:] = self.read(start, len(out))

    def document_at(self, token):
        return self.owner[token]

    def document_start(self, document):
        return self._starts[document]

    def document_starts(self, start, count):
        return np.array([s for s in self._starts[:-1] if start <= s < start + count], np.int64)


class FlatDataset(OnePart):
    """One endless-looking document of `tokens` tokens that takes no memory; token t is t mod 1000 + 1."""

    folder = Path("flat")
    documents = 1
    dtype = np.dtype(np.int64)

    def __init__(self, tokens):
        self.tokens = tokens

    def read(self, start, count):
        assert 0 <= start <= start + count <= self.tokens
        return np.arange(start, start + count) % 1000 + 1

    def fill(self, start, out):
        out[:] = self.read(start, len(out))

    def document_at(self, token):
        return 0

    def document_start(self, document):
        return self.tokens * document

    def document_starts(self, start, count):
        return np.zeros(int(start == 0 and count > 0), np.int64)
