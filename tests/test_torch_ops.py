"""The operators: registered as torch wants them, the library's own bits, whole under compile."""

import json
import math
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import RecompileError, TorchRuntimeError
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.testing._internal.optests import OpCheckError

import splitkv
from dense_attention import Problem, problem, stored, where
from histories import same_bits
from splitkv.backends import operator_call, registry, torch_ops
from splitkv.backends.cuda import InterpretedCudaBackend
from test_imports import fresh_interpreter

OPS = torch.ops.splitkv
PAGE_OF_DOCS = Path(__file__).resolve().parent.parent / "docs" / "torch_compile.md"
Call = tuple[Tensor, Tensor, Tensor, dict[str, Any]]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def call(layout: str = "NHD", given: Problem | None = None) -> Call:
    """q, k, v and the keywords of an operator."""
    given = problem(lengths=(70, 1, 0, 33)) if given is None else given
    k, v = stored(given, layout, (0.0, 0.0))
    return given.q, k, v, where(given, layout) | given.options


def random(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def eager(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The library's own answer."""
    options.pop("num_queries", None)
    out, lse = splitkv.decode_attention(q, k, v, return_lse=True, **options)
    return out, lse


def one_query(layout: str) -> Call:
    q, k, v, options = call(layout)
    return q[:, 0], k, v, options


def masked() -> Call:
    """Several queries, every mask and tensor, and sinks."""
    given = problem(
        lengths=(70, 3, 0, 33),
        queries=3,
        sliding_window=20,
        anchor_tokens=4,
        logits_soft_cap=15.0,
        sm_scale=0.3,
        attn_bias=random(4, 1, 3, 9),
        attn_mask=random(4, 3, 12) > -1,
        alibi_slopes=random(4, 6).abs(),
        sinks=random(6),
        num_splits=2,
    )
    return call("HND", given)


def packed_queries() -> Call:
    q, k, v, options = call("packed", problem(queries=2, lengths=(70, 5)).to(torch.float16))
    offsets = torch.tensor([0, 2, 3])
    return q.flatten(0, 1)[:3], k, v, options | {"cu_seqlens_q": offsets, "num_queries": 2}


def quantised() -> Call:
    q, k, v, options = call("BNSD", problem(dims=(32, 16)).to(torch.bfloat16))
    codes = [(x * 20).to(torch.int8) for x in (k, v)]
    return q, *codes, options | {"k_scale": torch.full((5, 2), 0.05), "v_scale": torch.ones(())}


def without_lengths() -> Call:
    q, k, v, options = call("BSND", problem(dims=(32, 16)).to(torch.float64))
    return q, k, v, {"layout": options["layout"], "split_size": 64}


def no_request() -> Call:
    q, k, v, options = one_query("NHD")
    few = {name: options[name][:0] for name in ("seq_lens", "block_table")}
    return q[:0], k, v, options | few


CALLS: dict[str, Callable[[], Call]] = {
    "NHD": lambda: one_query("NHD"),
    "packed": lambda: one_query("packed"),
    "HND, masked": masked,
    "packed queries": packed_queries,
    "BNSD, quantised": quantised,
    "BSND, float64, no lengths": without_lengths,
    "no request": no_request,
}


@pytest.mark.parametrize("name", CALLS)
def test_operators_are_registered_as_torch_wants_them(name: str) -> None:
    q, k, v, options = CALLS[name]()
    want = eager(q, k, v, **options)
    assert same_bits(torch_ops.decode_attention(q, k, v, **options), want)
    opcheck(OPS.decode_attention.default, (q, k, v), options)

    out, lse = (torch.empty_like(x) for x in want)
    opcheck(OPS.decode_attention_out.default, (q, k, v, out, lse), options)
    options.pop("sinks", None)
    opcheck(OPS.partial_attention.default, (q, k, v), options)
    state = torch_ops.partial_attention(q, k, v, **options)
    options.pop("num_queries", None)
    want_state = splitkv.partial_attention(q, k, v, **options)
    assert same_bits(parts(state), parts(want_state))


def parts(state: splitkv.PartialState) -> tuple[Tensor, Tensor, Tensor]:
    return state.max, state.lse, state.out


@pytest.mark.parametrize("count", [0, 1, 3])
def test_merging_hands_back_memory_of_its_own(count: int) -> None:
    rows, out = random(count, 4, 2), random(count, 2, 4, 8).transpose(1, 2)  # not contiguous
    opcheck(OPS.merge_states.default, (rows, rows.clone(), out))
    state = splitkv.PartialState(rows, rows.clone(), out)
    merged = torch_ops.merge_states(state)
    assert same_bits(parts(merged), parts(splitkv.merge_states(state)))
    if count:
        assert same_bits(
            parts(torch_ops.merge_states([state[n] for n in range(count)])), parts(merged)
        )


@pytest.mark.parametrize("layout", ["NHD", "BNSD", "packed"])
def test_appending_writes_where_the_library_writes(layout: str) -> None:
    _, k, v, options = call(layout, problem(lengths=(70, 1, 33)))
    new = random(3, 2, 32), random(3, 2, 32, seed=6)
    opcheck(OPS.append_kv.default, (k.clone(), v.clone(), *new), options)
    written, wanted = ((k.clone(), v.clone()) for _ in range(2))
    torch_ops.append_kv(operator_call.cache_of(*written, options), *new)
    splitkv.append_kv(operator_call.cache_of(*wanted, options), *new)
    assert same_bits(written, wanted)
    assert not torch.equal(written[0], k)


@pytest.mark.parametrize("splits", [{}, {"num_splits": 3}])
def test_the_cuda_kernels_keep_what_the_fake_kernels_say(
    monkeypatch: pytest.MonkeyPatch, splits: dict[str, int]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("triton runs on the GPU here, not in its interpreter")
    monkeypatch.setattr(registry, "BACKENDS", (InterpretedCudaBackend(),))
    q, k, v, options = call("HND", problem(lengths=(70, 0), dims=(16, 32)))
    options |= splits | {"backend": "cuda"}
    tests = ("test_schema", "test_faketensor")
    opcheck(OPS.decode_attention.default, (q, k, v), options, test_utils=tests)
    opcheck(OPS.partial_attention.default, (q, k, v), options, test_utils=tests)
    out, lse = torch.zeros(2, 1, 6, 64)[..., ::2], torch.zeros(2, 1, 6)
    torch_ops.decode_attention(q, k, v, out=out, lse=lse, **options)
    assert same_bits((out, lse), eager(q, k, v, **options))


# What a wrong registration looks like, and that it is found.


def lies_about_dtype(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = torch_ops._fake_decode(q, k, v, **options)
    return out, lse.to(torch.float16)


def lies_about_shape(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = torch_ops._fake_decode(q, k, v, **options)
    return out[..., :-1].contiguous(), lse


def lies_about_strides(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = torch_ops._fake_decode(q, k, v, **options)
    return out.transpose(0, 2).contiguous().transpose(0, 2), lse


def writes_into_q(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    q += 1
    return torch_ops._decode(q, k, v, **options)


def hands_back_its_input(max: Tensor, lse: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return parts(splitkv.merge_states(splitkv.PartialState(max, lse, out)))


@pytest.mark.parametrize(
    ("index", "kernel", "fake"),
    [
        (0, torch_ops._decode, torch_ops._fake_decode),
        (0, torch_ops._decode, lies_about_dtype),
        (0, torch_ops._decode, lies_about_shape),
        (0, torch_ops._decode, lies_about_strides),
        (0, writes_into_q, torch_ops._fake_decode),
        (3, hands_back_its_input, torch_ops._fake_merge),
    ],
)
def test_a_wrong_registration_is_caught(
    index: int, kernel: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    library = torch.library.Library("splitkv_mutant", "FRAGMENT")
    name = library.define(torch_ops.SCHEMAS[index])
    library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"splitkv_mutant::{name}", fake, lib=library)
    operator = getattr(torch.ops.splitkv_mutant, name).default
    q, k, v, options = call()
    state = random(1, 4, 2), random(1, 4, 2), random(1, 4, 2, 8)
    arguments = (state, {}) if index else ((q, k, v), options)
    if kernel is torch_ops._decode and fake is torch_ops._fake_decode:
        opcheck(operator, *arguments)
    else:
        with pytest.raises(OpCheckError):
            opcheck(operator, *arguments)


# Compiled.


def layer(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = torch_ops.decode_attention(q * 2, k, v, **options)
    return out + 1, lse


def assert_layer(got: tuple[Tensor, Tensor], given: Call) -> None:
    q, k, v, options = given
    out, lse = eager(q * 2, k, v, **options)
    assert same_bits(got, (out + 1, lse))


@pytest.mark.parametrize(
    ("name", "backend"),
    [("HND, masked", "aot_eager"), ("NHD", "eager"), ("packed queries", "aot_eager")],
)
def test_static_shapes_compile_whole(name: str, backend: str) -> None:
    q, k, v, options = CALLS[name]()
    compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend=backend)
    assert_layer(compiled(q, k, v, **options), (q, k, v, options))


# torch takes sizes that are equal in the first call for one: B is no other size there.
GROWING = ((100, 9, 4, 20, 1), (70, 9, 4, 20, 1, 17, 3), (300, 9, 4), (33, 1, 4, 20, 65, 17, 3))


def calls_of_a_server(layout: str) -> Iterator[Call]:
    """Other B, lengths, pages, columns, and other splits."""
    for splits, lengths in enumerate(GROWING, 2):
        q, k, v, options = call(layout, problem(lengths=lengths, heads=(8, 2)))
        yield q[:, 0], k, v, options | {"num_splits": splits}


@pytest.mark.parametrize("layout", ["NHD", "packed", "BNSD"])
def test_another_batch_or_length_compiles_nothing_anew(layout: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for q, k, v, options in calls_of_a_server(layout):
        assert_layer(compiled(q, k, v, **options), (q, k, v, options))
    assert counter.frame_count == 1


def test_the_count_of_compilations_counts() -> None:
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend=counter)
    with torch._dynamo.config.patch(error_on_recompile=True):
        (q, k, v, options), (q2, k2, v2, options2) = list(calls_of_a_server("NHD"))[:2]
        compiled(q, k, v, **options)
        with pytest.raises(RecompileError):
            compiled(q2, k2, v2, **options2)


def test_a_whole_step_is_one_graph() -> None:
    def step(q: Tensor, kv: Tensor, new: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        cache = splitkv.PagedCache(kv[0], kv[1], table, lengths, splitkv.Layout.NHD)
        torch_ops.append_kv(cache, new[0], new[1])
        options = {"layout": "NHD", "block_table": table, "seq_lens": lengths}
        near = torch_ops.partial_attention(q, kv[0], kv[1], window_left=7, **options)
        far = torch_ops.partial_attention(q + 1, kv[0], kv[1], **options)
        return splitkv.finish(torch_ops.merge_states([near, far]), dtype=q.dtype)[0]

    q, k, v, options = one_query("NHD")
    new, rest = random(2, 4, 2, 32), (options["block_table"], options["seq_lens"])
    memory, wanted = torch.stack([k, v]), torch.stack([k, v])
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    got = compiled(q, memory, new, *rest)

    pages = splitkv.PagedCache(wanted[0], wanted[1], *rest)
    splitkv.append_kv(pages, new[0], new[1])
    keys = wanted[0], wanted[1]
    near = splitkv.partial_attention(q, *keys, window_left=7, **options)
    far = splitkv.partial_attention(q + 1, *keys, **options)
    want = splitkv.finish(splitkv.merge_states([near, far]), dtype=q.dtype)[0]
    assert same_bits((got, memory), (want, wanted))
    assert not torch.equal(memory[0], k)


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
def test_given_tensors_are_written_whatever_their_strides(backend: str | None) -> None:
    q, k, v, options = call()

    def write(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        views = out[..., ::2], lse[..., 1]
        returned = torch_ops.decode_attention(q, k, v, out=views[0], lse=views[1], **options)
        assert returned[0] is views[0]
        assert returned[1] is views[1]
        return out * 1

    run = write
    if backend is not None:
        run = torch.compile(write, fullgraph=True, dynamic=True, backend=backend)
    out, lse = torch.full((4, 1, 6, 64), 7.0), torch.full((4, 1, 6, 2), 7.0)
    copy = run(out, lse, q, k, v, **options)
    assert same_bits((out[..., ::2], lse[..., 1]), eager(q, k, v, **options))
    assert torch.equal(copy, out)
    assert (out[..., 1::2] == 7).all()
    assert (lse[..., 0] == 7).all()


def test_the_writing_operators_return_nothing() -> None:
    q, k, v, options = call()
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[:-1])
    assert OPS.decode_attention_out.default(q, k, v, out, lse, **options) is None
    new = random(4, 2, 32)
    assert OPS.append_kv.default(k, v, new, new, **options) is None


@pytest.mark.slow
def test_inductor_writes_into_the_given_memory_without_a_copy() -> None:
    from torch._inductor.utils import run_and_get_code

    q, k, v, options = call("NHD", problem(lengths=(70, 9, 33)))
    table, lengths = options["block_table"], options["seq_lens"]

    def step(kv: Tensor, new: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> Tensor:
        cache = splitkv.PagedCache(kv[0], kv[1], table, lengths, splitkv.Layout.NHD)
        torch_ops.append_kv(cache, new, new)
        torch_ops.decode_attention(q, kv[0], kv[1], out=out, lse=lse, **options)
        return out * 2

    memory, new, lse = torch.stack([k, v]), random(3, 2, 32), q.new_zeros(q.shape[:-1])
    out = torch.zeros_like(q)
    _, code = run_and_get_code(torch.compile(step, fullgraph=True), memory, new, q, out, lse)
    assert torch.equal(out, eager(q, memory[0], memory[1], **options)[0])
    body = code[0][code[0].index("def call(") :]
    assert body.count("= empty_strided_cpu(") == 1  # that of out * 2


# Plans: made once per spec and lengths.


def test_calls_with_equal_lengths_share_a_plan_and_others_do_not() -> None:
    q, k, v, options = one_query("NHD")
    operator_call._plan.cache_clear()
    for layer_index in range(3):
        torch_ops.decode_attention(q + layer_index, k, v, **options)
    assert operator_call._plan.cache_info()[:2] == (2, 1)
    options["seq_lens"] -= (options["seq_lens"] > 20).int() * 19  # the same tensor
    got = torch_ops.decode_attention(q, k, v, **options)
    assert same_bits(got, eager(q, k, v, **options))
    assert operator_call._plan.cache_info()[:2] == (2, 2)
    torch_ops.decode_attention(q, k, v, num_splits=2, **options)
    torch_ops.decode_attention(q, k, v, sliding_window=9, **options)
    assert operator_call._plan.cache_info()[:2] == (2, 4)


# Refusals: the same words, run or traced.


def other(**changes: Any) -> Callable[[Call], Call]:
    def change(given: Call) -> Call:
        q, k, v, options = given
        tensors = {"q": q, "k": k, "v": v}
        made = {
            name: value(tensors.get(name, options.get(name))) if callable(value) else value
            for name, value in changes.items()
        }
        tensors |= {name: made.pop(name) for name in "qkv" if name in made}
        return tensors["q"], tensors["k"], tensors["v"], options | made

    return change


REFUSALS: dict[str, Callable[[Call], Call]] = {
    "q must be [4, 1, 6, 32] for this cache and spec, got [3, 1, 6, 32]": other(q=lambda q: q[:3]),
    "num_q_heads 5 is not divisible by num_kv_heads 2": other(q=lambda q: q[:, :, :5]),
    "k has head dim 32, spec says 31": other(q=lambda q: q[..., 1:]),
    "k and v must agree in all but the last dimension": other(v=lambda v: v[1:]),
    "seq_lens has 3 requests, block_table has 4": other(seq_lens=lambda x: x[:3]),
    "seq_lens must be int32 or int64, got torch.float32": other(seq_lens=lambda x: x.float()),
    "a paged cache needs seq_lens [B]": other(seq_lens=None),
    "(it is never guessed), got None": other(layout=None),
    "a paged cache needs layout 'NHD' or 'HND' (it is never guessed), got 'BSND'": other(
        layout="BSND"
    ),
    "unknown layout 'XYZ', known": other(layout="XYZ"),
    "a cache is found one way, got block_table and cu_seqlens_k": other(
        cu_seqlens_k=torch.tensor([0, 1])
    ),
    "attn_mask must be bool": other(attn_mask=torch.ones(4, 1, 3)),
    "sinks must be [6], got [5]": other(sinks=torch.ones(5)),
    "num_queries, the most queries of one request": other(num_queries=2),
    "k_scale needs a quantised cache": other(k_scale=torch.ones(1)),
    "sliding_window must be a positive integer, got 0": other(sliding_window=0),
}


@pytest.mark.parametrize("words", REFUSALS)
def test_run_and_traced_refuse_in_the_same_words(words: str) -> None:
    q, k, v, options = REFUSALS[words](call())
    match = re.escape(words)
    with pytest.raises(ValueError, match=match) as run:
        torch_ops.decode_attention(q, k, v, **options)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v)]
        options = {
            name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in options.items()
        }
        with pytest.raises(ValueError, match=match) as traced:
            torch_ops.decode_attention(*fakes, **options)
    assert str(run.value) == str(traced.value)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_call_whose_plan_was_shared_is_checked_for_its_own_values(bad: float) -> None:
    q, k, v, options = one_query("NHD")
    codes = k.to(torch.int8), v.to(torch.int8)
    scale = torch.ones(1)
    torch_ops.decode_attention(q, *codes, k_scale=scale, v_scale=scale, **options)
    with pytest.raises(ValueError, match="k_scale must be finite"):
        torch_ops.decode_attention(q, *codes, k_scale=scale * bad, v_scale=scale, **options)
    # a page id may be anything as long as the mask hides its tokens
    options["block_table"][3, 1] = -1
    pages = options["seq_lens"].max().item()
    hides, shows = torch.zeros(4, 1, pages).bool(), torch.ones(4, 1, pages).bool()
    torch_ops.decode_attention(q, k, v, attn_mask=hides, **options)
    with pytest.raises(ValueError, match=r"block_table\[3, 1\] is -1"):
        torch_ops.decode_attention(q, k, v, attn_mask=shows, **options)


def test_destinations_must_fit() -> None:
    q, k, v, options = call()
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[:-1])
    with pytest.raises(ValueError, match="out and lse are written together"):
        torch_ops.decode_attention(q, k, v, out=out, **options)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for bad, words in (
            ((out[:3], lse), r"out must be \[4, 1, 6, 32\]"),
            ((out, lse.double()), "lse must be .* torch.float32"),
            ((out.to("meta"), lse), "on cpu, got .* on meta"),
        ):
            with pytest.raises(ValueError, match=words):
                torch_ops.decode_attention(q, k, v, out=bad[0], lse=bad[1], **options)


def test_tensors_of_two_devices_are_refused_while_tracing() -> None:
    q, k, v, options = call()
    with FakeTensorMode(allow_non_fake_inputs=True):
        on_gpu = [torch.empty(x.shape, device="cuda") for x in (q, k, v)]
        words = "block_table must be on cuda:0 like q, got cpu"
        with pytest.raises(ValueError, match=words):
            torch_ops.decode_attention(*on_gpu, **options)
        options["block_table"] = torch.empty(4, 5, dtype=torch.int32, device="cuda")
        out, _ = torch_ops.decode_attention(*on_gpu, **options)  # lengths may live on the host
        assert out.device.type == "cuda"
        words = "v must be on cuda:0 like k_cache, got cpu"
        with pytest.raises(ValueError, match=words):
            OPS.append_kv.default(*on_gpu[1:], on_gpu[0], q, **options)


def test_gradients_are_refused_run_or_traced() -> None:
    q, k, v, options = call()
    words = "q requires grad, decode attention is for inference only"
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.enable_grad():
        q.requires_grad_()
        with pytest.raises(ValueError, match=words):
            torch_ops.decode_attention(q, k, v, **options)
        with pytest.raises(TorchRuntimeError, match=words):
            compiled(q, k, v, **options)
        rows = random(2, 3).requires_grad_()
        state = splitkv.PartialState(rows, rows, random(2, 3, 4))
        words = "max requires grad, the operator is for inference only"
        with pytest.raises(ValueError, match=words):
            torch_ops.merge_states(state)
        with pytest.raises(TorchRuntimeError, match=words):
            torch.compile(torch_ops.merge_states, fullgraph=True, backend="aot_eager")(state)
    assert not torch_ops.decode_attention(q, k, v, **options)[0].requires_grad


def test_states_that_do_not_fit_are_not_merged() -> None:
    with pytest.raises(ValueError, match="at least one state"):
        torch_ops.merge_states([])
    states = [splitkv.PartialState.empty((2, heads), 4) for heads in (3, 5)]
    with pytest.raises(ValueError, match="states to merge must agree"):
        torch_ops.merge_states(states)


def test_values_are_checked_when_a_compiled_graph_runs() -> None:
    q, k, v, options = call()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    compiled(q, k, v, **options)
    options["block_table"][0, 0] = 99
    with pytest.raises(ValueError, match=r"block_table\[0, 0\] is 99"):
        compiled(q, k, v, **options)


# The module and its page.


def test_registration_waits_for_the_import_and_bears_another() -> None:
    code = """
import importlib, json, torch, splitkv
splitkv.decode_attention
before = "decode_attention" in dir(torch.ops.splitkv) or hasattr(torch.ops.splitkv, "merge_states")
from splitkv.backends import torch_ops
importlib.reload(torch_ops)
import splitkv.backends.torch_ops
rows = torch.zeros(2, 3)
merged = torch_ops.merge_states(splitkv.PartialState(rows, rows, torch.zeros(2, 3, 4)))
print(json.dumps([before, list(merged.lse.shape)]))
"""
    assert json.loads(fresh_interpreter(code)) == [False, [3]]


def test_the_pages_example_runs_and_names_every_operator(tmp_path: Path) -> None:
    text = PAGE_OF_DOCS.read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    path = tmp_path / "snippet.py"
    path.write_text(snippet)
    names = runpy.run_path(str(path))
    cache = names["cache"]
    assert cache.k.any()  # the new tokens were written
    options = {"block_table": cache.block_table, "seq_lens": cache.seq_lens, "sliding_window": 64}
    want = splitkv.decode_attention(names["q"], cache.k, cache.v, layout="NHD", **options)
    assert torch.equal(names["out"], want.flatten(1))
    named = set(re.findall(r"\| `splitkv::(\w+)`", text))
    assert named == {schema.partition("(")[0] for schema in torch_ops.SCHEMAS}
