"""Write a checkpoint's folder again with gemmery's quantized matrices; a small GPTQ checkpoint without arguments.

    python examples/12_convert_a_checkpoint.py Model-AWQ Model-gemmery                       # as it was quantized
    python examples/12_convert_a_checkpoint.py Model Model-int4 --format int4 --group 128    # a plain one

It needs safetensors (pip install safetensors), and reads AWQ, GPTQ, HQQ, compressed-tensors and MXFP4 checkpoints. Each
file becomes one that `gm.load_quantized` reads, with all other tensors as they were; the index has the new names, and
other files are copied. One file is in memory at a time.
"""

import argparse
import json
import shutil
import tempfile
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import numpy as np

try:
    import safetensors
    from safetensors.numpy import save_file
except ImportError:
    raise SystemExit("safetensors is not installed: pip install safetensors") from None

import gemmery as gm
from gemmery.api.checkpoints import READERS
from gemmery.errors import ArgumentError, GemmeryError

ALSO = ("g_idx", "weight_g_idx", "weight_zero_point", "weight_shape")  # tensors that a layer may have besides
INDEX = "model.safetensors.index.json"


def convert(source, target, kind=None, format_=None, group=None):
    """Convert a folder, and return the format of each matrix. Raises ArgumentError for one that is no checkpoint."""
    source, target = Path(source), Path(target)
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise ArgumentError(f"{source} has no safetensors files: pass the folder of a checkpoint")
    text = source / "config.json"
    config = json.loads(text.read_text()).get("quantization_config", {}) if text.exists() else {}
    kind = kind or (None if format_ else config.get("quant_method"))
    if (kind is None) == (format_ is None) or (kind is not None and kind not in READERS):
        raise ArgumentError(
            f"quant_method={kind!r} of {source}: pass --kind, one of {', '.join(READERS)}; or --format for a "
            "checkpoint that is not quantized"
        )
    target.mkdir(parents=True)
    formats, places, total = {}, {}, 0
    with ExitStack() as stack:
        library = "pt" if find_spec("torch") else "np"  # PyTorch has every type of a checkpoint
        opened = {path.name: stack.enter_context(safetensors.safe_open(path, library)) for path in files}
        home = {name: file for file, each in opened.items() for name in sorted(each.keys())}

        def tensor(name):
            return opened[home[name]].get_tensor(name)

        for file, each in opened.items():
            matrices, others = {}, {}
            for name in sorted(each.keys()):
                layer, own = layer_of(name, kind, home)
                if not layer:
                    others[name] = tensor(name)
                    if kind is None and name.endswith("proj.weight") and others[name].ndim == 2:
                        plain = others.pop(name)
                        matrices[name.removesuffix(".weight")] = gm.quantize(plain.T, format_, group)
                elif name == f"{layer}{own[0]}":  # the one that has the codes; the others may be in other files
                    try:
                        matrices[layer[:-1]] = gm.from_checkpoint(kind, {z: tensor(layer + z) for z in own}, config)
                    except GemmeryError as error:
                        raise type(error)(f"{layer[:-1]}: {error}") from error
            gm.save_quantized(target / file, matrices, others)
            with safetensors.safe_open(target / file, "np") as written:
                places.update(dict.fromkeys(written.keys(), file))
            formats.update((name, matrix.format) for name, matrix in matrices.items())
            total += sum(z.nbytes for z in (*matrices.values(), *others.values()))
    for other in source.iterdir():
        if other.is_file() and other not in files and other.name != INDEX:
            shutil.copy2(other, target / other.name)
    if (source / INDEX).exists():
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (target / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return formats


def layer_of(name, kind, home):
    """Return the layer to which a tensor belongs, with its mark, and the layer's tensors; "" where there is none."""
    needed = READERS[kind][1] if kind else ()
    for suffix in (*needed, *(ALSO if needed else ())):
        layer = name.removesuffix(suffix)
        if layer != name and layer[-1:] in (".", "_") and all(layer + each in home for each in needed):
            return layer, (*needed, *(each for each in ALSO if layer + each in home))
    return "", ()


def show():
    """Convert a GPTQ checkpoint of one layer, and multiply by it."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "gptq"), Path(folder, "gemmery")
        source.mkdir()
        (source / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq", "bits": 4}}))
        words = np.random.default_rng(0).integers(-(2**31), 2**31, (16, 64)).astype(np.int32)  # 8 rows of k in a word
        layer = {
            "qweight": words, "qzeros": np.full((1, 8), 0x77777777, np.int32), "scales": np.ones((1, 64), np.float16),
        }  # fmt: skip
        save_file({f"up_proj.{name}": z for name, z in layer.items()}, source / "model.safetensors")
        print(convert(source, target))
        matrix = gm.load_quantized(target / "model.safetensors")["up_proj"]
        x = np.ones((1, 128), np.float16)
        expected = sum(((words >> 4 * i & 15) - 8).sum(0) for i in range(8))
        print("sums of columns are exact:", np.array_equal(gm.matmul(x, matrix)[0], expected))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for place in ("source", "target"):
        parser.add_argument(place, nargs="?")
    parser.add_argument("--kind", choices=READERS)
    parser.add_argument("--format", choices=("int8", "int4", "float8_e4m3", "mxfp4", "nvfp4"))
    parser.add_argument("--group", type=int)
    asked = parser.parse_args()
    if asked.source is None:
        show()
    elif asked.target is None:
        parser.error("pass the folder to write too")
    else:
        for name, format_ in convert(asked.source, asked.target, asked.kind, asked.format, asked.group).items():
            print(f"{name}: {format_}")
