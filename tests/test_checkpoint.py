"""Checkpoints: bit for bit, atomic, never in training's way, or refused with a sentence."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from survival import RESUMES, survives

from dovetail.errors import UserError
from dovetail.run import checkpoint
from dovetail.run.checkpoint import Checkpoints

META = {"algorithm": "PPO", "options": {"hidden": 3, "rate": 0.1}, "env_steps": 640}


class State(NamedTuple):
    params: Any
    optimizer: Any
    key: jax.Array
    steps: jax.Array


def small_state(seed: int = 0, hidden: int = 3) -> State:
    key = jax.random.key(seed)
    params = {"dense": {"kernel": jax.random.normal(key, (4, hidden)), "bias": jnp.zeros(hidden)}}
    return State(params, optax.adam(1e-3).init(params), key, jnp.int32(seed))


def assert_same_bits(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert type(a) is type(b)
        if isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            assert a.dtype == b.dtype
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def checkpoints(folder: Path) -> Iterator[Checkpoints]:
    opened = Checkpoints(folder, keep=3)
    yield opened
    opened.close()


def saved(folder: Path, steps: tuple[int, ...] = (1,), state: Any = None) -> None:
    with_state = small_state() if state is None else state
    opened = Checkpoints(folder, keep=9)
    for step in steps:
        opened.save(step, with_state, META)
        opened.wait()
    opened.close()


def test_a_training_state_returns_bit_for_bit(checkpoints: Checkpoints) -> None:
    state = small_state(seed=7)
    checkpoints.save(12, state, META)
    assert checkpoints.wait(30)
    tree, meta = checkpoints.restore(small_state(seed=1), expect={"algorithm": "PPO"})
    assert_same_bits(tree, state)
    assert meta == META
    assert jax.random.normal(tree.key) == jax.random.normal(state.key)


def test_every_kind_of_leaf_returns_bit_for_bit(checkpoints: Checkpoints) -> None:
    tree = {
        "bool": jnp.array([True, False]),
        "bytes": jnp.arange(5, dtype=jnp.uint8),
        "words": np.array([2**32 - 1, 0], np.uint32),
        "half": jnp.array([1.5, -0.0, jnp.nan], jnp.bfloat16),
        "empty": jnp.zeros((0, 3)),
        "no_keys": jax.random.split(jax.random.key(0), 0),
        "keys": jax.random.split(jax.random.key(3, impl="rbg"), (2, 2)),
        "double": np.array([np.pi, np.inf]),
        "scalar": np.float64(0.1),
        "int": 2**40,
        "float": 0.1,
        "yes": True,
        "none": None,
        "nested": (optax.EmptyState(), [jnp.float32(3.0)]),
    }
    checkpoints.save(1, tree, {})
    checkpoints.wait()
    assert_same_bits(checkpoints.restore(tree)[0], tree)


def test_structure_alone_is_enough_to_restore(checkpoints: Checkpoints) -> None:
    state = small_state(seed=5)
    checkpoints.save(1, state, META)
    checkpoints.wait()
    like = jax.eval_shape(small_state, 0)
    like = like._replace(params=jax.eval_shape(lambda: state.params))
    assert_same_bits(checkpoints.restore(like)[0], state)


def test_what_changes_after_save_is_not_seen(checkpoints: Checkpoints) -> None:
    tree = {"device": jnp.arange(4.0), "host": np.arange(3)}
    checkpoints.save(1, tree, META)
    jax.jit(lambda x: x + 1, donate_argnums=0)(tree["device"])
    tree["host"][:] = 9
    checkpoints.wait()
    restored, _ = checkpoints.restore({"device": jnp.zeros(4), "host": np.zeros(3, int)})
    np.testing.assert_array_equal(restored["device"], [0.0, 1.0, 2.0, 3.0])
    np.testing.assert_array_equal(restored["host"], [0, 1, 2])


def test_the_newest_are_kept(folder: Path, checkpoints: Checkpoints) -> None:
    assert checkpoints.latest() is None
    for step in (2, 10, 30, 100, 200):
        checkpoints.save(step, {"x": jnp.float32(step)}, META)
        checkpoints.wait()
    assert checkpoints.steps() == [30, 100, 200]
    assert checkpoints.latest() == 200
    assert float(checkpoints.restore({"x": jnp.float32(0)}, step=30)[0]["x"]) == 30.0
    assert sorted(os.listdir(folder)) == ["100", "200", "30"]


def test_save_does_not_wait_and_a_newer_request_replaces_a_waiting_one(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, began, may_go_on = checkpoint._write_arrays, threading.Event(), threading.Event()

    def slow_write(*arguments: Any) -> None:
        began.set()
        assert may_go_on.wait(30)
        write(*arguments)

    monkeypatch.setattr(checkpoint, "_write_arrays", slow_write)
    checkpoints.save(1, {"x": jnp.float32(1)}, META)
    assert began.wait(30)
    for step in (2, 3, 4):
        checkpoints.save(step, {"x": jnp.float32(step)}, META)
    assert not checkpoints.wait(0.01)
    assert checkpoints.steps() == []
    may_go_on.set()
    assert checkpoints.wait(30)
    assert checkpoints.steps() == [1, 4]


def test_close_writes_what_still_waits(folder: Path) -> None:
    opened = Checkpoints(folder)
    opened.save(3, small_state(), META)
    opened.close()
    opened.close()
    assert opened.latest() == 3
    with pytest.raises(UserError, match="are closed: save before close"):
        opened.save(4, small_state(), META)


def test_a_failed_write_is_told_once_and_harms_nothing(
    folder: Path, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = small_state()
    checkpoints.save(1, state, META)
    checkpoints.wait()

    def full_disk(arrays: Path, request: Any) -> None:
        arrays.mkdir(parents=True)
        (arrays / "half").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_write_arrays", full_disk)
        checkpoints.save(2, state, META)
        with pytest.raises(UserError, match="Checkpoint 2 could not be written.*No space left"):
            checkpoints.wait()
    assert os.listdir(folder) == ["1"]
    checkpoints.save(2, state, META)
    assert checkpoints.wait()
    assert checkpoints.steps() == [1, 2]
    assert_same_bits(checkpoints.restore(state)[0], state)


def test_a_stumble_of_python_itself_is_got_over(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = checkpoint._write_arrays, list[int]()  # pyright: ignore[reportPrivateUsage]

    def stumbling(*arguments: Any) -> None:
        calls.append(len(calls))
        if len(calls) == 1:
            raise SystemError("AST constructor recursion depth mismatch (before=66, after=193)")
        write(*arguments)

    monkeypatch.setattr(checkpoint, "_write_arrays", stumbling)
    checkpoints.save(1, {"x": jnp.arange(3)}, {})
    checkpoints.wait()
    assert calls == [0, 1] and checkpoints.steps() == [1]


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    opened = Checkpoints(tmp_path / "file" / "checkpoints")
    opened.save(1, small_state(), META)
    with pytest.raises(UserError, match="could not be written to .*Not a directory"):
        opened.close()


@survives("SIGKILL", "any", "any", RESUMES)
def test_a_killed_process_leaves_only_whole_checkpoints(folder: Path) -> None:
    script = f"""
import jax.numpy as jnp, time
from dovetail.run import checkpoint
write = checkpoint._write_record
def stall(folder, request):
    if request.step == 2:
        print("written in half", flush=True)
        time.sleep(60)
    write(folder, request)
checkpoint._write_record = stall
opened = checkpoint.Checkpoints({str(folder)!r})
for step in (1, 2):
    opened.save(step, {{"x": jnp.full(3, step)}}, {{}})
    opened.wait()
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "written in half\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert sorted(os.listdir(folder)) == [".tmp-2", "1"]
    opened = Checkpoints(folder)
    assert opened.steps() == [1]
    like = {"x": jnp.zeros(3, int)}
    np.testing.assert_array_equal(opened.restore(like)[0]["x"], [1, 1, 1])
    opened.save(3, like, {})
    opened.close()
    assert sorted(os.listdir(folder)) == ["1", "3"]


def test_resuming_from_an_earlier_step_drops_the_abandoned_later_ones(folder: Path) -> None:
    saved(folder, (1, 2, 3))
    opened = Checkpoints(folder)
    tree, _ = opened.restore(small_state(), step=1)
    assert opened.steps() == [1, 2, 3]
    opened.save(1, tree, META)
    opened.save(2, small_state(seed=8), META)
    opened.close()
    assert opened.steps() == [1, 2]
    assert_same_bits(opened.restore(tree)[0], small_state(seed=8))


def test_another_runs_folder_is_not_written_to(folder: Path) -> None:
    saved(folder, (5,))
    with pytest.raises(UserError, match="already holds checkpoint 5 of another run"):
        Checkpoints(folder).save(1, small_state(), META)


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete"])
def test_a_damaged_file_is_refused(folder: Path, damage: str) -> None:
    saved(folder, (1, 2))
    files = [path for path in (folder / "2" / "arrays").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    if damage == "delete":
        largest.unlink()
    elif damage == "truncate":
        largest.write_bytes(content[:-1])
    else:
        content[len(content) // 2] ^= 1
        largest.write_bytes(content)
    with pytest.raises(UserError, match=r"Checkpoint 2 in .* is damaged: its file .*other: 1\."):
        Checkpoints(folder).restore(small_state())
    assert_same_bits(Checkpoints(folder).restore(small_state(), step=1)[0], small_state())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda text: text[:-9], "its meta.json cannot be read; there is no other"),
        (lambda text: text.replace("640", "641"), "its meta.json is not what was written"),
        (lambda text: text.replace('"format": 1', '"format": 2'), "has format 2, but this"),
    ],
)
def test_a_damaged_or_unknown_meta_is_refused(folder: Path, change: Any, sentence: str) -> None:
    saved(folder)
    path = folder / "1" / "meta.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(UserError, match=sentence):
        Checkpoints(folder).restore(small_state())


def test_another_algorithm_is_refused(folder: Path) -> None:
    saved(folder)
    with pytest.raises(UserError, match="saved with algorithm 'PPO', but 'DQN' is asked for"):
        Checkpoints(folder).restore(small_state(), expect={"algorithm": "DQN"})


def test_other_options_are_refused_only_if_a_shape_differs(folder: Path) -> None:
    saved(folder)
    opened = Checkpoints(folder)
    opened.restore(small_state(), expect={"options": {"hidden": 3, "rate": 0.2}})
    with pytest.raises(UserError) as refusal:
        opened.restore(small_state(hidden=5), expect={"options": {"hidden": 5, "rate": 0.1}})
    assert str(refusal.value) == (
        f"Checkpoint 1 in {folder} does not fit: its leaf .params['dense']['bias'] is float32[3], "
        "but here it is float32[5]: restore it with the options it was saved with "
        "(hidden was 3, is 5)."
    )


def test_a_missing_leaf_and_another_kind_of_key_are_refused(folder: Path) -> None:
    saved(folder, state={"a": jnp.zeros(2), "key": jax.random.key(0)})
    opened = Checkpoints(folder)
    with pytest.raises(UserError, match=r"its leaf \['b'\] is absent, but here it is float32\[\]"):
        opened.restore({"a": jnp.zeros(2), "b": jnp.zeros(()), "key": jax.random.key(0)})
    with pytest.raises(
        UserError, match=r"\['key'\] is key<fry>\[2\], but here it is key<rbg>\[4\]"
    ):
        opened.restore({"a": jnp.zeros(2), "key": jax.random.key(0, impl="rbg")})


def test_an_absent_checkpoint_says_what_is_there(folder: Path) -> None:
    with pytest.raises(UserError, match="No checkpoint was found in .*no such folder"):
        Checkpoints(folder).restore({})
    folder.mkdir()
    (folder / "notes.txt").touch()
    with pytest.raises(UserError, match=r"it holds notes\.txt"):
        Checkpoints(folder).restore({})
    saved(folder, (1, 2))
    with pytest.raises(UserError, match=r"No checkpoint 7 in .*: choose one of: 1, 2\."):
        Checkpoints(folder).restore({}, step=7)


def test_a_leaf_that_is_no_number_is_refused_at_once(checkpoints: Checkpoints) -> None:
    with pytest.raises(UserError, match=r"leaf \['name'\] is of type str"):
        checkpoints.save(1, {"name": "x"}, {})


def test_meta_says_who_wrote_what(folder: Path) -> None:
    saved(folder)
    record = json.loads((folder / "1" / "meta.json").read_text())
    assert record["format"] == 1
    assert record["step"] == 1
    assert record["versions"]["jax"] == jax.__version__
    assert record["leaves"][0] == {
        "path": ".params['dense']['bias']",
        "shape": [3],
        "dtype": "float32",
    }
    assert record["meta"] == META
    assert all(len(digest) == 64 for digest in record["files"].values())
