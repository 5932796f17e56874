"""A sweep that dies at any answer of the GPU goes on from its store: no screening that ended is asked for again."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from zlib import crc32

import pytest

from moetune.outcome import Compiled, Failed, FailureKind, Measured, Stage, Subject
from moetune.store import Store
from moetune.store.codec import choice_text
from tests.engine.test_tuning import provenance_of, sweep_on

KILLS = 20
TOKENS = (8, 512)
SUBJECT = {"gate_up": Subject.GATE_UP, "down": Subject.DOWN}


class Killed(BaseException):
    """What a kill looks like from inside: nothing of the sweep may catch it."""


def one_in(count, *of):
    return crc32(repr(of).encode()) % count == 0


def some_fail(fake_backend, **hooks):
    """Return a fake GPU on which some kernels do not compile, some spill, and some do not launch."""

    def compiled(role, config):
        if one_in(9, role, choice_text(config)):
            return Failed(FailureKind.COMPILE, "ptxas refuses")
        spills = 40 if one_in(11, role, choice_text(config)) else 0
        return Compiled(registers=128, spills=spills, smem_bytes=4096, block_size=config.block_size)

    def first_launch(role, config):
        return Failed(FailureKind.LAUNCH, "misaligned") if one_in(7, choice_text(config), role) else None

    return fake_backend(compile=compiled, first_launch=first_launch, **hooks)


def asked_to_die(backend, at_answer, die):
    """Let ``backend`` note every question, and ``die`` instead of giving answer number ``at_answer``."""
    backend.asked, backend.answers = [], 0
    noted = {
        "first_launch_us": lambda role, config: ("launch", SUBJECT[role.value], backend.tokens, config, 0),
        "time_kernel": lambda role, config, samples: (
            "time",
            SUBJECT[role.value],
            backend.tokens,
            config,
            samples,
        ),
        "verify_kernel": lambda role, config: ("verify", SUBJECT[role.value], backend.tokens, config, 0),
        "time_routing": lambda block_m: ("time", Subject.ROUTING, backend.tokens, block_m, 0),
        "time_combine": lambda: ("time", Subject.COMBINE, backend.tokens, 0, 0),
        "time_layers": lambda plans, rounds: ("final", Subject.LAYER, backend.tokens, tuple(plans), rounds),
        "verify_layer": lambda plan: ("final", Subject.LAYER, backend.tokens, plan, 0),
        "open": lambda tokens: ("open", None, tokens, None, 0),
    }
    for name, note in noted.items():
        setattr(backend, name, _mortal(backend, getattr(backend, name), note, at_answer, die))
    real = backend.compiler_says

    def compiler_says(role, config):
        backend.asked.append(("compile", SUBJECT[role.value], 0, config, 0))
        _count(backend, at_answer, die)
        return real(role, config)

    backend.compiler_says = compiler_says
    return backend


def _mortal(backend, real, note, at_answer, die):
    def answer(*args):
        backend.asked.append(note(*args))
        _count(backend, at_answer, die)
        return real(*args)

    return answer


def _count(backend, at_answer, die):
    backend.answers += 1
    if backend.answers == at_answer:
        die()


def die_inside():
    raise Killed


def ended(folder, backend):
    """Return the latest screening of every subject, token count and choice."""
    if not (folder / "trials.sqlite").exists():
        return {}
    with Store.to_read(folder / "trials.sqlite") as store:
        trials = store.trials(provenance_of(backend))
    return {(one.subject, one.tokens, one.choice): one for one in trials if one.stage is Stage.SCREEN}


def asked_again(asked, known):
    """Return the questions whose answers ``known`` holds."""
    again = []
    for what, subject, tokens, choice, samples in asked:
        trial = known.get((subject, tokens, choice)) or known.get((subject, 0, choice))
        if what in ("open", "final") or trial is None:
            continue
        failed = isinstance(trial.outcome, Failed)
        enough = isinstance(trial.outcome, Measured) and trial.outcome.samples >= samples
        spared = {"compile": failed and trial.tokens == 0, "launch": True, "time": failed or enough}
        if spared.get(what, failed or trial.verified):
            again.append((what, subject, tokens, choice, samples))
    return again


def tables(folder):
    """Return every table of a folder as it lies there; each is whole JSON at any time."""
    return {path.name: json.loads(path.read_bytes()) for path in folder.rglob("*.json")}


def live(fake_backend, folder, at_answer):
    """Run one sweep that dies at an answer, if it gets that far; check it; return the question it died at."""
    backend = asked_to_die(some_fail(fake_backend), at_answer, die_inside)
    known = ended(folder, backend)
    death = None
    try:
        sweep_on(backend, folder, tokens=TOKENS)
    except Killed:
        death = backend.asked[-1]
    assert asked_again(backend.asked, known) == []
    assert ended(folder, backend).keys() >= known.keys()  # nothing that ended is ever lost
    tables(folder)
    finals = {tokens for what, _, tokens, _, _ in backend.asked if what == "final"}
    assert death is not None or finals == set(TOKENS)  # a table's own times are of the run that writes it
    return death


def test_killed_at_twenty_random_answers_sweeps_repeat_no_screening_that_ended(fake_backend, tmp_path):
    unbroken = asked_to_die(some_fail(fake_backend), None, die_inside)
    sweep_on(unbroken, tmp_path / "unbroken", tokens=TOKENS)
    whole, draw, deaths, stores = tables(tmp_path / "unbroken"), random.Random(1), [], 0
    assert whole
    while len(deaths) < KILLS:
        death = live(fake_backend, tmp_path / str(stores), draw.randint(1, unbroken.answers))
        if death is not None:
            deaths.append(death)
            continue
        assert tables(tmp_path / str(stores)) == whole
        stores += 1
    live(fake_backend, tmp_path / str(stores), None)
    assert tables(tmp_path / str(stores)) == whole
    assert {what for what, *_ in deaths} >= {"compile", "launch", "time", "final"}


def test_the_check_sees_a_screening_that_is_asked_for_again(fake_backend, tmp_path):
    sweep_on(some_fail(fake_backend), tmp_path, tokens=TOKENS)
    backend = asked_to_die(some_fail(fake_backend), None, die_inside)
    known = ended(tmp_path, backend)
    sweep_on(backend, tmp_path, fresh=True, tokens=TOKENS)
    again = asked_again(backend.asked, known)
    assert {what for what, *_ in again} == {"compile", "launch", "time", "verify"}
    assert {subject for _, subject, *_ in again} == set(Subject) - {Subject.LAYER}


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.engine.conftest import FakeBackend
from tests.engine.test_killed_sweep import TOKENS, asked_to_die, some_fail
from tests.engine.test_tuning import sweep_on

def die():
    os.kill(os.getpid(), signal.SIGKILL)

sweep_on(asked_to_die(some_fail(FakeBackend), int(sys.argv[2]), die), Path(sys.argv[1]), tokens=TOKENS)
"""


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_a_killed_process_is_as_good_as_an_interrupted_one(fake_backend, tmp_path, share):
    unbroken = asked_to_die(some_fail(fake_backend), None, die_inside)
    sweep_on(unbroken, tmp_path / "unbroken", tokens=TOKENS)
    root = Path(__file__).resolve().parents[2]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "killed"), str(int(share * unbroken.answers))],
        env=dict(os.environ, PYTHONPATH=os.pathsep.join([str(root), *(entry for entry in sys.path if entry)])),
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    backend = asked_to_die(some_fail(fake_backend), None, die_inside)
    known = ended(tmp_path / "killed", backend)
    assert known
    sweep_on(backend, tmp_path / "killed", tokens=TOKENS)
    assert asked_again(backend.asked, known) == []
    assert tables(tmp_path / "killed") == tables(tmp_path / "unbroken") != {}
