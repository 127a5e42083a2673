"""The mapping of spaces, against written numbers."""

import gymnasium.spaces as gs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.envs.interface import Continuous, Discrete, MultiDiscrete
from dovetail.envs.spaces import SpaceMap, space_map
from dovetail.errors import UserError

BOX = gs.Box(-1, 1, (2,), np.float32)
TWO = gs.Discrete(2)


def mapped(observation: gs.Space = BOX, action: gs.Space = TWO, **how: object) -> SpaceMap:
    return space_map(observation, action, "test:Env", **how)  # pyright: ignore[reportArgumentType]


def spec(shape: tuple[int, ...], dtype: type = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def test_float_boxes_become_float32_of_the_same_shape():
    m = mapped(gs.Box(-1, 1, (2, 3), np.float64))
    x = m.encode(np.arange(12.0).reshape(2, 2, 3))
    assert m.observation == spec((2, 3))
    assert x.dtype == np.float32 and x[1, 1].tolist() == [9, 10, 11]


def test_float32_boxes_are_not_copied():
    raw = np.zeros((4, 2), np.float32)
    assert mapped().encode(raw) is raw


def test_a_transposed_batch_is_straightened():
    x = mapped().encode(np.zeros((2, 4), np.float32).T)
    assert x.flags.c_contiguous


def test_a_scalar_box_gets_an_axis():
    m = mapped(gs.Box(0, 1, (), np.float32))
    assert m.observation == spec((1,))
    assert m.encode(np.array([0.5, 1.0])).tolist() == [[0.5], [1.0]]


@pytest.mark.parametrize("shape", [(4, 4), (4, 4, 3)])
def test_uint8_images_stay_uint8(shape):
    m = mapped(gs.Box(0, 255, shape, np.uint8))
    assert m.observation == spec(shape, np.uint8)
    assert m.encode(np.full((2, *shape), 200, np.uint8)).dtype == np.uint8


def test_a_uint8_vector_is_no_image():
    m = mapped(gs.Box(0, 255, (128,), np.uint8))
    assert m.observation == spec((128,))


def test_discrete_observations_become_one_hots_from_their_start():
    m = mapped(gs.Discrete(3, start=5))
    assert m.observation == spec((3,))
    assert m.encode(np.array([5, 7])).tolist() == [[1, 0, 0], [0, 0, 1]]


def test_multidiscrete_observations_become_joined_one_hots():
    m = mapped(gs.MultiDiscrete([2, 3]))
    assert m.encode(np.array([[1, 2], [0, 0]])).tolist() == [[0, 1, 0, 0, 1], [1, 0, 1, 0, 0]]


def test_multibinary_observations_become_float32():
    x = mapped(gs.MultiBinary(3)).encode(np.array([[1, 0, 1]], np.int8))
    assert x.dtype == np.float32 and x.tolist() == [[1, 0, 1]]


def test_a_dict_without_images_becomes_one_vector_with_its_keys_sorted():
    space = gs.Dict({"b": gs.Box(-1, 1, (2, 1)), "a": TWO, "c": gs.Tuple([gs.MultiBinary(1)])})
    m = mapped(space)
    raw = {
        "b": np.array([[[3.0], [4.0]]]),
        "a": np.array([1]),
        "c": (np.array([[1]], np.int8),),
    }
    assert m.observation == spec((5,))
    assert m.encode(raw).tolist() == [[0, 1, 3, 4, 1]]


def test_a_dict_with_images_keeps_them_and_joins_the_rest():
    image = gs.Box(0, 255, (4, 4), np.uint8)
    m = mapped(gs.Dict({"eye": gs.Dict({"left": image}), "speed": BOX, "gear": TWO}))
    raw = {
        "eye": {"left": np.full((1, 4, 4), 9, np.uint8)},
        "speed": np.array([[0.5, -0.5]], np.float32),
        "gear": np.array([0]),
    }
    x = m.encode(raw)
    assert m.observation == {"eye.left": spec((4, 4), np.uint8), "vector": spec((4,))}
    assert x["eye.left"].max() == 9 and x["vector"].tolist() == [[1, 0, 0.5, -0.5]]


def test_a_tuple_of_images_is_named_by_position():
    m = mapped(gs.Tuple([gs.Box(0, 255, (4, 4), np.uint8)]))
    assert m.observation == {"0": spec((4, 4), np.uint8)}


@pytest.mark.parametrize("space", [gs.Text(3), gs.Sequence(BOX), gs.Dict({"x": gs.Text(3)})])
def test_other_observation_spaces_are_refused(space):
    with pytest.raises(UserError, match=r"test:Env has an observation.*does not map: wrap"):
        mapped(space)


def test_an_image_called_vector_is_refused():
    with pytest.raises(UserError, match="names an image 'vector'"):
        mapped(gs.Dict({"vector": gs.Box(0, 255, (4, 4), np.uint8)}))


def test_discrete_actions_are_shifted_to_their_start():
    m = mapped(action=gs.Discrete(3, start=-1))
    assert m.action == Discrete(3)
    assert m.decode(np.array([0, 2], np.int32)).tolist() == [-1, 1]


def test_multidiscrete_actions_take_the_shape_of_their_space():
    m = mapped(action=gs.MultiDiscrete(np.array([[2, 3], [4, 5]])))
    assert m.action == MultiDiscrete((2, 3, 4, 5))
    assert m.decode(np.array([[0, 1, 2, 3]], np.int32)).tolist() == [[[0, 1], [2, 3]]]


def test_multibinary_actions_are_choices_of_two():
    m = mapped(action=gs.MultiBinary(2))
    assert m.action == MultiDiscrete((2, 2))
    x = m.decode(np.array([[0, 1]], np.int32))
    assert x.dtype == np.int8 and gs.MultiBinary(2).contains(x[0])


def test_bounded_actions_are_clipped_and_rescaled():
    box = gs.Box(np.array([0.0, -2.0], np.float32), np.array([10.0, 2.0], np.float32))
    m = mapped(action=box)
    assert m.action == Continuous(2, True)
    x = m.decode(np.array([[-1, -1], [0, 0.5], [1, 1], [7, -7]], np.float32))
    assert x.tolist() == [[0, -2], [5, 1], [10, 2], [10, -2]]
    assert all(box.contains(row) for row in x)


def test_unbounded_entries_pass_through_beside_bounded_ones():
    low = np.array([-2, -np.inf, 1], np.float32)
    high = np.array([2, np.inf, np.inf], np.float32)
    m = mapped(action=gs.Box(low, high))
    assert m.action == Continuous(3, False)
    assert m.decode(np.array([[0.5, 30.0, 0.0]], np.float32)).tolist() == [[1, 30, 1]]


def test_whole_number_actions_are_rounded():
    x = mapped(action=gs.Box(0, 10, (1,), np.int32)).decode(np.array([[0.09]], np.float32))
    assert x.dtype == np.int32 and x.tolist() == [[5]]


def test_box_actions_take_the_shape_of_their_space():
    m = mapped(action=gs.Box(-1, 1, (2, 2), np.float64))
    x = m.decode(np.array([[0.5, -0.5, 1, 0]], np.float32))
    assert m.action == Continuous(4, True)
    assert x.dtype == np.float64 and x.tolist() == [[[0.5, -0.5], [1, 0]]]


def test_other_action_spaces_are_refused():
    with pytest.raises(UserError, match="takes actions of the space Dict"):
        mapped(action=gs.Dict({"x": TWO}))


def test_the_same_rules_hold_for_one_jax_environment():
    space = gs.Dict({"a": gs.Discrete(2), "b": gs.Box(-1, 1, (2,))})
    m = mapped(space, gs.Box(0, 10, (1,)), xp=jnp, batched=False)
    encode, decode = jax.jit(m.encode), jax.jit(m.decode)
    assert encode({"a": jnp.int32(1), "b": jnp.array([3.0, 4.0])}).tolist() == [0, 1, 3, 4]
    assert decode(jnp.array([0.5])).tolist() == [7.5]
