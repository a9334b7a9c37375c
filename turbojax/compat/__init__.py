"""LMDeploy's names over turbojax's engine: a script written for it runs with its imports changed."""

from __future__ import annotations

from turbojax.compat import turbomind
from turbojax.compat.messages import GenerationConfig, TurbomindEngineConfig
from turbojax.compat.pipeline import Pipeline, pipeline
from turbojax.compat.tokenizer import Tokenizer

__all__ = ["GenerationConfig", "Pipeline", "Tokenizer", "TurbomindEngineConfig", "pipeline", "turbomind"]
