"""PURE: what the files of one save promise of each other, by the habits of the frameworks that write them.

In: the names and sizes of all files of a save, and what those that were looked into say (`Facts`). Out: the first
promise that is broken, as a line; "" where none is. That a file is there proves nothing by itself: see
file_formats.py for what is in it.
"""

from __future__ import annotations

import fnmatch
import posixpath
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bootseer.checkpoint.file_formats import WEIGHTS, Facts
from bootseer.checkpoint.ocdbt import MANIFEST_NAME
from bootseer.checkpoint.pickle_data import Inert
from bootseer.checkpoint.tensor_index import is_relative

_INDEX = re.compile(r".*\.(safetensors|bin|msgpack|h5|pt|th)\.index(\.[\w-]+)?\.json")
DCP_METADATA = ".metadata"
ORBAX_NAMES = ("_METADATA", "_CHECKPOINT_METADATA")
COMMIT_NAME = "commit_success.txt"
ZARR_NAMES = (".zarray", "zarr.json")
# Beside a save, or in it, while it is being written: NeMo, transformers.
_MARKER = re.compile(
    r"(?:^|[-_.])(?:is[-_])?(?:incomplete|unfinished|in[-_]progress)(?:\.[a-z]+)?$", re.IGNORECASE
)
# Beside the weights; no weights themselves.
_STATE_ONLY = re.compile(
    r"(optimizer|optim|scheduler|lr_scheduler|rng_state|random_states?|scaler|sampler|dl_state|dataloader|"
    r"training_args|trainer_state|custom_checkpoint)",
    re.IGNORECASE,
)
_NUMBERED = re.compile(r"(?:shard-\d{5}-)?(?P<start>.*?)(?P<number>\d{4,6})-of-(?P<count>\d{4,6})(?P<end>.*)")
_RANDOM = re.compile(r"(.*/)?(rng|random)_states?\b")  # a job may do without
_FLAX = re.compile(r"checkpoint_\d+")
_WORLD = re.compile(r"(?P<start>.*)world_size_(?P<count>\d{1,6})_rank_(?P<number>\d{1,6})(?P<end>.*)")
_RANKS = re.compile(r"(?<![a-z])(?:rank|rng_state|random_states|shard|process)[-_](\d{1,6})(?!\d)")
_RANK_FOLDER = re.compile(r"mp_rank_\d\d(_\d\d\d)?(_\d\d\d)?")
_DCP_RANK = re.compile(r"(?:^|/)__(\d{1,6})_\d+\.distcp$")
_ZERO = re.compile(r"(?P<kind>.*?)zero_pp_rank_(?P<number>\d+)_mp_rank_(?P<model>\d+.*)")


class Save(NamedTuple):
    """One save. Paths are relative to its folder."""

    name: str  # of its folder; "" where it is not known
    sizes: Mapping[str, int]
    facts: Mapping[str, Facts]  # of files that were looked into
    beside: Collection[str] = ()  # names in the folder above

    def value(self, path: str) -> Any:
        found = self.facts.get(path)
        return None if found is None else found.value


class _Folder(NamedTuple):
    """One folder of a save."""

    path: str  # "" for the save's own
    files: Sequence[str]
    folders: Collection[str]
    save: Save

    def value(self, name: str) -> Any:
        return self.save.value(join(self.path, name))

    def has(self, *patterns: str) -> bool:
        """Files, or with a trailing slash folders."""
        return any(
            fnmatch.filter(self.folders if each.endswith("/") else self.files, each.rstrip("/"))
            for each in patterns
        )

    def inside(self, path: str) -> str:
        """A path of the save as one in this folder; "" for those elsewhere."""
        if not self.path:
            return path
        return path[len(self.path) + 1 :] if path.startswith(f"{self.path}/") else ""

    def below(self, *names: str) -> bool:
        """Whether there is a file of this path."""
        return join(self.path, "/".join(names)) in self.save.sizes

    def lacks(self, what: str) -> str:
        return f"{self.path}: {what}" if self.path else what


def has_weights(save: Save) -> bool:
    """Whether any file holds tensors of a model."""
    return any(is_weights(path) for path in save.sizes)


def is_weights(path: str) -> bool:
    """Whether a file of this name holds tensors of a model, or says where they are."""
    name = posixpath.basename(path)
    if name in (DCP_METADATA, MANIFEST_NAME, *ZARR_NAMES) or _FLAX.fullmatch(name):
        return True
    return name.endswith(WEIGHTS) and _STATE_ONLY.match(name) is None


def is_state(path: str) -> bool:
    """Whether a file of this name is what trainers leave beside the weights."""
    name = posixpath.basename(path)
    return _STATE_ONLY.match(name) is not None and name.endswith((*WEIGHTS, ".pkl", ".json"))


def is_index(path: str) -> bool:
    """Whether a file of this name says which shard has which tensor."""
    return _INDEX.fullmatch(posixpath.basename(path)) is not None


def broken_promise(save: Save) -> str:
    """The first of them, "" where there is none."""
    for path in sorted(save.sizes):
        if "/" not in path and _MARKER.search(path):
            return f"its saver has marked it as not finished ({path})"
    marker = marker_beside(save.name, save.beside)
    if marker:
        return f"its saver has marked it as not finished ({marker})"
    for folder in _folders(save):
        for rule in _RULES:
            why = rule(folder)
            if why:
                return folder.lacks(why)
    return ""


def marker_beside(name: str, beside: Collection[str]) -> str:
    """A file beside a save that says that it is being written; "" for none."""
    stem = name.removesuffix(".ckpt")
    if not stem:
        return ""
    return next((each for each in beside if each.startswith(stem) and _MARKER.fullmatch(each[len(stem) :])), "")


def _folders(save: Save) -> Iterator[_Folder]:
    files: dict[str, list[str]] = {"": []}
    folders: dict[str, set[str]] = {"": set()}
    for path in save.sizes:
        above, name = posixpath.split(path)
        files.setdefault(above, []).append(name)
        while above:
            at, last = posixpath.split(above)
            folders.setdefault(at, set()).add(last)
            above = at
    for path in sorted({*files, *folders}):
        yield _Folder(path, sorted(files.get(path, ())), folders.get(path, set()), save)


# ---- shards --------------------------------------------------------------------------------------------------


def _index(folder: _Folder) -> str:
    """Each shard that an index names is there and has the tensors that it is said to have."""
    for name in folder.files:
        if not is_index(name):
            continue
        value = folder.value(name)
        mapping = value.get("weight_map") if isinstance(value, dict) else None
        if not isinstance(mapping, dict) or not all(isinstance(each, str) for each in mapping.values()):
            if value is None:
                continue  # too large to be read
            return f"{name} has no weight_map"
        for tensor, shard in mapping.items():
            path = join(folder.path, shard)
            if not is_relative(shard) or path not in folder.save.sizes:
                return f"{shard[:120]}, which {name} names, is not there"
            facts = folder.save.facts.get(path)
            if facts is not None and facts.tensors is not None and tensor not in facts.tensors:
                return f"{shard[:120]} has no tensor {tensor[:80]}, which {name} promises"
    return ""


def _numbered(folder: _Folder) -> str:
    """Of what is numbered `-00001-of-00003` all are there, and the index that names them."""
    sets: dict[tuple[str, str, str], set[int]] = {}
    for name in folder.files:
        found = _NUMBERED.fullmatch(name)
        if found is not None:
            sets.setdefault((found["start"], found["count"], found["end"]), set()).add(int(found["number"]))
    for (start, width, end), numbers in sets.items():
        count, first = int(width), 0 if 0 in numbers else 1
        missing = sorted(set(range(first, first + count)) - numbers)
        if missing:
            return f"{start}{missing[0]:0{len(width)}d}-of-{width}{end} is not there"
        is_model = end.endswith((".safetensors", ".bin")) and not _is_of_ranks(folder)
        if is_model and not any(map(is_index, folder.files)):
            return f"{start}{first:0{len(width)}d}-of-{width}{end} and the rest have no index"
    return ""


def _is_of_ranks(folder: _Folder) -> bool:
    """Shards as torch's HuggingFaceStorageWriter leaves them for each rank: these have no index."""
    return any(name.startswith("shard-0") for name in folder.files)


def _world(folder: _Folder) -> str:
    """Names that say how many ranks there are."""
    for name in folder.files:
        found = _WORLD.fullmatch(name)
        if found is None:
            continue
        for rank in range(min(int(found["count"]), 1 << 16)):
            other = f"{found['start']}world_size_{found['count']}_rank_{rank}{found['end']}"
            if other not in folder.files:
                return f"{other} is not there"
    return ""


def _ranks(folder: _Folder) -> str:
    """Names that count ranks leave none out, and folders of ranks hold the same."""
    sets: dict[tuple[str, str], dict[int, str]] = {}
    files = [name for name in folder.files if name.endswith((*WEIGHTS, ".pkl"))]
    for name in [*files, *folder.folders]:
        for found in _RANKS.finditer(name):
            before, after = name[: found.start(1)], name[found.end(1) :]
            key = ("shard-", "") if before == "shard-" else (before, after)  # not each shard has all files
            sets.setdefault(key, {})[int(found[1])] = name
    for (before, after), numbers in sets.items():
        first = 1 if before == "shard-" else 0
        missing = next((each for each in range(first, max(numbers)) if each not in numbers), None)
        if missing is not None:
            last = numbers[max(numbers)]
            return f"{before}{missing}{after} is not there, but {last} is"
    return _alike_folders(folder)


def _alike_folders(folder: _Folder) -> str:
    """Megatron: folders of ranks hold the same files."""
    alike = {each: set[str]() for each in folder.folders if _RANK_FOLDER.fullmatch(each)}
    for path in folder.save.sizes if alike else ():
        first, _, rest = folder.inside(path).partition("/")
        if first in alike:
            alike[first].add(rest)
    everything = set[str]().union(*alike.values())
    for each in sorted(alike):
        if everything - alike[each]:
            return f"{each} has no {min(everything - alike[each])}, which others have"
    return ""


# ---- frameworks ----------------------------------------------------------------------------------------------


class _Needs(NamedTuple):
    """Where one of `when` is, one of `then` has to be; names are patterns, folders end with a slash."""

    when: tuple[str, ...]
    then: tuple[str, ...]
    and_also: tuple[str, ...] = ()  # is there as well
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


def _companions(folder: _Folder) -> str:
    for need in _NEEDS:
        if not folder.has(*need.when) or folder.has(*need.then):
            continue
        if need.and_also and not folder.has(*need.and_also):
            continue
        if need.unless and folder.has(*need.unless):
            continue
        return f"has no {need.then[0]}, but {need.when[0]}"
    return ""


def _tokenizer(folder: _Folder) -> str:
    value = folder.value("tokenizer_config.json")
    if not isinstance(value, dict) or "tokenizer.json" in folder.files:
        return ""
    is_fast = value.get("backend") == "tokenizers" or str(value.get("tokenizer_class")).endswith("Fast")
    return "has no tokenizer.json, but tokenizer_config.json" if is_fast else ""


def _trainer_ranks(folder: _Folder) -> str:
    """transformers: how many ranks there were says training_args.bin, or the ranks' parts of the model."""
    arguments = folder.value("training_args.bin")
    state = arguments.state.get("distributed_state") if isinstance(arguments, Inert) else None
    count = state.state.get("num_processes") if isinstance(state, Inert) else None
    ranks = {int(found[1]) for path in folder.save.sizes if (found := _DCP_RANK.search(path))}
    count = max(count if isinstance(count, int) else 0, *ranks, 0, *(each + 1 for each in ranks))
    for start, end in (("rng_state", ".pth"), ("random_states", ".pkl")):
        if folder.has(f"{start}_*{end}") and count < 1 << 16:
            for rank in range(count):
                if f"{start}_{rank}{end}" not in folder.files:
                    return f"{start}_{rank}{end} is not there, but there were {count} ranks"
    return ""


def _lightning(folder: _Folder) -> str:
    """A sharded save is a folder with the name of a file, and keeps what is not sharded beside the shards."""
    is_one = not folder.path and folder.save.name.endswith(".ckpt") and DCP_METADATA in folder.files
    return "has no meta.pt" if is_one and "meta.pt" not in folder.files else ""


def _megatron(folder: _Folder) -> str:
    value = folder.value("metadata.json")
    if folder.path == "context" and "weights" in _tops(folder.save):
        missing = next((each for each in ("io.json", "model.yaml") if each not in folder.files), "")
        if missing:
            return f"has no {missing}, which NeMo writes with the weights"
    if isinstance(value, dict) and value.get("sharded_backend") == "torch_dist":
        for name in (DCP_METADATA, "common.pt"):
            if name not in folder.files and not (name == "common.pt" and value.get("common_backend") != "torch"):
                return f"has no {name}"
    return ""


def _tops(save: Save) -> set[str]:
    return {path.partition("/")[0] for path in save.sizes}


def _pipelines(folder: _Folder) -> str:
    """What diffusers' model_index.json and sentence-transformers' modules.json list."""
    index = folder.value("model_index.json")
    for name, item in index.items() if isinstance(index, dict) else ():
        if not isinstance(item, list) or len(item) != 2 or not isinstance(item[1], str) or item[0] is None:
            continue
        inner = join(folder.path, name)
        have = [path for path in folder.save.sizes if path.startswith(f"{inner}/")]
        if not have:
            return f"{name}, which model_index.json names, is not there"
        if not any(path.endswith(".json") for path in have):
            return f"{name} has no configuration"
        is_model = not item[1].endswith(("Scheduler", "Tokenizer", "TokenizerFast", "Processor", "Extractor"))
        if is_model and not any(path.endswith(WEIGHTS) for path in have):
            return f"{name} has no weights"
    modules = folder.value("modules.json")
    for item in modules if isinstance(modules, list) else ():
        path, kind = (
            (str(item.get(each) or "") for each in ("path", "type")) if isinstance(item, dict) else ("", "")
        )
        if not kind.startswith("sentence_transformers") or kind.endswith("Normalize"):
            continue
        place = join(folder.path, path)
        if join(place, "config.json") not in folder.save.sizes:
            return f"{join(path, 'config.json')} is not there, but modules.json names it"
        has_tensors = kind.endswith(("Transformer", "Dense", "LayerNorm"))
        if has_tensors and not any(
            posixpath.dirname(each) == place and each.endswith(WEIGHTS) for each in folder.save.sizes
        ):
            return f"{path or 'the model'} has no weights, but modules.json names it"
    return ""


def _deepspeed(folder: _Folder) -> str:
    """Ranks' parts of the optimizer, by what the model's part says."""
    models = [name for name in folder.files if name.endswith("_model_states.pt")]
    zero: dict[tuple[str, str], set[int]] = {}
    for name in folder.files:
        found = _ZERO.fullmatch(name)
        if found is not None:
            zero.setdefault((found["kind"], found["model"]), set()).add(int(found["number"]))
    if zero and not models:
        return "has no *_model_states.pt"
    for name in models:
        value = folder.value(name)
        if not isinstance(value, dict):
            continue
        count = value.get("dp_world_size")
        if not isinstance(count, int) or not 0 < count < 1 << 16:
            continue
        if _zero_stage(value.get("ds_config")) and not any("optim_states" in each for each in folder.files):
            return "has no *_optim_states.pt, but ZeRO was used"
        for (kind, model), numbers in zero.items():
            missing = sorted(set(range(count)) - numbers)
            if missing:
                return f"{kind}zero_pp_rank_{missing[0]}_mp_rank_{model} is not there"
        tensor_ranks = value.get("mp_world_size")
        if name.startswith("mp_rank_") and isinstance(tensor_ranks, int):
            for rank in range(min(tensor_ranks, 1 << 16)):
                if f"mp_rank_{rank:02d}_model_states.pt" not in folder.files:
                    return f"mp_rank_{rank:02d}_model_states.pt is not there"
    return ""


def _zero_stage(config: Any) -> int:
    inner = config.get("zero_optimization") if isinstance(config, dict) else None
    stage = inner.get("stage") if isinstance(inner, dict) else None
    return stage if isinstance(stage, int) else 0


def _deepspeed_pointer(folder: _Folder) -> str:
    """A folder with a save of DeepSpeed in it says which, and that one is there."""
    inner = {
        first
        for path in folder.save.sizes
        if path.endswith("_model_states.pt")
        for first, slash, rest in [folder.inside(path).partition("/")]
        if slash and "/" not in rest
    }
    if inner and not folder.has("latest", "latest_universal"):
        return f"has no file named latest, by which DeepSpeed finds {min(inner)}"
    named = folder.value("latest")
    if inner and isinstance(named, str) and named not in folder.folders:
        return f"latest names {named[:80]!r}, which is not there"
    return ""


def _orbax(folder: _Folder) -> str:
    committed = [path for path in folder.save.sizes if posixpath.basename(path) == COMMIT_NAME]
    value = folder.value("_CHECKPOINT_METADATA")
    if isinstance(value, dict):
        if "commit_timestamp_nsecs" in value and value["commit_timestamp_nsecs"] is None:
            return "its saver has not finished it (commit_timestamp_nsecs of _CHECKPOINT_METADATA)"
        handlers = value.get("item_handlers")
        for name, handler in handlers.items() if isinstance(handlers, dict) else ():
            if name not in folder.folders:
                return f"{name}, which _CHECKPOINT_METADATA names, is not there"
            if str(handler).endswith("JsonCheckpointHandler") and not folder.below(name, "metadata"):
                return f"{name} has no metadata"
            if committed and not folder.below(name, COMMIT_NAME):
                return f"{name} has no {COMMIT_NAME}, which its saver writes last"
    has_arrays = "_METADATA" in folder.files or (
        MANIFEST_NAME in folder.files and not posixpath.basename(folder.path).startswith("ocdbt.process_")
    )
    if has_arrays:
        if "_METADATA" not in folder.files:
            return "has no _METADATA, in which Orbax says what it has saved"
        if MANIFEST_NAME not in folder.files and not _has_zarr(folder):
            return f"has no {MANIFEST_NAME}"
    chunks = [name for name in folder.files if re.fullmatch(r"\d+(\.\d+)*", name)]
    if chunks and ".zarray" not in folder.files and _is_orbax(folder.save):
        return f"has no .zarray, but the chunk {chunks[0]}"
    if committed and (has_arrays or isinstance(value, dict)) and COMMIT_NAME not in folder.files:
        return f"has no {COMMIT_NAME}, which its saver writes last"
    return ""


def _has_zarr(folder: _Folder) -> bool:
    return any(posixpath.basename(folder.inside(path)) in ZARR_NAMES for path in folder.save.sizes)


def _zarr(folder: _Folder) -> str:
    """Orbax stores each chunk of an array, also where there are only zeros."""
    value = folder.value(".zarray")
    if not isinstance(value, dict) or not _is_orbax(folder.save):
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
        if number not in folder.files:
            return f"chunk {number} of the array is not there"
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


_RULES: Sequence[Callable[[_Folder], str]] = (
    _index, _numbered, _world, _ranks, _companions, _tokenizer, _trainer_ranks, _lightning, _megatron, _pipelines,
    _deepspeed, _deepspeed_pointer, _orbax, _zarr,
)  # fmt: skip


def join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder and name else folder or name


def what_it_lacks(sizes: Mapping[str, int], older: Sequence[Mapping[str, int]]) -> str:
    """A file of state that all older saves of a run have and the newer one has not; "" for none.

    Numbers in names do not count, so that a job may go on with fewer ranks. A part of the weights is missed all
    the same if the others are as large as they were. A save that has nothing in common is one of another saver.
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
    """Files of state by their paths without numbers."""
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
