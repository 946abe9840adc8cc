"""Measures rcp.approx, ex2.approx and rsqrt.approx on this GPU, run as a script: measure_functions.py OUT.

Writes OUT/functions.bin.xz: for every table the differences from the correctly rounded value (int8), in the
order of the printed lines, which also give the sha256 of the raw float32 results. Prints how the results for
all other exponents follow from the tables.
"""

from __future__ import annotations

import hashlib
import lzma
import sys
from pathlib import Path

import numpy as np
import torch
from hardware import all_floats, evaluate


def binade(field: int, sign: int = 0) -> torch.Tensor:
    bits = torch.arange(1 << 23, device="cuda", dtype=torch.int32) + (field << 23)
    if sign:
        bits = bits | (-1 << 31)
    return bits.view(torch.float32)


def i32(x):
    return x.view(torch.int32)


def show(name, x, y, want, limit=3):
    bad = i32(y) != i32(want)
    n = int(bad.sum())
    text = " ".join(
        f"{a & 0xFFFFFFFF:08x}->{b & 0xFFFFFFFF:08x}!{c & 0xFFFFFFFF:08x}"
        for a, b, c in zip(
            i32(x)[bad][:limit].tolist(),
            i32(y)[bad][:limit].tolist(),
            i32(want)[bad][:limit].tolist(),
            strict=True,
        )
    )
    return n, f"{name}: {n} of {x.numel()} differ {text}"


def tables(out: Path) -> dict[str, torch.Tensor]:
    exact = {
        "rcp": lambda x: 1.0 / x,
        "rsqrt": lambda x: 1.0 / np.sqrt(x),
        "ex2": np.exp2,
    }
    parts, results = [], {}
    for name, operation, field in (
        ("rcp", "rcp_approx_ftz", 127),
        ("rsqrt", "rsqrt_approx_ftz", 127),
        ("rsqrt", "rsqrt_approx_ftz", 128),
        ("ex2", "ex2_approx_ftz", 127),
        ("ex2", "ex2_approx_ftz", 126),
    ):
        x = binade(field)
        y = evaluate(operation, x)
        results[f"{name}{field}"] = y
        raw = y.cpu().numpy()
        want = exact[name](x.cpu().numpy().astype(np.float64)).astype(np.float32)
        diff = raw.view(np.int32).astype(np.int64) - want.view(np.int32)
        counts = {int(v): int(c) for v, c in zip(*np.unique(diff, return_counts=True), strict=True)}
        print(
            f"TABLE {name} field {field} sha256 {hashlib.sha256(raw.tobytes()).hexdigest()} ulp {counts}",
            flush=True,
        )
        parts.append(diff.clip(-128, 127).astype(np.int8).tobytes())
    data = lzma.compress(b"".join(parts), preset=6)
    (out / "functions.bin.xz").write_bytes(data)
    print("BYTES", len(data), flush=True)
    return results


def power(e):
    """2**e, subnormals included, as float32."""
    e = e.clamp(-160, 127)
    return (
        torch.where(e >= -126, (e + 127 << 23), torch.where(e >= -149, 1 << (e + 149).clamp(min=0), 0))
        .to(torch.int32)
        .view(torch.float32)
    )


def ftz(y):
    return torch.where(y.abs() < 2.0**-126, y * 0.0, y)


def exponents(t: dict[str, torch.Tensor]) -> None:
    """How results outside the tables follow from them, one line for every exponent that does not."""
    for sign in (0, 1):
        good = []
        for field in range(256):
            x = binade(field, sign)
            y = evaluate("rcp_approx_ftz", x)
            want = t["rcp127"] * power(torch.tensor(127 - field, device="cuda")) * (1 - 2 * sign)
            want = ftz(want)
            n, text = show(f"rcp sign {sign} field {field}", x, y, want)
            if n:
                print(text)
            else:
                good.append(field)
        print(f"rcp sign {sign}: scaled table holds for {len(good)} fields, {good[:1]}..{good[-1:]}")
    good = []
    for field in range(256):
        x = binade(field)
        y = evaluate("rsqrt_approx_ftz", x)
        half, odd = divmod(field - 127, 2)
        want = t[f"rsqrt{127 + odd}"] * power(torch.tensor(-half, device="cuda"))
        n, text = show(f"rsqrt field {field}", x, y, want)
        if n:
            print(text)
        else:
            good.append(field)
    print(f"rsqrt: scaled tables hold for {len(good)} fields, {good[:1]}..{good[-1:]}")
    for field in (0, 1, 127, 254, 255):
        x = binade(field, 1)
        y = i32(evaluate("rsqrt_approx_ftz", x))
        values, counts = y.unique(return_counts=True)
        print(
            "rsqrt negative field",
            field,
            [(hex(v & 0xFFFFFFFF), c) for v, c in zip(values.tolist(), counts.tolist(), strict=True)][:4],
        )

    # ex2: fraction tables with 23 bits (from [1, 2)) and, for the upper half, 24 bits (from [0.5, 1)).
    t23 = t["ex2127"] * 0.5
    t24 = t["ex2126"]
    even = t24[::2]
    print(show("ex2 24-bit table at even places against the 23-bit one", even, even, t23[1 << 22 :])[1])
    odd = t24[1::2]
    up = torch.cat([t23[(1 << 22) + 1 :], torch.full((1,), 2.0, device="cuda")])
    n_down, n_up = int((odd != t23[1 << 22 :]).sum()), int((odd != up).sum())
    n_both = int(((odd != t23[1 << 22 :]) & (odd != up)).sum())
    print(f"ex2 odd places: differ from the place below {n_down}, above {n_up}, from both {n_both}")

    def from23(index):
        """Result for x = index * 2**-23 (int64), flushed."""
        whole, fraction = index >> 23, index & ((1 << 23) - 1)
        y = t23[fraction].double() * torch.ldexp(
            torch.ones_like(fraction, dtype=torch.float64), whole.clamp(-300, 300)
        )
        return ftz(y.float())

    for sign in (0, 1):
        for field in range(255):
            x = binade(field, sign)
            y = evaluate("ex2_approx_ftz", x)
            scaled = x.double() * 2.0**23
            # The unit may take the fraction of a negative number as the complement of its bits.
            options = {}
            for name, magnitude in (("even", scaled.abs().round()), ("trunc", scaled.abs().trunc())):
                index = magnitude.clamp(max=2.0**40).long()
                options[name] = -index if sign else index
                whole = (index & ((1 << 23) - 1)) == 0
                options[name + "_complement"] = torch.where(whole, -index, ~index) if sign else index
                options[name + "_all_complement"] = ~index if sign else index
            counts = {}
            texts = {}
            for name, index in options.items():
                want = from23(index)
                counts[name], texts[name] = show(f"ex2 sign {sign} field {field} {name}", x, y, want)
            if field >= 90 and (field < 140 or min(counts.values())):
                print(f"ex2 sign {sign} field {field} differing: {counts}", min(texts.values())[-90:])
    for field in (255,):
        for sign in (0, 1):
            x = binade(field, sign)
            for operation in (
                "ex2_approx_ftz",
                "rcp_approx_ftz",
                "ex2_approx",
                "expf",
                "fast_expf",
                "rsqrtf",
            ):
                y = i32(evaluate(operation, x))
                print(
                    operation,
                    "sign",
                    sign,
                    "inf ->",
                    hex(y[0].item() & 0xFFFFFFFF),
                    "nan ->",
                    [hex(v & 0xFFFFFFFF) for v in y[1:].unique()[:3].tolist()],
                )


def sequences() -> None:
    """The compiled forms against the sequences in terms of the flushing instructions, for all inputs."""
    for left, right in (
        ("expf", "expf_sequence"),
        ("ex2_approx", "ex2_sequence"),
        ("rcp_approx", "rcp_sequence"),
        ("rsqrt_approx", "rsqrt_sequence"),
        ("rsqrtf", "rsqrt_sequence"),
    ):
        total, text = 0, ""
        for x in all_floats():
            n, line = show(f"{left} against {right}", x, evaluate(left, x), evaluate(right, x))
            total += n
            text = line if n else text
        print(f"SEQUENCE {left} = {right}: {total} of {1 << 32} differ {text}", flush=True)


def rounding_of_small() -> None:
    """ex2 near 1: where the result changes as x grows within small binades (the fixed-point conversion)."""
    for sign in (0, 1):
        for field in (126, 125, 124, 123, 122, 121, 120, 118, 116, 110, 104, 103, 102, 101, 100):
            y = i32(evaluate("ex2_approx_ftz", binade(field, sign)))
            change = (y[1:] != y[:-1]).nonzero().flatten() + 1
            divisor = np.gcd.reduce(change[:200000].cpu().numpy()) if len(change) else 0
            first, last = (hex(v & 0xFFFFFFFF) for v in (y[0].item(), y[-1].item()))
            print(
                f"ex2 sign {sign} field {field}: first {first} last {last} changes {len(change)} "
                f"at {change[:6].tolist()}, their greatest common divisor {divisor}"
            )


def main() -> None:
    out = Path(sys.argv[1])
    print(torch.cuda.get_device_name(), torch.__version__, torch.version.cuda)
    t = tables(out)
    for part in (lambda: exponents(t), sequences, rounding_of_small):
        try:
            part()
        except Exception as error:
            print("FAILED", repr(error))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
