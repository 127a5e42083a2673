"""Environments in processes: the same transitions, several in flight, and no silent death."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import hosted
import jax
import numpy as np
import pytest

from dovetail.envs import Env, check_host_env, resolve, segment
from dovetail.envs.conformance import _actions
from dovetail.envs.interface import HostStep, SplitHostEnv
from dovetail.envs.makers import by_class, synchronous
from dovetail.envs.processes import ProcessFailed, ProcessVectorEnv, make_bell
from dovetail.envs.vector import VectorHost
from dovetail.errors import UserError

HERE = Path(__file__).parent
FILE = HERE / "hosted.py"
LIMIT = 20.0
"""Seconds within which whatever must happen happens, on the busiest machine."""


@contextlib.contextmanager
def closing(*made: Any) -> Generator[Any]:
    try:
        yield made[0] if len(made) == 1 else made
    finally:
        for one in made:
            one.close()


def here(env: Any, num_envs: int) -> Any:
    host = resolve(env).host
    assert host is not None
    return host(num_envs)


def apart(env: Any, num_envs: int, **more: Any) -> SplitHostEnv:
    process = resolve(env).process
    assert process is not None
    return process(num_envs, **more)


def transitions(host: Any, steps: int) -> list[Any]:
    """The first observation and every step of a run with random actions, copied."""
    seeds = [11 + 3 * i for i in range(host.num_envs)]
    seen = [jax.tree.map(np.copy, host.reset(seeds))]
    for action in _actions(host.spec.action, steps, host.num_envs, 0):
        seen.append(jax.tree.map(np.copy, host.step(action)))
    return seen


def assert_same(one: list[Any], other: list[Any]) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


SAME = [
    "CartPole-v1?max_episode_steps=15",
    "CartPole-v1?max_episode_steps=15&autoreset=same_step",
    "CartPole-v1?max_episode_steps=15&vectorization=sync&autoreset=next_step",
    "CartPole-v1?max_episode_steps=15&vectorization=sync&autoreset=disabled",
    f"{FILE}:Room?autoreset=same_step",
    f"{FILE}:Room?autoreset=next_step",
    f"{FILE}:Room?autoreset=disabled&max_episode_steps=3",
]


@pytest.mark.parametrize("env", SAME)
def test_a_process_makes_the_same_transitions(env):
    with closing(here(env, 3), apart(env, 3)) as (one, other):
        expected = transitions(one, 40)
        assert_same(expected, transitions(other, 40))
        assert_same(expected, transitions(other, 40))  # a second reset begins anew
    ends = sum(int((step.terminated | step.truncated).sum()) for step in expected[1:])
    assert ends >= 5
    finals = [step for step in expected[1:] if step.first.any() and step.valid.all()]
    for step in finals:  # what the episode ended with is not what the next one begins with
        row = np.flatnonzero(step.first)[0]
        old, new = (jax.tree.leaves(x)[0][row] for x in (step.next_observation, step.observation))
        assert not np.array_equal(old, new)


@pytest.mark.parametrize("env", [SAME[0], SAME[6]])
def test_several_processes_make_the_same_transitions_as_one(env):
    mark = "&" if "?" in env else "?"
    divided = here(f"{env}{mark}vectorization=processes&processes=3", 5)
    with closing(here(env, 5), divided) as (one, other):
        assert_same(transitions(one, 30), transitions(other, 30))


def test_it_conforms():
    check_host_env(
        resolve("CartPole-v1?max_episode_steps=9&vectorization=processes&processes=2").host,
        steps=30,
    )


def test_its_process_is_another_one_and_has_no_jax():
    with closing(apart(f"{FILE}:Trouble", 2)) as env:
        pids, has_jax = env.reset([0, 2]).T
        assert pids[0] == pids[1] != np.float32(os.getpid()) and has_jax.tolist() == [0, 0]
        assert "jax" in sys.modules


def test_a_class_of_a_module_is_hosted_too():
    with closing(apart(hosted.Room, 2)) as env:
        assert env.reset([0, 1])["eye"].shape == (2, 3, 2)
        assert not env.spec.threads


def test_what_was_received_holds_while_the_next_step_is_under_way():
    for query in ("same_step", "disabled"):
        with closing(apart(f"{FILE}:Room?autoreset={query}", 3)) as env:
            env.reset([0, 1, 2])
            for action in _actions(env.spec.action, 20, 3, 0):
                received = env.step(action)
                kept = jax.tree.map(np.copy, received)
                env.send(action)
                wait_until(env.ready)
                assert_same([kept], [received])
                env.receive()


def test_send_and_receive_are_a_step_here_too():
    one, other = (here("CartPole-v1", 2) for _ in range(2))
    one.reset([0, 1])
    other.reset([0, 1])
    for _ in range(30):
        action = np.array([0, 1], np.int32)
        one.send(action)
        assert one.ready()
        assert_same([jax.tree.map(np.copy, one.receive())], [other.step(action)])
    with pytest.raises(UserError, match="asked for a step's result before the step"):
        one.receive()


def test_one_waiter_waits_for_any_of_several_at_a_bell():
    bell = make_bell()
    made = [apart("CartPole-v1", 2, bell=bell, first=2 * i) for i in range(2)]
    with closing(*made):
        for i, env in enumerate(made):
            env.reset([i, i + 1])
            assert bell.acquire(True, LIMIT)
        steps = 0
        for env in made:
            env.send(np.zeros(2, np.int32))
        while steps < 40:
            assert bell.acquire(True, LIMIT)
            ready = [env for env in made if env.ready()]
            assert ready
            for env in ready[:1]:
                assert isinstance(env.receive(), HostStep)
                steps += 1
                env.send(np.zeros(2, np.int32))
        for env in made:
            env.receive()


def test_tuples_pass_both_ways_and_a_single_seed_is_drawn_from_all():
    build = partial(by_class, hosted.Pairs, {})
    with closing(ProcessVectorEnv(build, 3, "test:Pairs")) as env:
        (number, bits), _ = env.reset(seed=[4, 5, 6])
        assert len(set(number)) == 1 and bits.dtype == np.int8
        actions = np.array([1.5, 2.5, 3.5]), np.eye(3, dtype=np.int8)
        (number, bits), reward, *_ = env.step(actions)
        assert number.tolist() == [1.5, 2.5, 3.5] and bits.tolist() == np.eye(3).tolist()
        assert reward.tolist() == [3, 5, 7]
        with pytest.raises(UserError, match="asked for a step's result before the step"):
            env.step_wait()
        env.step_async(actions)
        with pytest.raises(UserError, match="asked for a step while another is under way"):
            env.step_async(actions)
        assert env.reset(seed=1)[0][1].tolist() == [[1, 1, 1]] * 3  # though a step was under way
        with pytest.raises(UserError, match=r"actions of shape \(2,\): its 3 environments take"):
            env.step((np.zeros(2), actions[1]))


def test_a_vector_environment_that_does_not_say_how_it_resets_is_refused():
    with pytest.raises(UserError, match="does not say how it resets"):
        VectorHost(ProcessVectorEnv(partial(hosted.Wide, wrong="metadata"), 1, "test:X"), "test:X")


def trouble(kind: str, seeds: list[int], **more: Any) -> None:
    """Steps four environments, of which those with odd seeds come to grief in the third step."""
    build = partial(synchronous, partial(hosted.Trouble, kind), "SameStep")
    env = ProcessVectorEnv(build, len(seeds), "test:Trouble", **more)
    with closing(env):
        env.reset(seed=seeds)
        for _ in range(5):
            env.step(np.zeros(len(seeds), np.int64))


@pytest.mark.parametrize("processes", [1, 2])
def test_an_exception_arrives_with_its_traceback(processes):
    sentence = "test:Trouble: environment 12 raised ValueError in step at step 3: out of fuel"
    with pytest.raises(ProcessFailed, match=sentence) as raised:
        trouble("raise", [0, 2, 5, 6], processes=processes, first=10)
    assert 'hosted.py", line' in raised.value.traceback
    assert raised.value.traceback.rstrip() in raised.value.__notes__[0]


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("exit", "environment 1 raised SystemExit in step at step 3: 3"),
        ("shape", r"environment 1 returned an observation float32\[3\] where its space is .*\[2\]"),
        ("no reset", "environment 1 raised OSError in reset at step 0: no map"),
        ("end", "The process of environments 0…1 of test:Trouble ended with exit code 3 at step 3"),
    ],
)
def test_other_troubles_are_sentences(kind, sentence):
    with pytest.raises(ProcessFailed, match=sentence):
        trouble(kind, [0, 1])


def test_a_failure_can_be_followed_by_a_reset():
    options = "kind=raise&vectorization=processes&processes=2"
    with closing(here(f"{FILE}:Trouble?{options}", 4)) as env:
        env.reset([0, 1, 2, 3])
        for _ in range(2):
            env.step(np.zeros(4, np.int32))
        with pytest.raises(UserError, match="environment 1 raised ValueError in step at step 3"):
            env.step(np.zeros(4, np.int32))
        env.reset([0, 2, 4, 6])
        assert env.step(np.zeros(4, np.int32)).reward.tolist() == [1, 1, 1, 1]


def test_numbers_are_checked_and_named_as_the_run_names_them():
    with closing(apart(f"{FILE}:Trouble?kind=nan", 2, first=6)) as env:
        env.reset([0, 1])
        with pytest.raises(UserError, match=r"environment 7 returned the observation \[nan, nan\]"):
            for _ in range(3):
                env.step(np.zeros(2, np.int32))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("reward", r"returned rewards of shape \(2, 1\), not \(2,\) \(step 1\)"),
        ("observation", r"returned observations of shape \(2, 1\), not \(2, 2\) \(step 1\)"),
    ],
)
def test_wrong_shapes_are_not_broadcast(wrong, sentence):
    with closing(ProcessVectorEnv(partial(hosted.Wide, wrong=wrong), 2, "test:Wide")) as env:
        env.reset(seed=[0, 1])
        with pytest.raises(ProcessFailed, match=sentence):
            env.step(np.zeros(2, np.int32))


def test_a_crash_leaves_a_traceback():
    with pytest.raises(ProcessFailed, match="was killed by SIGSEGV at step 3") as raised:
        trouble("crash", [1])
    assert "in step" in raised.value.traceback


def test_a_killed_process_is_told():
    with closing(apart(f"{FILE}:Trouble", 4, first=4)) as env:
        pid = int(pids_of(env)[0])
        env.reset([0, 2, 4, 6])
        env.step(np.zeros(4, np.int32))
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        sentence = "The process of environments 4…7 of .*Trouble was killed by SIGKILL at step 2"
        with pytest.raises(ProcessFailed, match=sentence):
            env.step(np.zeros(4, np.int32))
        assert time.monotonic() - began < LIMIT
        with pytest.raises(UserError, match="used after its processes had ended"):
            env.step(np.zeros(4, np.int32))
        with pytest.raises(UserError, match="used after its processes had ended"):
            env.reset([0, 2, 4, 6])


def test_a_process_killed_at_a_long_step_is_told_to_who_polls():
    with closing(apart(f"{FILE}:Trouble?kind=sleep", 1)) as env:
        env.reset([1])
        for _ in range(2):
            env.step(np.zeros(1, np.int32))
        env.send(np.zeros(1, np.int32))
        time.sleep(0.05)
        assert not env.ready()
        os.kill(int(pids_of(env)[0]), signal.SIGKILL)
        wait_until(env.ready)
        with pytest.raises(ProcessFailed, match="environment 0 of .* killed by SIGKILL at step 3"):
            env.receive()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_hanging_process_is_told_with_where_it_hangs(processes):
    line = 1 + FILE.read_text().splitlines().index("                    time.sleep(60)")
    sentence = (
        f"The process of environments? .* of test:Trouble did not answer within 0.5 s at step 3: "
        f"it is in step at .*hosted.py:{line}"
    )
    with pytest.raises(ProcessFailed, match=sentence) as raised:
        trouble("sleep", [0, 1], patience=0.5, processes=processes)
    assert raised.value.traceback.count('File "') > 3


@pytest.mark.parametrize(("query", "told"), [("", "0.4"), ("&patience=0.6", "0.6")])
def test_the_id_has_the_last_word_on_patience(query, told):
    with closing(apart(f"{FILE}:Trouble?kind=sleep{query}", 1, patience=0.4)) as env:
        env.reset([1])
        with pytest.raises(ProcessFailed, match=f"within {told} s at step 3"):
            for _ in range(3):
                env.step(np.zeros(1, np.int32))


def test_interrupts_do_not_reach_the_process():
    with closing(apart(f"{FILE}:Trouble", 1)) as env:
        env.reset([0])
        os.kill(int(pids_of(env)[0]), signal.SIGINT)
        for _ in range(3):
            assert env.step(np.zeros(1, np.int32)).reward.tolist() == [1]


def test_closing_leaves_nothing():
    env = apart("CartPole-v1", 2)
    (pid,) = pids_of(env)
    observation = env.reset([0, 1])
    first = observation.copy()
    maps = Path(f"/proc/{pid}/maps").read_text()
    mapped = [line for line in maps.splitlines() if "/dev/shm/dovetail-" in line]
    assert mapped and all(line.endswith("(deleted)") for line in mapped)
    env.close()
    env.close()
    assert not running(pid)
    np.testing.assert_array_equal(observation, first)  # somebody may still look at it


def test_an_environment_that_nobody_holds_is_closed():
    env = apart("CartPole-v1", 1)
    (pid,) = pids_of(env)
    del env
    gc.collect()
    assert not running(pid)


def run(script: str, folder: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    environment = {**os.environ, "PYTHONPATH": f"{HERE}:{HERE.parents[1]}"}
    return subprocess.run(
        [sys.executable, str(path)], env=environment, capture_output=True, text=True, timeout=60
    )


START = """
    import os, sys, time
    from functools import partial
    import hosted
    import numpy as np
    from dovetail.envs.makers import synchronous
    from dovetail.envs.processes import ProcessVectorEnv
    build = partial(synchronous, partial(hosted.Trouble, "sleep"), "SameStep")
    env = ProcessVectorEnv(build, 2, "test:Trouble", processes=2)
    env.reset(seed=[0, 1])
"""


def test_leaving_without_closing_leaves_nothing_and_needs_no_guard(tmp_path):
    done = run(f"{START}\n    print(*env.step(np.zeros(2, int))[0][:, 0].astype(int))", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.split()) == 2


@pytest.mark.parametrize("busy", [False, True])
def test_processes_end_when_their_parent_is_killed(tmp_path, busy):
    script = f"""{START}
    steps = 3 if {busy} else 2
    for _ in range(steps - 1):
        env.step(np.zeros(2, int))
    env.step_async(np.zeros(2, int))
    print(*[member._process.pid for member in env._members], flush=True)
    time.sleep(0.2)
    os.kill(os.getpid(), 9)
    """
    done = run(script, tmp_path)
    assert done.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    for pid in pids:
        wait_until(lambda pid=pid: not running(pid))


def test_a_script_without_a_guard_gets_one_sentence(tmp_path):
    script = """
    from functools import partial
    import hosted
    from dovetail.envs.makers import synchronous
    from dovetail.envs.processes import ProcessVectorEnv
    from dovetail.errors import UserError

    class Mine(hosted.Trouble):
        pass

    def main():
        try:
            ProcessVectorEnv(partial(synchronous, Mine, "SameStep"), 1, "test:Mine").close()
        except UserError as error:
            print(error)

    """
    done = run(f"{script}main()", tmp_path)
    assert done.stderr == ""
    (sentence,) = done.stdout.splitlines()
    assert "script.py, which its processes import" in sentence
    assert 'under `if __name__ == "__main__":`.' in sentence
    done = run(f'{script}if __name__ == "__main__": main()', tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_too_little_shared_memory_is_told_before_anything_is_written(monkeypatch):
    small = os.statvfs_result((4096, 4096, 256, 256, 256, 10, 10, 10, 0, 255))  # 1 MB
    monkeypatch.setattr(segment.os, "statvfs", lambda folder: small)
    sentence = r"test:X: 7 environments .* need 2.00 MB .* and /dev/shm has 1.00 MB free: use fewer"
    with pytest.raises(UserError, match=sentence):
        segment.create(2 * 2**20, "test:X", 7)
    monkeypatch.undo()
    monkeypatch.setattr(segment.os, "posix_fallocate", no_space)
    with pytest.raises(UserError, match="need 2.00 MB of shared memory"):
        segment.create(2 * 2**20, "test:X", 7)


def no_space(*arguments: int) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ("CartPole-v1?vectorization=processes&processes=0", "processes=0: give 1 or more"),
        ("CartPole-v1?vectorization=processes&processes=two", "processes=two: give 1 or more"),
        ("CartPole-v1?vectorization=procesess", "did you mean 'processes'"),
        ("CartPole-v1?processes=2", "processes=2 without vectorization=processes"),
        ("CartPole-v1?patience=0", "patience=0: give seconds, more than 0"),
    ],
)
def test_mistakes_are_sentences(env, sentence):
    with pytest.raises(UserError, match=sentence):
        resolve(env)


def test_what_cannot_be_hosted_is_told():
    class Local(hosted.Trouble):
        pass

    assert resolve(Local).process is None
    build = partial(synchronous, Local, "SameStep")
    with pytest.raises(UserError, match="cannot be sent to a process of its own .*Local"):
        ProcessVectorEnv(build, 1, "test:Local")
    with pytest.raises(UserError, match=r"has the space Text.* cannot lie in shared memory"):
        ProcessVectorEnv(partial(synchronous, hosted.Words, "SameStep"), 1, "test:Words")
    with pytest.raises(ProcessFailed, match="test:X could not be made: NameNotFound"):
        build = partial(synchronous, partial(gymnasium.make, "Nothing-v0"), "SameStep")
        ProcessVectorEnv(build, 1, "test:X")


@pytest.mark.parametrize(
    ("env", "threads", "process"),
    [
        ("gymnasium:CartPole-v1", False, True),
        ("gymnasium:Acrobot-v1?vectorization=sync", False, True),
        ("gymnasium:Acrobot-v1?vectorization=async", False, False),
        ("ale:pong", True, False),
        ("gymnasium:ALE/Pong-v5", True, False),
        ("dovetail:CartPole-v1", True, False),
    ],
)
def test_who_wants_processes(env, threads, process):
    resolved: Env = resolve(env)
    assert (resolved.spec.threads, resolved.process is not None) == (threads, process)


def pids_of(env: Any) -> list[int]:
    return [member._process.pid for member in env._venv._members]


def running(pid: int) -> bool:
    """Whether a process lives; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(true: Any) -> None:
    deadline = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)
