"""Several GPUs share one sweep: every token count is tuned once, whoever is free takes it, and no GPU ends it alone."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from moetune.engine import events, workers
from moetune.engine.bench import Bench
from moetune.engine.budget import CAUTION, Budget, CountCost, wall_s
from moetune.engine.costs import Costs
from moetune.engine.decide import NOISE
from moetune.engine.pace import Pace
from moetune.engine.schedule import order
from moetune.engine.session import Job, Ports, Session
from moetune.errors import RunError
from moetune.outcome import Failed, FailureKind, Stage
from moetune.space import FREE, candidates
from moetune.store import Store, load_recording
from moetune.strategies import Guided
from moetune.tuning import SweepRequest, replay_bed, run_on
from moetune_kernels.config import Role
from moetune_kernels.heuristic import heuristic_plan
from tests.engine.test_tuning import bed_of, sweep_on

from .conftest import budget_of

TOKENS = (1, 8, 64, 128, 512, 1024, 4096)
LIMIT_S = 60.0  # of every wait: a test that hangs fails
FULL = Failed(FailureKind.RESOURCES, "needs 200 GB, 1 GB is free")


class Crowd:
    """Several fake GPUs, one sweep on them, and what came of it."""

    def __init__(self, fake_backend, folder, count, **hooks):
        """Each hook is called with the number of the GPU before the arguments that it gets anyway."""
        self.backends = [fake_backend() for _ in range(count)]
        for number, backend in enumerate(self.backends):
            for name, hook in hooks.items():
                backend.hooks[name] = lambda *arguments, hook=hook, number=number: hook(number, *arguments)
        self.tell = lambda event: None
        self.folder, self.events, self.tables, self.threads = folder, [], [], set()
        self.journal = self.backends[0].journal
        self.record, self.journal.record = self.journal.record, self.recorded

    def recorded(self, trial):
        self.threads.add(threading.current_thread().name)
        self.record(trial)

    def note(self, event):
        self.events.append(event)
        self.tell(event)

    def run(self, tokens=TOKENS, probes=0, budget=None):
        first, *others = self.backends
        ports = Ports(
            journal=self.journal,
            known={},
            strategy=Guided,
            default_plan=lambda count: heuristic_plan(first.shape, count, first.device),
            write_table=lambda entries, _: self.tables.append(dict(entries)) or self.folder / "table.json",
            emit=self.note,
        )
        job = Job(tokens=tokens, budget=budget or Budget(None), kernels=120, polish=40, probes=probes)
        names = [f"card {number}" for number in range(len(self.backends))]
        return Session(first, job, ports, others, names).run()

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    def texts(self):
        return [warned.text for warned in self.of(events.Warned) if "counters" not in warned.text]

    def tuned(self, number):
        """The token counts whose layers this GPU timed."""
        return self.backends[number].finals


@pytest.fixture
def crowd(fake_backend, tmp_path):
    """Return a function that makes a crowd; afterwards no thread of it may be left."""

    class Noting(fake_backend):
        def __init__(self):
            super().__init__()
            self.finals = set()

        def time_layers(self, plans, rounds):
            self.finals.add(self.tokens)
            return super().time_layers(plans, rounds)

    before = set(threading.enumerate())
    yield lambda count, **hooks: Crowd(Noting, tmp_path, count, **hooks)
    assert set(threading.enumerate()) <= before


def meeting(count):
    """Return a hook for the first ``open`` of each of ``count`` GPUs: nobody goes on before all are there."""
    barrier, met = threading.Barrier(count), set()

    def meet(number, _):
        if number not in met:
            met.add(number)
            barrier.wait(LIMIT_S)

    return meet


@pytest.mark.parametrize("count", [2, 4])
def test_several_gpus_tune_every_count_once_and_each_of_them_works(crowd, count):
    sweep = crowd(count, open=meeting(count))  # passes only if all work at the same time
    result = sweep.run()
    assert tuple(result.entries) == TOKENS
    assert Counter(event.entry.tokens for event in sweep.of(events.TokenDone)) == Counter(TOKENS)
    assert Counter(event.tokens for event in sweep.of(events.TokenStarted)) == Counter(TOKENS)
    assert sorted(tokens for number in range(count) for tokens in sweep.tuned(number)) == sorted(TOKENS)
    assert sweep.threads == {f"card {number}" for number in range(count)}
    for entry in result.entries.values():
        assert entry.baseline_us is not None
        assert entry.median_us <= entry.baseline_us
    finals = [trial for trial in sweep.journal.trials if trial.stage is Stage.FINAL and trial.verified]
    assert {trial.tokens for trial in finals} == set(TOKENS)
    assert result.trials == len(sweep.journal.trials) == len(sweep.of(events.TrialEnded))
    assert set(sweep.tables[-1]) == set(TOKENS)


def test_what_several_find_is_as_good_as_what_one_finds(crowd):
    alone, several = crowd(1).run(), crowd(3).run()
    for tokens in TOKENS:
        assert several.entries[tokens].median_us <= 1.05 * alone.entries[tokens].median_us
    assert several.trials < 1.3 * alone.trials  # nothing is raced twice


def test_kernels_are_compiled_once_for_all_and_no_more_of_them_than_for_one(crowd):
    one, four = crowd(1), crowd(4)
    one.run(), four.run()
    assert [backend.calls["compile"] for backend in four.backends[1:]] == [0, 0, 0]
    assert 120 <= four.backends[0].calls["compile"] <= 120 + 40 + 2 * len(TOKENS)
    assert four.of(events.CompileProgress)[-1].total == four.backends[0].calls["compile"]


def test_one_backend_starts_no_thread(crowd, monkeypatch):
    def start(*_, **__):
        raise AssertionError("a thread was started")

    sweep = crowd(1)
    monkeypatch.setattr(threading.Thread, "start", start)
    assert tuple(sweep.run().entries) == TOKENS
    assert sweep.threads == {threading.current_thread().name}


def test_a_slow_gpu_takes_fewer_counts(crowd):
    """The slow one answers its first layer only when the other has tuned all the rest."""
    sweep = crowd(2)
    slow, fast = sweep.backends
    rest_is_done = threading.Event()

    def layer(plan, rounds, tokens):
        assert rest_is_done.wait(LIMIT_S)

    def tell(event):
        if isinstance(event, events.TokenDone) and len(sweep.of(events.TokenDone)) == len(TOKENS) - 1:
            rest_is_done.set()

    slow.hooks["layer"] = layer
    fast.hooks["layer"] = lambda *_: None if slow.finals else wait_for(lambda: slow.finals)
    sweep.tell = tell
    result = sweep.run()
    assert tuple(result.entries) == TOKENS
    assert (len(slow.finals), len(fast.finals)) == (1, len(TOKENS) - 1)


def wait_for(condition):
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def gone(*_):
    raise RunError("the GPU gives no more answers")


@pytest.mark.parametrize("dead", [0, 1], ids=["the first", "another"])
@pytest.mark.parametrize("method", ["open", "time_routing", "bound_us"])
def test_a_gpu_that_is_lost_leaves_its_count_to_the_others(crowd, monkeypatch, dead, method):
    sweep = crowd(2)
    died, right = threading.Event(), getattr(sweep.backends[dead], method)
    calls = Counter()

    def lose(*arguments):
        calls[method] += 1
        if method == "open" and calls[method] == 1:
            return right(*arguments)
        died.set()
        return gone()

    def wait(*_):
        assert died.wait(LIMIT_S)  # so that the other one does not do everything before this one has begun

    monkeypatch.setattr(sweep.backends[dead], method, lose)
    sweep.backends[1 - dead].hooks["layer"] = wait
    assert tuple(sweep.run().entries) == TOKENS
    assert sweep.texts() == [f"card {dead} leaves the sweep, 1 of 2 go on: the GPU gives no more answers"]
    assert Counter(event.entry.tokens for event in sweep.of(events.TokenDone)) == Counter(TOKENS)
    assert not sweep.of(events.TokenFailed)
    assert [backend.calls["counters"] for backend in sweep.backends] == [dead == 1, dead == 0]


def test_ceilings_come_from_the_first_gpu_that_answers(crowd, monkeypatch):
    sweep = crowd(2)
    monkeypatch.setattr(sweep.backends[0], "ceilings", gone)
    assert tuple(sweep.run().entries) == TOKENS
    assert sweep.journal.ceilings == (4.2e12, 8.0e14)
    assert not sweep.backends[0].opened
    assert len(sweep.texts()) == 1


def test_when_all_gpus_are_lost_the_last_error_ends_the_sweep(crowd, monkeypatch):
    sweep = crowd(3, open=meeting(3))
    for number, backend in enumerate(sweep.backends):
        monkeypatch.setattr(backend, "time_combine", lambda number=number: gone(number))
    with pytest.raises(RunError, match="the GPU gives no more answers"):
        sweep.run()
    assert len(sweep.texts()) == 2
    assert sweep.journal.trials  # kept


def test_a_count_that_takes_gpus_down_is_given_up_before_it_takes_all(crowd, monkeypatch):
    sweep = crowd(4)
    for backend in sweep.backends:
        layers = backend.time_layers
        monkeypatch.setattr(
            backend,
            "time_layers",
            lambda plans, rounds, b=backend, layers=layers: gone() if b.tokens == 64 else layers(plans, rounds),
        )
    result = sweep.run()
    assert set(result.entries) == set(TOKENS) - {64}
    assert sweep.of(events.TokenFailed) == [events.TokenFailed(64, "the GPU gives no more answers")]
    assert len(sweep.texts()) == workers.MOST_LOSSES


def test_what_one_gpu_has_no_memory_for_another_tunes(crowd):
    sweep = crowd(2, open=lambda number, tokens: FULL if number == 1 and tokens > 100 else None)
    assert tuple(sweep.run().entries) == TOKENS
    assert max(sweep.tuned(1), default=1) < 100
    assert sweep.texts() == []


def test_a_count_that_no_gpu_has_memory_for_is_skipped(crowd):
    sweep = crowd(3, open=lambda number, tokens: FULL if tokens == 4096 else None)
    assert tuple(sweep.run().entries) == TOKENS[:-1]
    assert sweep.of(events.TokenFailed) == [events.TokenFailed(4096, FULL.reason)]


def test_the_gaps_between_entries_are_shared_too(crowd):
    sweep = crowd(2)
    ladder = (1, 4, 16, 64, 256, 1024)
    result = sweep.run(tokens=ladder, probes=5)
    assert len(result.probes) == 5
    assert {probe.tokens for probe in result.probes} == {2, 8, 32, 128, 512}
    ranges = [entry.serves for entry in result.entries.values()]
    assert all(low[1] + 1 == high[0] for low, high in pairwise(ranges))


def test_an_error_of_a_worker_that_is_no_lost_gpu_ends_the_sweep(crowd):
    def fail(number, tokens):
        if tokens == 64:
            raise ZeroDivisionError

    sweep = crowd(2, open=fail)
    with pytest.raises(ZeroDivisionError):
        sweep.run()


def test_ctrl_c_ends_all_threads_and_keeps_what_was_done(crowd, monkeypatch):
    """Both GPUs hang when the signal comes: closing their backends is what frees the threads."""
    freed, hung = threading.Event(), threading.Barrier(3)

    def hang(*_):
        if not freed.is_set():
            hung.wait(LIMIT_S)
            assert freed.wait(LIMIT_S)
        return Failed(FailureKind.LAUNCH, "its process was killed")

    sweep = crowd(2, layer=hang)
    for backend in sweep.backends:
        backend.close = freed.set

    def interrupt():
        hung.wait(LIMIT_S)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    monkeypatch.setattr(workers, "PATIENCE_S", LIMIT_S)
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    started_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        sweep.run()
    interrupter.join()
    assert freed.is_set()
    assert time.monotonic() - started_s < LIMIT_S  # nothing was waited for in vain
    failed = [trial.outcome.kind for trial in sweep.journal.trials if isinstance(trial.outcome, Failed)]
    assert FailureKind.LAUNCH not in failed  # the plans did nothing wrong
    assert len(sweep.journal.trials) > 100


def test_threads_that_do_not_end_are_not_waited_for_for_ever(crowd, monkeypatch):
    monkeypatch.setattr(workers, "PATIENCE_S", 0.2)
    freed = threading.Event()

    def hang(number, tokens):
        if number == 1:
            assert freed.wait(LIMIT_S)
        else:
            raise KeyboardInterrupt

    sweep = crowd(2, open=hang)
    started_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        sweep.run()
    assert time.monotonic() - started_s < LIMIT_S / 2
    freed.set()
    wait_for(lambda: not [one for one in threading.enumerate() if one.name.startswith("card")])


def test_a_budget_that_is_short_gives_every_count_an_entry_on_several_gpus_too(crowd):
    ticks = [0.0]

    def clock():
        ticks[0] += 0.3
        return ticks[0]

    sweep = crowd(2)
    result = sweep.run(budget=Budget(60.0, clock))
    assert tuple(result.entries) == TOKENS
    assert result.stopped_early


def test_two_workers_have_twice_the_time_but_no_count_is_split():
    assert wall_s([3.0, 3.0], 2) == 3.0
    assert wall_s([], 4) == 0.0
    assert wall_s([10.0, 1.0, 1.0], 4) == 10.0


def test_a_count_may_have_what_the_others_will_not_need_of_the_later_ones():
    def cost(total_s):
        return CountCost(
            opening_s=0.0,
            gate_up_s=total_s,
            down_s=0.0,
            ending_s=0.1,
            down_ending_s=0.1,
            finals_s=0.0,
            least_s=0.1,
            shortest_s=0.2,
        )

    budget = budget_of(120.0, lambda: 0.0)
    costs = [cost(10.0), *[cost(20.0)] * 4]
    alone, shared = (budget.allow(costs, reserve_s=0.0, workers=count) for count in (1, 2))
    assert alone.deadline.left_s == pytest.approx(120.0 - CAUTION * 80.0)
    assert shared.deadline.left_s == pytest.approx(120.0 - CAUTION * 40.0)
    scarce = [cost(10.0), *[cost(40.0)] * 4]
    assert [budget.allow(scarce, 0.0, count).share < 1.0 for count in (1, 2)] == [True, False]


def test_surveys_beside_each_other_do_not_spend_the_same_kernels_twice(fake_backend):
    shape, device = fake_backend().shape, fake_backend().device
    bench = Bench(fake_backend(), None, lambda _: None)
    spaces = {role: candidates(shape, device, role, TOKENS, 60, FREE) for role in Role}
    costs = Costs(shape, fake_backend().ceilings())
    pace = Pace(Budget(None), costs, bench, spaces, TOKENS, 40)
    first, second = [tokens for tokens in order(TOKENS) if pace.quota(Role.DOWN, tokens).kernels][:2]
    idle = pace.quota(Role.DOWN, second).kernels
    with pace.held(Role.DOWN, first) as held:
        beside = pace.quota(Role.DOWN, second).kernels
        assert held.kernels > 0
        assert beside == idle - held.kernels  # what the first one leaves is not known yet
        assert pace.quota(Role.GATE_UP, second).kernels == idle
    assert pace.quota(Role.DOWN, second).kernels == idle


# through the composition root


def test_trials_of_several_threads_are_all_in_the_store(fake_backend, tmp_path):
    first, second = fake_backend(), fake_backend()
    bed = replace(bed_of(first, tmp_path), others=(second,), gpus=("card 0", "card 1"), gpu="GPU-1,GPU-2")
    seen = []
    result = run_on(bed, SweepRequest(shape=first.shape, tokens=TOKENS, budget_s=30.0), Budget(None), seen.append)
    assert tuple(result.table.entries) == TOKENS
    assert first.opened
    assert second.opened
    with Store(result.store_path) as store:
        (run,) = store.runs()
        assert len(store.rows(first.shape)) == result.trials > 100
    assert (run.gpu, run.ended_at is not None) == ("GPU-1,GPU-2", True)
    assert result.trials == sum(isinstance(event, events.TrialEnded) for event in seen)
    again = fake_backend()
    sweep_on(again, tmp_path, tokens=TOKENS)
    assert not set(again.launched) & {*first.launched, *second.launched}  # one GPU goes on where several ended


@pytest.mark.parametrize("count", [2, 4])
def test_a_replay_on_several_backends_writes_the_entries_of_a_replay_on_one(fake_backend, tmp_path, count):
    sweep_on(fake_backend(), tmp_path, tokens=TOKENS, record=tmp_path / "tiny.jsonl.xz")
    recorded = load_recording(tmp_path / "tiny.jsonl.xz")

    def replayed(folder, others):
        request = SweepRequest(shape=recorded.provenance.shape, tokens=TOKENS, out_dir=tmp_path / folder)
        bed = replay_bed(recorded, request)
        beside = tuple(replay_bed(recorded, request).backend for _ in range(others))
        return run_on(replace(bed, others=beside), request, Budget(None), lambda _: None).table

    alone, several = replayed("alone", 0), replayed("several", count - 1)
    assert tuple(several.entries) == TOKENS
    for tokens, entry in several.entries.items():
        assert entry.median_us == pytest.approx(alone.entries[tokens].median_us, rel=NOISE)  # ties go to neighbours
        assert entry.baseline_us == alone.entries[tokens].baseline_us
        assert entry.bound_us == alone.entries[tokens].bound_us
