"""The step channel to runners in other processes and to Ray's actors: kills are noticed."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from actors.runners.step_channel import RunnersLost, SocketExecutor, serve_steps
from actors.wire.transport import connect
from tests.support.engine.executor_group import HOSTS, Runner, expected, failing, image_of, plan_of, processes, same


@HOSTS
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_plans_reach_other_processes_and_a_kill_is_noticed(host, num_ranks):
    with processes(num_ranks, host) as (executor, ranks):
        images = [image_of(i, 3 << 20) for i in range(6)]
        plans = [plan_of(i, 1 + 50 * i, 1000 * i, images[i // 2 : i + 1]) for i in range(6)]
        executor.submit(plans[0])
        for before, plan in pairwise(plans):
            executor.submit(plan)
            assert same(executor.collect(), expected(before))
        assert same(executor.collect(), expected(plans[-1]))

        victim = min(1, num_ranks - 1)  # one of four passes plans on to another, which must not count as the one
        executor.submit(failing(6, -1))
        time.sleep(0.1)
        ranks[victim].kill()
        with pytest.raises(RunnersLost, match=f"Rank {victim} is gone") as error:
            executor.collect()
        assert error.value.rank == victim


@HOSTS
def test_a_death_between_steps_is_noticed_by_the_next_one(host):
    with processes(2, host) as (executor, ranks):
        executor.submit(plan_of(0))
        executor.collect()
        ranks[1].kill()
        ranks[1].join()
        with pytest.raises(RunnersLost) as error:  # noqa: PT012  (TCP takes the plan and then says that nobody is there)
            executor.submit(failing(1, -1))
            executor.collect()
        assert error.value.rank == 1


@HOSTS
def test_runners_end_with_their_engine(host):
    with processes(2, host) as (executor, ranks):
        executor.close()
        for process in ranks:
            process.join(60)
            assert process.exitcode == 0


# ---- Ray ----------------------------------------------------------------------------------------------------------


def actors(num_ranks: int):
    import ray

    @ray.remote(num_cpus=0, max_restarts=0, max_concurrency=4)
    class Actor:
        def __init__(self, rank):
            self.runner = Runner(rank)

        def attach(self, address):
            arguments = connect(address), self.runner, self.runner.rank
            threading.Thread(target=serve_steps, args=arguments, daemon=True).start()

    return [Actor.remote(rank) for rank in range(num_ranks)]


@pytest.fixture
def group_of_actors(ray_session):
    import ray

    here = sys.modules[__name__]
    ray.cloudpickle.register_pickle_by_value(here)  # the actors cannot import the tests
    group = actors(2)
    yield group
    for actor in group:
        ray.kill(actor)
    ray.cloudpickle.unregister_pickle_by_value(here)


class TestActors:
    @pytest.fixture
    def executor(self, group_of_actors):
        executor = SocketExecutor(2)
        for rank, actor in enumerate(group_of_actors):
            actor.attach.remote(executor.address(rank))
        executor.accept(90)  # on cores that another server has busy, a process takes long to start
        yield executor
        executor.close()

    def test_depth_2_keeps_the_order(self, executor):
        executor.submit(plan_of(0))
        for step in range(1, 20):
            executor.submit(plan_of(step, num_ids=step))
            assert same(executor.collect(), expected(plan_of(step - 1, num_ids=step - 1)))
        executor.collect()

    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_failing_step_is_one_sentence(self, executor, rank):
        executor.submit(failing(0, rank))
        executor.submit(plan_of(1))
        with pytest.raises(RunnersLost) as error:
            executor.collect()
        assert str(error.value) == f"The runner of rank {rank} failed: ValueError: step 0 is bad."
        assert error.value.rank == rank

    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_killed_actor_is_noticed_mid_step(self, executor, rank, group_of_actors):
        import ray

        executor.submit(plan_of(0))
        executor.collect()
        executor.submit(failing(1, -1))
        time.sleep(0.2)
        ray.kill(group_of_actors[rank])
        with pytest.raises(RunnersLost, match=f"Rank {rank} is gone") as error:
            executor.collect()
        assert error.value.rank == rank

    def test_close_wakes_collect(self, executor):
        executor.submit(failing(0, -1))
        with ThreadPoolExecutor(1) as pool:
            blocked = pool.submit(executor.collect)
            time.sleep(0.2)
            assert not blocked.done()
            executor.close()
            with pytest.raises(RunnersLost, match="closed"):
                blocked.result(1)
