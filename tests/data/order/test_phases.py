from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.data.order.blend import UNIT, keyed_offset
from pipeline.data.order.phases import label, phase_at, plan_journal
from pipeline.data.order.sampler import Sampler
from tests.data import reference
from tests.data.preprocess.memory import MemoryDataset

relaxed = settings(deadline=None, max_examples=60)


def run_file(sources, phases=(), *, seed=1, skip=(), temperature=1.0, **train):
    """A run file; `sources`: name -> keys."""
    return Config.model_validate(
        {
            "run": {"dir": "runs/none", "seed": seed},
            "data": {"sources": [{"name": name, "paths": ["none"], **keys} for name, keys in sources.items()]},
            "blend": {"phases": list(phases), "skip": list(skip), "temperature": temperature},
            "tokenizer": {"path": "none"},
            "model": {"layers": 1, "dim": 8, "heads": 1},
            "train": {"duration": "10 steps", "batch_size": 4, "sequence_length": 8, **train},
        }
    )


def of_reference(run):
    """The run file and the datasets of a reference run."""

    def documents(bounds):
        return [f"{bound} documents" for bound in bounds]

    sources = {}
    for name, source in run.sources.items():
        keys = {"weight": source.weight, "max_epochs": source.max_epochs}
        keys = {key: value for key, value in keys.items() if value is not None}
        if source.max_epochs is not None:
            keys["on_exhausted"] = source.on_exhausted
        if source.slice is not None:
            keys["slice"] = documents(source.slice)
        sources[name] = keys
    phases = [
        {
            "until": None if phase.until is None else f"{phase.until[0]} {phase.until[1]}",
            "weights": phase.weights,
            "sources": phase.sources,
            "slices": {name: documents(bounds) for name, bounds in phase.slices.items()},
            "sequence_length": phase.length,
            "batch_size": phase.batch,
            "packing": "best_fit" if phase.packed else None,
        }
        for phase in run.phases
    ]
    train = {}
    if run.ramp is not None:
        start, increment, tokens, full = run.ramp
        train = {
            "batch_ramp": {"start": start, "increment": increment, "tokens": tokens},
            "batch_size": full,
        }
    datasets = {name: MemoryDataset(source.lengths) for name, source in run.sources.items()}
    return run_file(sources, phases, seed=run.seed, **train), datasets


def sampler_of(journal):
    return Sampler(journal)


def rows(journal, sampler, steps):
    """(step, index, source, lap, position) of the samples of the steps."""
    return [
        (step, index, journal.names[source], lap, position)
        for step in steps
        for index, source, lap, position in zip(
            journal.samples(step), *(array.tolist() for array in sampler.step(step)), strict=True
        )
    ]


LENGTHS = [1, 2, 3, 4, 6, 8, 12]
plain_weights = st.one_of(st.integers(1, 20), st.sampled_from([0.1, 0.5, 2.5]))


@st.composite
def runs(draw, limits=True, changing_weights=True, ramps=True, packing=(False, False, True)):
    """Small runs of several phases, of windows and packs. Documents have a token at least, so slices of 12 a window."""
    names = draw(st.lists(st.sampled_from(["a", "b", "c", "Z", "d1"]), min_size=1, max_size=4, unique=True))
    weighted = draw(st.booleans()) or not changing_weights

    def slices():
        # Few different ones, so that a source returns to one.
        return draw(st.sampled_from([(0, 12), (0, 30), (12, 30)]))

    sources = {}
    for name in names:
        lengths = draw(st.lists(st.integers(1, 5), min_size=30, max_size=30))
        source = reference.Source(lengths, weight=draw(plain_weights) if weighted else None)
        if draw(st.booleans()):
            source.slice = slices()
        if limits and draw(st.booleans()):
            source.max_epochs = draw(st.sampled_from([0.05, 0.3, 1, 1.5, 2, 4.0]))
            source.on_exhausted = draw(st.sampled_from(["renormalize"] * 4 + ["stop", "repeat"]))
        sources[name] = source

    phases, step, tokens = [], 0, 0
    shared = draw(st.one_of(st.none(), st.just("tokens"), st.fixed_dictionaries(dict.fromkeys(names, plain_weights))))
    for _ in range(draw(st.integers(0, 3)) + 1):
        phase = reference.Phase(length=draw(st.sampled_from(LENGTHS)), batch=draw(st.integers(1, 9)))
        phase.packed = draw(st.sampled_from(packing))
        if changing_weights:
            chosen = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
            phase.weights = draw(st.sampled_from([None, "tokens", {name: draw(plain_weights) for name in chosen}]))
            phase.sources = None if isinstance(phase.weights, dict) else draw(st.sampled_from([None, chosen]))
            taking_part = phase.weights if isinstance(phase.weights, dict) else phase.sources or names
            phase.slices = {name: slices() for name in taking_part if draw(st.integers(0, 3)) == 0}
        else:
            phase.weights = shared if isinstance(shared, dict) else None
        phases.append(phase)
    for phase in phases[:-1]:
        # Whatever the ramp does, a phase has a step at least: steps are at most 9 * 12 tokens.
        if draw(st.booleans()):
            phase.until = (step + draw(st.integers(1, 12)), "steps")
        else:
            phase.until = (max(tokens, step * 108) + draw(st.integers(1, 300)), "tokens")
        step = max(step, phase.until[0])
        tokens = max(tokens, step * 108 if phase.until[1] == "steps" else phase.until[0] + 108)
    ramp = None
    if ramps and draw(st.booleans()):
        start, increment, levels = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
        ramp = (start, increment, draw(st.integers(1, 400)), start + increment * levels)
    return reference.Run(draw(st.integers(0, 2**63 - 1)), sources, phases, ramp)


def planned(run):
    config, datasets = of_reference(run)
    return plan_journal(config, datasets)


@settings(deadline=None, max_examples=150)
@given(runs())
def test_equal_to_the_enumeration_phase_by_phase(run):
    expected, end = reference.enumerate_run(run, 45)
    journal = planned(run)
    sampler = sampler_of(journal)
    steps = expected[-1].step + 1 if expected else 0
    assert rows(journal, sampler, range(steps)) == [(s.step, s.index, s.source, s.lap, s.position) for s in expected]
    begins = {s.step for s in expected if s.first_of_segment}
    assert begins == {segment.first_step for segment in journal.segments if segment.first_step < steps}
    found = sampler.end()
    if end is None:
        assert found is None or found.step >= steps
    else:
        assert (found.kind, found.sample, found.step) == (*end, steps)
        assert found.tokens == journal.tokens(steps)
        if end[0] == "exhausted":
            with pytest.raises(
                UserError, match=f"exhausted at sample {found.sample:,} of the run, so step {steps + 1}"
            ):
                sampler.step(steps)
    # Targets in closed form.
    for step in {0, steps // 2, steps}:
        total = dict.fromkeys(journal.names, 0)
        for sample in expected:
            if sample.step < step:
                total[sample.source] += journal.segments[journal.segment_number(sample.step)].sequence_length
        assert sampler.slots(step) == total
        assert sum(total.values()) == journal.tokens(step)


@relaxed
@given(runs(limits=False, changing_weights=False), st.booleans())
def test_a_boundary_between_equal_weights_moves_no_turn(run, limited):
    """A ramp of the batch size and phases of other lengths leave the sequence of sources as it is without them."""
    if limited:  # a limit counts targets, so it is the same number of samples only while the length is the same
        for phase in run.phases:
            phase.length, phase.packed = 5, False
        for source in run.sources.values():
            source.max_epochs = 0.7
    samples, end = reference.enumerate_run(run, 45)
    whole = reference.Run(run.seed, run.sources, [replace(run.phases[-1], batch=1)])
    expected, other_end = reference.enumerate_run(whole, len(samples) + 9)
    assert end is None or end == other_end
    journal = planned(run)
    steps = samples[-1].step + 1 if samples else 0
    turns = [name for _, _, name, _, _ in rows(journal, sampler_of(journal), range(steps))]
    assert turns == [sample.source for sample in expected][: len(samples)]


@relaxed
@given(runs(limits=False))
def test_shares_hold_over_all_phases(run):
    """The bounds of docs/sampler.md, exactly, at every position of a run of several phases."""
    journal = planned(run)
    sampler = sampler_of(journal)
    names = journal.names
    count, expected = dict.fromkeys(names, 0), dict.fromkeys(names, Fraction(0))
    largest, variation = dict.fromkeys(names, Fraction(0)), dict.fromkeys(names, Fraction(0))
    before = None
    for number, segment in enumerate(journal.segments):
        share = {
            name: Fraction(segment.sources[name].weight, UNIT) if name in segment.sources else Fraction(0)
            for name in names
        }
        for name, source in segment.sources.items():
            assert source.offset < UNIT * (1 + largest[name])  # what is carried over
        largest = {name: max(largest[name], share[name]) for name in names}
        if before is not None:
            variation = {name: variation[name] + abs(share[name] - before[name]) for name in names}
        before = share
        ahead = len(names) + sum(largest.values())
        following = journal.segments[number + 1].first_step if number + 1 < len(journal.segments) else 40
        for _, _, name, _, _ in rows(journal, sampler, range(segment.first_step, min(following, 40))):
            count[name] += 1
            for other in names:
                expected[other] += share[other]
                error = abs(count[other] - expected[other])
                assert error < 1 + largest[other] + (share[other] + variation[other]) * ahead


@relaxed
@given(runs())
def test_shares_of_the_others_hold_when_sources_are_exhausted(run):
    """In the first segment: among those that have something left, from its first sample on."""
    journal = planned(run)
    segment = journal.segments[0]
    count, alive = dict.fromkeys(segment.sources, 0), set(segment.sources)
    sampler = sampler_of(journal)
    end = sampler.end()
    last = min([40, *(s.first_step for s in journal.segments[1:2]), *([end.step] if end else [])])
    for _, _, name, _, _ in rows(journal, sampler, range(last)):
        count[name] += 1
        alive -= {other for other in alive if segment.sources[other].exhausted(count[other])}
        total = sum(segment.sources[other].weight for other in alive)
        given_by_them = sum(count[other] for other in alive)
        for other in alive:
            share = Fraction(segment.sources[other].weight, total)
            assert abs(count[other] - given_by_them * share) <= 1 + (len(alive) - 2) * share


@relaxed
@given(runs())
def test_each_lap_has_every_window_once_and_limits_are_exact(run):
    journal = planned(run)
    sampler = sampler_of(journal)
    end = sampler.end()
    last = min(45, end.step) if end else 45
    places = {}
    for _, _, name, lap, position in rows(journal, sampler, range(last)):
        places.setdefault((name, lap), []).append(position)
    assert all(found == list(range(len(found))) for found in places.values())
    # A lap is complete unless the source's length or slice changed, or the run went no further.
    texts = {}
    for segment, _ in journal.drawn(last):
        for name, source in segment.sources.items():
            length = segment.sequence_length
            texts.setdefault(name, []).append((source.documents, length, segment.epoch_samples[name], source.packs))
    for name, seen in texts.items():
        if len(set(seen)) == 1:
            laps = sorted(lap for source, lap in places if source == name)
            assert laps == list(range(len(laps)))
            assert all(len(places[name, lap]) == seen[0][2] for lap in laps[:-1])
    drawn, limits = {}, {}
    for segment, samples in journal.drawn(last):
        for (name, source), count in zip(segment.sources.items(), segment.order().counts(samples), strict=True):
            text = name, source.documents
            share = Fraction(segment.sequence_length, source.tokens)
            if source.packs is not None:
                share = Fraction(1, source.packs)
            drawn[text] = drawn.get(text, 0) + count * share
            if run.sources[name].max_epochs is not None and run.sources[name].on_exhausted != "repeat":
                limits[text] = Fraction(str(run.sources[name].max_epochs))
                assert drawn[text] <= limits[text]
                if source.exhausted(count):
                    assert limits[text] - drawn[text] < share


@relaxed
@given(runs(), st.randoms())
def test_the_plan_does_not_depend_on_duration_or_the_order_of_the_list(run, random):
    config, datasets = of_reference(run)
    journal = plan_journal(config, datasets)
    value = config.model_dump(mode="json")
    random.shuffle(value["data"]["sources"])
    value["train"] |= {"duration": "1e15 tokens", "micro_batch_size": 1}
    assert plan_journal(Config.model_validate(value), datasets).fingerprint == journal.fingerprint


# One thing at a time

ONE = {"a": MemoryDataset([10] * 10), "b": MemoryDataset([5] * 20)}
TWO_SOURCES = {"a": {"weight": 1}, "b": {"weight": 3}}


def plan(phases=(), sources=TWO_SOURCES, datasets=ONE, **keys):
    return plan_journal(run_file(sources, phases, **keys), datasets)


def firsts(journal):
    return [(s.first_step, s.batch_size, s.sequence_length) for s in journal.segments]


def shares(segment):
    return {name: source.weight / UNIT for name, source in segment.sources.items()}


def test_without_phases_there_is_one_segment():
    journal = plan()
    (segment,) = journal.segments
    assert (segment.first_step, segment.first_sample, segment.batch_size, segment.sequence_length) == (0, 0, 4, 8)
    assert shares(segment) == {"a": 0.25, "b": 0.75}
    assert {name: s.offset for name, s in segment.sources.items()} == {n: keyed_offset(1, n) for n in "ab"}
    assert label(run_file(TWO_SOURCES), journal, 0) == "1"


def test_phases_end_at_steps_and_tokens():
    # 4 * 8 = 32 tokens a step, then 2 * 10 = 20: 96 tokens after 3 steps, 176 after 7.
    phases = [
        {"until": "3 steps", "name": "warm"},
        {"until": "175 tokens", "batch_size": 2, "sequence_length": 10},
        {"name": "anneal", "weights": {"b": 1}},
    ]
    journal = plan(phases)
    assert firsts(journal) == [(0, 4, 8), (3, 2, 10), (7, 4, 8)]
    assert [shares(segment) for segment in journal.segments[1:]] == [{"a": 0.25, "b": 0.75}, {"b": 1.0}]
    assert [journal.segments[k].first_sample for k in (1, 2)] == [12, 20]
    config = run_file(TWO_SOURCES, phases)
    assert [label(config, journal, number) for number in range(3)] == ["1 warm", "2", "3 anneal"]
    assert [phase_at(config, journal, step) for step in (0, 2, 3, 6, 7, 10**9)] == [0, 0, 1, 1, 2, 2]
    # 176 tokens lie at that boundary, 177 in the step after it.
    assert firsts(plan([phases[0], {**phases[1], "until": "176 tokens"}, phases[2]]))[2][0] == 7
    assert firsts(plan([phases[0], {**phases[1], "until": "177 tokens"}, phases[2]]))[2][0] == 8


@pytest.mark.parametrize(
    ("before", "until"),
    [("3 steps", "96 tokens"), ("3 steps", "1 tokens"), ("96 tokens", "3 steps"), ("65 tokens", "2 steps")],
)
def test_a_phase_that_ends_before_it_begins_is_refused(before, until):
    """In another unit than the phase before it: what is of one unit is refused with the run file."""
    with pytest.raises(UserError, match=rf"blend.phases.1 \(late\) ends at {until}.*step 3, 96 tokens"):
        plan([{"until": before}, {"until": until, "name": "late"}, {}])


def test_a_ramp_goes_through_phases():
    """From 2 by 2 to 8 over 100 tokens: 2 up to 34 tokens, 4 up to 67, 6 up to 100; one token a sample."""
    ramp = {"batch_ramp": {"start": 2, "increment": 2, "tokens": 100}, "batch_size": 8, "sequence_length": 1}
    # 17 steps of 2 are 34 tokens, 9 of 4 are 70, 5 of 6 are 100.
    assert firsts(plan(**ramp)) == [(0, 2, 1), (17, 4, 1), (26, 6, 1), (31, 8, 1)]
    # A phase ends within a level; the next one takes at most 5, and the last one more than the ramp leads to.
    phases = [{"until": "20 steps"}, {"until": "150 tokens", "batch_size": 5}, {"batch_size": 50}]
    # Tokens: 34 at step 17, 46 at 20, 70 at 26, 150 at 42.
    assert firsts(plan(phases, **ramp)) == [(0, 2, 1), (17, 4, 1), (20, 4, 1), (26, 5, 1), (42, 50, 1)]
    # Steps so large that levels are passed over.
    assert firsts(plan(**{**ramp, "sequence_length": 50})) == [(0, 2, 50), (1, 8, 50)]


def test_weights_by_tokens_temperature_and_subsets():
    datasets = {"a": MemoryDataset([10] * 10), "b": MemoryDataset([40] * 10), "c": MemoryDataset([90] * 10)}
    none = {name: {} for name in datasets}

    def of(*phases, sources=none, **keys):
        return [shares(segment) for segment in plan(phases, sources, datasets, **keys).segments]

    assert of() == [{"a": pytest.approx(1 / 14), "b": pytest.approx(4 / 14), "c": pytest.approx(9 / 14)}]
    assert of(temperature=2) == [{"a": pytest.approx(1 / 6), "b": pytest.approx(2 / 6), "c": pytest.approx(3 / 6)}]
    assert of({"sources": ["b", "a"]}) == [{"a": pytest.approx(0.2), "b": pytest.approx(0.8)}]
    assert of({"sources": ["a", "b"], "temperature": 2.0}, temperature=9) == [
        {"a": pytest.approx(1 / 3), "b": pytest.approx(2 / 3)}
    ]
    # Half of c's documents: 450 tokens.
    assert of({"sources": ["b", "c"], "slices": {"c": [0.5, 1]}}) == [
        {"b": pytest.approx(40 / 85), "c": pytest.approx(45 / 85)}
    ]
    weighted = {"a": {"weight": 1}, "b": {"weight": 1}, "c": {"weight": 2}}
    assert of({"weights": "tokens", "sources": ["a", "c"]}, sources=weighted) == [
        {"a": pytest.approx(0.1), "c": pytest.approx(0.9)}
    ]
    assert of(sources=weighted) == [{"a": 0.25, "b": 0.25, "c": 0.5}]
    assert of({"weights": {"c": 0.3, "a": 0.1}}, sources=weighted) == [{"a": 0.25, "c": 0.75}]
    assert of({"sources": ["b"]}, sources=weighted) == [{"b": 1.0}]


def test_slices_are_documents_of_the_whole_dataset():
    datasets = {"a": MemoryDataset([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])}
    (segment,) = plan([{"slices": {"a": [0.25, "9 documents"]}}], {"a": {}}, datasets).segments
    assert (segment.sources["a"].documents, segment.sources["a"].tokens) == ((2, 9), 42)
    (segment,) = plan([], {"a": {"slice": [0.1, 0.7]}}, datasets).segments  # 0.7 * 10 is 7, whatever floats say
    assert segment.sources["a"].documents == (1, 7)
    # All documents are no slice, so that a phase which writes it out does not close the lap.
    (segment,) = plan([{"slices": {"a": [0, 1]}}], {"a": {"slice": [0.1, 0.7]}}, datasets).segments
    assert (segment.sources["a"].documents, segment.sources["a"].tokens) == (None, 55)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (
            ["5 documents", 0.5],
            r"the slice \[5 documents, 0.5\] of source 'a' is empty: of its 10 documents it begins ",
        ),
        ([0.41, 0.49], ".* is empty: of its 10 documents it begins with 4 and ends before 4"),
        ([0, "11 documents"], r"the slice \[0, 11 documents\] of source 'a' goes beyond its 10 documents"),
    ],
)
def test_slices_that_cannot_be_read_are_refused(bounds, message):
    """Naming the key that has the slice: that of the phase, or that of the source."""
    long = {"name": "long", "sequence_length": 16}
    with pytest.raises(UserError, match=rf"^blend.phases.1 \(long\): slices.a: {message}"):
        plan([{"until": "5 steps"}, {**long, "slices": {"a": bounds}}])
    with pytest.raises(UserError, match=f"^data.sources.1.slice: {message}"):
        plan(
            [{"until": "5 steps", "weights": {"b": 1}}, long], {"b": {"weight": 1}, "a": {"weight": 1, "slice": bounds}}
        )


def test_slices_that_are_too_short_are_refused():
    short = [0, "1 documents"]
    where = r"source 'a' is too short for one window of sequence_length 16 in blend.phases.1 \(long\)"
    long = {"name": "long", "sequence_length": 16}
    with pytest.raises(UserError, match=where + r": its slice .* \(blend.phases.1 \(long\): slices.a\) has 10 tokens"):
        plan([{"until": "5 steps"}, {**long, "slices": {"a": short}}])
    with pytest.raises(UserError, match=where + r": its slice .* \(data.sources.0.slice\) has 10 tokens"):
        plan([{"until": "5 steps"}, long], {"a": {"slice": short}})


def test_other_mistakes_are_refused():
    with pytest.raises(UserError, match="blend.phases.0: slices: source 'a' is not in the phase"):
        plan([{"weights": {"b": 1}, "slices": {"a": [0, 0.5]}}])
    with pytest.raises(UserError, match="source 'a' is too short .* in the run: it has 100 tokens"):
        plan(sequence_length=101)
    uneven = {"a": 1, "b": 100}
    with pytest.raises(
        UserError, match="blend.phases.0: temperature 0.2 makes .*: source 'a' has weight .* smallest share"
    ):
        plan([{"weights": uneven, "temperature": 0.2}])
    with pytest.raises(UserError, match="the run: temperature 1e-300 makes .*, or set a higher temperature"):
        plan(sources={name: {"weight": weight} for name, weight in uneven.items()}, temperature=1e-300)
    with pytest.raises(UserError, match="blend.phases.0: source 'a' has weight 1 of .*leave the source out$"):
        plan([{"weights": {"a": 1, "b": 1e12}}])
    with pytest.raises(UserError, match="blend.skip.1: source 'b' has 20 documents, numbered from 0.* document 20"):
        plan(skip=[{"steps": 3}, {"source": "b", "documents": ["20", 3]}])


def test_a_source_that_leaves_keeps_what_it_is_owed():
    phases = [{"until": "5 steps"}, {"until": "9 steps", "sources": ["b"]}, {}]
    journal = plan(phases)
    first, alone, again = journal.segments
    assert alone.sources.keys() == {"b"} and alone.sources["b"].weight == UNIT
    order = first.order()
    carried = dict(zip(order.names, order.carry(20), strict=True))
    assert again.sources["a"].offset == carried["a"]
    drawn = dict(zip(order.names, order.counts(20), strict=True))
    place = drawn["a"]
    assert (again.sources["a"].lap, again.sources["a"].cursor) == divmod(place, 100 // 8)
    assert (again.sources["b"].lap, again.sources["b"].cursor) == divmod(drawn["b"] + 16, 100 // 8)


def test_laps_are_closed_when_length_or_slice_change():
    sources = {"a": {}}
    datasets = {"a": MemoryDataset([10] * 10)}  # 12 windows of 8, 6 of 16

    def of(*phases):
        journal = plan(phases, sources, datasets)
        return [(s.sources["a"].lap, s.sources["a"].cursor) for s in journal.segments]

    # 4 samples a step: 5 steps are a lap of 12 and 8 more.
    assert of({"until": "5 steps"}, {"sequence_length": 16}) == [(0, 0), (2, 0)]
    assert of({"until": "3 steps"}, {"sequence_length": 16}) == [(0, 0), (1, 0)]  # nothing of lap 1 was drawn
    assert of({"until": "5 steps"}, {"batch_size": 3}) == [(0, 0), (1, 8)]
    assert of({"until": "5 steps"}, {"slices": {"a": [0, 0.5]}}) == [(0, 0), (2, 0)]
    assert of({"until": "5 steps"}, {"slices": {"a": [0, 1]}}) == [(0, 0), (1, 8)]
    assert of({"until": "5 steps"}, {"until": "6 steps", "sequence_length": 16}, {}) == [(0, 0), (2, 0), (3, 0)]


def test_max_epochs_counts_targets_of_a_source_and_slice():
    datasets = {"a": MemoryDataset([10] * 10), "b": MemoryDataset([5] * 20)}
    sources = {"a": {"weight": 1, "max_epochs": 1.1}, "b": {"weight": 1}}

    def caps(*phases, **keys):
        journal = plan(phases, sources, datasets, **keys)
        return [segment.sources["a"].cap for segment in journal.segments]

    assert caps() == [110 // 8]  # 1.1 is eleven tenths
    # Two steps are 4 samples of a, give or take one.
    journal = plan([{"until": "2 steps"}, {"sequence_length": 3}], sources, datasets)
    drawn = journal.segments[0].order().counts(8)[0]
    assert caps({"until": "2 steps"}, {"sequence_length": 3}) == [13, (110 - 8 * drawn) // 3]
    # A slice has a budget of its own, and a text that was read before goes on with the old one.
    half = {"slices": {"a": [0, 0.5]}}
    assert caps({"until": "2 steps"}, {**half, "until": "3 steps"}, {}) == [13, 55 // 8, 13 - drawn]


def test_an_exhausted_source_gets_more_from_another_slice():
    sources = {"a": {"weight": 1, "max_epochs": 1, "slice": [0, 0.5]}, "b": {"weight": 1}}
    phases = [{"until": "10 steps"}, {"until": "12 steps"}, {"slices": {"a": [0.5, 1]}}]
    journal = plan(phases, sources)
    one, two, three = (segment.sources["a"] for segment in journal.segments)
    assert (one.cap, two.cap, three.cap) == (6, 0, 6)
    assert sampler_of(journal).slots(12)["a"] == 48
    assert two.weight == one.weight  # the others go on as if the phase had not ended
    assert three.offset == keyed_offset(1, "a")
    assert (three.documents, three.lap, three.cursor) == ((5, 10), 1, 0)
    drawn = rows(journal, sampler_of(journal), range(8, 16))
    assert {name for step, _, name, _, _ in drawn if step < 12} == {"b"}
    assert {name for step, _, name, _, _ in drawn if step >= 12} == {"a", "b"}


def test_a_run_in_which_nothing_is_left_ends():
    sources = {"a": {"max_epochs": 1}, "b": {"max_epochs": 1.5}}
    journal = plan([], sources)  # 12 and 18 samples
    sampler = sampler_of(journal)
    end = sampler.end()
    assert end == (7, 30, 7 * 32, "exhausted", "all sources have reached their max_epochs (a, b)")
    assert len(sampler.step(6).source) == 4
    with pytest.raises(UserError, match=r"exhausted at sample 30 of the run, so step 8 \(after 224 tokens\)"):
        sampler.step(7)
    with pytest.raises(UserError, match="step 1,001"):
        sampler.step(1000)
    with pytest.raises(UserError, match="exhausted at sample 30"):
        sampler.slots(8)
    # Phases that cannot be reached are left out.
    assert len(plan([{"until": "8 steps"}, {}], sources).segments) == 1
    # One that begins where everything is used up can give nothing.
    used_up = plan([{"until": "7 steps"}, {"weights": {"a": 1}}], sources)
    assert sampler_of(used_up).end()[:2] == (7, 28)
    assert sampler_of(plan([], {"a": {"max_epochs": 0.01}, "b": {"max_epochs": 0.01}})).end()[:2] == (0, 0)


def test_a_source_that_stops_the_run():
    sources = {"a": {"weight": 1, "max_epochs": 1, "on_exhausted": "stop"}, "b": {"weight": 1}}
    journal = plan([], sources)
    end = sampler_of(journal).end()
    drawn = [name for _, _, name, _, _ in rows(journal, sampler_of(journal), range(end.step + 1))]
    assert end.kind == "stop" and "'a'" in end.reason
    assert drawn[end.sample] == "a" and drawn[: end.sample].count("a") == 12
    assert end.step == end.sample // 4
    # A phase without it has nothing to stop for; nor has one that ends at that boundary.
    without = plan([{"until": "3 steps"}, {"weights": {"b": 1}}], sources)
    assert sampler_of(without).end() is None
    # Neither has one that begins when it has given exactly all: 12 windows in 3 steps.
    exactly = plan([{"until": "3 steps", "weights": {"a": 1}}, {"weights": {"b": 1}}], sources)
    assert len(exactly.segments) == 2 and sampler_of(exactly).end() is None
    one_more = plan([{"until": "4 steps", "weights": {"a": 1}}, {"weights": {"b": 1}}], sources)
    assert len(one_more.segments) == 1 and sampler_of(one_more).end()[:2] == (3, 12)
    there = plan([{"until": f"{end.step} steps"}, {}], sources)
    assert sampler_of(there).end() == end
    assert len(plan([{"until": f"{end.step + 1} steps"}, {}], sources).segments) == 1


def test_repeat_has_no_limit():
    sources = {"a": {"weight": 1, "max_epochs": 1, "on_exhausted": "repeat"}, "b": {"weight": 1}}
    (segment,) = plan([], sources).segments
    assert segment.sources["a"].cap is None
    assert sampler_of(plan([], sources)).end() is None


def test_a_limit_of_a_tiny_share_is_exact():
    """The source that is left has one sample in 2**32 of virtual time."""
    datasets = {"tiny": MemoryDataset([100]), "huge": MemoryDataset([100])}
    sources = {"tiny": {"weight": 1}, "huge": {"weight": 2**32 - 1, "max_epochs": 2}}
    journal = plan([{"until": "10 steps"}, {}], sources, datasets)
    drawn = [name for _, _, name, _, _ in rows(journal, sampler_of(journal), range(20))]
    assert drawn.count("huge") == 25 and set(drawn[26:]) == {"tiny"}
    assert journal.segments[1].sources["tiny"].offset < 2 * UNIT
    assert sampler_of(journal).end() is None
