"""Windows of made-up documents, and the way back from what span corruption makes of them."""

from itertools import pairwise

import numpy as np

END, START = 0, 900
SENTINELS = range(100, 800)
FIRST = 1000


def window(chance, length, mean):
    """Ids [L + 1], and where documents of `mean` tokens begin in them. Ids tell where they stood."""
    sizes = []
    while sum(sizes) < length + 1:
        sizes.append(int(chance.geometric(1 / mean)))
    begins = np.cumsum([0, *sizes])
    begins = begins[begins <= length]
    ids = np.arange(FIRST, FIRST + length + 1)
    ids[begins[1:] - 1] = END
    return ids, begins


def count_valid(objective, begins, length, key):
    return int(objective.valid(begins, np.array([0, len(begins)]), length, lambda row: key)[0])


def sides(arranged, encoder):
    """Documents of both sides: (encoder's tokens, decoder's inputs, targets, weights), lists each."""
    total = len(arranged.tokens)
    begins = arranged.begins.tolist()
    first, second = ([b for b in begins if (b < encoder) == left] for left in (True, False))
    assert first[0] == 0 and second[0] == encoder and len(first) == len(second)
    return [
        (
            arranged.tokens[a:b].tolist(),
            *(part[c:d].tolist() for part in (arranged.tokens, arranged.targets, arranged.weight)),
        )
        for a, b, c, d in zip(first, [*first[1:], encoder], second, [*second[1:], total], strict=True)
    ]


def inverted(arranged, encoder, modes=()):
    """The text that both sides were made from, END's that only close the encoder's text included."""
    text = []
    assert not arranged.weight[:encoder].any()
    for enc, inputs, targets, weight in sides(arranged, encoder):
        if not any(weight):
            assert set(enc) == set(targets) == {END}
            continue
        assert all(weight) and targets[-1] == END and inputs == [START, *targets[:-1]]
        if modes:
            assert enc.pop(0) in modes
        noise, last = {}, None
        for token in targets[:-1]:
            if token in SENTINELS:
                last = token
                noise[last] = []
            else:
                noise[last].append(token)
        found = [token for token in enc if token in SENTINELS]
        # Sentinels restart with each piece, and stand in the same order on both sides.
        assert found == list(noise) == list(SENTINELS[: len(found)])
        assert all(noise.values()) and enc[:1] != [SENTINELS[0]]
        assert not any(one in SENTINELS and two in SENTINELS for one, two in pairwise(enc))
        for token in enc:
            text += noise.get(token, [token])
    return text
