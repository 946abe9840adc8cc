"""Which backend serves a device, and what is refused: at selection, with a reason, in a fixed order."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
import torch
from fake_deep_gemm import make_module

from megamoe.backends import (
    DeepGemmBf16MegaMoEBackend,
    DeepGemmFp4MegaMoEBackend,
    DeepGemmMegaMoEBackend,
    DeepGemmNvfp4MegaMoEBackend,
    DeepGemmSm90MegaMoEBackend,
    DeepGemmSm100Fp8MegaMoEBackend,
    DeepGemmSm100MegaMoEBackend,
    EmulatedMegaMoEBackend,
    get_deep_gemm_mega_moe_backend,
    registered_backends,
)


@pytest.mark.parametrize("device", [torch.device("cuda"), torch.device("cuda", 3), "cuda:1", 2])
@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((10, 0), DeepGemmSm100MegaMoEBackend),
        ((10, 3), DeepGemmSm100MegaMoEBackend),
        ((9, 0), DeepGemmSm90MegaMoEBackend),
    ],
    ids=["sm100", "sm103", "sm90"],
)
def test_architecture_decides(fake, on_architecture, device, capability, expected):
    on_architecture(*capability)
    backend = get_deep_gemm_mega_moe_backend(device, 512, 256)
    assert type(backend) is expected
    assert backend.library is fake


@pytest.mark.parametrize(
    "capability", [(8, 0), (8, 9), (9, 1), (11, 0), (12, 0)], ids="sm{0[0]}{0[1]}".format
)
def test_other_architectures_are_named_and_refused(fake, on_architecture, capability):
    on_architecture(*capability)
    with pytest.raises(NotImplementedError, match=f"sm_{capability[0]}{capability[1]} .*SM100.*SM90"):
        get_deep_gemm_mega_moe_backend("cuda", 512, 256)


def test_cpu_is_named_and_refused(fake):
    with pytest.raises(NotImplementedError, match=r"on cpu: .*EmulatedMegaMoEBackend"):
        get_deep_gemm_mega_moe_backend(torch.device("cpu"), 512, 256)


def test_a_machine_without_cuda_is_no_crash(fake, monkeypatch):
    def fail(device=None):
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "get_device_capability", fail)
    with pytest.raises(NotImplementedError, match="does not have"):
        get_deep_gemm_mega_moe_backend("cuda", 512, 256)


def test_hip_capability_is_not_taken_for_hopper(fake, on_architecture, monkeypatch):
    on_architecture(9, 0)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    properties = type("Properties", (), {"gcnArchName": "gfx942"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    with pytest.raises(NotImplementedError, match="gfx942"):
        get_deep_gemm_mega_moe_backend("cuda", 512, 256)


@pytest.mark.parametrize("sizes", [(500, 256), (512, 200), (64, 64), (0, 256), (-256, 256)], ids=str)
@pytest.mark.parametrize("capability", [(9, 0), (10, 0)], ids=["sm90", "sm100"])
def test_sizes_must_be_multiples_of_128(fake, on_architecture, capability, sizes):
    on_architecture(*capability)
    with pytest.raises(
        ValueError, match=r"(hidden|intermediate)_size must be a positive multiple of 128, got"
    ):
        get_deep_gemm_mega_moe_backend("cuda", *sizes)


@pytest.mark.parametrize(
    ("capability", "fine", "refused"),
    [
        ((10, 0), (256, 128), {(384, 256): "hidden_size must be a multiple of 256"}),
        (
            (9, 0),
            (512, 256),
            {
                (256, 256): "hidden_size must be a multiple of 512",
                (512, 128): "intermediate_size must be a multiple of 256",
            },
        ),
    ],
    ids=["sm100", "sm90"],
)
def test_sizes_must_fit_the_symmetric_buffer(fake, on_architecture, capability, fine, refused):
    on_architecture(*capability)
    get_deep_gemm_mega_moe_backend("cuda", *fine)
    for sizes, message in refused.items():
        with pytest.raises(ValueError, match=f"{message} for the symmetric buffer"):
            get_deep_gemm_mega_moe_backend("cuda", *sizes)


def test_fp4_needs_256_in_both_sizes(fake, on_architecture):
    on_architecture(10, 0)
    with pytest.raises(ValueError, match="intermediate_size must be a multiple of 256"):
        get_deep_gemm_mega_moe_backend("cuda", 256, 128, mma_type="fp4xfp4")


def test_architecture_is_refused_before_sizes(fake, on_architecture):
    on_architecture(8, 0)
    with pytest.raises(NotImplementedError):
        get_deep_gemm_mega_moe_backend("cuda", 1, 1)


def test_sizes_are_refused_before_the_library_is_looked_at(on_architecture, monkeypatch):
    on_architecture(10, 0)
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    with pytest.raises(ValueError, match="multiple of 128"):
        get_deep_gemm_mega_moe_backend("cuda", 1, 256)
    with pytest.raises(RuntimeError, match="deep_gemm module is needed"):
        get_deep_gemm_mega_moe_backend("cuda", 256, 256)


@pytest.mark.parametrize(
    ("capability", "function"),
    [((10, 0), "fp8_fp4_mega_moe"), ((10, 0), "transform_sf_into_required_layout"), ((9, 0), "fp8_mega_moe")],
)
def test_a_build_without_a_needed_function_is_refused_at_selection(
    on_architecture, monkeypatch, capability, function
):
    on_architecture(*capability)
    monkeypatch.setitem(sys.modules, "deep_gemm", make_module(without=(function,)))
    with pytest.raises(RuntimeError, match=f"needs {function}"):
        get_deep_gemm_mega_moe_backend("cuda", 512, 256)


@pytest.mark.parametrize(
    ("mma_type", "expected"),
    [
        ("fp8xfp4", DeepGemmSm100MegaMoEBackend),
        ("nvfp4", DeepGemmNvfp4MegaMoEBackend),
        ("fp4xfp4", DeepGemmFp4MegaMoEBackend),
        ("bf16xbf16", DeepGemmBf16MegaMoEBackend),
        ("fp8xfp8", DeepGemmSm100Fp8MegaMoEBackend),
    ],
)
def test_mma_type_selects_among_sm100_backends(fake, on_architecture, mma_type, expected):
    on_architecture(10, 0)
    assert type(get_deep_gemm_mega_moe_backend("cuda", 256, 256, mma_type=mma_type)) is expected


def test_mma_type_of_another_architecture_is_refused(fake, on_architecture):
    on_architecture(9, 0)
    with pytest.raises(NotImplementedError, match="nvfp4 MegaMoE on sm_90"):
        get_deep_gemm_mega_moe_backend("cuda", 256, 256, mma_type="nvfp4")


def test_by_name(fake, on_architecture):
    on_architecture(10, 0)
    assert (
        type(get_deep_gemm_mega_moe_backend("cuda", 256, 256, name="deep_gemm_bf16"))
        is DeepGemmBf16MegaMoEBackend
    )
    with pytest.raises(NotImplementedError, match="deep_gemm_sm90 on sm_100"):
        get_deep_gemm_mega_moe_backend("cuda", 256, 256, name="deep_gemm_sm90")
    with pytest.raises(ValueError, match=r"'nothing'.*deep_gemm_bf16.*emulated"):
        get_deep_gemm_mega_moe_backend("cuda", 256, 256, name="nothing")
    with pytest.raises(ValueError, match="runs bf16xbf16, got 'nvfp4'"):
        get_deep_gemm_mega_moe_backend("cuda", 256, 256, name="deep_gemm_bf16", mma_type="nvfp4")


@pytest.mark.parametrize("mma_type", [None, "fp8xfp4", "nvfp4", "fp4xfp4", "bf16xbf16", "fp8xfp8"])
def test_the_emulated_backend_serves_the_cpu(mma_type):
    backend = EmulatedMegaMoEBackend(mma_type) if mma_type else EmulatedMegaMoEBackend()
    assert backend.mma_type == (mma_type or "fp8xfp4")
    assert isinstance(backend, DeepGemmMegaMoEBackend)
    assert backend.supports_device(torch.device("cpu"))
    with pytest.raises(ValueError, match=r"hidden_size must be a multiple of (256|512)"):
        backend.check_sizes(384, 256)


def test_fp8xfp8_is_another_kernel_on_each_architecture():
    assert EmulatedMegaMoEBackend("fp8xfp8").architecture == "SM90"
    assert EmulatedMegaMoEBackend("fp8xfp8", "SM100").architecture == "SM100"
    with pytest.raises(ValueError, match=r"mma_type must be one of .*got 'nvfp4' for SM90"):
        EmulatedMegaMoEBackend("nvfp4", "SM90")


def test_the_emulated_backend_refuses_unknown_types():
    with pytest.raises(ValueError, match=r"mma_type must be one of .*fp8xfp4.*got 'int8'"):
        EmulatedMegaMoEBackend("int8")


# -- third parties ---------------------------------------------------------------------------------


def install(folder: Path, name: str, code: str, entries: str) -> None:
    """A distribution as an installer leaves it: a module, and metadata with entry points."""
    (folder / f"{name}.py").write_text(textwrap.dedent(code))
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[megamoe.backends]\n{entries}\n")


GOOD = """
    from megamoe.backends import DeepGemmMegaMoEBackend

    class Cpu(DeepGemmMegaMoEBackend):
        name = "third_cpu"
        architecture = "CPU"

        @classmethod
        def supports_device(cls, device):
            return device.type == "cpu"

        def check_library(self):
            pass
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("third_party_good", "third_party_bad", "third_party_odd", "third_party_twin"):
        sys.modules.pop(name, None)


def test_a_registered_backend_is_found_by_name_and_by_device(site):
    install(site, "third_party_good", GOOD, "third_cpu = third_party_good:Cpu")
    assert "third_cpu" in registered_backends()
    for backend in (
        get_deep_gemm_mega_moe_backend("cpu", 256, 256),
        get_deep_gemm_mega_moe_backend("cpu", 256, 256, name="third_cpu"),
    ):
        assert type(backend).__name__ == "Cpu"
    with pytest.raises(ValueError, match="multiple of 128"):
        get_deep_gemm_mega_moe_backend("cpu", 100, 256)
    with pytest.raises(NotImplementedError, match="nvfp4 MegaMoE on cpu"):
        get_deep_gemm_mega_moe_backend("cpu", 256, 256, mma_type="nvfp4")


def test_built_in_backends_come_first(site, fake, on_architecture):
    code = GOOD.replace('device.type == "cpu"', "True")
    install(site, "third_party_good", code, "third_cpu = third_party_good:Cpu")
    on_architecture(10, 0)
    assert type(get_deep_gemm_mega_moe_backend("cuda", 256, 256)) is DeepGemmSm100MegaMoEBackend
    on_architecture(12, 0)
    assert type(get_deep_gemm_mega_moe_backend("cuda", 256, 256)).__name__ == "Cpu"


def test_a_broken_registration_is_reported_and_passed_over(site):
    install(site, "third_party_bad", "raise OSError('no driver')", "a_broken = third_party_bad:Thing")
    install(site, "third_party_odd", "Thing = dict", "b_odd = third_party_odd:Thing")
    install(site, "third_party_good", GOOD, "third_cpu = third_party_good:Cpu")
    with pytest.warns(RuntimeWarning) as warned:
        backend = get_deep_gemm_mega_moe_backend("cpu", 256, 256)
    assert type(backend).__name__ == "Cpu"
    broken, odd = (str(w.message) for w in warned)
    assert "a_broken" in broken
    assert "OSError: no driver" in broken
    assert "b_odd" in odd
    with pytest.raises(RuntimeError, match=r"a_broken.*OSError: no driver"):
        get_deep_gemm_mega_moe_backend("cpu", 256, 256, name="a_broken")
    with pytest.raises(RuntimeError, match="not a subclass"):
        get_deep_gemm_mega_moe_backend("cpu", 256, 256, name="b_odd")


def test_two_packages_with_one_name_are_reported(site):
    install(site, "third_party_good", GOOD, "third_cpu = third_party_good:Cpu")
    install(site, "third_party_twin", GOOD, "third_cpu = third_party_twin:Cpu")
    with pytest.warns(RuntimeWarning, match="two packages register the MegaMoE backend 'third_cpu'"):
        registered_backends()
