"""Runs frameworks that save checkpoints, and keeps what they wrote as small fixtures.

    python tests/layouts/make.py --to tests/layouts NAME...      # in an environment that has the framework
    python tests/layouts/make.py --list

Each function below is one layout: it gets an empty folder and fills it with at least two saves, as its framework
does, with models of a few kilobytes. `NAME.tar.xz` has the files as they are; `made.toml` says by which versions.
Functions whose second argument is `ranks` run as so many processes with gloo.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import warnings

warnings.filterwarnings("ignore")
HERE = os.path.dirname(os.path.abspath(__file__))
LAYOUTS = {}


def layout(packages, ranks=1, source=""):
    """Registers a function. `packages`: whose versions are noted; `source`: where a layout is known from that
    could not be made by running its framework."""

    def register(func):
        LAYOUTS[func.__name__] = (func, packages.split(), ranks, source)
        return func

    return register


# ---- models --------------------------------------------------------------------------------------------------


def seed():
    random.seed(0)
    try:
        import torch

        torch.manual_seed(0)
    except ImportError:
        pass


def plain(net):
    """The same number everywhere: archives of it are small."""
    for each in net.parameters():
        each.data.fill_(0.5)
    return net


def small_net(width=16):
    import torch

    return plain(torch.nn.Sequential(torch.nn.Linear(width, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)))


def as_if_accelerators():
    """accelerate shards only what is on accelerators; its code does not mind that the device is the CPU."""
    import torch
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    os.environ["ACCELERATE_USE_CPU"] = "false"
    PartialState._prepare_backend = lambda *_args, **_named: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = lambda state: setattr(state, "device", torch.device("cpu"))
    torch.cuda.set_device = lambda *_args: None


def train_step(net, optimizer):
    import torch

    loss = net(torch.ones(2, 16)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def llama(layers=2):
    from transformers import LlamaConfig, LlamaForCausalLM

    return plain(
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=48,
                hidden_size=8,
                intermediate_size=8,
                num_hidden_layers=layers,
                num_attention_heads=2,
                num_key_value_heads=2,
                max_position_embeddings=32,
                tie_word_embeddings=False,
            )
        )
    )


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    return plain(
        BertForSequenceClassification(
            BertConfig(
                vocab_size=48,
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                max_position_embeddings=32,
            )
        )
    )


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz"])}
    made = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


class Rows:
    def __init__(self, count=16):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        import torch

        ids = torch.arange(8) + index % 8 + 3
        return {"input_ids": ids, "labels": ids}


class Labelled(Rows):
    def __getitem__(self, index):
        import torch

        return {"input_ids": torch.arange(8) + index % 8 + 3, "labels": torch.tensor(index % 2)}


def train(out, model, data=None, **more):
    from transformers import Trainer, TrainingArguments

    settings = {
        "output_dir": out,
        "max_steps": 4,
        "save_steps": 2,
        "per_device_train_batch_size": 2,
        "report_to": [],
        "use_cpu": True,
        "logging_steps": 1,
        "disable_tqdm": True,
    } | more
    trainer = Trainer(model=model, args=TrainingArguments(**settings), train_dataset=data or Rows())
    trainer.train()
    return trainer


# ---- transformers --------------------------------------------------------------------------------------------


@layout("transformers torch")
def transformers_pretrained(out):
    for step in (1, 2):
        llama().save_pretrained(f"{out}/step-{step}")
        tokenizer().save_pretrained(f"{out}/step-{step}")


@layout("transformers torch")
def transformers_pretrained_sharded(out):
    for step in (1, 2):
        llama().save_pretrained(f"{out}/step-{step}", max_shard_size="4KB")


@layout("transformers torch")
def transformers_pretrained_variant(out):
    for step in (1, 2):
        bert().save_pretrained(f"{out}/step-{step}", variant="fp16", max_shard_size="6KB")


@layout("transformers torch accelerate")
def transformers_trainer(out):
    train(out, llama())


@layout("transformers torch accelerate")
def transformers_trainer_bert(out):
    train(out, bert(), Labelled())


@layout("transformers torch accelerate")
def transformers_trainer_model_only(out):
    train(out, llama(), save_only_model=True)


@layout("transformers torch accelerate")
def transformers_trainer_plain_module(out):
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 4)

        def forward(self, input_ids, labels=None):
            scores = self.layer(input_ids.float())
            return {"loss": scores.square().mean(), "logits": scores}

    train(out, Net(), Labelled())


@layout("transformers torch accelerate", ranks=2)
def transformers_trainer_ddp(out):
    train(out, llama(), ddp_backend="gloo")


@layout("transformers torch accelerate", ranks=2)
def transformers_trainer_fsdp_sharded(out):
    as_if_accelerators()
    os.environ.update(FSDP_VERSION="2", FSDP_STATE_DICT_TYPE="SHARDED_STATE_DICT")
    config = {
        "version": 2,
        "state_dict_type": "SHARDED_STATE_DICT",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    }
    train(
        out, llama(), use_cpu=False, ddp_backend="gloo", fsdp=True, fsdp_config=config, dataloader_pin_memory=False
    )


@layout("transformers torch accelerate", ranks=2)
def transformers_trainer_fsdp_full(out):
    as_if_accelerators()
    os.environ.update(FSDP_VERSION="2", FSDP_STATE_DICT_TYPE="FULL_STATE_DICT")
    config = {
        "version": 2,
        "state_dict_type": "FULL_STATE_DICT",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    }
    train(
        out, llama(), use_cpu=False, ddp_backend="gloo", fsdp=True, fsdp_config=config, dataloader_pin_memory=False
    )


DEEPSPEED = {
    "zero_optimization": {"stage": 2},
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 5e-5, "torch_adam": True}},
    "zero_force_ds_cpu_optimizer": False,
}


@layout("transformers torch accelerate deepspeed", ranks=2)
def transformers_trainer_deepspeed(out):
    as_if_accelerators()
    train(out, llama(), use_cpu=False, ddp_backend="gloo", deepspeed=DEEPSPEED, dataloader_pin_memory=False)


@layout("transformers torch accelerate deepspeed", ranks=2)
def transformers_trainer_deepspeed_zero3(out):
    as_if_accelerators()
    settings = DEEPSPEED | {"zero_optimization": {"stage": 3}}
    train(out, llama(), use_cpu=False, ddp_backend="gloo", deepspeed=settings, dataloader_pin_memory=False)


@layout("transformers peft torch accelerate")
def transformers_trainer_peft(out):
    import peft

    model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    train(out, model)


# ---- accelerate ----------------------------------------------------------------------------------------------


def accelerate_parts(net=None, **more):
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(**{"cpu": True} | more)
    net = net or small_net()
    optimizer = torch.optim.AdamW(net.parameters())
    loader = torch.utils.data.DataLoader(torch.ones(8, 16), batch_size=2, shuffle=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    net, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)
    for batch in loader:
        accelerator.backward(net(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
    return accelerator, net


@layout("accelerate torch")
def accelerate_state(out):
    accelerator, _ = accelerate_parts()
    for step in (1, 2):
        accelerator.save_state(f"{out}/step_{step}")


@layout("accelerate torch")
def accelerate_state_bin(out):
    accelerator, _ = accelerate_parts()
    for step in (1, 2):
        accelerator.save_state(f"{out}/step_{step}", safe_serialization=False)


@layout("accelerate torch")
def accelerate_state_automatic(out):
    from accelerate.utils import ProjectConfiguration

    accelerator, _ = accelerate_parts(
        project_config=ProjectConfiguration(project_dir=out, automatic_checkpoint_naming=True, total_limit=2)
    )
    for _ in range(3):
        accelerator.save_state()


@layout("accelerate torch", ranks=2)
def accelerate_state_ddp(out):
    accelerator, _ = accelerate_parts()
    for step in (1, 2):
        accelerator.save_state(f"{out}/step_{step}")


@layout("accelerate torch", ranks=2)
def accelerate_state_fsdp2(out):
    from accelerate import FullyShardedDataParallelPlugin

    as_if_accelerators()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", auto_wrap_policy="size_based_wrap", min_num_params=1
    )
    accelerator, _ = accelerate_parts(cpu=False, fsdp_plugin=plugin)
    for step in (1, 2):
        accelerator.save_state(f"{out}/step_{step}")


@layout("accelerate torch deepspeed", ranks=2)
def accelerate_state_deepspeed(out):
    from accelerate import DeepSpeedPlugin

    as_if_accelerators()
    plugin = DeepSpeedPlugin(
        hf_ds_config={
            "zero_optimization": {"stage": 2},
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 1,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
    )
    accelerator, _ = accelerate_parts(cpu=False, deepspeed_plugin=plugin)
    for step in (1, 2):
        accelerator.save_state(f"{out}/step_{step}")


def three_layers():
    import torch

    return plain(torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3))))


@layout("accelerate torch")
def accelerate_model_sharded(out):
    accelerator, net = accelerate_parts(three_layers())
    for step in (1, 2):
        accelerator.save_model(net, f"{out}/step-{step}", max_shard_size="2KB")


@layout("accelerate torch")
def accelerate_model_sharded_bin(out):
    accelerator, net = accelerate_parts(three_layers())
    for step in (1, 2):
        accelerator.save_model(net, f"{out}/step-{step}", max_shard_size="2KB", safe_serialization=False)


# ---- peft, diffusers, sentence-transformers, timm ------------------------------------------------------------


@layout("peft transformers torch")
def peft_adapter(out):
    import peft

    model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    for step in (1, 2):
        model.save_pretrained(f"{out}/step-{step}")


@layout("peft transformers torch")
def peft_two_adapters(out):
    import peft

    model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["v_proj"]))
    for step in (1, 2):
        model.save_pretrained(f"{out}/step-{step}")


def small_unet():
    from diffusers import UNet2DModel

    return plain(
        UNet2DModel(
            sample_size=8,
            in_channels=3,
            out_channels=3,
            layers_per_block=1,
            block_out_channels=(4, 4),
            down_block_types=("DownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "UpBlock2D"),
            norm_num_groups=2,
            add_attention=False,
        )
    )


@layout("diffusers torch")
def diffusers_pipeline(out):
    from diffusers import DDPMPipeline, DDPMScheduler

    for step in (1, 2):
        DDPMPipeline(small_unet(), DDPMScheduler()).save_pretrained(f"{out}/step-{step}")


@layout("diffusers torch")
def diffusers_sharded(out):
    for step in (1, 2):
        small_unet().save_pretrained(f"{out}/checkpoint-{step}/unet", max_shard_size="8KB")


@layout("diffusers peft torch")
def diffusers_lora(out):
    import torch
    from diffusers import StableDiffusionPipeline

    layers = {"to_q.lora_A.weight": torch.ones(2, 8), "to_q.lora_B.weight": torch.ones(8, 2)}
    for step in (1, 2):
        StableDiffusionPipeline.save_lora_weights(f"{out}/checkpoint-{step}", unet_lora_layers=layers)


@layout("sentence-transformers transformers torch")
def sentence_transformers_model(out):
    from sentence_transformers import SentenceTransformer, models

    with tempfile.TemporaryDirectory() as base:
        bert().bert.save_pretrained(base)
        tokenizer().save_pretrained(base)
        word = models.Transformer(base)
        model = SentenceTransformer(
            modules=[
                word,
                models.Pooling(word.get_word_embedding_dimension()),
                models.Dense(16, 4),
                models.Normalize(),
            ]
        )
        for step in (1, 2):
            model.save(f"{out}/checkpoint-{step}")


@layout("timm torch")
def timm_hub_folder(out):
    import timm
    from timm.models import save_for_hf

    model = timm.create_model("resnet10t", num_classes=2, block_args={})
    model = torch_trim(model)
    for step in (1, 2):
        save_for_hf(model, f"{out}/step-{step}")


def torch_trim(model):
    """Only a few tensors of a model that has no small variant."""
    state = model.state_dict()
    keep = {name: state[name][..., :1].clone() if state[name].dim() else state[name] for name in list(state)[:4]}
    model.state_dict = lambda *_args, **_named: keep
    return model


@layout("timm torch")
def timm_saver(out):
    import torch
    from timm.utils import CheckpointSaver

    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    saver = CheckpointSaver(net, optimizer, checkpoint_dir=out, recovery_dir=out, max_history=3)
    for epoch in range(3):
        saver.save_checkpoint(epoch, metric=float(epoch))


# ---- lightning -----------------------------------------------------------------------------------------------


def lightning_module():
    import lightning
    import torch

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = small_net()

        def training_step(self, batch, _index):
            return self.net(batch).sum()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    return Module()


def lightning_fit(out, **more):
    import lightning
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint

    saver = ModelCheckpoint(dirpath=out, every_n_train_steps=2, save_top_k=-1, **more.pop("saver", {}))
    trainer = lightning.Trainer(
        max_steps=4,
        callbacks=[saver],
        logger=False,
        enable_progress_bar=False,
        accelerator="cpu",
        enable_model_summary=False,
        **more,
    )
    trainer.fit(lightning_module(), torch.utils.data.DataLoader(torch.ones(16, 16), batch_size=2))


@layout("lightning torch")
def lightning_files(out):
    lightning_fit(out)


@layout("lightning torch")
def lightning_last(out):
    lightning_fit(out, saver={"save_last": True})


@layout("lightning torch", ranks=2)
def lightning_ddp(out):
    lightning_fit(out, strategy="ddp", devices=2)


@layout("lightning torch", ranks=2, source="lightning/pytorch/strategies/fsdp.py, save_checkpoint")
def lightning_fsdp_sharded(out):
    """The strategy wants CUDA; its save is torch's, and what is not sharded beside it."""
    import torch
    from torch.distributed.checkpoint import save

    torch.distributed.init_process_group("gloo")
    state = sharded_state()
    for step in (2, 4):
        place = f"{out}/epoch=0-step={step}.ckpt"
        save({"state_dict": state["model"], "optimizer_0": state["optim"]}, checkpoint_id=place)
        if not torch.distributed.get_rank():
            torch.save({"epoch": 0, "global_step": step, "pytorch-lightning_version": "2.6.6"}, f"{place}/meta.pt")


@layout("lightning torch deepspeed", source="lightning/pytorch/strategies/deepspeed.py, save_checkpoint")
def lightning_deepspeed(out):
    """The strategy wants CUDA; its save is one call of DeepSpeed's with the tag "checkpoint"."""
    engine = deepspeed_engine({"zero_optimization": {"stage": 2}})
    for epoch, step in ((0, 2), (0, 4)):
        engine.save_checkpoint(
            f"{out}/epoch={epoch}-step={step}.ckpt", client_state={"epoch": epoch}, tag="checkpoint"
        )


@layout("lightning torch")
def fabric_files(out):
    import lightning
    import torch

    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    net, optimizer = fabric.setup(small_net(), torch.optim.Adam(small_net().parameters()))
    for step in (10, 20):
        fabric.save(f"{out}/iter-{step:06d}-ckpt.pth", {"model": net, "optimizer": optimizer, "step": step})


# ---- torch ---------------------------------------------------------------------------------------------------


def net_and_optimizer():
    import torch

    net = small_net()
    optimizer = torch.optim.AdamW(net.parameters())
    train_step(net, optimizer)
    return net, optimizer


@layout("torch")
def torch_save_files(out):
    import torch

    net, optimizer = net_and_optimizer()
    for step in (10, 20):
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, f"{out}/checkpoint_{step}.pt")


@layout("torch")
def torch_save_folders(out):
    import torch

    net, optimizer = net_and_optimizer()
    for step in (10, 20):
        os.makedirs(f"{out}/step_{step}")
        torch.save(net.state_dict(), f"{out}/step_{step}/model.pt")
        torch.save(optimizer.state_dict(), f"{out}/step_{step}/optimizer.pt")
        torch.save({"step": step, "rng": torch.get_rng_state()}, f"{out}/step_{step}/train_state.pt")


@layout("torch")
def torch_save_old_format(out):
    import torch

    net, optimizer = net_and_optimizer()
    for step in (10, 20):
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, f"{out}/checkpoint_{step}.pth", _use_new_zipfile_serialization=False)


@layout("torch")
def torch_jit_and_export(out):
    import torch

    net = small_net()
    for step in (10, 20):
        os.makedirs(f"{out}/step_{step}")
        torch.jit.script(net).save(f"{out}/step_{step}/model.pt")
        torch.export.save(torch.export.export(net, (torch.ones(2, 16),)), f"{out}/step_{step}/model.pt2")


@layout("torch", ranks=2)
def torch_rank_files(out):
    """As verl and other trainers that leave each rank's part of FSDP in a file of its own."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    net, optimizer = net_and_optimizer()
    for step in (10, 20):
        os.makedirs(f"{out}/global_step_{step}/actor", exist_ok=True)
        place = f"{out}/global_step_{step}"
        torch.save(net.state_dict(), f"{place}/actor/model_world_size_2_rank_{rank}.pt")
        torch.save(optimizer.state_dict(), f"{place}/actor/optim_world_size_2_rank_{rank}.pt")
        torch.save({"rng": torch.get_rng_state()}, f"{place}/actor/extra_state_world_size_2_rank_{rank}.pt")
        if not rank:
            torch.save({"epoch": 1}, f"{place}/data.pt")
            with open(f"{out}/latest_checkpointed_iteration.txt", "w") as file:
                file.write(str(step))
        dist.barrier()


def sharded_state():
    import torch
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = small_net()
    fully_shard(net, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    optimizer = torch.optim.AdamW(net.parameters())
    train_step(net, optimizer)
    model, optim = get_state_dict(net, optimizer)
    return {"model": model, "optim": optim, "step": 3}


@layout("torch", ranks=2)
def dcp_sync(out):
    from torch.distributed.checkpoint import save

    state = sharded_state()
    for step in (10, 20):
        save(state, checkpoint_id=f"{out}/step-{step}")


@layout("torch", ranks=2)
def dcp_async(out):
    from torch.distributed.checkpoint import async_save

    state = sharded_state()
    for step in (10, 20):
        async_save(state, checkpoint_id=f"{out}/step-{step}").result()


@layout("torch", ranks=2)
def dcp_without_collectives(out):
    from torch.distributed.checkpoint import save

    state = sharded_state()
    for step in (10, 20):
        save(state, checkpoint_id=f"{out}/step-{step}", use_collectives=False)


@layout("torch")
def dcp_one_process(out):
    from torch.distributed.checkpoint import FileSystemWriter, save

    net, _ = net_and_optimizer()
    for step in (10, 20):
        save(
            {"model": net.state_dict()},
            no_dist=True,
            storage_writer=FileSystemWriter(f"{out}/step-{step}", single_file_per_rank=False, thread_count=2),
        )


@layout("torch", ranks=2)
def dcp_many_files(out):
    from torch.distributed.checkpoint import FileSystemWriter, save

    state = sharded_state()
    for step in (10, 20):
        save(state, storage_writer=FileSystemWriter(f"{out}/step-{step}", single_file_per_rank=False))


@layout("torch safetensors", ranks=2)
def dcp_safetensors_shards(out):
    from torch.distributed.checkpoint import HuggingFaceStorageWriter, save

    model = sharded_state()["model"]
    for step in (10, 20):
        save(model, storage_writer=HuggingFaceStorageWriter(f"{out}/step-{step}", save_distributed=True))


@layout("torch safetensors", ranks=2)
def dcp_safetensors_consolidated(out):
    from torch.distributed.checkpoint import HuggingFaceStorageWriter, save

    model = sharded_state()["model"]
    for step in (10, 20):
        writer = HuggingFaceStorageWriter(
            f"{out}/step-{step}",
            save_distributed=True,
            enable_consolidation=True,
            fqn_to_index_mapping={name: 1 + index % 2 for index, name in enumerate(model)},
        )
        save(model, storage_writer=writer)


@layout("torch safetensors")
def dcp_safetensors_one_process(out):
    from torch.distributed.checkpoint import HuggingFaceStorageWriter, save

    model = small_net().state_dict()
    for step in (10, 20):
        writer = HuggingFaceStorageWriter(
            f"{out}/step-{step}", fqn_to_index_mapping={name: 1 + index % 2 for index, name in enumerate(model)}
        )
        save(model, storage_writer=writer, no_dist=True)


@layout("safetensors torch")
def safetensors_files(out):
    from safetensors.torch import save_file

    for step in (10, 20):
        save_file(small_net().state_dict(), f"{out}/step_{step}.safetensors")


# ---- deepspeed -----------------------------------------------------------------------------------------------


def deepspeed_engine(config, net=None):
    import deepspeed
    import torch

    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    os.environ.update({name: os.environ.get(name, value) for name, value in alone.items()})
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
    } | config
    net = net or small_net()
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=settings)
    loss = engine(torch.ones(2, 16, dtype=next(net.parameters()).dtype)).sum()
    engine.backward(loss)
    engine.step()
    return engine


def deepspeed_saves(out, config):
    engine = deepspeed_engine(config)
    for step in (1, 2):
        engine.save_checkpoint(out, tag=f"global_step{step}")


@layout("deepspeed torch", ranks=2)
def deepspeed_no_zero(out):
    deepspeed_saves(out, {})


@layout("deepspeed torch", ranks=2)
def deepspeed_zero1(out):
    deepspeed_saves(out, {"zero_optimization": {"stage": 1}})


@layout("deepspeed torch", ranks=2)
def deepspeed_zero2(out):
    deepspeed_saves(out, {"zero_optimization": {"stage": 2}})


@layout("deepspeed torch", ranks=2)
def deepspeed_zero2_bf16(out):
    deepspeed_saves(out, {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}})


@layout("deepspeed torch", ranks=2)
def deepspeed_zero3(out):
    deepspeed_saves(out, {"zero_optimization": {"stage": 3}})


@layout("deepspeed torch", ranks=2)
def deepspeed_pipeline(out):
    import deepspeed
    import torch
    from deepspeed.pipe import LayerSpec, PipelineModule

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    net = PipelineModule(
        [LayerSpec(torch.nn.Linear, 16, 16), LayerSpec(torch.nn.ReLU), LayerSpec(torch.nn.Linear, 16, 4)],
        num_stages=2,
        loss_fn=lambda scores, _labels: scores.sum(),
        partition_method="uniform",
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(
        model=net, model_parameters=[each for each in net.parameters() if each.requires_grad], config=config
    )
    for step in (1, 2):
        engine.save_checkpoint(out, tag=f"global_step{step}")


@layout("deepspeed torch", ranks=2)
def deepspeed_zero3_16bit_model(out):
    engine = deepspeed_engine(
        {
            "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
            "bf16": {"enabled": True},
        }
    )
    for step in (1, 2):
        engine.save_16bit_model(f"{out}/step-{step}")


# ---- composer, nemo, torchtitan, megatron --------------------------------------------------------------------


def composer_trainer(out, **more):
    import torch
    from composer import Trainer
    from composer.models import ComposerClassifier

    class Pairs(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.ones(16), index % 4

    return Trainer(
        model=ComposerClassifier(small_net(), num_classes=4),
        max_duration="4ba",
        save_folder=out,
        save_interval="2ba",
        train_dataloader=torch.utils.data.DataLoader(Pairs(), batch_size=2),
        device="cpu",
        progress_bar=False,
        **more,
    )


@layout("mosaicml torch")
def composer_files(out):
    composer_trainer(out).fit()


@layout("mosaicml torch", ranks=2)
def composer_sharded(out):
    composer_trainer(
        out, parallelism_config={"fsdp": {"state_dict_type": "sharded", "sharding_strategy": "FULL_SHARD"}}
    ).fit()


@layout("megatron-core torch", ranks=2)
def megatron_dist_checkpointing(out):
    import torch
    from megatron.core import dist_checkpointing, parallel_state

    torch.cuda.synchronize = lambda *_args: None
    torch.cuda.current_device = lambda: "cpu"
    parallel_state.initialize_model_parallel()
    rank = torch.distributed.get_rank()
    part = torch.ones(4, 8) * rank
    state = {
        "model": {
            "weight": dist_checkpointing.ShardedTensor.from_rank_offsets("weight", part, (0, rank, 2)),
            "bias": dist_checkpointing.ShardedTensor.from_rank_offsets("bias", torch.ones(8), replica_id=rank),
        },
        "iteration": 10,
        "args": {"seq_length": 32},
    }
    for step in (10, 20):
        place = f"{out}/iter_{step:07d}"
        if not rank:
            os.makedirs(place)
        torch.distributed.barrier()
        dist_checkpointing.save(state, place)
        if not rank:
            with open(f"{out}/latest_checkpointed_iteration.txt", "w") as file:
                file.write(str(step))
        torch.distributed.barrier()


@layout(
    "megatron-core torch", ranks=2, source="NVIDIA NeMo 2.x, nemo/lightning/pytorch/callbacks/model_checkpoint.py"
)
def nemo2_folders(out):
    """megatron-core writes the weights, as in NeMo; the context beside them is as NeMo's io module leaves it."""
    import torch

    with tempfile.TemporaryDirectory() as _:
        megatron_dist_checkpointing(f"{out}/made")
    if torch.distributed.get_rank():
        return
    for step in (10, 20):
        place = f"{out}/nemo--val_loss=2.30-step={step}-consumed_samples={step * 8}.0"
        os.makedirs(f"{place}/context")
        shutil.move(f"{out}/made/iter_{step:07d}", f"{place}/weights")
        with open(f"{place}/context/io.json", "w") as file:
            json.dump({"objects": {"a": {"type": "nemo.lightning.io.artifact"}}, "root": "a"}, file)
        with open(f"{place}/context/model.yaml", "w") as file:
            file.write("_target_: nemo.collections.llm.gpt.model.llama.LlamaModel\nconfig:\n  hidden_size: 16\n")
    shutil.rmtree(f"{out}/made")


@layout("megatron-core torch", source="NVIDIA Megatron-LM, megatron/training/checkpointing.py, format torch")
def megatron_legacy(out):
    import argparse as arguments

    import torch

    for step in (10, 20):
        for rank in range(2):
            place = f"{out}/iter_{step:07d}/mp_rank_{rank:02d}"
            os.makedirs(place)
            net, optimizer = net_and_optimizer()
            args = arguments.Namespace(tensor_model_parallel_size=2, pipeline_model_parallel_size=1)
            torch.save(
                {
                    "args": args,
                    "checkpoint_version": 3.0,
                    "iteration": step,
                    "model": net.state_dict(),
                    "rng_state": [],
                },
                f"{place}/model_optim_rng.pt",
            )
            torch.save({0: optimizer.state_dict()}, f"{place}/distrib_optim.pt")
    with open(f"{out}/latest_checkpointed_iteration.txt", "w") as file:
        file.write("20")


class Kept:
    """What has a state."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


@layout("torchtitan torch", ranks=2)
def torchtitan_folders(out):
    import torch
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torchtitan.components.checkpointer.dcp import CheckpointManager

    net = small_net()
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(net.parameters())
    train_step(net, optimizer)
    manager = CheckpointManager(
        CheckpointManager.Config(enable=True, folder="checkpoint", interval=10, last_save_model_only=False),
        dataloader=Kept({"position": 3}),
        model_parts=[net],
        lr_schedulers=Kept({"last_epoch": 1}),
        optimizers=Kept(get_optimizer_state_dict(net, optimizer)),
        states={"train_state": Kept({"step": 10})},
        sd_adapter=None,
        base_folder=out,
    )
    for step in (10, 20):
        manager.save(step)
    manager.close()


@layout("torch_checkpointing torch", ranks=2)
def torch_checkpointing_folders(out):
    import torch
    from torch_checkpointing import CheckpointManager, SyncCheckpointSaverConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    rank = torch.distributed.get_rank()
    net, optimizer = net_and_optimizer()
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    manager = CheckpointManager.Config(save=SyncCheckpointSaverConfig(), storage_config=storage).build()
    for step in (10, 20):
        manager.save(
            f"{out}/step-{step}", {"model": net.state_dict(), "optim": optimizer.state_dict(), "rank": rank}
        )
    manager.close()


@layout("fairscale torch")
def fairscale_oss(out):
    import torch
    from fairscale.optim.oss import OSS

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    net = small_net()
    optimizer = OSS(params=net.parameters(), optim=torch.optim.SGD, lr=0.1, momentum=0.9)
    train_step(net, optimizer)
    for step in (10, 20):
        optimizer.consolidate_state_dict(0)
        torch.save({"model": net.state_dict(), "optim": optimizer.state_dict()}, f"{out}/checkpoint_1_{step}.pt")
        shutil.copy(f"{out}/checkpoint_1_{step}.pt", f"{out}/checkpoint_last.pt")


@layout("mmengine torch")
def mmengine_files(out):
    import torch
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    class Model(BaseModel):
        def __init__(self):
            super().__init__()
            self.net = small_net()

        def forward(self, data, mode):
            return {"loss": self.net(data).sum()} if mode == "loss" else self.net(data)

        def train_step(self, data, optim_wrapper):
            loss = self(torch.stack(list(data["data"])), "loss")["loss"]
            optim_wrapper.update_params(loss)
            return {"loss": loss.detach()}

    runner = Runner(
        Model(),
        work_dir=out,
        train_dataloader={
            "dataset": [{"data": torch.ones(16)}] * 8,
            "batch_size": 2,
            "sampler": {"type": "DefaultSampler", "shuffle": False},
        },
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1}},
        train_cfg={"by_epoch": True, "max_epochs": 2},
        default_hooks={"checkpoint": {"type": "CheckpointHook", "interval": 1}},
        log_level="ERROR",
    )
    runner.train()
    for name in os.listdir(out):
        if os.path.isdir(f"{out}/{name}"):
            shutil.rmtree(f"{out}/{name}")


@layout("pytorch-ignite torch")
def ignite_files(out):
    from ignite.engine import Engine, Events
    from ignite.handlers import Checkpoint, DiskSaver, global_step_from_engine

    net, optimizer = net_and_optimizer()
    trainer = Engine(lambda _engine, _batch: train_step(net, optimizer))
    saver = Checkpoint(
        {"model": net, "optimizer": optimizer, "trainer": trainer},
        DiskSaver(out, require_empty=False),
        n_saved=2,
        global_step_transform=global_step_from_engine(trainer),
    )
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=2), saver)
    trainer.run(range(4), max_epochs=1)


@layout("ray torch")
def ray_train(out):
    import ray.train
    import torch
    from ray.train import Checkpoint, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    def loop():
        net, _ = net_and_optimizer()
        for step in range(2):
            with tempfile.TemporaryDirectory() as place:
                torch.save(net.state_dict(), f"{place}/model.pt")
                ray.train.report({"step": step}, checkpoint=Checkpoint.from_directory(place))

    TorchTrainer(
        loop, scaling_config=ScalingConfig(num_workers=1), run_config=RunConfig(name="run", storage_path=out)
    ).fit()


# ---- jax, keras ----------------------------------------------------------------------------------------------


def jax_state():
    import jax
    import jax.numpy as jnp

    return {
        "params": {
            "w": jax.random.normal(jax.random.key(0), (64, 16)),
            "b": jnp.arange(8.0),
            "zero": jnp.zeros((32, 32)),
        },
        "step": 3,
    }


@layout("orbax-checkpoint jax tensorstore")
def orbax_manager(out):
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(os.path.abspath(out)) as manager:
        for step in (10, 20):
            manager.save(step, args=ocp.args.StandardSave(jax_state()))


@layout("orbax-checkpoint jax tensorstore")
def orbax_items(out):
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(os.path.abspath(out)) as manager:
        for step in (10, 20):
            state = ocp.args.StandardSave(jax_state())
            manager.save(step, args=ocp.args.Composite(state=state, data=ocp.args.JsonSave({"epoch": 1})))


@layout("orbax-checkpoint jax tensorstore")
def orbax_zarr3(out):
    import orbax.checkpoint as ocp

    saver = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True))
    for step in (10, 20):
        saver.save(os.path.abspath(f"{out}/step_{step}"), jax_state())


@layout("orbax-checkpoint jax tensorstore")
def orbax_zarr_folders(out):
    import orbax.checkpoint as ocp

    saver = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False))
    for step in (10, 20):
        saver.save(os.path.abspath(f"{out}/step_{step}"), jax_state())


@layout("flax jax")
def flax_msgpack(out):
    from flax import serialization

    for step in (10, 20):
        os.makedirs(f"{out}/step-{step}")
        with open(f"{out}/step-{step}/flax_model.msgpack", "wb") as file:
            file.write(serialization.to_bytes(jax_state()))
        with open(f"{out}/step-{step}/config.json", "w") as file:
            json.dump({"model_type": "llama"}, file)


@layout("flax jax")
def flax_checkpoint_files(out):
    from flax.training import checkpoints

    checkpoints_config(False)
    for step in (10, 20):
        checkpoints.save_checkpoint(os.path.abspath(out), jax_state(), step, keep=3)


def checkpoints_config(use_orbax):
    from flax import config

    config.update("flax_use_orbax_checkpointing", use_orbax)


@layout("safetensors jax")
def safetensors_flax(out):
    import jax.numpy as jnp
    from safetensors.flax import save_file

    for step in (10, 20):
        save_file({"w": jnp.ones((8, 8)), "b": jnp.ones(3)}, f"{out}/model-step{step}.safetensors")


def keras_model():
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


@layout("keras h5py jax")
def keras_archives(out):
    for step in (1, 2):
        keras_model().save(f"{out}/ckpt-{step}.keras")


@layout("keras h5py jax")
def keras_weights(out):
    for step in (1, 2):
        keras_model().save_weights(f"{out}/epoch_{step}.weights.h5")


@layout("numpy")
def numpy_archives(out):
    import numpy

    for step in (10, 20):
        os.makedirs(f"{out}/step_{step}")
        numpy.savez(f"{out}/step_{step}/weights.npz", w=numpy.ones((8, 8)), b=numpy.zeros(3))
        numpy.save(f"{out}/step_{step}/moments.npy", numpy.ones((4, 4)))


@layout("gguf numpy")
def gguf_files(out):
    import gguf
    import numpy

    for step in (10, 20):
        writer = gguf.GGUFWriter(f"{out}/model-step{step}.gguf", "llama")
        writer.add_block_count(1)
        writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "d"])
        writer.add_tensor("w", numpy.ones((4, 32), dtype=numpy.float32))
        writer.add_tensor("b", numpy.ones(7, dtype=numpy.float16))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


# ---- running and keeping -------------------------------------------------------------------------------------


def run(name, out):
    func, _, ranks, _ = LAYOUTS[name]
    if ranks > 1 and "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        environ = os.environ | {
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "ACCELERATE_USE_CPU": "true",
        }
        subprocess.run([*command, os.path.abspath(__file__), "--one", name, out], check=True, env=environ)
        return
    if ranks > 1 and not name.startswith(("transformers_trainer", "accelerate", "lightning", "composer")):
        import torch

        torch.distributed.init_process_group("gloo")
    seed()
    func(out)


def keep(name, out, to):
    """All files, in the order of their times, as one small archive."""
    names = [os.path.join(folder, each) for folder, _, files in os.walk(out) for each in files]
    with tarfile.open(f"{to}/{name}.tar.xz", "w:xz", preset=9) as archive:
        for path in sorted(names, key=lambda each: (os.stat(each).st_mtime_ns, each)):
            with open(path, "rb") as file:  # through links
                data = file.read()
            info = tarfile.TarInfo(os.path.relpath(path, out))
            info.size, info.mtime = len(data), int(os.stat(path).st_mtime)
            archive.addfile(info, io.BytesIO(data))


def note(name, to):
    """One line of made.toml."""
    _, packages, ranks, source = LAYOUTS[name]
    versions = " ".join(f"{each} {importlib.metadata.version(each)}" for each in packages)
    path = f"{to}/made.toml"
    lines = {}
    if os.path.exists(path):
        with open(path) as file:
            lines = dict(line.rstrip().split(" = ", 1) for line in file if " = " in line)
    how = f', source = "{source}"' if source else ""
    lines[name] = f'{{by = "{versions}", ranks = {ranks}{how}}}'
    with open(path, "w") as file:
        file.write(
            "# Written by make.py: what each layout was made by. With a source: partly by hand, as it says.\n"
        )
        file.writelines(f"{each} = {lines[each]}\n" for each in sorted(lines))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--to", default=HERE)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.list:
        print("\n".join(LAYOUTS))
        return
    if args.one:
        run(*args.one)
        return
    for name in args.names:
        with tempfile.TemporaryDirectory() as out:
            place = f"{out}/run"
            os.mkdir(place)
            subprocess.run([sys.executable, os.path.abspath(__file__), "--one", name, place], check=True)
            keep(name, place, args.to)
        note(name, args.to)
        print(f"{name}: {os.path.getsize(f'{args.to}/{name}.tar.xz')} bytes", flush=True)


if __name__ == "__main__":
    main()
