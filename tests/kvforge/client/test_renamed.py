"""Deprecated names of the public API: they work for one version, with a warning that names the new one."""

from __future__ import annotations

import pytest

import kvforge


def test_the_old_name_of_sampling_parameters_gives_the_class_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="use SamplingParams"):
        from kvforge import Sampling
    assert Sampling is kvforge.SamplingParams
    assert "Sampling" not in dir(kvforge), "completion offers the new name only"
