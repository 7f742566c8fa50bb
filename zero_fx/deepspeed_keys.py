"""The keys of DeepSpeed's configuration, as of 0.19, and what becomes here of those that from_deepspeed does not map.

Names are facts of DeepSpeed's documentation (deepspeed.ai/docs/config-json) and of its configuration models.
"""

from __future__ import annotations

ZERO = (
    "stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce",
    "allgather_partitions", "allgather_bucket_size", "overlap_comm", "load_from_fp32_weights", "elastic_checkpoint",
    "offload_param", "offload_optimizer", "sub_group_size", "cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory",
    "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_model_persistence_threshold",
    "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save", "stage3_module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params",
    "stage3_allgather_sequential", "ignore_unused_parameters", "legacy_stage1", "round_robin_gradients",
    "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients",
    "zeropp_loco_param", "mics_shard_size", "mics_hierarchical_params_gather", "memory_efficient_linear",
    "pipeline_loading_checkpoint", "override_module_apply", "log_trace_cache_warnings", "enable_sanity_checks",
    "save_muon_momentum_buffer_in_memory", "leaf_module", "zenflow",
)  # fmt: skip
FP16 = (
    "enabled", "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis",
    "min_loss_scale", "fp16_master_weights_and_grads",
)  # fmt: skip
BF16 = ("enabled", "immediate_grad_update", "check_grad_overflow", "bf16_master_weights_and_grads", "bf16_optimizer_states")

# Top-level keys; of objects that are looked into, their keys.
KNOWN: dict[str, tuple[str, ...] | None] = {"zero_optimization": ZERO, "fp16": FP16, "bf16": BF16, "bfloat16": BF16} | dict.fromkeys(
    (
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "steps_per_print",
        "communication_data_type", "optimizer", "scheduler", "torch_autocast", "amp", "data_types",
        "seq_parallel_communication_data_type", "prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op",
        "sparse_gradients", "disable_allgather", "managed_gradient_accumulation", "wall_clock_breakdown", "memory_breakdown",
        "dump_state", "dataloader_drop_last", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "graph_harvesting",
        "activation_checkpointing", "flops_profiler", "comms_logger", "autotuning", "aio", "tensorboard", "wandb", "csv_monitor",
        "comet", "elasticity", "pipeline", "tensor_parallel", "sequence_parallel_size", "expert_parallel", "hybrid_engine",
        "checkpoint", "nebula", "datastates_ckpt", "compile", "compression_training", "data_efficiency", "curriculum_learning",
        "sparse_attention", "eigenvalue", "progressive_layer_drop", "use_data_before_expert_parallelism",
    )
)  # fmt: skip

COMPILED = "the compiler decides it, by its cost model"
LOOP = "it is of your training loop"
IGNORED = {f"zero_optimization.{name}": reason for name, reason in {
    "contiguous_gradients": "gradients are reduced from the graph's own buffers", "reduce_scatter": COMPILED,
    "use_multi_rank_bucket_allreduce": COMPILED, "allgather_partitions": COMPILED,
    "load_from_fp32_weights": "masters are the model's own float32 parameters", "elastic_checkpoint": "every checkpoint is",
    "sub_group_size": "the optimizer steps on shards as torch.optim does", "stage3_model_persistence_threshold": COMPILED,
    "stage3_max_live_parameters": "memory_budget bounds what is gathered", "stage3_max_reuse_distance": COMPILED,
    "stage3_gather_16bit_weights_on_model_save": "zero_fx.full_state_dict gathers",
    "stage3_gather_fp16_weights_on_model_save": "zero_fx.full_state_dict gathers",
    "stage3_module_granularity_threshold": COMPILED, "stage3_use_all_reduce_for_fetch_params": COMPILED,
    "stage3_allgather_sequential": COMPILED, "ignore_unused_parameters": "unused parameters need no switch",
    "round_robin_gradients": COMPILED, "cpu_offload_use_pin_memory": "nothing is offloaded", "memory_efficient_linear": COMPILED,
    "pipeline_loading_checkpoint": "each rank reads only its own part", "override_module_apply": "the model is built as it is",
    "log_trace_cache_warnings": "there is no trace that could become invalid", "enable_sanity_checks": "ranks always compare",
    "leaf_module": "graphs are captured whole",
}.items()} | {f"{group}.{name}": reason for group in ("fp16", "bf16", "bfloat16") for name, reason in {
    "auto_cast": "forward's arguments are always cast", "hysteresis": "zero_fx.GradScaler lowers the scale at each overflow",
    "consecutive_hysteresis": "zero_fx.GradScaler lowers the scale at each overflow",
    "min_loss_scale": "torch's GradScaler has no lowest scale", "immediate_grad_update": COMPILED,
    "check_grad_overflow": "bfloat16 overflows where float32 does; use clip_grad_norm_(error_if_nonfinite=True)",
}.items()} | {name: LOOP for name in ("optimizer", "scheduler", "dataloader_drop_last", "managed_gradient_accumulation")} | {
    "zero_allow_untested_optimizer": "any optimizer that DTensor can run is allowed",
    "zero_force_ds_cpu_optimizer": "there is no optimizer of ours", "disable_allgather": COMPILED, "graph_harvesting": COMPILED,
    "compile": "everything is compiled", "dump_state": "see ZERO_FX_DEBUG", "autotuning": "see zero_fx.plan",
    "wall_clock_breakdown": "see model.report()", "memory_breakdown": "see model.report()", "flops_profiler": "see model.report()",
    "comms_logger": "see model.report()", "aio": "nothing goes to disk but checkpoints", "tensorboard": "see zero-fx train --log-dir",
    "wandb": LOOP, "csv_monitor": LOOP, "comet": LOOP, "checkpoint": "see zero_fx.save_checkpoint",
    "nebula": "see zero_fx.async_save_checkpoint", "datastates_ckpt": "see zero_fx.async_save_checkpoint",
    "seq_parallel_communication_data_type": "there is no sequence parallelism here",
    "use_data_before_expert_parallelism": "there is no expert parallelism here",
}  # fmt: skip

OFF = (None, False, 0, "none", "None", "auto", [], {})  # values with which a feature is not used
NOT_YET = "zero_fx does not offload yet; it would not fit as you planned. Take it out to train without"
OTHER = "it changes what is trained, and zero_fx does not do it. Take it out to train without"
REFUSED = {f"zero_optimization.{name}": reason for name, reason in {
    "offload_param": NOT_YET, "offload_optimizer": NOT_YET, "cpu_offload": NOT_YET, "cpu_offload_param": NOT_YET,
    "zero_hpz_partition_size": OTHER, "zero_quantized_weights": OTHER, "zero_quantized_nontrainable_weights": OTHER,
    "zero_quantized_gradients": OTHER, "zeropp_loco_param": OTHER, "mics_shard_size": OTHER,
    "mics_hierarchical_params_gather": OTHER, "zenflow": OTHER, "legacy_stage1": "it is gone in DeepSpeed too",
    "save_muon_momentum_buffer_in_memory": OTHER,
}.items()} | {
    "fp16.fp16_master_weights_and_grads": OTHER, "bf16.bf16_master_weights_and_grads": OTHER, "bf16.bf16_optimizer_states": OTHER,
    "bfloat16": "write bf16, the key's present name", "amp": "use fp16 or bf16",
    "torch_autocast": "use torch.autocast around forward, or bf16", "data_types": "float32 accumulates, and nothing else",
    "prescale_gradients": OTHER, "gradient_predivide_factor": OTHER, "sparse_gradients": OTHER,
    "activation_checkpointing": "use torch.utils.checkpoint in the model, or zero_fx's memory_budget",
    "elasticity": OTHER, "pipeline": OTHER, "tensor_parallel": OTHER, "sequence_parallel_size": OTHER, "expert_parallel": OTHER,
    "hybrid_engine": OTHER, "compression_training": OTHER, "data_efficiency": OTHER, "curriculum_learning": OTHER,
    "sparse_attention": OTHER, "eigenvalue": OTHER, "progressive_layer_drop": OTHER,
    "gradient_allreduce_op": "gradients are averaged",
}  # fmt: skip
OFF_BY_KEY = {  # and of some keys, others
    "gradient_allreduce_op": ("mean",), "gradient_predivide_factor": (1,), "sequence_parallel_size": (1,),
    "zero_optimization.zero_hpz_partition_size": (1,), "zero_optimization.mics_shard_size": (-1,),
}  # fmt: skip
