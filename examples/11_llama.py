"""A Llama-shaped model of random weights: tokens a second with PyTorch's linear layers and with gemmery's.

    python examples/11_llama.py                                                   # a tiny one, anywhere
    python examples/11_llama.py --size 8b --store benchmarks/results              # needs a GPU

It needs transformers (pip install transformers), and downloads nothing. "prefill" reads a prompt at once, "decode"
makes one token after the other. "eager" calls the model, "graph" replays a CUDA graph of it, "compiled" is
torch.compile of the whole model without a graph break, "layers" of each decoder layer by itself, which takes less time
to compile; on a GPU both are replayed as a CUDA graph too. `--join` makes q, k and v one product, and gate and up, in
all models. All have the same weights and take turns; `--store` appends the records to the file of this machine.
"""

import argparse
import copy
import dataclasses
import functools
import itertools
from pathlib import Path

try:
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM, StaticCache
    from transformers.masking_utils import sdpa_mask
except ImportError as error:
    raise SystemExit(f"{error.name} is not installed: pip install torch transformers") from None

from rich.console import Console

import gemmery.torch
from gemmery import tiers
from gemmery_lab.measure import record, timing
from gemmery_lab.report import terminal

SIZES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256},
}  # fmt: skip
MODES = ("eager", "graph", "compiled", "layers")
JOINED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
SAME = {
    torch.bfloat16: 0.2,
    torch.float32: 1e-4,
}  # of the logits' length: 32 layers that round elsewhere, not a wrong layer
TORCH = "torch"


def attention(module, query, key, value, attention_mask, scaling, **_):
    """Attention whose heads with the same keys and values are rows of one product: no copy of those for each head.

    Of transformers' own, "sdpa" makes that copy wherever there is a mask, as with a cache of fixed length.
    """
    texts, heads, tokens, width = query.shape
    rows = query.reshape(texts, key.shape[1], -1, width)
    scores = (rows @ key.mT).float().view(texts, heads, tokens, -1) * scaling
    weights = scores.masked_fill(~attention_mask, float("-inf")).softmax(-1).to(value.dtype)
    result = weights.view(texts, key.shape[1], -1, key.shape[2]) @ value
    return result.view(texts, heads, tokens, width).transpose(1, 2).contiguous(), None


def whole_mask(*args, **options):
    """The mask of keys that a token may see, also where `is_causal` would say as much."""
    return sdpa_mask(*args, **{**options, "allow_is_causal_skip": False})


AttentionInterface.register("by_groups", attention)
AttentionMaskInterface.register("by_groups", whole_mask)


class Runner:
    """A model with its cache, and the steps that are timed; each writes the next token into `token`."""

    def __init__(self, model, options):
        self.model, self.options = model, options
        self.prompt = torch.arange(options.batch * options.prompt, device=options.device).reshape(options.batch, -1)
        self.prompt %= model.config.vocab_size
        self.token = self.prompt[:, -1:].clone()
        self.logits = None
        self.cache = StaticCache(config=model.config, max_cache_len=options.prompt + options.tokens)
        self.call(model, self.prompt)  # allocates the cache

    def call(self, model, tokens):
        """One call of the model, whose keys and values go into the cache behind those of earlier calls."""
        self.logits = model(tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        self.token.copy_(self.logits.argmax(-1, keepdim=True))

    def begin(self, phase):
        """Forget what follows the first tokens: all of them, or the prompt."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(0 if phase == "prefill" else self.options.prompt)
        self.token.copy_(self.prompt[:, -1:])

    def run(self, phase, step, steps):
        self.begin(phase)
        for _ in range(steps):
            step()
        if self.options.device == "cuda":
            torch.cuda.synchronize()

    def logits_of(self, phase, step):
        self.run(phase, step, 1)
        return self.logits.double()

    def step(self, phase, mode):
        """What one step of this phase runs in this mode."""
        model = torch.compile(self.model, fullgraph=True, dynamic=False) if mode == "compiled" else self.model
        for layer in self.model.model.layers:
            if mode == "layers":
                layer.compile(fullgraph=True, dynamic=False)
            else:
                layer._compiled_call_impl = None
        step = functools.partial(self.call, model, self.prompt if phase == "prefill" else self.token)
        if self.options.device != "cuda" or mode == "eager":
            return step
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(4):  # kernels and libraries choose and load what the graph will hold
                self.begin(phase)
                step()
        torch.cuda.current_stream().wait_stream(side)
        tiers.wait()
        self.begin(phase)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return lambda step=step: graph.replay()  # the graph reads memory that the step owns


def parse():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--bits", nargs="+", choices=("none", "8", "4"), default=("none", "8", "4"))
    parser.add_argument("--phases", nargs="+", choices=("prefill", "decode"), default=("prefill", "decode"))
    parser.add_argument("--modes", nargs="+", choices=MODES, help="default: eager, and on a GPU the others too")
    parser.add_argument("--batch", nargs="+", type=int, default=[1], help="texts at a time, each number in turn")
    parser.add_argument("--prompt", type=int, default=128, help="tokens that prefill reads")
    parser.add_argument("--tokens", type=int, default=16, help="tokens that decode makes")
    parser.add_argument("--attention", choices=("by_groups", "sdpa"), default="by_groups", help="of all models")
    parser.add_argument("--join", action="store_true", help="products of the same tokens as one, in all models")
    parser.add_argument("--group", type=int, default=128, help="columns of a quantized weight with one factor")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each phase and mode, shared by the models")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--store", type=Path, help="a folder for the records")
    options = parser.parse_args()
    options.modes = options.modes or (MODES[:3] if options.device == "cuda" else MODES[:1])
    if options.device == "cpu" and "graph" in options.modes:
        parser.error("mode graph needs --device cuda: the CPU has no CUDA graphs")
    return options


def build(options):
    """The models by name: PyTorch's, and copies that share its parameters, with gemmery's layers."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES[options.size], max_position_embeddings=options.prompt + options.tokens)
    config._attn_implementation = options.attention
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    torch.set_default_dtype(dtype)
    with torch.device(options.device):
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
    torch.set_default_dtype(torch.float32)
    if options.join:
        gemmery.torch.join_linear(model, *JOINED)
    models = {TORCH: model}
    for bits in options.bits:
        shared = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
        report = gemmery.torch.replace_linear(shared, None if bits == "none" else int(bits), options.group)
        print(report)
        models["gemmery" if bits == "none" else f"gemmery, {bits} bits"] = shared
    return models


def apart(x, y):
    """How far x is from y, as a part of the length of y."""
    return float((x - y).norm() / y.norm())


def linear_cost(model, rows, batch):
    """Operations and bytes of weights of linear layers in a step; logits are for the last token of each text."""
    operations = size = 0
    for name, layer in model.named_modules():
        if hasattr(layer, "in_features"):
            count = batch if name == "lm_head" else rows
            operations += 2 * count * layer.in_features * layer.out_features
            size += sum(x.nbytes for x in (*layer.parameters(), *layer.buffers()))
    return operations, size


def main():
    options = parse()
    torch._dynamo.config.recompile_limit = 1024  # all models, layers and phases share the code of one class
    torch._dynamo.config.accumulated_recompile_limit = 4096
    models = build(options)
    machine = record.gpu_machine() if options.device == "cuda" else record.cpu_machine()
    run = record.Run(machine, record.now(), ())
    for batch in options.batch:
        options = argparse.Namespace(**{**vars(options), "batch": batch})
        runners = {name: Runner(model, options) for name, model in models.items()}
        for mode, phase in itertools.product(options.modes, options.phases):
            print(f"timing {phase}, {mode}, batch {batch} ...", flush=True)
            rows = tuple(measured(runners, phase, mode, options))
            run = dataclasses.replace(run, measurements=run.measurements + rows)
            if options.store:
                record.append(record.path(options.store, machine.name), dataclasses.replace(run, measurements=rows))
    terminal.show(run, (), Console())


def measured(runners, phase, mode, options):
    """The records of one phase in one mode, for which the models take turns."""
    steps = 1 if phase == "prefill" else options.tokens

    eager = {name: runner.logits_of(phase, runner.step(phase, "eager")) for name, runner in runners.items()}

    def contestant(name, runner):
        step = runner.step(phase, mode)
        difference = apart(runner.logits_of(phase, step), eager[name])
        if not difference <= SAME[runner.model.dtype]:
            raise SystemExit(f"{name}, {phase}, {mode}: the logits differ from eager ones by {difference:.2g}")
        runner.run(phase, step, steps)
        return timing.Contestant(name, timing.calls(functools.partial(runner.run, phase, step, steps)))

    contestants = [contestant(name, runner) for name, runner in runners.items()]
    tiers.wait()
    results = timing.compare(contestants, options.seconds)
    for name, runner in runners.items():
        config, tokens = runner.model.config, options.batch * (options.prompt if phase == "prefill" else 1)
        operations, size = linear_cost(runner.model, tokens, options.batch)
        dtype = {torch.bfloat16: "bf16", torch.float32: "f32"}[runner.model.dtype]
        each, versus = results.timings[name], {} if name == TORCH else {TORCH: results.ratios(name)[TORCH]}
        note = f"logits {apart(eager[name], eager[TORCH]):.2g} from PyTorch's"
        yield record.Measurement(
            f"llama_{options.size}", name, tokens, config.hidden_size, config.hidden_size, dtype, dtype, 1,
            0 if options.device == "cuda" else torch.get_num_threads(),
            each.seconds / steps, each.best / steps, each.p95 / steps, each.samples, operations, size,
            case=f"{phase}, {mode}{', joined' if options.join else ''}, batch {options.batch}",
            config={"layers": config.num_hidden_layers, "intermediate": config.intermediate_size,
                    "vocabulary": config.vocab_size, "batch": options.batch, "prompt": options.prompt,
                    "tokens": options.tokens},
            versus={rival: ratio.median for rival, ratio in versus.items()},
            spread={rival: ratio.spread for rival, ratio in versus.items()},
            note=f"PyTorch {torch.__version__}, attention {options.attention}" if name == TORCH else note,
        )  # fmt: skip


if __name__ == "__main__":
    with torch.no_grad():
        main()
