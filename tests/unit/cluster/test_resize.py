"""Who may have another shape, and what is told of what became of it."""

import asyncio

import pytest

from cluster.errors import ResizeError
from cluster.resize import ResizeDesk
from cluster.shape import Shape
from configs import load
from scheduler.messages import EngineInfo, EngineState
from tests.support.hosted_engine import runs

ONE, THREE = Shape(1, 1), Shape(3, 1)
READY = EngineInfo(EngineState.READY)


async def asked(desk: ResizeDesk, shape: Shape, info: EngineInfo = READY) -> None:
    with desk.taken(shape, info):
        await desk.carry_out(shape)


async def wanted(desk: ResizeDesk, shape: Shape) -> "asyncio.Task[None]":
    """Somebody asks for `shape`, and the engine has noticed."""
    asking = asyncio.create_task(asked(desk, shape))
    async with asyncio.timeout(1):
        assert await desk.until_wanted() == shape
    return asking


@runs
async def test_who_wants_a_shape_is_told_when_it_stands() -> None:
    desk = ResizeDesk()
    asking = await wanted(desk, THREE)
    assert desk.wanted == THREE
    assert not asking.done()
    desk.stands(THREE)
    await asking
    assert desk.wanted is None


@runs
async def test_a_group_of_the_old_shape_that_formed_meanwhile_is_no_answer() -> None:
    desk = ResizeDesk()
    asking = await wanted(desk, THREE)
    desk.stands(ONE)
    assert desk.wanted == THREE
    desk.stands(THREE)
    await asking


@runs
async def test_a_failure_is_told_with_its_reason_when_the_old_shape_stands_again() -> None:
    desk = ResizeDesk()
    asking = await wanted(desk, THREE)
    desk.failed("the memory holds 1 block")
    assert desk.wanted is None, "it is not tried again"
    await asyncio.sleep(0)
    assert not asking.done()
    desk.stands(ONE)
    with pytest.raises(ResizeError) as caught:
        await asking
    assert str(caught.value) == (
        "TP 3 x PP 1 did not come up: the memory holds 1 block. TP 1 x PP 1 was restored"
    )
    # And the next one begins afresh.
    asking = await wanted(desk, THREE)
    desk.stands(THREE)
    await asking


@runs
async def test_an_engine_that_ends_meanwhile() -> None:
    desk = ResizeDesk()
    asking = await wanted(desk, THREE)
    desk.close("palimpsest stop")
    with pytest.raises(ResizeError, match="the engine ended: palimpsest stop"):
        await asking
    desk = ResizeDesk()
    asking = await wanted(desk, THREE)
    desk.failed("no GPU")
    desk.close("given up after 5 deaths")
    with pytest.raises(ResizeError, match=r"did not come up: no GPU; and then .* 5 deaths"):
        await asking


@runs
async def test_an_engine_that_ends_while_the_shape_is_being_checked() -> None:
    desk = ResizeDesk()
    with desk.taken(THREE, READY):
        desk.close("no GPU")
        with pytest.raises(ResizeError, match="the engine ended: no GPU"):
            await asyncio.wait_for(desk.carry_out(THREE), 1)


@runs
async def test_one_at_a_time() -> None:
    desk = ResizeDesk()
    with (
        desk.taken(THREE, READY),
        pytest.raises(ResizeError, match="a resize to TP 3 x PP 1 is under way"),
    ):
        await asked(desk, ONE)
    asking = await wanted(desk, ONE)
    desk.failed("no")  # still under way, until the old shape stands
    with pytest.raises(ResizeError, match="under way"):
        await asked(desk, THREE)
    desk.stands(THREE)
    with pytest.raises(ResizeError, match="did not come up"):
        await asking


@pytest.mark.parametrize("state", list(EngineState))
def test_what_state_an_engine_must_be_in(state: EngineState) -> None:
    """One that waits for a machine may get a smaller shape; one that ends gets none."""
    desk = ResizeDesk()
    info = EngineInfo(state, "palimpsest drain")
    if state in (EngineState.READY, EngineState.RECOVERING):
        with desk.taken(THREE, info):
            pass
        return
    words = rf"the engine is {state} \(palimpsest drain\), and only one that is ready"
    with pytest.raises(ResizeError, match=words), desk.taken(THREE, info):
        pass
    with desk.taken(THREE, READY):
        pass  # who was refused does not have the desk


def test_a_shape_and_what_follows_from_it() -> None:
    config = load(overrides=["parallel.cpus_per_rank=2"], environ={}).config
    assert Shape.of(config.parallel) == ONE
    applied = Shape(3, 2).applied(config)
    assert str(Shape.of(applied.parallel)) == "TP 3 x PP 2"
    assert applied.parallel.cpus_per_rank == 2
    assert applied.cache == config.cache
