"""PURE: references between the files of one save, by the conventions of the frameworks that write them.

In: the names and sizes of all files of a save, and the facts of those that were inspected (`Facts`). Out: the
first broken promise, as a line; "" if there is none. The presence of a file proves nothing: file_formats.py
inspects its content.
"""

from __future__ import annotations

import fnmatch
import posixpath
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bootseer.checkpoint.format.file_formats import WEIGHTS, Facts
from bootseer.checkpoint.format.ocdbt import MANIFEST_NAME
from bootseer.checkpoint.format.pickle_data import Inert
from bootseer.checkpoint.format.tensor_index import is_relative

_INDEX = re.compile(r".*\.(safetensors|bin|msgpack|h5|pt|th)\.index(\.[\w-]+)?\.json")
DCP_METADATA = ".metadata"
ORBAX_NAMES = ("_METADATA", "_CHECKPOINT_METADATA")
COMMIT_NAME = "commit_success.txt"
ZARR_NAMES = (".zarray", "zarr.json")
# A marker beside a save, or in it, while it is being written: NeMo, transformers.
_MARKER = re.compile(
    r"(?:^|[-_.])(?:is[-_])?(?:incomplete|unfinished|in[-_]progress)(?:\.[a-z]+)?$", re.IGNORECASE
)
# Files beside the weights that are not weights themselves.
_STATE_ONLY = re.compile(
    r"(optimizer|optim|scheduler|lr_scheduler|rng_state|random_states?|scaler|sampler|dl_state|dataloader|"
    r"training_args|trainer_state|custom_checkpoint)",
    re.IGNORECASE,
)
_NUMBERED = re.compile(r"(?:shard-\d{5}-)?(?P<start>.*?)(?P<number>\d{4,6})-of-(?P<count>\d{4,6})(?P<end>.*)")
_RANDOM = re.compile(r"(.*/)?(rng|random)_states?\b")  # optional for a job
_FLAX = re.compile(r"checkpoint_\d+")
_WORLD = re.compile(r"(?P<start>.*)world_size_(?P<count>\d{1,6})_rank_(?P<number>\d{1,6})(?P<end>.*)")
_RANKS = re.compile(r"(?<![a-z])(?:rank|rng_state|random_states|shard|process)[-_](\d{1,6})(?!\d)")
_RANK_DIRECTORY = re.compile(r"mp_rank_\d\d(_\d\d\d)?(_\d\d\d)?")
_DCP_RANK = re.compile(r"(?:^|/)__(\d{1,6})_\d+\.distcp$")
_ZERO = re.compile(r"(?P<kind>.*?)zero_pp_rank_(?P<number>\d+)_mp_rank_(?P<model>\d+.*)")


class Save(NamedTuple):
    """One save. Paths are relative to its directory."""

    name: str  # of its directory; "" if unknown
    sizes: Mapping[str, int]
    facts: Mapping[str, Facts]  # of inspected files
    beside: Collection[str] = ()  # names in the parent directory

    def value(self, path: str) -> Any:
        found = self.facts.get(path)
        return None if found is None else found.value


class _Directory(NamedTuple):
    path: str  # "" for the save itself
    files: Sequence[str]
    folders: Collection[str]
    save: Save

    def value(self, name: str) -> Any:
        return self.save.value(join(self.path, name))

    def has(self, *patterns: str) -> bool:
        """Return whether any pattern matches a file, or, with a trailing slash, a directory."""
        return any(
            fnmatch.filter(self.folders if each.endswith("/") else self.files, each.rstrip("/"))
            for each in patterns
        )

    def inside(self, path: str) -> str:
        """Return a path of the save relative to this directory; "" if it is elsewhere."""
        if not self.path:
            return path
        return path[len(self.path) + 1 :] if path.startswith(f"{self.path}/") else ""

    def below(self, *names: str) -> bool:
        """Return whether a file of this path exists."""
        return join(self.path, "/".join(names)) in self.save.sizes

    def lacks(self, what: str) -> str:
        return f"{self.path}: {what}" if self.path else what


def has_weights(save: Save) -> bool:
    """Return whether any file holds tensors of a model."""
    return any(is_weights(path) for path in save.sizes)


def is_weights(path: str) -> bool:
    """Return whether a file of this name holds tensors of a model, or locates them."""
    name = posixpath.basename(path)
    if name in (DCP_METADATA, MANIFEST_NAME, *ZARR_NAMES) or _FLAX.fullmatch(name):
        return True
    return name.endswith(WEIGHTS) and _STATE_ONLY.match(name) is None


def is_state(path: str) -> bool:
    """Return whether a file of this name is state that trainers save beside the weights."""
    name = posixpath.basename(path)
    return _STATE_ONLY.match(name) is not None and name.endswith((*WEIGHTS, ".pkl", ".json"))


def is_index(path: str) -> bool:
    """Return whether a file of this name maps tensors to shards."""
    return _INDEX.fullmatch(posixpath.basename(path)) is not None


def broken_promise(save: Save) -> str:
    """Return the first broken promise, "" if there is none."""
    for path in sorted(save.sizes):
        if "/" not in path and _MARKER.search(path):
            return f"is marked as unfinished by its saver ({path})"
    marker = marker_beside(save.name, save.beside)
    if marker:
        return f"is marked as unfinished by its saver ({marker})"
    for directory in _directories(save):
        for rule in _RULES:
            why = rule(directory)
            if why:
                return directory.lacks(why)
    return ""


def marker_beside(name: str, beside: Collection[str]) -> str:
    """Return a file beside a save that marks it as being written; "" for none."""
    stem = name.removesuffix(".ckpt")
    if not stem:
        return ""
    return next((each for each in beside if each.startswith(stem) and _MARKER.fullmatch(each[len(stem) :])), "")


def _directories(save: Save) -> Iterator[_Directory]:
    files: dict[str, list[str]] = {"": []}
    directories: dict[str, set[str]] = {"": set()}
    for path in save.sizes:
        above, name = posixpath.split(path)
        files.setdefault(above, []).append(name)
        while above:
            at, last = posixpath.split(above)
            directories.setdefault(at, set()).add(last)
            above = at
    for path in sorted({*files, *directories}):
        yield _Directory(path, sorted(files.get(path, ())), directories.get(path, set()), save)


# ---- shards --------------------------------------------------------------------------------------------------


def _index(directory: _Directory) -> str:
    """Check that each shard of an index exists and has the tensors that the index assigns to it."""
    for name in directory.files:
        if not is_index(name):
            continue
        value = directory.value(name)
        mapping = value.get("weight_map") if isinstance(value, dict) else None
        if not isinstance(mapping, dict) or not all(isinstance(each, str) for each in mapping.values()):
            if value is None:
                continue  # too large to read
            return f"{name} has no weight_map"
        for tensor, shard in mapping.items():
            path = join(directory.path, shard)
            if not is_relative(shard) or path not in directory.save.sizes:
                return f"{shard[:120]}, named in {name}, is missing"
            facts = directory.save.facts.get(path)
            if facts is not None and facts.tensors is not None and tensor not in facts.tensors:
                return f"{shard[:120]} has no tensor {tensor[:80]}, which {name} promises"
    return ""


def _numbered(directory: _Directory) -> str:
    """Check that files numbered like `-00001-of-00003` are complete, and that they have an index."""
    sets: dict[tuple[str, str, str], set[int]] = {}
    for name in directory.files:
        found = _NUMBERED.fullmatch(name)
        if found is not None:
            sets.setdefault((found["start"], found["count"], found["end"]), set()).add(int(found["number"]))
    for (start, width, end), numbers in sets.items():
        count, first = int(width), 0 if 0 in numbers else 1
        missing = sorted(set(range(first, first + count)) - numbers)
        if missing:
            return f"{start}{missing[0]:0{len(width)}d}-of-{width}{end} is missing"
        is_model = end.endswith((".safetensors", ".bin")) and not _is_of_ranks(directory)
        if is_model and not any(map(is_index, directory.files)):
            return f"{start}{first:0{len(width)}d}-of-{width}{end} and the rest have no index"
    return ""


def _is_of_ranks(directory: _Directory) -> bool:
    """Return whether these are shards per rank of torch's HuggingFaceStorageWriter, which have no index."""
    return any(name.startswith("shard-0") for name in directory.files)


def _world(directory: _Directory) -> str:
    """Check names that contain the number of ranks."""
    for name in directory.files:
        found = _WORLD.fullmatch(name)
        if found is None:
            continue
        for rank in range(min(int(found["count"]), 1 << 16)):
            other = f"{found['start']}world_size_{found['count']}_rank_{rank}{found['end']}"
            if other not in directory.files:
                return f"{other} is missing"
    return ""


def _ranks(directory: _Directory) -> str:
    """Check that names numbered by rank are consecutive, and that directories of ranks hold the same files."""
    sets: dict[tuple[str, str], dict[int, str]] = {}
    files = [name for name in directory.files if name.endswith((*WEIGHTS, ".pkl"))]
    for name in [*files, *directory.folders]:
        for found in _RANKS.finditer(name):
            before, after = name[: found.start(1)], name[found.end(1) :]
            key = ("shard-", "") if before == "shard-" else (before, after)  # not each shard has all files
            sets.setdefault(key, {})[int(found[1])] = name
    for (before, after), numbers in sets.items():
        first = 1 if before == "shard-" else 0
        missing = next((each for each in range(first, max(numbers)) if each not in numbers), None)
        if missing is not None:
            last = numbers[max(numbers)]
            return f"{before}{missing}{after} is missing, but {last} exists"
    return _alike_directories(directory)


def _alike_directories(directory: _Directory) -> str:
    """Check that directories of ranks hold the same files (Megatron)."""
    alike = {each: set[str]() for each in directory.folders if _RANK_DIRECTORY.fullmatch(each)}
    for path in directory.save.sizes if alike else ():
        first, _, rest = directory.inside(path).partition("/")
        if first in alike:
            alike[first].add(rest)
    everything = set[str]().union(*alike.values())
    for each in sorted(alike):
        if everything - alike[each]:
            return f"{each} has no {min(everything - alike[each])}, which others have"
    return ""


# ---- frameworks ----------------------------------------------------------------------------------------------


class _Needs(NamedTuple):
    """If one of `when` exists, one of `then` must exist; names are patterns, directories end with a slash."""

    when: tuple[str, ...]
    then: tuple[str, ...]
    and_also: tuple[str, ...] = ()  # must exist as well for the rule to apply
    unless: tuple[str, ...] = ()


_MODELS = (
    "model*.safetensors", "pytorch_model*.bin", "adapter_model*", "*.distcp", "pytorch_model*/", "global_step*/",
    "model*.bin", "flax_model*", "consolidated*", "model*/", "*.safetensors", "*adapter*/",
)  # fmt: skip
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin", "optimizer*/", "global_step*/")
_NEEDS = (
    # PEFT
    _Needs(("adapter_model.*",), ("adapter_config.json",)),
    _Needs(("adapter_config.json",), ("adapter_model*",)),
    # transformers
    _Needs(("generation_config.json",), ("config.json",), unless=("adapter_config.json",)),
    _Needs(("trainer_state.json",), _MODELS),
    _Needs(("optimizer.pt", "rng_state*.pth", "scheduler.pt"), ("trainer_state.json",), ("training_args.bin",)),
    _Needs(("optimizer.pt",), ("training_args.bin",), ("trainer_state.json",)),
    _Needs(("scheduler.pt",), _OPTIMIZERS, ("trainer_state.json",)),
    _Needs(("optimizer.pt", "optimizer*/"), ("scheduler.pt",), ("trainer_state.json",)),
    _Needs(("optimizer.pt", "optimizer*/", "scheduler.pt"), ("rng_state*.pth",), ("trainer_state.json",)),
    _Needs(("rng_state*.pth",), _OPTIMIZERS),
    # accelerate
    _Needs(("optimizer.bin", "sampler.bin"), ("random_states_*.pkl",), unless=("trainer_state.json",)),
    _Needs(("random_states_*.pkl",), (*_MODELS, "*_model/")),
    _Needs(
        ("scheduler*.bin",), ("optimizer*.bin", "optimizer*/", "pytorch_model/", "*_model/", "model*/"),
        ("random_states_*.pkl",),
    ),
    # Megatron, NeMo
    _Needs(("common.pt",), (DCP_METADATA, ".zmetadata", "*/"), ("metadata.json",)),
    _Needs(("common.pt",), ("metadata.json",), (DCP_METADATA,)),
    # Keras, sentence-transformers
    _Needs(("config_sentence_transformers.json", "sentence_bert_config.json"), ("modules.json",), ("*_Pooling/",)),
)  # fmt: skip


def _companions(directory: _Directory) -> str:
    for need in _NEEDS:
        if not directory.has(*need.when) or directory.has(*need.then):
            continue
        if need.and_also and not directory.has(*need.and_also):
            continue
        if need.unless and directory.has(*need.unless):
            continue
        return f"has no {need.then[0]}, but {need.when[0]}"
    return ""


def _tokenizer(directory: _Directory) -> str:
    value = directory.value("tokenizer_config.json")
    if not isinstance(value, dict) or "tokenizer.json" in directory.files:
        return ""
    is_fast = value.get("backend") == "tokenizers" or str(value.get("tokenizer_class")).endswith("Fast")
    return "has no tokenizer.json, but tokenizer_config.json" if is_fast else ""


def _trainer_ranks(directory: _Directory) -> str:
    """Check the number of ranks in training_args.bin, or in the ranks' parts of the model (transformers)."""
    arguments = directory.value("training_args.bin")
    state = arguments.state.get("distributed_state") if isinstance(arguments, Inert) else None
    count = state.state.get("num_processes") if isinstance(state, Inert) else None
    ranks = {int(found[1]) for path in directory.save.sizes if (found := _DCP_RANK.search(path))}
    count = max(count if isinstance(count, int) else 0, *ranks, 0, *(each + 1 for each in ranks))
    for start, end in (("rng_state", ".pth"), ("random_states", ".pkl")):
        if directory.has(f"{start}_*{end}") and count < 1 << 16:
            for rank in range(count):
                if f"{start}_{rank}{end}" not in directory.files:
                    return f"{start}_{rank}{end} is missing, but there were {count} ranks"
    return ""


def _lightning(directory: _Directory) -> str:
    """Check a sharded save: a directory named like a file, with unsharded state beside the shards."""
    is_one = not directory.path and directory.save.name.endswith(".ckpt") and DCP_METADATA in directory.files
    return "has no meta.pt" if is_one and "meta.pt" not in directory.files else ""


def _megatron(directory: _Directory) -> str:
    value = directory.value("metadata.json")
    if directory.path == "context" and "weights" in _tops(directory.save):
        missing = next((each for each in ("io.json", "model.yaml") if each not in directory.files), "")
        if missing:
            return f"has no {missing}, which NeMo writes with the weights"
    if isinstance(value, dict) and value.get("sharded_backend") == "torch_dist":
        for name in (DCP_METADATA, "common.pt"):
            if name not in directory.files and not (
                name == "common.pt" and value.get("common_backend") != "torch"
            ):
                return f"has no {name}"
    return ""


def _tops(save: Save) -> set[str]:
    return {path.partition("/")[0] for path in save.sizes}


def _pipelines(directory: _Directory) -> str:
    """Check the lists in diffusers' model_index.json and sentence-transformers' modules.json."""
    index = directory.value("model_index.json")
    for name, item in index.items() if isinstance(index, dict) else ():
        if not isinstance(item, list) or len(item) != 2 or not isinstance(item[1], str) or item[0] is None:
            continue
        inner = join(directory.path, name)
        have = [path for path in directory.save.sizes if path.startswith(f"{inner}/")]
        if not have:
            return f"{name}, named in model_index.json, is missing"
        if not any(path.endswith(".json") for path in have):
            return f"{name} has no configuration"
        is_model = not item[1].endswith(("Scheduler", "Tokenizer", "TokenizerFast", "Processor", "Extractor"))
        if is_model and not any(path.endswith(WEIGHTS) for path in have):
            return f"{name} has no weights"
    modules = directory.value("modules.json")
    for item in modules if isinstance(modules, list) else ():
        path, kind = (
            (str(item.get(each) or "") for each in ("path", "type")) if isinstance(item, dict) else ("", "")
        )
        if not kind.startswith("sentence_transformers") or kind.endswith("Normalize"):
            continue
        place = join(directory.path, path)
        if join(place, "config.json") not in directory.save.sizes:
            return f"{join(path, 'config.json')} is missing, but modules.json names it"
        has_tensors = kind.endswith(("Transformer", "Dense", "LayerNorm"))
        if has_tensors and not any(
            posixpath.dirname(each) == place and each.endswith(WEIGHTS) for each in directory.save.sizes
        ):
            return f"{path or 'the model'} has no weights, but modules.json names it"
    return ""


def _deepspeed(directory: _Directory) -> str:
    """Check ranks' parts of the optimizer against the model's part."""
    models = [name for name in directory.files if name.endswith("_model_states.pt")]
    zero: dict[tuple[str, str], set[int]] = {}
    for name in directory.files:
        found = _ZERO.fullmatch(name)
        if found is not None:
            zero.setdefault((found["kind"], found["model"]), set()).add(int(found["number"]))
    if zero and not models:
        return "has no *_model_states.pt"
    for name in models:
        value = directory.value(name)
        if not isinstance(value, dict):
            continue
        count = value.get("dp_world_size")
        if not isinstance(count, int) or not 0 < count < 1 << 16:
            continue
        if _zero_stage(value.get("ds_config")) and not any("optim_states" in each for each in directory.files):
            return "has no *_optim_states.pt, but ZeRO was used"
        for (kind, model), numbers in zero.items():
            missing = sorted(set(range(count)) - numbers)
            if missing:
                return f"{kind}zero_pp_rank_{missing[0]}_mp_rank_{model} is missing"
        tensor_ranks = value.get("mp_world_size")
        if name.startswith("mp_rank_") and isinstance(tensor_ranks, int):
            for rank in range(min(tensor_ranks, 1 << 16)):
                if f"mp_rank_{rank:02d}_model_states.pt" not in directory.files:
                    return f"mp_rank_{rank:02d}_model_states.pt is missing"
    return ""


def _zero_stage(config: Any) -> int:
    inner = config.get("zero_optimization") if isinstance(config, dict) else None
    stage = inner.get("stage") if isinstance(inner, dict) else None
    return stage if isinstance(stage, int) else 0


def _deepspeed_pointer(directory: _Directory) -> str:
    """Check that a directory with a DeepSpeed save has a pointer to it, and that its target exists."""
    inner = {
        first
        for path in directory.save.sizes
        if path.endswith("_model_states.pt")
        for first, slash, rest in [directory.inside(path).partition("/")]
        if slash and "/" not in rest
    }
    if inner and not directory.has("latest", "latest_universal"):
        return f"has no file named latest, by which DeepSpeed finds {min(inner)}"
    named = directory.value("latest")
    if inner and isinstance(named, str) and named not in directory.folders:
        return f"latest names {named[:80]!r}, which is missing"
    return ""


def _orbax(directory: _Directory) -> str:
    committed = [path for path in directory.save.sizes if posixpath.basename(path) == COMMIT_NAME]
    value = directory.value("_CHECKPOINT_METADATA")
    if isinstance(value, dict):
        if "commit_timestamp_nsecs" in value and value["commit_timestamp_nsecs"] is None:
            return "is unfinished (commit_timestamp_nsecs of _CHECKPOINT_METADATA)"
        handlers = value.get("item_handlers")
        for name, handler in handlers.items() if isinstance(handlers, dict) else ():
            if name not in directory.folders:
                return f"{name}, named in _CHECKPOINT_METADATA, is missing"
            if str(handler).endswith("JsonCheckpointHandler") and not directory.below(name, "metadata"):
                return f"{name} has no metadata"
            if committed and not directory.below(name, COMMIT_NAME):
                return f"{name} has no {COMMIT_NAME}, which its saver writes last"
    has_arrays = "_METADATA" in directory.files or (
        MANIFEST_NAME in directory.files and not posixpath.basename(directory.path).startswith("ocdbt.process_")
    )
    if has_arrays:
        if "_METADATA" not in directory.files:
            return "has no _METADATA, in which Orbax lists the saved items"
        if MANIFEST_NAME not in directory.files and not _has_zarr(directory):
            return f"has no {MANIFEST_NAME}"
    chunks = [name for name in directory.files if re.fullmatch(r"\d+(\.\d+)*", name)]
    if chunks and ".zarray" not in directory.files and _is_orbax(directory.save):
        return f"has no .zarray, but the chunk {chunks[0]}"
    if committed and (has_arrays or isinstance(value, dict)) and COMMIT_NAME not in directory.files:
        return f"has no {COMMIT_NAME}, which its saver writes last"
    return ""


def _has_zarr(directory: _Directory) -> bool:
    return any(posixpath.basename(directory.inside(path)) in ZARR_NAMES for path in directory.save.sizes)


def _zarr(directory: _Directory) -> str:
    """Check chunks: Orbax stores each chunk of an array, also one of zeros only."""
    value = directory.value(".zarray")
    if not isinstance(value, dict) or not _is_orbax(directory.save):
        return ""
    shape, chunks = value.get("shape"), value.get("chunks")
    separator = value.get("dimension_separator") or "."
    if (
        not isinstance(shape, list)
        or not isinstance(chunks, list)
        or separator != "."
        or len(shape) != len(chunks)
    ):
        return ""
    if not all(isinstance(each, int) and each >= 0 for each in [*shape, *chunks]) or 0 in chunks:
        return ""
    counts = [-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True)]
    for number in _grid(counts):
        if number not in directory.files:
            return f"chunk {number} of the array is missing"
    return ""


def _grid(counts: list[int]) -> Iterator[str]:
    names = [""]
    for count in counts:
        if len(names) * count > 1 << 20:
            return
        names = [f"{name}.{number}" if name else str(number) for name in names for number in range(count)]
    yield from (name or "0" for name in names)


def _is_orbax(save: Save) -> bool:
    return any(posixpath.basename(path) in ORBAX_NAMES for path in save.sizes)


_RULES: Sequence[Callable[[_Directory], str]] = (
    _index, _numbered, _world, _ranks, _companions, _tokenizer, _trainer_ranks, _lightning, _megatron, _pipelines,
    _deepspeed, _deepspeed_pointer, _orbax, _zarr,
)  # fmt: skip


def join(directory: str, name: str) -> str:
    return f"{directory}/{name}" if directory and name else directory or name


def find_lacking_file(sizes: Mapping[str, int], older: Sequence[Mapping[str, int]]) -> str:
    """Return a file of state that all older saves of a run have and the newer one lacks; "" for none.

    Numbers in names do not count, so that a job may continue with fewer ranks. A missing part of the weights
    counts nevertheless if the other parts have their former sizes. An older save with nothing in common has
    another saver.
    """
    own = _kinds(sizes)
    older = [each for each in older if not own.keys().isdisjoint(_kinds(each))]
    if not older:
        return ""
    kinds = [_kinds(each) for each in older]
    for kind, paths in kinds[0].items():
        if kind not in own and all(kind in each for each in kinds):
            return paths[0]
    for kind, paths in kinds[0].items():
        common = [path for path in paths if all(path in each for each in older)]
        missing = [path for path in common if path not in sizes]
        there = [path for path in common if path in sizes]
        is_part = kind.endswith(WEIGHTS) and not kind.endswith(".distcp") and _RANDOM.match(kind) is None
        if (
            missing
            and there
            and is_part
            and all(_is_alike(sizes[path], [each[path] for each in older]) for path in there)
        ):
            return missing[0]
    return ""


def _is_alike(size: int, others: Sequence[int]) -> bool:
    return all(abs(size - each) <= each // 50 for each in others)


def _kinds(paths: Collection[str]) -> dict[str, list[str]]:
    """Group files of state by their paths without numbers."""
    found: dict[str, list[str]] = {}
    for path in sorted(paths):
        above, name = posixpath.split(path)
        is_noted = name in _STATE_NAMES or above.endswith("array_metadatas")
        if is_noted or name.endswith((*WEIGHTS, ".pkl")):
            stem, suffix = posixpath.splitext(path)
            found.setdefault(re.sub(r"[-_.]?\d+", "", stem) + suffix, []).append(path)
    return found


_STATE_NAMES = (
    *ORBAX_NAMES, "_sharding", COMMIT_NAME, *ZARR_NAMES, DCP_METADATA, MANIFEST_NAME, "config.json",
    "adapter_config.json", "trainer_state.json", "model_index.json", "modules.json", "metadata.json", "latest",
)  # fmt: skip
