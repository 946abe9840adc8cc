"""The deep_gemm module as a backend sees it: loading it, and asking what this build can do.

DeepGEMM is built by several projects, and version strings do not say what a build contains. Every question is
therefore put to the functions themselves, through ``inspect.signature``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

MODULE_NAME = "deep_gemm"


def load_deep_gemm() -> Any:
    """Import deep_gemm. RuntimeError, with the import's own reason, if that fails.

    An installed build can still fail to load (no CUDA driver, another torch ABI), so any exception of the
    import counts, not only ImportError.
    """
    try:
        return importlib.import_module(MODULE_NAME)
    except Exception as error:
        raise RuntimeError(
            f"the {MODULE_NAME} module is needed and could not be imported "
            f"({type(error).__name__}: {error}); it is on PyPI as sgl-deep-gemm"
        ) from error


def declares(function: Callable[..., Any], *names: str) -> bool:
    """True if the signature of ``function`` lists all ``names``; False if it has no signature to ask."""
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return all(name in found for name in names)


def accepts(function: Callable[..., Any], name: str) -> bool:
    """True unless ``function`` is known to refuse the keyword ``name``.

    A function with ``**kwargs`` accepts every name; a built-in without a signature cannot be asked, and is
    trusted.
    """
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    return name in found or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in found.values())


def keep_given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are not None: what a launch forwards."""
    return {name: value for name, value in options.items() if value is not None}


def refuse_unknown(function: Callable[..., Any], options: Iterable[str]) -> None:
    """ValueError naming the options that this build's ``function`` has no parameter for.

    Asked before a launch: dropping such an option would compute something else, and the TypeError of the call
    would not say that the build is the reason.
    """
    missing = [name for name in options if not accepts(function, name)]
    if missing:
        raise ValueError(
            f"{', '.join(missing)}: this build's {MODULE_NAME}.{getattr(function, '__name__', function)} "
            "has no such parameter; leave it at None, or use a build that has it"
        )


def missing_functions(library: Any, names: Iterable[str]) -> list[str]:
    """Those of ``names`` that ``library`` does not have."""
    return [name for name in names if not hasattr(library, name)]


def _has_parameters(library: Any, function: str, *names: str) -> bool:
    found = getattr(library, function, None)
    return found is not None and declares(found, *names)


# One line a difference between the builds in use. Shown by `megamoe env`; each is a capability, not a
# version.
FEATURES: dict[str, Callable[[Any], bool]] = {
    "fp8_fp4_mega_moe": lambda m: hasattr(m, "fp8_fp4_mega_moe"),
    "fp8_mega_moe": lambda m: hasattr(m, "fp8_mega_moe"),
    "bf16_mega_moe": lambda m: hasattr(m, "bf16_mega_moe"),
    "nvfp4_mega_moe": lambda m: hasattr(m, "nvfp4_mega_moe"),
    "fp4_fp4_mega_moe": lambda m: hasattr(m, "fp4_fp4_mega_moe"),
    "bf16_mega_gate": lambda m: hasattr(m, "bf16_mega_gate"),
    "mega_moe_pre_dispatch": lambda m: hasattr(m, "mega_moe_pre_dispatch"),
    "mega_moe_pre_dispatch_sm90": lambda m: hasattr(m, "mega_moe_pre_dispatch_sm90"),
    "get_block_m_for_mega_moe": lambda m: hasattr(m, "get_block_m_for_mega_moe"),
    "get_block_m_for_nvfp4_mega_moe": lambda m: hasattr(m, "get_block_m_for_nvfp4_mega_moe"),
    "shared experts in the launch": lambda m: _has_parameters(
        m, "fp8_fp4_mega_moe", "shared_l1_weights", "shared_l2_weights"
    ),
    "shared experts in the buffer": lambda m: _has_parameters(
        m, "get_symm_buffer_for_mega_moe", "num_shared_experts"
    ),
    "symmetric buffer base=": lambda m: _has_parameters(m, "SymmBuffer", "base"),
    "symmetric buffer mma_type": lambda m: _has_parameters(m, "get_symm_buffer_for_mega_moe", "mma_type"),
    "activation alpha and beta": lambda m: _has_parameters(
        m, "fp8_fp4_mega_moe", "activation_alpha", "activation_beta"
    ),
    "post-expert norm (bf16)": lambda m: _has_parameters(m, "bf16_mega_moe", "post_expert_norm_gamma"),
    "post-expert norm (fp4xfp4)": lambda m: _has_parameters(m, "fp4_fp4_mega_moe", "post_expert_norm_gamma"),
    "per-expert alphas (fp4xfp4)": lambda m: _has_parameters(
        m, "fp4_fp4_mega_moe", "l1_alphas", "l2_alphas", "a2_scales"
    ),
    "per-token scales (nvfp4)": lambda m: _has_parameters(m, "nvfp4_mega_moe", "use_x_scales"),
}


def features(library: Any | None = None) -> dict[str, bool]:
    """What this build of deep_gemm can do: name of the feature -> present. RuntimeError if it cannot be
    imported.
    """
    module = load_deep_gemm() if library is None else library
    return {name: probe(module) for name, probe in FEATURES.items()}
