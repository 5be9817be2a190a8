"""Every family the static engine takes is exact, and every other one is refused with a reason."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxspec import StaticShapeEngine, UnsupportedModel
from mlxspec.engine import support
from mlxspec.engine.support import (
    STATIC_FAMILIES,
    context_limit,
    family_of,
    model_from_config,
    require_static,
    why_not_static,
)
from tests.families.exactness import (
    ONE_WIDTH,
    examine,
    ladder,
    mlx_lm_tokens,
    stock_case,
)
from tests.families.tiny import tiny_configs, tiny_model

# 32 rows of two experts each take the path on which a MoE layer sorts its rows.
REGIMES = {
    "ladder": ladder,
    "wide": lambda model: ladder(model, 1, 32),
    "one width": lambda model: ONE_WIDTH,
}
# Full attention, experts, windows, anchored state, aligned state.
ONE_OF_EACH_KIND = ("llama", "qwen3_moe", "gemma3_text", "lfm2", "mamba2")

MODELS = {name: model_from_config(config) for name, config in tiny_configs().items()}
EXACT = sorted(name for name, model in MODELS.items() if why_not_static(model) is None)
REFUSED = sorted(MODELS.keys() - set(EXACT))
WITH_POSITION_TABLE = sorted(
    name for name in EXACT if family_of(MODELS[name]) in support._LEARNED_POSITIONS
)


@pytest.fixture
def uncompiled():
    """Run graphs as they are: on the CPU, all families have some 300 fused kernels to compile.

    That takes minutes where no earlier run has left them, so that the deep profile does it.
    """
    mx.disable_compile()
    yield
    mx.enable_compile()


def test_every_accepted_family_has_a_tiny_model():
    assert {family_of(MODELS[name]) for name in EXACT} == STATIC_FAMILIES


def test_no_family_is_both_accepted_and_refused():
    assert not STATIC_FAMILIES & support._REFUSED_FAMILIES.keys()


def test_every_family_refused_by_name_has_a_tiny_model():
    assert support._REFUSED_FAMILIES.keys() <= {family_of(model) for model in MODELS.values()}


@pytest.mark.parametrize("name", [name for name in EXACT if "+" not in name])
def test_speculative_equals_plain_equals_mlx_lm(name, uncompiled):
    check_short_case(tiny_model(name))


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_compiled_graphs_say_the_same(name):
    check_short_case(tiny_model(name))


@pytest.mark.deep
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", EXACT)
def test_prompts_of_any_length_under_every_regime(name, regime):
    model = tiny_model(name)
    for prompt_length in (1, 2, 17, 40):
        case = stock_case(model, prompt_length, count=64)
        assert mlx_lm_tokens(model, case.prompt, 64) == case.tokens
        found = examine(model, case, REGIMES[regime](model))
        assert found.exact(case), found


@pytest.mark.deep
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", EXACT)
def test_half_precision_equals_the_argmax_of_mlx_lms_raw_logits(name, dtype):
    """mlx-lm chooses by rounded log-probabilities, so here its logits are the reference."""
    model = tiny_model(name, dtype=dtype)
    if mx.default_device() == mx.cpu and _has_experts(model):
        pytest.skip("MLX multiplies gathered experts on the CPU in float32 alone")
    case = stock_case(model, prompt_length=17, count=64)
    if np.isnan(case.rows).any():
        pytest.skip("mlx-lm's own logits are NaN in this precision")
    assert examine(model, case, ladder(model)).wrong == []


@pytest.mark.parametrize("name", WITH_POSITION_TABLE)
def test_a_position_table_holds_to_its_very_end(name, uncompiled):
    model = tiny_model(name)
    limit = context_limit(model, 8)
    with pytest.raises(ValueError, match="table of positions"):
        StaticShapeEngine(model, max_context_length=limit + 1, tile_widths=(1, 8))
    case = stock_case(model, prompt_length=limit - 20, count=17)
    assert case.context_length == limit
    found = examine(model, case, ladder(model, 1, 8))
    assert found.exact(case), found


@pytest.mark.parametrize("name", REFUSED)
def test_the_others_are_refused_before_any_forward(name, monkeypatch):
    model = MODELS[name]

    def forward(*args, **kwargs):
        pytest.fail("a refused model was run")

    monkeypatch.setattr(type(model), "__call__", forward)
    with pytest.raises(UnsupportedModel, match=f"cannot run this model: {family_of(model)}") as why:
        StaticShapeEngine(model)
    assert "--engine dynamic" in str(why.value)


def test_a_family_unknown_to_the_tables_is_refused(monkeypatch):
    monkeypatch.setattr(support, "STATIC_FAMILIES", STATIC_FAMILIES - {"llama"})
    with pytest.raises(UnsupportedModel, match="llama has not been checked"):
        require_static(MODELS["llama"])


def test_a_model_is_no_better_than_its_parts():
    """Multimodal wrappers hold the text model of another family."""
    with pytest.raises(UnsupportedModel, match="mistral3 holds mistral4"):
        require_static(MODELS["mistral3+mistral4"])


def test_a_model_of_foreign_code_is_refused():
    class Model(type(MODELS["llama"])):
        pass

    with pytest.raises(UnsupportedModel, match="a model of its own code"):
        require_static(Model(MODELS["llama"].args))


def check_short_case(model):
    case = stock_case(model, prompt_length=10, count=16)
    assert mlx_lm_tokens(model, case.prompt, 16) == case.tokens
    # Two widths, of which one takes every draft.
    found = examine(model, case, ladder(model, 1, 8))
    assert found.exact(case), found


def _has_experts(model) -> bool:
    return any(type(module).__name__ == "SwitchLinear" for _, module in model.named_modules())
