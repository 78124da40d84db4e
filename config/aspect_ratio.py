# The paper's 20-40M models on text (Table 2, right): n token layers and one token in n bytes, at
# about equal FLOPs. This is n = 4. For n = 2 add
#   --n_mid_layers=2 --downsample_rate_target=1/2 --out_dir=out-aspect-ratio-2
# and for n = 6 the same with 6. Data:
#   python prepare.py --dataset=fineweb --max_bytes=6.2e9
#   torchrun --standalone --nproc_per_node=4 train.py config/aspect_ratio.py
data = "data/fineweb"
out_dir = "out-aspect-ratio"
seq_len = 4096
embedding_dim = 512
num_heads = 8
n_down_layers = 4
n_mid_layers = 4
n_up_layers = 4
attention_window = 64
downsample_rate_target = 1 / 4
policy_window = 8
policy_scale = 16.0
policy_softcap = 5.0  # ours: the paper does not give it, nor the next two
weight_decay = 0.01
grad_clip = 1.0
num_draws = 1
early_exit = True
gamma = 0.99
lambda_pi = 1e-2
lambda_target = 1e-2
lambda_early = 1e-1
learning_rate = 3e-3
policy_learning_rate = 3e-3
effective_batch_size = 64
batch_size = 16
warmup_bytes = 110_000_000
policy_start_bytes = 0
training_bytes = 1_500_000_000
log_interval = 10
