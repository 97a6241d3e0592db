"""Accounting against going through every target of small runs."""

from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.data.order.blend import integer_weights, keyed_offset
from pipeline.data.order.consumption import accounts
from pipeline.data.order.journal import Journal
from pipeline.data.order.phases import plan_journal
from pipeline.data.order.run_length import check_end, exhaustions, run_length, warnings
from pipeline.data.order.sampler import Sampler
from pipeline.data.order.segments import Segment, SourceState
from pipeline.data.order.windows import Windows
from tests.data.preprocess.memory import FlatDataset

relaxed = settings(deadline=None, max_examples=40)


class Text(FlatDataset):
    dtype = np.dtype(np.int64)
    folder = Path("none")


def tokens_of(documents, tokens=97):
    """Tokens of a slice: documents of one token each."""
    return tokens if documents is None else documents[1] - documents[0]


def hand_made(seed, phases):
    """A journal and its sampler, with laps and cursors found by going through the samples.

    Each phase: (steps, batch size, sequence length, {source: (weight, slice, cap)}).
    """
    segments, step, sample, last = [], 0, 0, {}
    for steps, batch_size, length, sources in phases:
        weights = integer_weights({name: weight for name, (weight, _, _) in sources.items()})
        states = {}
        for name, (_, documents, cap) in sources.items():
            lap, cursor = 0, 0
            if name in last:
                before, lap, cursor = last[name]
                if before != (documents, length):
                    lap, cursor = lap + (cursor > 0), 0
            states[name] = SourceState(
                tokens=tokens_of(documents),
                documents=documents,
                weight=weights[name],
                offset=keyed_offset(seed, name),
                lap=lap,
                cursor=cursor,
                cap=cap,
            )
        segments.append(
            Segment(first_step=step, first_sample=sample, batch_size=batch_size, sequence_length=length, sources=states)
        )
        journal = Journal(seed=seed, segments=segments)
        counts = [{n: s.tokens // g.sequence_length for n, s in g.sources.items()} for g in segments]
        sampler = Sampler(journal, counts)
        drawn = Counter()
        for s in range(step, step + steps):
            drawn.update(journal.names[k] for k in sampler.step(s).source.tolist())
        for name, state in states.items():
            lap, cursor = divmod(state.cursor + drawn[name], counts[-1][name])
            last[name] = (state.documents, length), state.lap + lap, cursor
        step, sample = step + steps, sample + steps * batch_size
    return sampler


def enumerated(sampler, step):
    """By (source, slice): how often each token was a target."""
    seen, known = {}, {}
    for name, state, length, lap, position in windows_of(sampler, step):
        identity = name, state.tokens, length
        if identity not in known:
            known[identity] = Windows(Text(state.tokens), length, sampler.journal.seed, name)
        first = known[identity].phase(lap) + known[identity].window(lap, position) * length + 1
        counter = seen.setdefault((name, state.documents), Counter())
        counter.update(((first + np.arange(length)) % state.tokens).tolist())
    return seen


def windows_of(sampler, step):
    """All windows in the order of the run: (source, its state, sequence length, lap, position)."""
    journal = sampler.journal
    for s in range(step):
        segment = journal.segments[journal.segment_number(s)]
        for k, lap, position in zip(*(array.tolist() for array in sampler.step(s)[:3]), strict=True):
            name = journal.names[k]
            yield name, segment.sources[name], segment.sequence_length, lap, position


def left_out(sampler, step):
    """By (source, slice): tokens not drawn in laps after which the source changed its slice or sequence length."""
    journal, drawn, last, tokens = sampler.journal, Counter(), {}, {}
    for name, state, length, lap, _ in windows_of(sampler, step):
        drawn[name, state.documents, length, lap] += 1
        tokens[name, state.documents] = state.tokens
    for segment in journal.segments:
        if segment.first_step < step:
            for name, state in segment.sources.items():
                last[name] = state.documents, segment.sequence_length, state.lap
    result = Counter()
    for (name, documents, length, lap), count in drawn.items():
        if (documents, length) != last[name][:2] or lap < last[name][2]:
            result[name, documents] += (tokens[name, documents] // length - count) * length
    return result


slices = st.sampled_from([None, (0, 40), (40, 97), (10, 70)])
sources = st.dictionaries(
    st.sampled_from(["web", "code", "books"]), st.tuples(st.sampled_from([1, 2, 7]), slices, st.none()), min_size=1
)
phases = st.lists(
    st.tuples(st.integers(1, 25), st.integers(1, 4), st.sampled_from([1, 3, 8, 13, 31]), sources),
    min_size=1,
    max_size=4,
)


@relaxed
@given(seed=st.integers(0, 1000), phases=phases, data=st.data())
def test_equals_going_through_every_target(seed, phases, data):
    sampler = hand_made(seed, phases)
    step = data.draw(st.integers(0, sum(steps for steps, *_ in phases)))
    found, seen, left = accounts(sampler, step), enumerated(sampler, step), left_out(sampler, step)
    assert found.keys() == set(sampler.journal.names)
    for name, account in found.items():
        assert account.drawn == sum(sum(c.values()) for (n, _), c in seen.items() if n == name)
        for part in account.slices:
            counter = seen.get((name, part.documents), Counter())
            assert part.tokens == tokens_of(part.documents)
            assert part.drawn == sum(counter.values())
            assert part.epochs == part.drawn / part.tokens
            assert part.unseen == left[name, part.documents] and part.remaining is None
            if part.exact:
                assert part.unique == len(counter)
            else:
                assert 0 < part.unique <= min(part.tokens, part.drawn)
    assert all(any(p.documents == d for p in found[n].slices) for n, d in seen)


@relaxed
@given(seed=st.integers(0, 1000), steps=st.integers(0, 60), length=st.sampled_from([1, 2, 7, 24, 48, 50, 96, 97]))
def test_one_source_is_exact_at_any_step(seed, steps, length):
    """Many laps, with rests of the text of all sizes, also when a lap is one window."""
    sampler = hand_made(seed, [(60, 3, length, {"web": (1, None, None)})])
    (part,) = accounts(sampler, steps)["web"].slices
    seen = enumerated(sampler, steps).get(("web", None), Counter())
    assert part.exact and part.unique == len(seen)
    assert (part.lap, round(part.lap_share * (97 // length))) == divmod(3 * steps, 97 // length)


def test_the_expected_number_of_unique_tokens_is_right_on_average():
    """Two partial laps and no complete one: the mean over many seeds, within five standard errors."""
    differences = []
    for seed in range(150):
        sampler = hand_made(seed, [(4, 3, 4, {"web": (1, None, None)}), (5, 2, 6, {"web": (1, None, None)})])
        (part,) = accounts(sampler, 9)["web"].slices
        assert not part.exact
        differences.append(part.unique - len(enumerated(sampler, 9)["web", None]))
    mean = sum(differences) / len(differences)
    error = (sum((d - mean) ** 2 for d in differences) / len(differences) ** 2) ** 0.5
    assert abs(mean) < 5 * error + 0.5


def run_file(sources, *, blend=None, seed=3, **train):
    return Config.model_validate(
        {
            "run": {"dir": "runs/none", "seed": seed},
            "data": {"sources": [{"name": name, "paths": ["none"], **keys} for name, keys in sources.items()]},
            "blend": blend or {},
            "tokenizer": {"path": "none"},
            "model": {"layers": 1, "dim": 8, "heads": 1},
            "train": {"duration": "100 steps", "batch_size": 4, "sequence_length": 10, **train},
        }
    )


def planned(config, tokens):
    """The sampler of a run whose documents have ten tokens each."""
    journal = plan_journal(config, {name: Documents(count) for name, count in tokens.items()})
    return Sampler(journal)


class Documents:
    """Documents of ten tokens."""

    def __init__(self, tokens):
        self.tokens, self.documents = tokens, tokens // 10

    def document_start(self, document):
        return 10 * document


@relaxed
@given(
    phases=st.lists(
        st.fixed_dictionaries(
            {
                "weights": st.dictionaries(st.sampled_from(["web", "code", "books"]), st.integers(1, 9), min_size=1),
                "sequence_length": st.sampled_from([3, 10, 24]),
                "batch_size": st.integers(1, 4),
                "end": st.sampled_from([0.5, 0.7, 1]),
            }
        ),
        min_size=1,
        max_size=5,
    ),
    limits=st.tuples(*[st.sampled_from([None, 0.3, 1.05, 2.5])] * 2),
    seed=st.integers(0, 100),
)
def test_planned_phases_equal_going_through_every_target(phases, limits, seed):
    described = []
    for number, phase in enumerate(phases):
        slices = {name: [0, phase["end"]] for name in phase["weights"]}
        until = {} if number == len(phases) - 1 else {"until": f"{15 * number + 15} steps"}
        described.append({**{k: v for k, v in phase.items() if k != "end"}, "slices": slices, **until})
    limited = {"code": limits[0], "books": limits[1]}
    config = run_file(
        {"web": {}, **{name: {} if limit is None else {"max_epochs": limit} for name, limit in limited.items()}},
        blend={"phases": described},
        seed=seed,
    )
    sampler = planned(config, {"web": 300, "code": 200, "books": 130})
    end = sampler.end()
    step = 15 * len(phases) if end is None else min(end.step, 15 * len(phases))
    found, seen, left = accounts(sampler, step), enumerated(sampler, step), left_out(sampler, step)
    assert {name: account.drawn for name, account in found.items()} == sampler.slots(step)
    for name, account in found.items():
        for part in account.slices:
            counter = seen.get((name, part.documents), Counter())
            assert part.drawn == sum(counter.values()) and part.unseen == left[name, part.documents]
            assert not part.exact or part.unique == len(counter)
        part = account.current
        if limited.get(name) is not None and account.drawn:
            length = [g.sequence_length for g in sampler.journal.segments if g.first_step < step and name in g.sources][
                -1
            ]
            budget = int(Fraction(repr(limited[name])) * part.tokens)
            assert part.remaining == (budget - part.drawn) // length * length


def lines(config, tokens, steps=100, first_step=0):
    sampler = planned(config, tokens)
    return warnings(config, sampler.journal, sampler, steps, first_step)


def test_a_limit_leaves_what_is_left():
    config = run_file({"web": {"weight": 1}, "code": {"weight": 1, "max_epochs": 2.55}})
    sampler = planned(config, {"web": 10_000, "code": 500})
    # 2.55 * 500 tokens are 1,275, and 127 windows of ten.
    for step, left in ((0, 1270), (20, 1270 - 400), (100, 0)):
        found = accounts(sampler, step)
        assert found["code"].current.remaining == left and found["web"].current.remaining is None
    assert found["code"].drawn == 1270 and found["web"].drawn == 4000 - 1270
    assert found["code"].current.exact and found["code"].unique == 500


def test_steps_and_what_ends_the_run():
    sources = {"web": {"weight": 1, "max_epochs": 1}, "code": {"weight": 1}}
    tokens = {"web": 1000, "code": 100_000}
    assert run_length(run_file(sources), planned(run_file(sources), tokens)).steps == 100
    config = run_file(sources, duration="4001 tokens")
    length = run_length(config, planned(config, tokens))
    assert (length.steps, length.reason) == (101, "train.duration: 4,001 tokens")
    # 100 windows of web at two a step: the 51st step would need more.
    sources["web"]["on_exhausted"] = "stop"
    config = run_file(sources)
    length = run_length(config, planned(config, tokens))
    assert length.steps in (49, 50, 51) and "web" in length.reason and "max_epochs" in length.reason
    sampler = planned(config, tokens)
    assert accounts(sampler, length.steps)["web"].drawn <= 1000
    assert sampler.end().step == length.steps
    shorter = run_file(sources, duration="30 steps")
    assert run_length(shorter, planned(shorter, tokens)).steps == 30


def test_a_run_without_anything_left_is_refused():
    config = run_file({"web": {"weight": 1, "max_epochs": 1}, "code": {"weight": 3, "max_epochs": 0.5}})
    with pytest.raises(UserError, match=r"100 steps, but .* at step 38 .*on_exhausted"):
        # 100 and 50 windows at four a step: 37 whole steps.
        run_length(config, planned(config, {"web": 1000, "code": 1000}))


def test_quiet_where_nothing_is_to_be_said():
    config = run_file({"web": {"weight": 1}, "code": {"weight": 1}})
    assert lines(config, {"web": 1000, "code": 100_000}) == []


def test_warnings_about_epochs():
    config = run_file({"web": {"weight": 1}, "code": {"weight": 1}})
    (line,) = lines(config, {"web": 400, "code": 100_000})
    assert "source 'web' is read 5.00 times, more than blend.warn_epochs 4" in line
    config = run_file({"web": {"weight": 1, "max_epochs": 2, "on_exhausted": "repeat"}, "code": {"weight": 1}})
    (line,) = lines(config, {"web": 1000, "code": 100_000}, steps=120)
    assert "source 'web' is read 2.40 times, beyond max_epochs 2 (on_exhausted: repeat)" in line
    assert lines(config, {"web": 1000, "code": 100_000}, steps=90) == []


def test_warnings_about_sources_that_give_nothing():
    blend = {"phases": [{"weights": {"web": 1, "code": 1e-6}}]}
    config = run_file({"web": {}, "code": {}, "books": {}}, blend=blend)
    first, second = lines(config, {"web": 100_000, "code": 1000, "books": 1000})
    assert "source 'code' does not give a single sample in the whole run" in first
    assert "source 'books' is in data.sources, but no phase reads it" in second
    config = run_file({"web": {}, "code": {"max_epochs": 0.004}})
    (line,) = lines(config, {"web": 100_000, "code": 1000})
    assert "'code'" in line and ": max_epochs 0.004 of its 1,000 tokens is less than a sample" in line


def test_warnings_about_sources_that_have_nothing_left_for_a_phase():
    phases = [{"until": "50 steps"}, {"name": "end", "weights": {"web": 3, "code": 1}}, {"name": "never"}]
    phases[1]["until"] = "120 steps"
    config = run_file({"web": {"weight": 1}, "code": {"weight": 1, "max_epochs": 1}}, blend={"phases": phases})
    reached, nothing_left, never = lines(config, {"web": 100_000, "code": 500})
    assert reached.startswith("source 'code' reaches max_epochs 1 at step ") and "(phase 1)" in reached
    assert (
        "'code' has nothing left for phase 2 end, since it has reached max_epochs: the others share its 25 %"
        in nothing_left
    )
    assert "never begins" in never
    # It is exhausted within the second phase.
    reached, never = lines(config, {"web": 100_000, "code": 1500})
    assert "(phase 2 end); the others take its place" in reached and "never begins" in never
    # Once the second phase has begun, nothing of that is ahead.
    assert lines(config, {"web": 100_000, "code": 500}, first_step=51) == [never]


@relaxed
@given(
    limits=st.lists(st.sampled_from([0.1, 0.5, 1.0, 1.7]), min_size=2, max_size=3),
    policy=st.sampled_from(["renormalize", "stop"]),
    half=st.booleans(),
    length=st.sampled_from([10, 7]),
)
def test_where_sources_drop_out_equals_going_through_the_steps(limits, policy, half, length):
    sources = {f"s{k}": {"weight": k + 1, "max_epochs": limit} for k, limit in enumerate(limits)}
    sources["s0"]["on_exhausted"] = policy
    sources["rest"] = {"weight": 1}
    slices = {"s1": [0, 0.5]} if half else {}
    blend = {"phases": [{"until": "20 steps", "slices": slices}, {"sequence_length": length}]}
    config = run_file(sources, blend=blend)
    sampler = planned(config, dict.fromkeys(sources, 400))
    end = sampler.end()
    steps = 100 if end is None else min(100, end.step)
    expected, left = [], {}
    for step in range(steps):
        segment = sampler.journal.segments[sampler.journal.segment_number(step)]
        for index in sampler.step(step).source.tolist():
            name = sampler.journal.names[index]
            if name == "rest" or (name == "s0" and policy == "stop"):
                continue
            state = segment.sources[name]
            text = name, state.documents
            budget = int(Fraction(repr(limits[int(name[1])])) * state.tokens)
            left[text] = left.get(text, budget) - segment.sequence_length
            if left[text] < segment.sequence_length:
                expected.append((step, name))
    found = exhaustions(sampler, steps)
    assert [(step, text.split("'")[1]) for step, text in found] == sorted(expected)
    reached = [line for line in warnings(config, sampler.journal, sampler, steps) if " reaches max_epochs " in line]
    assert [int(line.split(" at step ")[1].split()[0]) - 1 for line in reached] == [step for step, _ in found]


def test_a_run_cannot_go_on_beyond_its_end():
    config = run_file({"web": {"weight": 1, "max_epochs": 1, "on_exhausted": "stop"}, "code": {"weight": 1}})
    sampler = planned(config, {"web": 1000, "code": 100_000})
    check_end(sampler, sampler.end().step)
    with pytest.raises(UserError, match=r"60 steps are done, but the run file now ends the run after \d+: .*'web'"):
        check_end(sampler, 60)


def test_warnings_about_skips_that_skip_nothing():
    entries = [
        {"steps": "100"},
        {"steps": "101-200"},
        {"steps": "5-9", "from_step": 10},
        {"samples": "399"},
        {"samples": "400-500"},
        {"samples": "0-7", "from_step": 3},
        {"samples": "0-8", "from_step": 3},
        {"source": "web", "documents": [3]},
        {"source": "web", "from_step": 101},
        {"source": "code"},
    ]
    config = run_file({"web": {}, "code": {}}, blend={"phases": [{"sources": ["web"]}], "skip": entries})
    told = [line for line in lines(config, {"web": 100_000, "code": 1000}) if line.startswith("blend.skip: ")]
    assert [line.removeprefix("blend.skip: ") for line in told] == [
        "steps 101 to 200 are skipped (from step 1 on), but the run ends with step 100",
        "steps 5 to 9 are skipped (from step 10 on), but takes effect only after that; lower its from_step",
        "samples 400 to 500 are not trained on (from step 1 on), but the run ends with step 100",
        "samples 0 to 7 are not trained on (from step 3 on), but takes effect only after that; lower its from_step",
        "source 'web' is not trained on (from step 101 on), but takes effect only after the end of the run, step 100",
        "source 'code' is not trained on (from step 1 on), but the source would not be read from there on anyway",
    ]


def test_warnings_about_skips_of_what_was_trained_on():
    """Entries that are new in a run of which 46 steps are done."""
    entries = [{"steps": "43"}, {"steps": "40-46"}, {"steps": "47"}, {"samples": "180-183"}, {"samples": "180-184"}]
    before, config = run_file({"web": {}}), run_file({"web": {}}, blend={"skip": entries})
    journal = planned(config, {"web": 100_000}).journal.going_on(planned(before, {"web": 100_000}).journal, 46)
    told = warnings(config, journal, planned(config, {"web": 100_000}), 100, 46)
    already = "already trained on; go back to a checkpoint before that"
    assert told == [
        f"blend.skip: step 43 is skipped (from step 47 on), but step 43 is {already}",
        f"blend.skip: steps 40 to 46 are skipped (from step 47 on), but steps 40 to 46 are {already}",
        f"blend.skip: samples 180 to 183 are not trained on (from step 47 on), but step 46 is {already}",
    ]


def test_warnings_about_skips_of_documents_that_are_not_read():
    phases = [{"until": "50 steps", "slices": {"web": [0, 0.5]}}, {"slices": {"web": [0.5, 0.9]}}]
    entries = [
        {"source": "web", "documents": [9500]},
        {"source": "web", "documents": [9500, "4000-5000"], "from_step": 51},
        {"source": "web", "documents": [4999], "from_step": 50},
        {"source": "web", "documents": [4999], "from_step": 51},
    ]
    told = lines(run_file({"web": {}}, blend={"phases": phases, "skip": entries}), {"web": 100_000})
    assert [line.split(" but ")[0] for line in told] == [
        "blend.skip: source 'web' is not trained on: documents 9,500 (from step 1 on),",
        "blend.skip: source 'web' is not trained on: documents 4,999 (from step 51 on),",
    ]
    assert all("these documents would not be read" in line for line in told)


def test_a_warning_where_everything_is_skipped():
    phases = [{"until": "50 steps"}, {"until": "80 steps", "weights": {"web": 1}}, {"weights": {"code": 1}}]
    tokens = {"web": 100_000, "code": 100_000}

    def told(*skip, duration=100):
        config = run_file({"web": {}, "code": {}}, blend={"phases": phases, "skip": list(skip)})
        return [line for line in lines(config, tokens, duration) if "all sources are skipped" in line]

    code, web = {"source": "code", "from_step": 31}, {"source": "web", "from_step": 61}
    assert told(code)[0].startswith(
        "blend.skip: from step 81 to the end, step 100, all sources are skipped and nothing "
    )
    assert told(code, duration=80) == told(web) == told({**code, "documents": [1]}) == []
    assert "from step 61 to" in told(code, web)[0] and "from step 31 to" in told(code, {**web, "from_step": 31})[0]
    assert (
        "from step 41 to" in told(code, {**web, "from_step": 41})[0] and "from step 61 to" in told(web, duration=70)[0]
    )


def test_warnings_about_slices_with_common_documents():
    blend = {"phases": [{"until": "50 steps"}, {"name": "end", "slices": {"web": [0.5, 1]}}]}
    config = run_file({"web": {"slice": [0, 0.6]}}, blend=blend)
    (line,) = lines(config, {"web": 100_000})
    assert "source 'web'" in line and "documents 5,000 to 5,999" in line and "end" in line
    config = run_file({"web": {"slice": [0, 0.5]}}, blend=blend)
    assert lines(config, {"web": 100_000}) == []
    same = {"dataset": "/data/web", "paths": []}
    config = run_file({"a": {**same, "slice": [0, 0.5]}, "b": {**same}})
    (line,) = lines(config, {"a": 100_000, "b": 100_000})
    assert "source 'a'" in line and "source 'b'" in line and "documents 0 to 4,999" in line
    config = run_file({"a": {**same, "slice": [0, 0.5]}, "b": {**same, "slice": [0.5, 1]}})
    assert lines(config, {"a": 100_000, "b": 100_000}) == []


def test_warnings_about_laps_that_a_phase_ends():
    blend = {"phases": [{"until": "50 steps"}, {"name": "long", "sequence_length": 50, "batch_size": 1}]}
    config = run_file({"web": {}}, blend=blend)
    (line,) = lines(config, {"web": 2500})
    assert line == (
        "phase 2 long changes the sequence length from 10 to 50 and so ends epochs early; tokens that are not drawn in "
        "them: 500 of 'web' (20 % of the epoch)"
    )
    assert lines(config, {"web": 2500}, first_step=50) == [line]
    # Not when it has begun.
    assert lines(config, {"web": 2500}, first_step=51) == []
    # A line for all sources.
    many = {f"s{k}": {"weight": 1} for k in range(5)}
    (line,) = lines(run_file(many, blend=blend), {name: 2000 + 100 * int(name[1]) for name in many})
    assert line.endswith(" of 2 other sources") and "'s4' (" in line and "'s0'" not in line
    # Two laps of 1,000 tokens are complete when it begins.
    assert all("laps early" not in line for line in lines(config, {"web": 1000}))
    (line,) = lines(config, {"web": 2500}, steps=50)
    assert "blend.phases.1 (long) never begins: the run ends with step 50" in line


def test_a_source_shorter_than_a_window_is_refused():
    blend = {"phases": [{"until": "50 steps"}, {"name": "long", "sequence_length": 500}]}
    with pytest.raises(UserError, match="'web' is too short for one window of sequence_length 500"):
        planned(run_file({"web": {}}, blend=blend), {"web": 400})


def test_ten_trillion_tokens_and_a_thousand_sources():
    """Closed forms only: this would not end if anything went through the steps."""
    sources = {f"s{k:03}": {"weight": 1 + k, **({"max_epochs": 0.5} if k % 2 else {})} for k in range(1000)}
    blend = {"phases": [{"until": "6T tokens"}, {"name": "long", "sequence_length": 32768, "batch_size": 256}]}
    config = run_file(sources, blend=blend, duration="10T tokens", sequence_length=4096, batch_size=2048)
    tokens = {name: 10**10 + 7 * k * 10**6 for k, name in enumerate(sources)}
    sampler = planned(config, tokens)
    length = run_length(config, sampler)
    found = accounts(sampler, length.steps)
    assert sum(account.drawn for account in found.values()) == sampler.journal.tokens(length.steps)
    assert all(account.exact or account.unique for account in found.values())
    assert found["s999"].epochs == pytest.approx(0.5, abs=1e-5)
    told = warnings(config, sampler.journal, sampler, length.steps)
    assert [line for line in told if line.startswith("and")] == [
        "and 387 more like the last one",
        "and 230 more like the last one",
    ]
