"""The predicted time of a launch of anyone's kernel on a card."""

from __future__ import annotations

from dataclasses import replace

from gemmery.cuda.device import WARP
from gemmery.cuda.pipes import pipes_of
from gemmery.emulator.findings.orders import orders
from gemmery.emulator.run import EmulatedRun
from gemmery.errors import EmulationError
from gemmery.lab.sampled_blocks import SampledLaunch
from gemmery.ladder.prediction import Prediction, predict_launch

UNKNOWN = 64  # registers of a thread of a kernel that is PTX


def predicted_run(run: EmulatedRun, card: str) -> Prediction:
    """Predict the time of a run's launch on a card.

    Raises DeviceError for a card whose latencies are not known, CompileError for a kernel that does not compile for it,
    and EmulationError where the blocks of one multiprocessor do not run alone, or use tensor memory.
    """
    device, pipes = pipes_of(card)
    if run.rerun is None:
        raise EmulationError(f"{run.kernel} cannot run again: predict the time of a run of gm.emulate() itself")
    if orders(run.rerun.program.kernel).tensor_memory:
        raise EmulationError(
            f"{run.kernel} uses tensor memory (tcgen05), which {card} does not have: times are not predicted for sm_100"
        )
    registers, static = run.rerun.resources(device.arch)
    arguments = run.rerun.bind()
    launch = replace(run.launch, parameters=arguments.parameters)
    sampled = SampledLaunch(run.rerun.program, launch, registers or UNKNOWN, static + launch.shared)
    shape = sampled.shape(device, float(sum(each.size for each in arguments.memory.allocations)))
    try:
        paced = sampled.sample(device, pipes, arguments.memory, shape)
    except EmulationError as error:
        raise EmulationError(
            f"the time of {run.kernel} cannot be predicted from the blocks of one multiprocessor: {error}"
        ) from None
    prediction = predict_launch(device, pipes, shape, [paced])
    doubts = prediction.doubts
    if not registers:
        doubts += (f"the registers of a thread: the kernel is PTX, and {UNKNOWN} are assumed",)
    if orders(run.rerun.program.kernel).hands_over:
        doubts += ("blocks that wait for each other in global memory",)
    warps = shape.resident * -(-shape.threads // WARP)
    fits = f"{shape.resident} blocks, {warps} warps, on a multiprocessor"
    return replace(prediction, doubts=doubts, fits=f"{registers} registers a thread; {fits}" if registers else fits)
