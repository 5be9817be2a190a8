"""The option --prompt-cache-file of a command that generates: a file, and the engine it fills."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxspec.cli.arguments import engine_arguments
from mlxspec.cli.exits import UsageError
from mlxspec.cli.loading import Loaded
from mlxspec.cli.options import Parser

if TYPE_CHECKING:
    from mlxspec.engine.pool import Engine
    from mlxspec.prompt_cache import PromptCacheHeader

_QUANTIZATION = ("kv_bits", "kv_group_size", "quantized_kv_start")


@dataclass(frozen=True)
class CachedPrompt:
    """A file whose header has been read, and agrees with the options.

    Attributes:
        path: The file.
        header: What it says of itself.
    """

    path: Path
    header: PromptCacheHeader

    @staticmethod
    def of(parser: Parser, args: Namespace) -> CachedPrompt | None:
        """The file that the options name, if one; its model and quantization become theirs.

        Raises:
            UsageError: mlx-lm's file, or options that contradict the file.
            PromptCacheError: The file is no prompt cache.
        """
        if args.prompt_cache_file is None:
            return None
        from mlxspec.prompt_cache import read_prompt_cache_header

        path = Path(args.prompt_cache_file)
        header = read_prompt_cache_header(path)
        if header is None:
            raise UsageError(
                f"--prompt-cache-file {path}: mlx-lm's files do not say which tokens they cover; "
                "make it again with `mlxspec cache-prompt`, or read it from Python: "
                "mlxspec.load_prompt_cache(file, engine, prompt=ids)"
            )
        if not parser.given(args, "model"):
            args.model = header.metadata.get("model", args.model)
        if not any(parser.given(args, name) for name in _QUANTIZATION):
            for name, value in (header.quantization or {}).items():
                setattr(args, name, value)
        for name in ("kv_bits", "kv_group_size"):
            own = (header.quantization or {}).get(name)
            if getattr(args, name) != own and (args.kv_bits or header.quantization):
                raise UsageError(
                    f"--prompt-cache-file {path}: it was made with {name}={own}, and the options "
                    f"say {getattr(args, name)}; give the same, or leave them out"
                )
        return CachedPrompt(path, header)

    @property
    def token_count(self) -> int:
        """Tokens that the file covers."""
        return self.header.token_count

    def refuse_structure(self, structure: Any) -> None:
        """Refuse a model that the file was not made with, before its weights are read.

        Raises:
            UsageError: Another family, or another config.
        """
        from dataclasses import replace

        from mlxspec.engine.identity import config_hash
        from mlxspec.engine.support import family_of

        made_with = self.header.model
        given = replace(made_with, family=family_of(structure), config=config_hash(structure))
        if difference := made_with.difference(given):
            raise UsageError(
                f"--prompt-cache-file {self.path}: it was made with {difference}; give the --model "
                f"it was made with ({self.header.metadata.get('model', 'which it does not name')})"
            )

    def engine(self, args: Namespace, loaded: Loaded, decoding: Mapping[str, Any]) -> Engine:
        """An engine that holds what the file holds.

        Args:
            args: The options.
            loaded: The model.
            decoding: How it drafts, see `decoding_arguments`: wider tiles may pay for that.

        Raises:
            PromptCacheError: The file is damaged, or belongs to other weights.
            ValueError: What only the engine can know of the options.
        """
        from mlxspec.assembly import widened_for_drafts
        from mlxspec.engine.pool import new_engine
        from mlxspec.prompt_cache import load_prompt_cache

        options = {k: v for k, v in engine_arguments(args, loaded).items() if v is not None}
        engine = widened_for_drafts(new_engine(loaded.model, **options), **decoding)
        load_prompt_cache(self.path, engine)
        return engine
