"""Names that the published code, Lightning, Hugging Face's Trainer, timm and nanoGPT have for keys.

They are for "did you mean ...?" in a message. Only names in `aliases` are read on a command line.
"""

from utils.mistakes import INSTEAD, OTHER_NAMES

# Only the keys that a program has are suggested, so a name may stand for keys of several programs.
OTHER_NAMES |= {
    "lr": "learning_rate base_lr max_lr peak_lr init_lr",
    "lr_min_ratio": "min_lr lr_min eta_min min_lr_ratio min_lr_rate final_lr",
    "lr_warmup_steps": "warmup_steps num_warmup_steps warmup warmup_iters lr_warmup warmup_ratio",
    "beta1": "betas adam_beta1 adam_betas b1",
    "beta2": "betas adam_beta2 adam_betas b2",
    "weight_decay": "wd decay l2 weightdecay",
    "puzzle_emb_lr": "puzzle_lr emb_lr embedding_lr",
    "grad_clip": "gradient_clip_val max_grad_norm clip clip_grad clip_norm clip_grad_norm grad_norm_clip "
    "gradient_clipping",
    "ema": "use_ema",
    "ema_rate": "ema_decay ema_beta ema_momentum ema_mu ema_alpha",
    "batch_size": "global_batch_size bs",
    "global_batch_size": "bs train_batch_size per_device_train_batch_size micro_batch_size",
    "grad_accumulation": "accumulate_grad_batches gradient_accumulation_steps grad_accum grad_accum_steps",
    "epochs": "max_epochs num_epochs n_epochs num_train_epochs",
    "max_steps": "steps max_iters num_iters total_steps train_steps num_train_steps iterations num_iterations",
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
    "device": "accelerator cuda gpu gpus use_gpu no_cuda use_cpu",
    "compile": "torch_compile use_compile",
    "profile.enabled": "profiler",
    "wandb.mode": "use_wandb wandb_log wandb_mode report_to offline",
    "wandb.tags": "wandb_tags tags",
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
    "arch.halt_max_steps": "max_segments n_sup N_sup num_segments loops",
    "arch.forward_dtype": "dtype precision bf16 fp16 amp mixed_precision",
    "arch.loss.loss_type": "loss criterion loss_fn",
    "dist.backend": "dist_backend ddp_backend backend",
}

# Keys that mean nothing here, and what to use instead.
INSTEAD |= {
    "grad_accum_steps": "give global_batch_size the size of the sum, and grad_accumulation=N to compute it in N parts",
    "load_strict": "weights always have to fit; puzzle_table=keep, mean or zero is for other puzzle rows",
    "load_optimizer_state": "init_from takes weights alone, and resume=<run> goes on with the optimizers' state",
    "use_muon": "on a command line it means optim=muon_urm; in YAML write - override /optim: muon_urm below defaults:",
    "loop_deltas": "evaluate with another number of segments, such as num_steps=24",
    "arch.profile": "write profile=true without arch",
    "arch.rms_norm_eps": "it is always 1e-5, the published default; leave it out",
    **dict.fromkeys(
        ("target_q_update_every", "arch.loop_deltas", "arch.attn_dropout", "arch.mlp_dropout"),
        "it has no effect on URM in its own code; leave it out",
    ),
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


def aliases(**of_program: str) -> dict[str, str]:
    """Return {name: key} of a program, with the names of URM's published commands."""
    return {
        "arch.loops": "arch.halt_max_steps",
        "use_muon=true": "optim=muon_urm",
        "use_muon=false": "",
        **of_program,
    }
