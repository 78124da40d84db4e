# The paper's 147M model on text (Table 2, left). Data:
#   python prepare.py --dataset=fineweb --max_bytes=6.1e9
#   torchrun --standalone --nproc_per_node=8 train.py config/fineweb_147m.py
data = "data/fineweb"
out_dir = "out-fineweb-147m"
seq_len = 4096
embedding_dim = 768
num_heads = 12
n_down_layers = 4
n_mid_layers = 12
n_up_layers = 4
attention_window = 64
downsample_rate_target = 1 / 5
policy_window = 8
policy_scale = 16.0
policy_start_bytes = 0
gamma = 0.99
lambda_pi = 1e-2
lambda_target = 1e-2
lambda_early = 1e-1
learning_rate = 1.5e-3
effective_batch_size = 128
batch_size = 16
warmup_bytes = 450_000_000
training_bytes = 6_000_000_000
log_interval = 10
