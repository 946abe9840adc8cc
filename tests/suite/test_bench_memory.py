"""megamoe bench: the inputs of its calls, and the memory that they have or share."""

import dataclasses
from typing import Any

import pytest
import torch
from bench_cases import reference_implementation, small_case

from megamoe.suite import measurement, timing
from megamoe.suite.buffers import BufferSpec, allocate
from megamoe.suite.operation import Call
from megamoe.suite.rotation import Rotation


def test_long_cases_draw_rows_from_generated_ones() -> None:
    tokens = measurement.GENERATED_TOKENS + 300
    inputs = measurement.draw_inputs(small_case(tokens, hidden=128), 0)
    hidden = inputs["hidden_states"]
    assert hidden.shape == (tokens, 128)
    assert inputs["topk_ids"].shape == inputs["topk_weights"].shape == (tokens, 8)
    made = {row.tobytes() for row in hidden[: measurement.GENERATED_TOKENS].view(torch.int16).numpy()}
    assert len(made) == measurement.GENERATED_TOKENS
    drawn = [row.tobytes() for row in hidden[measurement.GENERATED_TOKENS :].view(torch.int16).numpy()]
    assert set(drawn) <= made
    assert len(set(drawn)) > 200, "rows come in random order, so a misplaced row shows"


def test_rotating_sets_do_not_share_memory() -> None:
    case = small_case(eplb="record")
    call = case.operation.call(case.params, case.inputs())
    sets = Rotation("cpu").keywords(call, 3)
    for name in ("hidden_states", "x"):
        assert len({one[name].untyped_storage().data_ptr() for one in sets}) == 3
        assert len({one[name].stride() for one in sets}) == 1
    assert len({one["eplb_state"].expert_load_view.data_ptr() for one in sets}) == 3
    strides = {one["eplb_state"].logical_to_physical_map.stride() for one in sets}
    assert strides == {call.arguments["logical_to_physical_map"].stride()}


def test_cases_timed_together_share_what_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of one seed and outputs are the same memory; other values or types are not."""
    timed: dict[str, list[dict[str, Any]]] = {}

    def measure(candidates: dict[str, list[Any]], *_: object) -> dict[str, timing.Timing]:
        timed.update({name: [call.keywords for call in calls] for name, calls in candidates.items()})
        return {name: timing.Timing(1.0, 1, 1, "graph") for name in candidates}

    monkeypatch.setattr(timing, "measure", measure)
    tokens = measurement.GENERATED_TOKENS + 3
    settings: list[dict[str, Any]] = [{}, {"eplb": "record"}, {"values": "position"}, {"ids": "i64"}]
    cases = [small_case(tokens, hidden=128, **one) for one in settings]
    measurement.measure_cases(cases, [reference_implementation()], "cpu", 2)
    plain, mapped, other, wide = (timed[f"{i}{measurement.MARK}reference"] for i in range(4))
    for name in (
        "hidden_states",
        "topk_ids",
        "topk_weights",
        "x",
        "x_sf",
        "topk_idx_out",
        "topk_weights_out",
    ):
        for index in range(2):
            assert plain[index][name] is mapped[index][name]
        assert plain[0][name] is not plain[1][name]
        assert (plain[0][name] is wide[0][name]) == (name != "topk_ids")
    assert plain[0]["hidden_states"] is not other[0]["hidden_states"]
    assert plain[0]["x"] is other[0]["x"]


def first_tensor() -> torch.Tensor:
    """[4, 4] zeros at the start of 32."""
    return torch.zeros(32, dtype=torch.bfloat16)[:16].view(4, 4)


def other_tensors() -> dict[str, torch.Tensor]:
    """Tensors that differ from the first one in one thing."""
    negative = first_tensor()
    negative[1, 2] = -0.0
    return {
        "strides": first_tensor().T,
        "shape": first_tensor()[:2],
        "dtype": torch.zeros(32, dtype=torch.float16)[:16].view(4, 4),
        "offset": torch.zeros(32, dtype=torch.bfloat16)[16:].view(4, 4),
        "storage": torch.zeros(4, 4, dtype=torch.bfloat16),
        "one bit": negative,
    }


@pytest.mark.parametrize("difference", other_tensors())
def test_what_differs_is_not_the_same_memory(difference: str) -> None:
    first, other = first_tensor(), other_tensors()[difference]
    rotation = Rotation("cpu")
    given = (first, other, first_tensor())
    found = [rotation.keywords(Call({"x": one, "n": 3}), 2)[1] for one in given]
    assert found[0]["x"] is found[2]["x"]
    assert found[0]["x"] is not found[1]["x"]
    assert found[0]["x"].untyped_storage().data_ptr() != found[1]["x"].untyped_storage().data_ptr()
    for one, expected in zip(found, given, strict=True):
        assert one["n"] == 3
        assert (one["x"].dtype, one["x"].stride()) == (expected.dtype, expected.stride())
        assert torch.equal(one["x"].contiguous().view(torch.int16), expected.contiguous().view(torch.int16))


def test_tensors_of_one_call_never_share_memory() -> None:
    """Neither equal outputs, nor equal inputs, nor an input of the bytes that an output of its name holds."""
    spec = BufferSpec((4, 4), torch.float32)
    buffers = {"one": spec, "two": spec, "three": spec}
    held = allocate(spec, 0, "cpu").view
    call = Call(
        {"three": held, "four": held.clone()}, buffers, bind=lambda given, made: {"in": given, "out": made}
    )
    for keywords in Rotation("cpu").keywords(call, 2):
        tensors = [*keywords["in"].values(), *keywords["out"].values()]
        assert len({one.untyped_storage().data_ptr() for one in tensors}) == 5


def test_memory_that_a_call_wrote_to_is_the_same_for_the_next_case() -> None:
    rotation, call = Rotation("cpu"), Call({"x": torch.zeros(3)})
    first = rotation.keywords(call, 2)
    first[0]["x"].fill_(7)
    again = rotation.keywords(call, 3)
    assert [one["x"] is other["x"] for one, other in zip(first, again, strict=False)] == [True, True]
    assert len({one["x"].data_ptr() for one in again}) == 3


def test_each_case_rotates_over_its_own_number_of_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter((2, 5, 3))
    made: list[int] = []

    def measure(candidates: dict[str, list[object]], *_: object) -> dict[str, timing.Timing]:
        made.extend(len(calls) for name, calls in candidates.items() if measurement.MARK in name)
        return {name: timing.Timing(1.0, 1, 1, "graph") for name in candidates}

    monkeypatch.setattr(timing, "rotation_count", lambda *_: next(counts))
    monkeypatch.setattr(timing, "measure", measure)
    cases = [small_case(), small_case(eplb="record"), small_case(dtype="fp32")]
    found = measurement.measure_cases(cases, [reference_implementation()], "cpu", 2)
    assert made == [one.sets for one in found] == [2, 5, 3]
    assert {one.seed for one in found} == {cases[0].seed}


@pytest.mark.parametrize("kind", ["dense", "rows", "columns", "step"])
def test_long_cases_keep_their_strides_and_their_tail(kind: str) -> None:
    more = 300
    case = small_case(measurement.GENERATED_TOKENS + more, hidden=128, strides=kind, padding="tail")
    made = dataclasses.replace(case, params=case.params | {"tokens": measurement.GENERATED_TOKENS})
    inputs = measurement.draw_inputs(case, case.seed)
    for name, one in measurement.draw_inputs(made, case.seed).items():
        expected = tuple(stride + more if stride > len(one) else stride for stride in one.stride())
        assert inputs[name].stride() == (expected if kind == "columns" else one.stride()), name
    padding = inputs["is_padding"].int()
    assert torch.equal(padding, padding.sort().values)
    assert 0.3 < padding.float().mean() < 0.37
    dense = measurement.draw_inputs(
        dataclasses.replace(case, params=case.params | {"strides": "dense"}), case.seed
    )
    for name, one in dense.items():
        assert torch.equal(inputs[name].contiguous().view(torch.uint8), one.contiguous().view(torch.uint8)), (
            name
        )
