"""Names that other programs have for our keys.

_NAMES are for "did you mean ...?" in a message. They come from the published HRM, TRM and URM code,
PyTorch, PyTorch Lightning, Hugging Face's Trainer, timm and nanoGPT. No key is read under such a
name. _INSTEAD is for keys of other programs that have no counterpart.

Names of URM's published commands, and of keys of our own programs, are read on a command line:
see `aliases`.
"""

from utils.mistakes import INSTEAD, OTHER_NAMES

# Only the keys that a program has are suggested, so a name may stand for keys of several programs.
_NAMES = {
    "lr": "learning_rate base_lr max_lr peak_lr init_lr",
    "lr_min_ratio": "min_lr lr_min eta_min min_lr_ratio min_lr_rate final_lr",
    "lr_warmup_steps": "warmup_steps num_warmup_steps warmup warmup_iters lr_warmup warmup_ratio",
    "beta1": "betas adam_beta1 adam_betas b1",
    "beta2": "betas adam_beta2 adam_betas b2",
    "weight_decay": "wd decay l2 weightdecay",
    "puzzle_emb_lr": "puzzle_lr emb_lr embedding_lr",
    "puzzle_emb_weight_decay": "puzzle_wd emb_wd puzzle_emb_wd",
    "grad_clip": "gradient_clip_val max_grad_norm clip clip_grad clip_norm clip_grad_norm grad_norm_clip "
    "gradient_clipping",
    "ema": "use_ema",
    "ema_rate": "ema_decay ema_beta ema_momentum ema_mu ema_alpha",
    "batch_size": "global_batch_size bs",
    "global_batch_size": "bs train_batch_size per_device_train_batch_size micro_batch_size",
    "grad_accumulation": "accumulate_grad_batches gradient_accumulation_steps grad_accum grad_accum_steps",
    "epochs": "max_epochs num_epochs n_epochs num_train_epochs",
    "max_steps": "steps max_iters num_iters total_steps train_steps num_train_steps iterations num_iterations",
    "num_steps": "steps halt_max_steps max_steps",
    "seed": "seed_everything random_seed manual_seed",
    "eval_interval": "check_val_every_n_epoch eval_every_n_epochs",
    "eval_every_n_steps": "eval_every eval_steps val_check_interval eval_freq",
    "eval_max_examples": "limit_val_batches max_eval_samples eval_iters",
    "max_examples": "limit limit_test_batches num_examples eval_max_examples",
    "early_stop_patience": "patience early_stopping early_stopping_patience",
    "best_metric": "monitor metric_for_best_model",
    "best_mode": "greater_is_better",
    "log_interval": "log_every log_every_n_steps logging_steps print_freq",
    "checkpoint_every_n_steps": "save_steps save_every save_interval checkpoint_interval every_n_train_steps",
    "keep_last_k": "save_total_limit save_top_k keep_last",
    "checkpoint_path": "output_dir out_dir save_dir log_dir ckpt_dir checkpoint_dir default_root_dir out output",
    "checkpoint": "run ckpt ckpt_path model_path checkpoint_path resume load_checkpoint weights init_from",
    "resume": "ckpt_path checkpoint resume_from resume_from_checkpoint restore continue_from run ckpt",
    "init_from": "pretrained load_from pretrained_model_name_or_path checkpoint weights",
    "project_name": "wandb_project project wandb.project",
    "run_name": "name exp_name experiment_name wandb_run_name wandb.name wandb.run_name",
    "data_path": "dataset data data_dir dataset_path dataset_dir dataset_name train_data",
    "out": "output output_dir out_dir save_dir results",
    "save_outputs": "eval_save_outputs",
    "tta": "votes num_votes ensemble test_time_augmentation",
    "puzzle": "question board sudoku grid",
    "csv": "file input",
    "device": "accelerator cuda gpu gpus use_gpu no_cuda use_cpu",
    "compile": "torch_compile use_compile",
    "deterministic": "use_deterministic_algorithms cudnn_deterministic",
    "tensorboard": "use_tensorboard",
    "profile.enabled": "profiler",
    "wandb.mode": "use_wandb wandb_log wandb_mode report_to offline",
    "wandb.group": "wandb_group",
    "wandb.tags": "wandb_tags tags",
    "wandb.entity": "wandb_entity entity",
    "arch": "model architecture network model_name",
    "optim": "optimizer opt optim_name",
    "parallel": "strategy distributed",
    "experiment": "config config_name recipe preset",
    "arch.hidden_size": "n_embd d_model dim hidden_dim embed_dim emb_dim width model_dim hidden",
    "arch.num_heads": "n_head n_heads nhead num_attention_heads attention_heads heads",
    "arch.L_layers": "n_layer n_layers num_layers num_hidden_layers layers depth",
    "arch.H_layers": "n_layer n_layers num_layers num_hidden_layers layers depth",
    "arch.activation_checkpointing": "gradient_checkpointing use_gradient_checkpointing checkpoint_activations "
    "activation_checkpoint",
    "arch.expansion": "mlp_ratio ffn_mult",
    "arch.halt_max_steps": "max_segments n_sup N_sup num_segments loops",
    "arch.forward_dtype": "dtype precision bf16 fp16 amp mixed_precision",
    "arch.loss.loss_type": "loss criterion loss_fn",
    "dist.backend": "dist_backend ddp_backend backend",
    "dist.num_threads": "num_threads threads",
}

# Keys that mean nothing here, and what to use instead.
_INSTEAD = {
    "grad_accum_steps": "URM's code sums the gradients of so many batches before an update; give global_batch_size the "
    "size of that sum, and grad_accumulation=N to compute it in N parts",
    "target_q_update_every": "it has no effect on URM in its own code; leave it out, or give "
    "arch.no_ACT_continue=false to learn the value of going on",
    "loop_deltas": "evaluate the run with another number of segments instead, such as python evaluate.py "
    "checkpoint=<run> num_steps=24",
    "load_strict": "weights always have to fit; leave it out, and give puzzle_table=keep, mean or zero if the puzzle "
    "rows differ",
    "load_optimizer_state": "init_from takes weights alone, and resume=<run> goes on with the optimizers' state; leave "
    "it out",
    "use_muon": "on a command line it means optim=muon_urm; in YAML write - override /optim: muon_urm below defaults:",
    "arch.loop_deltas": "URM's model does not read it; leave it out, and evaluate with another num_steps",
    "arch.profile": "write profile=true without arch",
    "arch.attn_dropout": "URM's model does not read it; leave it out, and regularize with weight_decay",
    "arch.mlp_dropout": "URM's model does not read it; leave it out, and regularize with weight_decay",
    "arch.rms_norm_eps": "it is always 1e-5, the published default; leave it out",
    **dict.fromkeys(("vocab_size", "padded_vocab_size"), "the tokens of the data decide it; leave it out"),
    **dict.fromkeys(
        ("seq_len", "seq_length", "max_seq_length", "max_seq_len", "max_length", "block_size", "context_length"),
        "the data decide it; build the dataset with another length",
    ),
    **dict.fromkeys(
        ("world_size", "rank", "local_rank", "nproc_per_node", "num_gpus", "num_nodes"),
        "the launcher says it, as in torchrun --nproc-per-node 8 pretrain.py; leave it out",
    ),
    "batch_size": "global_batch_size is that of training, and eval_batch_size that of evaluation",
    "no_nccl": "write dist.backend=gloo",
    **dict.fromkeys(("multirun", "m"), "sweep.py starts several trainings, and this is one"),
    "sweep": "sweep.py takes it, and starts several trainings",
    "config_path": "write --config-dir DIR",
}

OTHER_NAMES.update(_NAMES)
INSTEAD.update(_INSTEAD)


def aliases(**of_program: str) -> dict[str, str]:
    """Return the other names of keys that a program reads.

    Args:
        of_program: {name: key}, beside the names of URM's published commands.
    """
    return {
        "arch.loops": "arch.halt_max_steps",
        "use_muon=true": "optim=muon_urm",
        "use_muon=false": "",
        **of_program,
    }
