"""WarpClocks of warps: examples worked out by hand, and the timeline of a run."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

import gemmery as gm
from gemmery.cuda.pipes import USABLE, clocks_of, pipes_of
from gemmery.errors import DeviceError, EmulationError
from gemmery_emulator.kernels.prediction import (
    IN_STEP,
    MANY,
    MEETS,
    SHOWN,
    LaunchShape,
    predict_launch,
    predicted_longer,
)
from gemmery_emulator.pace import Paced
from gemmery_emulator.pace.clocks import Arrives, Awaits, BulkCopies, PathRates, StepRuns, WarpClocks
from gemmery_emulator.pace.demand import KINDS, PLACE, WarpDemand
from gemmery_emulator.pace.profile import TURN, held_back, part_of, parted

LATENCIES = {"bulk": 100.0, "bulk_store": 40.0, "wgmma": 5.0, "begin": 7.0, "l2": 200.0, "fma": 4.0, "l1": 30.0}
RATES = PathRates(LATENCIES, frozenset({0}), 1, 1, 1.0, 1.0)  # unit 0 is a quarter's own, unit 1 that of bytes


def part(*demands):
    return part_of(tuple(enumerate(demands)), {**LATENCIES, "none": 0.0}, {})


PLAIN = WarpDemand((), (), (), "none")


def runs(clocks, demands=(PLAIN,), tensor=0.0, commits=(), follows=False):
    return StepRuns(part(*demands), ((0, clocks),), (), tensor, False, commits, follows)


def clocks(*events, each=0, rounds=1, apart=False):
    return WarpClocks(events, each or len(events), RATES, 2, apart, rounds=rounds, spans=True).run()


def waited(simulated):
    return {(span.warp, span.begin, span.end) for span in simulated.spans if "wait" in span.what}


def test_a_producer_and_a_consumer_meet_at_mbarriers():
    """Two stages of 50 bytes, used three times.

    The copies leave L2 at 50 and 100, and land at 150 and 200. The consumer multiplies from 150 to 180 and hands the
    first stage back at 190; the third copy leaves L2 at 240 and lands at 340. The second stage is multiplied from 200
    to 230, the third from 340 to 370.
    """
    full = [("phase", 0, 8 * stage, turn) for stage, turn in ((0, 0), (1, 0), (0, 1))]
    empty = ("phase", 0, 16, 0)
    copies = [BulkCopies((key,), 50.0, 0) for key in full]
    producer = [*copies[:2], Awaits(empty, "waits", 1), copies[2]]
    consumer = []
    for stage, key in enumerate(full):
        consumer += [Awaits(key, "waits", 2), runs(30.0)]
        if stage == 0:
            consumer.append(Arrives(empty, 10.0))
    simulated = clocks(producer, consumer)
    assert simulated.rounds == (370.0,)
    assert waited(simulated) == {(0, 0.0, 190.0), (1, 0.0, 150.0), (1, 180.0, 200.0), (1, 230.0, 340.0)}
    assert simulated.waits == {1: 190 / 2, 2: (150 + 20 + 110) / 2}


def test_warps_of_a_quarter_take_turns_and_others_do_not():
    """Warps 0 and 4 have one scheduler, the others one each."""
    assert clocks(*[[runs(10.0)]] * 4).rounds == (10.0,)
    assert clocks(*[[runs(10.0)]] * 5).rounds == (20.0,)
    assert clocks(*[[runs(10.0)]] * 5, each=1, apart=True).rounds == (10.0,)


def test_a_part_of_few_clocks_does_not_wait_for_all_that_others_have_asked_for():
    """Warp 4 asks the scheduler of warp 0 for 2 clocks, thrice, and gets them in turn: of each 2 others get 2."""
    simulated = clocks([runs(100.0)], [runs(1.0)], [runs(1.0)], [runs(1.0)], [runs(2.0)] * 3, each=1)
    assert [span.end for span in simulated.spans if span.warp == 4] == [4.0, 8.0, 12.0]
    assert simulated.rounds == (100.0,)


def test_a_barrier_waits_for_its_last_warp():
    key = ("barrier", 0, 0, 0)
    warps = [[runs(clock), Arrives(key, 20.0), Awaits(key, "waits", 3), runs(5.0)] for clock in (10.0, 40.0)]
    simulated = clocks(*warps)
    assert simulated.rounds == (65.0,)
    assert waited(simulated) == {(0, 10.0, 60.0), (1, 40.0, 60.0)}


def test_registers_are_waited_for_where_they_are_read():
    """A load of 30 clocks, then one part that does not need it and one that does."""
    load = WarpDemand((), (), ("a",), "l1")
    use, other = WarpDemand((), ("a",), ("b",), "fma"), WarpDemand((), (), ("c",), "none")
    assert clocks([runs(1.0, [load]), runs(10.0, [other])]).rounds == (30.0,)  # until the result is there
    simulated = clocks([runs(1.0, [load]), runs(10.0, [other]), runs(1.0, [use]), runs(1.0, [other], follows=True)])
    assert simulated.rounds == (34.0,)
    assert clocks([runs(1.0, [load, use])]).rounds == (34.0,)


def test_products_go_on_until_their_group_is_awaited():
    wait = WarpDemand((), (), (), "none", 0, "wgmma_wait")
    one = [runs(1.0, tensor=100.0, commits=("wgmma",)), runs(20.0), runs(1.0, [wait]), runs(1.0)]
    assert clocks(one).rounds == (105 + 1 + 1.0,)
    later = WarpDemand((), (), (), "none", 1, "wgmma_wait")  # one group may stay under way
    two = [runs(1.0, tensor=100.0, commits=("wgmma",))] * 2 + [runs(1.0, [later]), runs(7.0)]
    assert [span.end for span in clocks(two).spans if "wait" in span.what] == [105.0]


def test_the_next_block_begins_when_one_ends():
    assert clocks([runs(10.0)], [runs(30.0)], each=1, rounds=3).rounds == (30.0, 67.0, 104.0)


def test_what_never_arrives_ends_all_the_same():
    assert clocks([Awaits(("phase", 0, 0, 0), "waits", 0), runs(1.0)]).rounds == (1.0,)


def test_parts_end_where_a_warp_may_wait_and_after_a_turn():
    wait, plain = WarpDemand((), (), (), "none", 0, "copy_wait"), WarpDemand((), (), (), "none")
    numbered = list(enumerate([plain, wait, plain, plain, plain]))
    assert [len(part) for part, _ in parted(numbered, lambda _: 0.0)] == [1, 4]
    assert [len(part) for part, _ in parted(numbered, lambda _: TURN / 2)] == [1, 2, 2]


def test_loads_through_a_pointer_that_is_kept_twice_follow_the_use_before_them():
    """Of a kernel with few registers: a second load waits for the sum before it, unless only one pointer is kept."""
    load = [WarpDemand((), (at,), (value,), "global") for at, value in (("p", "x"), ("q", "y"))]
    add = [WarpDemand((), ("s", value), ("s",), "fma") for value in ("x", "y")]
    step = [WarpDemand((), ("p", "d"), (to,), "integer") for to in ("q", "end")]
    twice = list(enumerate([load[0], add[0], step[0], load[1], add[1], step[1]]))
    assert [(len(part), follows) for part, follows in parted(twice, lambda _: 0.0, True)] == [(3, False), (3, True)]
    assert [(len(part), follows) for part, follows in parted(twice, lambda _: 0.0)] == [(6, False)]
    assert [len(part) for part, _ in parted(twice[:5], lambda _: 0.0, True)] == [5]
    assert held_back(twice) == {3}
    assert held_back(list(enumerate([load[0], step[0], load[1], add[0], add[1], step[1]]))) == frozenset()


def test_of_values_that_are_converted_two_pairs_are_under_way():
    block = []
    for turn in range(4):
        for side in "pq":
            block += [
                WarpDemand((), (f"{side}{turn}",), (f"x{side}",), "global"),
                WarpDemand((), (f"x{side}",), (f"f{side}",), "integer"),
                WarpDemand((), (f"{side}{turn}",), (f"{side}{turn + 1}",), "integer"),
                WarpDemand((), (f"{side}{turn}",), (f"end{side}",), "integer"),
            ]
        block.append(WarpDemand((), ("s", "fp", "fq"), ("s",), "fma"))
    assert held_back(list(enumerate(block))) == {18}  # the first load of the third pair; each takes nine instructions


def test_what_is_brought_to_l2_before_the_launch_ahead_ends_is_waited_for_less():
    code = """__global__ void f(float* x, const float* y) {
  int i = blockIdx.x * 256 + threadIdx.x;
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  BEFORE
  asm volatile("griddepcontrol.wait;" ::: "memory");
  x[i] = 2 * y[i];
}"""
    bring = 'asm volatile("prefetch.global.L2 [%0];" ::"l"(y + i));'
    x, y = (np.zeros(132 * 256, np.float32) for _ in range(2))
    runs = [gm.emulate(code.replace("BEFORE", each), "f", 132, 256, [x, y], check=False) for each in (bring, "")]
    ahead, later = (run.predict("h200") for run in runs)
    latencies = pipes_of("h200")[1].latencies
    shorter = (later.terms["waits"] - ahead.terms["waits"]) * 1.98e9
    assert abs(shorter - (latencies.memory - latencies.l2)) <= 60  # clocks of the prefetch itself


CLUSTER = """__global__ void __cluster_dims__(2) f(unsigned* x, int n) {
  __shared__ alignas(8) unsigned long long bar;
  __shared__ unsigned s[128];
  unsigned rank, there, at = threadIdx.x, own = __cvta_generic_to_shared(&bar), to = __cvta_generic_to_shared(s + at);
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(own), "r"(rank ^ OTHER));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(to), "r"(rank ^ 1));
  if (at == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(own) : "memory");
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
  for (int i = 0; i < n; ++i) asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(to), "r"(i) : "memory");
  if (at == 0) asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(there) : "memory");
  asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], 0; "
               "@!p bra again; }" :: "r"(own) : "memory");
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
  x[blockIdx.x * 128 + at] = s[at];
}"""


def of_cluster(other, stores):
    code = CLUSTER.replace("OTHER", str(other))
    return gm.emulate(code, "f", 2, 128, [np.zeros(256, np.uint32), stores], check=False)


def test_stores_to_another_block_take_the_way_between_multiprocessors():
    one, last = (of_cluster(1, count).predict("h200").terms["cluster"] for count in (1, 65))
    _, pipes = pipes_of("h200")
    assert (last - one) * 1.98e9 == pytest.approx(64 * 128 * 4 / pipes.remote)


def test_arrivals_at_another_block_are_seen_later():
    near, far = (of_cluster(other, 1).timeline("h200").clocks for other in (0, 1))
    latencies = pipes_of("h200")[1].latencies
    assert far - near == pytest.approx(latencies.remote - latencies.mbarrier)


def test_cards_with_16_lanes_of_loads_take_two_clocks_for_a_warp():
    of = {card: clocks_of(*pipes_of(card))["access"] for card in ("h200", "a100", "v100", "rtx4090", "a6000", "t4")}
    assert of == {"h200": 1, "a100": 1, "v100": 1, "rtx4090": 2, "a6000": 2, "t4": 2}


def test_a_multiprocessor_stores_no_faster_while_others_are_idle():
    device, pipes = pipes_of("h200")
    assert clocks_of(device, pipes, 1)["stored"] == clocks_of(device, pipes)["stored"]
    assert clocks_of(device, pipes, 1)["l2"] < clocks_of(device, pipes)["l2"]


def test_the_clock_falls_less_while_multiprocessors_are_idle():
    """Blocks that only multiply on tensor cores: on all multiprocessors, and on half of them."""
    device, pipes = pipes_of("h200")
    amounts = np.zeros((1, len(KINDS)))
    amounts[0, PLACE["tensor"]] = 1e9
    busy = 1e9 * clocks_of(device, pipes)["tensor"]
    paced = Paced(amounts, np.zeros(1), (busy,), busy, 1, 0.0, 0.0, 0, False)
    took = [
        predict_launch(device, pipes, LaunchShape(blocks, 128, 1), [paced]) for blocks in (device.sms, device.sms // 2)
    ]
    whole, half = ((each.seconds - each.terms["launch"]) / each.terms["tensor"] - 1 for each in took)
    assert whole == pytest.approx(pipes.heat * pipes.tensor)
    assert half == pytest.approx(whole / 2)


def test_a_block_alone_shows_a_share_of_what_is_shorter():
    """L1 takes 3000 clocks and issue 2000: the warps of one block meet at barriers, unless something comes between."""
    device, pipes = pipes_of("h200")

    def shown(threads=256, running=1, barriers=1.0, **kinds):
        amounts = np.zeros((1, len(KINDS)))
        for kind, amount in {"barrier": barriers, "wavefronts": 3000.0, "issue": 8000.0, **kinds}.items():
            amounts[0, PLACE[kind]] = amount * running
        paced = Paced(amounts, np.zeros(1), (5000.0 * running,), 5000.0 * running, running, 0.0, 0.0, 0, False)
        shape = LaunchShape(running * device.sms, threads, running)
        took = [predict_launch(device, pipes, replace(shape, copies=copies), [paced]) for copies in (False, True)]
        return (took[0].seconds - took[1].seconds) * device.clock * 1e9

    assert shown() == pytest.approx(SHOWN * 2000)
    assert shown(issue=20000.0) == pytest.approx(SHOWN * 3000)
    assert shown(threads=32 * (IN_STEP + 1)) == shown(running=2) == shown(barriers=0.0) == 0
    assert shown(tensor=1e8) == 0  # products take longest


def test_a_longer_launch_follows_from_two_runs():
    """Memory takes as long for all three lengths, and hides more of the shorter ones: their times would not do."""
    code = """__global__ void f(float* x, int n) {
  float sum = 0;
  for (int i = 0; i < n; ++i) sum = fmaf(sum, sum, 1.0f);
  x[blockIdx.x * 256 + threadIdx.x] = sum;
}"""
    x = np.zeros(1 << 20, np.float32)
    runs = [gm.emulate(code, "f", 1 << 12, 256, [x, n], check=False) for n in (8, 16, 4096)]
    longer = predicted_longer(runs[0], runs[1], "h200", 4088 / 8, float(x.nbytes))
    whole, short = runs[2].predict("h200").seconds, [run.predict("h200").seconds for run in runs[:2]]
    assert longer.seconds == pytest.approx(whole, rel=0.02)
    assert short[0] + (short[1] - short[0]) * 4088 / 8 < 0.95 * whole


def asking(clocks=0.0, *, loaded=0.0, **kinds):
    """A block that asks for amounts of some kinds, and takes so many clocks."""
    amounts = np.zeros((1, len(KINDS)))
    for kind, amount in kinds.items():
        amounts[0, PLACE[kind]] = amount
    return Paced(amounts, np.zeros(1), (clocks,), clocks, 1, loaded, 0.0, 0, False)


def test_blocks_that_meet_at_barriers_take_no_less_than_a_share_of_both():
    """L1 takes 3000 clocks, tensor cores 2000, issue 1000: what the clocks show beyond that stays."""
    device, pipes = pipes_of("h200")
    tensor = 2000 / clocks_of(device, pipes)["tensor"]
    of = {"wavefronts": 3000.0, "issue": 4000.0, "tensor": tensor}

    def busy(clocks=0.0, *, barrier=1.0, copies=False, warps=MANY, **kinds):
        shape = LaunchShape(device.sms, 32 * warps, 1, copies=copies)
        taken = predict_launch(device, pipes, shape, [asking(clocks, barrier=barrier, **{**of, **kinds})])
        return (taken.terms["L1 lines"] + taken.terms["waits"]) * device.clock * 1e9

    assert busy() == busy(copies=True) == pytest.approx(3000 + SHOWN * 2000)
    assert busy(tensor=0.0) == pytest.approx(3000 + SHOWN * 1000)
    assert busy(tensor=0.0, warps=2 * MANY) == pytest.approx(3000 + SHOWN * 1000 / 2**0.5)
    assert busy(tensor=0.0, integer=5000.0) == pytest.approx(3000 + SHOWN * 2500)
    assert busy(tensor=0.0, copies=True) == busy(barrier=0.0) == pytest.approx(3000)
    assert busy(5000.0) == pytest.approx(5000)


def test_memory_and_multiprocessors_wait_for_each_other():
    device, pipes = pipes_of("h200")
    second = device.clock * 1e9  # clocks
    loaded = device.bandwidth * 1e9 * USABLE / device.sms
    shape = LaunchShape(device.sms, 32, 1)
    for share in (0.0, 0.5, 1.0):
        taken = predict_launch(device, pipes, shape, [replace(asking(share * second, loaded=loaded), turns=99)])
        assert taken.terms["memory"] == pytest.approx(1)
        assert taken.seconds == pytest.approx((1 + share**MEETS) ** (1 / MEETS) + taken.terms["launch"])


def test_what_launches_before_have_written_comes_from_l2():
    device, pipes = pipes_of("h200")
    memory = {
        hot: predict_launch(device, pipes, LaunchShape(132, 32, 1, hot=hot), [asking(loaded=1e6)]).terms["memory"]
        for hot in (False, True)
    }
    assert memory[False] > 0 == memory[True]


def test_loads_of_less_than_a_word_take_half_a_pass_more():
    loop = "int s = 0; for (int k = 0; k < n; ++k) s += x[k * 32 + threadIdx.x];"
    code = f"__global__ void f(TYPE* x, int n) {{ {loop} x[0] = s; }}"
    lines = {}
    for kind, dtype in (("short", np.int16), ("int", np.int32)):
        run = gm.emulate(code.replace("TYPE", kind), "f", 1, 32, [np.zeros(1 << 12, dtype), 64], check=False)
        lines[kind] = run.predict("h200").terms["L1 lines"]
    assert 1.2 <= lines["short"] / lines["int"] <= 1.25  # 1.48 passes and 1 / 0.84


def test_loads_wait_where_registers_are_used_up():
    """Pairs of loads, each with its addresses and its sum: eight registers hold four pairs of f32, and two of f64."""

    def pairs(kind):
        block = []
        for pair in range(4):
            names = [f"%{kind}{2 * pair + side}" for side in range(2)]
            for name in names:
                block.append(WarpDemand((), ("p", "d"), (f"to{name}",), "integer"))
                block.append(WarpDemand((), (f"to{name}",), (name,), "global"))
            block.append(WarpDemand((), ("s", *names), ("s",), "fma"))
        return list(enumerate(block))

    assert held_back(pairs("f")) == frozenset()
    assert held_back(pairs("fd")) == {11}  # the first load of the third pair
    fixed = [(index, each) for index, each in pairs("fd") if each.latency != "integer"]
    assert held_back(fixed) == frozenset()  # at fixed distances from pointers


def test_a_warp_goes_on_while_its_copies_come():
    """The copy leaves L2 at 50 and lands at 250 from there; a load of as many bytes holds the warp until 50."""
    wait = WarpDemand((), (), (), "none", 0, "copy_wait")
    copy = part_of(((0, PLAIN),), {**LATENCIES, "none": 0.0}, {0: "l2"})
    copies = StepRuns(copy, ((0, 1.0),), ((1, 50.0),), 0.0, True, ("copy",), False)
    simulated = clocks([copies, runs(7.0), runs(1.0, [wait])])
    assert waited(simulated) == {(0, 8.0, 250.0)}
    assert simulated.rounds == (251.0,)
    loads = StepRuns(part(PLAIN), ((0, 1.0),), ((1, 50.0),), 0.0, False, (), False)
    assert clocks([loads, runs(7.0)]).rounds == (57.0,)


COPY = "__global__ void f(float* x, const float* y) { x[blockIdx.x * 256 + threadIdx.x] = y[threadIdx.x]; }"
ROLES = (
    "__global__ void f(float* x, const float* y, int n) { __shared__ float s[128]; int t = threadIdx.x;"
    "for (int k = 0; k < n; ++k) { if (t < 32) for (int i = t; i < 128; i += 32) s[i] = y[i + 128 * k];"
    "__syncthreads(); if (t >= 32) x[t] += s[t]; __syncthreads(); } }"
)


def test_a_trace_is_json_whose_times_are_those_of_the_prediction():
    arrays = [np.zeros(128, np.float32), np.zeros(1024, np.float32), 8]
    run = gm.emulate(ROLES, "f", 1, 128, arrays)
    with pytest.raises(DeviceError, match="card 3 is not known: times are predicted for h200"):
        run.predict(3)
    timeline, seconds = run.timeline("h200"), run.predict("h200")
    events = json.loads(timeline.trace())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert spans
    assert all(event["dur"] > 0 and event["ts"] >= 0 for event in spans)
    assert {event["tid"] for event in spans} == {0, 1, 2, 3}
    last = max(event["ts"] + event["dur"] for event in spans)
    took = timeline.clocks / timeline.clock * 1e-3
    assert last <= took * (1 + 1e-9)
    terms = seconds.terms
    l1 = max(time for name, time in terms.items() if name.startswith("L1"))
    took += SHOWN * min(l1, terms["issue"]) * 1e6  # of a block alone, whose warps hide less than their clocks show
    assert terms["launch"] * 1e6 + took == pytest.approx(seconds.seconds * 1e6, abs=terms["memory"] * 1e6)
    for row in timeline.rows().values():
        assert all(before.end <= after.begin for before, after in pairwise(row))
    assert sum(timeline.totals().values()) <= 4 * timeline.clocks * (1 + 1e-9)
    waits = {span.warp: 0.0 for span in timeline.spans}
    for span in timeline.spans:
        waits[span.warp] += (span.end - span.begin) * (span.what == "waits at a barrier")
    assert waits[3] > waits[0]  # the others wait while the first warp loads


def test_the_time_is_at_least_that_of_every_unit():
    rng = np.random.default_rng(3)
    for _ in range(6):
        loads, sums, threads = (int(each) for each in rng.integers(1, 40, 3))
        code = (
            f"__global__ void f(float* x, const float* y) {{ float a = 0; int t = threadIdx.x; "
            f"for (int k = 0; k < {loads}; ++k) {{ float v = y[t + k * 33]; "
            f"for (int j = 0; j < {sums}; ++j) v = fmaf(v, v, a); a += v; }} x[blockIdx.x * blockDim.x + t] = a; }}"
        )
        block = 32 * (1 + threads % 8)
        arrays = [np.zeros(600 * block, np.float32), np.zeros(4096, np.float32)]
        prediction = gm.emulate(code, "f", 600, block, arrays, check=False).predict("h200")
        units = {name: each for name, each in prediction.terms.items() if name not in ("waits", "launch", "memory")}
        assert prediction.seconds >= max(units.values()) + prediction.terms["launch"]


def test_a_timeline_is_drawn_and_refused_as_a_prediction_is():
    from gemmery_emulator.pages.pictures.timeline import MOST_WARPS, warps_picture

    run = gm.emulate(COPY, "f", 2000, 256, [np.zeros(2000 * 256, np.float32), np.zeros(256, np.float32)], check=False)
    timeline = run.timeline("a100")
    plot = warps_picture(timeline)
    assert f"{len(timeline.rows()) - MOST_WARPS} more warps are not drawn" in plot.caption
    assert plot.svg.count("clocks</title>") >= MOST_WARPS
    assert timeline.card == "a100"
    assert timeline.clock == pipes_of("a100")[0].clock
    alone = gm.emulate(COPY, "f", 1, 256, [np.zeros(256, np.float32), np.zeros(256, np.float32)])
    object.__setattr__(alone, "rerun", None)
    with pytest.raises(EmulationError, match="cannot run again"):
        alone.timeline("h200")


TRANSPOSE = """
__global__ void transpose(float* to, const float* from, int n) {
  __shared__ float tile[32][WIDTH];
  int x = blockIdx.x * 32 + threadIdx.x, y = blockIdx.y * 32 + threadIdx.y;
  for (int j = 0; j < 32; j += 8) tile[threadIdx.y + j][threadIdx.x] = from[(y + j) * n + x];
  __syncthreads();
  x = blockIdx.y * 32 + threadIdx.x;
  y = blockIdx.x * 32 + threadIdx.y;
  for (int j = 0; j < 32; j += 8) to[(y + j) * n + x] = tile[threadIdx.x][threadIdx.y + j];
}"""


def test_kernels_that_memory_bounds_do_not_tie():
    """What is hidden behind memory is not, in the first turn: bank conflicts cost a little."""
    n, times = 512, []
    for width in ("32", "33"):
        arrays = [np.zeros(n * n, np.float32), np.zeros(n * n, np.float32), n]
        run = gm.emulate(
            TRANSPOSE.replace("WIDTH", width), "transpose", (n // 32, n // 32), (32, 8), arrays, check=False
        )
        times.append(run.predict("rtx4090"))
    conflicts, padded = times
    assert conflicts.terms["memory"] == padded.terms["memory"]
    assert conflicts.seconds > padded.seconds * 1.001
