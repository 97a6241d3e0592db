"""A dataset in memory, with every question answered by a plain scan of a list."""

from types import SimpleNamespace

import numpy as np

EOD = 0


class MemoryDataset:
    """Documents of the given lengths, end-of-document token included; every other token is its offset plus one."""

    manifest = SimpleNamespace(settings={})

    def __init__(self, lengths, dtype=np.int64):
        self.lengths = list(lengths)
        self._starts = [sum(self.lengths[:d]) for d in range(len(self.lengths) + 1)]
        self.ids = np.arange(1, self._starts[-1] + 1, dtype=dtype)
        self.ids[[start - 1 for start in self._starts[1:]]] = EOD
        self.owner = [d for d, length in enumerate(self.lengths) for _ in range(length)]

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

    def document_at(self, token):
        return self.owner[token]

    def document_start(self, document):
        return self._starts[document]

    def document_starts(self, start, count):
        return np.array([s for s in self._starts[:-1] if start <= s < start + count], np.int64)


class FlatDataset:
    """One endless-looking document of `tokens` tokens that takes no memory; token t is t mod 1000 + 1."""

    documents = 1

    def __init__(self, tokens):
        self.tokens = tokens

    def read(self, start, count):
        assert 0 <= start <= start + count <= self.tokens
        return np.arange(start, start + count) % 1000 + 1

    def document_at(self, token):
        return 0

    def document_start(self, document):
        return self.tokens * document

    def document_starts(self, start, count):
        return np.zeros(int(start == 0 and count > 0), np.int64)
